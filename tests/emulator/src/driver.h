// The objects behind the fake driver's handles. A handle is a pointer to one of these.
#pragma once
#include "machine.h"

namespace emulator::fake {

enum Result : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_OUT_OF_RESOURCES = 701,
  LAUNCH_TIMEOUT = 702,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  PEER_ACCESS_NOT_ENABLED = 705,
  LAUNCH_FAILED = 719,
  COOPERATIVE_LAUNCH_TOO_LARGE = 720,
  NOT_SUPPORTED = 801,
  STREAM_CAPTURE_UNSUPPORTED = 900,
  STREAM_CAPTURE_ISOLATION = 905,
};

constexpr int MAX_THREADS_PER_BLOCK = 1024, NUM_MULTIPROCESSORS = 188, MAX_THREADS_PER_MULTIPROCESSOR = 1536;
constexpr int MAX_BLOCKS_PER_MULTIPROCESSOR = 24, SHARED_PER_MULTIPROCESSOR = 100 << 10;
constexpr int SHARED_PER_BLOCK = 48 << 10, SHARED_PER_BLOCK_OPTIN = 99 << 10;

struct ContextHandle {
  int device = 0;
  unsigned num_retained = 0;
};

struct GraphNode {
  std::function<void(Stream&)> enqueue;
};
struct GraphHandle {
  int device;
  std::vector<GraphNode> nodes;
};

struct StreamHandle {
  Stream* stream;
  GraphHandle* capture = nullptr;
  bool is_capture_broken = false, is_capture_relaxed = false;
};

struct EventHandle {
  std::shared_ptr<Event> event = std::make_shared<Event>();
  bool has_timing = true;
  GraphHandle* captured_in = nullptr;
};

struct ModuleHandle;
struct FunctionHandle {
  std::string name;
  int max_dynamic_shared = SHARED_PER_BLOCK;
};
struct ModuleHandle {
  std::map<std::string, FunctionHandle> functions;
};

// Memory without an address: a file, whose last page says what it is. Processes that map it share it.
struct MemoryHandle {
  int file, device;
  size_t bytes;
};

struct Driver {
  bool is_initialized = false;
  int compute_capability[2] = {12, 0};
  ContextHandle contexts[MAX_DEVICES];
  StreamHandle* default_streams[MAX_DEVICES] = {};
  std::set<StreamHandle*> streams;
  std::set<ModuleHandle*> modules;
  unsigned num_capturing = 0;
  std::set<MemoryHandle*> memory_handles;
  // What goes wrong with memory for several processes: the numbers of `SharingFault` in lib.rs.
  enum SharingFault : int { NO_FAULT, UNSUPPORTED, DIES_IN_EXPORT, FAILS_TO_MAP, IMPORTS_OTHER_MEMORY };
  int sharing_fault = NO_FAULT;
};
Driver& driver();

extern thread_local ContextHandle* current_context;
extern thread_local int capture_mode;  // 0 global, 1 thread-local, 2 relaxed
extern thread_local unsigned num_captures_of_thread;

// Every entry point holds the machine.
using Lock = std::unique_lock<std::mutex>;
inline Lock lock() { return Lock(machine().mutex); }

// The code of the error that the machine is stuck with, or success.
Result failure_code();
// The stream behind a handle; null, 1 and 2 name the current context's default stream. Null if there is none.
StreamHandle* find_stream(void* handle);
Result wait_for_stream(Lock& held, StreamHandle& stream);
Result wait_for_device(Lock& held, int device);
// Runs in the stream now, or becomes a node of the graph that the stream captures.
void submit(StreamHandle& stream, std::function<void(Stream&)> enqueue_on);
// Calls that a capturing thread must not make, since they would synchronise.
inline bool is_forbidden_by_capture() { return num_captures_of_thread > 0 && capture_mode != 2; }

}  // namespace emulator::fake

#define CUDA_API extern "C" __attribute__((visibility("default"))) int
