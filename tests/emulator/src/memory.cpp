#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulator {

Memory::Memory() {
  void* p = mmap(nullptr, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("cuda-emulator: cannot reserve address space");
    std::abort();
  }
  arena_ = static_cast<char*>(p);
}

Allocation* Memory::find(const void* p) {
  size_t page = size_t(static_cast<const char*>(p) - arena_) / PAGE;
  if (page >= owner_.size() || owner_[page] < 0) return nullptr;
  return &allocations_[size_t(owner_[page])];
}

bool Memory::extend(size_t end) {
  constexpr size_t STEP = size_t(64) << 20;
  if (end > RESERVED) return false;
  if (end > mapped_) {
    size_t new_mapped = std::min(RESERVED, (end + STEP - 1) / STEP * STEP);
    if (mprotect(arena_ + mapped_, new_mapped - mapped_, PROT_READ | PROT_WRITE) != 0) return false;
    mapped_ = new_mapped;
  }
  top_ = end;
  owner_.resize(top_ / PAGE, -1);
  return true;
}

int32_t Memory::take_id() {
  if (free_ids_.empty()) {
    allocations_.emplace_back();
    return int32_t(allocations_.size() - 1);
  }
  int32_t id = free_ids_.back();
  free_ids_.pop_back();
  return id;
}

char* Memory::allocate(int device, size_t bytes, Space space, bool tracks_writes) {
  size_t num_pages = (bytes + PAGE - 1) / PAGE + 1;  // one for the gap
  if (num_pages > 16) {                              // few sizes, so that freed runs find a new user
    size_t rounded = 32;
    while (rounded < num_pages) rounded *= 2;
    num_pages = rounded;
  }
  size_t first_page;
  std::vector<size_t>& runs = free_runs_[num_pages];
  if (!runs.empty()) {
    first_page = runs.back();
    runs.pop_back();
  } else {
    first_page = top_ / PAGE;
    if (!extend(top_ + num_pages * PAGE)) return nullptr;
  }
  int32_t id = take_id();
  Allocation& a = allocations_[size_t(id)];
  a.base = arena_ + first_page * PAGE;
  a.bytes = bytes;
  a.first_page = first_page;
  a.num_pages = num_pages;
  a.device = device;
  a.space = space;
  a.is_live = true;
  a.is_reservation = false;
  a.written.reset(tracks_writes ? static_cast<uint8_t*>(std::calloc((bytes + 7) / 8, 1)) : nullptr);
  std::memset(a.base, POISON, bytes);
  std::fill_n(owner_.begin() + ptrdiff_t(first_page), num_pages, id);
  num_live_[size_t(space)]++;
  return a.base;
}

bool Memory::free(void* p) {
  Allocation* a = contains(p) ? find(p) : nullptr;
  if (!a || !a->is_live || a->base != p || a->is_reservation) return false;
  a->is_live = false;
  num_live_[size_t(a->space)]--;
  if (a->space == Space::SHARED) {
    recycle(*a);
    return true;
  }
  constexpr size_t MAX_QUARANTINE = size_t(256) << 20;
  quarantine_.push_back(owner_[a->first_page]);
  quarantine_bytes_ += a->bytes;
  while (quarantine_bytes_ > MAX_QUARANTINE) {
    Allocation& oldest = allocations_[size_t(quarantine_.front())];
    quarantine_.pop_front();
    quarantine_bytes_ -= oldest.bytes;
    recycle(oldest);
  }
  return true;
}

size_t Memory::live_bytes(int device, Space space) const {
  size_t bytes = 0;
  for (const Allocation& a : allocations_) {
    if (a.is_live && a.device == device && a.space == space) bytes += a.bytes;
  }
  return bytes;
}

char* Memory::reserve(size_t bytes) {
  if (bytes == 0 || bytes % GRANULARITY) return nullptr;
  size_t first_page;
  std::vector<size_t>& runs = free_reservations_[bytes];
  if (!runs.empty()) {
    first_page = runs.back();
    runs.pop_back();
  } else {
    uintptr_t top = reinterpret_cast<uintptr_t>(arena_ + top_);
    size_t begin = top_ + (GRANULARITY - top % GRANULARITY) % GRANULARITY;
    if (!extend(begin + bytes + PAGE)) return nullptr;  // and a gap
    if (mprotect(arena_ + begin, bytes, PROT_NONE) != 0) return nullptr;
    first_page = begin / PAGE;
  }
  int32_t id = take_id();
  Allocation& a = allocations_[size_t(id)];
  a.base = arena_ + first_page * PAGE;
  a.bytes = bytes;
  a.first_page = first_page;
  a.num_pages = bytes / PAGE;
  a.space = Space::DEVICE;
  a.is_live = false;
  a.is_reservation = true;
  a.accessible = 0;
  std::fill_n(owner_.begin() + ptrdiff_t(first_page), a.num_pages, id);
  num_reservations_++;
  return a.base;
}

