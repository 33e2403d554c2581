// Checks of each access: bounds, lifetime, peer mapping, initialisation, and races in the sense of the PTX
// model (two accesses of one location, one of them a write, neither ordered by causality nor morally strong).
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace emulator {
namespace {

constexpr uint8_t WRITE = 1, STRONG = 2;
constexpr unsigned SCOPE_SHIFT = 2;
constexpr size_t MAX_REPORTED_RACES = 20;

// For addr2line: the kernels are compiled with line tables.
std::string place_in_code(const void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info)) return "?";
  std::string file = info.dli_fname;
  char offset[40];
  std::snprintf(offset, sizeof offset, "+0x%tx",
                static_cast<const char*>(pc) - static_cast<char*>(info.dli_fbase));
  return file.substr(file.rfind('/') + 1) + offset;
}

std::string kind_of(uint8_t flags) {
  return std::string(flags & STRONG ? "strong " : "plain ") + (flags & WRITE ? "write" : "read");
}

void report_race(const char* p, uint8_t mine, const ShadowAccess& other, const void* pc) {
  Machine& m = machine();
  if (!m.race_sites.insert({pc, other.flags}).second || m.races.size() >= MAX_REPORTED_RACES) return;
  std::string text = "race at " + m.memory.describe(p) + ": " + kind_of(mine) + " by " + describe(self()) +
                     " is unordered with " + kind_of(other.flags) + " by " + describe(other.thread);
  if ((mine & STRONG) && (other.flags & STRONG)) text += " (both strong, but a scope is too narrow)";
  m.races.push_back(text + ", in " + place_in_code(pc));
}

// Whether a copy to this byte, by a thread of the current one's block, has not been waited for.
bool is_being_copied_to(const char* p) {
  for (const Thread& t : self().block->threads) {
    for (const PendingCopy& copy : t.copies) {
      if (copy.to <= p && p < copy.to + 16) return true;
    }
  }
  return false;
}

void check_bounds(const char* p, size_t bytes, uint8_t flags, const void* pc) {
  Machine& m = machine();
  Thread& t = self();
  auto refuse = [&](const char* what) {
    fail_and_leave(Failure::ACCESS, std::string(what) + " " + std::to_string(bytes) + "-byte " +
                                        kind_of(flags) + " at " + m.memory.describe(p) + " by " +
                                        describe(t) + ", in " + place_in_code(pc));
  };
  const Allocation* a = m.memory.contains(p) ? m.memory.find(p) : nullptr;
  if (!a || p < a->base || p + bytes > a->base + a->bytes) refuse("out-of-bounds");
  if (!a->is_live) refuse("use after free:");
  bool is_foreign = a->space == Space::DEVICE && a->device != device_of(t);
  if (is_foreign && m.checks_peers && !(m.peers_enabled[device_of(t)] >> a->device & 1)) {
    refuse("no peer access enabled for a");
  }
  if (!(flags & WRITE)) {
    size_t i = m.memory.first_unwritten(*a, p, bytes);
    if (i < bytes) {
      p += i;
      bool is_early = is_being_copied_to(p);
      refuse(is_early ? "read before its asynchronous copy was waited for:" : "uninitialised read:");
    }
  }
}

}  // namespace

void require_aligned(const void* p, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % uintptr_t(bytes) == 0) return;
  fail_and_leave(Failure::ACCESS, std::string("misaligned ") + what + " of " + std::to_string(bytes) +
                                      " bytes at " + machine().memory.describe(p) + " by " +
                                      describe(self()));
}

void check_access(const char* p, size_t bytes, Access access, int scope, const void* pc) {
  Machine& m = machine();
  if (!m.config.races) return;
  bool is_write = access == Access::PLAIN_WRITE || access == Access::STRONG_WRITE;
  bool is_strong = access == Access::STRONG_READ || access == Access::STRONG_WRITE;
  uint8_t flags = uint8_t((is_write ? WRITE : 0) | (is_strong ? STRONG : 0) | scope << SCOPE_SHIFT);
  check_bounds(p, bytes, flags, pc);
  Allocation& a = *m.memory.find(p);
  if (!a.shadow) {
    a.shadow.reset(static_cast<ShadowCell*>(std::calloc((a.bytes + 7) / 8, sizeof(ShadowCell))));
  }
  if (is_write) m.memory.mark_written(p, bytes);

  Thread& t = self();
  uint32_t now = t.clock.own;
  for (size_t offset = size_t(p - a.base), end = offset + bytes; offset < end;) {
    size_t first = offset & 7, count = std::min(end - offset, 8 - first);
    uint8_t mask = uint8_t(((1u << count) - 1) << first);
    ShadowCell& cell = a.shadow[offset / 8];
    if (cell.epoch != m.epoch) cell.epoch = m.epoch, cell.count = 0;
    int replaced = -1;
    for (int i = 0; i < cell.count; i++) {
      const ShadowAccess& other = cell.accesses[i];
      if (!(other.mask & mask)) continue;
      if (other.thread == t.id) {
        if (other.mask == mask && other.flags == flags) replaced = i;
        continue;
      }
      bool is_ordered = t.clock.has_seen(other.thread, other.time);
      if (!is_ordered && (is_write || (other.flags & WRITE))) {
        int needed = relation(t, other.thread);
        bool is_morally_strong =
            is_strong && (other.flags & STRONG) && scope >= needed && (other.flags >> SCOPE_SHIFT) >= needed;
        if (!is_morally_strong) report_race(a.base + offset, flags, other, pc);
      }
      // Whatever races with the older access races with this one, too.
      if (is_ordered && other.mask == mask && (is_write || !(other.flags & WRITE)) && replaced < 0)
        replaced = i;
    }
    if (replaced < 0) replaced = cell.count < 4 ? cell.count++ : int((now * 7 + t.id) & 3);
    cell.accesses[replaced] = ShadowAccess{t.id, now, mask, flags};
    offset += count;
  }
}

}  // namespace emulator
