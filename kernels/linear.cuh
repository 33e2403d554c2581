// What comes out of a linear layer: see EvLinear.
#pragma once

#include "row.cuh"

namespace ev {

/// One output of a row: the sum of its slices.
EV_DEVICE float slice_sum(const float* partials, uint32_t slices, uint32_t outputs, uint32_t row, uint32_t output) {
  const size_t stride = size_t(EV_LINEAR_MAX_ROWS) * outputs;
  const float* const first = partials + size_t(row) * outputs + output;
  float sum = first[0];
#pragma unroll 1
  for (uint32_t slice = 1; slice < slices; slice++) sum += first[slice * stride];
  return sum;
}

}  // namespace ev
