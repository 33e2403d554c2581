//! The EAGLE-3 head of SmolLM2 on the CPU: taking in a prompt, and drafting chains and trees.
//!
//! Printed against the physical limit: the time to read the head's weights once for each of its forward
//! passes, at the bandwidth that reading them alone reaches here.

use std::path::Path;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use eagle_verify::backend::cpu::{Cpu, Embedding, PackedLinear};
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, RequestId, RequestOptions, Speculator, SpeculatorConfig, TargetShape,
    TokenId, VerifyBatch,
};

const TARGET: TargetShape = TargetShape { hidden: 576, num_layers: 30, vocab: 49_152 };
const FEATURE_WIDTH: usize = 1728;
/// Layers and draft vocabulary: what each pass reads, in bf16.
const WEIGHT_BYTES: usize = 2 * (576 * 1728 + 960 * 1152 + 576 * 576 + 3 * 576 * 1536 + 8192 * 576);

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn speculator(cpu: &Cpu) -> Speculator<Cpu> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(assets, TARGET).expect("the shipped head");
    let table =
        Embedding::f32(numbers(TARGET.vocab * TARGET.hidden, 3).into(), TARGET.hidden).expect("whole rows");
    let config = SpeculatorConfig { max_requests: 8, max_len: 2048 };
    Speculator::new(cpu.clone(), &head, Some(table), config).expect("a speculator")
}

fn admit(speculator: &mut Speculator<Cpu>, id: u64, len: usize, budget: DraftBudget) {
    let prompt: Vec<TokenId> = (0..len as u32).map(|i| TokenId(1000 + 7 * i)).collect();
    let options = RequestOptions { max_new_tokens: 1000, budget, ..Default::default() };
    speculator.admit(RequestId(id), options).expect("a free place");
    let features = numbers(len * FEATURE_WIDTH, id as u32);
    speculator.prefill(RequestId(id), &prompt, &features).expect("a prompt");
    speculator.begin(RequestId(id), &numbers(TARGET.vocab, 5)).expect("a first token");
}

fn median(mut action: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..31)
        .map(|_| {
            let started = Instant::now();
            action();
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn head(criterion: &mut Criterion) {
    let cpu = Cpu::new().expect("threads");
    let mut s = speculator(&cpu);
    let mut group = criterion.benchmark_group("head");
    group.sample_size(20);
    group.bench_function("extend by 200 prompt tokens", |b| {
        b.iter(|| {
            admit(&mut s, 0, 200, DraftBudget::NONE);
            s.cancel(RequestId(0)).expect("it was admitted");
        });
    });

    // Reading as many bytes as the head has, through the same code with one row.
    let outputs = WEIGHT_BYTES / 2 / 576;
    let weights = vec![half::bf16::ONE; outputs * 576];
    let layer = PackedLinear::new(&weights, outputs, 576).expect("a layer");
    let (x, mut y) = (vec![1.0; 576], vec![0.0; outputs]);
    let pass = median(|| layer.forward(&cpu, &x, &mut y).expect("its shape"));
    assert_eq!(y[0], 576.0);

    let mut batch = VerifyBatch::new();
    let shapes = [("chain 3", 1, 3, 4), ("tree 12 (8x4)", 8, 4, 12), ("tree 32 (8x5)", 8, 5, 32)];
    for (name, width, depth, nodes) in shapes {
        for requests in [1, 8] {
            let budget = DraftBudget::new(width, depth, nodes).expect("a budget");
            let ids: Vec<RequestId> = (0..requests).map(RequestId).collect();
            ids.iter().for_each(|id| admit(&mut s, id.0, 200, budget));
            // The answers: full trees, and each request's is what it would be alone.
            s.propose(&ids, &mut batch).expect("a step");
            let trees: Vec<_> = batch.entries().iter().map(|entry| entry.tree().clone()).collect();
            assert!(trees.iter().all(|tree| tree.len() == nodes));
            s.propose(&ids[..1], &mut batch).expect("a step");
            assert_eq!(*batch.entries()[0].tree(), trees[0]);
            group.bench_function(format!("draft {name}, {requests} requests"), |b| {
                b.iter(|| s.propose(&ids, &mut batch).expect("a step"));
            });
            let time = median(|| s.propose(&ids, &mut batch).expect("a step"));
            println!(
                "draft {name}, {requests} requests: {:.2} ms, {:.2}x the time to read its weights {depth} times",
                time * 1e3,
                time / (pass * depth as f64)
            );
            ids.iter().for_each(|id| s.cancel(*id).expect("it was admitted"));
        }
    }
    group.finish();
}

criterion_group!(benches, head);
criterion_main!(benches);
