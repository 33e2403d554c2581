// The emulated machine: all devices, streams, blocks and threads, and the memory they share. There is one per
// process. Every emulated thread runs on the stack of a fiber, one at a time, and every choice of schedule
// and of visibility comes from one seed, so a run is a function of the seed and of the host's calls.
#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "context.h"
#include "emulator_device.h"
#include "memory.h"

namespace emulator {

using emu::Idx3;

constexpr int MAX_DEVICES = 64;

struct Random {
  uint64_t state = 0;
  uint64_t next() {
    state += 0x9e3779b97f4a7c15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return uint32_t((next() >> 32) * n >> 32); }
  bool chance(double p) { return double(next() >> 11) * 0x1.0p-53 < p; }
};

struct Kernel {
  std::string name;
  void (*entry)(void** args);
  std::vector<size_t> arg_bytes;
};

// What an acquiring observer related at CTA, GPU or SYS level learns from a value. Unset: nothing.
struct Release {
  uint32_t references = 0;
  Clock at[3];
};

struct PendingStore {
  char* p;
  int bytes;
  uint8_t value[16];
  uint32_t time;
  Ref<Release> release;
};

// 16 bytes that an asynchronous copy will write.
struct PendingCopy {
  char* to;
  const char* from;
  unsigned bytes;  // the rest is zeros
};

// One value that a 4-byte word has had, and who has observed it.
struct Version {
  uint32_t value;
  ThreadId writer;
  uint32_t time;
  uint64_t commit;  // position in the order of all commits
  Ref<Release> release;
  std::vector<std::pair<ThreadId, uint32_t>> observers;
  bool is_known_to_all = false;
};

struct History {
  std::vector<Version> versions;                         // oldest first
  uint64_t last_change = 0;                              // the commit that last gave it another value
  std::vector<std::pair<ThreadId, uint64_t>> last_read;  // coherence: a thread never goes back
};

// A strong load since the thread's last store: what a polling loop consists of.
struct Polled {
  const char* p;
  int bytes;
  uint64_t stamp;
  bool is_stale;
};

enum class State : uint8_t { RUNNABLE, PARKED, AT_BARRIER, AT_WARP_OP, DONE };

struct Block;

struct Thread {
  ThreadId id = NOBODY;
  Block* block = nullptr;
  Idx3 index{};
  Context context;
  char* stack = nullptr;
  State state = State::DONE;
  const char* where = "start";
  uint32_t run_position = ~0u;
  uint32_t priority = 0;

  Clock clock;
  Clock release_fence[3];
  BaseRef observed[3];  // released by values read since, joined by the next acquire fence
  uint64_t sc_floor = 0;
  unsigned stale_in_a_row = 0;
  std::vector<PendingStore> pending;
  uint32_t pending_position = ~0u;

  std::vector<PendingCopy> copies;    // oldest first
  std::vector<size_t> copy_groups;    // how many of them each committed group has
  size_t num_uncommitted_copies = 0;

