// The machine as its host sees it: configuration, enqueuing and waiting.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

// `clear` keeps the buckets, and clears all of them each time: after one large run every small one would pay.
template <class Map>
void forget(Map& map) {
  if (map.bucket_count() > 4096) {
    map = Map();
  } else {
    map.clear();
  }
}

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds RECHECK_INTERVAL(5);  // the host may write to memory that a kernel polls
// Other processes may do so, too, if they share memory with this one.
constexpr std::chrono::microseconds MIN_SHARED_INTERVAL(50), MAX_SHARED_INTERVAL(2000);
constexpr std::chrono::seconds MIN_SHARED_PATIENCE(30);

bool shares_memory() { return machine().memory.num_mapped() > 0; }

// Whether nobody can be expected to add work, or to write to memory that is waited for.
bool is_all_work_in() {
  Machine& m = machine();
  std::chrono::nanoseconds patience(m.config.patience_ns);
  auto now = steady_clock::now();
  if (!shares_memory()) return now - m.last_enqueue >= patience;
  // The other processes' time is the host's.
  std::chrono::nanoseconds elapsed = now - m.configured;
  m.clock_ns = std::max(m.clock_ns, uint64_t(elapsed.count()));
  patience = std::max<std::chrono::nanoseconds>(patience, MIN_SHARED_PATIENCE);
  return now - std::max(m.last_enqueue, m.last_progress) >= patience;
}

Adversary draw_adversary(const Config& config, Random& random) {
  Adversary a;
  if (!config.races && !config.weak) return a;
  constexpr double SWITCHES[] = {0.05, 0.3, 1.0}, COMMITS[] = {0.005, 0.1, 1.0}, STALENESS[] = {0, 0.1, 0.5};
  constexpr double REPRIORITIES[] = {0.02, 0.002, 0.0002};
  a.switches = SWITCHES[random.below(3)];
  a.commits = COMMITS[random.below(3)];
  a.staleness = STALENESS[random.below(3)];
  a.repriorities = REPRIORITIES[random.below(3)];
  a.level = int(random.below(5));
  if (!config.weak) a.commits = 1, a.staleness = 0;
  return a;
}

// What a failed run has left behind.
void abandon_work() {
  Machine& m = machine();
  m.runnable.clear();
  for (auto& stream : m.streams) {
    if (!stream) continue;
    for (Operation& op : stream->queue) {
      if (op.kind == Operation::ACTION) op.action();  // it may free memory
      if (op.kind == Operation::RECORD) op.event->done = op.event_number;
      if (op.kind == Operation::KERNEL) op.grid->finished.clear();
    }
    stream->queue.clear();
  }
  for (auto& b : m.blocks) {
    for (Thread& t : b->threads) return_stack(t.stack);
    for (auto& [site, memory] : b->shared) m.memory.free(memory);
    if (b->dynamic_shared) m.memory.free(b->dynamic_shared);
  }
  m.blocks.clear();
  m.with_pending.clear();
  forget(m.pending_at);
  m.has_finished_block = false;
}

// With nothing in flight, all is ordered before whatever the host does next.
void forget_order() {
  Machine& m = machine();
  forget(m.history);
  forget(m.waiters);
  m.slots.clear();
  for (auto& stream : m.streams) {
    if (!stream) continue;
    stream->clock = BaseRef();
    stream->slots.clear();
  }
  m.epoch++;
}

}  // namespace

Machine& machine() {
  // Never destroyed: host threads may outlive static destructors.
  static Machine* the = [] {
    auto* m = new Machine;
    // For programs that have nothing of the emulator but the fake driver on their library path.
    if (const char* blocks = std::getenv("EMU_RESIDENT_BLOCKS")) {
      m->config.max_resident_blocks = unsigned(std::strtoul(blocks, nullptr, 10));
    }
    return m;
  }();
  return *the;
}

bool are_accesses_seen = false;

std::vector<Kernel>& kernel_registry(bool is_mutated) {
  static std::vector<Kernel>* registries = new std::vector<Kernel>[2];
  return registries[is_mutated];
}

const Kernel* find_kernel(const char* name) {
  if (machine().config.mutant) {
    for (const Kernel& k : kernel_registry(true)) {
      if (k.name == name) return &k;
    }
  }
  for (const Kernel& k : kernel_registry(false)) {
    if (k.name == name) return &k;
  }
  return nullptr;
}

std::string describe(const Thread& t) {
  const Block& b = *t.block;
  auto index = [](Idx3 i, Idx3 dim) {
    std::string text = std::to_string(i.x);
    if (dim.y > 1 || dim.z > 1) text += "," + std::to_string(i.y) + "," + std::to_string(i.z);
    return text;
  };
  return b.grid->kernel->name + " device " + std::to_string(b.grid->stream->device) + " block " +
         index(b.index, b.grid->grid_dim) + " thread " + index(t.index, b.grid->block_dim);
}

std::string describe(ThreadId id) {
  const SlotOwner& owner = machine().slots[slot_of(id)];
  if (owner.block) return describe(owner.block->threads[index_in_block(id)]);
  return owner.name.substr(0, owner.name.rfind(' ') + 1) + std::to_string(index_in_block(id)) + " (ended)";
}

emu::Scope relation(const Thread& a, ThreadId b) {
  if (slot_of(a.id) == slot_of(b)) return emu::CTA;
  return device_of(a) == machine().slots[slot_of(b)].device ? emu::GPU : emu::SYS;
}

