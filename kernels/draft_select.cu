// From draft logits to candidates and the next level's rows: src/backend/cpu/head.rs and src/draft/eagle3.rs say
// which. A warp looks through a segment of a row's columns; one block for each request brings its segments together,
// appends to its pool, and picks its next rows. Better is a higher value, then a lower index.
#include "head.cuh"
#include "sampling.cuh"

namespace ev {

constexpr uint32_t kSelectThreads = 256;
constexpr uint32_t kLaneColumns = EV_SEGMENT_COLUMNS / 32;

EV_DEVICE bool has_noise(const EvDraftRequest& request) {
  return request.temperature > 0.0f && request.noise_scale > 0.0f;
}
EV_DEVICE uint64_t warp_larger(uint64_t v) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, v, distance);
    v = other > v ? other : v;
  }
  return v;
}

/// The target's noise at the position of this level's children, of the tokens that can be drafted.
EV_DEVICE void draw_noise(const EvDraft& a) {
  const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  const EvDraftRequest& request = draft_request(a, blockIdx.y);
  if (column >= a.draft_vocab || request.depth < a.level || !has_noise(request)) return;
  const uint32_t token = target_token(a, column), position = request.position + a.level - 1;
  const uint32_t bits = uniform_bits_of(request.seed, position, token, kNoise);
  const float noise = gumbel(request.seed, position, token, bits);
  reinterpret_cast<float*>(a.noise)[size_t(blockIdx.y) * a.draft_vocab + column] = noise;
}

/// What a row's children are ranked by: see `couple` in src/backend/cpu/sample.rs.
struct Coupled {
  const EvDraft& a;
  const EvDraftRequest& request;
  uint32_t r, number;

  /// A logit, or if the request has a temperature, logit by temperature. Negative infinity: not to be drafted.
  EV_DEVICE float logit_or_z(uint32_t column) const {
    if (request.filter != EV_NONE) {
      const float edited = edited_row(a, r)[column];
      return edited >= reinterpret_cast<const float*>(a.thresholds)[r] ? edited : -kInfinity;
    }
    float logit = sum_slices_at(a, r, column);
    if (!is_allowed(a, r, column) && logit == logit) logit = -kInfinity;
    if (request.temperature == 0.0f) return logit;
    const float z = logit / request.temperature;
    return fabsf(logit) < kInfinity ? fminf(fmaxf(z, -kMaxFloat), kMaxFloat) : z;
  }

  EV_DEVICE float value(uint32_t column) const {
    const float z = logit_or_z(column), tau = request.confidence_temperature;
    if (request.temperature == 0.0f) return tau == 1.0f ? z : z / tau;
    float sum = z;
    if (request.noise_scale > 0.0f) {
      const float noise = reinterpret_cast<const float*>(a.noise)[size_t(number) * a.draft_vocab + column];
      sum = z + request.noise_scale * noise;
    }
    return request.temperature / tau * sum;
  }
};

/// Each warp: largest, sum of exp(value - largest), and the best `width` columns of a segment. Grid: [segments by
/// eight, rows].
EV_DEVICE void rank_segments(const EvDraft& a) {
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32;
  const uint32_t segment = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const uint32_t num_segments = (a.draft_vocab + EV_SEGMENT_COLUMNS - 1) / EV_SEGMENT_COLUMNS;
  const EvDraftRow& row = draft_row(a, r);
  if (segment >= num_segments || row.request == EV_NONE) return;
  const EvDraftRequest& request = draft_request(a, row.request);
  const Coupled coupled{a, request, r, row.request};

  // Lane l has columns l, l + 32 and so on.
  const uint32_t first = segment * EV_SEGMENT_COLUMNS + lane;
  float value[kLaneColumns];
  float largest = -kInfinity;
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; i++) {
    value[i] = first + 32 * i < a.draft_vocab ? coupled.value(first + 32 * i) : -kInfinity;
    largest = fmaxf(largest, value[i]);
  }
  largest = warp_max(largest);
  float sum = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; i++) {
    if (value[i] != -kInfinity) sum += exp_of(value[i] - largest);  // NaN and infinity give NaN
  }
  sum = warp_sum(sum);
  const size_t place = size_t(a.first_row + r) * num_segments + segment;
  if (lane == 0) reinterpret_cast<float2*>(a.segment_sums)[place] = make_float2(largest, sum);

  const auto own_best = [&] {
    uint64_t best = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLaneColumns; i++) {
      const uint64_t key = choice_key(value[i], first + 32 * i);  // -0.0 is 0.0
      best = value[i] > -kInfinity && key > best ? key : best;
    }
    return best;
  };
  uint2* const list = reinterpret_cast<uint2*>(a.segment_best) + place * a.width;
  uint64_t own = own_best();
