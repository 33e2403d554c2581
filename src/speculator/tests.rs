//! The loop against a toy target: same text, same positions, same draft KV, whatever happens around it.

use std::sync::Arc;

use super::*;
use crate::ErrorKind;
use crate::backend::cpu::{Cpu, Embedding};
use crate::tree::NodeId;
use crate::verify::{BatchEntry, FinishReason, OutputLimits};

mod sampled;
#[path = "../../tests/common/toy.rs"]
mod toy;
use toy::{FEATURE_WIDTH, TARGET};

const MAX_LEN: usize = 400;

fn speculator(max_requests: usize) -> Speculator<Cpu> {
    let files = toy::head_files(7);
    let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
    let table = Embedding::f32(Arc::from(toy::embedding_table()), TARGET.hidden).unwrap();
    let config = SpeculatorConfig { max_requests, max_len: MAX_LEN };
    Speculator::new(Cpu::with_threads(2).unwrap(), &head, Some(table), config).unwrap()
}

fn options(max_new_tokens: usize, budget: DraftBudget) -> RequestOptions {
    RequestOptions { max_new_tokens, budget, ..RequestOptions::default() }
}

fn admit(
    s: &mut Speculator<Cpu>,
    id: u64,
    prompt: &[TokenId],
    chunk: usize,
    options: RequestOptions,
) -> FirstToken {
    let id = RequestId(id);
    s.admit(id, options).unwrap();
    let mut start = 0;
    for tokens in prompt.chunks(chunk) {
        let text = &prompt[..start + tokens.len()];
        s.prefill(id, tokens, &toy::features(text, start)).unwrap();
        start += tokens.len();
    }
    s.begin(id, &toy::logits(prompt)).unwrap()
}

/// One step for these requests.
fn step(s: &mut Speculator<Cpu>, ids: &[RequestId], batch: &mut VerifyBatch) -> Vec<Verdict> {
    s.propose(ids, batch).unwrap();
    for (entry, id) in batch.entries().iter().zip(ids) {
        let committed = s.committed(*id).unwrap();
        assert_eq!((entry.request(), entry.committed_len()), (*id, committed.len()));
        assert_eq!(entry.tree().token(NodeId::ROOT), committed[committed.len() - 1]);
        for (row, node) in entry.rows().zip(entry.tree().nodes()) {
            let position = committed.len() - 1 + entry.tree().depth(node);
            assert_eq!(batch.positions()[row] as usize, position);
            assert!(position < MAX_LEN, "a draft past the context");
        }
    }
    let (logits, features) = toy::forward(batch, |i| s.committed(ids[i]).unwrap());
    s.accept(batch, &logits, &features).unwrap().to_vec()
}

fn run(s: &mut Speculator<Cpu>, id: u64) -> Vec<TokenId> {
    let (id, mut batch) = (RequestId(id), VerifyBatch::new());
    while step(s, &[id], &mut batch)[0].finished.is_none() {}
    s.finish(id).unwrap().tokens
}

fn budgets() -> Vec<DraftBudget> {
    let tree = |width, depth, nodes| DraftBudget::new(width, depth, nodes).unwrap();
    vec![
        DraftBudget::NONE,
        DraftBudget::chain(1).unwrap(),
        DraftBudget::chain(5).unwrap(),
        tree(1, 3, 2),
        tree(4, 1, 5),
        tree(2, 3, 6),
        tree(4, 5, 32),
        tree(8, 8, 256),
    ]
}

#[test]
fn text_equals_plain_decoding_for_every_tree() {
    let mut s = speculator(1);
    for (seed, len) in [(1, 1), (2, 2), (3, 17), (4, 90)] {
        let prompt = toy::prompt(len, seed);
        let want = toy::decode(&prompt, 60, &[]);
        for budget in budgets() {
            admit(&mut s, 5, &prompt, 32, options(60, budget));
            assert_eq!(run(&mut s, 5), want, "{budget:?} after {len} tokens");
        }
    }
    // The test must not pass by never accepting a draft.
    let stats = s.stats();
    assert!(stats.num_correct_drafts() > 200, "{stats:?}");
    // Each run emits 60 tokens, the first of them before any verify step.
    assert_eq!(stats.num_emitted_tokens(), 59 * 4 * budgets().len() as u64);
    let calibrated: u64 = stats.calibration().iter().map(|(proposed, _)| proposed).sum();
    assert!(calibrated > 0 && calibrated <= stats.num_proposed_drafts());
    assert_eq!(stats.num_correct_by_rank().iter().sum::<u64>(), stats.num_correct_drafts());
}

