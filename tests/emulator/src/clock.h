// Vector clocks for very many threads. A clock is a shared immutable base plus the owner's own component, so
// that taking a snapshot is O(1); a base is one chunk per block, so that a barrier copies one chunk and a
// join looks only at chunks that differ.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace emulator {

// A thread is named by its block's slot and its index in the block.
using ThreadId = uint32_t;
constexpr ThreadId NOBODY = ~0u;
constexpr unsigned THREAD_BITS = 10;
inline uint32_t slot_of(ThreadId id) { return id >> THREAD_BITS; }
inline uint32_t index_in_block(ThreadId id) { return id & ((1u << THREAD_BITS) - 1); }
inline ThreadId thread_id(uint32_t slot, uint32_t index) { return slot << THREAD_BITS | index; }

// A counted pointer without atomics: the machine is used by one host thread at a time.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* fresh) : p_(fresh) { p_->references++; }
  Ref(const Ref& o) : p_(o.p_) {
    if (p_) p_->references++;
  }
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  ~Ref() {
    if (p_ && --p_->references == 0) delete p_;
  }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  T* get() const { return p_; }
  explicit operator bool() const { return p_ != nullptr; }
  bool operator==(const Ref& o) const { return p_ == o.p_; }

 private:
  T* p_ = nullptr;
};

struct ClockChunk {
  uint32_t references = 0;
  std::vector<uint32_t> components;
};

struct ClockBase {
  uint32_t references = 0;
  std::vector<Ref<ClockChunk>> chunks;  // by slot
};
using BaseRef = Ref<ClockBase>;

inline uint32_t component(const BaseRef& base, ThreadId id) {
  if (!base || slot_of(id) >= base->chunks.size()) return 0;
  const ClockChunk* chunk = base->chunks[slot_of(id)].get();
  return chunk && index_in_block(id) < chunk->components.size() ? chunk->components[index_in_block(id)] : 0;
}

inline bool is_covered(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  if (a.size() > b.size()) return false;
  for (size_t i = 0; i < a.size(); i++) {
    if (a[i] > b[i]) return false;
  }
  return true;
}

inline Ref<ClockChunk> join(const Ref<ClockChunk>& a, const Ref<ClockChunk>& b) {
  if (!b || a == b) return a;
  if (!a || is_covered(a->components, b->components)) return b;
  if (is_covered(b->components, a->components)) return a;
  Ref<ClockChunk> merged(new ClockChunk);
  merged->components = a->components;
  merged->components.resize(std::max(a->components.size(), b->components.size()), 0);
  for (size_t i = 0; i < b->components.size(); i++) {
    merged->components[i] = std::max(merged->components[i], b->components[i]);
  }
  return merged;
}

inline BaseRef join(const BaseRef& a, const BaseRef& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  BaseRef merged;
  for (size_t slot = 0; slot < b->chunks.size(); slot++) {
    Ref<ClockChunk> mine = slot < a->chunks.size() ? a->chunks[slot] : Ref<ClockChunk>();
    Ref<ClockChunk> both = join(mine, b->chunks[slot]);
    if (both == mine) continue;
    if (!merged) {
      merged = BaseRef(new ClockBase);
      merged->chunks = a->chunks;
      merged->chunks.resize(std::max(a->chunks.size(), b->chunks.size()));
    }
    merged->chunks[slot] = both;
  }
  return merged ? merged : a;
}

// `base` with the components of one slot raised to at least `components`.
inline BaseRef with_chunk(const BaseRef& base, uint32_t slot, std::vector<uint32_t> components) {
  BaseRef raised(new ClockBase);
  if (base) raised->chunks = base->chunks;
  if (raised->chunks.size() <= slot) raised->chunks.resize(slot + 1);
  Ref<ClockChunk> fresh(new ClockChunk);
  fresh->components = std::move(components);
  raised->chunks[slot] = join(raised->chunks[slot], fresh);
  return raised;
}

struct Clock {
  BaseRef base;
  ThreadId owner = NOBODY;
  uint32_t own = 0;

  bool is_set() const { return owner != NOBODY || base; }
  bool has_seen(ThreadId id, uint32_t time) const {
    return id == owner ? own >= time : component(base, id) >= time;
  }
  // The clock as a base, the own component included.
  BaseRef snapshot() const {
    if (owner == NOBODY || component(base, owner) >= own) return base;
    std::vector<uint32_t> components(index_in_block(owner) + 1, 0);
    components.back() = own;
    return with_chunk(base, slot_of(owner), std::move(components));
  }
};

}  // namespace emulator
