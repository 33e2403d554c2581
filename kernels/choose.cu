// From rows of logits to the target's tokens, bit for bit Sampler::choose in src/sampling/sampler.rs.
//
// The grid is [blocks of a row, rows]. A row's blocks share its columns and raise its key to their best. Where a
// threshold has to be found, which takes the whole row, one block works alone. A thread has the same units of
// eight columns in every pass, so its workspace needs barriers only around what others write there.
#include "row.cuh"
#include "sampling.cuh"

namespace ev {

constexpr uint32_t kMaxChooseThreads = 512;
constexpr uint32_t kMaxListed = 2048;
constexpr uint32_t kDigits = 1 << 11;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct ChooseShared {
  // Weights by digit of z, 2^32 * high + low: there is no addition of 64 bits in shared memory.
  uint32_t low[kDigits];
  uint32_t high[kDigits];
  uint32_t listed[kMaxListed];
  uint64_t of_warps[kMaxChooseThreads / 32];
  uint64_t wanted;
  uint32_t digit;
  uint32_t num_listed;  // with those for whom there was no room
  uint32_t sure;  // ordered bits of a score that some token reaches
};

/// Eight logits as stored: the type, and how they are loaded from an address that is a multiple of 16, or singly.
template <class Half>
struct Halves {
  using Stored = uint16_t;
  static EV_DEVICE Floats eight(const Stored* from) {
    return Floats::unpack<Half>(*reinterpret_cast<const Pack*>(from));
  }
  static EV_DEVICE float one(Stored v) { return Half::unpack(v).x; }
};

struct Singles {
  using Stored = float;
  static EV_DEVICE Floats eight(const Stored* from) {
    const Pack* const packs = reinterpret_cast<const Pack*>(from);
    return Floats::from_bits(packs[0], packs[1]);
  }
  static EV_DEVICE float one(Stored v) { return v; }
};

/// `fold` of all threads' values. A barrier.
template <class Fold>
EV_DEVICE uint64_t block_fold(uint64_t v, ChooseShared& shared, Fold fold) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) v = fold(v, __shfl_xor_sync(kAllLanes, v, distance));
  __syncthreads();  // the last fold has been read
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = shared.of_warps[0];
#pragma unroll 1
  for (uint32_t warp = 1; warp < blockDim.x / 32; warp++) v = fold(v, shared.of_warps[warp]);
  return v;
}

EV_DEVICE uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/// One block's part of a row.
template <class Logit>
struct ChooseBlock {
  const EvChoose& a;
  const EvChooseRow& row;
  ChooseShared& shared;
  uint32_t begin, end;  // units: tokens from 8 * begin to 8 * end
  uint64_t best = 0;    // this thread's key

  EV_DEVICE bool has_edits() const { return (row.num_text | row.num_path | row.num_biases) != 0; }
  EV_DEVICE bool has_filters() const { return row.top_k != 0 || row.top_p < 1.0f || row.min_p > 0.0f; }

  EV_DEVICE const uint32_t* words(uint32_t at) const { return reinterpret_cast<const uint32_t*>(a.rows) + at; }

  using Stored = typename Logit::Stored;
  EV_DEVICE const Stored* row_logits() const {
    return reinterpret_cast<const Stored*>(a.logits) + size_t(blockIdx.y) * a.columns;
  }

  /// Calls `action(unit)` for this thread's units.
  template <class Action>
  EV_DEVICE void each_unit(Action action) const {
#pragma unroll 1
    for (uint32_t unit = begin + threadIdx.x; unit < end; unit += blockDim.x) action(unit);
  }

