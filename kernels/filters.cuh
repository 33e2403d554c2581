// Penalties, bias, masks, temperature and the filters top-k, top-p and min-p on one row, by one block or several: bit
// for bit Sampler::adjust and Sampler::threshold in src/sampling/sampler.rs.
//
// A row's numbers come in units of eight. A thread has the same units in every pass, so its workspace needs barriers
// only around what others write there.
#pragma once

#include "row.cuh"
#include "sampling.cuh"

namespace ev {

constexpr uint32_t kMaxChooseThreads = 512;
constexpr uint32_t kMaxListed = 2048;
constexpr uint32_t kDigits = 1 << 11;

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

/// One block's part of a row. A `Source` has
///   load(unit): a unit's logits as they are, negative infinity where there is none;
///   allowed(unit): a bit for each, whether it may be chosen;
///   index_of(token): which of the row's numbers a token's is, or more than there are;
///   words(at): of the row's lists; path(): its list of the path;
///   stored(unit): where the unit's numbers may be kept.
template <class Source>
struct RowFilter {
  const Source& source;
  const EvChooseRow& row;
  ChooseShared& shared;
  uint32_t begin, end;  // units
  uint64_t best = 0;    // this thread's key

  EV_DEVICE bool has_edits() const { return (row.num_text | row.num_path | row.num_biases) != 0; }
  EV_DEVICE bool has_filters() const { return row.top_k != 0 || row.top_p < 1.0f || row.min_p > 0.0f; }
  EV_DEVICE const uint32_t* words(uint32_t at) const { return source.words(at); }
  EV_DEVICE float* stored(uint32_t unit) const { return source.stored(unit); }

  /// Calls `action(unit)` for this thread's units.
  template <class Action>
  EV_DEVICE void each_unit(Action action) const {
#pragma unroll 1
    for (uint32_t unit = begin + threadIdx.x; unit < end; unit += blockDim.x) action(unit);
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
    Floats v = source.load(unit);
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
    const uint32_t allowed = source.allowed(unit);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!(allowed >> i & 1)) v.v[i] = -kInfinity;
      if (row.temperature != 0.0f) v.v[i] = scaled(v.v[i]);
    }
    return v;
  }

  EV_DEVICE Floats load_stored(uint32_t unit) const { return Singles::eight(stored(unit)); }
  EV_DEVICE void store(uint32_t unit, const Floats& v) const {
    Pack* const packs = reinterpret_cast<Pack*>(stored(unit));
    packs[0] = v.bits(0);
    packs[1] = v.bits(1);
  }

  /// Where a token's z is stored; null when it is not of this block.
  EV_DEVICE float* stored_token(uint32_t token) const {
    const uint32_t index = source.index_of(token);
    return index / 8 >= begin && index / 8 < end ? stored(index / 8) + index % 8 : nullptr;
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
    const EvTokenCount* const path = source.path();
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
};

}  // namespace ev
