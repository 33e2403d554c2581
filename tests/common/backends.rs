//! Engines whose tensors are on the CPU or a GPU, for tests that run one scenario on both.
#![allow(dead_code)] // each test crate uses its part

use std::sync::Arc;

use eagle_verify::Backend;
use eagle_verify::backend::cpu::{self, Cpu};
use eagle_verify::backend::cuda::{self, Buffer, Cuda};

/// A backend, and how an engine's numbers get to it.
pub trait Device: Backend + Clone {
    type Floats;
    /// The CPU; a device of the emulator.
    fn open() -> Self;
    fn floats(&self, numbers: &[f32]) -> Self::Floats;
    fn view(floats: &Self::Floats) -> Self::View<'_>;
    fn embedding(&self, table: &[f32], hidden: usize) -> Self::Embedding;
}

impl Device for Cpu {
    type Floats = Vec<f32>;

    fn open() -> Self {
        Cpu::with_threads(1).unwrap()
    }

    fn floats(&self, numbers: &[f32]) -> Vec<f32> {
        numbers.to_vec()
    }
    fn view(floats: &Vec<f32>) -> &[f32] {
        floats
    }
    fn embedding(&self, table: &[f32], hidden: usize) -> cpu::Embedding {
        cpu::Embedding::f32(Arc::from(table), hidden).unwrap()
    }
}

impl Device for Cuda {
    type Floats = Buffer<f32>;

    fn open() -> Self {
        emulated()
    }

    fn floats(&self, numbers: &[f32]) -> Buffer<f32> {
        self.upload(numbers).unwrap()
    }
    fn view(floats: &Buffer<f32>) -> cuda::View<'_> {
        floats.into()
    }
    fn embedding(&self, table: &[f32], hidden: usize) -> cuda::Embedding {
        cuda::Embedding::new(self.upload(table).unwrap(), hidden).unwrap()
    }
}

/// A device of the emulator.
pub fn emulated() -> Cuda {
    cuda_emulator::install();
    Cuda::with_kernels(0, &[("emulated", cuda_emulator::IMAGE)]).unwrap()
}
