// The fake driver: modules, launches, stream capture and graphs.
#include <algorithm>
#include <cstring>

#include "driver.h"

using namespace emulator;
using namespace emulator::fake;

namespace {

int blocks_per_multiprocessor(int num_threads, size_t shared_bytes) {
  constexpr size_t RESERVED_SHARED = 1024;
  int by_threads = MAX_THREADS_PER_MULTIPROCESSOR / std::max((num_threads + 31) / 32 * 32, 1);
  int by_shared = int(SHARED_PER_MULTIPROCESSOR / (shared_bytes + RESERVED_SHARED));
  return std::min({by_threads, by_shared, MAX_BLOCKS_PER_MULTIPROCESSOR});
}

int launch(FunctionHandle* f, Idx3 grid, Idx3 block, size_t shared_bytes, void* stream, void** args,
           void** extra, bool is_cooperative, bool is_dependent) {
  if (int error = failure_code()) return error;
  if (!f) return INVALID_HANDLE;
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  constexpr unsigned MAX_GRID_YZ = 65535, MAX_BLOCK_Z = 64;
  uint64_t num_threads = uint64_t(block.x) * block.y * block.z,
           num_blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (num_threads == 0 || num_blocks == 0 || num_threads > MAX_THREADS_PER_BLOCK || block.z > MAX_BLOCK_Z) {
    return INVALID_VALUE;
  }
  if (grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ || extra) return INVALID_VALUE;
  if (shared_bytes > size_t(f->max_dynamic_shared)) return INVALID_VALUE;
  const Kernel* kernel = find_kernel(f->name.c_str());
  if (!kernel) return NOT_FOUND;
  if (!args && !kernel->arg_bytes.empty()) return INVALID_VALUE;
  if (is_cooperative) {
    uint64_t room = uint64_t(NUM_MULTIPROCESSORS) * blocks_per_multiprocessor(int(num_threads), shared_bytes);
    unsigned limit = machine().config.max_resident_blocks;
    if (num_blocks > room || (limit && num_blocks > limit)) return COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  constexpr int FIRST_WITH_DEPENDENTS = 9;
  if (is_dependent && driver().compute_capability[0] < FIRST_WITH_DEPENDENTS) return NOT_SUPPORTED;
  if (!s->capture) {
    driver().counts.launches++;
    driver().counts.dependent_launches += is_dependent;
    enqueue_grid(*s->stream, make_grid(*s->stream, *kernel, grid, block, shared_bytes, args));
    return SUCCESS;
  }
  // The arguments are taken at capture; the kernel (which mutant of it) is looked up at replay.
  std::vector<std::vector<uint8_t>> values;
  for (size_t i = 0; i < kernel->arg_bytes.size(); i++) {
    const uint8_t* arg = static_cast<const uint8_t*>(args[i]);
    values.emplace_back(arg, arg + kernel->arg_bytes[i]);
  }
  submit(*s, [=, name = f->name](Stream& target) {
    std::vector<void*> pointers;
    for (auto& value : values) pointers.push_back(const_cast<uint8_t*>(value.data()));
    driver().counts.graph_kernels++;
    driver().counts.dependent_launches += is_dependent;
    const Kernel& replayed = *find_kernel(name.c_str());
    enqueue_grid(target, make_grid(target, replayed, grid, block, shared_bytes, pointers.data()));
  });
  return SUCCESS;
}

// CUlaunchConfig and CUlaunchAttribute of cuda.h.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int cooperative, programmatic_stream_serialization;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
constexpr int ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

enum FunctionAttribute {
  MAX_THREADS = 0,
  NUM_REGISTERS = 4,
  PTX_VERSION = 5,
  BINARY_VERSION = 6,
  MAX_DYNAMIC_SHARED = 8
};

}  // namespace

CUDA_API cuModuleLoadData(ModuleHandle** module, const void* image) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (!module || !image) return INVALID_VALUE;
  if (is_forbidden_by_capture()) return STREAM_CAPTURE_UNSUPPORTED;
  auto starts_with = [&](const char* prefix) { return !std::memcmp(image, prefix, std::strlen(prefix)); };
  // A fat binary, a cubin, PTX text, or the emulator's own image: whatever it holds, the kernels are ours.
  bool is_image = starts_with("\x50\xed\x55\xba") ||
                  starts_with(
                      "\x7f"
                      "ELF") ||
                  starts_with(".ver") || starts_with("//") || starts_with("CUDA-EMULATOR");
  if (!is_image) return INVALID_IMAGE;
  *module = new ModuleHandle;
  driver().modules.insert(*module);
  return SUCCESS;
}
CUDA_API cuModuleUnload(ModuleHandle* module) {
  DRIVER_CALL_GIVING_BACK(cuModuleUnload(module));
  auto held = lock();
  if (!driver().modules.erase(module)) return INVALID_HANDLE;
  delete module;
  return SUCCESS;
}
CUDA_API cuModuleGetFunction(FunctionHandle** function, ModuleHandle* module, const char* name) {
  DRIVER_CALL();
  auto held = lock();
  if (!function || !name) return INVALID_VALUE;
  if (!driver().modules.count(module)) return INVALID_HANDLE;
  if (!find_kernel(name)) return NOT_FOUND;
  FunctionHandle& f = module->functions[name];
  f.name = name;
  *function = &f;
  return SUCCESS;
}
CUDA_API cuFuncLoad(FunctionHandle* function) {
  DRIVER_CALL();
  return function ? SUCCESS : INVALID_HANDLE;
}
CUDA_API cuFuncGetAttribute(int* value, int which, FunctionHandle* function) {
  DRIVER_CALL();
  auto held = lock();
  if (!value) return INVALID_VALUE;
  if (!function) return INVALID_HANDLE;
  constexpr int PLAUSIBLE_REGISTERS = 32;
  int version = driver().compute_capability[0] * 10 + driver().compute_capability[1];
  switch (which) {
    case MAX_THREADS: *value = MAX_THREADS_PER_BLOCK; break;
    case NUM_REGISTERS: *value = PLAUSIBLE_REGISTERS; break;
    case PTX_VERSION:
    case BINARY_VERSION: *value = version; break;
    case MAX_DYNAMIC_SHARED: *value = function->max_dynamic_shared; break;
    default: *value = 0;
  }
  return SUCCESS;
}
CUDA_API cuFuncSetAttribute(FunctionHandle* function, int which, int value) {
  DRIVER_CALL();
  auto held = lock();
  if (!function) return INVALID_HANDLE;
  if (which != MAX_DYNAMIC_SHARED) return SUCCESS;
  if (value < 0 || value > SHARED_PER_BLOCK_OPTIN) return INVALID_VALUE;
  function->max_dynamic_shared = value;
  return SUCCESS;
}
CUDA_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionHandle* function, int block_size,
                                                     size_t shared_bytes) {
  DRIVER_CALL();
  auto held = lock();
  if (!blocks || block_size <= 0) return INVALID_VALUE;
  if (!function) return INVALID_HANDLE;
  *blocks = block_size > MAX_THREADS_PER_BLOCK ? 0 : blocks_per_multiprocessor(block_size, shared_bytes);
  return SUCCESS;
}

