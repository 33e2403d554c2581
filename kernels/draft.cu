// The EAGLE-3 layer around its linear layers: src/backend/cpu/head.rs is what it does, row by row. In f32, but for
// the inputs of linear layers, which are two halves each.
#include "head.cuh"

namespace ev {

constexpr uint32_t kNormThreads = 256;  // a warp for each column group

/// A row on its way through a norm, by one block. Its values are read twice.
struct NormRow {
  const EvDraft& a;
  float (&sums)[kGroups][kMaxRuns];
  Lanes lanes;

  EV_DEVICE NormRow(const EvDraft& a, float (&sums)[kGroups][kMaxRuns]) : a(a), sums(sums), lanes(a.hidden, 1) {}

  EV_DEVICE uint32_t column(uint32_t pack) const { return (lanes.group * lanes.group_packs + pack) * 8; }

  /// 1 / sqrt(mean square + epsilon) of `load(column)`. A barrier.
  template <class Load>
  EV_DEVICE float scale(Load load) const {
    __syncthreads();  // the last sums have been read
    lanes.each_run([&](uint32_t run, uint32_t pack, bool exists) {
      const float sum = warp_sum(exists ? load(column(pack)).square_sum() : 0.0f);
      if (lanes.lane == 0) sums[lanes.group][run] = sum;
    });
    __syncthreads();
    return 1.0f / __fsqrt_rn(lanes.total(sums) / float(a.hidden) + a.epsilon);
  }

  /// Writes `load(column) * scale * weight` as halves, from column `start` of row `row`, of `width` columns, on.
  template <class Half, class Load>
  EV_DEVICE void write(Load load, float scale, uint64_t weight, uint32_t row, uint32_t width, uint32_t start) const {
    lanes.each_pack([&](uint32_t pack) {
      const uint32_t at = column(pack);
      const Floats x = load(at), w = load_floats(weight, at);
      Floats y;
#pragma unroll
      for (int i = 0; i < 8; i++) y.v[i] = x.v[i] * scale * w.v[i];
      store_halves<Half>(a, size_t(row) * width + start + at, y);
    });
  }
};

/// Eight elements of a token's embedding.
EV_DEVICE Floats load_embedding(const EvDraft& a, uint32_t token, uint32_t column) {
  const size_t at = size_t(token) * a.hidden + column;
  if (a.embedding_format == EV_F32) return load_floats(a.embedding, at);
  const Pack pack = reinterpret_cast<const Pack*>(a.embedding)[at / 8];
  return a.embedding_format == EV_BF16 ? Floats::unpack<Bf16>(pack) : Floats::unpack<F16>(pack);
}

/// [norm(embedding), norm(feature)] of each row. A pair's feature is the sum of `partials`; a draft's is its
/// parent's output.
template <class Half, bool IsPair>
EV_DEVICE void embed(const EvDraft& a) {
  EV_SHARED(float, sums, [kGroups][kMaxRuns]);
  const uint32_t r = blockIdx.x;
  const EvDraftRow& row = draft_row(a, r);
  if (row.request == EV_NONE) return;
  const NormRow norm(a, sums);
  const auto token = [&](uint32_t column) { return load_embedding(a, row.token, column); };
  norm.write<Half>(token, norm.scale(token), a.token_norm_weight, r, 2 * a.hidden, 0);
  const auto feature = [&](uint32_t column) {
    if (IsPair) return load_floats(a.hidden_rows, size_t(r) * a.hidden + column);
    return load_floats(a.sources, size_t(row.source) * a.hidden + column);
  };
  if (IsPair) {
    norm.lanes.each_pack([&](uint32_t pack) {
      const uint32_t column = norm.column(pack);
      const Floats sum = sum_slices(a, r, column);
      store_floats(a.hidden_rows, size_t(r) * a.hidden + column, sum);
      if (row.keep != EV_NONE) store_floats(a.sources, size_t(row.keep) * a.hidden + column, sum);
    });
  }
  norm.write<Half>(feature, norm.scale(feature), a.norm_weight, r, 2 * a.hidden, a.hidden);
}

/// Turns keys and queries to their positions, and writes keys and values to their pages. `IsPair`: there are no
/// queries.
template <bool IsPair>
EV_DEVICE void turn(const EvDraft& a) {
  const uint32_t r = blockIdx.x;
  const EvDraftRow& row = draft_row(a, r);
  if (row.request == EV_NONE) return;
  const uint32_t half = a.head_dim / 2, query_heads = IsPair ? 0 : a.heads;
  const float* const cosines = reinterpret_cast<const float*>(a.rope) + size_t(row.position) * a.head_dim;
  const size_t kv_row = size_t(row.kv_slot) * a.kv_heads * a.head_dim;
  const bool has_place = row.kv_slot != EV_NONE;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < (query_heads + 2 * a.kv_heads) * half; i += blockDim.x) {
    const uint32_t head = i / half, d = i % half, first = head * a.head_dim + d;
    const float x = sum_slices_at(a, r, first), y = sum_slices_at(a, r, first + half);
    if (head >= query_heads + a.kv_heads) {
      if (!has_place) continue;
      const uint32_t kv_head = head - query_heads - a.kv_heads;
      float* const value = reinterpret_cast<float*>(a.values) + kv_row + kv_head * a.head_dim + d;
      value[0] = x;
      value[half] = y;
      continue;
    }
    const float cosine = cosines[d], sine = cosines[half + d];
    float* to = reinterpret_cast<float*>(a.query) + (size_t(r) * a.heads + head) * a.head_dim + d;
    if (head >= query_heads) {
      if (!has_place) continue;
      to = reinterpret_cast<float*>(a.keys) + kv_row + (head - query_heads) * a.head_dim + d;
    }
    to[0] = x * cosine - y * sine;
    to[half] = y * cosine + x * sine;
  }
}

