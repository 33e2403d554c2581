// CUDA's vector and small floating-point types for a host compiler. Names and results, NaN included, are
// NVIDIA's; rounding is to nearest even, and e4m3 saturates to the largest finite value.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATOR_VECTOR2(name, T, alignment) \
  struct alignas(alignment) name {           \
    T x, y;                                  \
  };                                         \
  inline name make_##name(T x, T y) { return {x, y}; }
#define EMULATOR_VECTOR4(name, T, alignment) \
  struct alignas(alignment) name {           \
    T x, y, z, w;                            \
  };                                         \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR2(ushort2, unsigned short, 4)
EMULATOR_VECTOR2(int2, int, 8)
EMULATOR_VECTOR2(uint2, unsigned, 8)
EMULATOR_VECTOR2(float2, float, 8)
EMULATOR_VECTOR2(longlong2, long long, 16)
EMULATOR_VECTOR2(ulonglong2, unsigned long long, 16)
EMULATOR_VECTOR2(double2, double, 16)
EMULATOR_VECTOR4(uchar4, unsigned char, 4)
EMULATOR_VECTOR4(ushort4, unsigned short, 8)
EMULATOR_VECTOR4(int4, int, 16)
EMULATOR_VECTOR4(uint4, unsigned, 16)
EMULATOR_VECTOR4(float4, float, 16)
#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR4

inline uint32_t __float_as_uint(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline int __float_as_int(float f) { return int(__float_as_uint(f)); }
inline long long __double_as_longlong(double d) {
  long long bits;
  std::memcpy(&bits, &d, 8);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double d;
  std::memcpy(&d, &bits, 8);
  return d;
}
// To nearest, ties to even, as long as nobody has changed the host's rounding; out of range is not saturated.
inline uint32_t __float2uint_rn(float f) { return uint32_t(std::llrint(f)); }
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }

namespace emu {

constexpr uint32_t FLOAT_INFINITY_BITS = 0x7f800000;
constexpr uint32_t FLOAT_MAGNITUDE = 0x7fffffff;

inline uint16_t float_to_bf16_bits(float f) {
  uint32_t bits = __float_as_uint(f);
  if ((bits & FLOAT_MAGNITUDE) > FLOAT_INFINITY_BITS) return 0x7fff;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float bf16_bits_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

inline uint16_t float_to_half_bits(float f) {
  uint32_t bits = __float_as_uint(f), sign = (bits >> 16) & 0x8000, magnitude = bits & FLOAT_MAGNITUDE;
  if (magnitude > FLOAT_INFINITY_BITS) return 0x7fff;
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);  // 65536 and above
  if (magnitude < 0x33000000) return uint16_t(sign);            // below half of the smallest subnormal
  if (magnitude < 0x38800000) {                                 // subnormal
    uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000, shift = 126 - (magnitude >> 23);
    uint32_t result = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (result & 1))) result++;
    return uint16_t(sign | result);
  }
  uint32_t rebased = magnitude - (112u << 23);
  return uint16_t(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
}
inline float half_bits_to_float(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(mantissa ? 0x7fffffff : sign | FLOAT_INFINITY_BITS);
  if (exponent == 0) {
    float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return __uint_as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline uint8_t float_to_e4m3_bits(float f) {
  uint32_t bits = __float_as_uint(f), magnitude = bits & FLOAT_MAGNITUDE;
  uint8_t sign = uint8_t((bits >> 24) & 0x80);
  if (magnitude > FLOAT_INFINITY_BITS) return 0x7f;
  if (magnitude >= __float_as_uint(464.0f)) return sign | 0x7e;
  if (magnitude < __float_as_uint(0x1p-6f)) {  // subnormal: a multiple of 2^-9
    float scaled = __uint_as_float(magnitude) * 512.0f;
    int result = int(scaled);
    float rest = scaled - float(result);
    if (rest > 0.5f || (rest == 0.5f && (result & 1))) result++;
    return uint8_t(sign | result);
  }
  uint32_t rebased = magnitude - (120u << 23);
  uint32_t result = (rebased + 0x7ffff + ((rebased >> 20) & 1)) >> 20;
  return uint8_t(sign | (result > 0x7e ? 0x7e : result));
}
inline float e4m3_bits_to_float(uint8_t bits) {
  float sign = bits & 0x80 ? -1.0f : 1.0f;
  uint32_t exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return __uint_as_float(0x7fffffff);
  if (exponent == 0) return sign * float(mantissa) * 0x1p-9f;
  return sign * __uint_as_float(((exponent + 120) << 23) | (mantissa << 20));
}

}  // namespace emu

using emu::bf16_bits_to_float;
using emu::e4m3_bits_to_float;
using emu::float_to_bf16_bits;
using emu::float_to_e4m3_bits;
using emu::float_to_half_bits;
using emu::half_bits_to_float;

struct __nv_bfloat16 {
  uint16_t x;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : x(emu::float_to_bf16_bits(f)) {}
  operator float() const { return emu::bf16_bits_to_float(x); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  uint16_t x;
  __half() = default;
  __half(float f) : x(emu::float_to_half_bits(f)) {}
  operator float() const { return emu::half_bits_to_float(x); }
};
struct alignas(4) __half2 {
  __half x, y;
};
struct __nv_fp8_e4m3 {
  uint8_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float f) : __x(emu::float_to_e4m3_bits(f)) {}
  explicit operator float() const { return emu::e4m3_bits_to_float(__x); }
};

inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 v;
  v.x = bits;
  return v;
}
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline float __half2float(__half v) { return v; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline unsigned short __half_as_ushort(__half v) { return v.x; }
inline __half __ushort_as_half(unsigned short bits) {
  __half v;
  v.x = bits;
  return v;
}
