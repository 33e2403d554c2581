//! The draft head on a GPU, over the emulated driver, against the CPU backend: the same candidates, the same
//! verdicts and the same keys and values, whatever is drafted beside each other.

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    BatchEntry, Coupling, DraftBudget, Eagle3Checkpoint, NodeId, RequestId, RequestOptions, Speculator,
    SpeculatorConfig, TargetShape, TokenId, Verdict, VerifyBatch,
};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/toy.rs"]
mod toy;

use backends::Device;
use toy::{HeadShape, Numbers};

/// Rows in a page of the GPU's draft KV cache.
const PAGE: usize = 16;

/// A head whose vocabulary has more than one segment of columns, and no multiple of eight.
fn large() -> HeadShape {
    HeadShape {
        target: TargetShape { hidden: 128, num_layers: 6, vocab: 2500 },
        intermediate: 192,
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 64,
        draft_tokens: (0..2500).filter(|id| id % 9 != 4).take(2211).collect(),
    }
}

fn small() -> HeadShape {
    HeadShape {
        target: TargetShape { hidden: 64, num_layers: 6, vocab: 64 },
        intermediate: 96,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        draft_tokens: (0..64).filter(|id| id % 5 != 3).collect(),
    }
}

/// Numbers that a text gives, whoever asks.
fn numbers(text: &[TokenId], salt: u64) -> Numbers {
    let mix = |hash: u64, token: &TokenId| Numbers::new(hash ^ u64::from(token.0 + 1)).next_u64();
    Numbers::new(text.iter().fold(salt, mix))
}

/// An engine with a made-up target that likes some drafts.
struct Engine<D: Device> {
    device: D,
    speculator: Speculator<D>,
    shape: HeadShape,
}

impl<D: Device> Engine<D> {
    fn new(shape: HeadShape, max_requests: usize, max_len: usize) -> Self {
        let device = D::open();
        let files = toy::random_head(&shape, 7);
        let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), shape.target);
        let table = Numbers::new(99).floats(shape.target.vocab * shape.target.hidden);
        let table = device.embedding(&table, shape.target.hidden);
        let config = SpeculatorConfig { max_requests, max_len };
        let speculator = Speculator::new(device.clone(), &head.unwrap(), Some(table), config).unwrap();
        Self { device, speculator, shape }
    }

    fn features(&self, text: &[TokenId], start: usize) -> Vec<f32> {
        let width = 3 * self.shape.target.hidden;
        (start..text.len()).flat_map(|i| numbers(&text[i.saturating_sub(3)..=i], 2).floats(width)).collect()
    }

    fn logits(&self, text: &[TokenId]) -> Vec<f32> {
        let mut logits = numbers(&text[text.len().saturating_sub(3)..], 1).floats(self.shape.target.vocab);
        logits.iter_mut().for_each(|logit| *logit *= 4.0);
        logits
    }

    fn admit(&mut self, id: u64, prompt: &[TokenId], options: RequestOptions) {
        let id = RequestId(id);
        self.speculator.admit(id, options).unwrap();
        self.prefill(id, prompt);
        let logits = self.device.floats(&self.logits(prompt));
        self.speculator.begin(id, D::view(&logits)).unwrap();
    }

    fn prefill(&mut self, id: RequestId, prompt: &[TokenId]) {
        let mut start = 0;
        for tokens in prompt.chunks(100) {
            let features = self.features(&prompt[..start + tokens.len()], start);
            let features = self.device.floats(&features);
            self.speculator.prefill(id, tokens, D::view(&features)).unwrap();
            start += tokens.len();
        }
    }

    /// Logits and features of a batch. Of every four nodes with children, three like one of them.
    fn forward(&self, batch: &VerifyBatch) -> (Vec<f32>, Vec<f32>) {
        let (mut all_logits, mut all_features) = (Vec::new(), Vec::new());
        for entry in batch.entries() {
            let committed = self.speculator.committed(entry.request()).unwrap();
            let tree = entry.tree();
            for node in tree.nodes() {
                let path = tree.ancestors(node).iter().skip(1).map(|i| tree.tokens()[i]);
                let text: Vec<TokenId> = committed.iter().copied().chain(path).collect();
                let mut logits = self.logits(&text);
                let children: Vec<NodeId> = tree.children(node).collect();
                let pick = numbers(&text, 3).next_u64() as usize;
                if !children.is_empty() && !pick.is_multiple_of(4) {
                    logits[tree.token(children[pick / 4 % children.len()]).0 as usize] += 30.0;
                }
                all_logits.extend(logits);
                all_features.extend(self.features(&text, text.len() - 1));
            }
        }
        (all_logits, all_features)
    }

    fn accept(&mut self, batch: &VerifyBatch) -> Vec<Verdict> {
        let (logits, features) = self.forward(batch);
        let (logits, features) = (self.device.floats(&logits), self.device.floats(&features));
        self.speculator.accept(batch, D::view(&logits), D::view(&features)).unwrap().to_vec()
    }
}

