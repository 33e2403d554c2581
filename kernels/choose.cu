// From rows of logits to the target's tokens, bit for bit Sampler::choose in src/sampling/sampler.rs.
//
// The grid is [blocks of a row, rows]. A row's blocks share its columns and raise its key to their best. Where a
// threshold has to be found, which takes the whole row, one block works alone.
#include "filters.cuh"

namespace ev {

/// A row of the target's logits; its numbers are the tokens.
template <class Logit>
struct LogitSource {
  const EvChoose& a;
  const EvChooseRow& row;

  EV_DEVICE const uint32_t* words(uint32_t at) const { return reinterpret_cast<const uint32_t*>(a.rows) + at; }
  EV_DEVICE const EvTokenCount* path() const { return reinterpret_cast<const EvTokenCount*>(words(row.path)); }
  EV_DEVICE uint32_t index_of(uint32_t token) const { return token; }

  using Stored = typename Logit::Stored;
  EV_DEVICE const Stored* row_logits() const {
    return reinterpret_cast<const Stored*>(a.logits) + size_t(blockIdx.y) * a.columns;
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

  EV_DEVICE uint32_t allowed(uint32_t unit) const {
    const uint32_t at = row.mask + unit / 4 - a.first_token / 32;
    return row.mask == 0 ? 0xFF : *words(at) >> (unit % 4 * 8);
  }

  EV_DEVICE float* stored(uint32_t unit) const {
    const uint32_t first = a.first_token / 8, num_units = (a.first_token + a.columns + 7) / 8 - first;
    return reinterpret_cast<float*>(a.z) + (size_t(row.workspace) * num_units + (unit - first)) * 8;
  }
};

/// One block's part of a row.
template <class Logit>
struct ChooseBlock : RowFilter<LogitSource<Logit>> {
  using Filter = RowFilter<LogitSource<Logit>>;
  using Filter::source, Filter::row, Filter::shared, Filter::begin, Filter::end, Filter::best, Filter::finished,
      Filter::has_edits, Filter::has_filters, Filter::list, Filter::load_stored, Filter::logits, Filter::scaled,
      Filter::store_all, Filter::stored;
  const EvChoose& a;

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
    const auto own_logit = [&] { return Logit::one(source.row_logits()[token - a.first_token]); };
    const float z = is_stored ? stored(token / 8)[token % 8] : scaled(own_logit());
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
  const LogitSource<Logit> source{a, row};
  ChooseBlock<Logit> block{{source, row, shared, first, end}, a};
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
