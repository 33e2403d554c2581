// Linear layers for 1 to 64 rows: y = x W^T. The weights stream once from memory through a pipeline in shared
// memory; their time is the call's.
//
// The grid is [tiles of outputs, slices of the inputs]. Weights are the 16-row operand of the tensor cores, rows of x
// the 8-column one, so that few rows waste nothing. Both planes of x are multiplied into one sum, high then low. A
// warp has every fourth 16 inputs of the slice; the warps' sums are added in their order, and the slices' by whoever
// reads them. None of that depends on the number of rows, so neither do a row's bits.
#include "linear.cuh"

namespace ev {

constexpr uint32_t kLinearThreads = 128;
constexpr uint32_t kLinearWarps = 4;
constexpr uint32_t kTileOutputs = 64;
constexpr uint32_t kTiles = kTileOutputs / 16;
constexpr uint32_t kChunkPacks = EV_LINEAR_CHUNK / 8;
static_assert(EV_LINEAR_CHUNK == 16 * kLinearWarps, "each warp has 16 inputs of a chunk");

/// One block's tile of outputs and slice of inputs, for up to 8 * RowTiles rows.
template <class Element, uint32_t RowTiles>
struct LinearBlock {
  static constexpr uint32_t kRows = 8 * RowTiles;
  /// Together at most 48 KiB, so that two blocks fit on a multiprocessor.
  static constexpr uint32_t kStages = RowTiles <= 2 ? 4 : RowTiles == 4 ? 3 : 2;
  static constexpr uint32_t kStagePacks = (kTileOutputs + 2 * kRows) * kChunkPacks;
  /// Rows of either operand that one copy of each thread covers.
  static constexpr uint32_t kCopyRows = kLinearThreads / kChunkPacks;
  /// Of a row of sums: so that a warp's stores hit all banks.
  static constexpr uint32_t kSumStride = kTileOutputs + 4;

  const EvLinear& a;
  Pack* const stages;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  /// Of this thread's copies: the row within those of a copy, and the pack of a chunk.
  const uint32_t row = threadIdx.x / kChunkPacks, pack = threadIdx.x % kChunkPacks;
  const uint32_t row_packs = a.inputs / 8;
  const uint32_t first_output = blockIdx.x * kTileOutputs;
  const uint32_t first_chunk = blockIdx.y * a.slice_chunks;
  /// Rows of the planes that this thread copies, and which of them there are.
  const Pack* inputs[2 * kRows / kCopyRows];
  uint32_t has_inputs = 0;
  float sums[RowTiles][kTiles][4] = {};

  EV_DEVICE LinearBlock(const EvLinear& arguments, Pack* memory) : a(arguments), stages(memory) {
#pragma unroll
    for (uint32_t i = 0; i < 2 * kRows / kCopyRows; i++) {
      const uint32_t place = row + i * kCopyRows, x_row = place % kRows;
      const uint64_t plane = place < kRows ? a.high : a.low;
      const bool exists = plane != 0 && x_row < a.rows;
      inputs[i] = reinterpret_cast<const Pack*>(plane) + (exists ? plane_row(x_row) * row_packs : 0);
      has_inputs |= uint32_t(exists) << i;
    }
  }

  EV_DEVICE size_t plane_row(uint32_t x_row) const {
    const uint32_t* const index = reinterpret_cast<const uint32_t*>(a.row_index);
    return index == nullptr ? x_row : index[x_row];
  }

  /// Where a stage has a pack: a column of packs is spread over all banks.
  static EV_DEVICE uint32_t place(uint32_t row, uint32_t pack) { return row * kChunkPacks + (pack ^ row % 8); }

  /// Starts the copies of a chunk. What there is not, of outputs, inputs or rows, is zero.
  EV_DEVICE void load(uint32_t chunk) const {
    Pack* const stage = stages + chunk % kStages * kStagePacks;
    const uint32_t at = (first_chunk + chunk) * kChunkPacks + pack;  // in a row
    const bool has_pack = at < row_packs;
    const Pack* const weights = reinterpret_cast<const Pack*>(a.weights) + at;
#pragma unroll
    for (uint32_t i = 0; i < kTileOutputs / kCopyRows; i++) {
      const uint32_t output = first_output + row + i * kCopyRows;
      copy_async(&stage[place(row + i * kCopyRows, pack)], weights + size_t(output) * row_packs,
                 has_pack && output < a.outputs);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2 * kRows / kCopyRows; i++) {
      copy_async(&stage[place(kTileOutputs + row + i * kCopyRows, pack)], inputs[i] + at,
                 has_pack && (has_inputs >> i & 1));
    }
  }

  /// Adds this warp's part of a chunk to its sums.
  EV_DEVICE void multiply(uint32_t chunk) {
    const Pack* const stage = stages + chunk % kStages * kStagePacks;
    uint32_t weights[kTiles][4], x[RowTiles][4];
    const uint32_t x_row = kTileOutputs + lane / 16 * kRows + lane % 8;  // all of high, then all of low
    load_operands(weights, {&stage[place(lane % 16, 2 * warp + lane / 16)], 16 * kChunkPacks}, x,
                  {&stage[place(x_row, 2 * warp + lane / 8 % 2)], 8 * kChunkPacks});
#pragma unroll
    for (uint32_t i = 0; i < RowTiles; i++) {
      if (8 * i >= a.rows) break;
      if (a.low != 0) {
        Element::template multiply_add<2>(sums[i], weights, x[i]);
      } else {
        Element::template multiply_add<1>(sums[i], weights, x[i]);
      }
    }
  }