/// Bits of all KV memory are those of NaN: what is read unwritten shows.
fn poison(engine: &mut Engine<Cuda>) {
    for (address, bytes) in engine.speculator.draft_model().kv_memory() {
        // SAFETY: the emulator's device memory is this process's, and the machine is idle.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0xFF, bytes) };
    }
}

/// The same scenario on both.
struct Both {
    cpu: Engine<Cpu>,
    cuda: Engine<Cuda>,
    ids: Vec<RequestId>,
    cpu_batch: VerifyBatch,
    cuda_batch: VerifyBatch,
    num_drafts: usize,
    num_correct: usize,
}

impl Both {
    fn new(shape: fn() -> HeadShape, max_requests: usize, max_len: usize) -> Self {
        let mut cuda = Engine::new(shape(), max_requests, max_len);
        poison(&mut cuda);
        Self {
            cpu: Engine::new(shape(), max_requests, max_len),
            cuda,
            ids: Vec::new(),
            cpu_batch: VerifyBatch::new(),
            cuda_batch: VerifyBatch::new(),
            num_drafts: 0,
            num_correct: 0,
        }
    }

    fn admit(&mut self, prompt_len: usize, options: RequestOptions) {
        let id = self.ids.len() as u64;
        let mut numbers = Numbers::new(id);
        let vocab = self.cpu.shape.target.vocab as u64;
        let prompt: Vec<TokenId> =
            (0..prompt_len).map(|_| TokenId((numbers.next_u64() % vocab) as u32)).collect();
        self.cpu.admit(id, &prompt, options.clone());
        self.cuda.admit(id, &prompt, options);
        self.ids.push(RequestId(id));
    }

    /// Drafts and verifies for the requests that go on, and compares.
    fn step(&mut self) {
        self.cpu.speculator.propose(&self.ids, &mut self.cpu_batch).unwrap();
        self.cuda.speculator.propose(&self.ids, &mut self.cuda_batch).unwrap();
        self.compare();
    }

    fn compare(&mut self) {
        assert_same_drafts(&self.cpu_batch, &self.cuda_batch);
        let verdicts = self.cpu.accept(&self.cpu_batch);
        let on_device = self.cuda.accept(&self.cuda_batch);
        for (a, b) in verdicts.iter().zip(&on_device) {
            assert_eq!((&a.path, &a.emitted), (&b.path, &b.emitted));
            assert_eq!(a.finished.is_some(), b.finished.is_some());
            self.num_correct += a.path.len() - 1;
        }
        self.num_drafts += self.cpu_batch.num_rows() - self.cpu_batch.entries().len();
        self.ids.retain(|id| !verdicts.iter().any(|v| v.request == *id && v.finished.is_some()));
    }

    fn compare_kv(&self) {
        for id in &self.ids {
            let a = self.cpu.speculator.draft_kv(*id).unwrap();
            let b = self.cuda.speculator.draft_kv(*id).unwrap();
            assert_eq!(a.len(), b.len());
            for (a, b) in a.iter().zip(&b) {
                assert!((a - b).abs() <= 2e-4 * a.abs().max(1.0), "{a} and {b}");
            }
        }
    }
}

/// The same trees, with confidences that differ by a thousandth at most.
fn assert_same_drafts(cpu: &VerifyBatch, cuda: &VerifyBatch) {
    assert_eq!(cpu.entries().len(), cuda.entries().len());
    for (cpu, cuda) in cpu.entries().iter().zip(cuda.entries()) {
        assert_eq!(cpu.confidences().len(), cuda.confidences().len());
        for (a, b) in cpu.confidences().iter().zip(cuda.confidences()) {
            assert!((a - b).abs() <= 1e-3 * a.abs(), "{a} and {b}");
        }
        assert_eq!(cpu.tree(), cuda.tree());
    }
}

