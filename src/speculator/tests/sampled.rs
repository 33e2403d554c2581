//! Sampling at any temperature: the text is that of plain decoding with the same seed.

use super::*;
use crate::sampling::{Sampler, SamplingContext, SamplingParams, TokenLogProb, gumbel};

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
    let bad = RequestOptions { log_probs: Some(129), ..options(1, DraftBudget::NONE) };
    assert_eq!(s.admit(RequestId(1), bad).unwrap_err().kind(), ErrorKind::Misuse);
    s.admit(RequestId(1), options(1, DraftBudget::NONE)).unwrap();
}

/// 1 to 33 requests together, some of them preempted now and then: they come back with their output as prompt.
#[test]
fn preempted_requests_resume_with_the_same_text() {
    let (params, mut num_preempted_in_all) = (all_params(), 0);
    for num_requests in 1..=33 {
        let mut s = speculator(num_requests);
        let mut numbers = toy::Numbers::new(num_requests as u64);
        struct Live {
            id: RequestId,
            params: SamplingParams,
            prompt: Vec<TokenId>,
            output: Vec<TokenId>,
            want: Vec<TokenId>,
        }
        let mut live = Vec::new();
        for i in 0..num_requests as u64 {
            let (params, prompt) =
                (params[i as usize % params.len()].clone(), toy::prompt(2 + i as usize, i));
            let first = admit(&mut s, i, &prompt, 9, with(&params, DraftBudget::chain(3).unwrap(), 30));
            let want = decode(&prompt, 30, &params, 0);
            live.push(Live { id: RequestId(i), params, prompt, output: vec![first.token], want });
        }
        let (mut batch, mut num_preempted) = (VerifyBatch::new(), 0);
        while !live.is_empty() {
            let ids: Vec<RequestId> = live.iter().map(|request| request.id).collect();
            let verdicts = step(&mut s, &ids, &mut batch);
            for (request, verdict) in live.iter_mut().zip(verdicts) {
                request.output.extend_from_slice(&verdict.emitted);
            }
            live.retain(|request| {
                let is_done = request.output.len() == request.want.len();
                if is_done {
                    assert_eq!(request.output, request.want, "{:?}", request.params);
                    s.finish(request.id).unwrap();
                }
                !is_done
            });
            let at = numbers.next_u64() as usize % (3 * num_requests);
            let Some(request) = live.get_mut(at).filter(|request| request.output.len() < 29) else {
                continue;
            };
            s.cancel(request.id).unwrap();
            num_preempted += 1;
            let text = [&request.prompt[..], &request.output].concat();
            let budgets = budgets();
            let budget = budgets[numbers.next_u64() as usize % budgets.len()];
            let options = RequestOptions {
                num_prior_outputs: request.output.len(),
                ..with(&request.params, budget, 30 - request.output.len())
            };
            let first = admit(&mut s, request.id.0, &text, 5, options);
            request.output.push(first.token);
        }
        num_preempted_in_all += num_preempted;
    }
    assert!(num_preempted_in_all > 100, "{num_preempted_in_all}");
    // The control: a request whose prior outputs are taken for prompt has other penalties.
    let params = sampling(|p| (p.presence_penalty, p.temperature) = (0.8, 0.0));
    let num_different = (0..20).filter(|seed| {
        let prompt = toy::prompt(3, *seed);
        let text = [&prompt[..], &decode(&prompt, 15, &params, 0)].concat();
        decode(&text, 10, &params, 0) != decode(&prompt, 25, &params, 0)[15..]
    });
    assert!(num_different.count() > 10);
    let mut s = speculator(1);
    s.admit(RequestId(0), RequestOptions { num_prior_outputs: 3, ..options(9, DraftBudget::NONE) }).unwrap();
    let prompt = toy::prompt(2, 0);
    s.prefill(RequestId(0), &prompt, &toy::features(&prompt, 0)).unwrap();
    let error = s.begin(RequestId(0), &toy::logits(&prompt)).unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::Misuse, "prior outputs"));
}

