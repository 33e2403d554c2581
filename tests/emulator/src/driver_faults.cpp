// The fake driver: what it was asked to do, and failures on request.
#include <cstring>

#include "driver.h"

namespace emulator::fake {
namespace {

struct Faults {
  std::mutex mutex;
  std::vector<const char*> calls;
  std::string function;    // whose call is to fail; empty is any
  uint64_t countdown = 0;  // which of its calls, from 1; 0 is none
  int code = 0;
  bool is_sticky = false;
  const char* failed = nullptr;  // the function whose call has failed
};
Faults& faults() {
  static Faults* the = new Faults;
  return *the;
}

thread_local unsigned num_nested = 0;

// What still works when the context of a device is lost.
bool needs_context(const char* function) {
  for (const char* prefix : {"cuInit", "cuDriver", "cuDevice", "cuCtxSet", "cuCtxGet", "cuGetError"}) {
    if (!std::strncmp(function, prefix, std::strlen(prefix))) return false;
  }
  return true;
}

}  // namespace

int begin_call(const char* function) {
  if (num_nested) return SUCCESS;
  Faults& f = faults();
  std::lock_guard<std::mutex> held(f.mutex);
  f.calls.push_back(function);
  if (f.failed) {
    return f.is_sticky && (needs_context(function) || !std::strcmp(function, f.failed)) ? f.code : SUCCESS;
  }
  if (!f.countdown || (!f.function.empty() && f.function != function) || --f.countdown) return SUCCESS;
  f.failed = function;
  return f.code;
}

NestedCalls::NestedCalls() { num_nested++; }
NestedCalls::~NestedCalls() { num_nested--; }

bool exceeds_memory(int device, size_t bytes) {
  return machine().memory.live_bytes(device, Space::DEVICE) + bytes > driver().memory_limit[device];
}

void forget_faults() {
  Faults& f = faults();
  std::lock_guard<std::mutex> held(f.mutex);
  f.calls.clear();
  f.countdown = 0;
  f.failed = nullptr;
  driver().counts = {};
  driver().version = DEFAULT_VERSION;
  std::fill(driver().memory_limit, driver().memory_limit + MAX_DEVICES, SIZE_MAX);
}

}  // namespace emulator::fake

using namespace emulator;
using namespace emulator::fake;

// The call number `nth` from now of `function` (of any, if null) fails with `code`; with `is_sticky`, all later
// ones that need a context, too.
EMULATOR_API void emulator_fail(const char* function, uint64_t nth, int code, bool is_sticky) {
  Faults& f = faults();
  std::lock_guard<std::mutex> held(f.mutex);
  f.function = function ? function : "";
  f.countdown = nth;
  f.code = code;
  f.is_sticky = is_sticky;
  f.failed = nullptr;
}
// Null if none has failed.
EMULATOR_API const char* emulator_failed_call() {
  std::lock_guard<std::mutex> held(faults().mutex);
  return faults().failed;
}
// Null after the last.
EMULATOR_API const char* emulator_call(size_t i) {
  std::lock_guard<std::mutex> held(faults().mutex);
  return i < faults().calls.size() ? faults().calls[i] : nullptr;
}
EMULATOR_API void emulator_set_memory_limit(int device, size_t bytes) {
  auto held = lock();
  driver().memory_limit[device] = bytes;
}
EMULATOR_API void emulator_set_driver_version(int version) {
  auto held = lock();
  driver().version = version;
}
EMULATOR_API void emulator_driver_counts(DriverCounts* counts) {
  auto held = lock();
  *counts = driver().counts;
  for (const ContextHandle& context : driver().contexts) counts->contexts += context.num_retained;
  counts->events = driver().num_events;
  counts->graphs = driver().num_graphs;
}
