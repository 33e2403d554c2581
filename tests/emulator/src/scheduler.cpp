// Which thread runs next, and what a device does with its streams' work.
#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace emulator {

void leave_block(Thread& t);  // collectives.cpp

namespace {

constexpr uint64_t MAX_SWITCHES = 400'000'000;
// A parked thread is let on this often before it counts as stuck: the last rounds reach a loop's read of the
// clock, which may come only every thousandth poll.
constexpr unsigned RECHECK_POLLS[] = {0, 0, 0, 0, 0, 4, 16, 64, 256, 1024};
constexpr unsigned NUM_RECHECKS = sizeof RECHECK_POLLS / sizeof *RECHECK_POLLS;
constexpr unsigned NUM_CHEAP_RECHECKS = 2;
constexpr uint64_t JUMP_NS = 100'000'000;
constexpr unsigned MAX_JUMPS = 1200;  // two minutes

bool runs_before(const Thread* a, const Thread* b) {
  return a->priority != b->priority ? a->priority > b->priority : a->id < b->id;
}

void draw_priorities() {
  Machine& m = machine();
  int level = m.adversary.level;
  constexpr uint32_t RANGE = 1 << 20;
  uint32_t of_device[MAX_DEVICES];
  for (uint32_t& p : of_device) p = m.random.below(RANGE);
  for (auto& b : m.blocks) {
    uint32_t priority = level == 1 ? of_device[b->grid->stream->device] : m.random.below(RANGE);
    for (Thread& t : b->threads) {
      bool is_first_of_warp = index_in_block(t.id) % 32 == 0;
      if (level == 4 || (level == 3 && is_first_of_warp)) priority = m.random.below(RANGE);
      t.priority = priority;
    }
  }
  m.runnable.restore_order();
}

void thread_main() {
  {
    Thread& t = self();
    Grid& g = *t.block->grid;
    g.kernel->entry(g.arg_pointers.data());
  }
  Machine& m = machine();
  Thread& t = self();
  t.where = "its end";
  m.num_threads_done++;
  leave_block(t);
  if (t.block->num_live == 0) m.has_finished_block = true;
  leave(State::DONE);
  std::abort();
}

void reset(Thread& t, Block& b, uint32_t index, const BaseRef& start) {
  Idx3 dim = b.grid->block_dim;
  t.id = thread_id(b.slot, index);
  t.block = &b;
  t.index = {index % dim.x, index / dim.x % dim.y, index / (dim.x * dim.y)};
  t.where = "its start";
  t.clock = Clock{start, t.id, component(start, t.id) + 1};
  for (int k = 0; k < 3; k++) {
    t.release_fence[k] = Clock();
    t.observed[k] = BaseRef();
  }
  t.sc_floor = 0;
  t.stale_in_a_row = 0;
  t.unparked_polls = 0;
  t.copies.clear();
  t.copy_groups.clear();
  t.num_uncommitted_copies = 0;
  end_polling(t);
  t.stack = take_stack();
  prepare(t.context, t.stack, thread_main);
  make_runnable(t);
}

void start_block(const std::shared_ptr<Grid>& grid, uint32_t linear) {
  Machine& m = machine();
  Grid& g = *grid;
  auto block = std::make_unique<Block>();
  Block& b = *block;
  b.grid = grid;
  b.slot = g.stream->slots[linear];
  b.index = {linear % g.grid_dim.x, linear / g.grid_dim.x % g.grid_dim.y,
             linear / (g.grid_dim.x * g.grid_dim.y)};
  unsigned num_threads = g.block_dim.x * g.block_dim.y * g.block_dim.z;
  b.num_live = num_threads;
  b.threads.resize(num_threads);
  b.warps.resize((num_threads + 31) / 32);
  m.slots[b.slot] = SlotOwner{g.stream->device, &b, {}};
  int device = g.stream->device;
  if (g.shared_bytes) {
    b.dynamic_shared = m.memory.allocate(device, g.shared_bytes, Space::SHARED, m.config.races);
  }
  m.num_resident[device]++;
  m.stats.blocks++;
  m.blocks.push_back(std::move(block));
  for (unsigned i = 0; i < num_threads; i++) reset(b.threads[i], b, i, g.stream->clock);
}

void start_grid(Grid& g) {
  Machine& m = machine();
  g.is_started = true;
  g.start_order.resize(g.num_blocks);
  for (unsigned i = 0; i < g.num_blocks; i++) g.start_order[i] = i;
  for (unsigned i = g.num_blocks; i > 1; i--)
    std::swap(g.start_order[i - 1], g.start_order[m.random.below(i)]);
  while (g.stream->slots.size() < g.num_blocks) {
    g.stream->slots.push_back(uint32_t(m.slots.size()));
    m.slots.push_back({});
  }
}

// The end of a kernel releases all that it wrote, at system scope, to whatever comes after it in its stream.
void finish_grid(Grid& g) {
  Machine& m = machine();
  for (auto& b : g.finished) {
    for (Thread& t : b->threads) commit_all(t);
    m.slots[b->slot].name = describe(b->threads[0]);
    m.slots[b->slot].block = nullptr;
  }
  g.finished.clear();
  g.stream->queue.pop_front();
}

void retire_finished_blocks() {
  Machine& m = machine();
  m.has_finished_block = false;
  for (size_t i = 0; i < m.blocks.size();) {
    if (m.blocks[i]->num_live > 0) {
      i++;
      continue;
    }
    std::unique_ptr<Block> b = std::move(m.blocks[i]);
    m.blocks.erase(m.blocks.begin() + ptrdiff_t(i));
    std::shared_ptr<Grid> g = b->grid;
    m.num_resident[g->stream->device]--;
    for (auto& [site, memory] : b->shared) m.memory.free(memory);
    if (b->dynamic_shared) m.memory.free(b->dynamic_shared);
    for (Thread& t : b->threads) return_stack(t.stack);
    if (m.is_direct) {
      m.slots[b->slot].block = nullptr;
    } else {
      std::vector<uint32_t> times;
      BaseRef clock = g->stream->clock;
      for (Thread& t : b->threads) {
        clock = join(clock, t.clock.base);
        times.push_back(t.clock.own);
      }
      g->stream->clock = with_chunk(clock, b->slot, std::move(times));
      g->finished.push_back(std::move(b));
    }
    if (++g->num_done == g->num_blocks) finish_grid(*g);
  }
}

// Returns whether the stream's head made progress.
bool advance(Stream& stream) {
  Machine& m = machine();
  if (stream.queue.empty()) return false;
  Operation& op = stream.queue.front();
  switch (op.kind) {
    case Operation::ACTION: {
      std::function<void()> action = std::move(op.action);
      stream.queue.pop_front();
      action();
      return true;
    }
    case Operation::RECORD:
      op.event->done = op.event_number;
      op.event->time_ns = m.clock_ns;
      op.event->clock = stream.clock;
      op.event->epoch = m.epoch;
      stream.queue.pop_front();
      return true;
    case Operation::WAIT:
      if (op.event->done < op.event_number) return false;
      if (op.event->epoch == m.epoch) stream.clock = join(stream.clock, op.event->clock);
      stream.queue.pop_front();
      return true;
    case Operation::KERNEL: break;
  }
  bool has_started_any = false;
  std::shared_ptr<Grid> grid = op.grid;
  if (!grid->is_started) start_grid(*grid);
  unsigned limit = m.config.max_resident_blocks;
  while (grid->num_begun < grid->num_blocks && (!limit || m.num_resident[stream.device] < limit)) {
    start_block(grid, grid->start_order[grid->num_begun++]);
    has_started_any = true;
  }
  if (has_started_any && m.adversary.level) draw_priorities();
  return has_started_any;
}

void advance_streams() {
  Machine& m = machine();
  bool has_advanced = true;
  while (has_advanced && m.failure == Failure::NONE) {
    has_advanced = false;
    if (m.has_finished_block) {
      retire_finished_blocks();
      has_advanced = true;
    }
    for (size_t i = 0; i < m.streams.size(); i++) {
      while (m.streams[i] && advance(*m.streams[i])) has_advanced = true;
    }
  }
}

template <class Visit>
void for_each_parked(Visit visit) {
  for (auto& b : machine().blocks) {
    for (Thread& t : b->threads) {
      if (t.state == State::PARKED) visit(t);
    }
  }
}

void note_progress() {
  Machine& m = machine();
  uint64_t progress = m.num_changes + m.num_threads_done;
  if (progress == m.progress_mark) return;
  m.progress_mark = progress;
  m.rechecks = 0;
  m.jumps_in_a_row = 0;
}

bool recheck_parked(unsigned max_rechecks) {
  Machine& m = machine();
  if (m.rechecks >= max_rechecks) return false;
  unsigned polls = RECHECK_POLLS[m.rechecks++];
  bool has_woken = false;
  for_each_parked([&](Thread& t) {
    t.unparked_polls = polls;
    make_runnable(t);
    has_woken = true;
  });
  return has_woken;
}

// Nothing but the passing of time can help those who watch the clock: let much of it pass.
bool jump_clock() {
  Machine& m = machine();
  if (m.jumps_in_a_row >= MAX_JUMPS) return false;
  bool has_woken = false;
  for_each_parked([&](Thread& t) {
    if (!t.reads_clock) return;
    t.unparked_polls = t.polls_per_clock + 1;
    make_runnable(t);
    has_woken = true;
  });
  if (!has_woken) return false;
  m.clock_ns += JUMP_NS;
  m.jumps_in_a_row++;
  m.stats.clock_jumps++;
  return true;
}

void report_deadlock() {
  Machine& m = machine();
  std::map<std::string, int> counts;
  for (auto& b : m.blocks) {
    for (Thread& t : b->threads) {
      if (t.state == State::DONE) continue;
      std::string text = describe(t);
      text = text.substr(0, text.rfind(" thread")) + " wait in " + t.where;
      if (t.state == State::PARKED && !t.polled.empty())
        text += " at " + m.memory.describe(t.polled.back().p);
      counts[text]++;
    }
  }
  std::string text = "deadlock:";
  for (auto& [where, count] : counts) text += "\n  " + std::to_string(count) + " threads of " + where;
  for (auto& stream : m.streams) {
    if (!stream || stream->queue.empty()) continue;
    const Operation& op = stream->queue.front();
    std::string device = " on device " + std::to_string(stream->device);
    if (op.kind == Operation::WAIT)
      text += "\n  a stream" + device + " waits for an event that nobody records";
    if (op.kind == Operation::KERNEL && op.grid->num_begun < op.grid->num_blocks) {
      text += "\n  " + std::to_string(op.grid->num_blocks - op.grid->num_begun) + " blocks of " +
              op.grid->kernel->name + device + " wait for room";
    }
  }
  fail(Failure::DEADLOCK, text);
}

}  // namespace

