//! The draft head on a GPU, over the emulated driver, against the CPU backend: the same candidates, the same
//! verdicts and the same keys and values, whatever is drafted beside each other.
#![cfg(feature = "cuda")]

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{Cuda, DeviceSlice, Embedding};
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    BatchEntry, Coupling, DraftBudget, ErrorKind, NodeId, RequestId, RequestOptions, Result, Speculator,
    TokenId, VerifyBatch,
};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/draft.rs"]
mod draft;
#[path = "common/toy.rs"]
mod toy;

use backends::{Device, emulated};
use draft::{Both, Engine, HeadShape, PAGE, assert_same_drafts, large, options, samplings, small};

/// Bits of all KV memory are those of NaN: what is read unwritten shows.
fn poison(engine: &mut Engine<Cuda>) {
    fill_with_nan(engine.speculator.draft_model().kv_memory());
}

fn fill_with_nan(memory: impl IntoIterator<Item = (u64, usize)>) {
    emulator::synchronize().unwrap();
    for (address, bytes) in memory {
        // SAFETY: the emulator's device memory is this process's, and the machine is idle.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0xFF, bytes) };
    }
}

fn poisoned(shape: fn() -> HeadShape, max_requests: usize, max_len: usize) -> Both {
    let mut both = Both::new(&emulated(), shape, max_requests, max_len);
    poison(&mut both.cuda);
    both
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
        let mut both = poisoned(small, batch.max(1), 400);
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
    let mut both = poisoned(small, 1, 400);
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
        let mut both = poisoned(large, 1, prompt_len + 100);
        both.admit(prompt_len, options((4, 3, 64), SamplingParams::default()));
        both.step();
        both.step();
        both.compare_kv();
    }
}

/// Noise, filters, penalties and bias, mixed in a batch; and the coupling's two numbers.
#[test]
fn sampled_requests() {
    let _machine = exclusive(fast());
    for shape in [small, large] {
        let mut both = poisoned(shape, 8, 300);
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

/// A step of requests that follow that grammar.
fn masked_step(both: &mut Both) {
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

#[test]
fn masked_requests() {
    let _machine = exclusive(fast());
    let mut both = poisoned(small, 8, 300);
    for (i, sampling) in samplings().into_iter().enumerate() {
        both.admit(10 + 3 * i, options((3, 4, 30), sampling));
    }
    (0..3).for_each(|_| masked_step(&mut both));
}

/// Every kernel of a step, on a machine that checks each access and shows stores late.
#[test]
fn races_and_unwritten_memory() {
    for seed in 1..=3 {
        let _machine = exclusive(emulator::Config::checked(seed));
        let mut both = Both::new(&emulated(), small, 2, 64);
        let all = SamplingParams { seed, ..samplings().remove(6) };
        both.admit(PAGE + 1, options((3, 3, 12), all));
        both.admit(3, options((2, 3, 9), samplings().remove(4)));
        masked_step(&mut both);
        both.step();
        emulator::synchronize().unwrap();
        assert!(both.num_drafts > 10, "{}", both.num_drafts);
    }
}

/// Runs `call` with its `nth` driver call failing, and once more if that made it fail. Whether it made so many.
fn fail(nth: u64, mut call: impl FnMut() -> Result<()>) -> bool {
    emulator::fail(None, nth, 304); // which says nothing about later calls
    let outcome = call();
    let failed = emulator::failed_call();
    emulator::fail(None, 0, 0);
    if let Err(error) = outcome {
        assert!(failed.is_some() && error.kind() == ErrorKind::Fault, "{error}");
        call().unwrap_or_else(|error| panic!("after a failure of {failed:?}: {error}"));
    }
    failed.is_some()
}

/// When the device is lost, every call is an error, and the text is still there.
#[test]
fn a_lost_device_loses_no_text() {
    const ILLEGAL_ADDRESS: u32 = 700;
    let _machine = exclusive(fast());
    let mut both = poisoned(small, 1, 200);
    both.admit(20, options((3, 3, 9), SamplingParams::default()));
    both.step();
    emulator::fail_for_good(Some("cuGraphLaunch"), 1, ILLEGAL_ADDRESS);
    let error = both.cuda.speculator.propose(&both.ids, &mut both.cuda_batch).unwrap_err();
    assert!(error.to_string().contains("start a new process"), "{error}");
    both.cuda.speculator.propose(&both.ids, &mut both.cuda_batch).unwrap_err();
    for id in &both.ids {
        let text = both.cuda.speculator.committed(*id).unwrap();
        assert_eq!(text, both.cpu.speculator.committed(*id).unwrap());
    }
    both.cpu.speculator.propose(&both.ids, &mut both.cpu_batch).unwrap();
    emulator::fail(None, 0, 0);
}

/// What the mutants are tried on: a prefix of two chunks, noise, a filter with penalties; and a vocabulary of several
/// segments.
fn scenario() {
    let mut both = poisoned(small, 3, 400);
    both.admit(300, options((3, 3, 30), SamplingParams::default()));
    let base = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::default() };
    both.admit(15, options((3, 4, 40), base.clone()));
    // It says the same few tokens again and again.
    let logit_bias = [5, 6, 10].map(|token| (TokenId(token), 12.0)).to_vec();
    let filtered =
        SamplingParams { top_k: 12, repetition_penalty: 1.1, frequency_penalty: 1.5, logit_bias, ..base };
    both.admit(20, options((2, 5, 30), filtered));
    (0..5).for_each(|_| both.step());
    both.compare_kv();
    let mut both = poisoned(large, 1, 100);
    both.admit(33, options((3, 2, 20), SamplingParams::default()));
    both.step();
}

#[test]
fn mutants_are_caught() {
    let _machine = exclusive(fast());
    scenario();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {})); // they all panic
    let mutants: Vec<&str> =
        emulator::MUTANTS.iter().map(|m| m.name).filter(|n| n.starts_with("draft: ")).collect();
    let survivors = mutants.iter().filter(|name| {
        emulator::configure(&emulator::Config { mutant: Some(name), ..fast() });
        std::panic::catch_unwind(scenario).is_ok()
    });
    let survivors: Vec<&&str> = survivors.collect();
    std::panic::set_hook(hook);
    emulator::configure(&fast());
    assert!(mutants.len() >= 18 && survivors.is_empty(), "{survivors:?} of {}", mutants.len());
}
