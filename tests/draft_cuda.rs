//! The draft head on a GPU, over the emulated driver, against the CPU backend: the same candidates, the same
//! verdicts and the same keys and values, whatever is drafted beside each other.
#![cfg(feature = "cuda")]

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{Cuda, DeviceSlice, Embedding};
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    BatchEntry, Coupling, DraftBudget, ErrorKind, NodeId, RequestId, RequestOptions, Result, TokenId,
    VerifyBatch,
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

/// Whichever driver call of a step fails, once: done again, the step is what it would have been.
#[test]
fn a_failing_call_changes_nothing() {
    let _machine = exclusive(fast());
    let mut both = poisoned(small, 3, 600);
    let log_probs = Some(2);
    both.admit(40, RequestOptions { log_probs, ..options((4, 4, 40), SamplingParams::default()) });
    both.admit(7, RequestOptions { max_new_tokens: 400, ..options((3, 3, 20), samplings().remove(6)) });
    let mut num_long_paths = 0;
    for nth in 1.. {
        both.cpu.speculator.propose(&both.ids, &mut both.cpu_batch).unwrap();
        let (speculator, batch) = (&mut both.cuda.speculator, &mut both.cuda_batch);
        let mut has_failed = fail(nth, || speculator.propose(&both.ids, batch));
        assert_same_drafts(&both.cpu_batch, &both.cuda_batch);
        let verdicts = both.cpu.accept(&both.cpu_batch);
        let (logits, features) = both.cuda.forward(&both.cuda_batch);
        let (logits, features) = (both.cuda.device.floats(&logits), both.cuda.device.floats(&features));
        let (speculator, batch) = (&mut both.cuda.speculator, &both.cuda_batch);
        let mut seen = Vec::new();
        has_failed |= fail(nth, || {
            seen = speculator.accept(batch, Cuda::view(&logits), Cuda::view(&features))?.to_vec();
            Ok(())
        });
        for (a, b) in verdicts.iter().zip(&seen) {
            assert_eq!((&a.path, &a.emitted), (&b.path, &b.emitted));
            assert!(a.finished.is_none() && b.finished.is_none(), "call {nth}: {:?}", b.finished);
            num_long_paths += usize::from(a.path.len() > 2);
        }
        both.compare_kv();
        if !has_failed {
            assert!(nth > 20 && num_long_paths > 5, "{nth} calls, {num_long_paths} long paths");
            break;
        }
    }
    // And of a prompt's chunks.
    let (id, prompt) = (RequestId(9), [5u32, 9, 2, 33, 7, 9, 9, 1].map(TokenId));
    for nth in 1.. {
        both.cpu.speculator.admit(id, options((2, 2, 5), SamplingParams::default())).unwrap();
        both.cuda.speculator.admit(id, options((2, 2, 5), SamplingParams::default())).unwrap();
        both.cpu.prefill(id, &prompt);
        let mut has_failed = false;
        for (start, end) in [(0, 1), (1, 5), (5, 8)] {
            let features = both.cuda.device.floats(&both.cuda.features(&prompt[..end], start));
            let speculator = &mut both.cuda.speculator;
            has_failed |= fail(nth, || speculator.prefill(id, &prompt[start..end], Cuda::view(&features)));
        }
        assert_eq!(both.cuda.speculator.committed(id).unwrap(), prompt);
        both.ids.push(id);
        both.compare_kv();
        both.ids.pop();
        both.cpu.speculator.cancel(id).unwrap();
        both.cuda.speculator.cancel(id).unwrap();
        if !has_failed {
            assert!(nth > 5);
            break;
        }
    }
}

/// Where memory cannot grow for a larger step, the graphs of smaller ones don't use what has moved.
#[test]
fn graphs_after_a_lack_of_memory() {
    for (nth, is_there) in [(2, true), (6, true), (99, false)] {
        let _machine = exclusive(emulator::Config { races: true, ..fast() });
        let mut engine = Engine::new(emulated(), small(), 4, 100);
        let prompt: Vec<TokenId> = (0..9).map(|j| TokenId(j * 5 % 64)).collect();
        engine.admit(0, &prompt, options((2, 2, 5), SamplingParams::default()));
        engine.admit(1, &prompt[..5], options((6, 2, 40), samplings().remove(6)));
        let (ids, mut batch) = ([RequestId(0), RequestId(1)], VerifyBatch::new());
        engine.speculator.propose(&ids[..1], &mut batch).unwrap();
        let tree = batch.entries()[0].tree().clone();
        emulator::fail(Some("cuMemAlloc_v2"), nth, 2);
        let outcome = engine.speculator.propose(&ids, &mut batch);
        let failed = emulator::failed_call();
        emulator::fail(None, 0, 0);
        assert_eq!((outcome.is_err(), failed.is_some()), (is_there, is_there));
        engine.speculator.propose(&ids[..1], &mut batch).unwrap();
        assert_eq!(batch.entries()[0].tree(), &tree, "allocation {nth}");
        emulator::synchronize().unwrap();
    }
}

