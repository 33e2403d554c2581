// The fake driver: memory and copies.
#include <cstring>

#include "driver.h"

using namespace emulator;
using namespace emulator::fake;

namespace {

using DevicePointer = uint64_t;
void* pointer(DevicePointer p) { return reinterpret_cast<void*>(p); }

bool is_pinned(const void* p) {
  Memory& memory = machine().memory;
  const Allocation* a = memory.contains(p) ? memory.find(p) : nullptr;
  return a && a->space == Space::HOST;
}

// Whether [p, p + bytes) lies in one live allocation, as the driver demands of a copy's device side.
bool is_mapped(const void* p, size_t bytes) {
  Memory& memory = machine().memory;
  const Allocation* a = memory.contains(p) ? memory.find(p) : nullptr;
  const char* begin = static_cast<const char*>(p);
  if (a && a->is_reservation && !a->accessible) return false;
  return a && a->is_live && begin >= a->base && begin + bytes <= a->base + a->bytes;
}

int allocate(void** out, size_t bytes, int device, Space space) {
  if (!out || bytes == 0) return INVALID_VALUE;
  if (space == Space::DEVICE && exceeds_memory(device, bytes)) return OUT_OF_MEMORY;
  DriverCounts& counts = driver().counts;
  (space == Space::DEVICE ? counts.device_allocations : counts.host_allocations)++;
  *out = machine().memory.allocate(device, bytes, space, space == Space::DEVICE && machine().config.races);
  return *out ? SUCCESS : OUT_OF_MEMORY;
}

bool is_device_memory(const void* p) {
  Memory& memory = machine().memory;
  const Allocation* a = memory.contains(p) ? memory.find(p) : nullptr;
  return a && a->space == Space::DEVICE;
}

void submit_action(StreamHandle& s, std::function<void()> action) {
  submit(s, [action = std::move(action)](Stream& stream) { enqueue_action(stream, action); });
}

void submit_copy(StreamHandle& s, const void* to, const void* from, size_t bytes,
                 std::function<void()> action) {
  bool is_upload = !is_device_memory(from), is_download = !is_device_memory(to);
  submit(s, [=](Stream& stream) {
    DriverCounts& counts = driver().counts;
    if (is_upload && !is_download) counts.uploads++, counts.upload_bytes += bytes;
    if (is_download && !is_upload) counts.downloads++, counts.download_bytes += bytes;
    enqueue_action(stream, action);
  });
}

int copy(Lock& held, void* to, const void* from, size_t bytes, void* stream, bool is_synchronous) {
  if (int error = failure_code()) return error;
  if (bytes == 0) return SUCCESS;
  if (!to || !from) return INVALID_VALUE;
  Memory& memory = machine().memory;
  if (memory.contains(to) && !is_mapped(to, bytes)) return INVALID_VALUE;
  if (memory.contains(from) && !is_mapped(from, bytes)) return INVALID_VALUE;
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  bool is_from_pageable = !memory.contains(from), is_to_pageable = !memory.contains(to);
  if (s->capture && (is_synchronous || is_from_pageable || is_to_pageable)) {
    s->is_capture_broken = true;
    return STREAM_CAPTURE_UNSUPPORTED;
  }
  if (is_from_pageable) {  // staged: the caller may reuse its memory at once
    auto staged = std::make_shared<std::vector<uint8_t>>(static_cast<const uint8_t*>(from),
                                                         static_cast<const uint8_t*>(from) + bytes);
    submit_copy(*s, to, from, bytes, [=] { copy_memory(to, staged->data(), bytes); });
    driver().counts.host_syncs++;  // a real driver may wait for its own staging memory
    return is_synchronous || is_to_pageable ? wait_for_stream(held, *s) : SUCCESS;
  }
  if (!is_to_pageable) {
    submit_copy(*s, to, from, bytes, [=] { copy_memory(to, from, bytes); });
    return is_synchronous ? wait_for_stream(held, *s) : SUCCESS;
  }
  // After a failure the copy may still be queued when the caller frees its memory.
  auto is_caller_here = std::make_shared<bool>(true);
  submit_copy(*s, to, from, bytes, [=] {
    if (*is_caller_here) copy_memory(to, from, bytes);
  });
  int result = wait_for_stream(held, *s);
  *is_caller_here = false;
  return result;
}

int fill(DevicePointer to, uint32_t value, size_t element_bytes, size_t count, void* stream) {
  if (int error = failure_code()) return error;
  if (count == 0) return SUCCESS;
  if (to % element_bytes || !is_mapped(pointer(to), element_bytes * count)) return INVALID_VALUE;
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  submit_action(*s, [=] { fill_memory(pointer(to), value, element_bytes, count); });
  return SUCCESS;
}

}  // namespace