void RunQueue::place(size_t i, Thread* t) {
  threads_[i] = t;
  t->run_position = uint32_t(i);
}
void RunQueue::sift(size_t i) {
  Thread* t = threads_[i];
  while (i > 0 && runs_before(t, threads_[(i - 1) / 2])) {
    place(i, threads_[(i - 1) / 2]);
    i = (i - 1) / 2;
  }
  for (size_t child; (child = 2 * i + 1) < threads_.size(); i = child) {
    if (child + 1 < threads_.size() && runs_before(threads_[child + 1], threads_[child])) child++;
    if (!runs_before(threads_[child], t)) break;
    place(i, threads_[child]);
  }
  place(i, t);
}
void RunQueue::add(Thread* t) {
  threads_.push_back(t);
  sift(threads_.size() - 1);
}
void RunQueue::remove(Thread* t) {
  size_t i = t->run_position;
  t->run_position = ~0u;
  Thread* last = threads_.back();
  threads_.pop_back();
  if (last == t) return;
  threads_[i] = last;
  sift(i);
}
Thread* RunQueue::pick(Random& random, bool by_priority) {
  return by_priority ? threads_[0] : threads_[random.below(uint32_t(threads_.size()))];
}
void RunQueue::restore_order() {
  std::sort(threads_.begin(), threads_.end(), runs_before);
  for (size_t i = 0; i < threads_.size(); i++) threads_[i]->run_position = uint32_t(i);
}