  /// A unit's logits as they are; columns that there are not are negative infinity.
  EV_DEVICE Floats load(uint32_t unit) const {
    const uint32_t column = 8 * unit - a.first_token;  // wraps below the first
    if (column < a.columns && column + 7 < a.columns) {
      const Stored* const from = row_logits() + column;
      if (reinterpret_cast<uintptr_t>(from) % 16 == 0) return Logit::eight(from);
    }
    Floats v;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      v.v[i] = column + i < a.columns ? Logit::one(row_logits()[column + i]) : -kInfinity;
    }
    return v;
  }

  /// Takes NaNs for the row's answer, and out.
  EV_DEVICE void take_nans(Floats& v, uint32_t unit, uint32_t score) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < 8; i++) any |= v.v[i] != v.v[i];
    if (!any) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (v.v[i] == v.v[i]) continue;
      best = larger(best, key_of(score, 8 * unit + i));
      v.v[i] = -kInfinity;
    }
  }

  EV_DEVICE Floats logits(uint32_t unit) {
    Floats v = load(unit);
    take_nans(v, unit, kNanLogit);
    return v;
  }

  /// Logit by temperature, finite if the logit is.
  EV_DEVICE float scaled(float logit) const {
    const float z = logit / row.temperature;
    return fabsf(logit) < kInfinity ? fminf(fmaxf(z, -kMaxFloat), kMaxFloat) : z;
  }

  /// From edited logits to what is chosen from: the mask, and the temperature unless it is 0.
  EV_DEVICE Floats finished(Floats v, uint32_t unit) const {
    const uint32_t at = row.mask + unit / 4 - a.first_token / 32;
    const uint32_t allowed = row.mask == 0 ? 0xFF : *words(at) >> (unit % 4 * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!(allowed >> i & 1)) v.v[i] = -kInfinity;
      if (row.temperature != 0.0f) v.v[i] = scaled(v.v[i]);
    }
    return v;
  }

  EV_DEVICE float* stored(uint32_t unit) const {
    const uint32_t first = a.first_token / 8, num_units = (a.first_token + a.columns + 7) / 8 - first;
    return reinterpret_cast<float*>(a.z) + (size_t(row.workspace) * num_units + (unit - first)) * 8;
  }
  EV_DEVICE Floats load_stored(uint32_t unit) const { return Singles::eight(stored(unit)); }
  EV_DEVICE void store(uint32_t unit, const Floats& v) const {
    Pack* const packs = reinterpret_cast<Pack*>(stored(unit));
    packs[0] = v.bits(0);
    packs[1] = v.bits(1);
  }

  /// Where a token's z is stored; null when it is not of this block.
  EV_DEVICE float* stored_token(uint32_t token) const {
    return token / 8 >= begin && token / 8 < end ? stored(token / 8) + token % 8 : nullptr;
  }

  EV_DEVICE void penalise(EvTokenCount entry) const {
    float* const place = stored_token(entry.token);
    if (place == nullptr) return;
    float logit = *place;
    logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    logit -= row.frequency_penalty * float(entry.count);
    logit -= entry.count > 0 ? row.presence_penalty : 0.0f;
    *place = logit;
  }

  /// Penalties, then bias, on what is stored. A barrier.
  EV_DEVICE void edit() const {
    const EvTokenCount* const text = reinterpret_cast<const EvTokenCount*>(words(row.text));
    const EvTokenCount* const path = reinterpret_cast<const EvTokenCount*>(words(row.path));
    const EvTokenBias* const bias = reinterpret_cast<const EvTokenBias*>(words(row.bias));
    __syncthreads();  // all is stored
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < row.num_text; i += blockDim.x) {
      bool is_of_path = false;  // which has it with its whole count
#pragma unroll 1
      for (uint32_t j = 0; j < row.num_path; j++) is_of_path |= path[j].token == text[i].token;
      if (!is_of_path) penalise(text[i]);
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < row.num_path; i += blockDim.x) penalise(path[i]);
    __syncthreads();  // penalties come first
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < row.num_biases; i += blockDim.x) {
      float* const place = stored_token(bias[i].token);
      if (place != nullptr) *place += bias[i].bias;
    }
    __syncthreads();  // all is edited
  }

  /// Stores every z of this block. Gives this thread's largest.
  EV_DEVICE float store_all() {
    float largest = -kInfinity;
#pragma unroll 1
    for (bool is_final = !has_edits();; is_final = true) {
      each_unit([&](uint32_t unit) {
        Floats v = is_final && has_edits() ? load_stored(unit) : logits(unit);
        if (is_final) {
          v = finished(v, unit);
          take_nans(v, unit, kNanAdjusted);
#pragma unroll
          for (int i = 0; i < 8; i++) largest = fmaxf(largest, v.v[i]);
        }
        store(unit, v);
      });
      if (is_final) return largest;
      edit();
    }
  }

  /// Calls `action(z)` for each z of this thread's units, one after another.
  template <class Action>
  EV_DEVICE void each_stored(Action action) const {
    each_unit([&](uint32_t unit) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Pack four = reinterpret_cast<const Pack*>(stored(unit))[half];
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
          action(bits_to_float(four.x));
          four = {four.y, four.z, four.w, four.x};
        }
      }
    });
  }

  /// How near z is to the largest, in 64ths and from the top. Spreads a row over the digits, which the leading
  /// bits of its numbers would not.
  static EV_DEVICE uint32_t nearness(float z, float largest) {
    if (z == largest) return kDigits - 1;
    const float distance = (largest - z) * 64.0f;
    return distance < float(kDigits - 1) ? kDigits - 1 - uint32_t(distance) : 0;
  }

  EV_DEVICE void clear() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kDigits; i += blockDim.x) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
  }

  /// Adds to the weight of a digit. Digit 0 needs none: it is what remains.
  EV_DEVICE void add(uint32_t digit, uint64_t weight) const {
    if (digit == 0) return;
    const uint32_t low = uint32_t(weight);
    uint32_t high = uint32_t(weight >> 32);
    if (low != 0) high += add_shared(&shared.low[digit], low) + low < low;
    if (high != 0) add_shared(&shared.high[digit], high);
  }

  EV_DEVICE uint64_t sum(uint32_t from_top) const {
    const uint32_t digit = kDigits - 1 - from_top;
    return uint64_t(shared.high[digit]) << 32 | shared.low[digit];
  }

  /// The digit where the weights, from the highest digit down, reach `wanted`; and what it has to add. A barrier.
  EV_DEVICE uint32_t find(uint64_t& wanted) const {
    __syncthreads();  // all have added
    const uint32_t share = (kDigits + blockDim.x - 1) / blockDim.x, first = threadIdx.x * share;
    uint64_t own = 0;
#pragma unroll 1
    for (uint32_t i = first; i < first + share && i < kDigits; i++) own += sum(i);
    uint64_t up_to = own;
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, up_to, distance);
      if (threadIdx.x % 32 >= distance) up_to += other;
    }
    if (threadIdx.x % 32 == 31) shared.of_warps[threadIdx.x / 32] = up_to;
    __syncthreads();
