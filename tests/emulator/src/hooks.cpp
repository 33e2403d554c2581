// What compiled kernel code calls besides memory operations and collectives: the built-in variables, shared
// memory, and the hooks that -fsanitize=thread puts before each plain access. Only the instrumentation of
// that flag is used; the sanitizer's own runtime is never linked.
#include <cstring>

#include "machine.h"

using namespace emulator;

extern "C" {

Idx3 emu::emu_tid() { return self().index; }
Idx3 emu::emu_bid() { return self().block->index; }
Idx3 emu::emu_bdim() { return self().block->grid->block_dim; }
Idx3 emu::emu_gdim() { return self().block->grid->grid_dim; }
int emu::emu_mutant() { return machine().config.mutant; }
void emu::emu_trap(const char* what) {
  fail_and_leave(Failure::TRAP, std::string("trap: ") + what + " in " + describe(self()));
}

void* emu::emu_shared(const void* site, size_t bytes) {
  Block& b = *self().block;
  for (auto& [known, memory] : b.shared) {
    if (known == site) return memory;
  }
  Machine& m = machine();
  char* memory = m.memory.allocate(device_of(self()), bytes, Space::SHARED, m.config.races);
  b.shared.push_back({site, memory});
  return memory;
}
void* emu::emu_dyn_shared() { return self().block->dynamic_shared; }

void emu::emu_register_kernel(const char* name, void (*entry)(void**), int num_args, const size_t* sizes,
                              int is_mutated) {
  kernel_registry(is_mutated).push_back({name, entry, std::vector<size_t>(sizes, sizes + num_args)});
}

}  // extern "C"

void emulator::plain_access(const char* p, size_t bytes, bool is_write, const void* pc) {
  Machine& m = machine();
  m.stats.plain_accesses++;
  check_access(p, bytes, is_write ? Access::PLAIN_WRITE : Access::PLAIN_READ, emu::CTA, pc);
  drain_visible(p, bytes);
  if (is_write) {
    forget_history(p, bytes);
    wake_waiters(p, bytes);
  }
}

namespace {

inline void hooked_access(void* address, size_t bytes, bool is_write, const void* pc) {
  if (!are_accesses_checked) return;
  Machine& m = machine();
  if (!m.current || !m.memory.contains(address)) return;
  plain_access(static_cast<const char*>(address), bytes, is_write, pc);
}

}  // namespace

#define HOOK(name, bytes, is_write) \
  void __tsan_##name(void* p) { hooked_access(p, bytes, is_write, __builtin_return_address(0)); }
#define HOOKS(bytes)                        \
  HOOK(read##bytes, bytes, false)           \
  HOOK(write##bytes, bytes, true)           \
  HOOK(unaligned_read##bytes, bytes, false) \
  HOOK(unaligned_write##bytes, bytes, true) \
  HOOK(volatile_read##bytes, bytes, false)  \
  HOOK(volatile_write##bytes, bytes, true)

extern "C" {

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* p, size_t bytes) { hooked_access(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { hooked_access(p, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