/// A grammar: a token may follow only if its sum with the one before is not a multiple of 3.
fn allow(last: TokenId, mask: &mut [u32]) {
    (0..12).filter(|token| (token + last.0).is_multiple_of(3)).for_each(|token| mask[0] &= !(1 << token));
}

/// Plain decoding under the grammar.
fn decode_allowed(prompt: &[TokenId], count: usize, params: &SamplingParams) -> Vec<TokenId> {
    let (sampler, mut text) = (Sampler::new(params.clone()).unwrap(), prompt.to_vec());
    for _ in 0..count {
        let (prompt, output) = text.split_at(prompt.len());
        let mut mask = [u32::MAX];
        allow(text[text.len() - 1], &mut mask);
        let context =
            SamplingContext { position: text.len() as u32, prompt, output, path: &[], allowed: Some(&mask) };
        text.push(sampler.choose(&toy::logits(&text), context).unwrap().token());
    }
    text.split_off(prompt.len())
}

#[test]
fn a_grammar_restricts_drafts_and_text() {
    for params in [sampling(|p| p.temperature = 0.0), sampling(|_| {}), sampling(|p| p.top_p = 0.8)] {
        let (mut num_wrong_drafts, mut acceptance) = (0, Vec::new());
        for masked_drafts in [true, false] {
            let mut s = speculator(2);
            for seed in 0..6 {
                let (id, prompt) = (RequestId(seed), toy::prompt(4 + seed as usize, seed));
                let want = decode_allowed(&prompt, 40, &params);
                s.admit(id, with(&params, DraftBudget::new(4, 4, 12).unwrap(), 40)).unwrap();
                s.prefill(id, &prompt, &toy::features(&prompt, 0)).unwrap();
                let mut mask = [u32::MAX];
                allow(prompt[prompt.len() - 1], &mut mask);
                s.begin_masked(id, &toy::logits(&prompt), &mask).unwrap();
                let mut batch = VerifyBatch::new();
                loop {
                    let root = *s.committed(id).unwrap().last().unwrap();
                    if masked_drafts {
                        s.propose_masked(&[id], &mut batch, |request, path, mask| {
                            assert_eq!(request, id);
                            allow(*path.last().unwrap_or(&root), mask);
                            true
                        })
                        .unwrap();
                    } else {
                        s.propose(&[id], &mut batch).unwrap();
                    }
                    let tree = batch.entries()[0].tree();
                    for node in tree.nodes().skip(1) {
                        let before = tree.token(tree.parent(node).unwrap());
                        num_wrong_drafts +=
                            usize::from((before.0 + tree.token(node).0).is_multiple_of(3) && masked_drafts);
                    }
                    let (logits, features) = toy::forward(&batch, |_| s.committed(id).unwrap());
                    let verdicts = s
                        .accept_masked(&batch, &logits, &features, |entry, node, mask| {
                            allow(entry.tree().token(node), mask);
                            true
                        })
                        .unwrap();
                    if verdicts[0].finished.is_some() {
                        break;
                    }
                }
                assert_eq!(s.finish(id).unwrap().tokens, want);
                assert_ne!(decode(&prompt, 40, &params, 0), want, "the control");
            }
            acceptance.push(s.stats().num_correct_drafts());
        }
        assert_eq!(num_wrong_drafts, 0);
        assert!(acceptance[0] > acceptance[1], "{acceptance:?}: drafts that a grammar refuses are wasted");
    }
}

/// A node where nothing is allowed ends its request alone.
#[test]
fn a_mask_without_tokens_ends_its_request_alone() {
    let mut s = speculator(2);
    for id in 0..2 {
        admit(
            &mut s,
            id,
            &toy::prompt(5, id),
            5,
            with(&sampling(|_| {}), DraftBudget::chain(2).unwrap(), 40),
        );
    }
    let (ids, mut batch) = ([RequestId(0), RequestId(1)], VerifyBatch::new());
    s.propose(&ids, &mut batch).unwrap();
    let (logits, features) = toy::forward(&batch, |i| s.committed(ids[i]).unwrap());
    let verdicts = s.accept_masked(&batch, &logits, &features, |entry, _, mask| {
        mask.fill(0);
        entry.request() == RequestId(1)
    });
    let verdicts = verdicts.unwrap();
    assert!(verdicts[0].finished.is_none() && !verdicts[0].emitted.is_empty());
    assert!(matches!(&verdicts[1].finished, Some(FinishReason::Fault(_))), "{:?}", verdicts[1].finished);
    assert!(verdicts[1].emitted.is_empty());
}