#pragma unroll 1
  for (uint32_t k = 0; k < request.width; k++) {
    const uint64_t best = warp_larger(own);  // 0: no more
    const uint32_t column = ~uint32_t(best);
    if (best != 0 && best == own) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneColumns; i++) value[i] = first + 32 * i == column ? -kInfinity : value[i];
      own = own_best();
    }
    if (lane == 0) {
      list[k] = best == 0 ? make_uint2(0, EV_NONE) : make_uint2(uint32_t(best >> 32), column);
    }
  }
}

struct AdvanceShared {
  uint32_t counts[EV_MAX_DRAFT_WIDTH];  // children of each row
  uint32_t starts[EV_MAX_DRAFT_WIDTH];
};

/// One request's children of this level.
struct Advance {
  const EvDraft& a;
  const EvDraftRequest& request;
  AdvanceShared& shared;
  uint2* lists;  // [width, width]: ordered bits of a score, column; then, in order, that of each candidate, its row

  EV_DEVICE const EvDraftRow& row(uint32_t rank) const {
    return reinterpret_cast<const EvDraftRow*>(a.rows)[blockIdx.x * a.row_width + rank];
  }
  EV_DEVICE uint32_t* pool() const { return reinterpret_cast<uint32_t*>(a.pools) + size_t(blockIdx.x) * a.pool_words; }
  EV_DEVICE EvCandidate* candidates() const { return reinterpret_cast<EvCandidate*>(pool() + 2); }

