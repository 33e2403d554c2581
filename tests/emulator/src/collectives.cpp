// Where threads of a block or lanes of a warp meet.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

void complete_barrier(Block& b) {
  Machine& m = machine();
  m.stats.barriers++;
  b.num_arrived = 0;
  b.barrier_generation++;
  b.last_count = b.count;
  if (!m.is_direct) {
    std::vector<uint32_t> times(b.threads.size());
    for (Thread& t : b.threads) times[index_in_block(t.id)] = t.clock.own;
    b.barrier_clock = with_chunk(b.barrier_clock, b.slot, std::move(times));
  }
  for (Thread& t : b.threads) {
    if (t.state == State::DONE) continue;
    if (!m.is_direct) {
      t.clock.base = b.barrier_clock;
      t.clock.own++;
    }
    if (t.state == State::AT_BARRIER) make_runnable(t);
  }
}

int meet_block(bool is_counting, int predicate) {
  Machine& m = machine();
  const char* where = is_counting ? "__syncthreads_count/or/and" : "__syncthreads";
  if (m.is_direct) {
    self().where = where;
  } else {
    yield_point(where);
  }
  Thread& me = self();
  Block& b = *me.block;
  if (b.num_arrived == 0) {
    b.count = 0;
    b.is_counting = is_counting;
    b.barrier_clock = me.clock.base;
  } else if (b.is_counting != is_counting) {
    fail_and_leave(Failure::TRAP,
                   "barrier divergence: threads of one block are at different kinds of barrier; " +
                       describe(me) + " is at " + where);
  }
  b.count += predicate != 0;
  if (!m.is_direct) b.barrier_clock = join(b.barrier_clock, me.clock.base);
  if (++b.num_arrived < b.num_live) {
    uint64_t generation = b.barrier_generation;
    while (b.barrier_generation == generation) leave(State::AT_BARRIER);
  } else {
    complete_barrier(b);
    if (!m.is_direct && m.random.chance(0.5)) leave(State::RUNNABLE);
  }
  return b.last_count;
}

WarpOp& choose_meeting(Block& b, unsigned warp, unsigned mask, const Thread& me) {
  WarpOp* chosen = nullptr;
  for (WarpOp& w : b.warps[warp]) {
    if (w.arrived && w.mask != mask && (w.mask & mask)) {
      fail_and_leave(Failure::TRAP,
                     "lanes of one warp meet with different masks that overlap: " + describe(me));
    }
    if (w.arrived && w.mask == mask) return w;
    if (!w.arrived && (!w.unread || w.mask == mask) && !chosen) chosen = &w;
  }
  if (!chosen) fail_and_leave(Failure::TRAP, "more than four divergent groups in a warp: " + describe(me));
  return *chosen;
}

void order_lanes(Thread* first_lane, unsigned mask) {
  BaseRef joined;
  for (unsigned i = 0; i < 32; i++) {
    if (mask >> i & 1) joined = join(joined, first_lane[i].clock.base);
  }
  Block& b = *first_lane->block;
  std::vector<uint32_t> times(b.threads.size());
  for (unsigned i = 0; i < 32; i++) {
    if (mask >> i & 1) times[index_in_block(first_lane[i].id)] = first_lane[i].clock.own;
  }
  joined = with_chunk(joined, b.slot, std::move(times));
  for (unsigned i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    first_lane[i].clock.base = joined;
    first_lane[i].clock.own++;
  }
}

// What the last lane to arrive does before any goes on: `w.in` has what each has brought.
template <class Complete>
WarpOp& meet_lanes(unsigned mask, int op, uint64_t in, const char* where, Complete complete) {
  Machine& m = machine();
  if (m.is_direct) {
    self().where = where;
  } else {
    yield_point(where);
  }
  Thread& me = self();
  Block& b = *me.block;
  unsigned index = index_in_block(me.id), lane = index & 31, warp = index / 32;
  if (!(mask >> lane & 1)) fail_and_leave(Failure::TRAP, "a lane is not in its own mask: " + describe(me));
  WarpOp& w = choose_meeting(b, warp, mask, me);
  if (!w.arrived) {
    w.mask = mask;
    w.op = op;
  } else if (w.op != op) {
    fail_and_leave(Failure::TRAP, "lanes of one warp meet at different operations: " + describe(me));
  }
  w.in[lane] = in;
  w.arrived |= 1u << lane;
  if (w.arrived == mask) {
    Thread* first_lane = &b.threads[index & ~31u];
    complete(w, first_lane);
    w.arrived = 0;
    w.unread = mask;
    w.generation++;
    for (unsigned i = 0; i < 32; i++) {
      if ((mask >> i & 1) && first_lane[i].state == State::AT_WARP_OP) make_runnable(first_lane[i]);
    }
  } else {
    uint32_t generation = w.generation;
    while (w.generation == generation) leave(State::AT_WARP_OP);
  }
  w.unread &= ~(1u << lane);
  return w;
}

// Shuffles and votes exchange values; only __syncwarp orders memory as well.
const uint64_t* exchange(unsigned mask, int op, uint64_t in, bool orders_memory, const char* where) {
  auto complete = [=](WarpOp& w, Thread* first_lane) {
    std::memset(w.out, 0, sizeof w.out);
    for (unsigned i = 0; i < 32; i++) {
      if (mask >> i & 1) w.out[i] = w.in[i];
    }
    if (orders_memory && !machine().is_direct) order_lanes(first_lane, mask);
  };
  return meet_lanes(mask, op, in, where, complete).out;
}

}  // namespace

void meet_warp(int op, void* argument, void (*action)(void* const* arguments), const char* where) {
  auto complete = [=](WarpOp& w, Thread*) {
    void* arguments[32];
    for (int i = 0; i < 32; i++) arguments[i] = reinterpret_cast<void*>(w.in[i]);
    action(arguments);
  };
  meet_lanes(~0u, op, reinterpret_cast<uint64_t>(argument), where, complete);
}

// Threads that have exited no longer count at the block's barriers.
void leave_block(Thread& t) {
  Block& b = *t.block;
  b.num_live--;
  if (b.num_live > 0 && b.num_arrived == b.num_live) complete_barrier(b);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu::emu_syncthreads() { meet_block(false, 0); }
int emu::emu_syncthreads_count(int predicate) { return meet_block(true, predicate); }
void emu::emu_syncwarp(unsigned mask) { exchange(mask, 0, 0, true, "__syncwarp"); }
void emu::emu_warp_exchange(unsigned mask, int op, const void* in, void* all) {
  uint64_t value;
  std::memcpy(&value, in, sizeof value);
  std::memcpy(all, exchange(mask, op, value, false, "a warp collective"), 32 * sizeof(uint64_t));
}

}  // extern "C"
