// One small kernel for each thing that the emulator must report, or must not.
#include "emulator_device.h"

using namespace emu;

struct Check {
  uint32_t *a, *b, *result;
  uint64_t limit_ns;
  int test;
  int role;
};

enum {
  SHARED_RACE,
  SHARED_BARRIER,
  OUT_OF_BOUNDS,
  READ,
  MISALIGNED,
  WIDE_STORE_AND_LOAD,
  WAIT_FOR_ALL_BLOCKS,
  LANE_OUTSIDE_MASK,
  LANES_MISSING,
  BARRIER_KINDS,
  WAIT_FOREVER,
  PUBLISH,
  PUBLISH_GPU,
  PUSH_UNFENCED,
  PUSH_FENCED,
  BOUNDED_WAIT,
  COLLECTIVES,
  STRONG_LOOP,
  PLAIN_LOOP,
  TRAP,
  ATOMIC_WAIT,
  CONVERSIONS,
  COPY,
  COPY_OVER,
  MATRIX_LOAD,
  TILE_MULTIPLY,
  TILE_MULTIPLY_LOOP,
};

// What may be wrong with a pipeline of asynchronous copies; the roles of COPY.
enum { RIGHT, NO_WAIT, ONE_GROUP_TOO_FEW, NO_BARRIER };

static void exchange_neighbours(uint32_t* result, bool has_barrier) {
  KSHARED(uint32_t, values, [1024]);
  const unsigned t = threadIdx.x;
  values[t] = t;
  if (has_barrier) __syncthreads();
  result[t] = values[(t + 1) % blockDim.x];
}

static void wait_for(const uint32_t* flag, uint32_t wanted, int order) {
  while (load(flag, order, SYS) < wanted) {
  }
}

static void push(const Check& c, int store_order, int load_order) {
  if (c.role == 0) {
    weak_store(c.a, 1u);
    store(c.b, 1u, store_order, SYS);
  } else {
    wait_for(c.b, 1, load_order);
    c.result[0] = load(c.a, RLX, SYS);
  }
}

static void publish(const Check& c, int scope) {
  if (c.role == 0) {
    *c.a = 1;
    store(c.b, 1u, REL, scope);
  } else {
    wait_for(c.b, 1, ACQ);
    c.result[0] = *c.a;
  }
}

// What a kernel with a deadline does: data, then an abort word, and now and then the clock.
static void wait_bounded(const Check& c) {
  const uint64_t deadline = emu_clock() + c.limit_ns;
  for (unsigned polls = 1; load(c.a, RLX, SYS) == 0; polls++) {
    if (load(c.b, RLX, SYS) != 0) return;
    if (polls % 100 == 0 && emu_clock() > deadline) {
      store(reinterpret_cast<uint64_t*>(c.result), uint64_t(0xFA017), RLX, SYS);
      store(c.b, 1u, RLX, SYS);
      return;
    }
  }
}

static void collectives(uint32_t* result) {
  const unsigned all = 0xffffffffu, t = threadIdx.x;
  uint32_t sum = t;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(all, sum, offset);
  uint32_t* mine = result + 8 * t;
  mine[0] = sum;
  mine[1] = __shfl_up_sync(all, t, 1);
  mine[2] = __shfl_down_sync(all, t, 2);
  mine[3] = __shfl_sync(all, t, 3, 8);
  mine[4] = __ballot_sync(all, t % 3 == 0);
  mine[5] = __reduce_max_sync(all, t ^ 5);
  mine[6] = uint32_t(__syncthreads_count(t % 2 == 0));
  mine[7] = t < 16 ? uint32_t(__any_sync(0xffffu, t == 3)) : uint32_t(__all_sync(0xffff0000u, t >= 16));
}

// Each thread brings 16 bytes, of which the first 4 * (t % 5) are from `a`, and then four words in a second
// group. It reads what its neighbour brought first.
static void copy_to_neighbours(const Check& c) {
  KSHARED(uint4, first, [64]);
  KSHARED(uint4, second, [64]);
  const unsigned t = threadIdx.x, next = (t + 1) % blockDim.x;
  first[t] = make_uint4(7, 7, 7, 7);
  __syncthreads();
  emu_copy_async(&first[t], c.a + 4 * t, 4 * (t % 5));
  emu_commit_copies();
  emu_copy_async(&second[t], c.a + 4 * t, 16);
  emu_commit_copies();
  if (c.role != NO_WAIT) emu_wait_copies(c.role == ONE_GROUP_TOO_FEW ? 2 : 1);
  if (c.role != NO_BARRIER) __syncthreads();
  reinterpret_cast<uint4*>(c.result)[t] = first[next];
  __syncthreads();
  emu_wait_copies(0);
}

// The second copy goes where a neighbour still reads, unless there is a barrier.
static void copy_over(const Check& c) {
  KSHARED(uint4, values, [64]);
  const unsigned t = threadIdx.x, next = (t + 1) % blockDim.x;
  for (unsigned round = 0; round < 2; round++) {
    emu_copy_async(&values[t], c.a + 4 * t, 16);
    emu_commit_copies();
    emu_wait_copies(0);
    __syncthreads();
    reinterpret_cast<uint4*>(c.result)[t] = values[next];
    if (c.role != NO_BARRIER) __syncthreads();
  }
}

