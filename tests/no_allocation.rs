//! Calls of a group allocate nothing, once it has formed, nor do those of a vocabulary's shards, nor those that choose a token, on the CPU or by a
//! chooser, once their like has been seen, nor those that move KV rows. In a process of its own, for its allocator.
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
use cuda_emulator::DriverCounts;
use eagle_verify::TokenId;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::{
    ChooseRow, Chooser, ChooserConfig, KvLayout, KvMover, KvMoverConfig, KvPlane, SlotMove,
};
use eagle_verify::comm::{
    Group, NormOutputs, Quantized, Rendezvous, VocabShard, VocabShardConfig, WorldSize,
};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
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

    // Two shards of a vocabulary.
    let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(20));
    std::thread::scope(|scope| {
        for rank in WorldSize::Two.ranks() {
            let (rendezvous, meeting) = (&rendezvous, &meeting);
            scope.spawn(move || {
                let config = VocabShardConfig::even(100, rank, WorldSize::Two);
                let mut shard = VocabShard::join(rendezvous, rank, config).unwrap();
                let mut keys = [ChoiceKey::new(rank.index() as f32, TokenId(7)); 40];
                let mut calls = || {
                    for num_rows in 0..40 {
                        shard.combine(&mut keys[..40 - num_rows]).unwrap();
                        shard.broadcast(&mut [1, 2]).unwrap();
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
    let before = emulator::report().driver;
    assert_eq!(count(|| (0..20).for_each(|i| choose(&rows[..1 + i % 4]))), 0);
    let after = emulator::report().driver;
    // One copy up, one kernel, one copy down, one wait: of pinned memory, or the copies would be waits, too.
    let per_call = |counts: fn(&DriverCounts) -> u64| (counts(&after) - counts(&before)) as f64 / 20.0;
    assert_eq!(per_call(|driver| driver.num_uploads), 1.0);
    assert_eq!(per_call(|driver| driver.num_launches), 1.0);
    assert_eq!(per_call(|driver| driver.num_downloads), 1.0);
    assert_eq!(per_call(|driver| driver.num_host_syncs), 1.0);
    assert_eq!(per_call(|driver| driver.num_device_allocations + driver.num_host_allocations), 0.0);

    // Moving KV rows.
    let cache = cuda.upload(&[1u8; 4 * 16 * 8]).unwrap();
    // SAFETY: the layout is the buffer's, which outlives the mover.
    let plane = unsafe { KvPlane::from_raw(cache.address(), KvLayout::rows(4, 16, 8)) };
    let config = KvMoverConfig { planes: vec![plane], page_size: 16, max_moves: 12 };
    let mut mover = KvMover::new(cuda, config).unwrap();
    let mut move_rows = |count: usize| {
        let request = |first| (first..first + count).map(|to| SlotMove { from: to + 2, to });
        mover.move_slots([request(0), request(32), request(16)]).unwrap();
    };
    assert_eq!(count(|| (0..20).for_each(|i| move_rows(i % 5))), 0);
    cuda.synchronize().unwrap();

    let cpu = Cpu::with_threads(1).unwrap();
    let mut sample = |i: usize| {
        cpu.sample(&sampler, &[1.0; 32], rows[i % 4].context).unwrap();
    };
    sample(0);
    assert_eq!(count(|| (0..20).for_each(&mut sample)), 0);

    // The controls: the counters count.
    drop(cuda.upload(&[1u8]).unwrap());
    let counted = emulator::report().driver;
    assert_eq!(counted.num_device_allocations, after.num_device_allocations + 1);
    assert_eq!(counted.num_uploads, after.num_uploads + 1);
    assert!(counted.num_host_syncs > after.num_host_syncs + 1, "its copy is of pageable memory");
    assert!(count(|| drop(std::hint::black_box(vec![1u8; 100]))) > 0);
}
