//! Scenarios for the draft head on a GPU against the CPU backend.
#![allow(dead_code)] // each test crate uses its part

use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, NodeId, RequestId, RequestOptions, Speculator, SpeculatorConfig,
    TargetShape, TokenId, Verdict, VerifyBatch,
};

use crate::backends::Device;
pub use crate::toy::HeadShape;
use crate::toy::{self, Numbers};

/// Rows in a page of the GPU's draft KV cache.
pub const PAGE: usize = 16;

/// A head whose vocabulary has more than one segment of columns, and no multiple of eight.
pub fn large() -> HeadShape {
    HeadShape {
        target: TargetShape { hidden: 128, num_layers: 6, vocab: 2500 },
        intermediate: 192,
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 64,
        draft_tokens: (0..2500).filter(|id| id % 9 != 4).take(2211).collect(),
    }
}

pub fn small() -> HeadShape {
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
pub fn numbers(text: &[TokenId], salt: u64) -> Numbers {
    let mix = |hash: u64, token: &TokenId| Numbers::new(hash ^ u64::from(token.0 + 1)).next_u64();
    Numbers::new(text.iter().fold(salt, mix))
}

/// An engine with a made-up target that likes some drafts.
pub struct Engine<D: Device> {
    pub device: D,
    pub speculator: Speculator<D>,
    pub shape: HeadShape,
}

impl<D: Device> Engine<D> {
    pub fn new(device: D, shape: HeadShape, max_requests: usize, max_len: usize) -> Self {
        let files = toy::random_head(&shape, 7);
        let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), shape.target);
        let table = Numbers::new(99).floats(shape.target.vocab * shape.target.hidden);
        let table = device.embedding(&table, shape.target.hidden);
        let config = SpeculatorConfig { max_requests, max_len };
        let speculator = Speculator::new(device.clone(), &head.unwrap(), Some(table), config).unwrap();
        Self { device, speculator, shape }
    }

    pub fn features(&self, text: &[TokenId], start: usize) -> Vec<f32> {
        let width = 3 * self.shape.target.hidden;
        (start..text.len()).flat_map(|i| numbers(&text[i.saturating_sub(3)..=i], 2).floats(width)).collect()
    }

    pub fn logits(&self, text: &[TokenId]) -> Vec<f32> {
        let mut logits = numbers(&text[text.len().saturating_sub(3)..], 1).floats(self.shape.target.vocab);
        logits.iter_mut().for_each(|logit| *logit *= 4.0);
        logits
    }

    pub fn admit(&mut self, id: u64, prompt: &[TokenId], options: RequestOptions) {
        let id = RequestId(id);
        self.speculator.admit(id, options).unwrap();
        self.prefill(id, prompt);
        let logits = self.device.floats(&self.logits(prompt));
        self.speculator.begin(id, D::view(&logits)).unwrap();
    }

    pub fn prefill(&mut self, id: RequestId, prompt: &[TokenId]) {
        let mut start = 0;
        for tokens in prompt.chunks(100) {
            let features = self.features(&prompt[..start + tokens.len()], start);
            let features = self.device.floats(&features);
            self.speculator.prefill(id, tokens, D::view(&features)).unwrap();
            start += tokens.len();
        }
    }

    /// Logits and features of a batch. Of every four nodes with children, three like one of them.
    pub fn forward(&self, batch: &VerifyBatch) -> (Vec<f32>, Vec<f32>) {
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

    pub fn accept(&mut self, batch: &VerifyBatch) -> Vec<Verdict> {
        let (logits, features) = self.forward(batch);
        let (logits, features) = (self.device.floats(&logits), self.device.floats(&features));
        self.speculator.accept(batch, D::view(&logits), D::view(&features)).unwrap().to_vec()
    }
}

/// The same scenario on both.
pub struct Both {
    pub cpu: Engine<Cpu>,
    pub cuda: Engine<Cuda>,
    pub ids: Vec<RequestId>,
    pub cpu_batch: VerifyBatch,
    pub cuda_batch: VerifyBatch,
    pub num_drafts: usize,
    pub num_correct: usize,
}

impl Both {
    pub fn new(cuda: &Cuda, shape: fn() -> HeadShape, max_requests: usize, max_len: usize) -> Self {
        let cpu = Cpu::with_threads(1).unwrap();
        Self {
            cpu: Engine::new(cpu, shape(), max_requests, max_len),
            cuda: Engine::new(cuda.clone(), shape(), max_requests, max_len),
            ids: Vec::new(),
            cpu_batch: VerifyBatch::new(),
            cuda_batch: VerifyBatch::new(),
            num_drafts: 0,
            num_correct: 0,
        }
    }

    pub fn admit(&mut self, prompt_len: usize, options: RequestOptions) {
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
    pub fn step(&mut self) {
        self.cpu.speculator.propose(&self.ids, &mut self.cpu_batch).unwrap();
        self.cuda.speculator.propose(&self.ids, &mut self.cuda_batch).unwrap();
        self.compare();
    }

    pub fn compare(&mut self) {
        let (logits, features) = self.cuda.forward(&self.cuda_batch);
        let (logits, features) = (self.cuda.device.floats(&logits), self.cuda.device.floats(&features));
        self.compare_with(&logits, &features);
    }

    /// Accepts on both; the GPU gets these.
    pub fn compare_with(&mut self, logits: &<Cuda as Device>::Floats, features: &<Cuda as Device>::Floats) {
        assert_same_drafts(&self.cpu_batch, &self.cuda_batch);
        let verdicts = self.cpu.accept(&self.cpu_batch);
        let (logits, features) = (Cuda::view(logits), Cuda::view(features));
        let on_device = self.cuda.speculator.accept(&self.cuda_batch, logits, features).unwrap();
        for (a, b) in verdicts.iter().zip(on_device) {
            assert_eq!((&a.path, &a.emitted), (&b.path, &b.emitted));
            assert_eq!(a.finished.is_some(), b.finished.is_some());
            self.num_correct += a.path.len() - 1;
        }
        self.num_drafts += self.cpu_batch.num_rows() - self.cpu_batch.entries().len();
        self.ids.retain(|id| !verdicts.iter().any(|v| v.request == *id && v.finished.is_some()));
    }

    pub fn compare_kv(&self) {
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
pub fn assert_same_drafts(cpu: &VerifyBatch, cuda: &VerifyBatch) {
    assert_eq!(cpu.entries().len(), cuda.entries().len());
    for (cpu, cuda) in cpu.entries().iter().zip(cuda.entries()) {
        assert_eq!(cpu.confidences().len(), cuda.confidences().len());
        for (a, b) in cpu.confidences().iter().zip(cuda.confidences()) {
            assert!((a - b).abs() <= 1e-3 * a.abs(), "{a} and {b}");
        }
        assert_eq!(cpu.tree(), cuda.tree());
    }
}

pub fn options(budget: (usize, usize, usize), sampling: SamplingParams) -> RequestOptions {
    let budget = DraftBudget::new(budget.0, budget.1, budget.2).unwrap();
    RequestOptions { max_new_tokens: 200, budget, sampling, ..RequestOptions::default() }
}

/// One of each kind.
pub fn samplings() -> Vec<SamplingParams> {
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
