// Noise, weights and keys of sampling, bit for bit those of src/sampling/{noise,math,mod}.rs: IEEE operations and
// integers in one order. No library function is called.
#pragma once

#include "device.cuh"

namespace ev {

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kMaxFloat = 3.40282346638528859812e38f;

/// Bits that compare as their numbers do.
EV_DEVICE uint32_t ordered_bits(float number) {
  const uint32_t bits = float_to_bits(number);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
EV_DEVICE float from_ordered_bits(uint32_t ordered) {
  return bits_to_float(ordered >> 31 ? ordered & 0x7FFFFFFFu : ~ordered);
}

/// Scores that are none: of a logit that is NaN, and of one that penalties and bias have made so. Above all others,
/// so that the maximum reports them, at the lowest token; logits come first.
constexpr uint32_t kNanLogit = 0xFFFFFFFFu;
constexpr uint32_t kNanAdjusted = 0xFFFFFFFEu;

EV_DEVICE uint64_t key_of(uint32_t ordered_score, uint32_t token) { return uint64_t(ordered_score) << 32 | ~token; }
EV_DEVICE uint64_t choice_key(float score, uint32_t token) { return key_of(ordered_bits(score + 0.0f), token); }

/// What a stream of noise is for.
constexpr uint32_t kNoise = 0;
constexpr uint32_t kRefinement = 1;

/// Uniform values below this have 32 more bits.
constexpr uint32_t kRefinedBelow = 1u << 12;

/// The uniform bits of tokens 4 * group to 4 * group + 3: Philox4x32-10.
EV_DEVICE uint4 uniform_bits(uint64_t seed, uint32_t position, uint32_t group, uint32_t purpose) {
  uint4 counter = {position, group, purpose, 0};
  uint32_t low_key = uint32_t(seed), high_key = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(counter.x) * 0xD2511F53u;
    const uint64_t b = uint64_t(counter.z) * 0xCD9E8D57u;
    counter = {uint32_t(b >> 32) ^ counter.y ^ low_key, uint32_t(b), uint32_t(a >> 32) ^ counter.w ^ high_key,
               uint32_t(a)};
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
  return counter;
}

EV_DEVICE uint32_t uniform_bits_of(uint64_t seed, uint32_t position, uint32_t token, uint32_t purpose) {
  const uint4 bits = uniform_bits(seed, position, token / 4, purpose);
  const uint32_t lane = token % 4;
  return lane == 0 ? bits.x : lane == 1 ? bits.y : lane == 2 ? bits.z : bits.w;
}

EV_DEVICE double ln(double x) {
  const uint64_t bits = double_to_bits(x);
  const uint64_t offset = bits - 0x3FE6A09E667F3BCDu;  // the bits of sqrt(1/2)
  const double exponent = double(int32_t(int64_t(offset) >> 52));
  const double m = bits_to_double(bits - (offset & 0xFFF0000000000000u));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 23.0;
  series = series * z + 1.0 / 21.0;
  series = series * z + 1.0 / 19.0;
  series = series * z + 1.0 / 17.0;
  series = series * z + 1.0 / 15.0;
  series = series * z + 1.0 / 13.0;
  series = series * z + 1.0 / 11.0;
  series = series * z + 1.0 / 9.0;
  series = series * z + 1.0 / 7.0;
  series = series * z + 1.0 / 5.0;
  series = series * z + 1.0 / 3.0;
  const double artanh = s + s * (z * series);
  return exponent * 0.693147180559945309417232121458 + 2.0 * artanh;
}

/// Standard Gumbel noise of a token, whose uniform bits are `bits`.
EV_DEVICE float gumbel(uint64_t seed, uint32_t position, uint32_t token, uint32_t bits) {
  double exponential;
  if (bits < kRefinedBelow) {
    const uint32_t more = uniform_bits_of(seed, position, token, kRefinement);
    const double v = (double(uint64_t(bits) << 32 | more) + 0.5) * 0x1p-64;
    exponential = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)));
  } else {
    exponential = -ln(double((uint64_t(1) << 33) - (2 * uint64_t(bits) + 1)) * 0x1p-33);
  }
  return float(-ln(exponential));
}

/// No less than the noise that these uniform bits give.
EV_DEVICE float noise_bound(uint32_t bits) {
  const uint32_t exponent = float_to_bits(float(bits >> 8)) >> 23;
  return (151.0f - float(exponent)) * 0.693148f;
}

/// Uniform bits from 2^8 to 2^31 give no less noise than their bound less this: ln 2 from one power of two to the
/// next, the rest for -ln(1 - v) > v.
constexpr float kNoiseSpan = 1.02f;
EV_DEVICE bool has_lower_bound(uint32_t bits) { return bits - 256 < 0x80000000u - 256; }

/// The weight of the likeliest token.
constexpr uint64_t kLargestWeight = uint64_t(1) << 40;

/// exp(z - largest) in units of 2^-40; z <= largest.
EV_DEVICE uint64_t weight(float z, float largest) {
  if (z == largest) return kLargestWeight;
  float distance = largest - z;
  distance = distance < 31.0f ? distance : 31.0f;  // infinity too
  const uint64_t exponent = uint64_t(nearest_uint(distance * 67108864.0f)) * 3098164009u >> 31;  // of 2^-26
  const uint32_t fraction = uint32_t(exponent) << 6;                                            // of 2^-32
  const auto times_fraction = [&](uint32_t v) { return uint32_t(uint64_t(v) * fraction >> 32); };
  uint32_t series = 466327;
  series = 5469618 - times_fraction(series);
  series = 41136673 - times_fraction(series);
  series = 238328358 - times_fraction(series);
  series = 1031755265 - times_fraction(series);
  series = 2977043937u - times_fraction(series);
  const uint64_t power = (uint64_t(1) << 32) - times_fraction(series);  // 2^-fraction
  return power << 8 >> (exponent >> 26);
}

/// `whole * part` rounded up, exactly; `whole` below 2^59, `part` from 0 to 1.
EV_DEVICE uint64_t share(uint64_t whole, float part) {
  // part = mantissa / 2^shift
  const uint32_t bits = float_to_bits(part), exponent = bits >> 23;
  const uint32_t mantissa = exponent == 0 ? bits : (bits & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = 150 - (exponent == 0 ? 1 : exponent);  // 23 to 149
  const uint64_t low = uint64_t(uint32_t(whole)) * mantissa;
  const uint64_t high = (whole >> 32) * mantissa + (low >> 32);  // the product is high * 2^32 + uint32_t(low)
  if (shift < 32) {
    const bool has_rest = (uint32_t(low) & ((1u << shift) - 1)) != 0;
    return (high << (32 - shift) | uint32_t(low) >> shift) + has_rest;
  }
  if (shift >= 96) return (high | uint32_t(low)) != 0;
  const bool has_rest = (high & ((uint64_t(1) << (shift - 32)) - 1)) != 0 || uint32_t(low) != 0;
  return (high >> (shift - 32)) + has_rest;
}

}  // namespace ev