#[test]
fn emitted_tokens_come_with_their_log_probabilities() {
    let params = sampling(|p| (p.temperature, p.frequency_penalty) = (1.3, 0.2));
    let mut s = speculator(1);
    let prompt = toy::prompt(6, 1);
    let options =
        RequestOptions { log_probs: Some(3), ..with(&params, DraftBudget::new(3, 3, 9).unwrap(), 30) };
    let first = admit(&mut s, 0, &prompt, 6, options);
    let (mut text, mut seen) = ([&prompt[..], &[first.token]].concat(), vec![first.log_prob.unwrap()]);
    let mut batch = VerifyBatch::new();
    loop {
        let verdict = step(&mut s, &[RequestId(0)], &mut batch).remove(0);
        assert_eq!(verdict.log_probs.len(), verdict.emitted.len());
        text.extend_from_slice(&verdict.emitted);
        seen.extend(verdict.log_probs);
        if verdict.finished.is_some() {
            break;
        }
    }
    assert_eq!(seen.len(), 30);
    for (i, seen) in seen.iter().enumerate() {
        let (before, token) = (&text[..prompt.len() + i], text[prompt.len() + i]);
        let want = TokenLogProb::new(&toy::logits(before), token, 3);
        assert!((seen.log_prob - want.log_prob).abs() < 1e-4);
        assert_eq!(seen.rank, want.rank);
        let ids = |of: &TokenLogProb| of.alternatives.iter().map(|(token, _)| *token).collect::<Vec<_>>();
        assert_eq!(ids(seen), ids(&want));
    }
    assert!(seen.iter().any(|seen| seen.rank > 1), "something was sampled");
}

/// The draft tokens, and the head of the toy.
fn draft_tokens() -> Vec<TokenId> {
    let files = toy::head_files(7);
    let head = Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET).unwrap();
    head.vocab().tokens().to_vec()
}

/// Checks each node of a tree that has children: `best(path)` says what its first child must be.
fn assert_first_children(entry: &BatchEntry, best: impl Fn(&[TokenId]) -> Vec<TokenId>) -> usize {
    let (tree, mut num_checked) = (entry.tree(), 0);
    for node in tree.nodes() {
        if let Some(child) = tree.children(node).next() {
            let path: Vec<TokenId> = tree.ancestors(node).iter().skip(1).map(|i| tree.tokens()[i]).collect();
            let best = best(&path);
            assert!(
                best.contains(&tree.token(child)),
                "after {path:?}: {:?} not in {best:?}",
                tree.token(child)
            );
            num_checked += 1;
        }
    }
    num_checked
}

/// At a temperature of a million only noise counts: every node's first child must be the draft token with the most,
/// at the child's own position, under the request's own seed.
#[test]
fn drafts_follow_the_targets_noise() {
    let columns = draft_tokens();
    let mut s = speculator(3);
    let mut ids = Vec::new();
    for (id, noise_scale) in [(0, 1.0), (1, 1.0), (2, 0.0)] {
        let params = sampling(|p| (p.temperature, p.seed) = (1e6, 70 + id));
        let coupling = Coupling { noise_scale, ..Coupling::default() };
        let budget = DraftBudget::new(2 + id as usize, 4, 20).unwrap();
        let options = RequestOptions { coupling, ..with(&params, budget, 40) };
        admit(&mut s, id, &toy::prompt(3 + id as usize, id), 5, options);
        ids.push(RequestId(id));
    }
    let (mut batch, mut num_checked) = (VerifyBatch::new(), 0);
    for _ in 0..8 {
        s.propose(&ids, &mut batch).unwrap();
        for entry in &batch.entries()[..2] {
            num_checked += assert_first_children(entry, |path| {
                let position = (entry.committed_len() + path.len()) as u32;
                let noise = |token: &TokenId| gumbel(70 + entry.request().0, position, token.0);
                vec![*columns.iter().max_by(|a, b| noise(a).total_cmp(&noise(b))).unwrap()]
            });
        }
        // The control: the drafts that don't see the noise are others.
        let entry = &batch.entries()[2];
        let first = entry.tree().children(NodeId::ROOT).next().unwrap();
        let noise = |token: &TokenId| gumbel(72, entry.committed_len() as u32, token.0);
        let noisiest = columns.iter().max_by(|a, b| noise(a).total_cmp(&noise(b))).unwrap();
        num_checked += 1000 * usize::from(entry.tree().token(first) != *noisiest);
        step(&mut s, &ids, &mut batch);
    }
    assert!(num_checked > 1000 + 30, "{num_checked}");
    // Where the drafter can say all tokens that the target can, noise alone makes every draft right.
    let stats = [0, 1].map(|id| s.finish(RequestId(id)).unwrap().stats);
    for stats in stats {
        let share = stats.num_correct_drafts() as f64 / stats.num_verify_steps() as f64;
        assert!(share > 1.0, "{share} with 8 of 12 tokens; 2 expected");
    }
}