/// However budgets change, so many graphs are kept; and one that is made anew is the same.
#[test]
fn graphs_are_few() {
    let _machine = exclusive(fast());
    let mut engine = Engine::new(emulated(), small(), 1, 100);
    let (ids, mut batch) = ([RequestId(0)], VerifyBatch::new());
    engine.admit(0, &[TokenId(3), TokenId(4)], options((1, 1, 2), SamplingParams::default()));
    let mut trees = Vec::new();
    for round in 0..2 {
        for i in 0..70 {
            let (width, depth) = (1 + i % 14, 1 + i / 14);
            engine.speculator.set_budget(ids[0], DraftBudget::new(width, depth, 9).unwrap()).unwrap();
            engine.speculator.propose(&ids, &mut batch).unwrap();
            trees.push(batch.entries()[0].tree().clone());
            assert_eq!(trees[i], trees[i + 70 * round]);
        }
    }
    let num_graphs = emulator::report().driver.num_graphs; // and their executables
    assert!((100..=2 * 64).contains(&num_graphs), "{num_graphs}");
}

/// What an engine may get wrong with addresses of its own.
#[test]
fn addresses_are_checked() {
    let _machine = exclusive(fast());
    let cuda = emulated();
    let table = cuda.upload(&vec![0.0f32; 64 * 64 + 2]).unwrap();
    // SAFETY: it is not used.
    let shared = unsafe { Embedding::shared(table.slice().get(2..64 * 64 + 2).unwrap(), 64) };
    let error = shared.unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("multiple of 16"), "{error}");

    let mut engine = Engine::new(cuda.clone(), small(), 1, 100);
    engine.admit(0, &[TokenId(3)], options((2, 2, 5), SamplingParams::default()));
    let mut batch = VerifyBatch::new();
    engine.speculator.propose(&[RequestId(0)], &mut batch).unwrap();
    let (logits, features) = engine.forward(&batch);
    let (logits, features) = (cuda.floats(&logits), cuda.floats(&features));
    for offset in [2, features.address().wrapping_neg()] {
        let address = features.address().wrapping_add(offset);
        // SAFETY: refused before it is used.
        let wrong = unsafe { DeviceSlice::<f32>::from_raw(&cuda, address, features.len()) };
        let error = engine.speculator.accept(&batch, Cuda::view(&logits), wrong.into()).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("multiple of 4"), "{error}");
    }
    engine.speculator.accept(&batch, Cuda::view(&logits), Cuda::view(&features)).unwrap();
}

/// A grammar knows nothing of a request that is gone.
#[test]
fn no_masks_for_who_is_gone() {
    let _machine = exclusive(fast());
    let mut engine = Engine::new(emulated(), small(), 2, 100);
    for id in 0..2 {
        engine.admit(id, &[TokenId(3), TokenId(4)], options((2, 2, 5), SamplingParams::default()));
    }
    let mut batch = VerifyBatch::new();
    engine.speculator.propose(&[RequestId(0), RequestId(1)], &mut batch).unwrap();
    let (logits, features) = engine.forward(&batch);
    let (logits, features) = (engine.device.floats(&logits), engine.device.floats(&features));
    engine.speculator.cancel(RequestId(0)).unwrap();
    let mut num_asked = 0;
    let masks = |entry: &BatchEntry, _: NodeId, _: &mut [u32]| {
        assert_eq!(entry.request(), RequestId(1));
        num_asked += 1;
        false
    };
    let (logits, features) = (Cuda::view(&logits), Cuda::view(&features));
    let verdicts = engine.speculator.accept_masked(&batch, logits, features, masks).unwrap();
    assert!(verdicts[0].emitted.is_empty() && !verdicts[1].emitted.is_empty());
    assert!(num_asked > 0);
}

/// One request of a batch has features that are NaN: no drafts for it, the others as before. Its rows then are the
/// padding of a graph with fewer requests.
#[test]
fn broken_features_and_padding() {
    let _machine = exclusive(fast());
    let mut both = poisoned(small, 8, 300);
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

/// No step reads what an earlier one has left beside keys and values, also in graphs with rows that are not there.
#[test]
fn scratch_memory_is_written_first() {
    let _machine = exclusive(fast());
    let mut both = poisoned(large, 4, 300);
    both.cuda.speculator.draft_model().set_least_bucket(4);
    for (i, sampling) in [0, 4, 6].map(|i| samplings().remove(i)).into_iter().enumerate() {
        both.admit(200 + 40 * i, options((2 + i, 2 + i, 20), sampling));
    }
    for _ in 0..3 {
        fill_with_nan(both.cuda.speculator.draft_model().scratch_memory());
        both.step();
    }
    assert!(both.num_correct > 3, "{}", both.num_correct);
    // The control.
    poison(&mut both.cuda);
    both.cuda.speculator.propose(&both.ids, &mut both.cuda_batch).unwrap();
    assert!(both.cuda_batch.entries().iter().all(|entry| entry.tree().num_drafts() == 0));
}

/// The first branch of a tree is the chain, token for token; a request's bits are the same alone and in a batch.
#[test]
fn chains_and_batches_of_one() {
    let _machine = exclusive(fast());
    let mut engine = Engine::new(emulated(), small(), 5, 300);
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
    let mut engine = Engine::new(emulated(), small(), 3, 300);
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
