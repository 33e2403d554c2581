//! A device of the emulator, and random numbers for it.
#![allow(dead_code)] // each test crate uses its part

use cuda_emulator as emulator;
use eagle_verify::Error;
use eagle_verify::backend::cuda::Cuda;

use crate::common::toy::Numbers;

pub struct Random(pub Numbers);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(Numbers::new(seed))
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.0.next_u64() % end as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.0.next_u64().to_le_bytes());
        words.take(len).collect()
    }
}

pub fn device() -> Cuda {
    emulator::install();
    Cuda::with_kernels(0, &[("emulated", emulator::IMAGE)]).unwrap()
}

/// `Err` with what the emulator has found, which says more than the driver's error; or else with the error.
pub fn outcome<T>(result: Result<T, Error>) -> Result<T, String> {
    match emulator::report().complaint() {
        Some(complaint) => Err(complaint.to_owned()),
        None => result.map_err(|error| error.to_string()),
    }
}