static void load_matrices(const Check& c) {
  KSHARED(uint4, rows, [64]);
  const unsigned t = threadIdx.x;
  for (unsigned i = t; i < 64; i += 32) rows[i ^ 1] = reinterpret_cast<const uint4*>(c.a)[i ^ 1];
  if (c.role != NO_BARRIER) __syncwarp();
  const MatrixLoad both{c.result + 8 * t, &rows[t], 2, 32 * sizeof(uint4)};
  emu_load_matrices(&both, 1);
}

extern "C" __global__ void check(Check c) {
  const unsigned t = threadIdx.x;
  switch (c.test) {
    case SHARED_RACE: exchange_neighbours(c.result, false); break;
    case SHARED_BARRIER: exchange_neighbours(c.result, true); break;
    case OUT_OF_BOUNDS: c.result[0] = c.a[4]; break;
    case READ: c.result[0] = c.a[0]; break;
    case MISALIGNED: load(reinterpret_cast<uint64_t*>(c.a + 1), RLX, SYS); break;
    case WIDE_STORE_AND_LOAD: {
      uint4* wide = reinterpret_cast<uint4*>(c.a);
      if (c.role == 0) {
        store(wide, make_uint4(1, 1, 1, 1), RLX, SYS);
      } else {
        *reinterpret_cast<uint4*>(c.result) = load(wide, RLX, SYS);
      }
      break;
    }
    case WAIT_FOR_ALL_BLOCKS:
      atomicAdd(c.a, 1u);
      wait_for(c.a, gridDim.x, RLX);
      break;
    case LANE_OUTSIDE_MASK: __shfl_sync(0x7fffffffu, t, 0); break;
    case LANES_MISSING:
      if (t != 7) __shfl_sync(0xffffffffu, t, 0);
      break;
    case BARRIER_KINDS:
      if (t < 32) {
        __syncthreads();
      } else {
        __syncthreads_count(1);
      }
      break;
    case WAIT_FOREVER: wait_for(c.a, 1, ACQ); break;
    case PUBLISH: publish(c, SYS); break;
    case PUBLISH_GPU: publish(c, GPU); break;
    case PUSH_UNFENCED: push(c, RLX, RLX); break;
    case PUSH_FENCED: push(c, REL, ACQ); break;
    case BOUNDED_WAIT: wait_bounded(c); break;
    case COLLECTIVES: collectives(c.result); break;
    case STRONG_LOOP:
      for (uint64_t i = 0; i < c.limit_ns; i++) {
        store(c.a + i % 4, uint32_t(i), RLX, SYS);
        c.result[0] += load(c.a + i % 4, RLX, SYS);
      }
      break;
    case PLAIN_LOOP:
      for (uint64_t i = 0; i < c.limit_ns; i++) c.result[i % 8] += c.a[i % 4];
      break;
    case TRAP: __trap();
    case ATOMIC_WAIT:
      if (c.role == 1) atomicExch_system(c.a, 1u);
      while (atomicCAS_system(c.a, 1u, 1u) != 1) {
      }
      break;
    case CONVERSIONS:
      for (unsigned i = t; i < c.limit_ns; i += blockDim.x) {
        const float f = __uint_as_float(c.a[i]);
        uint32_t* mine = c.b + 6 * i;
        mine[0] = float_to_bf16_bits(f);
        mine[1] = float_to_half_bits(f);
        mine[2] = float_to_e4m3_bits(f);
        mine[3] = __float_as_uint(bf16_bits_to_float(uint16_t(mine[0])));
        mine[4] = __float_as_uint(half_bits_to_float(uint16_t(mine[1])));
        mine[5] = __float_as_uint(e4m3_bits_to_float(uint8_t(mine[2])));
      }
      break;
    case COPY: copy_to_neighbours(c); break;
    case COPY_OVER: copy_over(c); break;
    case MATRIX_LOAD: load_matrices(c); break;
    case TILE_MULTIPLY:
      if (t != c.limit_ns) {
        float* const sums = reinterpret_cast<float*>(c.result) + 8 * t;
        emu_multiply_add({sums, c.a + 8 * t, c.b + 4 * t, 2, 2, MatrixFormat(c.role)});
      }
      break;
    case TILE_MULTIPLY_LOOP:
      for (uint64_t i = 0; i < c.limit_ns; i++) {
        float sums[4][4] = {};
        uint32_t tiles[5][4];
        const MatrixLoad loads[2] = {{tiles[0], c.a + 4 * t, 4, 0}, {tiles[4], c.a + 4 * t, 1, 0}};
        emu_load_matrices(loads, 2);
        emu_multiply_add({sums[0], tiles[0], tiles[4], 4, 2, MatrixFormat(c.role)});
        c.result[t] = __float_as_uint(sums[0][0]);
      }
      break;
  }
}
KERNEL_ENTRY(check)