std::shared_ptr<Grid> make_grid(Stream& stream, const Kernel& kernel, Idx3 grid_dim, Idx3 block_dim,
                                size_t shared_bytes, void* const* args) {
  Machine& m = machine();
  auto grid = std::make_shared<Grid>();
  Grid& g = *grid;
  g.kernel = &kernel;
  g.stream = &stream;
  g.grid_dim = grid_dim;
  g.block_dim = block_dim;
  g.shared_bytes = shared_bytes;
  for (int device : {-1, stream.device}) {
    auto override = m.grid_overrides.find(device);
    if (override != m.grid_overrides.end()) g.grid_dim = {override->second, 1, 1};
  }
  g.num_blocks = g.grid_dim.x * g.grid_dim.y * g.grid_dim.z;
  for (size_t i = 0; i < kernel.arg_bytes.size(); i++) {
    const uint8_t* arg = static_cast<const uint8_t*>(args[i]);
    g.args.emplace_back(arg, arg + kernel.arg_bytes[i]);
  }
  for (auto& arg : g.args) g.arg_pointers.push_back(arg.data());
  return grid;
}

Stream& create_stream(int device) {
  auto& streams = machine().streams;
  for (auto& stream : streams) {
    if (stream && stream->is_destroyed && stream->queue.empty()) stream.reset();
  }
  auto place = std::find(streams.begin(), streams.end(), nullptr);
  if (place == streams.end()) place = streams.insert(streams.end(), nullptr);
  *place = std::make_unique<Stream>();
  (*place)->device = device;
  return **place;
}

void destroy_stream(Stream& stream) { stream.is_destroyed = true; }

void copy_memory(void* to, const void* from, size_t bytes) {
  Machine& m = machine();
  std::memmove(to, from, bytes);
  m.memory.copy_written(to, from, bytes);
  forget_history(static_cast<char*>(to), bytes);
  wake_waiters(static_cast<char*>(to), bytes);
}

void fill_memory(void* to, uint32_t value, size_t element_bytes, size_t count) {
  char* p = static_cast<char*>(to);
  if (element_bytes == 1) {
    std::memset(p, int(value), count);
  } else {
    for (size_t i = 0; i < count; i++) std::memcpy(p + 4 * i, &value, 4);
  }
  size_t bytes = element_bytes * count;
  machine().memory.mark_written(p, bytes);
  forget_history(p, bytes);
  wake_waiters(p, bytes);
}

void enqueue(Stream& stream, Operation operation) {
  Machine& m = machine();
  stream.queue.push_back(std::move(operation));
  m.last_enqueue = steady_clock::now();
  m.changed.notify_all();
}

bool is_idle() {
  for (auto& stream : machine().streams) {
    if (stream && !stream->queue.empty()) return false;
  }
  return true;
}

bool has_kernels_in_flight() {
  for (auto& stream : machine().streams) {
    if (!stream) continue;
    for (const Operation& op : stream->queue) {
      if (op.kind == Operation::KERNEL) return true;
    }
  }
  return false;
}

bool has_failed() { return machine().failure != Failure::NONE || !machine().races.empty(); }

bool wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_done) {
  Machine& m = machine();
  std::chrono::microseconds interval = MIN_SHARED_INTERVAL;
  for (;;) {
    if (m.failure != Failure::NONE) return false;
    uint64_t progress = m.progress_mark;
    switch (run(is_done, is_all_work_in(), UINT64_MAX)) {
      case Outcome::DONE:
        if (is_idle()) forget_order();
        m.changed.notify_all();
        return !has_failed();
      case Outcome::FAILED: m.changed.notify_all(); return false;
      case Outcome::STUCK:
        interval = progress == m.progress_mark ? std::min(2 * interval, MAX_SHARED_INTERVAL) : MIN_SHARED_INTERVAL;
        m.changed.wait_for(lock, shares_memory() ? interval : RECHECK_INTERVAL);
        break;
    }
  }
}

bool poll_for(const std::function<bool()>& is_done) {
  constexpr uint64_t SWITCHES_PER_QUERY = 500;
  Machine& m = machine();
  return m.failure == Failure::NONE && run(is_done, is_all_work_in(), SWITCHES_PER_QUERY) == Outcome::DONE;
}

void configure(const Config& config) {
  Machine& m = machine();
  abandon_work();
  forget_order();
  m.config = config;
  m.is_direct = !config.races && !config.weak;
  are_accesses_seen = !m.is_direct || config.counts_traffic;
  m.random.state = Random{config.seed}.next();  // or neighbouring seeds would give one sequence, shifted
  m.adversary = draw_adversary(config, m.random);
  m.stats = {};
  m.traffic.clear();
  m.error.clear();
  m.failure = Failure::NONE;
  m.races.clear();
  m.race_sites.clear();
  m.grid_overrides.clear();
  std::fill(m.num_resident, m.num_resident + MAX_DEVICES, 0u);
  m.num_commits = 1;
  m.num_changes = 0;
  std::fill(m.sc_commit, m.sc_commit + 3, 0);
  m.clock_ns = m.progress_mark = m.num_threads_done = 0;
  m.rechecks = m.jumps_in_a_row = 0;
  m.configured = steady_clock::now();
  m.memory.flush_quarantine();
}

}  // namespace emulator
