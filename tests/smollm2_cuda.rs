//! The real model with its head on a GPU, over the emulated driver, against the head on the CPU: the same trees, the
//! same verdicts, the same text. The target runs on the CPU. `EAGLE_VERIFY_ALL_PROMPTS=1` decodes three whole prompts.
//! What is skipped without the model fails with `EAGLE_VERIFY_REQUIRE_MODEL=1`.
#![cfg(feature = "cuda")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    AcceptStats, DraftBudget, DraftTree, Eagle3Checkpoint, NodeId, RequestId, RequestOptions, Speculator,
    SpeculatorConfig, TokenId, VerifyBatch,
};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/model.rs"]
mod model;
#[allow(dead_code)] // the example uses the rest
#[path = "../examples/smollm2/mod.rs"]
mod smollm2;

use backends::{Device, emulated};
use smollm2::model::{Pass, Target};
use smollm2::prompts;
use smollm2::tokenizer::END_OF_TURN;

const MAX_LEN: usize = 512;
const ID: RequestId = RequestId(0);

fn speculator<D: Device>(device: &D, target: &Target) -> Speculator<D> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(assets, target.target_shape()).unwrap();
    let (hidden, vocab) = (target.shape.hidden, target.shape.vocab);
    let mut table = vec![0.0; vocab * hidden];
    for (token, row) in (0..).map(TokenId).zip(table.chunks_exact_mut(hidden)) {
        target.embedding().copy_row(token, row).unwrap();
    }
    let embedding = device.embedding(&table, hidden);
    let config = SpeculatorConfig { max_requests: 1, max_len: MAX_LEN };
    Speculator::new(device.clone(), &head, Some(embedding), config).unwrap()
}

/// What a step drafted, and what the target made of it.
struct Step {
    tree: DraftTree,
    confidences: Vec<f32>,
    path: Vec<NodeId>,
}

struct Run {
    steps: Vec<Step>,
    output: Vec<TokenId>,
    stats: AcceptStats,
}

/// Serves a prompt until it has finished, or for so many verify steps.
fn serve<D: Device>(
    device: &D,
    target: &mut Target,
    prompt: &[TokenId],
    options: &RequestOptions,
    max_steps: usize,
) -> Run {
    let mut speculator = speculator(device, target);
    speculator.admit(ID, options.clone()).unwrap();
    let mut table = target.new_table();
    let lease = table.lease(prompt.len()).unwrap();
    let answer = target.forward(&Pass::prompt(lease.table(), 0, prompt)).unwrap();
    let (logits, features) = (device.floats(answer.logits), device.floats(answer.features));
    lease.commit(prompt.len()).unwrap();
    speculator.prefill(ID, prompt, D::view(&features)).unwrap();
    let mut is_done = speculator.begin(ID, D::view(&logits)).unwrap().finished.is_some();
    let (mut steps, mut batch) = (Vec::new(), VerifyBatch::new());
    while !is_done && steps.len() < max_steps {
        speculator.propose(&[ID], &mut batch).unwrap();
        let entry = &batch.entries()[0];
        let lease = table.lease(entry.tree().len()).unwrap();
        let answer = target.forward(&Pass::verify(&batch, std::iter::once(lease.table()))).unwrap();
        let (logits, features) = (device.floats(answer.logits), device.floats(answer.features));
        let verdict = &speculator.accept(&batch, D::view(&logits), D::view(&features)).unwrap()[0];
        let plan = verdict.commit_plan();
        target.commit(lease.table(), plan).unwrap();
        lease.commit(plan.num_kept_rows()).unwrap();
        is_done = verdict.finished.is_some();
        steps.push(Step {
            tree: entry.tree().clone(),
            confidences: entry.confidences().to_vec(),
            path: verdict.path.clone(),
        });
    }
    let output = speculator.committed(ID).unwrap()[prompt.len()..].to_vec();
    Run { steps, output, stats: speculator.stats().clone() }
}

impl Step {
    /// The drafts from below the root down to each node, and its confidence.
    fn drafts(&self) -> BTreeMap<Vec<TokenId>, f32> {
        let tree = &self.tree;
        let path = |node| tree.ancestors(node).iter().skip(1).map(|i| tree.tokens()[i]).collect();
        tree.nodes().map(path).zip(self.confidences.iter().copied()).collect()
    }
}

/// The same drafts with the same confidences. What only one of the trees has must tie with the least that it has: then
/// the other may have taken another.
fn assert_same_drafts(cpu: &Step, cuda: &Step) {
    let is_close = |a: f32, b: f32| (a - b).abs() <= 1e-3 * b;
    let (cpu, cuda) = (cpu.drafts(), cuda.drafts());
    assert_eq!(cpu.len(), cuda.len());
    for (ours, others) in [(&cpu, &cuda), (&cuda, &cpu)] {
        let least = ours.values().copied().fold(1.0, f32::min);
        for (path, confidence) in ours {
            let wanted = others.get(path).copied().unwrap_or(least);
            assert!(is_close(*confidence, wanted), "{path:?}: {confidence}, not {wanted}");
        }
    }
}

