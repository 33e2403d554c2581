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
  STREAM_CAPTURE_INVALIDATED = 901,
  STREAM_CAPTURE_MERGE = 902,
  STREAM_CAPTURE_UNMATCHED = 903,
  STREAM_CAPTURE_UNJOINED = 904,
  STREAM_CAPTURE_ISOLATION = 905,
  STREAM_CAPTURE_IMPLICIT = 906,
  CAPTURED_EVENT = 907,
};

constexpr int DEFAULT_VERSION = 13000;
constexpr int MAX_THREADS_PER_BLOCK = 1024, NUM_MULTIPROCESSORS = 188, MAX_THREADS_PER_MULTIPROCESSOR = 1536;
constexpr int MAX_BLOCKS_PER_MULTIPROCESSOR = 24, SHARED_PER_MULTIPROCESSOR = 100 << 10;
constexpr int SHARED_PER_BLOCK = 48 << 10, SHARED_PER_BLOCK_OPTIN = 99 << 10;

struct ContextHandle {
  int device = 0;
  unsigned num_retained = 0;
};

struct StreamHandle;
struct GraphNode {
  std::function<void(Stream&)> enqueue;
};
// The nodes are in the order of the calls that were captured, which is one that the graph's edges allow: what a
// graph leaves unordered never overlaps here.
struct GraphHandle {
  int device;
  std::vector<GraphNode> nodes;
  StreamHandle* origin = nullptr;  // where its capture began
  uint64_t capture_number = 0;
};

// How much of each stream's captured work something comes after.
using CapturedWork = std::map<StreamHandle*, uint64_t>;

struct StreamHandle {
  Stream* stream;
  GraphHandle* capture = nullptr;
  bool is_capture_broken = false, is_capture_relaxed = false;
  uint64_t num_captured = 0;
  CapturedWork follows = {};
};

struct EventHandle {
  std::shared_ptr<Event> event = std::make_shared<Event>();
  bool has_timing = true;
  uint64_t capture_number = 0;  // of the capture that it was last recorded in; 0 is none
  CapturedWork follows = {};
};

struct ModuleHandle;
struct FunctionHandle {
  std::string name;
  int max_dynamic_shared = SHARED_PER_BLOCK;
};
struct ModuleHandle {
  std::map<std::string, FunctionHandle> functions;
};

// Since the machine was configured. As DriverCounts in faults.rs.
struct DriverCounts {
  uint64_t host_syncs, launches, dependent_launches, graph_launches, graph_kernels;
  uint64_t device_allocations, host_allocations, uploads, upload_bytes, downloads, download_bytes;
  uint64_t contexts, events, graphs;  // live
};

// Memory without an address: a file, whose last page says what it is. Processes that map it share it.
struct MemoryHandle {
  int file, device;
  size_t bytes;
};

struct Driver {
  bool is_initialized = false;
  int version = DEFAULT_VERSION;
  size_t memory_limit[MAX_DEVICES];
  DriverCounts counts{};
  uint64_t num_events = 0, num_graphs = 0, num_captures = 0;
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

// The code that a call is to fail with, or success (driver_faults.cpp).
int begin_call(const char* function);
// Calls by the driver itself are not counted and don't fail.
struct NestedCalls {
  NestedCalls();
  ~NestedCalls();
};
bool exceeds_memory(int device, size_t bytes);
void forget_faults();

// The code of the error that the machine is stuck with, or success.
Result failure_code();
// The stream behind a handle; null, 1 and 2 name the current context's default stream. Null if there is none.
StreamHandle* find_stream(void* handle);
Result wait_for_stream(Lock& held, StreamHandle& stream);
Result wait_for_device(Lock& held, int device);
// Runs in the stream now, or becomes a node of the graph that the stream captures.
void submit(StreamHandle& stream, std::function<void(Stream&)> enqueue_on);
// The streams of a capture capture no more.
void leave_capture(GraphHandle* graph);
// Of a run that failed on this thread.
void abandon_captures();
// Calls that a capturing thread must not make, since they would synchronise.
inline bool is_forbidden_by_capture() { return num_captures_of_thread > 0 && capture_mode != 2; }

}  // namespace emulator::fake

#define CUDA_API extern "C" __attribute__((visibility("default"))) int
#define EMULATOR_API extern "C" __attribute__((visibility("default")))

// One of these comes first in every entry point.
#define DRIVER_CALL() \
  if (int injected = emulator::fake::begin_call(__func__)) return injected
// In calls that give something back: like a real driver's, one that reports an error has done its work, unless a
// capture forbids it.
#define DRIVER_CALL_GIVING_BACK(call)                          \
  do {                                                         \
    if (int injected = emulator::fake::begin_call(__func__)) { \
      emulator::fake::NestedCalls nested;                      \
      if (injected != STREAM_CAPTURE_UNSUPPORTED) call;        \
      return injected;                                         \
    }                                                          \
  } while (false)
