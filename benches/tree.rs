//! Host work of a step: building trees, exporting masks, packing and walking, batch 1 to 64, 16 to 256 nodes.
//!
//! The budget is 100 us for a batch of 64 with 60 nodes each (build, pack and walk together).

use std::hint::black_box;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eagle_verify::{DraftTree, NodeId, OutputLimits, RequestId, TokenId, Verdict, VerifyBatch};

const NO_LIMIT: OutputLimits<'_> =
    OutputLimits { stop_tokens: &[TokenId(u32::MAX)], num_remaining: usize::MAX };

/// Parents and tokens of a tree as an EAGLE-3 drafter makes it: many children near the root, few further down.
fn drafts(nodes: usize, seed: usize) -> Vec<(usize, TokenId)> {
    (1..nodes)
        .map(|node| (node * node / (nodes + seed % 7) * 3 / 4, TokenId((node * 7919 + seed) as u32)))
        .collect()
}

/// The target agrees with the last child three times of four.
fn answer(tree: &DraftTree, node: NodeId) -> TokenId {
    match tree.children(node).last() {
        Some(child) if node.index() % 4 != 3 => tree.token(child),
        _ => TokenId(0),
    }
}

fn rebuild(trees: &mut [DraftTree], drafts: &[Vec<(usize, TokenId)>]) {
    for (tree, drafts) in trees.iter_mut().zip(drafts) {
        tree.reset(TokenId(1));
        for &(parent, token) in drafts {
            let parent = tree.node(parent).expect("parents come first");
            tree.push(parent, token).expect("tokens are distinct");
        }
    }
}

fn pack(batch: &mut VerifyBatch, trees: &[DraftTree]) {
    batch.clear();
    for (i, tree) in trees.iter().enumerate() {
        batch.push(RequestId(i as u64), 1000 + i, tree).expect("the batch is in range");
    }
}

fn walk(batch: &VerifyBatch, verdicts: &mut [Verdict]) {
    for (entry, verdict) in batch.entries().iter().zip(verdicts) {
        verdict.walk(entry, NO_LIMIT, |node| Ok(answer(entry.tree(), node)));
    }
}

fn host_work(criterion: &mut Criterion) {
    for nodes in [16, 60, 256] {
        for requests in [1, 8, 64] {
            let drafts: Vec<_> = (0..requests).map(|seed| drafts(nodes, seed)).collect();
            let mut trees: Vec<_> = drafts.iter().map(|_| DraftTree::new(TokenId(1))).collect();
            let (mut batch, mut verdicts) = (VerifyBatch::new(), vec![Verdict::new(); requests]);
            rebuild(&mut trees, &drafts);
            pack(&mut batch, &trees);
            walk(&batch, &mut verdicts);
            // The answers, before anything is timed.
            assert_eq!(batch.num_rows(), nodes * requests);
            for (tree, verdict) in trees.iter().zip(&verdicts) {
                let last = verdict.path[verdict.path.len() - 1];
                assert_eq!(tree.depth(last), verdict.num_correct_drafts());
                assert!(verdict.num_correct_drafts() > 0 && !verdict.emitted.contains(&TokenId(1)));
            }
            let id = |what: &str| BenchmarkId::new(what, format!("{requests}x{nodes}"));
            let mut group = criterion.benchmark_group("tree");
            group.bench_function(id("build"), |b| b.iter(|| rebuild(black_box(&mut trees), &drafts)));
            group.bench_function(id("pack"), |b| b.iter(|| pack(black_box(&mut batch), &trees)));
            group.bench_function(id("walk"), |b| b.iter(|| walk(black_box(&batch), &mut verdicts)));
            let (mut dense, mut additive, mut bits, mut words) = (vec![], vec![], vec![], vec![]);
            group.bench_function(id("masks"), |b| {
                b.iter(|| {
                    dense.clear();
                    additive.clear();
                    bits.clear();
                    words.clear();
                    for tree in black_box(&trees) {
                        tree.mask_dense(0, &mut dense);
                        tree.mask_additive(0, &mut additive);
                        tree.mask_bits(0, &mut bits);
                        tree.mask_words(&mut words);
                    }
                });
            });
            group.finish();
        }
    }

    let drafts: Vec<_> = (0..64).map(|seed| drafts(60, seed)).collect();
    let mut trees: Vec<_> = drafts.iter().map(|_| DraftTree::new(TokenId(1))).collect();
    let (mut batch, mut verdicts) = (VerifyBatch::new(), vec![Verdict::new(); 64]);
    let mut times: Vec<f64> = (0..501)
        .map(|_| {
            let started = Instant::now();
            rebuild(&mut trees, &drafts);
            pack(&mut batch, &trees);
            walk(&batch, &mut verdicts);
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2] * 1e6;
    println!(
        "host work for 64 requests of 60 nodes: {median:.1} us, {:.2} of the budget of 100 us",
        median / 100.0
    );
}

criterion_group!(benches, host_work);
criterion_main!(benches);