CUDA_API cuLaunchKernel(FunctionHandle* f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        void* stream, void** args, void** extra) {
  DRIVER_CALL();
  auto held = lock();
  return launch(f, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, args, extra,
                false, false);
}
CUDA_API cuLaunchCooperativeKernel(FunctionHandle* f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z,
                                   unsigned shared_bytes, void* stream, void** args) {
  DRIVER_CALL();
  auto held = lock();
  return launch(f, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, args, nullptr,
                true, false);
}
CUDA_API cuLaunchKernelEx(const LaunchConfig* config, FunctionHandle* f, void** args, void** extra) {
  DRIVER_CALL();
  auto held = lock();
  if (!config) return INVALID_VALUE;
  bool is_cooperative = false, is_dependent = false;
  for (unsigned i = 0; i < config->num_attributes; i++) {
    const LaunchAttribute& a = config->attributes[i];
    is_cooperative |= a.id == ATTRIBUTE_COOPERATIVE && a.value.cooperative;
    is_dependent |= a.id == ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                    a.value.programmatic_stream_serialization;
  }
  return launch(f, {config->grid_x, config->grid_y, config->grid_z},
                {config->block_x, config->block_y, config->block_z}, config->shared_bytes, config->stream,
                args, extra, is_cooperative, is_dependent);
}

