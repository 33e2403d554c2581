// Asynchronous copies from global to shared memory (cp.async). All of a copy happens when its group is waited
// for, though it may happen at any time from its issue on: so it is checked as an access at both times, and
// what it will write counts as unwritten in between.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t COPY_BYTES = 16;

void check_spaces(const PendingCopy& copy) {
  Memory& memory = machine().memory;
  auto space_is = [&](const char* p, bool is_shared) {
    const Allocation* a = memory.contains(p) ? memory.find(p) : nullptr;
    return !a || (a->space == Space::SHARED) == is_shared;  // no allocation is reported as such
  };
  if (space_is(copy.to, true) && (copy.bytes == 0 || space_is(copy.from, false))) return;
  fail_and_leave(Failure::ACCESS,
                 "an asynchronous copy not from global to shared memory by " + describe(self()));
}

void check_both_ends(const PendingCopy& copy, const void* pc) {
  if (copy.bytes) plain_access(copy.from, copy.bytes, false, pc);
  plain_access(copy.to, COPY_BYTES, true, pc);
}

void complete(const PendingCopy& copy, const void* pc) {
  Machine& m = machine();
  if (!m.is_direct) check_both_ends(copy, pc);
  if (copy.bytes == COPY_BYTES) {  // of a size that the compiler knows
    std::memcpy(copy.to, copy.from, COPY_BYTES);
  } else {
    std::memset(copy.to, 0, COPY_BYTES);
    if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  m.stats.copied_bytes += copy.bytes;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emu::emu_copy_async(void* to, const void* from, unsigned bytes) {
  Thread& me = self();
  PendingCopy copy{static_cast<char*>(to), static_cast<const char*>(from), bytes};
  if (bytes > COPY_BYTES) emu_trap("an asynchronous copy of more than 16 bytes");
  if (!machine().is_direct) {
    require_aligned(to, COPY_BYTES, "asynchronous copy");
    if (bytes) require_aligned(from, COPY_BYTES, "asynchronous copy");
    check_spaces(copy);
    check_both_ends(copy, __builtin_return_address(0));
    machine().memory.mark_unwritten(to, COPY_BYTES);
  }
  me.copies.push_back(copy);
  me.num_uncommitted_copies++;
}

void emu::emu_commit_copies() {
  Thread& me = self();
  me.copy_groups.push_back(me.num_uncommitted_copies);
  me.num_uncommitted_copies = 0;
}

void emu::emu_wait_copies(unsigned num_groups) {
  if (!machine().is_direct) yield_point("a wait for asynchronous copies");
  Thread& me = self();
  if (me.copy_groups.size() <= num_groups) return;
  auto last = me.copy_groups.end() - num_groups;
  size_t num_done = 0;
  for (auto group = me.copy_groups.begin(); group != last; ++group) num_done += *group;
  for (size_t i = 0; i < num_done; i++) complete(me.copies[i], __builtin_return_address(0));
  me.copy_groups.erase(me.copy_groups.begin(), last);
  me.copies.erase(me.copies.begin(), me.copies.begin() + ptrdiff_t(num_done));
}

}  // extern "C"
