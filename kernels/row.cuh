// Rows of activations: 16-byte packs of eight elements, their conversions, and the sums that norm.rs fixes.
#pragma once

#include "device.cuh"

namespace ev {

/// Eight elements as stored.
using Pack = uint4;

struct Bf16 {
  static EV_DEVICE float2 unpack(uint32_t v) {
    return make_float2(bits_to_float(v << 16), bits_to_float(v & 0xFFFF0000u));
  }
  static EV_DEVICE uint32_t pack(float low, float high) { return floats_to_bf16x2(low, high); }
  static constexpr float kMax = 3.38953138925153547590e38f;
  template <uint32_t Planes, uint32_t Count>
  static EV_DEVICE void multiply_add(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
    multiply_add_bf16<Planes>(sums, a, b);
  }
};

struct F16 {
  static EV_DEVICE float2 unpack(uint32_t v) { return f16x2_to_floats(v); }
  static EV_DEVICE uint32_t pack(float low, float high) { return floats_to_f16x2(low, high); }
  static constexpr float kMax = 65504.0f;
  template <uint32_t Planes, uint32_t Count>
  static EV_DEVICE void multiply_add(float (&sums)[Count][4], const uint32_t (&a)[Count][4], const uint32_t (&b)[4]) {
    multiply_add_f16<Planes>(sums, a, b);
  }
};

/// Eight floats.
struct Floats {
  float v[8];

  template <class Element>
  static EV_DEVICE Floats unpack(Pack p) {
    const float2 a = Element::unpack(p.x), b = Element::unpack(p.y);
    const float2 c = Element::unpack(p.z), d = Element::unpack(p.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
  }

  template <class Element>
  EV_DEVICE Pack pack() const {
    return {Element::pack(v[0], v[1]), Element::pack(v[2], v[3]), Element::pack(v[4], v[5]),
            Element::pack(v[6], v[7])};
  }

  /// The eight as two packs of bits, and back.
  EV_DEVICE Pack bits(int half) const {
    return {float_to_bits(v[4 * half]), float_to_bits(v[4 * half + 1]), float_to_bits(v[4 * half + 2]),
            float_to_bits(v[4 * half + 3])};
  }
  static EV_DEVICE Floats from_bits(Pack a, Pack b) {
    return {{bits_to_float(a.x), bits_to_float(a.y), bits_to_float(a.z), bits_to_float(a.w), bits_to_float(b.x),
             bits_to_float(b.y), bits_to_float(b.z), bits_to_float(b.w)}};
  }

  EV_DEVICE Floats operator+(const Floats& other) const {
    Floats sum;
#pragma unroll
    for (int i = 0; i < 8; i++) sum.v[i] = v[i] + other.v[i];
    return sum;
  }

  /// Their squares' sum.
  EV_DEVICE float square_sum() const {
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = v[i] * v[i];
    return ((q[0] + q[1]) + (q[2] + q[3])) + ((q[4] + q[5]) + (q[6] + q[7]));
  }

  /// Eight bytes of E4M3.
  EV_DEVICE uint2 quantize(float inverse_scale) const {
    const auto two = [&](int i) { return floats_to_e4m3x2(v[i] * inverse_scale, v[i + 1] * inverse_scale); };
    return make_uint2(two(0) | two(2) << 16, two(4) | two(6) << 16);
  }
};

/// The sum of 32 lanes, halves onto halves; every lane gets the same bits.
EV_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
  return v;
}

EV_DEVICE float warp_max(float v) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, distance));
  return v;
}

constexpr uint32_t kGroups = 8;       // column groups of a row
constexpr uint32_t kMaxRuns = 8;      // of 32 packs in a group: hidden <= 16384
constexpr uint32_t kMaxWarps = 32;    // of a block
constexpr float kMaxE4m3 = 448.0f;
constexpr float kMinScale = 1.0f / (512.0f * 448.0f);

/// Which packs of a row this thread works on, throughout a call: warps of a group take its runs in turn, a
/// lane takes one pack of a run.
struct Lanes {
  uint32_t group, first_run, run_step, lane;
  uint32_t group_packs;

  EV_DEVICE explicit Lanes(const EvAllReduceNorm& a)
      : group(threadIdx.x / 32 / a.warps_per_group),
        first_run(threadIdx.x / 32 % a.warps_per_group),
        run_step(a.warps_per_group),
        lane(threadIdx.x % 32),
        group_packs(a.hidden / 64) {}

  /// Calls `action(run, pack in the group, whether there is such a pack)`; whole warps together.
  template <class Action>
  EV_DEVICE void each_run(Action action) const {
    for (uint32_t run = first_run; run * 32 < group_packs; run += run_step) {
      const uint32_t pack = run * 32 + lane;
      action(run, pack, pack < group_packs);
    }
  }

  /// Calls `action(pack in the group)`.
  template <class Action>
  EV_DEVICE void each_pack(Action action) const {
    each_run([&](uint32_t, uint32_t pack, bool exists) {
      if (exists) action(pack);
    });
  }

  /// The sum of the runs of all groups, in the fixed order. `sums`: [kGroups][kMaxRuns], complete.
  EV_DEVICE float total(const float (&sums)[kGroups][kMaxRuns]) const {
    const uint32_t g = lane % kGroups;
    float sum = sums[g][0];
    for (uint32_t run = 1; run * 32 < group_packs; run++) sum += sums[g][run];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    return sum;
  }
};

}  // namespace ev
