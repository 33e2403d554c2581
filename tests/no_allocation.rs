//! Calls of a group allocate nothing, once it has formed. In a process of its own, for its allocator.
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
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Group, NormOutputs, Quantized, Rendezvous, WorldSize};
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

    // The control: the counter counts.
    assert!(count(|| drop(std::hint::black_box(vec![1u8; 100]))) > 0);
}