Allocation* Memory::reservation(void* p, size_t bytes) {
  Allocation* a = contains(p) ? find(p) : nullptr;
  return a && a->is_reservation && a->base == p && a->bytes == bytes ? a : nullptr;
}

bool Memory::unreserve(void* p, size_t bytes) {
  Allocation* a = reservation(p, bytes);
  if (!a || a->is_live) return false;
  a->shadow.reset();
  a->users.reset();
  free_ids_.push_back(owner_[a->first_page]);
  free_reservations_[bytes].push_back(a->first_page);
  std::fill_n(owner_.begin() + ptrdiff_t(a->first_page), a->num_pages, -1);
  num_reservations_--;
  return true;
}

bool Memory::map(void* p, size_t bytes, int file, int device) {
  Allocation* a = reservation(p, bytes);
  if (!a || a->is_live) return false;
  if (mmap(p, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return false;
  a->is_live = true;
  a->device = device;
  a->accessible = 0;
  num_live_[size_t(Space::DEVICE)]++;
  num_mapped_++;
  return true;
}

bool Memory::unmap(void* p, size_t bytes) {
  Allocation* a = reservation(p, bytes);
  if (!a || !a->is_live) return false;
  constexpr int NOTHING = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (mmap(p, bytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0) == MAP_FAILED) return false;
  a->is_live = false;
  num_live_[size_t(Space::DEVICE)]--;
  num_mapped_--;
  return true;
}

bool Memory::allow(void* p, size_t bytes, int device) {
  Allocation* a = reservation(p, bytes);
  if (!a || !a->is_live || mprotect(p, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  a->accessible |= uint64_t(1) << device;
  return true;
}

void Memory::flush_quarantine() {
  for (int32_t id : quarantine_) recycle(allocations_[size_t(id)]);
  quarantine_.clear();
  quarantine_bytes_ = 0;
}

void Memory::recycle(Allocation& a) {
  constexpr size_t LARGE = size_t(1) << 20;
  if (a.bytes > LARGE) madvise(a.base, a.num_pages * PAGE, MADV_DONTNEED);
  a.shadow.reset();
  a.users.reset();
  a.written.reset();
  free_ids_.push_back(owner_[a.first_page]);
  free_runs_[a.num_pages].push_back(a.first_page);
  std::fill_n(owner_.begin() + ptrdiff_t(a.first_page), a.num_pages, -1);
}

void Memory::mark_written(const void* p, size_t bytes) { set_written(p, bytes, true); }

void Memory::mark_unwritten(const void* p, size_t bytes) { set_written(p, bytes, false); }

void Memory::set_written(const void* p, size_t bytes, bool is_written) {
  Allocation* a = contains(p) ? find(p) : nullptr;
  if (!a || !a->written) return;
  size_t begin = size_t(static_cast<const char*>(p) - a->base), end = std::min(begin + bytes, a->bytes);
  for (size_t i = begin; i < end;) {
    if (i % 8 == 0 && end - i >= 8) {
      a->written[i / 8] = is_written ? 0xFF : 0;
      i += 8;
    } else {
      uint8_t bit = uint8_t(1u << (i % 8));
      if (is_written) {
        a->written[i / 8] |= bit;
      } else {
        a->written[i / 8] &= uint8_t(~bit);
      }
      i++;
    }
  }
}

void Memory::copy_written(const void* to, const void* from, size_t bytes) {
  Allocation* source = contains(from) ? find(from) : nullptr;
  if (!source || !source->written) return mark_written(to, bytes);
  Allocation* target = contains(to) ? find(to) : nullptr;
  if (!target || !target->written) return;
  size_t s = size_t(static_cast<const char*>(from) - source->base);
  size_t t = size_t(static_cast<const char*>(to) - target->base);
  for (size_t i = 0; i < bytes; i++, s++, t++) {
    bool is_written = source->written[s / 8] >> (s % 8) & 1;
    uint8_t bit = uint8_t(1u << (t % 8));
    if (is_written) {
      target->written[t / 8] |= bit;
    } else {
      target->written[t / 8] &= uint8_t(~bit);
    }
  }
}

size_t Memory::first_unwritten(const Allocation& a, const char* p, size_t bytes) const {
  if (!a.written) return bytes;
  size_t begin = size_t(p - a.base);
  for (size_t i = 0; i < bytes;) {
    uint8_t bits = a.written[(begin + i) / 8];
    if ((begin + i) % 8 == 0 && bits == 0xFF) {
      i += 8;
    } else {
      if (!(bits >> ((begin + i) % 8) & 1)) return i;
      i++;
    }
  }
  return bytes;
}

std::string Memory::describe(const void* p) {
  Allocation* a = contains(p) ? find(p) : nullptr;
  if (!a) return "no allocation";
  static const char* const SPACES[] = {"device", "shared", "pinned host"};
  char text[160];
  std::snprintf(text, sizeof text, "offset %td of a %zu-byte allocation of %s memory of device %d",
                static_cast<const char*>(p) - a->base, a->bytes, SPACES[size_t(a->space)], a->device);
  return text;
}

}  // namespace emulator
