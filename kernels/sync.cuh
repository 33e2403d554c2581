// How ranks of a group exchange packs: data that is its own flag, slots that rotate, waits that end.
// Why it is right: src/comm/PROTOCOL.md.
#pragma once

#include "row.cuh"

namespace ev {

/// A word of a slab that nothing was sent to. A sent word that has these bits travels as kEscape, and the
/// pack's escape word says which of its words were meant.
constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr uint32_t kEscape = 0xFFFFFFFEu;

EV_DEVICE bool any_word(Pack p, uint32_t value) {
  return p.x == value || p.y == value || p.z == value || p.w == value;
}

/// Bit i: word i of a pack is kEmpty itself. Other escaped words are kEscape itself.
EV_DEVICE uint32_t escaped_words(Pack p) {
  return (p.x == kEmpty) | (p.y == kEmpty) << 1 | (p.z == kEmpty) << 2 | (p.w == kEmpty) << 3;
}

EV_DEVICE Pack escape(Pack p) {
  const auto word = [](uint32_t w) { return w == kEmpty ? kEscape : w; };
  return {word(p.x), word(p.y), word(p.z), word(p.w)};
}

EV_DEVICE Pack unescape(Pack p, uint32_t words) {
  const auto word = [&](uint32_t w, int i) { return words >> i & 1 ? kEmpty : w; };
  return {word(p.x, 0), word(p.y, 1), word(p.z, 2), word(p.w, 3)};
}

/// One thread's part in one call.
struct Call {
  const EvAllReduceNorm& a;
  uint32_t epoch;     // calls that this block has made before
  bool failed;        // sticky: this thread has given up, or the group had before
  uint32_t polls = 0;
  uint32_t started = 0;  // the first look at the clock, in microseconds (of 1024 ns)

  EV_DEVICE explicit Call(const EvAllReduceNorm& args) : a(args) {
    epoch = reinterpret_cast<const uint32_t*>(a.epochs)[blockIdx.x];
    const uint32_t culprit = load_relaxed_sys(abort_word(a.rank));
    failed = culprit != kEmpty;
    if (failed && threadIdx.x == 0) give_up(EV_FAULT_ABORTED, culprit, EV_PHASE_TAGS, 0, 0);
  }

  EV_DEVICE uint32_t slot() const { return epoch % 2; }

  EV_DEVICE uint32_t* abort_word(uint32_t rank) const { return reinterpret_cast<uint32_t*>(a.slabs[rank]); }
  EV_DEVICE uint32_t* tag(uint32_t at, uint32_t from, uint32_t world) const {
    return reinterpret_cast<uint32_t*>(a.slabs[at] + EV_TAGS_OFFSET) +
           (slot() * world + from) * a.max_blocks + blockIdx.x;
  }
  EV_DEVICE Pack* packs(uint32_t rank) const {
    return reinterpret_cast<Pack*>(a.slabs[rank] + a.packs_offset) + slot() * (a.max_blocks * a.block_packs);
  }
  EV_DEVICE uint32_t* escapes(uint32_t rank) const {
    return reinterpret_cast<uint32_t*>(a.slabs[rank] + a.escapes_offset) + slot() * (a.max_blocks * a.block_packs);
  }

  /// Sends a pack into the slab of `peer`.
  EV_DEVICE void push(uint32_t peer, uint32_t at, Pack pack) const {
    store_relaxed_sys(packs(peer) + at, escape(pack));
    if (any_word(pack, kEmpty) || any_word(pack, kEscape)) {
      store_relaxed_sys(escapes(peer) + at, escaped_words(pack));
    }
  }

  /// Receives `packs[i]`, which `peer(i)` sends to `place(i)` in this rank's slab, for each bit i of
  /// `missing`, and leaves the places empty. One round of loads for all that are missing, so that they wait
  /// side by side. After a failure the packs are of no use.
  template <uint32_t N, class Place, class Peer>
  EV_DEVICE void receive(Pack (&packs)[N], uint32_t missing, Place place, Peer peer, uint32_t phase) {
    for (;;) {
#pragma unroll
      for (uint32_t i = 0; i < N; i++) {
        if (missing >> i & 1) packs[i] = load_relaxed_sys(this->packs(a.rank) + place(i));
      }
#pragma unroll
      for (uint32_t i = 0; i < N; i++) {
        if ((missing >> i & 1) && take(packs[i], place(i))) missing &= ~(1u << i);
      }
      if (missing == 0 || !may_wait(peer(__ffs(missing) - 1), phase)) return;
    }
  }