void RunQueue::add_in_turn(Thread* t) {
  t->run_position = 0;
  in_turn_.push_back(t);
}
Thread* RunQueue::take_next() {
  Thread* t = in_turn_.front();
  in_turn_.pop_front();
  t->run_position = ~0u;
  return t;
}

void make_runnable(Thread& t) {
  Machine& m = machine();
  t.state = State::RUNNABLE;
  if (t.run_position != ~0u) return;
  if (m.is_direct) {
    m.runnable.add_in_turn(&t);
  } else {
    m.runnable.add(&t);
  }
}

void leave(State state) {
  Machine& m = machine();
  Thread& t = self();
  t.state = state;
  m.stats.switches++;
  if (!m.is_direct) {
    if (state != State::RUNNABLE) m.runnable.remove(&t);
    switch_context(t.context, m.scheduler);
    return;
  }
  if (state == State::RUNNABLE) m.runnable.add_in_turn(&t);
  // To the next thread, past the scheduler, unless that has something to do.
  bool is_scheduler_needed = m.has_finished_block || m.failure != Failure::NONE;
  if (m.runnable.empty() || is_scheduler_needed || m.stats.switches >= m.last_switch) {
    switch_context(t.context, m.scheduler);
    return;
  }
  m.current = m.runnable.take_next();
  if (m.current != &t) switch_context(t.context, m.current->context);
}

