// What a CUDA source sees when a plain C++17 compiler, and not nvcc, compiles it: the keywords, the built-in
// variables, the intrinsics and the memory operations, all of them calls into the emulator's runtime.
//
// Rules for a kernel source:
//  * shared memory is declared with KSHARED / KSHARED_DYN; a bare __shared__ is a compile error, since it
//  would
//    silently become a per-thread local;
//  * memory that another block or device touches concurrently is accessed through emu::load / store / rmw;
//  * KERNEL_ENTRY(name) after a kernel makes it launchable by name.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "emulator_types.h"

#define __CUDA_EMULATOR__ 1

#undef __restrict__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__ static const
#define __restrict__ __restrict
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static_assert(false, "use KSHARED or KSHARED_DYN: this would be a per-thread local");

namespace emu {

struct Idx3 {
  unsigned x, y, z;
};

// Scopes and orders of the PTX memory model. The bits of an order are ACQ, REL and SC (a fence's).
enum Scope : int { CTA = 0, GPU = 1, SYS = 2 };
enum Order : int { RLX = 0, ACQ = 1, REL = 2, ACQ_REL = 3, SC = 7 };
enum RmwOp : int { ADD, EXCH, MAX_, MIN_, OR_, AND_, CAS, INC, FADD, SIGNED_MAX, SIGNED_MIN };
// Collectives that lanes of one warp may meet at. Lanes that meet at different ones are an error.
enum WarpOp : int {
  SHUFFLE = 1,
  BALLOT = 500,
  REDUCE = 501,
  LOAD_MATRICES = 600,
  MULTIPLY_ADD = 700,
  USER = 1000
};
// The two formats of a matrix whose elements have two bytes.
enum MatrixFormat : int { BF16 = 0, F16 = 1 };

// ldmatrix.x4, `count` times: four matrices of 8 rows of 16 bytes, to which lanes 0-7, 8-15, 16-23 and 24-31
// point, all `stride` bytes further each time. A lane gets two elements of each matrix.
struct MatrixLoad {
  uint32_t* to;
  const void* row;
  unsigned count;
  size_t stride;
};
// mma.m16n8k16.row.col with float sums: `count` tiles of `a` times the first `b`, then times the next, of which
// there are `planes`. What the lanes have of them: see matrices.cpp.
struct TileProduct {
  float* sums;
  const uint32_t *a, *b;
  unsigned count, planes;
  MatrixFormat format;
};

extern "C" {
Idx3 emu_tid();
Idx3 emu_bid();
Idx3 emu_bdim();
Idx3 emu_gdim();
void* emu_shared(const void* site, size_t bytes);
void* emu_dyn_shared();
void emu_syncthreads();
int emu_syncthreads_count(int predicate);  // how many threads have a predicate that is not 0
void emu_syncwarp(unsigned mask);
// Every lane of `mask` gives 8 bytes; each gets all 32 (those outside the mask are 0).
void emu_warp_exchange(unsigned mask, int op, const void* in, void* all);
// cp.async: 16 bytes of shared memory become the first `bytes` at `from` and then zeros, when their group is
// waited for.
void emu_copy_async(void* to, const void* from, unsigned bytes);
void emu_commit_copies();                  // the thread's copies since the last call are a group
void emu_wait_copies(unsigned num_groups);  // until only that many of the thread's latest groups are not done
// Several instructions of one kind at one meeting of the warp's lanes, which is what costs here.
void emu_load_matrices(const MatrixLoad* loads, unsigned num_loads);
void emu_multiply_add(const TileProduct& product);
// `unit` is the size of the pieces that are whole when the emulator tears wide accesses.
void emu_load(const void* p, void* out, int bytes, int unit, int order, int scope);
void emu_store(void* p, const void* value, int bytes, int unit, int order, int scope);
void emu_weak_store(void* p, const void* value, int bytes, int unit);
uint64_t emu_rmw(void* p, int bytes, int op, uint64_t a, uint64_t b, int order, int scope);
void emu_fence(int order, int scope);
uint64_t emu_clock();  // virtual nanoseconds
void emu_nanosleep(unsigned ns);
[[noreturn]] void emu_trap(const char* what);
int emu_mutant();
void emu_register_kernel(const char* name, void (*entry)(void** args), int num_args, const size_t* sizes,
                         int is_mutated);
}

// A vector is torn into its elements, but never below 4 bytes; anything else is whole.
template <class T, class = void>
struct Unit {
  static constexpr int bytes = sizeof(T);
};
template <class T>
struct Unit<T, std::void_t<decltype(T::x)>> {
  static constexpr int element = sizeof(T::x) < 4 ? 4 : sizeof(T::x);
  static constexpr int bytes = element < int(sizeof(T)) ? element : int(sizeof(T));
};

template <class T>
inline T load(const T* p, int order, int scope) {
  T value;
  emu_load(p, &value, sizeof(T), Unit<T>::bytes, order, scope);
  return value;
}

template <class T>
inline void store(T* p, std::common_type_t<T> value, int order, int scope) {
  emu_store(p, &value, sizeof(T), Unit<T>::bytes, order, scope);
}

// A plain store that may become visible late, unlike `*p = value`, which reaches memory at once. For races it
// is a plain store. Meant for data that another device will read.
template <class T>
inline void weak_store(T* p, std::common_type_t<T> value) {
  emu_weak_store(p, &value, sizeof(T), Unit<T>::bytes);
}

// a is the operand; for CAS, a is the expected value and b the new one.
template <class T>
inline T rmw(T* p, int op, T a, T b = T(), int order = RLX, int scope = GPU) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics have 4 or 8 bytes");
  uint64_t first = 0, second = 0;
  std::memcpy(&first, &a, sizeof(T));
  std::memcpy(&second, &b, sizeof(T));
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ADD) op = FADD;
  } else if constexpr (std::is_signed_v<T>) {
    if (op == MAX_) op = SIGNED_MAX;
    if (op == MIN_) op = SIGNED_MIN;
  }
  uint64_t old = emu_rmw(p, sizeof(T), op, first, second, order, scope);
  T result;
  std::memcpy(&result, &old, sizeof(T));
  return result;
}

