//! The crate's CPU operations as candle ops.
//!
//! They treat every row by itself, so that the row of a tree node has the bits that plain decoding would
//! compute. candle's own matrix product doesn't: its order of additions depends on the number of rows.

use std::cell::RefCell;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor};
use eagle_verify::RmsNorm;
use eagle_verify::backend::cpu::{self, Cpu, PackedLinear};

/// An op on contiguous f32 rows: `[rows, in]` to `[rows, width]`.
struct RowOp<F> {
    name: &'static str,
    width: usize,
    apply: RefCell<F>,
}

impl<F: FnMut(&[f32], &mut [f32]) -> eagle_verify::Result<()>> CustomOp1 for RowOp<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("{}: the input has to be contiguous", self.name);
        };
        let (rows, _) = layout.shape().dims2()?;
        let mut out = vec![0.0; rows * self.width];
        let mut apply = self.apply.borrow_mut();
        apply(&storage.as_slice::<f32>()?[start..end], &mut out).map_err(candle_core::Error::wrap)?;
        Ok((CpuStorage::F32(out), (rows, self.width).into()))
    }
}

/// Maps `x`, `[rows, in]`, to `[rows, width]` by a function on slices.
pub fn map_rows(
    x: &Tensor,
    name: &'static str,
    width: usize,
    apply: impl FnMut(&[f32], &mut [f32]) -> eagle_verify::Result<()>,
) -> Result<Tensor> {
    x.apply_op1_no_bwd(&RowOp { name, width, apply: RefCell::new(apply) })
}

/// Borrows the elements of a contiguous f32 tensor.
pub fn with_slice<R>(x: &Tensor, use_slice: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(use_slice(&storage.as_slice::<f32>()?[start..end])),
        _ => candle_core::bail!("the tensor has to be contiguous and on the CPU"),
    }
}

/// `residual + x W^T`. (candle's own addition hands matrices of this size to threads of its own, which get
/// in the way of the backend's.)
pub fn add_linear(cpu: &Cpu, residual: &Tensor, layer: &PackedLinear, x: &Tensor) -> Result<Tensor> {
    with_slice(residual, |residual| {
        map_rows(x, "packed-linear-add", layer.num_outputs(), |x, y| {
            layer.forward(cpu, x, y)?;
            y.iter_mut().zip(residual).for_each(|(y, residual)| *y += residual);
            Ok(())
        })
    })?
}

/// RMSNorm with a weight of the row's length.
pub fn rms_norm(norm: &RmsNorm, weight: &[f32], x: &Tensor) -> Result<Tensor> {
    map_rows(x, "rms-norm", weight.len(), |x, y| norm.apply(x, weight, y))
}

/// The gated MLP up to its down projection, `silu(gate) * up` of a stacked `[gate, up]` layer.
/// `scratch` keeps its memory from call to call.
pub fn gated(cpu: &Cpu, gate_up: &PackedLinear, x: &Tensor, scratch: &mut Vec<f32>) -> Result<Tensor> {
    let width = gate_up.num_outputs() / 2;
    map_rows(x, "gated-mlp", width, |x, y| {
        scratch.resize(2 * y.len(), 0.0);
        gate_up.forward(cpu, x, scratch)?;
        cpu::silu_mul(cpu, scratch, width, y)
    })
}