/// Less room than all requests need: who has none decodes plainly, and leaves no row behind.
#[test]
fn a_request_without_room_is_decoded_plainly() {
    let files = toy::head_files(7);
    let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
    let make = |num_rows| {
        let table = Embedding::f32(Arc::from(toy::embedding_table()), TARGET.hidden).unwrap();
        let config = SpeculatorConfig { max_requests: 3, max_len: MAX_LEN };
        Speculator::with_kv_rows(Cpu::with_threads(1).unwrap(), &head, Some(table), config, num_rows)
    };
    assert_eq!(make(0).unwrap_err().kind(), ErrorKind::Misuse);
    let prompts = [toy::prompt(90, 1), toy::prompt(40, 2), toy::prompt(7, 3)];
    let mut num_correct = Vec::new();
    for num_rows in [1, 64, 128, 192, usize::MAX] {
        let mut s = make(num_rows).unwrap();
        for (id, prompt) in (0..).zip(&prompts) {
            admit(&mut s, id, prompt, 32, options(60, DraftBudget::new(4, 3, 16).unwrap()));
        }
        let (mut ids, mut batch) = (vec![RequestId(0), RequestId(1), RequestId(2)], VerifyBatch::new());
        while !ids.is_empty() {
            let verdicts = step(&mut s, &ids, &mut batch);
            ids.retain(|id| !verdicts.iter().any(|v| v.request == *id && v.finished.is_some()));
        }
        for (id, prompt) in (0..).zip(&prompts) {
            assert_eq!(s.finish(RequestId(id)).unwrap().tokens, toy::decode(prompt, 60, &[]));
        }
        assert_eq!(s.num_draft_pages(), 0);
        num_correct.push(s.stats().num_correct_drafts());
    }
    let all = num_correct[4];
    assert!(num_correct[..4].iter().all(|num| *num < all), "{num_correct:?}");
    assert!(num_correct[0] < num_correct[3], "{num_correct:?}");
}

/// Negative control: a walk that takes the first child instead of the target's changes the text.
#[test]
fn control_a_wrong_walk_changes_the_text() {
    let prompt = toy::prompt(9, 3);
    let mut s = speculator(1);
    admit(&mut s, 0, &prompt, 9, options(60, DraftBudget::new(4, 3, 16).unwrap()));
    let mut batch = VerifyBatch::new();
    s.propose(&[RequestId(0)], &mut batch).unwrap();
    let entry = &batch.entries()[0];
    let mut verdict = Verdict::new();
    let limits = OutputLimits { stop_tokens: &[], num_remaining: 60 };
    verdict.walk(entry, limits, |node| {
        let child = entry.tree().children(node).next();
        Ok(child.map_or(TokenId(0), |child| entry.tree().token(child)))
    });
    let text = [s.committed(RequestId(0)).unwrap(), &verdict.emitted].concat();
    assert_ne!(&text[9..], &toy::decode(&prompt, text.len() - 9, &[])[..]);
}