  std::vector<Polled> polled;
  uint64_t polled_filter = 0;
  uint32_t park_number = 0;
  unsigned unparked_polls = 0;  // how many failed polls may go on before the next one parks
  unsigned loads_in_a_row = 0;
  bool reads_clock = false;
  unsigned polls_since_clock = 0, polls_per_clock = 0, clock_reads_in_a_row = 0;
};

struct Grid;

struct WarpOp {
  unsigned mask = 0, arrived = 0, unread = 0;
  int op = 0;
  uint32_t generation = 0;
  uint64_t in[32], out[32];
};

struct Block {
  std::shared_ptr<Grid> grid;
  uint32_t slot = 0;
  Idx3 index{};
  std::vector<Thread> threads;
  unsigned num_live = 0, num_arrived = 0;
  bool is_counting = false;  // which kind of barrier the arrived threads are at
  int count = 0, last_count = 0;
  uint64_t barrier_generation = 0;
  BaseRef barrier_clock;
  std::vector<std::array<WarpOp, 4>> warps;
  std::vector<std::pair<const void*, char*>> shared;
  char* dynamic_shared = nullptr;
};

struct Stream;

struct Grid {
  const Kernel* kernel;
  Idx3 grid_dim, block_dim;
  size_t shared_bytes;
  std::vector<std::vector<uint8_t>> args;
  std::vector<void*> arg_pointers;
  Stream* stream;
  bool is_started = false;
  std::vector<uint32_t> start_order;
  unsigned num_blocks = 0, num_begun = 0, num_done = 0;
  std::vector<std::unique_ptr<Block>> finished;  // their stores may still be pending
};

struct Event {
  uint64_t issued = 0, done = 0, time_ns = 0;
  uint32_t epoch = 0;
  BaseRef clock;
};

struct Operation {
  enum Kind { KERNEL, ACTION, RECORD, WAIT } kind;
  std::shared_ptr<Grid> grid;
  std::function<void()> action;
  std::shared_ptr<Event> event;
  uint64_t event_number = 0;
};

struct Stream {
  int device;
  bool is_destroyed = false;  // by its owner; it goes once its work is done
  std::deque<Operation> queue;
  BaseRef clock;
  std::vector<uint32_t> slots;  // a later kernel of the stream reuses them: it is ordered after the earlier
};

struct Config {
  uint64_t seed = 0;
  int num_devices = 1;
  bool races = false, weak = false, torn = false;
  unsigned max_resident_blocks = 0;  // for each device; 0 is no limit
  int mutant = 0;
  int64_t patience_ns = 0;
};

// What this seed's adversary likes to do.
struct Adversary {
  double switches = 1, commits = 1, staleness = 0, repriorities = 0;
  int level = 0;  // priorities by 1 device, 2 block, 3 warp, 4 thread; 0: a uniformly random choice
};

struct Stats {
  uint64_t strong_accesses, plain_accesses, switches, commits, stale_loads, barriers, blocks, clock_jumps;
  uint64_t copied_bytes, multiplied_tiles;
};

enum class Failure { NONE, ACCESS, DEADLOCK, TRAP };

struct SlotOwner {
  int device;
  Block* block;  // null once it is gone
  std::string name;
};

struct Waiter {
  ThreadId id;
  uint32_t park_number;
};

class RunQueue {
 public:
  bool empty() const { return threads_.empty() && in_turn_.empty(); }
  size_t size() const { return threads_.size(); }
  void add(Thread* t);
  void remove(Thread* t);
  Thread* pick(Random& random, bool by_priority);
  void restore_order();
  // Where nothing is checked, threads take turns: those of a warp stay together. Whoever runs is not in the
  // queue.
  void add_in_turn(Thread* t);
  Thread* take_next();
  void clear() {
    threads_.clear();
    in_turn_.clear();
  }

 private:
  void place(size_t i, Thread* t);
  void sift(size_t i);
  std::vector<Thread*> threads_;  // a heap by priority
  std::deque<Thread*> in_turn_;
};

struct Machine {
  Config config;
  Adversary adversary;
  Random random;
  Stats stats{};
  bool is_direct = true;  // strong accesses go straight to memory

  std::string error;
  Failure failure = Failure::NONE;
  std::vector<std::string> races;
  std::set<std::pair<const void*, int>> race_sites;

  std::map<int, uint32_t> grid_overrides;  // by device; -1 is any
  std::vector<std::unique_ptr<Stream>> streams;
  unsigned num_resident[MAX_DEVICES] = {};
  std::vector<std::unique_ptr<Block>> blocks;
  bool has_finished_block = false;

  Thread* current = nullptr;
  Context scheduler;
  RunQueue runnable;
  uint64_t last_switch = 0;  // of this run
  std::vector<SlotOwner> slots;
  uint32_t epoch = 1;  // all clocks and shadows of an older epoch are void

