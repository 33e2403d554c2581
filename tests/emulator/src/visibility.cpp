// When stores become visible, and which values loads may return.
//
// Strong stores wait in their thread's buffer and commit in any order, except that stores to one address keep
// theirs. A fence or release of gpu scope or wider first commits everything that happens before it, which
// makes it cumulative. A strong load returns any committed value that neither causality nor coherence hides.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t MAX_VERSIONS = 8, MAX_OBSERVERS = 64, MAX_PENDING = 48;
constexpr unsigned MAX_STALE_IN_A_ROW = 3;

uintptr_t granule(const void* p) { return reinterpret_cast<uintptr_t>(p) >> 4; }
uintptr_t word_of(const void* p) { return reinterpret_cast<uintptr_t>(p) & ~uintptr_t(3); }
uint32_t read_word(uintptr_t word) {
  uint32_t value;
  std::memcpy(&value, reinterpret_cast<void*>(word), 4);
  return value;
}
template <class Word>
void copy_word(void* to, const void* from) {
  Word word;
  __atomic_load(static_cast<const Word*>(from), &word, __ATOMIC_RELAXED);
  __atomic_store(static_cast<Word*>(to), &word, __ATOMIC_RELAXED);
}
// Whole words, since another process may be at them, too.
void copy_words(void* to, const void* from, int bytes) {
  if (bytes == 8) return copy_word<uint64_t>(to, from);
  if (bytes % 4) return void(std::memcpy(to, from, size_t(bytes)));
  for (int i = 0; i < bytes; i += 4) {
    copy_word<uint32_t>(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
}
bool overlaps(const PendingStore& s, const char* p, size_t bytes) {
  return s.p < p + bytes && p < s.p + s.bytes;
}

// The word's history, whose newest version is what memory holds: something the history has not seen (a plain
// store, a copy, the host) may have written it.
History& history_of(uintptr_t word) {
  History& h = machine().history[word];
  uint32_t value = read_word(word);
  if (h.versions.empty()) {
    h.versions.push_back({value, NOBODY, 0, 0, {}, {}, true});
  } else if (h.versions.back().value != value) {
    h.versions.push_back({value, NOBODY, 0, ++machine().num_commits, {}, {}, false});
    h.last_change = machine().num_commits;
  }
  return h;
}

void append_version(uintptr_t word, uint32_t value, const Thread& writer, uint32_t time,
                    Ref<Release> release) {
  Machine& m = machine();
  History& h = history_of(word);
  if (value != h.versions.back().value) {
    h.last_change = m.num_commits;
    m.num_changes++;
  }
  h.versions.push_back({value, writer.id, time, m.num_commits, std::move(release), {}, false});
  if (h.versions.size() > MAX_VERSIONS) {
    h.versions.erase(h.versions.begin());
    uint64_t oldest = h.versions[0].commit;
    auto is_void = [&](auto& read) { return read.second <= oldest; };
    h.last_read.erase(std::remove_if(h.last_read.begin(), h.last_read.end(), is_void), h.last_read.end());
  }
  std::memcpy(reinterpret_cast<void*>(word), &value, 4);
}

void add_pending(Thread& t, PendingStore store) {
  Machine& m = machine();
  m.pending_at[granule(store.p)].push_back(t.id);
  t.pending.push_back(std::move(store));
  if (t.pending_position == ~0u) {
    t.pending_position = uint32_t(m.with_pending.size());
    m.with_pending.push_back(&t);
  }
}

void commit(Thread& t, size_t i) {
  Machine& m = machine();
  PendingStore s = std::move(t.pending[i]);
  t.pending.erase(t.pending.begin() + ptrdiff_t(i));
  auto at = m.pending_at.find(granule(s.p));
  *std::find(at->second.begin(), at->second.end(), t.id) = at->second.back();
  at->second.pop_back();
  if (at->second.empty()) m.pending_at.erase(at);
  if (t.pending.empty()) {
    Thread* last = m.with_pending.back();
    m.with_pending[t.pending_position] = last;
    last->pending_position = t.pending_position;
    m.with_pending.pop_back();
    t.pending_position = ~0u;
  }
  m.num_commits++;
  m.stats.commits++;
  for (int done = 0; done < s.bytes;) {
    uintptr_t word = word_of(s.p + done);
    int first = int(reinterpret_cast<uintptr_t>(s.p + done) & 3), count = std::min(4 - first, s.bytes - done);
    uint32_t value = read_word(word);
    std::memcpy(reinterpret_cast<char*>(&value) + first, s.value + done, size_t(count));
    append_version(word, value, t, s.time, s.release);
    done += count;
  }
  wake_waiters(s.p, size_t(s.bytes));
}

void commit_one_of(Thread& t) {
  size_t i = machine().random.below(uint32_t(t.pending.size()));
  for (size_t j = 0; j < i; j++) {
    if (overlaps(t.pending[j], t.pending[i].p, size_t(t.pending[i].bytes))) {
      i = j;
      break;
    }
  }
  commit(t, i);
}

void commit_seen_by(const Thread& observer, Thread& t, const char* p, size_t bytes) {
  for (size_t i = 0; i < t.pending.size();) {
    bool is_affected = !p || overlaps(t.pending[i], p, bytes);
    if (is_affected && observer.clock.has_seen(t.id, t.pending[i].time)) {
      commit(t, i);
    } else {
      i++;
    }
  }
}

// Cumulativity: everything that happens before `me` commits, whoever wrote it.
void commit_everything_before(const Thread& me) {
  auto& threads = machine().with_pending;
  for (size_t k = 0; k < threads.size();) {
    Thread* t = threads[k];
    commit_seen_by(me, *t, nullptr, 0);
    if (k < threads.size() && threads[k] == t) k++;
  }
}

void acquire(Thread& me, const BaseRef& released) { me.clock.base = join(me.clock.base, released); }

void observe(Thread& me, Version& v, int order, int scope) {
  if (v.writer == NOBODY || v.writer == me.id) return;
  auto is_me = [&](auto& o) { return o.first == me.id; };
  if (!v.is_known_to_all && std::none_of(v.observers.begin(), v.observers.end(), is_me)) {
    v.observers.push_back({me.id, me.clock.own});
    v.is_known_to_all = v.observers.size() > MAX_OBSERVERS;
  }
  int level = relation(me, v.writer);
  if (scope < level || !v.release || !v.release->at[level].is_set()) return;
  Clock& released = v.release->at[level];
  released.base = released.snapshot();  // once for all observers
  if (order & emu::ACQ) {
    acquire(me, released.base);
  } else {
    for (int k = level; k < 3; k++) me.observed[k] = join(me.observed[k], released.base);
  }
}

uint32_t load_word(Thread& me, uintptr_t word, uint64_t at_commit, int order, int scope) {
  History& h = history_of(word);
  size_t i = h.versions.size() - 1;
  while (i > 0 && h.versions[i].commit > at_commit) i--;
  Version& v = h.versions[i];
  if (i > 0) {
    auto is_mine = [&](auto& read) { return read.first == me.id; };
    auto mine = std::find_if(h.last_read.begin(), h.last_read.end(), is_mine);
    if (mine == h.last_read.end()) {
      h.last_read.push_back({me.id, v.commit});
    } else {
      mine->second = std::max(mine->second, v.commit);
    }
  }
  observe(me, v, order, scope);
  return v.value;
}

// The oldest version of the word that `me` may still read.
uint64_t oldest_readable(const Thread& me, uintptr_t word) {
  const History& h = history_of(word);
  uint64_t oldest = h.versions[0].commit;
  for (size_t i = h.versions.size(); i-- > 0;) {
    const Version& v = h.versions[i];
    bool is_known = v.writer == NOBODY || v.is_known_to_all || me.clock.has_seen(v.writer, v.time);
    // PTX's causality order starts with an optional observation: what another thread read before it
    // synchronised with me is hidden from me as if it had written it.
    for (auto& [observer, time] : v.observers) is_known = is_known || me.clock.has_seen(observer, time);
    if (is_known) {
      oldest = std::max(oldest, v.commit);
      break;
    }
  }
  for (auto& [reader, commit] : h.last_read) {
    if (reader == me.id) oldest = std::max(oldest, commit);
  }
  return oldest;
}

// One whole piece. Returns whether the newest value was read.
bool load_piece(Thread& me, const char* p, char* out, int bytes, int order, int scope, bool may_be_stale) {
  Machine& m = machine();
  drain_visible(p, size_t(bytes));
  uintptr_t first = word_of(p), last = word_of(p + bytes - 1);
  uint64_t oldest = 0, newest = 0;
  for (uintptr_t word = first; word <= last; word += 4) {
    oldest = std::max(oldest, oldest_readable(me, word));
    newest = std::max(newest, history_of(word).versions.back().commit);
  }
  oldest = std::max(oldest, std::min(me.sc_floor, newest));
  uint64_t at_commit = m.num_commits;
  if (may_be_stale && newest > oldest) {
    at_commit = oldest + m.random.below(uint32_t(std::min<uint64_t>(newest - oldest, 1u << 30)));
    m.stats.stale_loads++;
  }
  for (uintptr_t word = first; word <= last; word += 4) {
    uint32_t value = load_word(me, word, at_commit, order, scope);
    for (int b = 0; b < 4; b++) {
      ptrdiff_t i = ptrdiff_t(word + uintptr_t(b)) - ptrdiff_t(reinterpret_cast<uintptr_t>(p));
      if (i >= 0 && i < bytes) out[i] = reinterpret_cast<char*>(&value)[b];
    }
  }
  return at_commit >= newest;
}

void fence(Thread& me, int order, int scope) {
  Machine& m = machine();
  if (order & emu::ACQ) {
    for (int k = 0; k <= scope; k++) {
      acquire(me, me.observed[k]);
      me.observed[k] = BaseRef();
    }
  }
  bool is_sc = order == emu::SC;
  if (order & emu::REL) {
    if (scope >= emu::GPU || is_sc) commit_everything_before(me);
    for (int k = 0; k <= scope; k++) me.release_fence[k] = me.clock;
  }
  if (is_sc) {
    m.sc_commit[scope] = m.num_commits;
    for (int k = scope; k < 3; k++) me.sc_floor = std::max(me.sc_floor, m.sc_commit[k]);
  }
  me.clock.own++;
}

Ref<Release> release_pattern(const Thread& me, int scope) {
  if (!me.release_fence[0].is_set() && !me.release_fence[1].is_set() && !me.release_fence[2].is_set())
    return {};
  Ref<Release> release(new Release);
  for (int k = 0; k <= scope; k++) release->at[k] = me.release_fence[k];
  return release;
}

// A releasing store or rmw is a release fence for itself alone.
class ReleaseFor {
 public:
  ReleaseFor(Thread& me, int order, int scope) : me_(me), is_release_(order & emu::REL) {
    if (!is_release_) return;
    std::copy(me.release_fence, me.release_fence + 3, saved_);
    fence(me, emu::REL, scope);
  }
  ~ReleaseFor() {
    if (is_release_) std::copy(saved_, saved_ + 3, me_.release_fence);
  }

 private:
  Thread& me_;
  bool is_release_;
  Clock saved_[3];
};

void store_pieces(Thread& me, char* p, const uint8_t* value, int bytes, int unit,
                  const Ref<Release>& release) {
  Machine& m = machine();
  if (!m.config.torn || unit > bytes) unit = bytes;
  for (int done = 0; done < bytes; done += unit) {
    PendingStore s{p + done, unit, {}, me.clock.own, release};
    std::memcpy(s.value, value + done, size_t(unit));
    add_pending(me, std::move(s));
  }
  if (!m.config.weak) commit_all(me);
  while (me.pending.size() > MAX_PENDING) commit_one_of(me);
  me.clock.own++;
}

uint64_t truncate(uint64_t value, int bytes) { return bytes == 8 ? value : uint32_t(value); }
uint64_t read_value(const char* p, int bytes) {
  uint64_t value = 0;
  std::memcpy(&value, p, size_t(bytes));
  return value;
}

uint64_t apply(int op, int bytes, uint64_t old, uint64_t a, uint64_t b) {
  auto is_less = [&](uint64_t x, uint64_t y) {
    unsigned shift = unsigned(64 - 8 * bytes);
    return int64_t(x << shift) < int64_t(y << shift);
  };
  switch (op) {
    case emu::ADD: return old + a;
    case emu::EXCH: return a;
    case emu::MAX_: return std::max(old, a);
    case emu::MIN_: return std::min(old, a);
    case emu::SIGNED_MAX: return is_less(old, a) ? a : old;
    case emu::SIGNED_MIN: return is_less(a, old) ? a : old;
    case emu::OR_: return old | a;
    case emu::AND_: return old & a;
    case emu::CAS: return old == a ? b : old;
    case emu::INC: return old >= a ? 0 : old + 1;
    default: break;
  }
  if (op != emu::FADD || bytes != 4) fail_and_leave(Failure::TRAP, "an atomic that the emulator lacks");
  return __float_as_uint(__uint_as_float(uint32_t(old)) + __uint_as_float(uint32_t(a)));
}

uint64_t rmw_ordered(Thread& me, char* p, int bytes, int op, uint64_t a, uint64_t b, int order, int scope) {
  Machine& m = machine();
  ReleaseFor itself(me, order, scope);
  drain_visible(p, size_t(bytes));
  uint64_t old = read_value(p, bytes), fresh = apply(op, bytes, old, a, b);
  m.num_commits++;
  for (int done = 0; done < bytes; done += 4) {
    uintptr_t word = word_of(p + done);
    Ref<Release> previous = history_of(word).versions.back().release;
    load_word(me, word, m.num_commits, order, scope);
    Ref<Release> release = release_pattern(me, scope);
    if (previous && release) {  // the release sequence goes on
      for (int k = 0; k < 3; k++) {
        release->at[k] = Clock{join(previous->at[k].snapshot(), release->at[k].snapshot()), NOBODY, 0};
      }
    } else if (previous) {
      release = previous;
    }
    append_version(word, uint32_t(fresh >> (8 * done)), me, me.clock.own, release);
  }
  me.clock.own++;
  return old;
}

}  // namespace

bool commit_random() {
  Machine& m = machine();
  if (m.with_pending.empty()) return false;
  commit_one_of(*m.with_pending[m.random.below(uint32_t(m.with_pending.size()))]);
  return true;
}

void commit_all(Thread& t) {
  while (!t.pending.empty()) commit(t, 0);
}

// Stores to these bytes that happen before the current thread's next access must have committed by then.
void drain_visible(const char* p, size_t bytes) {
  Machine& m = machine();
  if (m.with_pending.empty()) return;
  for (uintptr_t g = granule(p); g <= granule(p + bytes - 1); g++) {
    auto at = m.pending_at.find(g);
    if (at == m.pending_at.end()) continue;
    std::vector<ThreadId> writers = at->second;
    std::sort(writers.begin(), writers.end());
    writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
    for (ThreadId id : writers) commit_seen_by(self(), thread(id), p, bytes);
  }
}

void forget_history(const char* p, size_t bytes) {
  auto& history = machine().history;
  if (history.empty() || bytes == 0) return;
  if (bytes / 4 > history.size()) {
    uintptr_t first = word_of(p), end = reinterpret_cast<uintptr_t>(p) + bytes;
    for (auto it = history.begin(); it != history.end();) {
      it = it->first >= first && it->first < end ? history.erase(it) : std::next(it);
    }
  } else {
    for (uintptr_t word = word_of(p); word <= word_of(p + bytes - 1); word += 4) history.erase(word);
  }
}

uint64_t last_change(const char* p, int bytes) {
  uint64_t last = 0;
  for (uintptr_t word = word_of(p); word <= word_of(p + bytes - 1); word += 4) {
    last = std::max(last, history_of(word).last_change);
  }
  return last;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu::emu_load(const void* address, void* out, int bytes, int unit, int order, int scope) {
  Machine& m = machine();
  const char* p = static_cast<const char*>(address);
  m.stats.strong_accesses++;
  if (m.is_direct) {
    park_if_failed_poll(p, bytes);
    copy_words(out, p, bytes);
    note_poll(p, bytes, false);
    return;
  }
  yield_point(order & ACQ ? "an acquire load" : "a strong load");
  Thread& me = self();
  require_aligned(p, bytes, "strong load");
  check_access(p, size_t(bytes), Access::STRONG_READ, scope, __builtin_return_address(0));
  park_if_failed_poll(p, bytes);
  if (!m.config.torn || unit > bytes) unit = bytes;
  bool may_be_stale = me.stale_in_a_row < MAX_STALE_IN_A_ROW && m.random.chance(m.adversary.staleness);
  bool is_newest = true;
  for (int done = 0; done < bytes; done += unit) {
    bool is_piece_stale = may_be_stale && (unit == bytes || m.random.chance(0.5));
    is_newest &= load_piece(me, p + done, static_cast<char*>(out) + done, unit, order, scope, is_piece_stale);
  }
  me.stale_in_a_row = is_newest ? 0 : me.stale_in_a_row + 1;
  note_poll(p, bytes, !is_newest);
  if (order & ACQ) me.clock.own++;
}

void emu::emu_store(void* address, const void* value, int bytes, int unit, int order, int scope) {
  Machine& m = machine();
  char* p = static_cast<char*>(address);
  m.stats.strong_accesses++;
  if (m.is_direct) {
    copy_words(p, value, bytes);
    m.num_changes++;
    wake_waiters(p, size_t(bytes));
    end_polling(self());
    return;
  }
  yield_point(order & REL ? "a release store" : "a strong store");
  Thread& me = self();
  end_polling(me);
  require_aligned(p, bytes, "strong store");
  check_access(p, size_t(bytes), Access::STRONG_WRITE, scope, __builtin_return_address(0));
  ReleaseFor itself(me, order, scope);
  store_pieces(me, p, static_cast<const uint8_t*>(value), bytes, unit, release_pattern(me, scope));
}

void emu::emu_weak_store(void* address, const void* value, int bytes, int unit) {
  Machine& m = machine();
  char* p = static_cast<char*>(address);
  m.stats.plain_accesses++;
  if (m.is_direct) {
    std::memcpy(p, value, size_t(bytes));
    m.num_changes++;
    wake_waiters(p, size_t(bytes));
    return;
  }
  yield_point("a plain store");
  Thread& me = self();
  end_polling(me);
  check_access(p, size_t(bytes), Access::PLAIN_WRITE, emu::CTA, __builtin_return_address(0));
  store_pieces(me, p, static_cast<const uint8_t*>(value), bytes, unit, {});
}

uint64_t emu::emu_rmw(void* address, int bytes, int op, uint64_t a, uint64_t b, int order, int scope) {
  Machine& m = machine();
  char* p = static_cast<char*>(address);
  m.stats.strong_accesses++;
  if (!m.is_direct) {
    yield_point("an atomic");
    require_aligned(p, bytes, "atomic");
    check_access(p, size_t(bytes), Access::STRONG_READ, scope, __builtin_return_address(0));
    check_access(p, size_t(bytes), Access::STRONG_WRITE, scope, __builtin_return_address(0));
  }
  // An atomic that changes nothing is a poll: a failed compare-and-swap, or the addition of 0.
  auto changes = [&](uint64_t value) { return truncate(apply(op, bytes, value, a, b), bytes) != value; };
  if (!changes(read_value(p, bytes))) park_if_failed_poll(p, bytes);
  uint64_t old;
  if (m.is_direct) {
    old = read_value(p, bytes);
    uint64_t fresh = apply(op, bytes, old, a, b);
    std::memcpy(p, &fresh, size_t(bytes));
    m.num_changes += changes(old);
  } else {
    old = rmw_ordered(self(), p, bytes, op, a, b, order, scope);
  }
  if (changes(old)) {
    wake_waiters(p, size_t(bytes));
    end_polling(self());
  } else {
    note_poll(p, bytes, false);
  }
  return old;
}

void emu::emu_fence(int order, int scope) {
  if (machine().is_direct) return;
  yield_point("a fence");
  fence(self(), order, scope);
}

}  // extern "C"
