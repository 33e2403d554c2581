// The fake driver: initialisation, devices, contexts, peer access, error names.
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace emulator::fake {

thread_local ContextHandle* current_context = nullptr;
thread_local int capture_mode = 0;
thread_local unsigned num_captures_of_thread = 0;

Driver& driver() {
  static Driver* the = [] {
    auto* d = new Driver;
    for (int i = 0; i < MAX_DEVICES; i++) d->contexts[i].device = i, d->memory_limit[i] = SIZE_MAX;
    return d;
  }();
  return *the;
}

Result failure_code() {
  switch (machine().failure) {
    case Failure::NONE: return machine().races.empty() ? SUCCESS : ILLEGAL_ADDRESS;
    case Failure::ACCESS: return ILLEGAL_ADDRESS;
    case Failure::DEADLOCK: return LAUNCH_TIMEOUT;
    case Failure::TRAP: return LAUNCH_FAILED;
  }
  return LAUNCH_FAILED;
}

namespace {

bool is_device(int device) { return device >= 0 && device < machine().config.num_devices; }

int attribute(int which) {
  switch (which) {
    case 1: return MAX_THREADS_PER_BLOCK;
    case 2:
    case 3: return 1024;        // block dimensions x, y
    case 4: return 64;          // block dimension z
    case 5: return 0x7fffffff;  // grid dimension x
    case 6:
    case 7: return 65535;  // grid dimensions y, z
    case 8: return SHARED_PER_BLOCK;
    case 10: return 32;         // warp size
    case 12: return 65536;      // registers of a block
    case 13: return 2'400'000;  // clock, kHz
    case 16: return NUM_MULTIPROCESSORS;
    case 19: return 1;          // can map host memory
    case 31: return 1;          // concurrent kernels
    case 38: return 128 << 20;  // L2 bytes
    case 39: return MAX_THREADS_PER_MULTIPROCESSOR;
    case 40: return 2;  // async engines
    case 41: return 1;  // unified addressing
    case 75: return driver().compute_capability[0];
    case 76: return driver().compute_capability[1];
    case 78: return 1;  // stream priorities
    case 81: return SHARED_PER_MULTIPROCESSOR;
    case 82: return 65536;  // registers of a multiprocessor
    case 83: return 1;      // managed memory
    case 95: return 1;      // cooperative launch
    case 97: return SHARED_PER_BLOCK_OPTIN;
    case 102: return 1;  // memory mapped at addresses of choice
    case 103: return driver().sharing_fault != Driver::UNSUPPORTED;  // and handed on as file descriptors
    case 106: return MAX_BLOCKS_PER_MULTIPROCESSOR;
    case 115: return 1;  // memory pools
    default: return 0;
  }
}

}  // namespace
}  // namespace emulator::fake

using namespace emulator;
using namespace emulator::fake;

CUDA_API cuInit(unsigned flags) {
  DRIVER_CALL();
  auto held = lock();
  if (flags) return INVALID_VALUE;
  driver().is_initialized = true;
  return SUCCESS;
}
CUDA_API cuDriverGetVersion(int* version) {
  DRIVER_CALL();
  if (!version) return INVALID_VALUE;
  auto held = lock();
  *version = driver().version;
  return SUCCESS;
}
CUDA_API cuDeviceGetCount(int* count) {
  DRIVER_CALL();
  auto held = lock();
  if (!driver().is_initialized) return NOT_INITIALIZED;
  if (!count) return INVALID_VALUE;
  *count = machine().config.num_devices;
  return SUCCESS;
}
CUDA_API cuDeviceGet(int* device, int ordinal) {
  DRIVER_CALL();
  auto held = lock();
  if (!driver().is_initialized) return NOT_INITIALIZED;
  if (!device) return INVALID_VALUE;
  if (!is_device(ordinal)) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}
