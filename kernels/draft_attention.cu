// Attention of the draft head's rows: over the KV rows that all rows of their request see, and over the draft rows
// that each sees alone. fp32 throughout.
//
// The prefix is cut into chunks whose length depends on the prefix alone, and each (chunk, KV head, request) is a
// block's, with an online softmax (Milakov and Gimelshein, 2018); the draft rows are a chunk of their own. A second
// kernel combines the chunks in order. So a row's bits depend neither on which rows share a call, nor on how many.
#include "head.cuh"

namespace ev {

constexpr uint32_t kAttendWarps = 4;
constexpr uint32_t kQueriesOfWarp = 4;
constexpr uint32_t kTileQueries = kAttendWarps * kQueriesOfWarp;
constexpr uint32_t kTileKeys = 32;  // a lane scores one

/// Keys in a chunk of a prefix.
EV_DEVICE uint32_t chunk_keys(uint32_t prefix_len) {
  uint32_t keys = EV_MIN_CHUNK_KEYS;
  while (keys * EV_MAX_CHUNKS < prefix_len) keys *= 2;
  return keys;
}

/// The rows of a request in this pass, and the heads that share a KV head, make its queries. Grid: [tiles of queries
/// of a KV head * KV heads, 1 + chunks, requests of this pass]; chunk 0 is the draft rows.
template <uint32_t HeadDim>
struct Attend {
  static constexpr uint32_t kPacks = HeadDim / 4, kDims = HeadDim / 32;

  const EvDraft& a;
  const EvDraftRequest& request;
  Pack (&keys)[kTileKeys][kPacks + 1];  // an odd number of packs: no two lanes in a bank
  Pack (&values)[kTileKeys][kPacks];
  Pack (&queries)[kTileQueries][kPacks];
  uint32_t first, num_rows;  // the request's rows in this pass
  uint32_t kv_head, first_query;

  EV_DEVICE uint32_t group() const { return a.heads / a.kv_heads; }
  EV_DEVICE bool exists(uint32_t query) const { return first_query + query < num_rows * group(); }
  EV_DEVICE uint32_t row_of(uint32_t query) const { return first + (first_query + query) / group(); }
  EV_DEVICE uint32_t head_of(uint32_t query) const { return kv_head * group() + (first_query + query) % group(); }

