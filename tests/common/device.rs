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

/// What the emulator's driver has lent.
pub fn held() -> [u64; 4] {
    let report = emulator::report();
    [report.num_allocations, report.num_host_allocations, report.num_streams, report.num_modules]
}

/// Runs `suite` with each mutant of a kernel, one seed after another until it sees the fault. Returns how many there
/// are; one that is never seen is a failure.
pub fn catch_mutants(kernel: &str, seeds: &[u64], suite: impl Fn(u64) -> Result<(), String>) -> usize {
    let is_of_kernel = |name: &str| name.strip_prefix(kernel).is_some_and(|rest| rest.starts_with(": "));
    let mutants = emulator::MUTANTS.iter().filter(|mutant| is_of_kernel(mutant.name));
    let caught = mutants.map(|mutant| {
        let seen = seeds.iter().find_map(|&seed| {
            let checked = emulator::Config::checked(seed);
            emulator::configure(&emulator::Config { mutant: Some(mutant.name), ..checked });
            suite(seed).err()
        });
        let seen = seen.unwrap_or_else(|| panic!("`{}` was not seen", mutant.name));
        eprintln!("{}: {}", mutant.name, seen.chars().take(100).collect::<String>());
    });
    caught.count()
}
