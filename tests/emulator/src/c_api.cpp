// The C interface that src/lib.rs takes by name. The driver's interface is separate and works on the same
// machine.
#include <cstring>

#include "driver.h"

using namespace emulator;

namespace {
// Streams of launches that do not go through the driver, by device and number.
std::map<std::pair<int, unsigned>, Stream*>& direct_streams() {
  static auto* streams = new std::map<std::pair<int, unsigned>, Stream*>;
  return *streams;
}
}  // namespace

struct EmulatorConfig {
  uint64_t seed;
  int64_t patience_ns;
  int num_devices, mutant;
  int compute_capability[2];
  unsigned max_resident_blocks;
  bool races, weak, torn, counts_traffic;
};

// False, and nothing done, if kernels are in flight.
EMULATOR_API bool emulator_configure(const EmulatorConfig* c) {
  auto held = fake::lock();
  if (has_kernels_in_flight() && !has_failed()) return false;
  Config config;
  config.seed = c->seed;
  config.num_devices = c->num_devices;
  config.races = c->races;
  config.weak = c->weak;
  config.torn = c->torn;
  config.counts_traffic = c->counts_traffic;
  config.max_resident_blocks = c->max_resident_blocks;
  config.mutant = c->mutant;
  config.patience_ns = c->patience_ns;
  configure(config);
  fake::forget_faults();
  fake::abandon_captures();
  std::memcpy(fake::driver().compute_capability, c->compute_capability, sizeof c->compute_capability);
  return true;
}

struct EmulatorReport {
  Stats stats;
  uint64_t device_allocations, host_allocations, streams, modules, memory_handles, reservations, num_races;
};

EMULATOR_API void emulator_report(EmulatorReport* report) {
  auto held = fake::lock();
  Machine& m = machine();
  *report = {m.stats,
             m.memory.num_live(Space::DEVICE),
             m.memory.num_live(Space::HOST),
             fake::driver().streams.size(),
             fake::driver().modules.size(),
             fake::driver().memory_handles.size(),
             m.memory.num_reservations(),
             m.races.size()};
}
// That of the `i`th kernel that was launched, by name; null at the end.
EMULATOR_API const char* emulator_traffic(size_t i, Traffic* traffic) {
  auto held = fake::lock();
  const auto& all = machine().traffic;
  if (i >= all.size()) return nullptr;
  auto kernel = std::next(all.begin(), ptrdiff_t(i));
  *traffic = kernel->second;
  return kernel->first.c_str();
}
// Valid until the machine is used again.
EMULATOR_API const char* emulator_error() { return machine().error.c_str(); }
EMULATOR_API const char* emulator_race(size_t i) { return machine().races[i].c_str(); }

EMULATOR_API const char* emulator_kernel(size_t i) {
  const auto& kernels = kernel_registry(false);
  return i < kernels.size() ? kernels[i].name.c_str() : nullptr;
}

// The next launches on `device` (-1: any) have `blocks` blocks, whatever was asked for; 0 undoes that.
EMULATOR_API void emulator_override_grid(int device, uint32_t blocks) {
  auto held = fake::lock();
  if (blocks) {
    machine().grid_overrides[device] = blocks;
  } else {
    machine().grid_overrides.erase(device);
  }
}

EMULATOR_API void* emulator_allocate(int device, size_t bytes) {
  auto held = fake::lock();
  return machine().memory.allocate(device, bytes, Space::DEVICE, machine().config.races);
}
EMULATOR_API bool emulator_free(void* p) {
  auto held = fake::lock();
  return machine().memory.free(p);
}
EMULATOR_API void emulator_copy(void* to, const void* from, size_t bytes) {
  auto held = fake::lock();
  copy_memory(to, from, bytes);
}

// A kernel with one argument, passed by value. False if there is no such device, or no kernel of that name
// and argument size.
EMULATOR_API bool emulator_launch(const char* name, int device, unsigned stream, unsigned grid,
                                  unsigned block, size_t shared_bytes, const void* arg, size_t arg_bytes) {
  auto held = fake::lock();
  const Kernel* kernel = find_kernel(name);
  if (device < 0 || device >= machine().config.num_devices) return false;
  if (!kernel || kernel->arg_bytes != std::vector<size_t>{arg_bytes}) return false;
  Stream*& s = direct_streams()[{device, stream}];
  if (!s) s = &create_stream(device);
  void* args[] = {const_cast<void*>(arg)};
  enqueue_grid(*s, make_grid(*s, *kernel, {grid, 1, 1}, {block, 1, 1}, shared_bytes, args));
  return true;
}
EMULATOR_API bool emulator_synchronize() {
  auto held = fake::lock();
  return wait_for(held, is_idle);
}