CUDA_API cuMemAlloc_v2(void** out, size_t bytes) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (is_forbidden_by_capture()) return STREAM_CAPTURE_UNSUPPORTED;
  if (int error = failure_code()) return error;
  return allocate(out, bytes, current_context->device, Space::DEVICE);
}
CUDA_API cuMemAllocAsync(void** out, size_t bytes, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) return STREAM_CAPTURE_UNSUPPORTED;
  return allocate(out, bytes, s->stream->device, Space::DEVICE);
}
// Memory is given back even when the machine has failed, or the failure would show as a leak, too.
CUDA_API cuMemFree_v2(DevicePointer p) {
  DRIVER_CALL_GIVING_BACK(cuMemFree_v2(p));
  auto held = lock();
  if (!p) return SUCCESS;
  if (!current_context) return INVALID_CONTEXT;
  if (is_forbidden_by_capture()) return STREAM_CAPTURE_UNSUPPORTED;
  if (!is_mapped(pointer(p), 1)) return INVALID_VALUE;
  int result = failure_code() ? failure_code() : wait_for_device(held, current_context->device);
  return machine().memory.free(pointer(p)) ? result : INVALID_VALUE;
}
CUDA_API cuMemFreeAsync(DevicePointer p, void* stream) {
  DRIVER_CALL_GIVING_BACK(cuMemFreeAsync(p, stream));
  auto held = lock();
  if (!p) return SUCCESS;
  if (!is_mapped(pointer(p), 1)) return INVALID_VALUE;
  if (int error = failure_code()) {
    machine().memory.free(pointer(p));
    return error;
  }
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) return STREAM_CAPTURE_UNSUPPORTED;
  enqueue_action(*s->stream, [p] { machine().memory.free(pointer(p)); });
  return SUCCESS;
}
CUDA_API cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  DRIVER_CALL();
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (is_forbidden_by_capture()) return STREAM_CAPTURE_UNSUPPORTED;
  return allocate(out, bytes, current_context->device, Space::HOST);
}
CUDA_API cuMemFreeHost(void* p) {
  DRIVER_CALL_GIVING_BACK(cuMemFreeHost(p));
  auto held = lock();
  return is_pinned(p) && machine().memory.free(p) ? SUCCESS : INVALID_VALUE;
}
CUDA_API cuMemHostGetDevicePointer_v2(DevicePointer* device, void* host, unsigned flags) {
  DRIVER_CALL();
  auto held = lock();
  if (!device || flags || !is_pinned(host)) return INVALID_VALUE;
  *device = reinterpret_cast<DevicePointer>(host);
  return SUCCESS;
}

CUDA_API cuMemcpyHtoD_v2(DevicePointer to, const void* from, size_t bytes) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, pointer(to), from, bytes, nullptr, true);
}
CUDA_API cuMemcpyDtoH_v2(void* to, DevicePointer from, size_t bytes) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, to, pointer(from), bytes, nullptr, true);
}
CUDA_API cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, pointer(to), from, bytes, stream, false);
}
CUDA_API cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, to, pointer(from), bytes, stream, false);
}
CUDA_API cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t bytes, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, pointer(to), pointer(from), bytes, stream, false);
}
CUDA_API cuMemcpyPeerAsync(DevicePointer to, ContextHandle*, DevicePointer from, ContextHandle*, size_t bytes,
                           void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return copy(held, pointer(to), pointer(from), bytes, stream, false);
}
CUDA_API cuMemsetD8Async(DevicePointer to, unsigned char value, size_t count, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return fill(to, value, 1, count, stream);
}
CUDA_API cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, void* stream) {
  DRIVER_CALL();
  auto held = lock();
  return fill(to, value, 4, count, stream);
}
CUDA_API cuMemsetD8_v2(DevicePointer to, unsigned char value, size_t count) {
  DRIVER_CALL();
  auto held = lock();
  return fill(to, value, 1, count, nullptr);
}