inline int mutant() { return emu_mutant(); }

inline unsigned lane() {
  Idx3 t = emu_tid(), d = emu_bdim();
  return (t.x + d.x * (t.y + d.y * t.z)) & 31;
}

template <auto Kernel>
struct KernelRegistration;
template <class... Args, void (*Kernel)(Args...)>
struct KernelRegistration<Kernel> {
  template <size_t... I>
  static void call(void** args, std::index_sequence<I...>) {
    (void)args;
    Kernel(*static_cast<std::decay_t<Args>*>(args[I])...);
  }
  static void entry(void** args) { call(args, std::index_sequence_for<Args...>{}); }
  explicit KernelRegistration(const char* name) {
    static const size_t sizes[] = {sizeof(std::decay_t<Args>)..., 0};
#ifdef EMULATOR_MUTATED
    emu_register_kernel(name, &entry, sizeof...(Args), sizes, 1);
#else
    emu_register_kernel(name, &entry, sizeof...(Args), sizes, 0);
#endif
  }
};

}  // namespace emu

#define threadIdx (::emu::emu_tid())
#define blockIdx (::emu::emu_bid())
#define blockDim (::emu::emu_bdim())
#define gridDim (::emu::emu_gdim())
#define warpSize 32

#define EMULATOR_CONCAT_(a, b) a##b
#define EMULATOR_CONCAT(a, b) EMULATOR_CONCAT_(a, b)