  EV_DEVICE void load_queries() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kTileQueries * kPacks; i += blockDim.x) {
      const uint32_t query = i / kPacks, pack = i % kPacks;
      if (!exists(query)) continue;
      const size_t at = (size_t(row_of(query)) * a.heads + head_of(query)) * kPacks + pack;
      queries[query][pack] = reinterpret_cast<const Pack*>(a.query)[at];
    }
  }

  /// Brings KV rows `begin` to `end`, at most a tile, that are in `wanted`. Two barriers.
  EV_DEVICE void load_tile(uint32_t begin, uint32_t end, uint32_t wanted) const {
    __syncthreads();  // the last tile has been read, the queries are there
    const uint32_t* const pages = reinterpret_cast<const uint32_t*>(a.page_tables) + size_t(request.slot) * a.max_pages;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (end - begin) * kPacks; i += blockDim.x) {
      const uint32_t key = i / kPacks, pack = i % kPacks, row = begin + key;
      if (!(wanted >> key & 1)) continue;
      const size_t slot = size_t(pages[row / a.page_size]) * a.page_size + row % a.page_size;
      const size_t at = (slot * a.kv_heads + kv_head) * kPacks + pack;
      keys[key][pack] = reinterpret_cast<const Pack*>(a.keys)[at];
      values[key][pack] = reinterpret_cast<const Pack*>(a.values)[at];
    }
    __syncthreads();
  }

  EV_DEVICE float score(uint32_t query, uint32_t key) const {
    float sum = 0.0f;
#pragma unroll 8
    for (uint32_t pack = 0; pack < kPacks; pack++) {
      const Pack q = queries[query][pack], k = keys[key][pack];
      sum = __fmaf_rn(bits_to_float(q.x), bits_to_float(k.x), sum);
      sum = __fmaf_rn(bits_to_float(q.y), bits_to_float(k.y), sum);
      sum = __fmaf_rn(bits_to_float(q.z), bits_to_float(k.z), sum);
      sum = __fmaf_rn(bits_to_float(q.w), bits_to_float(k.w), sum);
    }
    return sum;
  }

  /// Which of 32 draft rows, from `32 * word` on, a query's row sees.
  EV_DEVICE uint32_t nodes(uint32_t query, uint32_t word) const {
    if (!exists(query)) return 0;
    const EvDraftRow& row = draft_row(a, row_of(query));
    return row.request == EV_NONE ? 0 : uint32_t(row.nodes[word / 2] >> (word % 2 * 32));
  }

  struct Softmax {
    float largest = -__builtin_huge_valf(), sum = 0.0f;
    float output[kDims] = {};
  };

  /// Takes in the tile's keys that are in `seen`, in order.
  EV_DEVICE void add(Softmax& softmax, uint32_t query, uint32_t seen) const {
    const uint32_t lane = threadIdx.x % 32;
    const bool is_seen = seen >> lane & 1;
    const float own = is_seen ? score(query, lane) : -__builtin_huge_valf();
    const float largest = fmaxf(softmax.largest, warp_max(own));
    const float weight = is_seen ? exp_of((own - largest) * a.scale) : 0.0f;
    const float before = softmax.sum > 0.0f ? exp_of((softmax.largest - largest) * a.scale) : 0.0f;
    softmax.largest = largest;
    softmax.sum = softmax.sum * before + warp_sum(weight);
#pragma unroll
    for (uint32_t i = 0; i < kDims; i++) softmax.output[i] *= before;
#pragma unroll 1
    for (; seen != 0; seen &= seen - 1) {
      const uint32_t key = __ffs(seen) - 1;
      const float of_key = __shfl_sync(kAllLanes, weight, key);
      const float* const value = reinterpret_cast<const float*>(values[key]);
#pragma unroll
      for (uint32_t i = 0; i < kDims; i++) {
        softmax.output[i] = __fmaf_rn(of_key, value[32 * i + lane], softmax.output[i]);
      }
    }
  }

  EV_DEVICE void store(const Softmax& softmax, uint32_t query, uint32_t chunk) const {
    const uint32_t lane = threadIdx.x % 32;
    const size_t place = (size_t(chunk) * EV_PASS_ROWS + row_of(query)) * a.heads + head_of(query);
    float* const output = reinterpret_cast<float*>(a.attended) + place * HeadDim;
#pragma unroll
    for (uint32_t i = 0; i < kDims; i++) output[32 * i + lane] = softmax.output[i];
    if (lane == 0) reinterpret_cast<float2*>(a.attended_sums)[place] = make_float2(softmax.largest, softmax.sum);
  }

  EV_DEVICE void run(uint32_t chunk) const {
    load_queries();
    const uint32_t own = threadIdx.x / 32 * kQueriesOfWarp;
    Softmax softmax[kQueriesOfWarp];
    const auto add_tile = [&](auto seen) {
#pragma unroll
      for (uint32_t i = 0; i < kQueriesOfWarp; i++) {
        const uint32_t keys_seen = exists(own + i) ? seen(own + i) : 0;
        if (keys_seen != 0) add(softmax[i], own + i, keys_seen);
      }
    };
    if (chunk == 0) {
#pragma unroll 1
      for (uint32_t word = 0; word < 8; word++) {
        uint32_t wanted = 0;
#pragma unroll 1
        for (uint32_t query = 0; query < kTileQueries; query++) wanted |= nodes(query, word);
        if (wanted == 0) continue;
        const uint32_t begin = request.prefix_len + 32 * word;
        load_tile(begin, begin + 32 - __clz(int(wanted)), wanted);
        add_tile([&](uint32_t query) { return nodes(query, word); });
      }
    } else {
      const uint32_t length = chunk_keys(request.prefix_len), start = (chunk - 1) * length;
      const uint32_t stop = start + length < request.prefix_len ? start + length : request.prefix_len;
#pragma unroll 1
      for (uint32_t begin = start; begin < stop; begin += kTileKeys) {
        const uint32_t end = begin + kTileKeys < stop ? begin + kTileKeys : stop;
        const uint32_t all = 0xFFFFFFFFu >> (kTileKeys - (end - begin));
        load_tile(begin, end, all);
        add_tile([&](uint32_t) { return all; });
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kQueriesOfWarp; i++) {
      if (exists(own + i)) store(softmax[i], own + i, chunk);
    }
  }
};