  /// Takes a pack as loaded from `at`, if all of it has arrived, and empties the place.
  EV_DEVICE bool take(Pack& pack, uint32_t at) const {
    if (any_word(pack, kEmpty)) return false;
    if (any_word(pack, kEscape)) {
      uint32_t* const place = escapes(a.rank) + at;
      const uint32_t words = load_relaxed_sys(place);
      if (words == kEmpty) return false;
      store_relaxed_sys(place, kEmpty);
      pack = unescape(pack, words);
    }
    store_relaxed_sys(packs(a.rank) + at, Pack{kEmpty, kEmpty, kEmpty, kEmpty});
    return true;
  }

  /// Tells every peer which call this is. Also after a failure: so every rank sees for itself who differs.
  EV_DEVICE void announce(uint32_t tag_value, uint32_t world) const {
    if (threadIdx.x < world && threadIdx.x != a.rank) {
      store_relaxed_sys(tag(threadIdx.x, a.rank, world), tag_value);
    }
  }

  /// Waits for every peer's tag and compares it with this call's. A barrier of the block: after it, all
  /// threads know whether the call goes on. Nothing that was received may be used before.
  EV_DEVICE void agree(uint32_t tag_value, uint32_t world) {
    if (threadIdx.x < world) {
      bool differs = false;
      uint32_t seen = tag_value;
      if (threadIdx.x != a.rank) {
        uint32_t* const place = tag(a.rank, threadIdx.x, world);
        while ((seen = load_relaxed_sys(place)) == kEmpty && may_wait(threadIdx.x, EV_PHASE_TAGS)) {
        }
        if (!failed) {
          store_relaxed_sys(place, kEmpty);  // the tag
          differs = seen != tag_value;
        }
      }
      const uint32_t who = __ballot_sync((1u << world) - 1, differs);  // of them, one reports
      if (who != 0 && threadIdx.x + 1 == uint32_t(__ffs(who))) {
        give_up(EV_FAULT_MISMATCH, threadIdx.x, EV_PHASE_TAGS, tag_value, seen);
      }
    }
    failed = __syncthreads_or(failed);
    started = 0;  // all ranks are here now: what they send has a limit of its own
  }

  /// Whether to look again for what `peer` sends. If not, the call has failed and the fault is on record.
  EV_DEVICE bool may_wait(uint32_t peer, uint32_t phase) {
    if (failed) return false;
    if (++polls % kPollsPerCheck) return true;
    const uint32_t culprit = load_relaxed_sys(abort_word(a.rank));
    if (culprit != kEmpty) {
      give_up(EV_FAULT_ABORTED, culprit, phase, 0, 0);
      return false;
    }
    const uint32_t now = clock_ns() >> 10 | 1;
    if (started == 0) started = now;
    if (now - started <= uint32_t(a.wait_limit_ns >> 13) * (1 + phase)) return true;
    give_up(EV_FAULT_TIMEOUT, peer, phase, 0, 0);
    return false;
  }

  /// Records a fault for the host, unless there is a record, and stops this rank's other blocks. Tells all
  /// ranks of a lost peer; a mismatch they all see for themselves, and this rank may be the odd one.
  EV_DEVICE void give_up(uint32_t code, uint32_t peer, uint32_t phase, uint32_t own_tag, uint32_t seen_tag) {
    failed = true;
    uint64_t* const record = reinterpret_cast<uint64_t*>(a.fault) + (code == EV_FAULT_ABORTED ? 2 : 0);
    if (load_relaxed_sys(record) == 0) {
      if (code == EV_FAULT_MISMATCH) store_relaxed_sys(record + 1, uint64_t(own_tag) << 32 | seen_tag);
      store_relaxed_sys(record, uint64_t(epoch) << 32 | uint64_t(code) << 24 | phase << 16 | peer << 8 | a.rank);
    }
#pragma unroll 1
    for (uint32_t rank = 0; rank < EV_MAX_WORLD; rank++) {
      const bool concerned = rank == a.rank || code == EV_FAULT_TIMEOUT;
      if (a.slabs[rank] != 0 && concerned) store_relaxed_sys(abort_word(rank), peer);
    }
  }

  /// Counts the call. By one thread of the block, after a barrier that all threads reach with `epoch` read.
  EV_DEVICE void count() const { reinterpret_cast<uint32_t*>(a.epochs)[blockIdx.x] = epoch + 1; }
};

}  // namespace ev
