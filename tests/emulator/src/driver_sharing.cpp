// The fake driver: memory that several processes map. It is a file in memory, so they really share it; the emulated
// devices of two processes with the same ordinal are the same device.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "driver.h"

using namespace emulator;
using namespace emulator::fake;

namespace {

using DevicePointer = uint64_t;
void* pointer(DevicePointer p) { return reinterpret_cast<void*>(p); }

constexpr int DEVICE_LOCATION = 1, PINNED = 1, POSIX_DESCRIPTOR = 1, READ_AND_WRITE = 3;

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of cuda.h.
struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  Location location;
  void* win32_meta_data;
  unsigned char flags[8];
};
struct AccessDescription {
  Location location;
  int flags;
};

// What the last page of a file begins with.
struct Trailer {
  char magic[16];
  uint64_t bytes;
  int device;
};
constexpr char MAGIC[16] = "emulated memory";

bool is_device(Location l) {
  return l.type == DEVICE_LOCATION && l.id >= 0 && l.id < machine().config.num_devices;
}

int check(const Properties* p) {
  if (!p || p->type != PINNED || p->win32_meta_data) return INVALID_VALUE;
  if (!is_device(p->location)) return INVALID_DEVICE;
  if (p->handle_types != POSIX_DESCRIPTOR) return NOT_SUPPORTED;  // nobody has asked for others yet
  return driver().sharing_fault == Driver::UNSUPPORTED ? NOT_SUPPORTED : SUCCESS;
}

MemoryHandle* find_memory(uint64_t handle) {
  auto found = driver().memory_handles.find(reinterpret_cast<MemoryHandle*>(handle));
  return found == driver().memory_handles.end() ? nullptr : *found;
}

uint64_t add_memory(int file, int device, size_t bytes) {
  auto* memory = new MemoryHandle{file, device, bytes};
  driver().memory_handles.insert(memory);
  return reinterpret_cast<uint64_t>(memory);
}

int create(uint64_t* handle, size_t bytes, int device) {
  int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  if (file < 0) return OUT_OF_MEMORY;
  Trailer trailer{{}, bytes, device};
  std::memcpy(trailer.magic, MAGIC, sizeof MAGIC);
  bool is_made = ftruncate(file, off_t(bytes + Memory::PAGE)) == 0 &&
                 pwrite(file, &trailer, sizeof trailer, off_t(bytes)) == ssize_t(sizeof trailer);
  if (!is_made) {
    close(file);
    return OUT_OF_MEMORY;
  }
  *handle = add_memory(file, device, bytes);
  return SUCCESS;
}

}  // namespace

CUDA_API cuMemGetAllocationGranularity(size_t* granularity, const Properties* properties, int option) {
  auto held = lock();
  if (!granularity || option < 0 || option > 1) return INVALID_VALUE;
  if (int error = check(properties)) return error;
  *granularity = Memory::GRANULARITY;
  return SUCCESS;
}
CUDA_API cuMemCreate(uint64_t* handle, size_t bytes, const Properties* properties, unsigned long long flags) {
  auto held = lock();
  if (!handle || flags || bytes == 0 || bytes % Memory::GRANULARITY) return INVALID_VALUE;
  if (int error = check(properties)) return error;
  return create(handle, bytes, properties->location.id);
}
CUDA_API cuMemRelease(uint64_t handle) {
  auto held = lock();
  MemoryHandle* memory = find_memory(handle);
  if (!memory) return INVALID_VALUE;
  driver().memory_handles.erase(memory);
  close(memory->file);
  delete memory;
  return SUCCESS;
}
CUDA_API cuMemExportToShareableHandle(void* shareable, uint64_t handle, int type, unsigned long long flags) {
  auto held = lock();
  if (driver().sharing_fault == Driver::DIES_IN_EXPORT) raise(SIGKILL);
  MemoryHandle* memory = find_memory(handle);
  if (!shareable || !memory || flags || type != POSIX_DESCRIPTOR) return INVALID_VALUE;
  int file = dup(memory->file);
  if (file < 0) return OUT_OF_MEMORY;
  *static_cast<int*>(shareable) = file;
  return SUCCESS;
}
CUDA_API cuMemImportFromShareableHandle(uint64_t* handle, void* shareable, int type) {
  auto held = lock();
  if (!handle || type != POSIX_DESCRIPTOR) return INVALID_VALUE;
  int given = int(reinterpret_cast<intptr_t>(shareable));
  struct stat status;
  Trailer trailer;
  if (fstat(given, &status) != 0 || status.st_size < off_t(Memory::PAGE)) return INVALID_VALUE;
  off_t end = status.st_size - off_t(Memory::PAGE);
  if (pread(given, &trailer, sizeof trailer, end) != ssize_t(sizeof trailer)) return INVALID_VALUE;
  if (std::memcmp(trailer.magic, MAGIC, sizeof MAGIC) || off_t(trailer.bytes) != end) return INVALID_VALUE;
  if (driver().sharing_fault == Driver::IMPORTS_OTHER_MEMORY) return create(handle, end, trailer.device);
  int file = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (file < 0) return OUT_OF_MEMORY;
  *handle = add_memory(file, trailer.device, trailer.bytes);
  return SUCCESS;
}

CUDA_API cuMemAddressReserve(DevicePointer* out, size_t bytes, size_t alignment, DevicePointer wanted,
                             unsigned long long flags) {
  auto held = lock();
  if (!out || flags || wanted || alignment > Memory::GRANULARITY) return INVALID_VALUE;
  char* p = machine().memory.reserve(bytes);
  *out = reinterpret_cast<DevicePointer>(p);
  return p ? SUCCESS : INVALID_VALUE;
}
CUDA_API cuMemAddressFree(DevicePointer p, size_t bytes) {
  auto held = lock();
  return machine().memory.unreserve(pointer(p), bytes) ? SUCCESS : INVALID_VALUE;
}
// Only whole reservations and whole memory, which is all that anybody maps so far.
CUDA_API cuMemMap(DevicePointer p, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  auto held = lock();
  MemoryHandle* memory = find_memory(handle);
  if (!memory || offset || flags || bytes != memory->bytes) return INVALID_VALUE;
  if (driver().sharing_fault == Driver::FAILS_TO_MAP && machine().memory.num_mapped() > 0) return OUT_OF_MEMORY;
  return machine().memory.map(pointer(p), bytes, memory->file, memory->device) ? SUCCESS : INVALID_VALUE;
}
CUDA_API cuMemUnmap(DevicePointer p, size_t bytes) {
  auto held = lock();
  Memory& memory = machine().memory;
  forget_history(static_cast<char*>(pointer(p)), bytes);
  return memory.unmap(pointer(p), bytes) ? SUCCESS : INVALID_VALUE;
}
CUDA_API cuMemSetAccess(DevicePointer p, size_t bytes, const AccessDescription* descriptions, size_t count) {
  auto held = lock();
  if (!descriptions || count == 0) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    if (!is_device(descriptions[i].location)) return INVALID_DEVICE;
    if (descriptions[i].flags != READ_AND_WRITE) return NOT_SUPPORTED;
    if (!machine().memory.allow(pointer(p), bytes, descriptions[i].location.id)) return INVALID_VALUE;
  }
  return SUCCESS;
}

// For tests: what goes wrong from now on.
extern "C" __attribute__((visibility("default"))) void emulator_break_sharing(int fault) {
  auto held = lock();
  driver().sharing_fault = fault;
}