/// Requests join and leave, in changing order, with changing budgets; some are preempted and resumed.
#[test]
fn a_changing_batch_changes_no_text() {
    let mut s = speculator(6);
    let mut numbers = toy::Numbers::new(11);
    let budgets = budgets();
    let (mut batch, mut next, mut live) = (VerifyBatch::new(), 0u64, Vec::<(RequestId, Vec<TokenId>)>::new());
    let mut num_done = 0;
    while num_done < 40 {
        if live.len() < 6 && next < 44 && !numbers.next_u64().is_multiple_of(3) {
            let prompt = toy::prompt(1 + numbers.next_u64() as usize % 70, next);
            let budget = budgets[numbers.next_u64() as usize % budgets.len()];
            let chunk = 1 + numbers.next_u64() as usize % 40;
            let first = admit(&mut s, next, &prompt, chunk, options(40, budget));
            assert!(first.finished.is_none());
            live.push((RequestId(next), prompt));
            next += 1;
        }
        // Any subset in any order, also none.
        let mut ids: Vec<RequestId> = live.iter().map(|(id, _)| *id).collect();
        ids.retain(|_| !numbers.next_u64().is_multiple_of(4));
        if numbers.next_u64().is_multiple_of(2) {
            ids.reverse();
        }
        if let Some(id) = ids.first() {
            s.set_budget(*id, budgets[numbers.next_u64() as usize % budgets.len()]).unwrap();
        }
        if numbers.next_u64().is_multiple_of(5) {
            s.propose(&ids, &mut batch).unwrap(); // a proposal that is never accepted leaves no trace
            let first = batch.clone();
            s.propose(&ids, &mut batch).unwrap();
            for (a, b) in first.entries().iter().zip(batch.entries()) {
                assert_eq!((a.tree(), bits(a.confidences())), (b.tree(), bits(b.confidences())));
            }
        }
        let verdicts = step(&mut s, &ids, &mut batch);
        assert_eq!(verdicts.len(), ids.len());
        for verdict in verdicts {
            let (_, prompt) = live.iter().find(|(id, _)| *id == verdict.request).unwrap().clone();
            if verdict.finished.is_some() {
                let tokens = s.finish(verdict.request).unwrap().tokens;
                assert_eq!(tokens, toy::decode(&prompt, 40, &[]));
                live.retain(|(id, _)| *id != verdict.request);
                num_done += 1;
            } else if numbers.next_u64().is_multiple_of(30) {
                // Preempted: its text comes back as a prompt.
                let text = s.committed(verdict.request).unwrap().to_vec();
                s.cancel(verdict.request).unwrap();
                let left = 40 - (text.len() - prompt.len());
                let first = admit(&mut s, verdict.request.0, &text, 64, options(left, budgets[6]));
                let tokens = match first.finished {
                    Some(_) => s.finish(verdict.request).unwrap().tokens,
                    None => run(&mut s, verdict.request.0),
                };
                assert_eq!([&text[prompt.len()..], &tokens].concat(), toy::decode(&prompt, 40, &[]));
                live.retain(|(id, _)| *id != verdict.request);
                num_done += 1;
            }
        }
    }
    for (id, _) in live {
        s.cancel(id).unwrap();
    }
    let pages: Vec<usize> = s.states.iter().map(|state| state.table.pages().len()).collect();
    assert_eq!(pages, [0; 6], "a request that has left holds no page");
}

fn propose_alone(s: &mut Speculator<Cpu>, id: u64) -> VerifyBatch {
    let mut batch = VerifyBatch::new();
    s.propose(&[RequestId(id)], &mut batch).unwrap();
    batch
}

fn bits(confidences: &[f32]) -> Vec<u32> {
    confidences.iter().map(|c| c.to_bits()).collect()
}

#[test]
fn chunks_of_a_prompt_change_no_bit() {
    let prompt = toy::prompt(150, 8);
    let budget = DraftBudget::new(4, 5, 60).unwrap();
    let mut trees = Vec::new();
    for chunk in [150, 1, 7, 64, 75, 149] {
        let mut s = speculator(1);
        admit(&mut s, 0, &prompt, chunk, options(9, budget));
        let batch = propose_alone(&mut s, 0);
        let entry = &batch.entries()[0];
        trees.push((entry.tree().clone(), bits(entry.confidences()), draft_kv(&s, 0)));
    }
    assert!(trees.iter().all(|tree| *tree == trees[0]));
    assert_eq!(trees[0].0.len(), 60);
}

#[test]
fn a_batch_is_its_requests_alone() {
    let budgets = budgets();
    let mut s = speculator(budgets.len());
    let mut alone = speculator(budgets.len());
    let ids: Vec<RequestId> = (0..budgets.len() as u64).map(RequestId).collect();
    let mut batch = VerifyBatch::new();
    for (id, budget) in ids.iter().zip(&budgets) {
        let prompt = toy::prompt(3 + 31 * id.0 as usize, id.0);
        admit(&mut s, id.0, &prompt, 50, options(100, *budget));
        admit(&mut alone, id.0, &prompt, 50, options(100, *budget));
    }
    for _ in 0..8 {
        let verdicts = step(&mut s, &ids, &mut batch);
        for ((entry, verdict), id) in batch.entries().iter().zip(&verdicts).zip(&ids) {
            let mut single = VerifyBatch::new();
            let other = &step(&mut alone, &[*id], &mut single)[0];
            let single = &single.entries()[0];
            assert_eq!(
                (entry.tree(), bits(entry.confidences())),
                (single.tree(), bits(single.confidences()))
            );
            assert_eq!((&verdict.path, &verdict.emitted), (&other.path, &other.emitted));
        }
    }
}

