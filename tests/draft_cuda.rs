//! The draft head on a GPU, over the emulated driver, against the CPU backend: the same candidates, the same
//! verdicts, whatever is drafted beside each other.

use std::collections::BTreeMap;

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, RequestId, RequestOptions, Speculator, SpeculatorConfig, TokenId, Verdict,
    VerifyBatch,
};

#[path = "common/device.rs"]
mod device;
#[path = "common/toy.rs"]
mod toy;

use device::Device;
use toy::TARGET;

const MAX_LEN: usize = 600;

/// A speculator with an engine around it.
struct Engine<D: Device> {
    device: D,
    speculator: Speculator<D>,
}

impl<D: Device> Engine<D> {
    fn new(max_requests: usize) -> Self {
        let device = D::open();
        let files = toy::head_files(7);
        let head =
            Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
        let table = device.embedding(&toy::embedding_table(), TARGET.hidden);
        let config = SpeculatorConfig { max_requests, max_len: MAX_LEN };
        let speculator = Speculator::new(device.clone(), &head, Some(table), config).unwrap();
        Self { device, speculator }
    }

    fn admit(&mut self, id: u64, prompt: &[TokenId], chunk: usize, options: RequestOptions) -> TokenId {
        let id = RequestId(id);
        self.speculator.admit(id, options).unwrap();
        let mut start = 0;
        for tokens in prompt.chunks(chunk) {
            let features = toy::features(&prompt[..start + tokens.len()], start);
            let features = self.device.floats(&features);
            self.speculator.prefill(id, tokens, D::view(&features)).unwrap();
            start += tokens.len();
        }
        let logits = self.device.floats(&toy::logits(prompt));
        self.speculator.begin(id, D::view(&logits)).unwrap().token
    }

    fn step(&mut self, ids: &[RequestId], batch: &mut VerifyBatch) -> Vec<Verdict> {
        self.speculator.propose(ids, batch).unwrap();
        let (logits, features) = toy::forward(batch, |i| self.speculator.committed(ids[i]).unwrap());
        let (logits, features) = (self.device.floats(&logits), self.device.floats(&features));
        self.speculator.accept(batch, D::view(&logits), D::view(&features)).unwrap().to_vec()
    }
}

/// Both drafted the same, but for the order of candidates that tie within `1e-3`.
fn assert_same_drafts(cpu: &VerifyBatch, cuda: &VerifyBatch) {
    assert_eq!(cpu.num_rows(), cuda.num_rows());
    for (cpu, cuda) in cpu.entries().iter().zip(cuda.entries()) {
        assert_eq!(cpu.tree(), cuda.tree());
        for (a, b) in cpu.confidences().iter().zip(cuda.confidences()) {
            assert!((a - b).abs() <= 1e-3 * a.abs(), "{a} and {b}");
        }
    }
}

fn options(max_new_tokens: usize, budget: DraftBudget, sampling: SamplingParams) -> RequestOptions {
    RequestOptions { max_new_tokens, budget, sampling, ..RequestOptions::default() }
}

#[test]
fn a_few_steps() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let mut cpu = Engine::<Cpu>::new(3);
    let mut cuda = Engine::<Cuda>::new(3);
    let budgets = [(1, 3, 4), (4, 3, 256), (2, 5, 20)];
    let mut ids = Vec::new();
    for (i, (width, depth, nodes)) in budgets.into_iter().enumerate() {
        let prompt = toy::prompt(5 + 30 * i, i as u64);
        let budget = DraftBudget::new(width, depth, nodes).unwrap();
        let options = options(30, budget, SamplingParams::default());
        let first = cpu.admit(i as u64, &prompt, 20, options.clone());
        assert_eq!(cuda.admit(i as u64, &prompt, 20, options), first);
        ids.push(RequestId(i as u64));
    }
    let (mut a, mut b) = (VerifyBatch::new(), VerifyBatch::new());
    for _ in 0..6 {
        let verdicts = cpu.step(&ids, &mut a);
        let on_device = cuda.step(&ids, &mut b);
        assert_same_drafts(&a, &b);
        for (a, b) in verdicts.iter().zip(&on_device) {
            assert_eq!((&a.path, &a.emitted), (&b.path, &b.emitted));
        }
    }
    let _: BTreeMap<u64, u64> = BTreeMap::new();
}
