//! Sampling at any temperature: the text is that of plain decoding with the same seed.

use super::*;
use crate::sampling::{Sampler, SamplingContext, SamplingParams};

fn sampling(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams { temperature: 1.0, seed: 99, ..SamplingParams::default() };
    change(&mut params);
    params
}

/// Plain decoding: one token after the other, each with its own call of the sampler.
fn decode(prompt: &[TokenId], count: usize, params: &SamplingParams, shift: u32) -> Vec<TokenId> {
    let sampler = Sampler::new(params.clone()).unwrap();
    let mut text = prompt.to_vec();
    for _ in 0..count {
        let (prompt, output) = text.split_at(prompt.len());
        let position = text.len() as u32 + shift;
        let context = SamplingContext { position, prompt, output, path: &[], allowed: None };
        let token = sampler.choose(&toy::logits(&text), context).unwrap().token();
        text.push(token);
    }
    text.split_off(prompt.len())
}

fn all_params() -> Vec<SamplingParams> {
    let mut all: Vec<SamplingParams> =
        [0.0, 0.3, 0.7, 1.0, 1.5].map(|temperature| sampling(|p| p.temperature = temperature)).into();
    all.extend([
        sampling(|p| p.top_k = 3),
        sampling(|p| p.top_p = 0.7),
        sampling(|p| p.min_p = 0.4),
        sampling(|p| (p.top_k, p.top_p, p.min_p) = (6, 0.9, 0.1)),
        sampling(|p| p.repetition_penalty = 1.5),
        sampling(|p| p.presence_penalty = 0.6),
        sampling(|p| p.frequency_penalty = 0.3),
        sampling(|p| (p.frequency_penalty, p.temperature) = (0.3, 0.0)),
        sampling(|p| p.logit_bias = vec![(TokenId(3), 1.5), (TokenId(4), f32::NEG_INFINITY)]),
    ]);
    all
}

fn with(params: &SamplingParams, budget: DraftBudget, max_new_tokens: usize) -> RequestOptions {
    RequestOptions { sampling: params.clone(), ..options(max_new_tokens, budget) }
}

#[test]
fn text_equals_plain_decoding_at_every_temperature_and_filter() {
    let mut s = speculator(1);
    for (i, params) in all_params().iter().enumerate() {
        let prompt = toy::prompt(3 + i, i as u64);
        let want = decode(&prompt, 50, params, 0);
        for budget in budgets() {
            admit(&mut s, 1, &prompt, 32, with(params, budget, 50));
            assert_eq!(run(&mut s, 1), want, "{params:?} {budget:?}");
        }
        // Controls: another position or another seed is another text.
        if params.temperature > 0.0 {
            assert_ne!(decode(&prompt, 50, params, 1), want, "{params:?}");
            assert_ne!(decode(&prompt, 50, &SamplingParams { seed: 98, ..params.clone() }, 0), want);
        }
    }
    assert!(s.stats().num_correct_drafts() > 300, "drafts were on the way: {:?}", s.stats());
}

/// Penalties count drafts on the path: without them a penalised text differs as soon as a path has a repetition.
#[test]
fn control_penalties_need_the_path() {
    let mut num_different = 0;
    for seed in 0..200 {
        let params = sampling(|p| (p.frequency_penalty, p.temperature) = (0.5, 0.0));
        let sampler = Sampler::new(params).unwrap();
        let prompt = toy::prompt(4, seed);
        let path = [toy::next_token(&prompt)];
        let text = [&prompt[..], &path].concat();
        let context =
            SamplingContext { position: 5, prompt: &prompt, output: &[], path: &path, allowed: None };
        let with_path = sampler.choose(&toy::logits(&text), context).unwrap().token();
        let without = sampler.choose(&toy::logits(&text), SamplingContext { path: &[], ..context }).unwrap();
        num_different += usize::from(with_path != without.token());
    }
    assert!(num_different > 0);
}

/// Requests of all kinds in one batch, in changing order and company, with changing budgets.
#[test]
fn a_changing_batch_changes_no_sampled_text() {
    let params = all_params();
    let mut s = speculator(params.len());
    let mut numbers = toy::Numbers::new(5);
    let mut live = Vec::new();
    for (id, params) in params.iter().enumerate() {
        let prompt = toy::prompt(2 + id, 40 + id as u64);
        admit(&mut s, id as u64, &prompt, 5, with(params, DraftBudget::NONE, 40));
        live.push((RequestId(id as u64), decode(&prompt, 40, params, 0)));
    }
    let (mut batch, mut num_compared) = (VerifyBatch::new(), 0);
    while !live.is_empty() {
        let mut ids: Vec<RequestId> = live.iter().map(|(id, _)| *id).collect();
        ids.retain(|_| !numbers.next_u64().is_multiple_of(3));
        let rotation = numbers.next_u64() as usize % ids.len().max(1);
        ids.rotate_left(rotation);
        for id in &ids {
            let budgets = budgets();
            s.set_budget(*id, budgets[numbers.next_u64() as usize % budgets.len()]).unwrap();
        }
        for verdict in step(&mut s, &ids, &mut batch) {
            if verdict.finished.is_some() {
                let at = live.iter().position(|(id, _)| *id == verdict.request).unwrap();
                let (id, want) = live.swap_remove(at);
                assert_eq!(s.finish(id).unwrap().tokens, want, "{:?}", params[id.0 as usize]);
                num_compared += 1;
            }
        }
    }
    assert_eq!(num_compared, params.len());
}

#[test]
fn bad_parameters_are_refused_at_admission() {
    let mut s = speculator(1);
    let bad = with(&sampling(|p| p.top_p = 0.0), DraftBudget::NONE, 1);
    assert_eq!(s.admit(RequestId(1), bad).unwrap_err().kind(), ErrorKind::Misuse);
    s.admit(RequestId(1), options(1, DraftBudget::NONE)).unwrap();
}