/// All committed rows of a request's draft KV.
fn draft_kv(s: &Speculator<Cpu>, id: u64) -> Vec<u32> {
    let table = &s.states[s.slots[&RequestId(id)]].table;
    let mut rows = Vec::new();
    (0..table.len()).for_each(|row| s.draft.cache().read_row(table.slot(row), &mut rows).unwrap());
    rows.iter().map(|x: &f32| x.to_bits()).collect()
}

#[test]
fn draft_kv_equals_a_fresh_prefill_of_the_text() {
    let prompt = toy::prompt(45, 21);
    let budget = DraftBudget::new(4, 4, 20).unwrap();
    let mut s = speculator(2);
    admit(&mut s, 0, &prompt, 45, options(200, budget));
    let mut batch = VerifyBatch::new();
    // With long stretches without drafts, in which pairs wait, and a change of budget after each.
    let none = [DraftBudget::NONE].repeat(MAX_LAZY_PAIRS + 5);
    let chain = DraftBudget::chain(3).unwrap();
    let budgets = [vec![budget; 6], none.clone(), vec![chain; 3], none, vec![budget; 4]].concat();
    for now in budgets {
        s.set_budget(RequestId(0), now).unwrap();
        step(&mut s, &[RequestId(0)], &mut batch);
        if now == DraftBudget::NONE {
            continue;
        }
        s.set_budget(RequestId(0), budget).unwrap();
        let text = s.committed(RequestId(0)).unwrap().to_vec();
        // The same text as a prompt; its last token is the first token that it emits.
        let (last, before) = text.split_last().unwrap();
        let first = admit(&mut s, 1, before, 64, options(200, budget));
        assert_eq!(first.token, *last);
        let (ours, fresh) = (propose_alone(&mut s, 0), propose_alone(&mut s, 1));
        let (ours, fresh) = (&ours.entries()[0], &fresh.entries()[0]);
        assert_eq!(draft_kv(&s, 0), draft_kv(&s, 1), "after {} tokens", text.len());
        assert_eq!((ours.tree(), bits(ours.confidences())), (fresh.tree(), bits(fresh.confidences())));
        s.cancel(RequestId(1)).unwrap();
    }
    assert!(s.stats().num_correct_drafts() > 0);
}

#[test]
fn a_stop_token_is_the_last_also_inside_a_path() {
    let prompt = toy::prompt(20, 5);
    let plain = toy::decode(&prompt, 40, &[]);
    for budget in budgets() {
        for stop in (0..TARGET.vocab as u32).map(TokenId) {
            let want = toy::decode(&prompt, 40, &[stop]);
            let mut s = speculator(1);
            let options = RequestOptions { stop_tokens: vec![stop], ..options(40, budget) };
            let first = admit(&mut s, 0, &prompt, 20, options);
            let got = match first.finished {
                Some(_) => s.finish(RequestId(0)).unwrap().tokens,
                None => run(&mut s, 0),
            };
            assert_eq!(got, want);
            assert!(plain.starts_with(&want));
        }
    }
}

#[test]
fn output_ends_at_the_context_and_at_the_limit() {
    for budget in budgets() {
        let prompt = toy::prompt(MAX_LEN - 7, 5);
        let mut s = speculator(1);
        admit(&mut s, 0, &prompt, 64, options(1000, budget));
        assert_eq!(run(&mut s, 0), toy::decode(&prompt, 7, &[]));
        let first = admit(&mut s, 0, &prompt[..9], 64, options(1, budget));
        assert!(matches!(first.finished, Some(FinishReason::Length)));
        assert_eq!(s.finish(RequestId(0)).unwrap().tokens.len(), 1);
    }
}

#[test]
fn a_broken_row_is_that_requests_fault_alone() {
    let budget = DraftBudget::new(4, 3, 10).unwrap();
    let mut s = speculator(3);
    let ids = [RequestId(0), RequestId(1), RequestId(2)];
    for id in ids {
        admit(&mut s, id.0, &toy::prompt(10, id.0), 10, options(50, budget));
    }
    let mut batch = VerifyBatch::new();
    s.propose(&ids, &mut batch).unwrap();
    let (mut logits, features) = toy::forward(&batch, |i| s.committed(ids[i]).unwrap());
    let row = batch.entries()[1].rows().start;
    logits[row * TARGET.vocab + 3] = f32::NAN;
    let before = s.committed(ids[1]).unwrap().to_vec();
    let verdicts = s.accept(&batch, &logits, &features).unwrap().to_vec();
    assert!(matches!(&verdicts[1].finished, Some(FinishReason::Fault(e)) if e.kind() == ErrorKind::Fault));
    assert!(verdicts[1].emitted.is_empty());
    assert_eq!(s.committed(ids[1]).unwrap(), before, "what was committed is kept");
    for i in [0, 2] {
        assert!(verdicts[i].finished.is_none());
        assert_eq!(run(&mut s, i as u64), toy::decode(&toy::prompt(10, i as u64), 50, &[]));
    }
    assert!(s.propose(&[ids[1]], &mut batch).is_err(), "it has finished");
}