fn options(budget: (usize, usize, usize), sampling: SamplingParams) -> RequestOptions {
    let budget = DraftBudget::new(budget.0, budget.1, budget.2).unwrap();
    RequestOptions { max_new_tokens: 200, budget, sampling, ..RequestOptions::default() }
}

fn exclusive(config: emulator::Config) -> impl Drop {
    let machine = emulator::exclusive();
    emulator::configure(&config);
    machine
}

/// The head's blocks don't wait for each other: few at a time are faster.
fn fast() -> emulator::Config {
    emulator::Config { max_resident_blocks: 4, ..emulator::Config::fast() }
}

/// All batch sizes, widths and depths, with budgets mixed in a batch, and prompts that end around pages.
#[test]
fn every_batch_width_and_depth() {
    let _machine = exclusive(fast());
    let widths = [1, 2, 4, 8, 10];
    let prompt_lens = [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 70, 5];
    let (mut num_drafts, mut num_correct) = (0, 0);
    for (round, batch) in [0, 1, 2, 3, 5, 8, 16, 33].into_iter().enumerate() {
        let mut both = Both::new(small, batch.max(1), 400);
        for i in 0..batch {
            let (width, depth) = (widths[(i + round) % widths.len()], 1 + (i * 3 + round) % 8);
            let nodes = if i % 3 == 0 { 256 } else { 2 + 5 * width };
            both.admit(
                prompt_lens[i % prompt_lens.len()],
                options((width, depth, nodes), SamplingParams::default()),
            );
        }
        for _ in 0..if batch > 8 { 2 } else { 3 } {
            both.step();
        }
        both.compare_kv();
        num_drafts += both.num_drafts;
        num_correct += both.num_correct;
    }
    assert!(num_drafts > 3000 && num_correct > 100, "{num_drafts} drafts, {num_correct} correct");
}

/// Every width with every depth, alone.
#[test]
fn every_width_with_every_depth() {
    let _machine = exclusive(fast());
    let mut both = Both::new(small, 1, 400);
    both.admit(20, options((1, 1, 2), SamplingParams::default()));
    for width in [1, 2, 4, 8, 10] {
        for depth in 1..=8 {
            let budget = DraftBudget::new(width, depth, 256).unwrap();
            both.cpu.speculator.set_budget(RequestId(0), budget).unwrap();
            both.cuda.speculator.set_budget(RequestId(0), budget).unwrap();
            both.step();
        }
    }
    assert!(both.num_correct > 30, "{}", both.num_correct);
}

/// Prefixes of one and of several chunks of attention, with a vocabulary of several segments.
#[test]
fn long_prefixes() {
    let _machine = exclusive(fast());
    for prompt_len in [255, 256, 257, 700, 8192 + PAGE - 1] {
        let mut both = Both::new(large, 1, prompt_len + 100);
        both.admit(prompt_len, options((4, 3, 64), SamplingParams::default()));
        both.step();
        both.step();
        both.compare_kv();
    }
}

fn samplings() -> Vec<SamplingParams> {
    let base = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    let bias = vec![(TokenId(7), 3.0), (TokenId(8), -5.0), (TokenId(3), 2.0)];
    vec![
        SamplingParams::default(),
        base.clone(),
        SamplingParams { top_k: 12, ..base.clone() },
        SamplingParams { top_p: 0.6, min_p: 0.02, ..base.clone() },
        SamplingParams { repetition_penalty: 1.6, frequency_penalty: 0.4, ..base.clone() },
        SamplingParams { temperature: 0.0, presence_penalty: 1.0, logit_bias: bias.clone(), ..base.clone() },
        SamplingParams {
            temperature: 1.3,
            top_k: 30,
            top_p: 0.9,
            frequency_penalty: 0.5,
            logit_bias: bias,
            ..base
        },
    ]
}

