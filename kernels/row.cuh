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

/// Eight elements as stored: the type, and how they are loaded from an address that is a multiple of 16, or singly.
template <class Half>
struct Halves {
  using Stored = uint16_t;
  static EV_DEVICE Floats eight(const Stored* from) {
    return Floats::unpack<Half>(*reinterpret_cast<const Pack*>(from));
  }
  static EV_DEVICE float one(Stored v) { return Half::unpack(v).x; }
};

struct Singles {
  using Stored = float;
  static EV_DEVICE Floats eight(const Stored* from) {
    const Pack* const packs = reinterpret_cast<const Pack*>(from);
    return Floats::from_bits(packs[0], packs[1]);
  }
  static EV_DEVICE float one(Stored v) { return v; }
};

/// Neither infinite nor NaN.
EV_DEVICE bool is_finite(float v) { return fabsf(v) <= 3.40282346639e38f; }

/// Packs two floats, but what is finite stays finite: beyond the largest element it is that one.
template <class Element>
EV_DEVICE uint32_t pack_finite(float a, float b) {
  const auto clamp = [](float v) { return is_finite(v) ? fminf(fmaxf(v, -Element::kMax), Element::kMax) : v; };
  return Element::pack(clamp(a), clamp(b));
}

/// Two floats as sums of two elements each: `high` is the nearest element, `low` the nearest to what is missing.
/// With finite floats both are finite; infinities and NaNs are in `high`, and `low` is 0.
template <class Element>
EV_DEVICE void split(float a, float b, uint32_t& high, uint32_t& low) {
  high = pack_finite<Element>(a, b);
  const float2 nearest = Element::unpack(high);
  const auto rest = [](float v, float element) { return is_finite(v) ? v - element : 0.0f; };
  low = pack_finite<Element>(rest(a, nearest.x), rest(b, nearest.y));
}

/// Eight floats as two packs.
struct SplitPack {
  Pack high, low;
};

template <class Element>
EV_DEVICE SplitPack split(const Floats& x) {
  SplitPack packs;
  split<Element>(x.v[0], x.v[1], packs.high.x, packs.low.x);
  split<Element>(x.v[2], x.v[3], packs.high.y, packs.low.y);
  split<Element>(x.v[4], x.v[5], packs.high.z, packs.low.z);
  split<Element>(x.v[6], x.v[7], packs.high.w, packs.low.w);
  return packs;
}

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

/// The sum of 32 lanes, halves onto halves; every lane gets the same bits.
EV_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) v += __shfl_xor_sync(kAllLanes, v, distance);
  return v;
}

EV_DEVICE float warp_max(float v) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, distance));
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

  EV_DEVICE Lanes(uint32_t hidden, uint32_t warps_per_group)
      : group(threadIdx.x / 32 / warps_per_group),
        first_run(threadIdx.x / 32 % warps_per_group),
        run_step(warps_per_group),
        lane(threadIdx.x % 32),
        group_packs(hidden / 64) {}

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
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
  }
};

}  // namespace ev