/// Steps that were compared; a tie ends the comparison of steps, not that of the text.
fn compare(cpu: &Run, cuda: &Run) -> usize {
    assert_eq!(cpu.output, cuda.output);
    for (i, (cpu, cuda)) in cpu.steps.iter().zip(&cuda.steps).enumerate() {
        assert_same_drafts(cpu, cuda);
        if cpu.tree != cuda.tree {
            return i;
        }
        assert_eq!(cpu.path, cuda.path);
    }
    assert_eq!(cpu.steps.len(), cuda.steps.len());
    let counts = |stats: &AcceptStats| {
        let by_depth = (stats.rate_at_depth(), stats.acceptance_rate_at_depth());
        (
            stats.num_proposed_drafts(),
            stats.num_correct_drafts(),
            by_depth,
            stats.num_correct_by_rank().to_vec(),
        )
    };
    assert_eq!(counts(&cpu.stats), counts(&cuda.stats));
    assert_eq!(cpu.stats.num_verify_steps(), cpu.steps.len() as u64);
    cpu.steps.len()
}

/// The head's blocks don't wait for each other: few at a time are faster.
fn configure(mutant: Option<&'static str>) {
    emulator::configure(&emulator::Config { max_resident_blocks: 2, mutant, ..emulator::Config::fast() });
}

fn target(path: &Path) -> Target {
    let mut target = Target::load(path, &[Cpu::new().unwrap()], 1, MAX_LEN).unwrap().remove(0);
    target.capture(&[1, 14, 26]);
    target
}

fn options(sampling: SamplingParams) -> RequestOptions {
    let budget = DraftBudget::new(8, 4, 12).unwrap();
    let stop_tokens = vec![END_OF_TURN];
    RequestOptions { max_new_tokens: 64, budget, sampling, stop_tokens, ..Default::default() }
}

/// Code, arithmetic and a summary.
fn prompts(target: &Target) -> impl Iterator<Item = Vec<TokenId>> {
    let texts = prompts::BUILT_IN.iter().step_by(7).skip(1).take(3);
    texts.map(|(_, text)| target.tokenizer.chat(text).unwrap())
}

#[test]
fn trees_verdicts_and_text_are_those_of_the_cpu() {
    let Some((path, _turn)) = model::cached() else { return };
    let _machine = emulator::exclusive();
    configure(None);
    let (mut target, cuda) = (target(&path), emulated());
    let cpu = target.cpu.clone();
    let is_whole = std::env::var_os("EAGLE_VERIFY_ALL_PROMPTS").is_some();
    let (num_prompts, max_steps) = if is_whole { (3, usize::MAX) } else { (1, 2) };
    let prompts: Vec<_> = prompts(&target).take(num_prompts).collect();
    let greedy = SamplingParams::default();
    let sampled = SamplingParams { temperature: 0.7, top_p: 0.95, seed: 11, ..greedy.clone() };
    for (prompt, sampling) in prompts.iter().zip([greedy.clone(), sampled, greedy]) {
        let options = options(sampling);
        let on_cpu = serve(&cpu, &mut target, prompt, &options, max_steps);
        let on_gpu = serve(&cuda, &mut target, prompt, &options, max_steps);
        let num_compared = compare(&on_cpu, &on_gpu);
        assert!(num_compared >= 2 && on_cpu.stats.num_correct_drafts() > 0, "{num_compared} steps");
        eprintln!(
            "{num_compared} of {} steps are the same; {} tokens, by rank {:?}",
            on_cpu.steps.len(),
            on_cpu.output.len(),
            on_cpu.stats.num_correct_by_rank()
        );
    }
}

/// The control: a fault in the head shows in what is drafted, though never in the text.
#[test]
fn a_fault_in_a_kernel_shows() {
    let Some((path, _turn)) = model::cached() else { return };
    let _machine = emulator::exclusive();
    configure(Some("draft: candidates are draft tokens"));
    let mut target = target(&path);
    let (cpu, options) = (target.cpu.clone(), options(SamplingParams::default()));
    let prompt = prompts(&target).next().unwrap();
    let on_cpu = serve(&cpu, &mut target, &prompt, &options, 1);
    let on_gpu = serve(&emulated(), &mut target, &prompt, &options, 1);
    let compared = catch_unwind(AssertUnwindSafe(|| assert_same_drafts(&on_cpu.steps[0], &on_gpu.steps[0])));
    assert!(compared.is_err());
    assert!(on_cpu.output.starts_with(&on_gpu.output));
}