  /// Adds the warps' sums and writes the tile.
  EV_DEVICE void store() {
    float* const shared = reinterpret_cast<float*>(stages);  // [kLinearWarps][8][kSumStride]
#pragma unroll
    for (uint32_t i = 0; i < RowTiles; i++) {
      if (8 * i >= a.rows) break;
      __syncthreads();  // what was there has been read
      float* const own = shared + (8 * warp + lane % 4 * 2) * kSumStride + lane / 4;
#pragma unroll
      for (uint32_t tile = 0; tile < kTiles; tile++) {
        own[16 * tile] = sums[i][tile][0];
        own[16 * tile + kSumStride] = sums[i][tile][1];
        own[16 * tile + 8] = sums[i][tile][2];
        own[16 * tile + 8 + kSumStride] = sums[i][tile][3];
      }
      __syncthreads();  // all sums are there
      const uint32_t column = threadIdx.x % 16 * 4;
      const float* const first = shared + threadIdx.x / 16 * kSumStride + column;
      float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
      for (uint32_t other = 1; other < kLinearWarps; other++) {
        const float4 v = *reinterpret_cast<const float4*>(first + other * 8 * kSumStride);
        sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
      }
      store(8 * i + threadIdx.x / 16, first_output + column, sum);
    }
  }

  EV_DEVICE void store(uint32_t x_row, uint32_t output, float4 sum) const {
    if (x_row >= a.rows || output >= a.outputs) return;
    float* const to =
        reinterpret_cast<float*>(a.partials) + (size_t(blockIdx.y) * EV_LINEAR_MAX_ROWS + x_row) * a.outputs + output;
    if (a.outputs % 4 == 0) {
      *reinterpret_cast<float4*>(to) = sum;
      return;
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      if (output + i < a.outputs) to[i] = v[i];
    }
  }

  EV_DEVICE void run() {
    const uint32_t rest = (row_packs + kChunkPacks - 1) / kChunkPacks - first_chunk;
    const uint32_t chunks = rest < a.slice_chunks ? rest : a.slice_chunks;
    // A group of copies for each chunk, also for those that there are not: so the oldest is always so many ago.
#pragma unroll
    for (uint32_t chunk = 0; chunk < kStages - 1; chunk++) {
      if (chunk < chunks) load(chunk);
      commit_copies();
    }
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < chunks; chunk++) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the chunk is there, and the one before it has been read
      if (chunk + kStages - 1 < chunks) load(chunk + kStages - 1);
      commit_copies();
      multiply(chunk);
    }
    store();
  }
};

template <class Element, uint32_t RowTiles>
EV_DEVICE void linear(const EvLinear& a) {
  EV_DYNAMIC_SHARED(memory);  // kStages * kStagePacks packs
  LinearBlock<Element, RowTiles> block(a, reinterpret_cast<Pack*>(memory));
  block.run();
}

/// A thread for each pack.
template <class Element>
EV_DEVICE void split_all(const EvSplit& a) {
  const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= a.packs) return;
  const Pack* const values = reinterpret_cast<const Pack*>(a.values);
  const SplitPack pack = split<Element>(Floats::from_bits(values[2 * i], values[2 * i + 1]));
  reinterpret_cast<Pack*>(a.high)[i] = pack.high;
  reinterpret_cast<Pack*>(a.low)[i] = pack.low;
}

}  // namespace ev

#define EV_DEFINE_LINEAR(suffix, Element, row_tiles)                \
  extern "C" __global__ void __launch_bounds__(ev::kLinearThreads, 2) \
      ev_linear_##suffix(const __grid_constant__ EvLinear a) {      \
    ev::linear<Element, row_tiles>(a);                              \
  }                                                                 \
  EV_KERNEL(ev_linear_##suffix)

EV_DEFINE_LINEAR(bf16_r8, ev::Bf16, 1)
EV_DEFINE_LINEAR(bf16_r16, ev::Bf16, 2)
EV_DEFINE_LINEAR(bf16_r32, ev::Bf16, 4)
EV_DEFINE_LINEAR(bf16_r64, ev::Bf16, 8)
EV_DEFINE_LINEAR(f16_r8, ev::F16, 1)
EV_DEFINE_LINEAR(f16_r16, ev::F16, 2)
EV_DEFINE_LINEAR(f16_r32, ev::F16, 4)
EV_DEFINE_LINEAR(f16_r64, ev::F16, 8)

#define EV_DEFINE_SPLIT(suffix, Element)                                                        \
  extern "C" __global__ void ev_split_##suffix(const __grid_constant__ EvSplit a) {             \
    ev::split_all<Element>(a);                                                                  \
  }                                                                                             \
  EV_KERNEL(ev_split_##suffix)

EV_DEFINE_SPLIT(bf16, ev::Bf16)
EV_DEFINE_SPLIT(f16, ev::F16)

// The grid is [blocks of a row, rows].
extern "C" __global__ void ev_add_slices_f32(const __grid_constant__ EvAddSlices a) {
  const uint32_t output = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (output >= a.outputs) return;
  const float sum = ev::slice_sum(reinterpret_cast<const float*>(a.partials), a.slices, a.outputs, row, output);
  reinterpret_cast<float*>(a.sums)[size_t(row) * a.outputs + output] = sum;
}
EV_KERNEL(ev_add_slices_f32)