/// NaN features make no drafts, and no wrong text.
#[test]
fn broken_features_cost_drafts_only() {
    let prompt = toy::prompt(10, 1);
    let mut s = speculator(1);
    let id = RequestId(0);
    s.admit(id, options(20, DraftBudget::new(4, 3, 10).unwrap())).unwrap();
    s.prefill(id, &prompt, &vec![f32::NAN; 10 * FEATURE_WIDTH]).unwrap();
    s.begin(id, &toy::logits(&prompt)).unwrap();
    let batch = propose_alone(&mut s, 0);
    assert_eq!(batch.num_rows(), 1);
    assert_eq!(run(&mut s, 0), toy::decode(&prompt, 20, &[]));
}

#[test]
fn misuse_is_named_and_changes_nothing() {
    let budget = DraftBudget::new(4, 3, 10).unwrap();
    let mut s = speculator(2);
    let (id, other) = (RequestId(0), RequestId(1));
    let prompt = toy::prompt(10, 0);
    let features = toy::features(&prompt, 0);
    let mut batch = VerifyBatch::new();
    fn check<T>(subject: &str, result: Result<T>) {
        let error = result.err().unwrap_or_else(|| panic!("{subject}: no error"));
        assert_eq!((error.subject(), error.kind()), (subject, ErrorKind::Misuse), "{error}");
    }
    check("request", s.prefill(id, &prompt, &features));
    check("request", s.propose(&[id], &mut batch));
    check("request", s.finish(id));
    check("request", s.cancel(id));
    check("request", s.set_budget(id, budget));
    check("request", s.committed(id).map(drop));
    check("max_new_tokens", s.admit(id, options(0, budget)));

    s.admit(id, options(50, budget)).unwrap();
    check("request", s.admit(id, options(50, budget)));
    check("prompt", s.begin(id, &toy::logits(&prompt)));
    check("prompt chunk", s.prefill(id, &[], &[]));
    check("prompt features", s.prefill(id, &prompt, &features[1..]));
    check("prompt features", s.prefill(id, &prompt[1..], &features));
    check("prompt token", s.prefill(id, &[TokenId(12)], &features[..FEATURE_WIDTH]));
    check("prompt length", s.prefill(id, &toy::prompt(MAX_LEN, 0), &vec![0.0; MAX_LEN * FEATURE_WIDTH]));
    s.prefill(id, &prompt, &features).unwrap();
    check("prompt length", s.prefill(id, &toy::prompt(MAX_LEN - 10, 0), &[]));
    check("request", s.propose(&[id], &mut batch));
    check("logits", s.begin(id, &[0.0; 11]));
    let fault = s.begin(id, &[f32::NAN; 12]).unwrap_err();
    assert_eq!(fault.kind(), ErrorKind::Fault);
    s.begin(id, &toy::logits(&prompt)).unwrap();
    check("begin", s.begin(id, &toy::logits(&prompt)));
    check("prompt chunk", s.prefill(id, &prompt, &features));
    check("requests", s.propose(&[id, id], &mut batch));
    check("request", s.propose(&[id, other], &mut batch));

    admit(&mut s, 1, &prompt, 10, options(50, budget));
    let full = s.admit(RequestId(2), options(50, budget)).unwrap_err();
    assert_eq!((full.kind(), full.subject()), (ErrorKind::Fault, "requests"));

    // Batches: another's logits, an old one, one accepted twice, one packed by hand.
    s.propose(&[id, other], &mut batch).unwrap();
    let (logits, rows) = toy::forward(&batch, |i| s.committed(RequestId(i as u64)).unwrap());
    check("logits of the batch", s.accept(&batch, &logits[12..], &rows));
    check("features of the batch", s.accept(&batch, &logits, &rows[FEATURE_WIDTH..]));
    let mut by_hand = VerifyBatch::new();
    by_hand.push(id, 11, &DraftTree::new(TokenId(0))).unwrap();
    check("batch", s.accept(&by_hand, &logits[..12], &rows[..FEATURE_WIDTH]));
    let mut newer = VerifyBatch::new();
    s.propose(&[other], &mut newer).unwrap();
    check("batch", s.accept(&batch, &logits, &rows));
    // A proposal to which something was added, and one of another speculator with the same ids and step.
    s.propose(&[id, other], &mut batch).unwrap();
    let mut longer = batch.clone();
    longer.push(id, 11, &DraftTree::new(TokenId(0))).unwrap();
    let more = [&logits[..], &logits[..12]].concat();
    check("batch", s.accept(&longer, &more, &[&rows[..], &rows[..FEATURE_WIDTH]].concat()));
    let mut twin = speculator(2);
    for id in [0, 1] {
        admit(&mut twin, id, &toy::prompt(10, 3), 10, options(50, budget));
    }
    let mut foreign = VerifyBatch::new();
    while twin.step < s.step {
        twin.propose(&[id, other], &mut foreign).unwrap();
    }
    let (twin_logits, twin_rows) = toy::forward(&foreign, |i| twin.committed(RequestId(i as u64)).unwrap());
    check("batch", s.accept(&foreign, &twin_logits, &twin_rows));
    s.propose(&[id, other], &mut batch).unwrap();
    check("batch", s.accept(&newer, &logits[logits.len() / 2..], &rows[rows.len() / 2..]));
    let committed = s.committed(id).unwrap().to_vec();
    s.accept(&batch, &logits, &rows).unwrap();
    assert_ne!(s.committed(id).unwrap(), committed);
    check("batch", s.accept(&batch, &logits, &rows));
    // None of this left a trace.
    assert_eq!(run(&mut s, 0), toy::decode(&prompt, 50, &[]));
    assert_eq!(run(&mut s, 1), toy::decode(&prompt, 50, &[]));
}