CUDA_API cuStreamBeginCapture_v2(void* stream, int mode) {
  DRIVER_CALL();
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  bool is_default = driver().streams.count(s) == 0;
  if (is_default || s->capture) return STREAM_CAPTURE_UNSUPPORTED;
  s->capture = new GraphHandle{s->stream->device, {}, s, ++driver().num_captures};
  s->is_capture_broken = false;
  s->num_captured = 0;
  s->follows.clear();
  driver().num_capturing++;
  constexpr int RELAXED = 2;
  s->is_capture_relaxed = mode == RELAXED;
  if (!s->is_capture_relaxed) num_captures_of_thread++;
  return SUCCESS;
}
CUDA_API cuStreamEndCapture(void* stream, GraphHandle** graph) {
  DRIVER_CALL();
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s || !s->capture) return INVALID_VALUE;
  if (!graph) return INVALID_VALUE;
  if (s != s->capture->origin) return STREAM_CAPTURE_UNMATCHED;
  driver().num_capturing--;
  if (!s->is_capture_relaxed) num_captures_of_thread--;
  int result = SUCCESS;
  for (StreamHandle* stream : driver().streams) {
    if (stream->capture != s->capture) continue;
    if (s->follows[stream] < stream->num_captured) result = STREAM_CAPTURE_UNJOINED;
    s->is_capture_broken |= stream->is_capture_broken;
  }
  if (s->is_capture_broken) result = STREAM_CAPTURE_INVALIDATED;
  *graph = s->capture;
  leave_capture(*graph);
  if (result) {
    delete *graph;
    *graph = nullptr;
  } else {
    driver().num_graphs++;
  }
  return result;
}
CUDA_API cuStreamIsCapturing(void* stream, int* status) {
  DRIVER_CALL();
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (!status) return INVALID_VALUE;
  *status = !s->capture ? 0 : s->is_capture_broken ? 2 : 1;
  return SUCCESS;
}
CUDA_API cuThreadExchangeStreamCaptureMode(int* mode) {
  DRIVER_CALL();
  if (!mode) return INVALID_VALUE;
  std::swap(*mode, capture_mode);
  return SUCCESS;
}

CUDA_API cuGraphInstantiateWithFlags(GraphHandle** executable, GraphHandle* graph, unsigned long long) {
  DRIVER_CALL();
  auto held = lock();
  if (!executable || !graph) return INVALID_VALUE;
  *executable = new GraphHandle(*graph);
  driver().num_graphs++;
  return SUCCESS;
}
CUDA_API cuGraphUpload(GraphHandle* executable, void*) {
  DRIVER_CALL();
  return executable ? SUCCESS : INVALID_VALUE;
}
CUDA_API cuGraphLaunch(GraphHandle* executable, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (!executable || executable->device != s->stream->device) return INVALID_VALUE;
  if (s->capture) return STREAM_CAPTURE_UNSUPPORTED;
  driver().counts.graph_launches++;
  for (const GraphNode& node : executable->nodes) node.enqueue(*s->stream);
  return SUCCESS;
}
CUDA_API cuGraphExecDestroy(GraphHandle* executable) {
  DRIVER_CALL_GIVING_BACK(cuGraphExecDestroy(executable));
  auto held = lock();
  driver().num_graphs -= executable != nullptr;
  delete executable;
  return SUCCESS;
}
CUDA_API cuGraphDestroy(GraphHandle* graph) {
  DRIVER_CALL_GIVING_BACK(cuGraphDestroy(graph));
  auto held = lock();
  driver().num_graphs -= graph != nullptr;
  delete graph;
  return SUCCESS;
}