#pragma unroll 1
    for (uint32_t warp = 0; warp < threadIdx.x / 32; warp++) up_to += shared.of_warps[warp];
    const bool is_last = threadIdx.x + 1 == blockDim.x;
    if (up_to - own < wanted && (wanted <= up_to || is_last)) {
      uint64_t rest = wanted - (up_to - own);
      uint32_t i = first;
#pragma unroll 1
      for (; i + 1 < kDigits && sum(i) < rest; i++) rest -= sum(i);
      shared.digit = i < kDigits ? kDigits - 1 - i : 0;
      shared.wanted = rest;
    }
    __syncthreads();
    wanted = shared.wanted;
    return shared.digit;
  }

  /// The least z that the filters keep. A barrier.
  EV_DEVICE float threshold(float largest_of_thread) const {
    const float largest =
        from_ordered_bits(uint32_t(block_fold(ordered_bits(largest_of_thread), shared, larger)));
    const uint64_t least = share(kLargestWeight, row.min_p);
    float threshold = -kInfinity;
    const auto kept = [&](float z) {
      const uint64_t own = z >= threshold ? weight(z, largest) : 0;
      return own >= least ? own : 0;
    };
#pragma unroll 1
    for (bool is_top_p = false;; is_top_p = true) {
      if (is_top_p ? row.top_p < 1.0f : row.top_k != 0) {
        threshold = reach(largest, [&](float z) { return is_top_p ? kept(z) : 1; }, is_top_p);
      }
      if (is_top_p) break;
    }
    if (row.min_p == 0.0f || row.top_p < 1.0f) return threshold;
    uint32_t smallest = ordered_bits(largest);
    each_stored([&](float z) {
      if (kept(z) != 0 && ordered_bits(z) < smallest) smallest = ordered_bits(z);
    });
    const auto smaller = [](uint64_t a, uint64_t b) { return a < b ? a : b; };
    return from_ordered_bits(uint32_t(block_fold(smallest, shared, smaller)));
  }

  /// Adds to the list. False when there is no room.
  EV_DEVICE bool list(uint32_t word) const {
    const uint32_t place = add_shared(&shared.num_listed, 1);
    if (place < kMaxListed) shared.listed[place] = word;
    return place < kMaxListed;
  }

  /// The largest z such that tokens with at least this z weigh `top_p` of all, or else `top_k`, in units of
  /// `weight(z)`.
  template <class Weight>
  EV_DEVICE float reach(float largest, Weight weight, bool is_top_p) const {
    clear();
    uint64_t total = 0;
    each_stored([&](float z) {
      const uint64_t own = weight(z);
      total += own;
      add(nearness(z, largest), own);
    });
    total = block_fold(total, shared, [](uint64_t a, uint64_t b) { return a + b; });
    uint64_t wanted = is_top_p ? share(total, row.top_p) : row.top_k;
    const uint32_t near = find(wanted);
    // The tokens that are so near are few, unless the row is odd.
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    each_stored([&](float z) {
      if (nearness(z, largest) == near) list(float_to_bits(z));
    });
    uint32_t prefix = 0;
#pragma unroll 1
    for (uint32_t pass = 0; pass < 3; pass++) {  // 11, 11 and 10 bits
      const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
      clear();
      const auto add_near = [&](float z) {
        const uint32_t key = ordered_bits(z) >> shift;
        if (key >> width == prefix && nearness(z, largest) == near) add(key & ((1u << width) - 1), weight(z));
      };
      if (shared.num_listed <= kMaxListed) {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < shared.num_listed; i += blockDim.x) {
          add_near(bits_to_float(shared.listed[i]));
        }
      } else {
        each_stored(add_near);
      }
      const uint32_t digit = find(wanted);
      prefix = prefix << width | digit;
    }
    return from_ordered_bits(prefix);
  }

  /// The largest z, or z + noise of those with z >= threshold. Noise is worked out only for tokens whose bound
  /// reaches a score that another is sure to have: in most blocks for a few.
  EV_DEVICE void take_best(float threshold, bool is_stored) {
    const bool has_noise = row.temperature != 0.0f;
    if (threadIdx.x == 0) {
      shared.num_listed = 0;
      shared.sure = ordered_bits(-kInfinity);
    }
    __syncthreads();
    float largest = -kInfinity, sure = -kInfinity;
    uint32_t largest_token = 0;
#pragma unroll 1
    for (uint32_t first = begin + threadIdx.x / 32 * 32; first < end; first += blockDim.x) {  // whole warps
      const uint32_t unit = first + threadIdx.x % 32;
      Floats z;
      if (unit < end) {
        z = is_stored ? load_stored(unit) : finished(logits(unit), unit);
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) z.v[i] = -kInfinity;
      }
      if (has_noise) {
        list_candidates(z, unit, threshold, is_stored, sure);
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {  // at equal z the first, which has the lowest id
          if (z.v[i] > largest) largest = z.v[i], largest_token = 8 * unit + i;
        }
      }
    }
    if (largest > -kInfinity) best = larger(best, choice_key(largest, largest_token));
    __syncthreads();  // all candidates are listed
    const uint32_t num = shared.num_listed < kMaxListed ? shared.num_listed : kMaxListed;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < num; i += blockDim.x) {
      take(shared.listed[i], is_stored, from_ordered_bits(shared.sure));
    }
  }

  /// Works out the score of a candidate, unless by now another is sure to be larger.
  EV_DEVICE void take(uint32_t token, bool is_stored, float sure) {
    const float z = is_stored ? stored(token / 8)[token % 8] : scaled(Logit::one(row_logits()[token - a.first_token]));
    const uint32_t bits = uniform_bits_of(row.seed, row.position, token, kNoise);
    if (z + noise_bound(bits) < sure) return;
    best = larger(best, choice_key(z + gumbel(row.seed, row.position, token, bits), token));
  }

  /// Lists the tokens of a unit that may have the largest score. `sure` is what this warp knows of
  /// `shared.sure`.
  EV_DEVICE void list_candidates(const Floats& z, uint32_t unit, float threshold, bool is_stored, float& sure) {
    Floats bound;
    float own_sure = -kInfinity;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint4 group = uniform_bits(row.seed, row.position, 2 * unit + half, kNoise);
      const uint32_t bits[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const float own = z.v[4 * half + i], noise = noise_bound(bits[i]);
        const bool may_win = own >= threshold && own > -kInfinity;
        bound.v[4 * half + i] = may_win ? own + noise : -kInfinity;
        // Rounding keeps order: a score is no less than this sum.
        if (may_win && has_lower_bound(bits[i])) own_sure = fmaxf(own_sure, own + (noise - kNoiseSpan));
      }
    }
    const uint32_t of_warp = __reduce_max_sync(kAllLanes, ordered_bits(own_sure));
    if (from_ordered_bits(of_warp) > sure) {
      uint32_t before = 0;
      if (threadIdx.x % 32 == 0) before = raise_shared(&shared.sure, of_warp);
      before = __shfl_sync(kAllLanes, before, 0);
      sure = from_ordered_bits(before > of_warp ? before : of_warp);
    }
    uint32_t candidates = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      if (bound.v[i] >= sure && bound.v[i] > -kInfinity) candidates |= 1u << i;
    }