#[test]
fn a_request_cancelled_on_the_way_gets_an_empty_verdict() {
    let budget = DraftBudget::new(4, 3, 10).unwrap();
    let mut s = speculator(2);
    let ids = [RequestId(0), RequestId(1)];
    let prompt = toy::prompt(10, 0);
    ids.iter().for_each(|id| drop(admit(&mut s, id.0, &prompt, 10, options(50, budget))));
    let mut batch = VerifyBatch::new();
    s.propose(&ids, &mut batch).unwrap();
    let (logits, features) = toy::forward(&batch, |i| s.committed(ids[i]).unwrap());
    s.cancel(ids[0]).unwrap();
    // Its id may even be in use again.
    admit(&mut s, 0, &prompt, 10, options(50, budget));
    let verdicts = s.accept(&batch, &logits, &features).unwrap();
    assert!(matches!(verdicts[0].finished, Some(FinishReason::Cancelled)) && verdicts[0].emitted.is_empty());
    assert!(verdicts[1].finished.is_none() && !verdicts[1].emitted.is_empty());
    for id in ids {
        assert_eq!(run(&mut s, id.0), toy::decode(&prompt, 50, &[]));
    }
}

#[test]
fn construction_refuses_what_cannot_work() {
    let files = toy::head_files(7);
    let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
    let cpu = Cpu::with_threads(1).unwrap();
    let new = |table: Option<Embedding>, max_requests, max_len| {
        Speculator::new(cpu.clone(), &head, table, SpeculatorConfig { max_requests, max_len }).map(drop)
    };
    let table = |rows: usize| Some(Embedding::f32(vec![0.0; rows * 64].into(), 64).unwrap());
    for (subject, result) in [
        ("embedding table", new(None, 1, 100)),
        ("embedding table", new(table(11), 1, 100)),
        ("max_requests", new(table(12), 0, 100)),
        ("max_len", new(table(12), 1, 1)),
    ] {
        assert_eq!(result.unwrap_err().subject(), subject);
    }
    assert!(new(table(12), 1, 100).is_ok());
    assert!(Cpu::with_threads(0).is_err());
    assert!(DraftBudget::new(4, 3, 0).is_err() && DraftBudget::new(4, 3, 257).is_err());
    assert!(DraftBudget::new(0, 3, 9).is_err() && DraftBudget::new(65, 3, 9).is_err());
    assert!(DraftBudget::new(64, 6, 9).is_err() && DraftBudget::chain(256).is_err());
    assert!(DraftBudget::new(64, usize::MAX, 9).is_err());
    assert!(DraftBudget::new(64, 5, 256).is_ok() && DraftBudget::chain(255).is_ok());
}
