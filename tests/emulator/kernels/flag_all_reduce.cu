// A small one-shot all-reduce with flags, pushing or pulling: the subject on which the emulator shows that it
// passes a right kernel and catches each fault of mutants.rs.
#include "emulator_device.h"

struct FlagAllReduce {
  const float* input;
  float* output;
  float* exchange[8];  // of each rank: [buffer 2][source rank][element]
  uint32_t* flags[8];  // of each rank: [source rank][block]
  uint32_t* epochs;    // [block], own
  int rank, num_ranks, num_elements;
};

static void publish(uint32_t* flag, uint32_t value) { emu::store(flag, value, emu::REL, emu::SYS); }

static void wait_for(const uint32_t* flag, uint32_t wanted) {
  while (int32_t(emu::load(flag, emu::ACQ, emu::SYS) - wanted) < 0) {
  }
}

// Thread r tells rank r that this block has come to `value`, and waits for rank r's block.
static void meet(const FlagAllReduce& a, uint32_t value) {
  __syncthreads();  // before publishing
  const int peer = int(threadIdx.x);
  if (peer < a.num_ranks) {
    publish(a.flags[peer] + unsigned(a.rank) * gridDim.x + blockIdx.x, value);
    wait_for(a.flags[a.rank] + unsigned(peer) * gridDim.x + blockIdx.x, value);
  }
  __syncthreads();  // after waiting
}

static float* buffer_of(const FlagAllReduce& a, int rank, uint32_t epoch, int source) {
  const uint32_t buffer = epoch % 2;
  return a.exchange[rank] + (int(buffer) * a.num_ranks + source) * a.num_elements;
}

// Two buffers suffice: who is one call ahead of me has had my flag of the call before.
extern "C" __global__ void flag_all_reduce_push(const __grid_constant__ FlagAllReduce a) {
  const uint32_t epoch = a.epochs[blockIdx.x];
  const int first = int(blockIdx.x * blockDim.x + threadIdx.x), stride = int(gridDim.x * blockDim.x);
  for (int i = first; i < a.num_elements; i += stride) {
    for (int r = 0; r < a.num_ranks; r++) emu::weak_store(buffer_of(a, r, epoch, a.rank) + i, a.input[i]);
  }
  meet(a, epoch + 1);
  for (int i = first; i < a.num_elements; i += stride) {
    float sum = 0;
    for (int r = 0; r < a.num_ranks; r++) sum += buffer_of(a, a.rank, epoch, r)[i];
    a.output[i] = sum;
  }
  if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch + 1;
}
KERNEL_ENTRY(flag_all_reduce_push)

// One buffer, which nobody overwrites before everybody has read it.
extern "C" __global__ void flag_all_reduce_pull(const __grid_constant__ FlagAllReduce a) {
  const uint32_t epoch = a.epochs[blockIdx.x];
  const int first = int(blockIdx.x * blockDim.x + threadIdx.x), stride = int(gridDim.x * blockDim.x);
  for (int i = first; i < a.num_elements; i += stride) emu::weak_store(a.exchange[a.rank] + i, a.input[i]);
  meet(a, 2 * epoch + 1);
  for (int i = first; i < a.num_elements; i += stride) {
    float sum = 0;
    for (int r = 0; r < a.num_ranks; r++) sum += a.exchange[r][i];
    a.output[i] = sum;
  }
  meet(a, 2 * epoch + 2);
  if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch + 1;
}
KERNEL_ENTRY(flag_all_reduce_pull)