  /// The best children of a row from those of its segments; by a warp.
  EV_DEVICE void merge(uint32_t rank) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t num_segments = (a.draft_vocab + EV_SEGMENT_COLUMNS - 1) / EV_SEGMENT_COLUMNS;
    const size_t first = (size_t(blockIdx.x) * a.row_width + rank) * num_segments;
    const float2* const sums = reinterpret_cast<const float2*>(a.segment_sums) + first;
    const uint2* const best = reinterpret_cast<const uint2*>(a.segment_best) + first * a.width;
    float largest = -kInfinity;
    for (uint32_t i = lane; i < num_segments; i += 32) largest = fmaxf(largest, sums[i].x);
    largest = warp_max(largest);
    float sum = 0.0f;
    for (uint32_t i = lane; i < num_segments; i += 32) {
      if (sums[i].x != -kInfinity || sums[i].y != 0.0f) sum += sums[i].y * exp_of(sums[i].x - largest);
    }
    sum = warp_sum(sum);
    const float ln_sum = ln_of(sum);
    const float score = candidates()[row(rank).candidate].score;
    uint32_t count = 0;
    // A row with a NaN or an infinite logit, or with none that is possible, has no children.
    if (sum > 0.0f && sum < kInfinity) {
      uint64_t last = ~uint64_t(0);
#pragma unroll 1
      for (; count < request.width; count++) {
        uint64_t own = 0;
#pragma unroll 1
        for (uint32_t i = lane; i < num_segments; i += 32) {
          // Lists descend: the first below the last one taken.
          for (uint32_t k = 0; k < request.width; k++) {
            const uint2 entry = best[i * a.width + k];
            if (entry.y == EV_NONE) break;
            const uint64_t key = key_of(entry.x, entry.y);
            if (key < last) {
              own = key > own ? key : own;
              break;
            }
          }
        }
        last = warp_larger(own);
        if (last == 0) break;
        const float log_prob = (from_ordered_bits(uint32_t(last >> 32)) - largest) - ln_sum;
        if (!(log_prob > -kInfinity)) break;
        if (lane == 0) lists[rank * a.width + count] = make_uint2(ordered_bits(score + log_prob), ~uint32_t(last));
      }
    }
    if (lane == 0) shared.counts[rank] = count;
  }

  EV_DEVICE void run() const {
    const uint32_t num_before = pool()[0], num_draft_rows = pool()[1];
    uint32_t num_rows = 0;
    while (num_rows < a.row_width && row(num_rows).request != EV_NONE) num_rows++;
    for (uint32_t rank = threadIdx.x / 32; rank < num_rows; rank += kSelectThreads / 32) merge(rank);
    __syncthreads();
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < num_rows; rank++) {
      if (threadIdx.x == 0) shared.starts[rank] = count;
      count += shared.counts[rank];
    }
    __syncthreads();
    // Candidate i of this level is child k of row `rank`.
    const auto each = [&](auto action) {
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at < num_rows * request.width; at += kSelectThreads) {
        const uint32_t rank = at / request.width, k = at % request.width;
        if (k < shared.counts[rank]) action(rank, shared.starts[rank] + k, lists[rank * a.width + k]);
      }
    };
    each([&](uint32_t rank, uint32_t i, uint2 child) {
      candidates()[num_before + i] =
          EvCandidate{target_token(a, child.y), row(rank).candidate, from_ordered_bits(child.x)};
    });
    const uint32_t num_next = a.level < request.depth ? (count < request.width ? count : request.width) : 0;
    EvDraftRow* const next = reinterpret_cast<EvDraftRow*>(a.next_rows) + size_t(blockIdx.x) * a.width;
    if (num_next > 0) {
      each([&](uint32_t rank, uint32_t i, uint2 child) {
        uint32_t num_better = 0;
#pragma unroll 1
        for (uint32_t other = 0; other < num_rows; other++) {
          for (uint32_t k = 0; k < shared.counts[other]; k++) {
            const uint32_t score = lists[other * a.width + k].x;
            num_better += score > child.x || (score == child.x && shared.starts[other] + k < i);
          }
        }
        if (num_better >= num_next) return;
        const uint32_t number = num_draft_rows + num_better, kv_row = request.prefix_len + number;
        const EvDraftRow& parent = row(rank);
        EvDraftRow& made = next[num_better];
        made.request = parent.request;
        made.token = target_token(a, child.y);
        made.position = request.prefix_len + a.level - 1;
        const uint32_t* const page_tables = reinterpret_cast<const uint32_t*>(a.page_tables);
        const uint32_t* const pages = page_tables + size_t(request.slot) * a.max_pages;
        made.kv_slot = pages[kv_row / a.page_size] * a.page_size + kv_row % a.page_size;
        made.source = blockIdx.x * a.row_width + rank;
        made.keep = EV_NONE;
        made.candidate = num_before + i;
#pragma unroll
        for (uint32_t word = 0; word < 4; word++) {
          const uint64_t own = number / 64 == word ? uint64_t(1) << (number % 64) : 0;
          made.nodes[word] = parent.nodes[word] | own;
        }
      });
    }
    for (uint32_t rank = num_next + threadIdx.x; rank < a.width; rank += kSelectThreads) next[rank].request = EV_NONE;
    if (threadIdx.x == 0) {
      pool()[0] = num_before + count;
      pool()[1] = num_draft_rows + num_next;
    }
  }
};

EV_DEVICE void advance(const EvDraft& a) {
  EV_DYNAMIC_SHARED(lists);
  EV_SHARED(AdvanceShared, shared, );
  const EvDraftRequest& request = draft_request(a, blockIdx.x);
  const Advance block{a, request, shared, reinterpret_cast<uint2*>(lists)};
  block.run();
}

/// Starts the pools: a root alone.
EV_DEVICE void start_pools(const EvDraft& a) {
  uint32_t* const pool = reinterpret_cast<uint32_t*>(a.pools) + size_t(blockIdx.x) * a.pool_words;
  if (threadIdx.x != 0) return;
  pool[0] = 1;
  pool[1] = 0;
  *reinterpret_cast<EvCandidate*>(pool + 2) = {draft_request(a, blockIdx.x).root, 0, 0.0f};
}

}  // namespace ev

#define EV_DEFINE_SELECT(name, threads, function)                                                            \
  extern "C" __global__ void __launch_bounds__(threads) ev_draft_##name(const __grid_constant__ EvDraft a) { \
    ev::wait_for_predecessors();                                                                             \
    function(a);                                                                                             \
  }                                                                                                          \
  EV_KERNEL(ev_draft_##name)

EV_DEFINE_SELECT(noise, ev::kSelectThreads, ev::draw_noise)
EV_DEFINE_SELECT(rank, ev::kSelectThreads, ev::rank_segments)
EV_DEFINE_SELECT(advance, ev::kSelectThreads, ev::advance)
EV_DEFINE_SELECT(start, 32, ev::start_pools)
