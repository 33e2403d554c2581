// The only header that knows nvcc from the emulator, and the only place with inline PTX. Each wrapper is named
// for what its caller may rely on.
//
// Kernel sources keep four rules: they include nothing but this folder's headers; shared memory is declared
// by EV_SHARED and EV_DYNAMIC_SHARED; memory that another block, device or the host touches while the kernel
// runs is accessed by the wrappers here alone; EV_KERNEL follows each kernel.
#pragma once

#include "abi.h"

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define EV_DEVICE __device__ __forceinline__
#define EV_SHARED(type, name, ...) __shared__ __align__(16) type name __VA_ARGS__
#define EV_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define EV_KERNEL(name)

namespace ev {

// Between two looks at the clock a thread polls so many times.
constexpr uint32_t kPollsPerCheck = 256;

/// 16 bytes that any device may be writing. Each 4-byte word is whole, the four are not ordered.
EV_DEVICE uint4 load_relaxed_sys(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

/// 16 bytes to any device. Each 4-byte word arrives whole, in no order, some time before the kernel ends.
EV_DEVICE void store_relaxed_sys(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// A word that any device may be writing.
EV_DEVICE uint32_t load_relaxed_sys(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

/// A word to any device.
EV_DEVICE void store_relaxed_sys(uint32_t* to, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

/// Eight bytes, whole, of host memory.
EV_DEVICE uint64_t load_relaxed_sys(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

/// Eight bytes, whole, to host memory.
EV_DEVICE void store_relaxed_sys(uint64_t* to, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

/// Starts to bring the line of an address into the second-level cache.
EV_DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

/// Starts to bring 16 bytes to shared memory, past the first-level cache: those at `from` or, where there are none,
/// zeros. To be read after `wait_copies` by this thread, and a barrier before the others.
EV_DEVICE void copy_async(uint4* to, const uint4* from, bool exists) {
  const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(to)), bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes)
               : "memory");
}

/// This thread's copies since the last call are a group.
EV_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// This thread's copies are done, but perhaps for the latest `NumGroups` groups.
template <uint32_t NumGroups>
EV_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NumGroups) : "memory");
}

/// Where tiles of 16 x 16 elements of two bytes lie in shared memory, for a whole warp: four matrices of 8 rows of 16
/// bytes each, to whose rows lanes 0-7, 8-15, 16-23 and 24-31 point, and the next tile `stride` packs further.
struct Tiles {
  const uint4* row;
  uint32_t stride;
};

template <uint32_t Count>
EV_DEVICE void load_tiles(uint32_t (&to)[Count][4], Tiles tiles) {
  const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(tiles.row));
#pragma unroll
  for (uint32_t i = 0; i < Count; i++) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[i][0]), "=r"(to[i][1]), "=r"(to[i][2]), "=r"(to[i][3])
                 : "r"(place + i * tiles.stride * 16)
                 : "memory");
  }
}

/// Loads both operands of multiplications for a whole warp, as `multiply_add` takes them.
template <uint32_t CountA, uint32_t CountB>
EV_DEVICE void load_operands(uint32_t (&a)[CountA][4], Tiles a_tiles, uint32_t (&b)[CountB][4], Tiles b_tiles) {
  load_tiles(a, a_tiles);
  load_tiles(b, b_tiles);
}

/// sums += a b for a whole warp: tiles of 16 x 16 bf16 times 16 x 8, in float; products are exact. Then the same with
/// the next `b`, of which there are `Planes`. A sum's bits depend on its row of `a` and its columns of `b` alone.
template <uint32_t Planes, uint32_t Count>
EV_DEVICE void multiply_add_bf16(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
#pragma unroll
  for (uint32_t plane = 0; plane < Planes; plane++) {
#pragma unroll
    for (uint32_t i = 0; i < Count; i++) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
          : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[2 * plane]), "r"(b[2 * plane + 1]));
    }
  }
}

/// As `multiply_add_bf16`, of f16.
template <uint32_t Planes, uint32_t Count>
EV_DEVICE void multiply_add_f16(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
#pragma unroll
  for (uint32_t plane = 0; plane < Planes; plane++) {
#pragma unroll
    for (uint32_t i = 0; i < Count; i++) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
          : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[2 * plane]), "r"(b[2 * plane + 1]));
    }
  }
}

/// Nanoseconds on a clock that all blocks of a device share.
EV_DEVICE uint64_t clock_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v)::"memory");
  return v;
}

/// Raises a word that other blocks of this device raise too. In no order with other accesses.
EV_DEVICE void raise_gpu(uint64_t* word, uint64_t to) {
  atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(to));
}

/// Raises a word of shared memory that other threads of the block raise too. Gives what it was.
EV_DEVICE uint32_t raise_shared(uint32_t* word, uint32_t to) { return atomicMax_block(word, to); }

