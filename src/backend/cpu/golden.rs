//! The head against vectors recorded by an independent implementation (tests/golden/README.md).

use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::SafeTensors;

use super::head::CpuHead;
use super::{Cpu, Embedding};
use crate::backend::{Backend, DraftLimits, DraftState, Text};
use crate::draft::{CandidatePool, DraftBudget, Eagle3Checkpoint, TargetShape};
use crate::kv::PagePool;
use crate::tree::{DraftTree, NodeId, TokenId};

const TARGET: TargetShape = TargetShape { hidden: 576, num_layers: 30, vocab: 49_152 };
const WIDTH: usize = 8;

struct Golden(Vec<u8>);

impl Golden {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        Self(std::fs::read(path).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn ints(&self, name: &str) -> Vec<i64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn tokens(&self, name: &str) -> Vec<TokenId> {
        self.ints(name).into_iter().map(|id| TokenId(id as u32)).collect()
    }

    fn num_rounds(&self) -> usize {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.names().iter().filter(|name| name.starts_with("round_root")).count()
    }
}

fn load(cpu: &Cpu) -> CpuHead {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let checkpoint = Eagle3Checkpoint::load(assets, TARGET).unwrap();
    let rows = Golden::read("embedding_rows.safetensors");
    // A token that was not recorded would show as NaN.
    let mut table = vec![f32::NAN; TARGET.vocab * TARGET.hidden];
    for (id, row) in rows.ints("ids").into_iter().zip(rows.floats("rows").chunks(TARGET.hidden)) {
        table[id as usize * TARGET.hidden..][..TARGET.hidden].copy_from_slice(row);
    }
    let embedding = Embedding::f32(Arc::from(table), TARGET.hidden).unwrap();
    let limits = DraftLimits { max_requests: 1, max_len: 512, num_kv_pages: 64 };
    cpu.load_draft(&checkpoint, Some(embedding), limits, &(0..TARGET.vocab)).unwrap()
}

fn state() -> DraftState {
    let pool = PagePool::new(Cpu::KV_PAGE_SIZE, 64).unwrap();
    DraftState {
        table: pool.table(),
        next_tokens: Vec::new(),
        first_is_written: false,
        budget: DraftBudget::NONE,
        pool: CandidatePool::default(),
        text: Text::default(),
    }
}

fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    // Relative to the size of the row: single elements may cancel.
    let size = want.iter().fold(0.0f32, |size, x| size.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs() / want.abs().max(1e-2 * size);
        assert!(error <= 1e-3, "{what}[{i}]: {got}, recorded {want}");
    }
}

/// Feeds pairs and drafts; leaves the pool filled.
fn step(
    cpu: &Cpu,
    head: &mut CpuHead,
    states: &mut [DraftState],
    features: &[f32],
    next: &[TokenId],
    budget: DraftBudget,
) {
    let rows = features.len() / head.feature_width();
    cpu.keep_features(head, features, (0..rows).map(|row| (0, row))).unwrap();
    let state = &mut states[0];
    state.next_tokens.extend_from_slice(next);
    state.budget = budget;
    state.pool.restart(*state.next_tokens.last().unwrap());
    state.table.reserve(state.next_tokens.len() + budget.num_draft_rows()).unwrap();
    cpu.draft(head, states, &[0], None).unwrap();
}

#[test]
fn head_outputs_match_at_every_prompt_position() {
    let cpu = Cpu::with_threads(2).unwrap();
    let golden = Golden::read("golden_0.safetensors");
    let mut head = load(&cpu);
    let width = head.feature_width();
    let mut tokens = golden.tokens("prompt_ids");
    tokens.push(golden.tokens("round_root.0")[0]);
    let features = golden.floats("prompt_features");
    let outputs = golden.floats("prompt_head_out");
    let mut states = [state()];
    let budget = DraftBudget::chain(1).unwrap();
    for (i, (feature, want)) in features.chunks(width).zip(outputs.chunks(TARGET.hidden)).enumerate() {
        step(&cpu, &mut head, &mut states, feature, &tokens[i + 1..i + 2], budget);
        assert_close(&format!("head output {i}"), head.outputs(), want);
    }
}

#[test]
fn pools_and_trees_match_in_every_round() {
    let cpu = Cpu::with_threads(2).unwrap();
    let budget = DraftBudget::new(WIDTH, 5, 32).unwrap();
    for name in ["golden_0.safetensors", "golden_1.safetensors", "golden_2.safetensors"] {
        let golden = Golden::read(name);
        let mut head = load(&cpu);
        let width = head.feature_width();
        let mut states = [state()];
        let mut features = golden.floats("prompt_features");
        let mut next = golden.tokens("prompt_ids")[1..].to_vec();
        next.extend(golden.tokens("round_root.0"));
        let mut committed_len = next.len() + 1;
        for round in 0..golden.num_rounds() {
            step(&cpu, &mut head, &mut states, &features, &next, budget);
            let of = |what: &str| format!("{what}.{round}");
            let pool = &mut states[0].pool;
            let (tokens, parents, scores) = pool.parts();
            assert_eq!(tokens, golden.tokens(&of("pool_tokens")), "{name} {round}");
            let recorded_parents = golden.ints(&of("pool_parents"));
            assert_eq!(parents[1..], recorded_parents[1..], "{name} {round}");
            assert_close(&of("pool_scores"), &scores, &golden.floats(&of("pool_scores")));

            let (mut tree, mut confidences) = (DraftTree::new(TokenId(0)), Vec::new());
            pool.select(32, &mut tree, &mut confidences).unwrap();
            assert_eq!(tree.tokens(), golden.tokens(&of("tree_tokens")));
            let parents = tree.nodes().map(|n| tree.parent(n).map_or(-1, |p| p.index() as i64));
            assert_eq!(parents.collect::<Vec<_>>(), golden.ints(&of("tree_parents")));
            let positions = tree.nodes().map(|n| (committed_len - 1 + tree.depth(n)) as i64);
            assert_eq!(positions.collect::<Vec<_>>(), golden.ints(&of("tree_pos")));

            // Walk the recorded argmax of the target; its path must be the recorded one.
            let argmax = golden.tokens(&of("tree_argmax"));
            let (mut path, mut emitted, mut node) = (Vec::new(), Vec::new(), Some(NodeId::ROOT));
            while let Some(at) = node {
                path.push(at.index() as i64);
                emitted.push(argmax[at.index()]);
                node = tree.child_with(at, argmax[at.index()]).map(|(child, _)| child);
            }
            assert_eq!(path, golden.ints(&of("accepted_path")), "{name} {round}");
            assert_eq!(emitted.len() as i64, golden.ints("accepted_lengths")[round]);
            let rows = golden.floats(&of("tree_features"));
            features = path.iter().flat_map(|&n| rows[n as usize * width..][..width].to_vec()).collect();
            committed_len += emitted.len();
            next = emitted;
        }
        assert!(golden.num_rounds() >= 2, "{name} must not pass by comparing nothing");
    }
}