template <uint32_t HeadDim>
EV_DEVICE void attend(const EvDraft& a) {
  using Block = Attend<HeadDim>;
  EV_SHARED(Pack, keys, [kTileKeys][Block::kPacks + 1]);
  EV_SHARED(Pack, values, [kTileKeys][Block::kPacks]);
  EV_SHARED(Pack, queries, [kTileQueries][Block::kPacks]);
  const uint32_t number = a.first_row / a.row_width + blockIdx.z, chunk = blockIdx.y;
  const EvDraftRequest& request = reinterpret_cast<const EvDraftRequest*>(a.requests)[number];
  if (request.depth < a.level) return;
  if (chunk > 0 && (chunk - 1) * chunk_keys(request.prefix_len) >= request.prefix_len) return;
  // Its rows that this pass has.
  const uint32_t begin = number * a.row_width, end = begin + a.row_width;
  const uint32_t first = begin > a.first_row ? begin - a.first_row : 0;
  const uint32_t last = end - a.first_row < a.num_rows ? end - a.first_row : a.num_rows;
  const uint32_t kv_head = blockIdx.x % a.kv_heads, first_query = blockIdx.x / a.kv_heads * kTileQueries;
  Block block{a, request, keys, values, queries, first, last - first, kv_head, first_query};
  if (block.exists(0)) block.run(chunk);
}

/// Combines the chunks of each row in order, as halves.
template <class Half>
EV_DEVICE void combine(const EvDraft& a) {
  const uint32_t r = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;  // eight dimensions of a head
  const EvDraftRow& row = draft_row(a, r);
  if (i * 8 >= a.heads * a.head_dim || row.request == EV_NONE) return;
  const uint32_t prefix_len = reinterpret_cast<const EvDraftRequest*>(a.requests)[row.request].prefix_len;
  const uint32_t length = chunk_keys(prefix_len), num_chunks = (prefix_len + length - 1) / length;
  const auto place = [&](uint32_t chunk) { return (size_t(chunk) * EV_PASS_ROWS + r) * a.heads + i * 8 / a.head_dim; };
  const auto sums = [&](uint32_t chunk) { return reinterpret_cast<const float2*>(a.attended_sums)[place(chunk)]; };
  // In order of position: the prefix, then the draft rows, chunk 0.
  const auto chunk_at = [&](uint32_t at) { return at < num_chunks ? at + 1 : 0; };
  float largest = sums(0).x;
#pragma unroll 1
  for (uint32_t chunk = 1; chunk <= num_chunks; chunk++) largest = fmaxf(largest, sums(chunk).x);
  float total = 0.0f;
  Floats output = {};
#pragma unroll 1
  for (uint32_t at = 0; at <= num_chunks; at++) {
    const uint32_t chunk = chunk_at(at);
    const float2 own = sums(chunk);
    if (own.y == 0.0f) continue;  // no row of it is seen
    const float weight = exp_of((own.x - largest) * a.scale);
    total = __fmaf_rn(own.y, weight, total);
    const Floats part = load_floats(a.attended, place(chunk) * a.head_dim + i * 8 % a.head_dim);
#pragma unroll
    for (int j = 0; j < 8; j++) output.v[j] = __fmaf_rn(part.v[j], weight, output.v[j]);
  }
#pragma unroll
  for (int j = 0; j < 8; j++) output.v[j] = output.v[j] / total;
  store_halves<Half>(a, size_t(r) * a.heads * a.head_dim + i * 8, output);
}

}  // namespace ev

#define EV_DEFINE_ATTEND(dim)                                         \
  extern "C" __global__ void __launch_bounds__(32 * ev::kAttendWarps) \
      ev_draft_attend_##dim(const __grid_constant__ EvDraft a) {      \
    ev::wait_for_predecessors();                                      \
    ev::attend<dim>(a);                                               \
  }                                                                   \
  EV_KERNEL(ev_draft_attend_##dim)

#define EV_DEFINE_COMBINE(suffix, Half)                                                                            \
  extern "C" __global__ void __launch_bounds__(256) ev_draft_combine_##suffix(const __grid_constant__ EvDraft a) { \
    ev::wait_for_predecessors();                                                                                   \
    ev::combine<ev::Half>(a);                                                                                      \
  }                                                                                                                \
  EV_KERNEL(ev_draft_combine_##suffix)

EV_DEFINE_ATTEND(32)
EV_DEFINE_ATTEND(64)
EV_DEFINE_ATTEND(96)
EV_DEFINE_ATTEND(128)
EV_DEFINE_COMBINE(bf16, Bf16)
EV_DEFINE_COMBINE(f16, F16)