#pragma unroll 1
    for (; candidates != 0; candidates &= candidates - 1) {
      const uint32_t token = 8 * unit + __ffs(candidates) - 1;
      if (!list(token)) take(token, is_stored, sure);
    }
  }

  EV_DEVICE void run() {
    const bool is_stored = has_edits() || has_filters();
    float threshold = row.threshold;
    if (is_stored) {
      const float largest = store_all();
      if (has_filters()) threshold = this->threshold(largest);
    }
    take_best(threshold, is_stored);
    best = block_fold(best, shared, larger);
    if (threadIdx.x != 0) return;
    if (best != 0) raise_gpu(reinterpret_cast<uint64_t*>(a.keys) + blockIdx.y, best);
    if (blockIdx.x == 0) reinterpret_cast<float*>(a.thresholds)[blockIdx.y] = threshold;
  }
};

template <class Logit>
EV_DEVICE void choose(const EvChoose& a) {
  EV_SHARED(ChooseShared, shared, );
  const EvChooseRow& row = reinterpret_cast<const EvChooseRow*>(a.rows)[blockIdx.y];
  const uint32_t first = a.first_token / 8, end = (a.first_token + a.columns + 7) / 8;
  ChooseBlock<Logit> block{a, row, shared, first, end};
  if (block.has_filters()) {
    if (blockIdx.x != 0) return;
  } else {
    // Whole warps, so that their loads are of whole lines.
    const uint32_t share = ((end - first + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;
    block.begin = first + blockIdx.x * share;
    if (block.begin >= end) return;
    block.end = block.begin + share < end ? block.begin + share : end;
  }
  block.run();
}

}  // namespace ev

#define EV_DEFINE_CHOOSE(suffix, ...)                                    \
  extern "C" __global__ void __launch_bounds__(ev::kMaxChooseThreads, 2) \
      ev_choose_##suffix(const __grid_constant__ EvChoose a) {           \
    ev::wait_for_predecessors();                                         \
    ev::choose<__VA_ARGS__>(a);                                          \
  }                                                                      \
  EV_KERNEL(ev_choose_##suffix)

EV_DEFINE_CHOOSE(bf16, ev::Halves<ev::Bf16>)
EV_DEFINE_CHOOSE(f16, ev::Halves<ev::F16>)
EV_DEFINE_CHOOSE(f32, ev::Singles)