// After each kernel; variadic, so that a template instance with commas can be named.
#define KERNEL_ENTRY(...) \
  static ::emu::KernelRegistration<&__VA_ARGS__> EMULATOR_CONCAT(emulator_kernel_, __COUNTER__)(#__VA_ARGS__);

// KSHARED(float, partial, [32]); declares `__shared__ float partial[32];`
#define KSHARED(T, name, ...)                                                          \
  using EMULATOR_CONCAT(emulator_type_, name) = T __VA_ARGS__;                         \
  static const char EMULATOR_CONCAT(emulator_site_, name) = 0;                         \
  auto& name = *static_cast<EMULATOR_CONCAT(emulator_type_, name)*>(::emu::emu_shared( \
      &EMULATOR_CONCAT(emulator_site_, name), sizeof(EMULATOR_CONCAT(emulator_type_, name))))
// KSHARED_DYN(name); declares `extern __shared__ unsigned char name[];`
#define KSHARED_DYN(name) unsigned char* name = static_cast<unsigned char*>(::emu::emu_dyn_shared())

inline void __syncthreads() { emu::emu_syncthreads(); }
inline int __syncthreads_count(int predicate) { return emu::emu_syncthreads_count(predicate); }
inline int __syncthreads_or(int predicate) { return emu::emu_syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return emu::emu_syncthreads_count(predicate == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::emu_syncwarp(mask); }

namespace emu {
enum ShuffleMode : int { INDEX, XOR, DOWN, UP };
template <class T>
inline T shuffle(unsigned mask, T value, ShuffleMode mode, unsigned operand, unsigned width) {
  static_assert(sizeof(T) <= 8, "a shuffle carries at most 8 bytes");
  uint64_t in = 0, all[32];
  std::memcpy(&in, &value, sizeof(T));
  emu_warp_exchange(mask, SHUFFLE + mode * 100 + int(width), &in, all);
  unsigned self = lane(), segment = self & ~(width - 1), source = self;
  switch (mode) {
    case INDEX: source = segment + (operand & (width - 1)); break;
    case XOR: source = ((self ^ operand) & ~(width - 1)) <= segment ? self ^ operand : self; break;
    case DOWN: source = self + operand < segment + width ? self + operand : self; break;
    case UP: source = self - segment >= operand ? self - operand : self; break;
  }
  if (!(mask >> source & 1)) emu_trap("a shuffle reads a lane outside its mask");
  T result;
  std::memcpy(&result, &all[source], sizeof(T));
  return result;
}
template <class Fold>
inline unsigned reduce(unsigned mask, unsigned value, int op, Fold fold) {
  uint64_t in = value, all[32];
  emu_warp_exchange(mask, op, &in, all);
  unsigned result = value;
  bool first = true;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    result = first ? unsigned(all[i]) : fold(result, unsigned(all[i]));
    first = false;
  }
  return result;
}
}  // namespace emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu::shuffle(mask, value, emu::INDEX, unsigned(source), unsigned(width));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return emu::shuffle(mask, value, emu::XOR, unsigned(lane_mask), unsigned(width));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emu::shuffle(mask, value, emu::DOWN, delta, unsigned(width));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emu::shuffle(mask, value, emu::UP, delta, unsigned(width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  uint64_t in = predicate != 0, all[32];
  emu::emu_warp_exchange(mask, emu::BALLOT, &in, all);
  unsigned result = 0;
  for (int i = 0; i < 32; i++) result |= unsigned(all[i] != 0) << i;
  return result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::REDUCE, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::REDUCE + 1, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::REDUCE + 2, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::REDUCE + 3, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) {
  return emu::reduce(mask, v, emu::REDUCE + 4, [](unsigned a, unsigned b) { return a & b; });
}

inline void __threadfence_block() { emu::emu_fence(emu::SC, emu::CTA); }
inline void __threadfence() { emu::emu_fence(emu::SC, emu::GPU); }
inline void __threadfence_system() { emu::emu_fence(emu::SC, emu::SYS); }

// The atomic functions are relaxed; their scope is the device unless the name says otherwise.
#define EMULATOR_ATOMIC(name, op)                          \
  template <class T>                                       \
  inline T name(T* p, std::common_type_t<T> v) {           \
    return emu::rmw<T>(p, op, v);                          \
  }                                                        \
  template <class T>                                       \
  inline T name##_system(T* p, std::common_type_t<T> v) {  \
    return emu::rmw<T>(p, op, v, T(), emu::RLX, emu::SYS); \
  }                                                        \
  template <class T>                                       \
  inline T name##_block(T* p, std::common_type_t<T> v) {   \
    return emu::rmw<T>(p, op, v, T(), emu::RLX, emu::CTA); \
  }
EMULATOR_ATOMIC(atomicAdd, emu::ADD)
EMULATOR_ATOMIC(atomicExch, emu::EXCH)
EMULATOR_ATOMIC(atomicMax, emu::MAX_)
EMULATOR_ATOMIC(atomicMin, emu::MIN_)
EMULATOR_ATOMIC(atomicOr, emu::OR_)
EMULATOR_ATOMIC(atomicAnd, emu::AND_)
EMULATOR_ATOMIC(atomicInc, emu::INC)
#undef EMULATOR_ATOMIC
template <class T>
inline T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return emu::rmw<T>(p, emu::CAS, expected, desired);
}
template <class T>
inline T atomicCAS_system(T* p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return emu::rmw<T>(p, emu::CAS, expected, desired, emu::RLX, emu::SYS);
}

inline long long clock64() { return static_cast<long long>(emu::emu_clock()); }
inline void __nanosleep(unsigned ns) { emu::emu_nanosleep(ns); }
[[noreturn]] inline void __trap() { emu::emu_trap("__trap()"); }
template <class T>
inline T __ldg(const T* p) {
  return *p;
}

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
