// Filters, penalties and bias on draft logits, as the target applies them to its own: a draft that the target cannot
// take is not made. One block for each row of a request that has any.
#include "filters.cuh"
#include "head.cuh"

namespace ev {

/// A row of draft logits; its numbers are draft tokens, its lists are of the target's.
struct DraftSource {
  const EvDraft& a;
  uint32_t r;

  EV_DEVICE const uint32_t* words(uint32_t at) const { return reinterpret_cast<const uint32_t*>(a.filters) + at; }
  EV_DEVICE EvTokenCount* path() const {
    return reinterpret_cast<EvTokenCount*>(a.paths) + size_t(r) * EV_MAX_DRAFT_DEPTH;
  }

  EV_DEVICE uint32_t index_of(uint32_t token) const {
    uint32_t first = 0, last = a.draft_vocab;  // the draft tokens ascend
#pragma unroll 1
    while (first < last) {
      const uint32_t middle = (first + last) / 2;
      if (target_token(a, middle) < token) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first < a.draft_vocab && target_token(a, first) == token ? first : EV_NONE;
  }

  EV_DEVICE Floats load(uint32_t unit) const {
    Floats v;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      v.v[i] = 8 * unit + i < a.draft_vocab ? sum_slices_at(a, r, 8 * unit + i) : -kInfinity;
    }
    return v;
  }

  EV_DEVICE uint32_t allowed(uint32_t unit) const {
    if (a.masks == 0) return 0xFF;
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      if (8 * unit + i < a.draft_vocab && is_allowed(a, r, 8 * unit + i)) bits |= 1u << i;
    }
    return bits;
  }

  EV_DEVICE float* stored(uint32_t unit) const { return edited_row(a, r) + 8 * unit; }
};

/// Lists the drafts on the way to a row's node, each once, with its number in them and in the output. Returns how
/// many. A barrier.
EV_DEVICE uint32_t list_path(const DraftSource& source, const EvDraftRow& row, const EvChooseRow& filter,
                             uint32_t& length) {
  const EvDraft& a = source.a;
  EvTokenCount* const path = source.path();
  if (threadIdx.x == 0) {
    const uint32_t* const pool = reinterpret_cast<const uint32_t*>(a.pools) + size_t(row.request) * a.pool_words;
    const EvCandidate* const candidates = reinterpret_cast<const EvCandidate*>(pool + 2);
    length = 0;
    for (uint32_t at = row.candidate; at != 0; at = candidates[at].parent) {
      uint32_t i = 0;
      while (i < length && path[i].token != candidates[at].token) i++;
      if (i == length) path[length++] = {candidates[at].token, 0};
      path[i].count++;
    }
  }
  __syncthreads();
  const EvTokenCount* const text = reinterpret_cast<const EvTokenCount*>(source.words(filter.text));
  for (uint32_t i = threadIdx.x; i < filter.num_text; i += blockDim.x) {
    for (uint32_t j = 0; j < length; j++) {
      if (path[j].token != text[i].token) continue;
      path[j].count += text[i].count;  // the text has a token once
    }
  }
  __syncthreads();
  return length;
}

EV_DEVICE void filter(const EvDraft& a) {
  EV_SHARED(ChooseShared, shared, );
  EV_SHARED(uint32_t, path_length, [1]);
  const uint32_t r = blockIdx.x;
  const EvDraftRow& row = draft_row(a, r);
  if (row.request == EV_NONE) return;
  const EvDraftRequest& request = draft_request(a, row.request);
  if (request.filter == EV_NONE) return;
  EvChooseRow own = reinterpret_cast<const EvChooseRow*>(a.filters)[request.filter];
  if (own.top_k >= a.draft_vocab) own.top_k = 0;
  const DraftSource source{a, r};
  own.num_path = own.num_text == 0 ? 0u : list_path(source, row, own, path_length[0]);
  RowFilter<DraftSource> block{source, own, shared, 0, (a.draft_vocab + 7) / 8};
  const float largest = block.store_all();
  float threshold = -kInfinity;
  if (block.has_filters()) threshold = block.threshold(largest);
  const bool has_nan = block_fold(block.best, shared, larger) != 0;
  if (threadIdx.x == 0) reinterpret_cast<float*>(a.thresholds)[r] = has_nan ? bits_to_float(0x7FC00000u) : threshold;
}

}  // namespace ev

extern "C" __global__ void __launch_bounds__(ev::kMaxChooseThreads, 2)
    ev_draft_filter(const __grid_constant__ EvDraft a) {
  ev::wait_for_predecessors();
  ev::filter(a);
}
EV_KERNEL(ev_draft_filter)