/// After attention (`IsLast` false) and after the MLP: adds the sum of `partials` to the residual, and normalises.
/// The residual after attention is kept in `hidden_rows`, that after the MLP is the layer's output.
template <class Half, bool IsLast>
EV_DEVICE void add_norm(const EvDraft& a) {
  EV_SHARED(float, sums, [kGroups][kMaxRuns]);
  const uint32_t r = blockIdx.x;
  const EvDraftRow& row = draft_row(a, r);
  if (row.request == EV_NONE) return;
  const NormRow norm(a, sums);
  const uint64_t from = IsLast ? a.hidden_rows : a.sources, to = IsLast ? a.outputs : a.hidden_rows;
  const size_t from_row = size_t(IsLast ? r : row.source) * a.hidden;
  const size_t to_row = size_t(IsLast ? a.first_row + r : r) * a.hidden;
  norm.lanes.each_pack([&](uint32_t pack) {
    const uint32_t column = norm.column(pack);
    store_floats(to, to_row + column, load_floats(from, from_row + column) + sum_slices(a, r, column));
  });
  const auto h = [&](uint32_t column) { return load_floats(to, to_row + column); };
  norm.write<Half>(h, norm.scale(h), a.norm_weight, r, a.hidden, 0);
}

/// silu(gate) * up, of the stacked projections [gate, up].
template <class Half>
EV_DEVICE void activate(const EvDraft& a) {
  const uint32_t r = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (column >= a.intermediate || draft_row(a, r).request == EV_NONE) return;
  const Floats gate = sum_slices(a, r, column), up = sum_slices(a, r, a.intermediate + column);
  Floats y;
#pragma unroll
  for (int i = 0; i < 8; i++) y.v[i] = gate.v[i] / (1.0f + exp_of(-gate.v[i])) * up.v[i];
  store_halves<Half>(a, size_t(r) * a.intermediate + column, y);
}

}  // namespace ev

#define EV_DEFINE_DRAFT(name, threads, ...)                                                                  \
  extern "C" __global__ void __launch_bounds__(threads) ev_draft_##name(const __grid_constant__ EvDraft a) { \
    ev::wait_for_predecessors();                                                                             \
    __VA_ARGS__(a);                                                                                          \
  }                                                                                                          \
  EV_KERNEL(ev_draft_##name)

#define EV_DEFINE_DRAFT_HALVES(suffix, Half)                                          \
  EV_DEFINE_DRAFT(embed_pairs_##suffix, ev::kNormThreads, ev::embed<ev::Half, true>)  \
  EV_DEFINE_DRAFT(embed_##suffix, ev::kNormThreads, ev::embed<ev::Half, false>)       \
  EV_DEFINE_DRAFT(add_norm_##suffix, ev::kNormThreads, ev::add_norm<ev::Half, false>) \
  EV_DEFINE_DRAFT(finish_##suffix, ev::kNormThreads, ev::add_norm<ev::Half, true>)    \
  EV_DEFINE_DRAFT(activate_##suffix, 256, ev::activate<ev::Half>)

EV_DEFINE_DRAFT_HALVES(bf16, Bf16)
EV_DEFINE_DRAFT_HALVES(f16, F16)
EV_DEFINE_DRAFT(turn_pairs, 256, ev::turn<true>)
EV_DEFINE_DRAFT(turn, 256, ev::turn<false>)

/// Takes over the pages that requests have got.
extern "C" __global__ void __launch_bounds__(256) ev_draft_pages(const __grid_constant__ EvDraft a) {
  ev::wait_for_predecessors();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.num_updates) return;
  const EvPageUpdate update = reinterpret_cast<const EvPageUpdate*>(a.updates)[i];
  reinterpret_cast<uint32_t*>(a.page_tables)[size_t(update.slot) * a.max_pages + update.index] = update.page;
}
EV_KERNEL(ev_draft_pages)
