// The transport of kernels/sync.cuh alone: two ranks send each other packs, and keep what arrives as it is.
#include "sync.cuh"

struct ExchangePacks {
  uint64_t slabs[2];
  uint64_t sent;
  uint64_t received;
  uint32_t num_packs;
  uint32_t rank;
};

extern "C" __global__ void exchange_packs(const __grid_constant__ ExchangePacks e) {
  EvAllReduceNorm a = {};
  a.slabs[0] = e.slabs[0];
  a.slabs[1] = e.slabs[1];
  a.rank = e.rank;
  a.wait_limit_ns = 60'000'000'000;
  a.max_blocks = 1;
  a.block_packs = e.num_packs;
  a.packs_offset = 256;
  a.escapes_offset = 256 + 2 * sizeof(ev::Pack) * e.num_packs;
  uint32_t epoch = 0;
  a.epochs = reinterpret_cast<uint64_t>(&epoch);
  ev::Call call(a);
  const uint32_t peer = 1 - e.rank;
  for (uint32_t at = threadIdx.x; at < e.num_packs; at += blockDim.x) {
    call.push(peer, at, reinterpret_cast<const ev::Pack*>(e.sent)[at]);
  }
  for (uint32_t at = threadIdx.x; at < e.num_packs; at += blockDim.x) {
    ev::Pack pack[1];
    call.receive(pack, 1, [&](uint32_t) { return at; }, [&](uint32_t) { return peer; }, EV_PHASE_PARTIALS);
    reinterpret_cast<ev::Pack*>(e.received)[at] = pack[0];
  }
}
KERNEL_ENTRY(exchange_packs)
