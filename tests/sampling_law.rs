//! Speculation changes neither the text nor its law, and the tests that say so have teeth: each check runs on the
//! rule of this crate, which must pass, and on broken twins of it, which must not.
//!
//! Three checks: *seed equality* (the text is plain decoding's, token for token), the *exact law* (all outcomes of
//! all trees over a few tokens, in integers), and a *G-test* of three tokens in a row.

use eagle_verify::sampling::{Sampler, SamplingContext, SamplingParams, gumbel};
use eagle_verify::{DraftTree, NodeId, OutputLimits, RequestId, TokenId, Verdict, VerifyBatch};

mod common;
use common::toy;
use toy::Numbers;

const LIMITS: OutputLimits<'static> = OutputLimits { stop_tokens: &[], num_remaining: usize::MAX };

fn sampler(change: impl FnOnce(&mut SamplingParams)) -> Sampler {
    let mut params = SamplingParams { temperature: 1.0, seed: 21, ..SamplingParams::default() };
    change(&mut params);
    Sampler::new(params).unwrap()
}

fn entry(tree: &DraftTree, committed_len: usize) -> VerifyBatch {
    let mut batch = VerifyBatch::new();
    batch.push(RequestId(0), committed_len, tree).unwrap();
    batch
}

fn path_to(tree: &DraftTree, node: NodeId) -> Vec<TokenId> {
    tree.ancestors(node).iter().skip(1).map(|i| tree.tokens()[i]).collect()
}

// ---- seed equality