void yield_point(const char* where) {
  Machine& m = machine();
  self().where = where;
  m.clock_ns++;
  if (m.adversary.commits >= 1) {
    while (commit_random()) {
    }
  } else if (m.random.chance(m.adversary.commits)) {
    commit_random();
  }
  if (!m.random.chance(m.adversary.switches)) return;
  if (m.adversary.level &&
      m.random.chance(std::min(m.adversary.repriorities, 4.0 / double(m.runnable.size())))) {
    draw_priorities();
  }
  leave(State::RUNNABLE);
}

void fail(Failure kind, const std::string& what) {
  Machine& m = machine();
  if (m.failure != Failure::NONE) return;
  m.failure = kind;
  m.error = what;
}

void fail_and_leave(Failure kind, const std::string& what) {
  fail(kind, what);
  for (;;) leave(State::RUNNABLE);  // the stack is abandoned
}

Outcome run(const std::function<bool()>& is_done, bool is_all_work_in, uint64_t max_switches) {
  Machine& m = machine();
  if (!is_all_work_in && m.rechecks >= NUM_CHEAP_RECHECKS) m.rechecks = NUM_CHEAP_RECHECKS - 1;
  uint64_t end = m.stats.switches + max_switches;
  if (end < max_switches) end = UINT64_MAX;
  m.last_switch = std::min(end, MAX_SWITCHES + 1);
  for (;;) {
    advance_streams();
    if (m.failure != Failure::NONE) return Outcome::FAILED;
    if (is_done()) return Outcome::DONE;
    while (!m.runnable.empty() && !m.has_finished_block && m.failure == Failure::NONE) {
      if (m.stats.switches >= end) return Outcome::STUCK;
      if (m.stats.switches > MAX_SWITCHES) fail(Failure::DEADLOCK, "no end in sight: a livelock?");
      m.current = m.is_direct ? m.runnable.take_next() : m.runnable.pick(m.random, m.adversary.level > 0);
      switch_context(m.scheduler, m.current->context);
      m.current = nullptr;
    }
    if (m.failure != Failure::NONE) return Outcome::FAILED;
    if (m.has_finished_block || commit_random()) continue;
    note_progress();
    if (recheck_parked(is_all_work_in ? NUM_RECHECKS : NUM_CHEAP_RECHECKS)) continue;
    if (!is_all_work_in) return Outcome::STUCK;
    if (jump_clock()) continue;
    report_deadlock();
    return Outcome::FAILED;
  }
}

}  // namespace emulator