/// Penalties on drafts count the drafts before them, and those of the output.
#[test]
fn drafts_avoid_what_their_own_path_has() {
    let columns = draft_tokens();
    let params = sampling(|p| (p.frequency_penalty, p.temperature) = (1e6, 0.0));
    let mut s = speculator(1);
    let prompt = toy::prompt(4, 1);
    admit(&mut s, 0, &prompt, 4, with(&params, DraftBudget::new(3, 4, 14).unwrap(), 30));
    let (mut batch, mut num_checked) = (VerifyBatch::new(), 0);
    for _ in 0..6 {
        s.propose(&[RequestId(0)], &mut batch).unwrap();
        let output = s.committed(RequestId(0)).unwrap()[prompt.len()..].to_vec();
        num_checked += assert_first_children(&batch.entries()[0], |path| {
            let count = |token: &TokenId| output.iter().chain(path).filter(|other| *other == token).count();
            let least = columns.iter().map(count).min().unwrap();
            columns.iter().copied().filter(|token| count(token) == least).collect()
        });
        if step(&mut s, &[RequestId(0)], &mut batch)[0].finished.is_some() {
            break;
        }
    }
    assert!(num_checked > 20, "{num_checked}");
}

#[test]
fn coupling_can_be_changed_and_changes_no_text() {
    let params = sampling(|_| {});
    let prompt = toy::prompt(8, 5);
    let want = decode(&prompt, 60, &params, 0);
    let budget = DraftBudget::new(3, 3, 10).unwrap();
    for tau in [0.3, 1.0, 4.0] {
        let mut s = speculator(1);
        admit(&mut s, 0, &prompt, 8, with(&params, budget, 60));
        let mut batch = VerifyBatch::new();
        for i in 0.. {
            let noise_scale = (i % 3) as f32 / 2.0;
            s.set_coupling(RequestId(0), Coupling { noise_scale, confidence_temperature: tau }).unwrap();
            if step(&mut s, &[RequestId(0)], &mut batch)[0].finished.is_some() {
                break;
            }
            let confidences = batch.entries()[0].confidences();
            assert!(confidences.iter().all(|confidence| (0.0..=1.0).contains(confidence)));
        }
        assert_eq!(s.finish(RequestId(0)).unwrap().tokens, want);
    }
    let mut s = speculator(1);
    let bad = [(-0.1, 1.0), (1.1, 1.0), (f32::NAN, 1.0), (0.5, 0.0), (0.5, 1e4), (0.5, f32::NAN)];
    for (noise_scale, confidence_temperature) in bad {
        let coupling = Coupling { noise_scale, confidence_temperature };
        let refused = s.admit(RequestId(1), RequestOptions { coupling, ..options(1, budget) });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Misuse);
        admit(&mut s, 1, &prompt, 8, options(9, budget));
        assert_eq!(s.set_coupling(RequestId(1), coupling).unwrap_err().kind(), ErrorKind::Misuse);
        s.cancel(RequestId(1)).unwrap();
    }
}
