// A stand-in.
#include "head.cuh"
struct EvStandIn { uint64_t weights, high, low, row_index, partials; uint32_t rows, inputs, outputs, reserved; };
namespace ev {
template <class Half> EV_DEVICE void naive(const EvStandIn& a) {
  const uint32_t o = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
  if (o >= a.outputs) return;
  const uint32_t row = a.row_index ? reinterpret_cast<const uint32_t*>(a.row_index)[r] : r;
  float sum = 0;
  for (uint32_t i = 0; i < a.inputs; i += 8) {
    const Floats w = Floats::unpack<Half>(reinterpret_cast<const Pack*>(a.weights)[(size_t(o) * a.inputs + i) / 8]);
    const Floats h = Floats::unpack<Half>(reinterpret_cast<const Pack*>(a.high)[(size_t(row) * a.inputs + i) / 8]);
    const Floats l = Floats::unpack<Half>(reinterpret_cast<const Pack*>(a.low)[(size_t(row) * a.inputs + i) / 8]);
    for (int j = 0; j < 8; j++) sum = __fmaf_rn(w.v[j], h.v[j] + l.v[j], sum);
  }
  reinterpret_cast<float*>(a.partials)[size_t(r) * a.outputs + o] = sum;
}
}
extern "C" __global__ void ev_linear_bf16(const __grid_constant__ EvStandIn a) { ev::naive<ev::Bf16>(a); }
EV_KERNEL(ev_linear_bf16)
extern "C" __global__ void ev_linear_f16(const __grid_constant__ EvStandIn a) { ev::naive<ev::F16>(a); }
EV_KERNEL(ev_linear_f16)