/// Noise, filters, penalties and bias, mixed in a batch; and the coupling's two numbers.
#[test]
fn sampled_requests() {
    let _machine = exclusive(fast());
    for shape in [small, large] {
        let mut both = Both::new(shape, 8, 300);
        let couplings = [(1.0, 1.0), (0.5, 1.0), (0.0, 2.0), (1.0, 1.5)];
        for (i, sampling) in samplings().into_iter().enumerate() {
            let (noise_scale, confidence_temperature) = couplings[i % couplings.len()];
            let coupling = Coupling { noise_scale, confidence_temperature };
            let options = RequestOptions { coupling, ..options((4, 4, 40), sampling) };
            both.admit(10 + 3 * i, options);
        }
        for _ in 0..4 {
            both.step();
        }
        assert!(both.num_correct > 20, "{}", both.num_correct);
    }
}

/// A grammar of sorts: what may follow depends on the token before.
fn clear_some(last: TokenId, mask: &mut [u32]) -> bool {
    if last.0.is_multiple_of(3) {
        return false;
    }
    for (i, word) in mask.iter_mut().enumerate() {
        *word &= 0x5B6D_1357u32.rotate_left(last.0 + i as u32);
    }
    true
}

#[test]
fn masked_requests() {
    let _machine = exclusive(fast());
    let mut both = Both::new(small, 8, 300);
    for (i, sampling) in samplings().into_iter().enumerate() {
        both.admit(10 + 3 * i, options((3, 4, 30), sampling));
    }
    for _ in 0..3 {
        let (cpu, cuda) = (&mut both.cpu.speculator, &mut both.cuda.speculator);
        let roots: Vec<TokenId> =
            both.ids.iter().map(|id| *cpu.committed(*id).unwrap().last().unwrap()).collect();
        let masks = |id: RequestId, path: &[TokenId], mask: &mut [u32]| {
            clear_some(*path.last().unwrap_or(&roots[id.0 as usize]), mask)
        };
        cpu.propose_masked(&both.ids, &mut both.cpu_batch, masks).unwrap();
        cuda.propose_masked(&both.ids, &mut both.cuda_batch, masks).unwrap();
        assert_same_drafts(&both.cpu_batch, &both.cuda_batch);
        let masks =
            |entry: &BatchEntry, node: NodeId, mask: &mut [u32]| clear_some(entry.tree().token(node), mask);
        let (logits, features) = both.cpu.forward(&both.cpu_batch);
        let a = both.cpu.speculator.accept_masked(&both.cpu_batch, &logits, &features, masks).unwrap();
        let (logits, features) = (both.cuda.device.floats(&logits), both.cuda.device.floats(&features));
        let (logits, features) = (Cuda::view(&logits), Cuda::view(&features));
        let b = both.cuda.speculator.accept_masked(&both.cuda_batch, logits, features, masks).unwrap();
        for (a, b) in a.iter().zip(b) {
            assert_eq!((&a.path, &a.emitted), (&b.path, &b.emitted));
            let path =
                [&both.cpu_batch.entries()[a.request.0 as usize].tree().tokens()[..1], &a.emitted].concat();
            for pair in path.windows(2) {
                let mut mask = vec![u32::MAX; 2];
                clear_some(pair[0], &mut mask);
                assert!(mask[pair[1].0 as usize / 32] >> (pair[1].0 % 32) & 1 == 1, "{pair:?}");
            }
        }
    }
}

/// One request of a batch has features that are NaN: no drafts for it, the others as before. Its rows then are the
/// padding of a graph with fewer requests.
#[test]
fn broken_features_and_padding() {
    let _machine = exclusive(fast());
    let mut both = Both::new(small, 8, 300);
    both.cuda.speculator.draft_model().set_least_bucket(8);
    for i in 0..8 {
        both.admit(10 + i, options((4, 3, 30), SamplingParams::default()));
    }
    both.step();
    both.cpu.speculator.propose(&both.ids, &mut both.cpu_batch).unwrap();
    both.cuda.speculator.propose(&both.ids, &mut both.cuda_batch).unwrap();
    let (logits, mut features) = both.cpu.forward(&both.cpu_batch);
    let width = 3 * both.cpu.shape.target.hidden;
    let broken = &both.cpu_batch.entries()[7];
    features[broken.rows().start * width..broken.rows().end * width].fill(f32::NAN);
    both.cpu.speculator.accept(&both.cpu_batch, &logits, &features).unwrap();
    let (logits, features) = (both.cuda.device.floats(&logits), both.cuda.device.floats(&features));
    both.cuda.speculator.accept(&both.cuda_batch, Cuda::view(&logits), Cuda::view(&features)).unwrap();
    both.step();
    assert_eq!(both.cuda_batch.entries()[7].tree().num_drafts(), 0);
    assert!(both.cuda_batch.entries()[6].tree().num_drafts() > 0);
    // Under the graph of eight, from eight to one.
    while !both.ids.is_empty() {
        both.step();
        both.ids.pop();
    }
}

