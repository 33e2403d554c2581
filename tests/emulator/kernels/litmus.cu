// Litmus tests of the memory model. Each role is one block; r[] is what it observed.
#include "emulator_device.h"

using namespace emu;

struct Litmus {
  uint32_t *x, *y;
  uint32_t* r;
  int test;
  int first_role;  // of this launch
};

static void set(uint32_t* p, int order = RLX, int scope = SYS) { store(p, 1u, order, scope); }
static uint32_t get(const uint32_t* p, int order = RLX) { return load(p, order, SYS); }

extern "C" __global__ void litmus(Litmus l) {
  const int role = l.first_role + int(blockIdx.x);
  uint32_t *x = l.x, *y = l.y, *r = l.r;
  switch (l.test) {
    case 0:  // message passing, relaxed
      if (role == 0) {
        set(x);
        set(y);
      } else {
        r[0] = get(y);
        r[1] = get(x);
      }
      break;
    case 1:  // release and acquire
    case 2:  // the release has gpu scope
    case 3:  // the load of the flag is relaxed
      if (role == 0) {
        set(x);
        set(y, REL, l.test == 2 ? GPU : SYS);
      } else {
        r[0] = get(y, l.test == 3 ? RLX : ACQ);
        r[1] = get(x);
      }
      break;
    case 4:  // fences
      if (role == 0) {
        set(x);
        __threadfence_system();
        set(y);
      } else {
        r[0] = get(y);
        __threadfence_system();
        r[1] = get(x);
      }
      break;
    case 5:  // store buffering, relaxed
    case 6:  // with fence.sc
      set(role == 0 ? x : y);
      if (l.test == 6) __threadfence_system();
      r[role] = get(role == 0 ? y : x);
      break;
    case 7:  // store buffering, release and acquire
      set(role == 0 ? x : y, REL);
      r[role] = get(role == 0 ? y : x, ACQ);
      break;
    case 8:  // coherence of two reads
      if (role == 0) {
        set(x);
      } else {
        r[0] = get(x);
        r[1] = get(x);
      }
      break;
    case 9:  // cumulativity over a barrier: plain data of one thread, published by another
      if (role == 0) {
        if (threadIdx.x == 0) *x = 1;
        __syncthreads();
        if (threadIdx.x == 1) set(y, REL);
      } else if (threadIdx.x == 0) {
        while (!get(y, ACQ)) {
        }
        r[0] = 1;
        r[1] = *x;
      }
      break;
    case 10:  // write to read causality, the middle load relaxed
    case 11:  // the middle load acquires
      if (role == 0) {
        set(x);
      } else if (role == 1) {
        r[2] = get(x, l.test == 11 ? ACQ : RLX);
        set(y, REL);
      } else {
        r[0] = get(y, ACQ);
        r[1] = get(x);
      }
      break;
    case 12:  // load buffering
      r[role] = get(role == 0 ? x : y);
      set(role == 0 ? y : x);
      break;
    case 13:  // independent reads of independent writes, acquire
      if (role < 2) {
        set(role == 0 ? x : y);
      } else {
        r[2 * role - 4] = get(role == 2 ? x : y, ACQ);
        r[2 * role - 3] = get(role == 2 ? y : x, ACQ);
      }
      break;
  }
}
KERNEL_ENTRY(litmus)
