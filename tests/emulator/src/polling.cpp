// Polling loops. A thread that loads a word again and finds nothing new in any word it has loaded in between
// parks until one of them is written: so a spin costs nothing, and a deadlock is seen as soon as it is there.
// A word that is merely read twice looks the same, and so every parked thread is let on a few times before
// the scheduler calls it a deadlock.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t MAX_POLLED = 64;
constexpr unsigned MAX_LOADS_IN_A_ROW = 1024;
constexpr unsigned MAX_CLOCK_READS_IN_A_ROW = 64;

uint64_t filter_bit(const char* p) {
  return uint64_t(1) << ((reinterpret_cast<uintptr_t>(p) * 0x9e3779b97f4a7c15ull) >> 58);
}

// Differs when the words have been written in between, or (where no history is kept) when they have changed.
uint64_t stamp_of(const char* p, int bytes) {
  uint64_t parts[2] = {};
  std::memcpy(parts, p, size_t(bytes));
  uint64_t stamp = parts[0] ^ (parts[1] * 0x9e3779b97f4a7c15ull);
  return machine().is_direct ? stamp : stamp ^ (last_change(p, bytes) << 20);
}

void wait_on(Thread& t, const Polled& polled) {
  Machine& m = machine();
  auto& list = m.waiters[reinterpret_cast<uintptr_t>(polled.p) >> 4];
  // Threads woken through another word leave a void entry behind.
  if (list.size() > 64 && (list.size() & (list.size() - 1)) == 0) {
    auto is_void = [&](const Waiter& w) {
      Block* block = m.slots[slot_of(w.id)].block;
      return !block || thread(w.id).state != State::PARKED || thread(w.id).park_number != w.park_number;
    };
    list.erase(std::remove_if(list.begin(), list.end(), is_void), list.end());
  }
  list.push_back({t.id, t.park_number});
}

}  // namespace

void park_if_failed_poll(const char* p, int bytes) {
  Thread& t = self();
  t.clock_reads_in_a_row = 0;
  if (machine().is_direct && ++t.loads_in_a_row > MAX_LOADS_IN_A_ROW) {
    t.loads_in_a_row = 0;
    t.where = "a strong load";
    leave(State::RUNNABLE);
  }
  if (!(t.polled_filter & filter_bit(p))) return;
  size_t first = t.polled.size();
  while (first > 0 && !(t.polled[first - 1].p == p && t.polled[first - 1].bytes == bytes)) first--;
  if (first == 0) return;
  first--;
  bool is_failed = true;
  for (size_t i = first; i < t.polled.size() && is_failed; i++) {
    const Polled& polled = t.polled[i];
    is_failed = !polled.is_stale && stamp_of(polled.p, polled.bytes) == polled.stamp;
  }
  if (is_failed) {
    t.polls_since_clock++;
    if (t.unparked_polls > 0) {
      t.unparked_polls--;
    } else {
      t.park_number++;
      for (size_t i = first; i < t.polled.size(); i++) wait_on(t, t.polled[i]);
      t.polled.resize(first + 1);  // says where it waits
      if (machine().is_direct) t.where = "a strong load";
      leave(State::PARKED);
    }
  }
  t.polled.resize(first);
}

void note_poll(const char* p, int bytes, bool is_stale) {
  Thread& t = self();
  if (t.polled.size() == MAX_POLLED) {
    t.polled.erase(t.polled.begin(), t.polled.begin() + MAX_POLLED / 2);
    t.polled_filter = 0;
    for (const Polled& polled : t.polled) t.polled_filter |= filter_bit(polled.p);
  }
  t.polled_filter |= filter_bit(p);
  t.polled.push_back({p, bytes, is_stale ? 0 : stamp_of(p, bytes), is_stale});
}

void end_polling(Thread& t) {
  t.polled.clear();
  t.polled_filter = 0;
  t.loads_in_a_row = 0;
  t.reads_clock = false;
  t.polls_since_clock = t.polls_per_clock = t.clock_reads_in_a_row = 0;
}

void wake_waiters(const char* p, size_t bytes) {
  Machine& m = machine();
  if (m.waiters.empty() || bytes == 0) return;
  uintptr_t first = reinterpret_cast<uintptr_t>(p) >> 4,
            last = reinterpret_cast<uintptr_t>(p + bytes - 1) >> 4;
  std::vector<uintptr_t> granules;
  if (last - first < m.waiters.size()) {
    for (uintptr_t g = first; g <= last; g++) granules.push_back(g);
  } else {
    for (auto& [g, list] : m.waiters) {
      if (g >= first && g <= last) granules.push_back(g);
    }
    std::sort(granules.begin(), granules.end());  // never the order of a hash table
  }
  for (uintptr_t g : granules) {
    auto at = m.waiters.find(g);
    if (at == m.waiters.end()) continue;
    std::vector<Waiter> woken = std::move(at->second);
    m.waiters.erase(at);
    for (const Waiter& w : woken) {
      if (!m.slots[slot_of(w.id)].block) continue;
      Thread& t = thread(w.id);
      if (t.state == State::PARKED && t.park_number == w.park_number) make_runnable(t);
    }
  }
}

}  // namespace emulator

using namespace emulator;

extern "C" {

uint64_t emu::emu_clock() {
  Machine& m = machine();
  Thread& t = self();
  t.reads_clock = true;
  t.polls_per_clock = std::max(t.polls_per_clock, t.polls_since_clock + 1);
  t.polls_since_clock = 0;
  if (++t.clock_reads_in_a_row > MAX_CLOCK_READS_IN_A_ROW) {
    t.clock_reads_in_a_row = 0;
    t.where = "a loop over the clock";
    t.park_number++;
    leave(State::PARKED);
  }
  return ++m.clock_ns;
}

void emu::emu_nanosleep(unsigned) {
  if (!machine().is_direct) yield_point("__nanosleep");
}

}  // extern "C"
