//! The trained head on a GPU, over the emulated driver, against recorded vectors: pools, trees, paths and text of the
//! first verify rounds. `EAGLE_VERIFY_ALL_GOLDEN=1` replays all rounds of all prompts.
#![cfg(feature = "cuda")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cuda_emulator as emulator;
use eagle_verify::{
    BatchEntry, DraftBudget, Eagle3Checkpoint, RequestId, RequestOptions, Speculator, SpeculatorConfig,
    TargetShape, TokenId, VerifyBatch,
};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/golden.rs"]
mod golden;

use backends::{Device, emulated};
use golden::Golden;

const TARGET: TargetShape = TargetShape { hidden: 576, num_layers: 30, vocab: 49_152 };
const ID: RequestId = RequestId(0);

fn speculator<D: Device>(device: &D) -> Speculator<D> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(assets, TARGET).unwrap();
    let recorded = Golden::read("embedding_rows.safetensors");
    // A token that was not recorded would show as NaN.
    let mut table = vec![f32::NAN; TARGET.vocab * TARGET.hidden];
    for (id, row) in recorded.ints("ids").into_iter().zip(recorded.floats("rows").chunks(TARGET.hidden)) {
        table[id as usize * TARGET.hidden..][..TARGET.hidden].copy_from_slice(row);
    }
    let embedding = device.embedding(&table, TARGET.hidden);
    let config = SpeculatorConfig { max_requests: 1, max_len: 512 };
    Speculator::new(device.clone(), &head, Some(embedding), config).unwrap()
}

/// Logits whose rows have these tokens as their largest.
fn logits_of(argmax: &[TokenId]) -> Vec<f32> {
    let mut logits = vec![0.0; argmax.len() * TARGET.vocab];
    for (token, row) in argmax.iter().zip(logits.chunks_exact_mut(TARGET.vocab)) {
        row[token.0 as usize] = 1.0;
    }
    logits
}

/// The whole pool but for its worst: a tree has 256 nodes at most.
fn assert_pool(golden: &Golden, round: usize, entry: &BatchEntry) {
    let of = |what: &str| format!("{what}.{round}");
    let (tokens, parents) = (golden.tokens(&of("pool_tokens")), golden.ints(&of("pool_parents")));
    let scores = golden.floats(&of("pool_scores"));
    let mut best: Vec<usize> = (1..scores.len()).collect();
    best.sort_by(|&a, &b| scores[b].total_cmp(&scores[a])); // stable: ties in the pool's order
    best.truncate(255);
    best.push(0);
    best.sort_unstable();
    let tree = entry.tree();
    assert_eq!(tree.tokens(), best.iter().map(|&i| tokens[i]).collect::<Vec<_>>(), "round {round}");
    for ((node, confidence), &i) in tree.nodes().zip(entry.confidences()).zip(&best).skip(1) {
        assert_eq!(tree.parent(node).map(|parent| best[parent.index()] as i64), Some(parents[i]));
        let want = scores[i].exp();
        assert!((confidence - want).abs() <= 1e-3 * want, "candidate {i}: {confidence}, recorded {want}");
    }
    assert_eq!(tree.len(), 256);
}

fn assert_tree(golden: &Golden, round: usize, entry: &BatchEntry, positions: &[u32]) {
    let of = |what: &str| format!("{what}.{round}");
    let tree = entry.tree();
    assert_eq!(tree.tokens(), golden.tokens(&of("tree_tokens")), "round {round}");
    let parents = tree.nodes().map(|node| tree.parent(node).map_or(-1, |parent| parent.index() as i64));
    assert_eq!(parents.collect::<Vec<_>>(), golden.ints(&of("tree_parents")), "round {round}");
    let positions: Vec<i64> = positions.iter().map(|&position| i64::from(position)).collect();
    assert_eq!(positions, golden.ints(&of("tree_pos")), "round {round}");
}

/// Drafts and verifies as recorded, for so many rounds.
fn replay<D: Device>(device: &D, golden: &Golden, num_rounds: usize) {
    let mut speculator = speculator(device);
    let (prompt, output) = (golden.tokens("prompt_ids"), golden.tokens("output_ids"));
    let budget = |nodes: usize| DraftBudget::new(8, 5, nodes).unwrap();
    let options =
        RequestOptions { max_new_tokens: output.len() + 64, budget: budget(32), ..Default::default() };
    speculator.admit(ID, options).unwrap();
    let features = device.floats(&golden.floats("prompt_features"));
    speculator.prefill(ID, &prompt, D::view(&features)).unwrap();
    let root = golden.tokens("round_root.0");
    let logits = device.floats(&logits_of(&root));
    assert_eq!(speculator.begin(ID, D::view(&logits)).unwrap().token, root[0]);
    let mut batch = VerifyBatch::new();
    for round in 0..num_rounds {
        let of = |what: &str| format!("{what}.{round}");
        speculator.set_budget(ID, budget(256)).unwrap();
        speculator.propose(&[ID], &mut batch).unwrap();
        assert_pool(golden, round, &batch.entries()[0]);
        speculator.set_budget(ID, budget(32)).unwrap();
        speculator.propose(&[ID], &mut batch).unwrap();
        assert_tree(golden, round, &batch.entries()[0], batch.positions());

        let argmax = golden.tokens(&of("tree_argmax"));
        let logits = device.floats(&logits_of(&argmax));
        let features = device.floats(&golden.floats(&of("tree_features")));
        let verdict = &speculator.accept(&batch, D::view(&logits), D::view(&features)).unwrap()[0];
        let path: Vec<i64> = verdict.path.iter().map(|node| node.index() as i64).collect();
        assert_eq!(path, golden.ints(&of("accepted_path")), "round {round}");
        let emitted: Vec<TokenId> = verdict.path.iter().map(|node| argmax[node.index()]).collect();
        assert_eq!(verdict.emitted, emitted);
        assert_eq!(emitted.len() as i64, golden.ints("accepted_lengths")[round], "round {round}");
    }
    let text = &speculator.committed(ID).unwrap()[prompt.len()..];
    assert!(num_rounds >= 2 && text.len() > num_rounds, "it must not pass by comparing nothing");
    let num_common = text.len().min(output.len());
    assert_eq!(text[..num_common], output[..num_common]);
}

/// The head's blocks don't wait for each other: few at a time are faster.
fn configure(mutant: Option<&'static str>) {
    emulator::configure(&emulator::Config { max_resident_blocks: 2, mutant, ..emulator::Config::fast() });
}

#[test]
fn pools_trees_and_paths_are_the_recorded_ones() {
    let _machine = emulator::exclusive();
    configure(None);
    if std::env::var_os("EAGLE_VERIFY_ALL_GOLDEN").is_none() {
        return replay(&emulated(), &Golden::prompt(0), 2);
    }
    for golden in [0, 1, 2].map(Golden::prompt) {
        replay(&emulated(), &golden, golden.num_rounds());
    }
}

/// The control: a head that is wired wrongly doesn't draft what was recorded.
#[test]
fn a_fault_in_a_kernel_shows() {
    let _machine = emulator::exclusive();
    configure(Some("draft: keys are not turned"));
    let replayed = catch_unwind(AssertUnwindSafe(|| replay(&emulated(), &Golden::prompt(0), 2)));
    let panic = replayed.expect_err("all is as recorded");
    let seen = panic.downcast_ref::<String>().unwrap();
    assert!(seen.contains("round 0"), "{seen}");
}
