// What goes into a linear layer and what comes out of it: see EvLinear.
#pragma once

#include "row.cuh"

namespace ev {

/// Eight floats as two packs of the weights' type.
struct SplitPack {
  Pack high, low;
};

/// The nearest value of the type and the nearest of what remains, each no larger than the largest: the sum differs
/// by 2^-16 of the float for bf16; for f16 by 2^-22 of it or by 2^-25, and by more beyond 65504. Infinity and NaN
/// have no low part.
template <class Element>
EV_DEVICE SplitPack split(const Floats& x) {
  const auto clamp = [](float v) { return fminf(fmaxf(v, -Element::kMax), Element::kMax); };
  const auto is_finite = [](float v) { return fabsf(v) <= 3.40282346638528859812e38f; };
  Floats bounded;
#pragma unroll
  for (int i = 0; i < 8; i++) bounded.v[i] = is_finite(x.v[i]) ? clamp(x.v[i]) : x.v[i];
  const Pack high = bounded.template pack<Element>();
  Floats rest = Floats::unpack<Element>(high);
#pragma unroll
  for (int i = 0; i < 8; i++) rest.v[i] = is_finite(x.v[i]) ? clamp(x.v[i] - rest.v[i]) : 0.0f;
  return {high, rest.template pack<Element>()};
}

/// One output of a row: the sum of its slices.
EV_DEVICE float slice_sum(const float* partials, uint32_t slices, uint32_t outputs, uint32_t row, uint32_t output) {
  const size_t stride = size_t(EV_LINEAR_MAX_ROWS) * outputs;
  const float* const first = partials + size_t(row) * outputs + output;
  float sum = first[0];
  for (uint32_t slice = 1; slice < slices; slice++) sum += first[slice * stride];
  return sum;
}

}  // namespace ev
