// Switching between the stacks of the emulated threads.
#pragma once
#include <cstddef>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

struct Context {
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t state;
#endif
};

constexpr size_t STACK_BYTES = 64 << 10;

// A stack of STACK_BYTES with an unmapped page below it; pooled, never returned to the system.
char* take_stack();
void return_stack(char* stack);

// The next switch to `context` calls `entry`, which must not return.
void prepare(Context& context, char* stack, void (*entry)());
void switch_context(Context& from, Context& to);

}  // namespace emulator