/// The first branch of a tree is the chain, token for token; a request's bits are the same alone and in a batch.
#[test]
fn chains_and_batches_of_one() {
    let _machine = exclusive(fast());
    let mut engine = Engine::<Cuda>::new(small(), 5, 300);
    let budgets = [(1, 5, 6), (4, 5, 256), (1, 5, 6), (8, 2, 30), (2, 7, 20)];
    let mut ids = Vec::new();
    for (i, budget) in budgets.into_iter().enumerate() {
        // The first two have one prompt.
        let prompt: Vec<TokenId> =
            (0..20 + i.max(1)).map(|j| TokenId((j * 7 + i.max(1)) as u32 % 64)).collect();
        engine.admit(i as u64, &prompt, options(budget, SamplingParams::default()));
        ids.push(RequestId(i as u64));
    }
    let (mut together, mut alone) = (VerifyBatch::new(), VerifyBatch::new());
    engine.speculator.propose(&ids, &mut together).unwrap();
    for (id, entry) in ids.iter().zip(together.entries()) {
        engine.speculator.propose(&[*id], &mut alone).unwrap();
        assert_eq!(alone.entries()[0].tree(), entry.tree());
        let bits = |entry: &BatchEntry| entry.confidences().iter().map(|c| c.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&alone.entries()[0]), bits(entry), "alone and in a batch");
    }
    let chain = &together.entries()[0].tree().tokens()[1..];
    let tree = together.entries()[1].tree();
    let (mut node, mut first_branch) = (NodeId::ROOT, Vec::new());
    while let Some(child) = tree.children(node).next() {
        first_branch.push(tree.token(child));
        node = child;
    }
    // A tree extends its best nodes only: its first branch may end early, but not differ.
    assert!(!first_branch.is_empty() && chain.starts_with(&first_branch), "{chain:?} and {first_branch:?}");
}

/// After each verify the draft KV has the bits that a fresh prefill of the committed text gives.
#[test]
fn the_kv_is_that_of_a_fresh_prefill() {
    let _machine = exclusive(fast());
    let num_tokens = if std::env::var_os("EAGLE_VERIFY_LONG_RUNS").is_some() { 200 } else { 60 };
    let mut engine = Engine::<Cuda>::new(small(), 3, 300);
    poison(&mut engine);
    let prompt: Vec<TokenId> = (0..13).map(|j| TokenId(j * 5 % 64)).collect();
    engine.admit(0, &prompt, options((4, 3, 16), SamplingParams::default()));
    // Beside it, one that drafts another tree.
    engine.admit(1, &prompt[..5], options((2, 5, 9), SamplingParams::default()));
    let (ids, mut batch) = ([RequestId(0), RequestId(1)], VerifyBatch::new());
    let mut num_steps = 0;
    loop {
        engine.speculator.propose(&ids, &mut batch).unwrap();
        engine.accept(&batch);
        num_steps += 1;
        let text = engine.speculator.committed(ids[0]).unwrap().to_vec();
        let kv = engine.speculator.draft_kv(ids[0]).unwrap();
        let id = RequestId(100 + num_steps);
        engine.speculator.admit(id, options((1, 1, 2), SamplingParams::default())).unwrap();
        engine.prefill(id, &text);
        let fresh = engine.speculator.draft_kv(id).unwrap();
        engine.speculator.cancel(id).unwrap();
        let bits = |kv: &[f32]| kv.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(!kv.is_empty() && kv.len() <= fresh.len());
        assert_eq!(bits(&kv), bits(&fresh[..kv.len()]), "after {num_steps} steps");
        if text.len() >= prompt.len() + num_tokens {
            break;
        }
    }
    let accepted = engine.speculator.stats().num_correct_drafts();
    assert!(accepted > 10, "{accepted}");
    engine.speculator.cancel(ids[0]).unwrap();
    engine.speculator.cancel(ids[1]).unwrap();
    assert_eq!(engine.speculator.num_draft_pages(), 0);
}
