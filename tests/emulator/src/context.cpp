#include "context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// ucontext would do everywhere, but it makes two system calls for each switch.
#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
#elif defined(__aarch64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch,.-emulator_switch
)");
#endif

namespace emulator {
namespace {
std::vector<char*>& pool() {
  static std::vector<char*> stacks;
  return stacks;
}
}  // namespace

char* take_stack() {
  if (pool().empty()) {
    const size_t guard = size_t(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
      std::perror("cuda-emulator: no memory for another thread's stack");
      std::abort();
    }
    return static_cast<char*>(memory) + guard;
  }
  char* stack = pool().back();
  pool().pop_back();
  return stack;
}

void return_stack(char* stack) { pool().push_back(stack); }

#if defined(__x86_64__)
void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
  *--top = nullptr;  // keeps the stack aligned as a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  context.stack_pointer = top;
}
#elif defined(__aarch64__)
void prepare(Context& context, char* stack, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(stack + STACK_BYTES - 160);
  for (int i = 0; i < 20; i++) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);  // x30
  context.stack_pointer = frame;
}
#else
void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = STACK_BYTES;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
#endif

void switch_context(Context& from, Context& to) {
#if defined(__x86_64__) || defined(__aarch64__)
  emulator_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.state, &to.state);
#endif
}

}  // namespace emulator
