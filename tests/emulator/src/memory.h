// The memory of all devices, pinned host memory and the blocks' shared memory: one arena of 4 KiB pages, with
// an unused page after each allocation so that an overrun never reaches the next one unnoticed.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

enum class Space : uint8_t { DEVICE, SHARED, HOST };

// The last accesses to 8 bytes of memory. Zeroed memory is an empty cell.
struct ShadowAccess {
  uint32_t thread, time;
  uint8_t mask, flags;
};
struct ShadowCell {
  uint32_t epoch;
  uint8_t count;
  ShadowAccess accesses[4];
};

// The last blocks to read and to write a word.
struct WordUsers {
  uint32_t reader, writer;
};

struct CallocFree {
  void operator()(void* p) const { std::free(p); }
};

struct Allocation {
  char* base = nullptr;
  size_t bytes = 0, first_page = 0, num_pages = 0;
  int device = 0;
  Space space = Space::DEVICE;
  bool is_live = false;
  // Addresses that memory is mapped at, and by which devices it may then be accessed (a bit for each).
  bool is_reservation = false;
  uint64_t accessible = 0;
  // By calloc, which costs nothing for what is never touched. Null where not tracked.
  std::unique_ptr<ShadowCell[], CallocFree> shadow;
  std::unique_ptr<uint8_t[], CallocFree> written;  // a bit for each byte
  std::unique_ptr<WordUsers[], CallocFree> users;
};

class Memory {
 public:
  static constexpr size_t PAGE = 4096;

  Memory();
  bool contains(const void* p) const { return size_t(static_cast<const char*>(p) - arena_) < RESERVED; }
  Allocation* find(const void* p);
  // Null when the arena is exhausted. Fresh memory is poison: 0xFF, a NaN in every format in use.
  char* allocate(int device, size_t bytes, Space space, bool tracks_writes);
  // False if `p` is not the base of a live allocation.
  bool free(void* p);

  // Addresses without memory, aligned to their granularity; and memory of a file, which other processes map too, at
  // them. All are of whole reservations. Null or false where that is impossible.
  static constexpr size_t GRANULARITY = size_t(2) << 20;
  char* reserve(size_t bytes);
  bool unreserve(void* p, size_t bytes);
  bool map(void* p, size_t bytes, int file, int device);
  bool unmap(void* p, size_t bytes);
  bool allow(void* p, size_t bytes, int device);
  size_t num_reservations() const { return num_reservations_; }
  size_t num_mapped() const { return num_mapped_; }

  // Freed device memory is not reused until then, so that a use after free is noticed.
  void flush_quarantine();
  size_t num_live(Space space) const { return num_live_[size_t(space)]; }
  size_t live_bytes(int device, Space space) const;

  void mark_written(const void* p, size_t bytes);
  void mark_unwritten(const void* p, size_t bytes);
  void copy_written(const void* to, const void* from, size_t bytes);
  // Offset of the first byte in [p, p + bytes) never written, or `bytes`.
  size_t first_unwritten(const Allocation& a, const char* p, size_t bytes) const;
  std::string describe(const void* p);

 private:
  static constexpr size_t RESERVED = size_t(64) << 30;
  static constexpr uint8_t POISON = 0xFF;
  void recycle(Allocation& a);
  bool extend(size_t end);
  int32_t take_id();
  Allocation* reservation(void* p, size_t bytes);
  void set_written(const void* p, size_t bytes, bool is_written);

  char* arena_;
  size_t mapped_ = 0, top_ = 0;
  std::deque<Allocation> allocations_;
  std::vector<int32_t> free_ids_;
  std::vector<int32_t> owner_;                       // of each page; -1 is nobody
  std::map<size_t, std::vector<size_t>> free_runs_;  // by number of pages
  std::deque<int32_t> quarantine_;
  size_t quarantine_bytes_ = 0;
  size_t num_live_[3] = {};
  std::map<size_t, std::vector<size_t>> free_reservations_;  // by bytes: first pages
  size_t num_reservations_ = 0, num_mapped_ = 0;
};

}  // namespace emulator