/// Adds to a word of shared memory that other threads of the block add to. Gives what it was.
EV_DEVICE uint32_t add_shared(uint32_t* word, uint32_t amount) { return atomicAdd_block(word, amount); }

EV_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
EV_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
/// The nearest integer, of two the even one.
EV_DEVICE uint32_t nearest_uint(float value) { return __float2uint_rn(value); }
EV_DEVICE double bits_to_double(uint64_t bits) { return __longlong_as_double(static_cast<long long>(bits)); }
EV_DEVICE uint64_t double_to_bits(double value) { return static_cast<uint64_t>(__double_as_longlong(value)); }

/// Two floats rounded to bf16, nearest, ties to even, NaN 0x7FFF; `low` in the low half.
EV_DEVICE uint32_t floats_to_bf16x2(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

/// As `floats_to_bf16x2`, to f16.
EV_DEVICE uint32_t floats_to_f16x2(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

EV_DEVICE float2 f16x2_to_floats(uint32_t bits) {
  return make_float2(__half2float(__ushort_as_half(bits & 0xFFFF)), __half2float(__ushort_as_half(bits >> 16)));
}

/// Two floats rounded to E4M3, ties to even, saturating at 448, NaN 0x7F; `low` in the low byte.
EV_DEVICE uint32_t floats_to_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace ev

#else  // the emulator

#include "emulator_device.h"

#define EV_DEVICE inline
#define EV_SHARED KSHARED
#define EV_DYNAMIC_SHARED KSHARED_DYN
#define EV_KERNEL KERNEL_ENTRY

namespace ev {

// A thread that polls in vain is parked: it takes few polls to see that it waits.
constexpr uint32_t kPollsPerCheck = 4;

template <class T> T load_relaxed_sys(const T* from) { return emu::load(from, emu::RLX, emu::SYS); }
template <class T> void store_relaxed_sys(T* to, T v) { emu::store(to, v, emu::RLX, emu::SYS); }

EV_DEVICE void prefetch(const void*) {}
EV_DEVICE uint64_t clock_ns() { return emu::emu_clock(); }

EV_DEVICE void copy_async(uint4* to, const uint4* from, bool exists) {
  emu::emu_copy_async(to, from, exists ? 16 : 0);
}
EV_DEVICE void commit_copies() { emu::emu_commit_copies(); }
template <uint32_t NumGroups> void wait_copies() { emu::emu_wait_copies(NumGroups); }

struct Tiles {
  const uint4* row;
  uint32_t stride;
};
template <uint32_t CountA, uint32_t CountB>
void load_operands(uint32_t (&a)[CountA][4], Tiles a_tiles, uint32_t (&b)[CountB][4], Tiles b_tiles) {
  const emu::MatrixLoad loads[2] = {{a[0], a_tiles.row, CountA, a_tiles.stride * sizeof(uint4)},
                                    {b[0], b_tiles.row, CountB, b_tiles.stride * sizeof(uint4)}};
  emu::emu_load_matrices(loads, 2);
}
template <uint32_t Planes, uint32_t Count>
void multiply_add_bf16(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
  emu::emu_multiply_add({sums[0], a[0], b, Count, Planes, emu::BF16});
}
template <uint32_t Planes, uint32_t Count>
void multiply_add_f16(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
  emu::emu_multiply_add({sums[0], a[0], b, Count, Planes, emu::F16});
}

EV_DEVICE void raise_gpu(uint64_t* word, uint64_t to) { atomicMax(word, to); }
EV_DEVICE uint32_t raise_shared(uint32_t* word, uint32_t to) { return atomicMax_block(word, to); }
EV_DEVICE uint32_t add_shared(uint32_t* word, uint32_t amount) { return atomicAdd_block(word, amount); }

EV_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
EV_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
EV_DEVICE uint32_t nearest_uint(float value) { return __float2uint_rn(value); }
EV_DEVICE double bits_to_double(uint64_t bits) { return __longlong_as_double(static_cast<long long>(bits)); }
EV_DEVICE uint64_t double_to_bits(double value) { return static_cast<uint64_t>(__double_as_longlong(value)); }

EV_DEVICE uint32_t floats_to_bf16x2(float low, float high) {
  return float_to_bf16_bits(low) | uint32_t(float_to_bf16_bits(high)) << 16;
}
EV_DEVICE uint32_t floats_to_f16x2(float low, float high) {
  return float_to_half_bits(low) | uint32_t(float_to_half_bits(high)) << 16;
}
EV_DEVICE float2 f16x2_to_floats(uint32_t bits) {
  return make_float2(half_bits_to_float(bits & 0xFFFF), half_bits_to_float(bits >> 16));
}
EV_DEVICE uint32_t floats_to_e4m3x2(float low, float high) {
  return float_to_e4m3_bits(low) | uint32_t(float_to_e4m3_bits(high)) << 8;
}

}  // namespace ev

#endif
