//! A stand-in.
use half::bf16;

use super::context::{Cuda, Kernel};
use super::launch;
use super::memory::Memory;
use super::view::Format;
use crate::draft::{Matrix, Weights};
use crate::error::Result;

#[derive(Clone, Copy, Debug)]
pub(super) struct Halves {
    pub(super) high: u64,
    pub(super) low: u64,
    pub(super) row_index: u64,
}

#[derive(Debug)]
pub(super) struct LinearLayer {
    weights: Memory,
    kernel: Kernel,
    inputs: usize,
    outputs: usize,
}

#[repr(C)]
struct A {
    weights: u64,
    high: u64,
    low: u64,
    row_index: u64,
    partials: u64,
    rows: u32,
    inputs: u32,
    outputs: u32,
    reserved: u32,
}

impl LinearLayer {
    pub(super) fn new(cuda: &Cuda, parts: &[&Matrix]) -> Result<Self> {
        let mut all: Vec<bf16> = Vec::new();
        for part in parts {
            match &part.weights {
                Weights::Bf16(w) => all.extend_from_slice(w),
                Weights::F32(w) => all.extend(w.iter().map(|x| bf16::from_f32(*x))),
            }
        }
        let inputs = parts[0].columns;
        let outputs = all.len() / inputs;
        Ok(Self {
            weights: cuda.upload(&all)?.into_memory(),
            kernel: cuda.kernel("ev_linear_bf16")?,
            inputs,
            outputs,
        })
    }
    pub(super) fn format(&self) -> Format {
        Format::Bf16
    }
    pub(super) fn num_outputs(&self) -> usize {
        self.outputs
    }
    pub(super) fn num_slices(&self) -> usize {
        1
    }
    pub(super) fn queue(&self, inputs: Halves, num_rows: usize, partials: u64) -> Result<()> {
        let Halves { high, low, row_index } = inputs;
        let mut a = A {
            weights: self.weights.address,
            high,
            low,
            row_index,
            partials,
            rows: num_rows as u32,
            inputs: self.inputs as u32,
            outputs: self.outputs as u32,
            reserved: 0,
        };
        let grid = (self.outputs.div_ceil(64) as u32, num_rows as u32, 1);
        // SAFETY: stand-in.
        unsafe { launch::queue(&self.weights.cuda, self.kernel, grid, 64, 0, &mut a) }
    }
}
