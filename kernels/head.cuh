// What the kernels of the draft head share: its rows, sums of linear layers, halves, and exp.
#pragma once

#include "linear.cuh"

namespace ev {

/// Row `r` of this pass.
EV_DEVICE const EvDraftRow& draft_row(const EvDraft& a, uint32_t r) {
  return reinterpret_cast<const EvDraftRow*>(a.rows)[a.first_row + r];
}

EV_DEVICE const EvDraftRequest& draft_request(const EvDraft& a, uint32_t number) {
  return reinterpret_cast<const EvDraftRequest*>(a.requests)[number];
}

EV_DEVICE uint32_t target_token(const EvDraft& a, uint32_t column) {
  return reinterpret_cast<const uint32_t*>(a.draft_tokens)[column];
}

/// Whether the mask of row `r`, if there is one, allows a column's token.
EV_DEVICE bool is_allowed(const EvDraft& a, uint32_t r, uint32_t column) {
  if (a.masks == 0) return true;
  const uint32_t token = target_token(a, column), words = (a.vocab + 31) / 32;
  return reinterpret_cast<const uint32_t*>(a.masks)[size_t(a.first_row + r) * words + token / 32] >> (token % 32) & 1;
}

/// A row's numbers after penalties, bias, mask and temperature, if its request has a filter.
EV_DEVICE float* edited_row(const EvDraft& a, uint32_t r) {
  return reinterpret_cast<float*>(a.edited) + size_t(r) * ((a.draft_vocab + 7) / 8 * 8);
}

/// Eight floats; `at` is a multiple of 8.
EV_DEVICE Floats load_floats(uint64_t floats, size_t at) {
  const Pack* const from = reinterpret_cast<const Pack*>(floats) + at / 4;
  return Floats::from_bits(from[0], from[1]);
}
EV_DEVICE void store_floats(uint64_t floats, size_t at, const Floats& v) {
  Pack* const to = reinterpret_cast<Pack*>(floats) + at / 4;
  to[0] = v.bits(0);
  to[1] = v.bits(1);
}

/// Outputs `column` to `column + 7` of the linear layer before; all row lengths are multiples of 8.
EV_DEVICE Floats sum_slices(const EvDraft& a, uint32_t r, uint32_t column) {
  const size_t at = size_t(r) * a.num_outputs + column, slice = size_t(EV_PASS_ROWS) * a.num_outputs;
  Floats sum = load_floats(a.partials, at);
#pragma unroll 1
  for (uint32_t i = 1; i < a.num_slices; i++) sum = sum + load_floats(a.partials, at + i * slice);
  return sum;
}
EV_DEVICE float sum_slices_at(const EvDraft& a, uint32_t r, uint32_t column) {
  return slice_sum(reinterpret_cast<const float*>(a.partials), a.num_slices, a.num_outputs, r, column);
}

/// Writes eight inputs of the next linear layer: x = high + low, to 2^-16 in bf16.
template <class Half>
EV_DEVICE void store_halves(const EvDraft& a, size_t at, const Floats& x) {
  const SplitPack packs = split<Half>(x);
  reinterpret_cast<Pack*>(a.high)[at / 8] = packs.high;
  reinterpret_cast<Pack*>(a.low)[at / 8] = packs.low;
}

/// e^x bit for bit as the CPU backend has it: to about 1 ulp; 0 below -87, e^88 above 88, NaN for NaN.
EV_DEVICE float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float clamped = x > 88.0f ? 88.0f : x;
  const float shifted = __fmaf_rn(clamped, 1.44269504088896340736f, kRound);
  const float n = shifted - kRound;
  float r = __fmaf_rn(n, -0.693359375f, clamped);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691e-4f;
  p = __fmaf_rn(p, r, 1.3981999e-3f);
  p = __fmaf_rn(p, r, 8.333452e-3f);
  p = __fmaf_rn(p, r, 4.1665796e-2f);
  p = __fmaf_rn(p, r, 1.6666665e-1f);
  p = __fmaf_rn(p, r, 5e-1f);
  const float y = __fmaf_rn(p * r, r, r) + 1.0f;
  const float power = bits_to_float((float_to_bits(shifted) << 23) + float_to_bits(1.0f));
  return x < -87.0f ? 0.0f : y * power;
}

/// ln(x) of a positive normal number, to about 1 ulp: Cephes' polynomial.
EV_DEVICE float ln_of(float x) {
  const uint32_t offset = float_to_bits(x) - 0x3F3504F3u;  // the bits of sqrt(1/2)
  const float exponent = float(int32_t(offset) >> 23);
  const float m = bits_to_float(float_to_bits(x) - (offset & 0xFF800000u)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = __fmaf_rn(p, m, -1.1514610310e-1f);
  p = __fmaf_rn(p, m, 1.1676998740e-1f);
  p = __fmaf_rn(p, m, -1.2420140846e-1f);
  p = __fmaf_rn(p, m, 1.4249322787e-1f);
  p = __fmaf_rn(p, m, -1.6668057665e-1f);
  p = __fmaf_rn(p, m, 2.0000714765e-1f);
  p = __fmaf_rn(p, m, -2.4999993993e-1f);
  p = __fmaf_rn(p, m, 3.3333331174e-1f);
  const float square = m * m;
  float y = p * m * square;
  y = __fmaf_rn(exponent, -2.12194440e-4f, y);
  y = __fmaf_rn(square, -0.5f, y);
  return __fmaf_rn(exponent, 0.693359375f, m + y);
}

}  // namespace ev
