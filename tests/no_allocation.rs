//! Calls allocate nothing once their like has been seen: of a group and of a vocabulary's shards; those that choose a
//! token, on the CPU or by a chooser, move KV rows, or run a linear layer; steps on a GPU. In a process of its own, for
//! its allocator.
#![cfg(feature = "cuda")]

#[path = "common/backends.rs"]
mod backends;
#[path = "common/collective.rs"]
mod collective;
#[path = "common/emulated.rs"]
mod emulated;
#[path = "common/toy.rs"]
mod toy;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use backends::Device;
use collective::*;
use cuda_emulator as emulator;
use cuda_emulator::DriverCounts;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::{
    ChooseRow, Chooser, ChooserConfig, Cuda, KvLayout, KvMover, KvMoverConfig, KvPlane, Linear, SlotMove,
};
use eagle_verify::comm::{
    Group, NormOutputs, Quantized, Rendezvous, VocabShard, VocabShardConfig, WorldSize,
};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, RequestId, RequestOptions, Speculator, SpeculatorConfig, TokenId,
    VerifyBatch,
};
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

/// Allocations are counted of all threads, so one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

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
    let _turn = TURN.lock();
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

    // The controls: the counters count.
    let after = emulator::report().driver;
    drop(cuda.upload(&[1u8]).unwrap());
    let counted = emulator::report().driver;
    assert_eq!(counted.num_device_allocations, after.num_device_allocations + 1);
    assert_eq!(counted.num_uploads, after.num_uploads + 1);
    assert!(counted.num_host_syncs > after.num_host_syncs + 1, "its copy is of pageable memory");
    assert!(count(|| drop(std::hint::black_box(vec![1u8; 100]))) > 0);
}

/// Steps of a speculator on a GPU: nothing is allocated, on the host or the device, and the host waits twice.
#[test]
fn steps_on_a_gpu_allocate_nothing_and_wait_twice() {
    let _turn = TURN.lock();
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config { max_resident_blocks: 4, ..emulator::Config::fast() });
    let cuda = backends::emulated();
    let files = toy::head_files(7);
    let head =
        Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), toy::TARGET).unwrap();
    let table = cuda.embedding(&toy::embedding_table(), toy::TARGET.hidden);
    let config = SpeculatorConfig { max_requests: 3, max_len: 300 };
    let mut speculator = Speculator::new(cuda.clone(), &head, Some(table), config).unwrap();
    let ids = [0, 1, 2].map(RequestId);
    for id in ids {
        let prompt = toy::prompt(20, id.0);
        let budget = DraftBudget::new(2 + id.0 as usize, 3, 9).unwrap();
        speculator.admit(id, RequestOptions { max_new_tokens: 200, budget, ..Default::default() }).unwrap();
        let features = cuda.floats(&toy::features(&prompt, 0));
        speculator.prefill(id, &prompt, Cuda::view(&features)).unwrap();
        let logits = cuda.floats(&toy::logits(&prompt));
        speculator.begin(id, Cuda::view(&logits)).unwrap();
    }
    let mut batch = VerifyBatch::new();
    for step in 0..12 {
        let before = emulator::report().driver;
        let mut allocated = count(|| speculator.propose(&ids, &mut batch).unwrap());
        let proposed = emulator::report().driver;
        let (logits, features) = toy::forward(&batch, |i| speculator.committed(ids[i]).unwrap());
        let (logits, features) = (cuda.floats(&logits), cuda.floats(&features));
        let (logits, features) = (Cuda::view(&logits), Cuda::view(&features));
        let uploaded = emulator::report().driver;
        allocated += count(|| assert_eq!(speculator.accept(&batch, logits, features).unwrap().len(), 3));
        let after = emulator::report().driver;
        let of = |counts: fn(&DriverCounts) -> u64| {
            counts(&proposed) - counts(&before) + counts(&after) - counts(&uploaded)
        };
        // The first steps allocate, and capture their graphs.
        if step >= 4 {
            assert_eq!(of(|driver| driver.num_host_syncs), 2, "step {step}");
            assert_eq!(allocated, 0, "step {step}");
            assert_eq!(
                of(|driver| driver.num_device_allocations + driver.num_host_allocations),
                0,
                "step {step}"
            );
            assert_eq!(of(|driver| driver.num_graph_launches), 1);
            assert_eq!(of(|driver| driver.num_downloads), 2);
        }
    }
}
