//! What more rows cost: the target's forward pass over 1 to 32 tree nodes against one row, in one run.
//!
//! Needs the model of the example (downloads it once). Prints the curve for the packed layers and for
//! candle's own matrix product beside it, the share of the memory bandwidth that one row reaches, and the
//! cost of a draft.

use std::path::Path;
use std::time::Instant;

use candle_core::{Device, Tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::{
    DraftBudget, DraftTree, Eagle3Checkpoint, PageTable, RequestId, RequestOptions, Speculator,
    SpeculatorConfig, TokenId, VerifyBatch,
};

#[allow(dead_code)] // the example uses the rest
#[path = "../examples/smollm2/mod.rs"]
mod smollm2;
use smollm2::fetch;
use smollm2::model::{Pass, Target};

const ROWS: [usize; 8] = [1, 2, 4, 8, 12, 16, 24, 32];
/// Committed tokens that every row attends to.
const PREFIX: usize = 200;
const ROUNDS: usize = 21;

fn tree(nodes: usize) -> DraftTree {
    let drafts: Vec<_> = (1..nodes).map(|node| ((node - 1) / 2, TokenId(31 * node as u32))).collect();
    DraftTree::from_drafts(TokenId(5), &drafts).expect("a binary tree")
}

/// A forward pass over the nodes of a batch, and what `look` makes of its logits.
fn verify<R>(
    target: &mut Target,
    table: &mut PageTable,
    batch: &VerifyBatch,
    look: impl FnOnce(&[f32]) -> R,
) -> R {
    let lease = table.lease(batch.num_rows()).expect("free pages");
    let pass = Pass::verify(batch, std::iter::once(lease.table()));
    look(target.forward(&pass).expect("a forward pass").logits)
}

fn seconds(action: impl FnOnce()) -> f64 {
    let started = Instant::now();
    action();
    started.elapsed().as_secs_f64()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Sums all floats, each thread a part: nothing but reading.
fn read_all(data: &[f32], threads: usize) -> f32 {
    std::thread::scope(|scope| {
        let parts: Vec<_> = data
            .chunks(data.len().div_ceil(threads))
            .map(|part| {
                scope.spawn(move || {
                    let mut sums = [0.0f32; 64];
                    for chunk in part.as_chunks::<64>().0 {
                        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
                    }
                    sums.iter().sum::<f32>()
                })
            })
            .collect();
        parts.into_iter().map(|part| part.join().expect("it only adds")).sum()
    })
}

fn verify_cost(criterion: &mut Criterion) {
    let cpu = Cpu::new().expect("threads");
    let path = fetch::model(None).expect("the model");
    let mut target = Target::load(&path, std::slice::from_ref(&cpu), 2, 1024).expect("the model").remove(0);
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(assets, target.target_shape()).expect("the head");
    target.capture(&head.config().feature_layers);
    let prompt: Vec<TokenId> = (0..PREFIX as u32).map(|i| TokenId(1000 + 7 * i)).collect();
    let mut table = target.new_table();
    let config = SpeculatorConfig { max_requests: 1, max_len: 1024 };
    let mut speculator =
        Speculator::new(cpu.clone(), &head, Some(target.embedding()), config).expect("a speculator");
    let budget = DraftBudget::new(8, 5, 16).expect("a budget");
    let options = RequestOptions { max_new_tokens: 500, budget, ..Default::default() };
    speculator.admit(RequestId(0), options).expect("a place");
    {
        let lease = table.lease(PREFIX).expect("free pages");
        let answer = target.forward(&Pass::prompt(lease.table(), 0, &prompt)).expect("a forward pass");
        speculator.prefill(RequestId(0), &prompt, answer.features).expect("a prompt");
        speculator.begin(RequestId(0), answer.logits).expect("a first token");
        lease.commit(PREFIX).expect("all of it");
    }
    let batches: Vec<VerifyBatch> = ROWS
        .iter()
        .map(|&rows| {
            let mut batch = VerifyBatch::new();
            batch.push(RequestId(0), PREFIX + 1, &tree(rows)).expect("a batch");
            batch
        })
        .collect();

    // The answer: the root's row has the same bits alone and among 32.
    let vocab = target.shape.vocab;
    let alone = verify(&mut target, &mut table, &batches[0], <[f32]>::to_vec);
    for batch in &batches {
        verify(&mut target, &mut table, batch, |logits| {
            assert!(logits[..vocab].iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()));
        });
    }

    let shape = target.shape;
    let widths = [
        ((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden),
        (shape.hidden, shape.num_heads * shape.head_dim),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ];
    let mut layers: Vec<(usize, usize)> = (0..shape.num_layers).flat_map(|_| widths).collect();
    layers.push((shape.vocab, shape.hidden));
    let num_weights: usize = layers.iter().map(|(outputs, inputs)| outputs * inputs).sum();
    let weight = |&(outputs, inputs): &(usize, usize)| {
        Tensor::rand(-1f32, 1.0, (outputs, inputs), &Device::Cpu).and_then(|w| w.t()).expect("a matrix")
    };
    let candle_layers: Vec<Tensor> = layers.iter().map(weight).collect();
    let data = vec![1.0f32; num_weights];

    // All in turn, round by round, so that a busy moment hits everybody.
    let (mut ours, mut candles) = (vec![Vec::new(); ROWS.len()], vec![Vec::new(); ROWS.len()]);
    let (mut stream, mut draft) = (Vec::new(), Vec::new());
    let mut proposal = VerifyBatch::new();
    for _ in 0..ROUNDS {
        stream.push(seconds(|| assert!(read_all(&data, cpu.num_threads()) > 0.0)));
        for (times, batch) in ours.iter_mut().zip(&batches) {
            times.push(seconds(|| verify(&mut target, &mut table, batch, |_| ())));
        }
        draft.push(seconds(|| speculator.propose(&[RequestId(0)], &mut proposal).expect("a step")));
        assert_eq!(proposal.num_rows(), 16);
    }
    for _ in 0..ROUNDS.div_ceil(3) {
        for (times, rows) in candles.iter_mut().zip(ROWS) {
            let inputs: Vec<Tensor> = widths
                .iter()
                .map(|(_, inputs)| {
                    Tensor::ones((rows, *inputs), candle_core::DType::F32, &Device::Cpu).expect("a matrix")
                })
                .collect();
            times.push(seconds(|| {
                for weights in &candle_layers {
                    let x = inputs.iter().find(|x| x.dims()[1] == weights.dims()[0]).expect("of this width");
                    x.matmul(weights).expect("a product");
                }
            }));
        }
    }
    let (stream, draft) = (median(&mut stream), median(&mut draft));
    let ours: Vec<f64> = ours.iter_mut().map(|times| median(times)).collect();
    let candles: Vec<f64> = candles.iter_mut().map(|times| median(times)).collect();
    let bytes = 4.0 * num_weights as f64;
    println!(
        "\n{:.0} MB of f32 weights, {PREFIX} committed tokens, {} threads, medians",
        bytes / 1e6,
        cpu.num_threads()
    );
    println!("{:>5} {:>22} {:>28}", "rows", "whole forward, packed", "candle's matmul alone");
    for ((rows, ours_at), candle) in ROWS.iter().zip(&ours).zip(&candles) {
        let (x, y) = (ours_at / ours[0], candle / candles[0]);
        println!("{rows:>5} {:>12.2} ms {x:>5.2}x {:>18.2} ms {y:>5.2}x", ours_at * 1e3, candle * 1e3);
    }
    println!("reading the weights alone: {:.2} ms, {:.1} GB/s", stream * 1e3, bytes / stream / 1e9);
    println!("one row reaches {:.0} % of that bandwidth", 100.0 * stream / ours[0]);
    println!(
        "a draft of depth 5, width 8: {:.2} ms, {:.0} % of a forward of one row\n",
        draft * 1e3,
        100.0 * draft / ours[0]
    );

    let mut group = criterion.benchmark_group("verify_cost");
    group.sample_size(10);
    for (rows, batch) in ROWS.iter().zip(&batches) {
        group.bench_function(format!("{rows} rows"), |b| {
            b.iter(|| verify(&mut target, &mut table, batch, |_| ()))
        });
    }
    group.finish();
}

criterion_group!(benches, verify_cost);
criterion_main!(benches);