/// The token of a node, as a rule draws it: from logits, where in the text, and which slot of the batch it has.
type Rule = fn(&Sampler, &[f32], SamplingContext<'_>, usize) -> TokenId;

fn walk(sampler: &Sampler, logits: &[f32], context: SamplingContext<'_>, _slot: usize) -> TokenId {
    sampler.choose(logits, context).unwrap().token()
}

/// Filters and noise by hand: what is left of the logits after `keep` said which.
fn draw(sampler: &Sampler, logits: &[f32], position: u32, keep: &[bool]) -> TokenId {
    let params = sampler.params();
    let score = |i: usize| logits[i] / params.temperature + gumbel(params.seed, position, i as u32);
    let kept = (0..logits.len()).filter(|i| keep[*i]);
    TokenId(kept.max_by(|a, b| score(*a).total_cmp(&score(*b))).unwrap() as u32)
}

/// `top_p` of all tokens, and only then `top_k`.
fn top_p_first(sampler: &Sampler, logits: &[f32], context: SamplingContext<'_>, _slot: usize) -> TokenId {
    let params = sampler.params();
    let weight = |i: usize| f64::from(logits[i] / params.temperature).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let total: f64 = (0..logits.len()).map(weight).sum();
    let (mut keep, mut sum) = (vec![false; logits.len()], 0.0);
    for (rank, i) in order.into_iter().enumerate() {
        keep[i] = sum < total * f64::from(params.top_p) && (params.top_k == 0 || rank < params.top_k);
        sum += weight(i);
    }
    draw(sampler, logits, context.position, &keep)
}

const BROKEN_RULES: [(&str, Rule); 5] = [
    ("position off by one", |sampler, logits, context, slot| {
        walk(sampler, logits, SamplingContext { position: context.position + 1, ..context }, slot)
    }),
    ("position of the root", |sampler, logits, context, slot| {
        let position = context.position - context.path.len() as u32;
        walk(sampler, logits, SamplingContext { position, ..context }, slot)
    }),
    ("noise by batch slot", |s, logits, context, slot| {
        let seed = s.params().seed ^ (slot as u64) << 7;
        walk(&Sampler::new(SamplingParams { seed, ..s.params().clone() }).unwrap(), logits, context, slot)
    }),
    ("penalties of the committed text for all nodes", |sampler, logits, context, slot| {
        walk(sampler, logits, SamplingContext { path: &[], ..context }, slot)
    }),
    ("top-p before top-k", top_p_first),
];

/// Makes a tree from a text, whose next tokens `peek` knows.
type Drafter = fn(&[TokenId], &mut Numbers, Peek<'_>) -> DraftTree;
type Peek<'a> = &'a dyn Fn(&[TokenId]) -> TokenId;

/// Any tree of up to 24 nodes.
fn random_tree(text: &[TokenId], numbers: &mut Numbers, _: Peek<'_>) -> DraftTree {
    let mut tree = DraftTree::new(text[text.len() - 1]);
    for _ in 0..numbers.next_u64() % 24 {
        let parent = tree.node(numbers.next_u64() as usize % tree.len()).unwrap();
        // A token that a sibling has is refused.
        let _ = tree.push(parent, TokenId(numbers.next_u64() as u32 % 12));
    }
    tree
}

/// Looks at the noise: the right tokens, with wrong siblings beside them.
fn peeking(text: &[TokenId], numbers: &mut Numbers, peek: Peek<'_>) -> DraftTree {
    let mut tree = DraftTree::new(text[text.len() - 1]);
    let (mut node, mut path) = (NodeId::ROOT, Vec::new());
    for _ in 0..1 + numbers.next_u64() % 6 {
        let token = peek(&path);
        let _ = tree.push(node, TokenId((token.0 + 1) % 12));
        node = tree.push(node, token).unwrap();
        path.push(token);
    }
    tree
}

/// Never the right token.
fn always_wrong(text: &[TokenId], _: &mut Numbers, peek: Peek<'_>) -> DraftTree {
    let mut tree = DraftTree::new(text[text.len() - 1]);
    let (right, mut node) = (peek(&[]), NodeId::ROOT);
    for i in 0..12 {
        if TokenId(i) != right {
            node = tree.push(if i % 3 == 0 { NodeId::ROOT } else { node }, TokenId(i)).unwrap();
        }
    }
    tree
}

fn context<'a>(text: &'a [TokenId], prompt_len: usize, path: &'a [TokenId]) -> SamplingContext<'a> {
    let (prompt, output) = text.split_at(prompt_len);
    SamplingContext { position: (text.len() + path.len()) as u32, prompt, output, path, allowed: None }
}

/// How many of the cases have the text of plain decoding, and how many drafts were right in them.
fn seed_equality(rule: Rule, drafter: Drafter, params: &[SamplingParams]) -> (usize, usize) {
    let (mut num_equal, mut num_correct) = (0, 0);
    for (case, params) in params.iter().enumerate() {
        let sampler = Sampler::new(params.clone()).unwrap();
        let prompt = toy::prompt(2 + case, case as u64);
        let mut want = prompt.clone();
        while want.len() < prompt.len() + 40 {
            let token = walk(&sampler, &toy::logits(&want), context(&want, prompt.len(), &[]), 0);
            want.push(token);
        }
        let (mut text, mut numbers) = (prompt.clone(), Numbers::new(case as u64));
        while text.len() < want.len() {
            let peek = |path: &[TokenId]| {
                let so_far = [&text[..], path].concat();
                walk(&sampler, &toy::logits(&so_far), context(&text, prompt.len(), path), 0)
            };
            let tree = drafter(&text, &mut numbers, &peek);
            let (batch, mut verdict) = (entry(&tree, text.len()), Verdict::new());
            let slot = numbers.next_u64() as usize % 5; // requests move in a batch
            verdict.walk(&batch.entries()[0], LIMITS, |node| {
                let path = path_to(&tree, node);
                let logits = toy::logits(&[&text[..], &path].concat());
                Ok(rule(&sampler, &logits, context(&text, prompt.len(), &path), slot))
            });
            num_correct += verdict.num_correct_drafts();
            text.extend_from_slice(&verdict.emitted);
        }
        num_equal += usize::from(text[..want.len()] == want[..]);
    }
    (num_equal, num_correct)
}

fn all_params() -> Vec<SamplingParams> {
    let of = |change: fn(&mut SamplingParams)| sampler(change).params().clone();
    let mut all: Vec<SamplingParams> =
        [0.0, 0.3, 0.7, 1.0, 1.5].map(|temperature| SamplingParams { temperature, ..of(|_| {}) }).into();
    all.extend([
        of(|p| (p.top_k, p.top_p) = (4, 0.6)),
        of(|p| (p.top_k, p.top_p, p.min_p) = (7, 0.8, 0.2)),
        of(|p| p.min_p = 0.5),
        of(|p| p.top_p = 0.5),
        of(|p| (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) = (1.3, 0.4, 0.2)),
        of(|p| (p.frequency_penalty, p.temperature) = (0.7, 0.0)),
        of(|p| p.logit_bias = vec![(TokenId(2), 1.0), (TokenId(7), f32::NEG_INFINITY)]),
    ]);
    all
}

#[test]
fn any_drafter_gives_plain_decodings_text() {
    let params = all_params();
    let drafters: [(Drafter, usize, usize); 3] =
        [(random_tree, 20, 400), (peeking, 300, 480), (always_wrong, 0, 40)];
    for (drafter, least, most) in drafters {
        let (num_equal, num_correct) = seed_equality(walk, drafter, &params);
        assert_eq!(num_equal, params.len());
        assert!((least..=most).contains(&num_correct), "{num_correct} drafts were right");
    }
}

#[test]
fn control_broken_rules_change_the_text() {
    let params = all_params();
    for (name, rule) in BROKEN_RULES {
        let (num_equal, _) = seed_equality(rule, peeking, &params);
        assert!(num_equal < params.len(), "{name} was not noticed");
    }
}

// ---- the exact law

/// What a step emits; nothing if its script has too few coins.
type Emitted = Option<Vec<TokenId>>;

/// Coins and probabilities are in units of its inverse.
const COIN: u64 = 4;
/// Of three coins, and three more tokens.
const ONE: u64 = COIN.pow(6);

/// A target over `vocab` tokens with probabilities in quarters, some of them zero.
fn quarters(text: &[TokenId], vocab: usize, salt: u64) -> Vec<u64> {
    let mut hash = salt;
    for token in text {
        hash = Numbers::new(hash ^ u64::from(token.0 + 1)).next_u64();
    }
    let mut numbers = Numbers::new(hash);
    let mut weights = vec![0; vocab];
    for _ in 0..COIN {
        weights[numbers.next_u64() as usize % vocab] += 1;
    }
    weights
}

/// Every tree over `vocab` tokens with two levels: which children the root has, and which each of those has.
fn trees(vocab: u32) -> impl Iterator<Item = DraftTree> {
    let per_child = 1 + (1u64 << vocab); // absent, or one of the sets of children
    (0..per_child.pow(vocab)).map(move |mut code| {
        let mut tree = DraftTree::new(TokenId(0));
        for child in 0..vocab {
            let kind = code % per_child;
            code /= per_child;
            if kind > 0 {
                let parent = tree.push(NodeId::ROOT, TokenId(child)).unwrap();
                let set = kind - 1;
                for token in (0..vocab).filter(|token| set >> token & 1 == 1) {
                    tree.push(parent, TokenId(token)).unwrap();
                }
            }
        }
        tree
    })
}

/// The probability, of `ONE`, of each three tokens: what a verify step emits, then plain sampling.
///
/// `step` maps a tree and a script of coins, each below `COIN`, to what is emitted so far; it asks for a coin by
/// returning `None`.
fn law(tree: &DraftTree, vocab: usize, salt: u64, step: &dyn Fn(&DraftTree, &[u64]) -> Emitted) -> Vec<u64> {
    let mut law = vec![0; vocab.pow(3)];
    let mut scripts: Vec<Vec<u64>> = vec![vec![]];
    while let Some(script) = scripts.pop() {
        let Some(emitted) = step(tree, &script) else {
            scripts.extend((0..COIN).map(|coin| [&script[..], &[coin]].concat()));
            continue;
        };
        let unit = ONE / COIN.pow(script.len() as u32);
        let mut texts: Vec<(Vec<TokenId>, u64)> = vec![(emitted, unit)];
        while let Some((text, probability)) = texts.pop() {
            if text.len() >= 3 {
                law[text[..3].iter().fold(0, |at, token| at * vocab + token.0 as usize)] += probability;
                continue;
            }
            for (token, weight) in (0..).zip(quarters(&text, vocab, salt)) {
                if weight > 0 {
                    texts.push(([&text[..], &[TokenId(token)]].concat(), probability / COIN * weight));
                }
            }
        }
    }
    law
}

/// What three tokens have under the target alone.
fn target_law(vocab: usize, salt: u64) -> Vec<u64> {
    law(&DraftTree::new(TokenId(0)), vocab, salt, &|_, _| Some(vec![]))
}

/// The token in whose share of the quarters a coin falls.
fn by_coin(weights: &[u64], mut coin: u64) -> TokenId {
    let token = weights.iter().position(|weight| {
        let inside = coin < *weight;
        coin = coin.saturating_sub(*weight);
        inside
    });
    TokenId(token.unwrap() as u32)
}

/// This crate's walk, a coin for each node that it reaches.
fn walked(tree: &DraftTree, vocab: usize, salt: u64, script: &[u64]) -> Emitted {
    let (batch, mut verdict) = (entry(tree, 1), Verdict::new());
    let (mut coins, mut is_short) = (script.iter(), false);
    verdict.walk(&batch.entries()[0], OutputLimits { num_remaining: 3, ..LIMITS }, |node| {
        let weights = quarters(&path_to(tree, node), vocab, salt);
        Ok(coins.next().map_or_else(
            || {
                is_short = true;
                TokenId(u32::MAX) // ends the walk
            },
            |coin| by_coin(&weights, *coin),
        ))
    });
    (!is_short).then_some(verdict.emitted)
}

#[derive(Clone, Copy, Default)]
struct Defects {
    duplicate_siblings: bool,
    accepts_zero_mass: bool,
}

/// The rule of other engines: siblings first along the distribution function, then what they leave. The same law,
/// if it is done right.
fn siblings_first(tree: &DraftTree, vocab: usize, salt: u64, script: &[u64], defects: Defects) -> Emitted {
    let (mut node, mut path, mut coins) = (NodeId::ROOT, Vec::new(), script.iter());
    while path.len() < 3 {
        let mut weights = quarters(&path, vocab, salt);
        let coin = *coins.next()?;
        let mut children: Vec<NodeId> = tree.children(node).collect();
        if defects.duplicate_siblings
            && let Some(first) = children.first()
        {
            children.push(*first);
        }
        let mut sum = 0;
        let accepted = children.iter().find(|child| {
            sum += weights[tree.token(**child).0 as usize];
            coin < sum || defects.accepts_zero_mass && coin == sum
        });
        if let Some(child) = accepted {
            path.push(tree.token(*child));
            node = *child;
            continue;
        }
        // The coin lies beyond the siblings: it falls into the others' shares.
        for child in &children {
            weights[tree.token(*child).0 as usize] = 0;
        }
        let left: u64 = weights.iter().sum();
        if left > 0 {
            path.push(by_coin(&weights, (coin - sum) % left));
        } else {
            path.push(TokenId(0));
        }
        break;
    }
    Some(path)
}

/// The largest difference to the target's law, of `ONE`, over all trees over three tokens and over four.
fn law_error(step: fn(&DraftTree, usize, u64, &[u64]) -> Emitted) -> u64 {
    let mut worst = 0;
    for (vocab, salts) in [(3, 0..3), (4, 5..6)] {
        for salt in salts {
            let want = target_law(vocab, salt);
            assert_eq!(want.iter().sum::<u64>(), ONE);
            for tree in trees(vocab as u32) {
                let seen = law(&tree, vocab, salt, &|tree, script| step(tree, vocab, salt, script));
                let errors = seen.iter().zip(&want).map(|(a, b)| a.abs_diff(*b));
                worst = worst.max(errors.max().unwrap_or(0));
            }
        }
    }
    worst
}

#[test]
fn the_law_of_three_tokens_is_exactly_the_targets_for_every_tree() {
    assert_eq!(law_error(walked), 0);
    assert_eq!(law_error(|t, v, s, c| siblings_first(t, v, s, c, Defects::default())), 0);
}

#[test]
fn control_defects_of_other_rules_change_the_law() {
    let duplicates = |t: &DraftTree, v, s, c: &[u64]| {
        siblings_first(t, v, s, c, Defects { duplicate_siblings: true, ..Defects::default() })
    };
    let zero_mass = |t: &DraftTree, v, s, c: &[u64]| {
        siblings_first(t, v, s, c, Defects { accepts_zero_mass: true, ..Defects::default() })
    };
    assert!(law_error(duplicates) > ONE / 50);
    assert!(law_error(zero_mass) > ONE / 50);
    // This crate has no such siblings.
    let mut tree = DraftTree::new(TokenId(0));
    tree.push(NodeId::ROOT, TokenId(1)).unwrap();
    assert!(tree.push(NodeId::ROOT, TokenId(1)).is_err());
}

// ---- a G-test of three tokens, with the real noise

const VOCAB: usize = 4;
/// A law that is off by 0.0025 nats is found with probability .999: 142 / (2 * 0.0025), and more.
const NUM_STREAMS: u64 = 50_000;

/// Target and draft rank the tokens in opposite orders, so that most drafts are wrong. The order turns with the text.
fn narrow_logits(text: &[TokenId], is_draft: bool) -> [f32; VOCAB] {
    let turn = text.iter().map(|token| token.0 as usize + 1).sum::<usize>();
    let shares: [f32; VOCAB] = if is_draft { [0.05, 0.25, 0.3, 0.4] } else { [0.4, 0.35, 0.15, 0.1] };
    std::array::from_fn(|i| shares[(i + turn) % VOCAB].ln())
}

fn softmax(logits: [f32; VOCAB]) -> [f64; VOCAB] {
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    logits.map(|logit| f64::from(logit).exp() / total)
}

/// The likeliest tokens after some noise, which is that of a position.
fn ranked(logits: &[f32; VOCAB], seed: u64, position: usize) -> [u32; VOCAB] {
    let mut order = [0, 1, 2, 3];
    let score = |token: u32| logits[token as usize] + gumbel(seed, position as u32, token);
    order.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
    order
}

/// Three tokens of a stream, by coupled trees: the two best children of each node, two levels deep.
fn coupled(seed: u64) -> Vec<TokenId> {
    let mut text = vec![TokenId(0)];
    let sampler = sampler(|p| p.seed = seed);
    while text.len() < 4 {
        let mut tree = DraftTree::new(text[text.len() - 1]);
        let mut level = vec![(NodeId::ROOT, vec![])];
        for _ in 0..2 {
            let mut next = Vec::new();
            for (node, path) in level {
                let so_far = [&text[..], &path].concat();
                for token in &ranked(&narrow_logits(&so_far, true), seed, so_far.len())[..2] {
                    let child = tree.push(node, TokenId(*token)).unwrap();
                    next.push((child, [&path[..], &[TokenId(*token)]].concat()));
                }
            }
            level = next;
        }
        let (batch, mut verdict) = (entry(&tree, text.len()), Verdict::new());
        verdict.walk(&batch.entries()[0], LIMITS, |node| {
            let path = path_to(&tree, node);
            let logits = narrow_logits(&[&text[..], &path].concat(), false);
            sampler.choose(&logits, context(&text, 1, &path)).map(|key| key.token())
        });
        text.extend_from_slice(&verdict.emitted);
    }
    text[1..4].to_vec()
}

/// The forbidden mix: the draft is sampled with the target's noise, and then put to a ratio test.
fn ratio_test_with_shared_noise(seed: u64) -> Vec<TokenId> {
    let mut text = vec![TokenId(0)];
    while text.len() < 4 {
        let [target, draft] = [false, true].map(|is_draft| narrow_logits(&text, is_draft));
        let (p, q) = (softmax(target), softmax(draft));
        let x = ranked(&draft, seed, text.len())[0] as usize;
        let coin = f64::from((-gumbel(!seed, text.len() as u32, 0)).exp()); // exponential
        let token = if 1.0 - (-coin).exp() < p[x] / q[x] {
            x
        } else {
            let residual: [f32; VOCAB] = std::array::from_fn(|i| ((p[i] - q[i]).max(0.0) as f32).ln());
            ranked(&residual, seed, text.len())[0] as usize
        };
        text.push(TokenId(token as u32));
    }
    text[1..4].to_vec()
}

/// `2 sum n ln(n / expected)` over all three tokens in a row, 63 degrees of freedom.
fn g_statistic(stream: fn(u64) -> Vec<TokenId>) -> f64 {
    let mut counts = [0u32; VOCAB.pow(3)];
    for seed in 0..NUM_STREAMS {
        counts[stream(seed).iter().fold(0, |at, token| at * VOCAB + token.0 as usize)] += 1;
    }
    let mut g = 0.0;
    for (cell, count) in counts.into_iter().enumerate() {
        let tokens = [cell / 16, cell / 4 % 4, cell % 4];
        let mut text = vec![TokenId(0)];
        let mut expected = NUM_STREAMS as f64;
        for token in tokens {
            expected *= softmax(narrow_logits(&text, false))[token];
            text.push(TokenId(token as u32));
        }
        assert!(expected > 20.0, "the cell {tokens:?} is too small for the test");
        g += if count > 0 { 2.0 * f64::from(count) * (f64::from(count) / expected).ln() } else { 0.0 };
    }
    g
}

#[test]
fn coupled_trees_pass_a_g_test_and_shared_noise_with_a_ratio_test_does_not() {
    const CRITICAL: f64 = 132.0; // of chi-square with 63 degrees of freedom at 1e-6: 131.7
    let seen = g_statistic(coupled);
    assert!(seen < CRITICAL, "G = {seen}");
    let control = g_statistic(ratio_test_with_shared_noise);
    assert!(control > CRITICAL, "G = {control} of the control");
}