CUDA_API cuDeviceGetName(char* name, int length, int device) {
  DRIVER_CALL();
  auto held = lock();
  if (!name || length <= 0) return INVALID_VALUE;
  if (!is_device(device)) return INVALID_DEVICE;
  std::snprintf(name, size_t(length), "Emulated GPU %d", device);
  return SUCCESS;
}
CUDA_API cuDeviceGetAttribute(int* value, int which, int device) {
  DRIVER_CALL();
  auto held = lock();
  if (!value) return INVALID_VALUE;
  if (!is_device(device)) return INVALID_DEVICE;
  *value = attribute(which);
  return SUCCESS;
}
CUDA_API cuDeviceGetUuid_v2(char* uuid, int device) {
  DRIVER_CALL();
  auto held = lock();
  if (!uuid) return INVALID_VALUE;
  if (!is_device(device)) return INVALID_DEVICE;
  std::memset(uuid, device + 1, 16);
  return SUCCESS;
}
CUDA_API cuDeviceTotalMem_v2(size_t* bytes, int device) {
  DRIVER_CALL();
  auto held = lock();
  if (!bytes) return INVALID_VALUE;
  if (!is_device(device)) return INVALID_DEVICE;
  *bytes = size_t(8) << 30;
  return SUCCESS;
}
CUDA_API cuDeviceCanAccessPeer(int* can, int device, int peer) {
  DRIVER_CALL();
  auto held = lock();
  if (!can) return INVALID_VALUE;
  if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
  *can = device != peer;
  return SUCCESS;
}
CUDA_API cuDeviceGetP2PAttribute(int* value, int which, int device, int peer) {
  DRIVER_CALL();
  auto held = lock();
  constexpr int PERFORMANCE_RANK = 1, LAST = 4;
  if (!value || which < 1 || which > LAST) return INVALID_VALUE;
  if (!is_device(device) || !is_device(peer) || device == peer) return INVALID_DEVICE;
  *value = which == PERFORMANCE_RANK ? 0 : 1;
  return SUCCESS;
}

CUDA_API cuDevicePrimaryCtxRetain(ContextHandle** context, int device) {
  DRIVER_CALL();
  auto held = lock();
  if (!driver().is_initialized) return NOT_INITIALIZED;
  if (!context) return INVALID_VALUE;
  if (!is_device(device)) return INVALID_DEVICE;
  driver().contexts[device].num_retained++;
  machine().checks_peers = true;
  *context = &driver().contexts[device];
  return SUCCESS;
}
CUDA_API cuDevicePrimaryCtxRelease_v2(int device) {
  DRIVER_CALL_GIVING_BACK(cuDevicePrimaryCtxRelease_v2(device));
  auto held = lock();
  if (device < 0 || device >= MAX_DEVICES) return INVALID_DEVICE;
  ContextHandle& context = driver().contexts[device];
  if (!context.num_retained) return INVALID_CONTEXT;
  if (--context.num_retained == 0) machine().peers_enabled[device] = 0;
  machine().checks_peers = false;
  for (const ContextHandle& c : driver().contexts) machine().checks_peers |= c.num_retained > 0;
  return SUCCESS;
}
CUDA_API cuCtxSetCurrent(ContextHandle* context) {
  DRIVER_CALL();
  current_context = context;
  return SUCCESS;
}
CUDA_API cuCtxGetCurrent(ContextHandle** context) {
  DRIVER_CALL();
  if (!context) return INVALID_VALUE;
  *context = current_context;
  return SUCCESS;
}
CUDA_API cuCtxGetDevice(int* device) {
  DRIVER_CALL();
  if (!device) return INVALID_VALUE;
  if (!current_context) return INVALID_CONTEXT;
  *device = current_context->device;
  return SUCCESS;
}
CUDA_API cuCtxSynchronize() {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (driver().num_capturing) return STREAM_CAPTURE_UNSUPPORTED;
  return wait_for_device(held, current_context->device);
}
CUDA_API cuCtxEnablePeerAccess(ContextHandle* peer, unsigned flags) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context || !peer) return INVALID_CONTEXT;
  if (flags) return INVALID_VALUE;
  if (peer == current_context) return INVALID_DEVICE;
  uint64_t& enabled = machine().peers_enabled[current_context->device];
  if (enabled >> peer->device & 1) return PEER_ACCESS_ALREADY_ENABLED;
  enabled |= uint64_t(1) << peer->device;
  return SUCCESS;
}
CUDA_API cuCtxDisablePeerAccess(ContextHandle* peer) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context || !peer) return INVALID_CONTEXT;
  uint64_t& enabled = machine().peers_enabled[current_context->device];
  if (!(enabled >> peer->device & 1)) return PEER_ACCESS_NOT_ENABLED;
  enabled &= ~(uint64_t(1) << peer->device);
  return SUCCESS;
}

CUDA_API cuGetErrorName(int error, const char** name) {
  DRIVER_CALL();
  static const std::map<int, const char*> NAMES = {
      {SUCCESS, "CUDA_SUCCESS"},
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
      {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {NOT_READY, "CUDA_ERROR_NOT_READY"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT"},
      {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
      {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"},
      {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {COOPERATIVE_LAUNCH_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
      {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
      {STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
      {STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
      {STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
      {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT"},
      {STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
  };
  if (!name) return INVALID_VALUE;
  auto found = NAMES.find(error);
  *name = found == NAMES.end() ? "CUDA_ERROR_UNKNOWN" : found->second;
  return found == NAMES.end() ? INVALID_VALUE : SUCCESS;
}
CUDA_API cuGetErrorString(int error, const char** text) {
  DRIVER_CALL();
  return cuGetErrorName(error, text);
}
