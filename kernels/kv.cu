// What a verify step keeps: KV rows, moved in all planes of a paged cache, and features, gathered for the draft head.
//
// To move rows the grid is [blocks of all planes' chunks, requests]; a warp has one chunk, at most 32 columns, of one
// plane. A thread copies its column of every move of its request, so nothing is shared but what all only read, and
// moves of a request may overlap without a barrier: no source is an earlier move's destination, so that sources may
// be read ahead, and what overwrites the source of an earlier move is stored after that was read, by the same thread.
#include "row.cuh"

namespace ev {

constexpr uint32_t kRowThreads = 128;
constexpr uint32_t kInFlight = 4;  // rows of which a thread has its unit at a time

/// Copies one column, whose units are of the type `Unit`.
template <class Unit>
EV_DEVICE void move_column(const EvKvPlane& plane, uint32_t column, const uint4* moves, uint32_t num_moves) {
  const uint32_t part = column / plane.part_units;
  const uint64_t start =
      plane.address + part * plane.part_stride + (column - part * plane.part_units) * sizeof(Unit);
  const uint64_t page_stride = plane.page_stride, row_stride = plane.row_stride;
  const auto unit = [&](uint32_t page, uint32_t row) {
    return global<Unit>(start + page * page_stride + row * row_stride);
  };
#pragma unroll 1
  for (uint32_t next = 0; next < num_moves; next += kInFlight) {
    uint4 move[kInFlight];  // EvKvMove
    Unit units[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; i++) {
      if (next + i < num_moves) move[i] = moves[next + i];
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; i++) {
      if (next + i < num_moves) units[i] = *unit(move[i].x, move[i].y);
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; i++) {
      if (next + i < num_moves) *unit(move[i].z, move[i].w) = units[i];
    }
  }
}

/// Moves the rows of one request in a few chunks.
EV_DEVICE void commit(const EvKvCommit& a) {
  const uint32_t at = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32;
  if (at >= a.num_chunks) return;
  const EvKvChunk chunk = reinterpret_cast<const EvKvChunk*>(a.chunks)[at];
  const EvKvPlane& plane = reinterpret_cast<const EvKvPlane*>(a.planes)[chunk.plane];
  const uint32_t column = chunk.first_column + threadIdx.x % 32;
  if (column >= plane.columns) return;
  const uint32_t* const starts = reinterpret_cast<const uint32_t*>(a.starts) + blockIdx.y;
  const uint4* const moves = reinterpret_cast<const uint4*>(a.moves) + starts[0];
  const uint32_t num_moves = starts[1] - starts[0];
  if (plane.unit_bytes == 16) {
    move_column<uint4>(plane, column, moves, num_moves);
  } else if (plane.unit_bytes == 4) {
    move_column<uint32_t>(plane, column, moves, num_moves);
  } else {
    move_column<uint8_t>(plane, column, moves, num_moves);
  }
}

/// Copies a row of features to a row of each plane. The grid is [blocks of a row, rows].
template <class Feature, class Element>
EV_DEVICE void gather(const EvGatherFeatures& a) {
  using Stored = typename Feature::Stored;
  const uint2 rows = reinterpret_cast<const uint2*>(a.rows)[blockIdx.y];
  const Stored* const from = reinterpret_cast<const Stored*>(a.features) + uint64_t(rows.x) * a.width;
  const uint64_t to = uint64_t(rows.y) * a.width * 2;  // bytes
  const uint32_t first = blockIdx.x * kRowThreads + threadIdx.x, step = gridDim.x * kRowThreads;
  if (a.width % 8 == 0 && (a.features | a.high | a.low) % 16 == 0) {
#pragma unroll 1
    for (uint32_t at = first; at < a.width / 8; at += step) {
      const SplitPack packs = split<Element>(Feature::eight(from + 8 * at));
      reinterpret_cast<Pack*>(a.high + to)[at] = packs.high;
      reinterpret_cast<Pack*>(a.low + to)[at] = packs.low;
    }
  } else {
#pragma unroll 1
    for (uint32_t at = first; at < a.width / 2; at += step) {
      uint32_t high, low;
      split<Element>(Feature::one(from[2 * at]), Feature::one(from[2 * at + 1]), high, low);
      reinterpret_cast<uint32_t*>(a.high + to)[at] = high;
      reinterpret_cast<uint32_t*>(a.low + to)[at] = low;
    }
  }
}

}  // namespace ev

extern "C" __global__ void __launch_bounds__(ev::kRowThreads) ev_kv_commit(const __grid_constant__ EvKvCommit a) {
  ev::wait_for_predecessors();
  ev::commit(a);
}
EV_KERNEL(ev_kv_commit)

#define EV_DEFINE_GATHER(feature, element, Feature, Element)                                 \
  extern "C" __global__ void __launch_bounds__(ev::kRowThreads)                              \
      ev_gather_features_##feature##_##element(const __grid_constant__ EvGatherFeatures a) { \
    ev::wait_for_predecessors();                                                             \
    ev::gather<ev::Feature, ev::Element>(a);                                                 \
  }                                                                                          \
  EV_KERNEL(ev_gather_features_##feature##_##element)

#define EV_DEFINE_GATHERS(element, Element)                  \
  EV_DEFINE_GATHER(bf16, element, Halves<ev::Bf16>, Element) \
  EV_DEFINE_GATHER(f16, element, Halves<ev::F16>, Element)   \
  EV_DEFINE_GATHER(f32, element, Singles, Element)

EV_DEFINE_GATHERS(bf16, Bf16)
EV_DEFINE_GATHERS(f16, F16)
