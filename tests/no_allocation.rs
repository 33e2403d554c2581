//! Calls of a group allocate nothing, once it has formed, nor do those that choose a token, on the CPU or by a
//! chooser, once their like has been seen, nor those of a linear layer. In a process of its own, for its allocator.
#![cfg(feature = "cuda")]

#[path = "common/collective.rs"]
mod collective;
#[path = "common/emulated.rs"]
mod emulated;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use collective::*;
use cuda_emulator as emulator;
use eagle_verify::TokenId;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::{ChooseRow, Chooser, ChooserConfig, Linear};
use eagle_verify::comm::{Group, NormOutputs, Quantized, Rendezvous, WorldSize};
use eagle_verify::sampling::{Sampler, SamplingContext, SamplingParams};
use emulated::OnEmulator;
use half::bf16;

struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(usize::from(IS_COUNTING.load(Ordering::Relaxed)), Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of all threads while `body` runs.
fn count(body: impl FnOnce()) -> usize {
    COUNT.store(0, Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    body();
    IS_COUNTING.store(false, Ordering::SeqCst);
    COUNT.load(Ordering::SeqCst)
}

#[test]
fn calls_allocate_nothing() {
    // The CPU group: two ranks in this very process.
    let cpu = Cpu::with_threads(1).unwrap();
    let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(20));
    let meeting = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for rank in WorldSize::Two.ranks() {
            let (cpu, rendezvous, meeting) = (&cpu, &rendezvous, &meeting);
            scope.spawn(move || {
                let mut group = Group::join(cpu, rendezvous, rank, config(64, 4, None)).unwrap();
                let (partial, weight) = ([bf16::ONE; 256], [bf16::ONE; 64]);
                let (mut residual, mut values, mut scales) = ([bf16::ONE; 256], [0; 256], [0.0; 4]);
                let norm = norm(64, NORM);
                let mut calls = || {
                    for _ in 0..100 {
                        let quantized =
                            Some(Quantized::PerRow { values: &mut values[..], scales: &mut scales[..] });
                        let outputs = NormOutputs { output: None, quantized };
                        group
                            .reduce_add_norm(&norm, &partial[..], &mut residual[..], &weight[..], outputs)
                            .unwrap();
                    }
                };
                calls();
                meeting.wait();
                if rank.index() == 0 {
                    assert_eq!(count(calls), 0);
                } else {
                    calls();
                }
                meeting.wait();
            });
        }
    });

    // The CUDA group's host side, over the emulated driver (whose own memory is not Rust's).
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let payload = Payload::<bf16>::random(1, 2, 64, 1);
    let mut ranks = OnEmulator::spread(WorldSize::One).form::<bf16>(WorldSize::One, config(64, 2, None));
    let (cuda, group) = &mut ranks[0];
    let mut buffers = Buffers::<OnEmulator, bf16>::new(cuda, &payload, 0, NORM);
    buffers.call(group).unwrap();
    assert_eq!(count(|| (0..20).for_each(|_| buffers.call(group).unwrap())), 0);
    cuda.synchronize().unwrap();

    // Choosing, with all that a row may need.
    let params = SamplingParams {
        temperature: 0.7,
        top_k: 9,
        top_p: 0.9,
        frequency_penalty: 0.5,
        logit_bias: vec![(TokenId(3), 1.0)],
        ..Default::default()
    };
    let sampler = Sampler::new(params).unwrap();
    let (text, allowed) = ([TokenId(1), TokenId(5), TokenId(1)], [!0]);
    let row = |i: usize| {
        let (prompt, output, path) = (&text[..1], &text[..2], &text[..i]);
        let context = SamplingContext { position: 4, prompt, output, path, allowed: Some(&allowed) };
        ChooseRow::new(&sampler, context)
    };
    let rows = [0, 1, 2, 3].map(row);
    let logits = cuda.upload(&[1.0f32; 4 * 32]).unwrap();
    let mut chooser = Chooser::<f32>::new(cuda, ChooserConfig::new(4, 32)).unwrap();
    let mut choose = |rows| {
        let part = logits.slice().get(0..32 * <[_]>::len(rows)).unwrap();
        chooser.choose(part, rows).unwrap();
    };
    choose(&rows[..]);
    assert_eq!(count(|| (0..20).for_each(|i| choose(&rows[..1 + i % 4]))), 0);

    // A linear layer, of more rows than one pass has.
    let mut linear = Linear::new(cuda, &[bf16::ONE; 9 * 16], 9, 16).unwrap();
    let (x, mut y) = (cuda.upload(&[1.0f32; 70 * 16]).unwrap(), cuda.alloc(70 * 9).unwrap());
    linear.forward(x.slice(), y.slice_mut()).unwrap();
    assert_eq!(count(|| (0..20).for_each(|_| linear.forward(x.slice(), y.slice_mut()).unwrap())), 0);
    cuda.synchronize().unwrap();

    let cpu = Cpu::with_threads(1).unwrap();
    let mut sample = |i: usize| {
        cpu.sample(&sampler, &[1.0; 32], rows[i % 4].context).unwrap();
    };
    sample(0);
    assert_eq!(count(|| (0..20).for_each(&mut sample)), 0);

    // The control: the counter counts.
    assert!(count(|| drop(std::hint::black_box(vec![1u8; 100]))) > 0);
}