  Memory memory;
  std::vector<Thread*> with_pending;
  std::unordered_map<uintptr_t, std::vector<ThreadId>> pending_at;  // by 16-byte granule
  std::unordered_map<uintptr_t, History> history;                   // by word
  std::unordered_map<uintptr_t, std::vector<Waiter>> waiters;       // by 16-byte granule
  uint64_t num_commits = 1, num_changes = 0, sc_commit[3] = {};

  uint64_t clock_ns = 0, progress_mark = 0, num_threads_done = 0;
  unsigned rechecks = 0, jumps_in_a_row = 0;

  std::mutex mutex;
  std::condition_variable changed;  // something was enqueued, or a wait ended
  std::chrono::steady_clock::time_point last_enqueue;

  uint64_t peers_enabled[MAX_DEVICES] = {};  // bit p of [d]: device d may access device p
  bool checks_peers = false;
};

Machine& machine();
// `!machine().is_direct`, for the hooks of each access.
extern bool are_accesses_checked;
std::vector<Kernel>& kernel_registry(bool is_mutated);
const Kernel* find_kernel(const char* name);

inline Thread& self() { return *machine().current; }
inline Thread& thread(ThreadId id) { return machine().slots[slot_of(id)].block->threads[index_in_block(id)]; }
inline int device_of(const Thread& t) { return t.block->grid->stream->device; }
std::string describe(const Thread& t);
std::string describe(ThreadId id);
emu::Scope relation(const Thread& a, ThreadId b);

// Records the first error; the machine then stands still until it is configured again.
void fail(Failure kind, const std::string& what);
[[noreturn]] void fail_and_leave(Failure kind, const std::string& what);

// Scheduling, seen from a running thread.
void yield_point(const char* where);
void leave(State state);
void make_runnable(Thread& t);

// Visibility (visibility.cpp).
bool commit_random();
void commit_all(Thread& t);
void drain_visible(const char* p, size_t bytes);
void forget_history(const char* p, size_t bytes);
void wake_waiters(const char* p, size_t bytes);
uint64_t last_change(const char* p, int bytes);

// Polling (polling.cpp).
void park_if_failed_poll(const char* p, int bytes);
void note_poll(const char* p, int bytes, bool is_stale);
void end_polling(Thread& t);

// Race, bounds and initialisation checks (races.cpp).
void require_aligned(const void* p, int bytes, const char* what);
enum class Access { PLAIN_READ, PLAIN_WRITE, STRONG_READ, STRONG_WRITE };
void check_access(const char* p, size_t bytes, Access access, int scope, const void* pc);
// A plain access of the current thread to memory that others see, when anything is checked.
void plain_access(const char* p, size_t bytes, bool is_write, const void* pc);

// Where all lanes of a warp meet (collectives.cpp). The last to arrive does `action` with what each has
// brought.
void meet_warp(int op, void* argument, void (*action)(void* const* arguments), const char* where);

// The host's side (host.cpp); the caller holds the mutex.
Stream& create_stream(int device);
void destroy_stream(Stream& stream);
void enqueue(Stream& stream, Operation operation);
inline void enqueue_action(Stream& stream, std::function<void()> action) {
  enqueue(stream, {Operation::ACTION, {}, std::move(action), {}, 0});
}
inline void enqueue_grid(Stream& stream, std::shared_ptr<Grid> grid) {
  enqueue(stream, {Operation::KERNEL, std::move(grid), {}, {}, 0});
}
// Copies and fills as a device's copy engine makes them, when their turn in a stream comes.
void copy_memory(void* to, const void* from, size_t bytes);
void fill_memory(void* to, uint32_t value, size_t element_bytes, size_t count);
std::shared_ptr<Grid> make_grid(Stream& stream, const Kernel& kernel, Idx3 grid, Idx3 block,
                                size_t shared_bytes, void* const* args);
enum class Outcome { DONE, STUCK, FAILED };
Outcome run(const std::function<bool()>& is_done, bool is_all_work_in, uint64_t max_switches);
bool wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done);
bool poll_for(const std::function<bool()>& is_done);
void configure(const Config& config);
bool is_idle();
bool has_kernels_in_flight();
bool has_failed();

}  // namespace emulator
