//! The conformance suites on whatever GPU this machine has, with all ranks of a group as virtual ranks on it.
//! Without one they are skipped, loudly; with `EAGLE_VERIFY_REQUIRE_GPU` set they fail. `tests/gpu.sh` runs all that
//! a card is for.
#![cfg(feature = "cuda")]

use std::time::Duration;

use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::{
    Buffer, ChooseRow, Chooser, ChooserConfig, Cuda, DeviceSlice, DeviceSliceMut, kernel_architectures,
};
use eagle_verify::comm::{GroupConfig, WorldSize};
use eagle_verify::sampling::{Sampler, SamplingContext};
use eagle_verify::{Coupling, ErrorKind, RequestOptions};
use half::bf16;

#[path = "common/backends.rs"]
mod backends;
#[path = "common/collective.rs"]
mod collective;
#[path = "common/draft.rs"]
mod draft;
#[path = "common/toy.rs"]
mod toy;

use collective::*;
use draft::{Both, large, options, samplings, small};

/// The first device, or why there is none to test on.
fn gpu(test: &str) -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) if std::env::var_os("EAGLE_VERIFY_REQUIRE_GPU").is_some() => panic!("{error}"),
        // A machine without a GPU, or a build without kernels for it; a GPU that fails is a failure.
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            eprintln!("SKIPPED: {test} needs a GPU (kernels: {}): {error}", kernel_architectures());
            None
        }
    }
}

/// All ranks on one device.
struct VirtualRanks;

impl Machine for VirtualRanks {
    type Backend = Cuda;
    type Buffer<T: bytemuck::Pod> = Buffer<T>;

    fn backend(&self, _: usize) -> Cuda {
        Cuda::new(0).unwrap()
    }
    fn upload<T: bytemuck::Pod>(cuda: &Cuda, data: &[T]) -> Buffer<T> {
        cuda.upload(data).unwrap()
    }
    fn slice<T: bytemuck::Pod>(buffer: &Buffer<T>) -> DeviceSlice<'_, T> {
        buffer.slice()
    }
    fn slice_mut<T: bytemuck::Pod>(buffer: &mut Buffer<T>) -> DeviceSliceMut<'_, T> {
        buffer.slice_mut()
    }
    fn download<T: bytemuck::Pod>(cuda: &Cuda, buffer: &Buffer<T>) -> Vec<T> {
        cuda.download(buffer).unwrap()
    }
}

#[test]
fn collectives_equal_the_specification() {
    if gpu("collectives").is_none() {
        return;
    }
    let mut turn = 0;
    for world in WORLDS {
        for &algorithm in algorithms(world) {
            for hidden in [64, 576, 2880, 7168] {
                let mut calls = Vec::new();
                for rows in [1, 3, 8, 33] {
                    turn += 1;
                    let payload = Payload::<bf16>::random(world.get(), rows, hidden, turn as u64);
                    calls.push((payload, EPILOGUES[turn % EPILOGUES.len()]));
                }
                // All ranks' blocks are resident on the one device.
                let config = GroupConfig {
                    max_blocks: 8,
                    time_limit: Duration::from_secs(2),
                    ..config(hidden, 33, Some(algorithm))
                };
                check_calls(&VirtualRanks, world, config, &calls);
            }
        }
    }
    eprintln!("{turn} calls of groups of up to {} virtual ranks", WorldSize::Eight.get());
}

#[test]
fn choices_equal_the_specification() {
    let Some(cuda) = gpu("choices") else { return };
    let mut numbers = toy::Numbers::new(5);
    for vocab in [8, 1000, 49_152, 163_840] {
        let mut chooser = Chooser::<f32>::new(&cuda, ChooserConfig::new(8, vocab)).unwrap();
        for round in 0..6 {
            let logits: Vec<f32> = numbers.floats(7 * vocab).into_iter().map(|x| x * 8.0).collect();
            let samplers: Vec<Sampler> =
                samplings().into_iter().map(|params| Sampler::new(params).unwrap()).collect();
            let text = toy::prompt(40, round);
            let context = SamplingContext {
                position: 40 + round as u32,
                prompt: &text[..10],
                output: &text[10..],
                path: &text[3..6],
                allowed: None,
            };
            let rows: Vec<ChooseRow<'_>> =
                samplers.iter().map(|sampler| ChooseRow::new(sampler, context)).collect();
            let on_device = cuda.upload(&logits).unwrap();
            let keys = chooser.choose(on_device.slice(), &rows).unwrap();
            for ((key, sampler), logits) in keys.iter().zip(&samplers).zip(logits.chunks(vocab)) {
                assert_eq!(*key, sampler.choose(logits, context).unwrap(), "{vocab} {:?}", sampler.params());
            }
        }
    }
}

#[test]
fn drafts_equal_those_of_the_cpu() {
    let Some(cuda) = gpu("drafts") else { return };
    for batch in [1, 3, 8, 33] {
        let mut both = Both::new(&cuda, small, batch, 400);
        for i in 0..batch {
            let budget = ([1, 2, 4, 8, 10][i % 5], 1 + i * 3 % 8, if i % 3 == 0 { 256 } else { 30 });
            both.admit([1, 15, 16, 17, 70][i % 5], options(budget, samplings()[0].clone()));
        }
        (0..4).for_each(|_| both.step());
        both.compare_kv();
    }
    let mut both = Both::new(&cuda, large, 8, 9000);
    for (i, sampling) in samplings().into_iter().enumerate() {
        let coupling = Coupling { noise_scale: 0.5, ..Coupling::default() };
        let options = RequestOptions { coupling, ..options((4, 4, 40), sampling) };
        both.admit([300, 8192 + 15, 40][i % 3], options);
    }
    (0..4).for_each(|_| both.step());
    both.compare_kv();
    assert!(both.num_correct > 20, "{}", both.num_correct);
}

/// Every `Cuda` has a stream of its own; the CPU backend is not disturbed.
#[test]
fn the_cpu_backend_works_beside_it() {
    let Some(cuda) = gpu("both backends") else { return };
    let data = cuda.upload(&[1.0f32, 2.0]).unwrap();
    assert!(Cpu::with_threads(2).is_ok());
    assert_eq!(cuda.download(&data).unwrap(), [1.0, 2.0]);
}
