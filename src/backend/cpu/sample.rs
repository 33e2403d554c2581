//! [`Sampler::choose`], fast: no sort, memory that is kept, and almost no logarithms.
//!
//! A token's noise is at most `-ln` of its uniform bits' highest power of two, so nearly all tokens are ruled out
//! by their bits alone: noise is worked out for a few dozen of a vocabulary. Filters find their threshold by
//! counting, or adding weights, by the leading bits of `z`, three times ten or eleven of them.

use std::cell::RefCell;

use multiversion::multiversion;

use super::ops;
use crate::draft::Coupling;
use crate::error::Result;
use crate::sampling::{
    BLOCK, ChoiceKey, Columns, LARGEST_WEIGHT, Sampler, SamplingContext, SamplingParams, TokenCounts,
    from_ordered_bits, gumbel, nan_logit, noise_bound, ordered_bits, scaled, share, uniform_block, weight,
};
use crate::tree::TokenId;

#[derive(Default)]
struct Scratch {
    z: Vec<f32>,
    weights: Vec<u64>,
    rest: Vec<(u32, u64)>,
    counts: TokenCounts,
}

/// The key of the columns of a row that start with token `first` of `vocab`. That of a whole row is, once checked,
/// what `sampler.choose(logits, context)` gives; a sampler with filters has to see the whole.
///
/// # Errors
/// *Misuse* when the mask is of another length. What is wrong with the row is in the key.
pub(super) fn choose(
    sampler: &Sampler,
    logits: &[f32],
    first: usize,
    vocab: usize,
    context: SamplingContext<'_>,
) -> Result<ChoiceKey> {
    if sampler.is_plain() && context.allowed.is_none() {
        return Ok(ops::choose(logits, first));
    }
    with_scratch(|scratch| scratch.choose(sampler, logits, Columns::From { first, vocab }, context))
}

fn with_scratch<R>(action: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    SCRATCH.with_borrow_mut(action)
}

impl Scratch {
    fn choose(
        &mut self,
        sampler: &Sampler,
        logits: &[f32],
        columns: Columns<'_>,
        context: SamplingContext<'_>,
    ) -> Result<ChoiceKey> {
        if let Err(column) = ops::largest(logits) {
            return Ok(ChoiceKey::nan(columns.token(column), false));
        }
        let params = sampler.params();
        self.z.clear();
        self.z.extend_from_slice(logits);
        if let Some(token) = sampler.adjust(&mut self.z, columns, context, &mut self.counts)? {
            return Ok(ChoiceKey::nan(token, true));
        }
        let first = columns.token(0);
        if params.temperature == 0.0 {
            return Ok(ops::choose(&self.z, first.0 as usize));
        }
        let threshold = self.threshold(params);
        Ok(draw(&self.z, first, threshold, params.seed, context.position))
    }

    /// Divides `z` by the temperature, which is above 0, and returns the smallest that the filters keep.
    fn threshold(&mut self, params: &SamplingParams) -> f32 {
        let largest = scale(&mut self.z, params.temperature);
        let mut threshold = f32::NEG_INFINITY;
        if params.top_k > 0 && params.top_k < self.z.len() {
            threshold = reach(&self.z, params.top_k as u64, |_| 1, &mut self.rest);
        }
        if params.min_p > 0.0 || params.top_p < 1.0 {
            let least = share(LARGEST_WEIGHT, params.min_p) as u64; // at most 2^40
            self.weights.resize(self.z.len(), 0);
            let (total, smallest) = weigh(&self.z, largest, threshold, least, &mut self.weights);
            threshold = smallest;
            if params.top_p < 1.0 {
                let wanted = share(total, params.top_p) as u64; // at most the total
                threshold = reach(&self.z, wanted, |i| self.weights[i], &mut self.rest);
            }
        }
        threshold
    }
}

/// Makes a draft model's logits, of the tokens `columns`, those that it ranks by and is confident of; negative
/// infinity for tokens that the target cannot take. `noise` is the target's at the context's position, of the same
/// tokens. See [`Coupling`].
///
/// # Errors
/// *Fault* when the row holds a NaN.
pub(super) fn couple(
    sampler: &Sampler,
    coupling: Coupling,
    logits: &mut [f32],
    columns: &[TokenId],
    noise: &[f32],
    context: SamplingContext<'_>,
) -> Result<()> {
    with_scratch(|scratch| {
        ops::largest(logits).map_err(|column| nan_logit(columns[column]))?;
        let params = sampler.params();
        if let Some(token) = sampler.adjust(logits, Columns::Of(columns), context, &mut scratch.counts)? {
            return Err(nan_logit(token));
        }
        if params.temperature == 0.0 {
            if coupling.confidence_temperature != 1.0 {
                logits.iter_mut().for_each(|logit| *logit /= coupling.confidence_temperature);
            }
            return Ok(());
        }
        scratch.z.clear();
        scratch.z.extend_from_slice(logits);
        let threshold = scratch.threshold(params);
        let factor = params.temperature / coupling.confidence_temperature;
        add_noise(&scratch.z, threshold, noise, coupling.noise_scale, factor, logits);
        Ok(())
    })
}

/// `sums = factor * (z + scale * noise)` where `z >= threshold`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn add_noise(z: &[f32], threshold: f32, noise: &[f32], scale: f32, factor: f32, sums: &mut [f32]) {
    for ((z, noise), sum) in z.iter().zip(noise).zip(sums) {
        *sum = if *z >= threshold { factor * (z + scale * noise) } else { f32::NEG_INFINITY };
    }
}

/// Sums and extremes are kept for so many places side by side, or no loop over them would vectorise.
const LANES: usize = 16;

/// Divides by the temperature and returns the largest.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn scale(z: &mut [f32], temperature: f32) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut chunks = z.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (z, largest) in chunk.iter_mut().zip(&mut largest) {
            *z = scaled(*z, temperature);
            *largest = if *z > *largest { *z } else { *largest };
        }
    }
    for (z, largest) in chunks.into_remainder().iter_mut().zip(&mut largest) {
        *z = scaled(*z, temperature);
        *largest = if *z > *largest { *z } else { *largest };
    }
    largest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Weights of the tokens that a threshold and `min_p` leave, 0 for the others; their sum, and their smallest `z`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn weigh(z: &[f32], largest: f32, threshold: f32, least: u64, weights: &mut [u64]) -> (u64, f32) {
    let (mut total, mut smallest) = ([0; LANES], [f32::INFINITY; LANES]);
    for (z, weights) in z.chunks(LANES).zip(weights.chunks_mut(LANES)) {
        let lanes = z.iter().zip(weights).zip(total.iter_mut().zip(&mut smallest));
        for ((z, slot), (total, smallest)) in lanes {
            let weight = weight(*z, largest);
            let is_kept = (*z >= threshold) & (weight >= least);
            *slot = if is_kept { weight } else { 0 };
            *total += *slot;
            *smallest = if is_kept & (*z < *smallest) { *z } else { *smallest };
        }
    }
    (total.iter().sum(), smallest.into_iter().fold(f32::INFINITY, f32::min))
}

/// The largest `z` such that tokens with at least this `z` weigh `wanted`, which is at least 1 and at most what
/// all weigh: digit by digit of its ordered bits. `rest` is memory for the tokens that share the digits found.
fn reach(z: &[f32], mut wanted: u64, weight: impl Fn(usize) -> u64, rest: &mut Vec<(u32, u64)>) -> f32 {
    let mut pick = |sums: &[u64]| {
        let mut digit = sums.len() - 1;
        while digit > 0 && sums[digit] < wanted {
            wanted -= sums[digit];
            digit -= 1;
        }
        digit as u32
    };
    let mut sums = [0u64; 1 << 11];
    for (i, z) in z.iter().enumerate() {
        sums[(ordered_bits(*z) >> 21) as usize] += weight(i);
    }
    let mut prefix = pick(&sums);
    rest.clear();
    let bits = z.iter().map(|z| ordered_bits(*z)).enumerate();
    rest.extend(bits.filter(|(_, bits)| bits >> 21 == prefix).map(|(i, bits)| (bits, weight(i))));
    for (shift, width) in [(10, 11), (0, 10)] {
        let sums = &mut sums[..1 << width];
        sums.fill(0);
        for (bits, weight) in rest.iter().filter(|(bits, _)| bits >> shift >> width == prefix) {
            sums[(bits >> shift & ((1 << width) - 1)) as usize] += weight;
        }
        prefix = prefix << width | pick(sums);
    }
    from_ordered_bits(prefix)
}

/// The largest of `z + noise` among tokens with `z >= threshold`; `z` starts with token `first`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn draw(z: &[f32], first: TokenId, threshold: f32, seed: u64, position: u32) -> ChoiceKey {
    let mut best = ChoiceKey::default();
    let mut best_score = f32::NEG_INFINITY;
    // Blocks of noise start with a multiple of 4.
    let skipped = first.0 as usize % 4;
    let (cut, whole) = z.split_at(z.len().min(BLOCK - skipped));
    let blocks = std::iter::once((skipped, cut)).chain(whole.chunks(BLOCK).map(|z| (0, z)));
    for (start, (skipped, z)) in (first.0 - skipped as u32..).step_by(BLOCK).zip(blocks) {
        if z.iter().fold(true, |none, z| none & (*z < threshold)) {
            continue; // all filtered
        }
        let bits = uniform_block(seed, position, start);
        let bits = &bits[skipped..];
        let mut may_win = [false; BLOCK];
        let mut any = false;
        for ((may_win, z), bits) in may_win.iter_mut().zip(z).zip(bits) {
            // Rounding keeps order: what the bound does not reach, the noise does not.
            *may_win = *z >= threshold && z + noise_bound(*bits) >= best_score;
            any |= *may_win;
        }
        if !any {
            continue;
        }
        for (i, z) in z.iter().enumerate().filter(|(i, _)| may_win[*i]) {
            let token = start + (skipped + i) as u32;
            let score = z + gumbel(seed, position, token);
            best = best.max(ChoiceKey::new(score, TokenId(token)));
            best_score = best.score();
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::gumbel_row;
    use proptest::prelude::*;

    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -9.0f32..9.0,
            4 => (-6i8..6).prop_map(f32::from),
            1 => Just(f32::NEG_INFINITY),
            1 => prop_oneof![Just(f32::INFINITY), Just(-0.0f32), Just(0.0), Just(3e38), Just(1e-40)],
        ]
    }

    prop_compose! {
        fn params()(
            temperature in prop_oneof![Just(0.0f32), Just(1e-6), 0.1f32..2.0, Just(1e6)],
            top_k in prop_oneof![Just(0usize), 0usize..60],
            top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), Just(-0.0), 0.0f32..1.0],
            penalty in prop_oneof![Just((1.0f32, 0.0f32)), (0.5f32..2.0, -1.0f32..1.0)],
            bias in prop::collection::vec((0u32..300, -3.0f32..3.0), 0..4),
            seed in any::<u64>(),
        ) -> SamplingParams {
            let logit_bias = bias.into_iter().map(|(token, bias)| (TokenId(token), bias)).collect();
            let (repetition_penalty, frequency_penalty) = penalty;
            SamplingParams {
                temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty: 0.0, frequency_penalty,
                logit_bias, seed,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn it_is_the_specification(
            row in prop::collection::vec(logit(), 0..300),
            params in params(),
            text in prop::collection::vec((0u32..300).prop_map(TokenId), 0..9),
            mask in prop::option::weighted(0.2, any::<[u32; 10]>()),
            position in any::<u32>(),
        ) {
            let sampler = Sampler::new(params).unwrap();
            let allowed = mask.as_ref().map(|mask| &mask[..row.len().div_ceil(32)]);
            let (prompt, output) = text.split_at(text.len() / 2);
            let context = SamplingContext { position, prompt, output, path: &[], allowed };
            let same = |r: Result<ChoiceKey>| r.map_err(|e| e.to_string());
            let whole = choose(&sampler, &row, 0, row.len(), context).and_then(ChoiceKey::checked);
            prop_assert_eq!(same(whole), same(sampler.choose(&row, context)));
        }

        /// The largest key of a row's parts is the row's, with what is wrong with it.
        #[test]
        fn parts_combine_by_maximum(
            row in prop::collection::vec(
                prop_oneof![400 => logit(), 1 => Just(f32::NAN), 1 => Just(f32::INFINITY)], 1..300,
            ),
            params in params(),
            infinite in prop::option::weighted(0.1, 0u32..300),
            text in prop::collection::vec((0u32..300).prop_map(TokenId), 0..9),
            mask in prop::option::weighted(0.3, any::<[u32; 10]>()),
            position in any::<u32>(),
            cuts in prop::collection::vec(0usize..300, 0..4),
        ) {
            let bias = infinite.map(|token| (TokenId(token), f32::NEG_INFINITY)); // may meet +infinity
            let logit_bias = params.logit_bias.iter().copied().chain(bias).collect();
            let params = SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.0, logit_bias, ..params };
            let sampler = Sampler::new(params).unwrap();
            let allowed = mask.as_ref().map(|mask| &mask[..row.len().div_ceil(32)]);
            let (prompt, output) = text.split_at(text.len() / 2);
            let context = SamplingContext { position, prompt, output, path: &text[..1.min(text.len())], allowed };
            let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(row.len())).collect();
            ends.push(row.len());
            ends.sort_unstable();
            let (mut best, mut start) = (ChoiceKey::default(), 0);
            for end in ends {
                let key = choose(&sampler, &row[start..end], start, row.len(), context).unwrap();
                best = best.max(key);
                start = end;
            }
            let same = |r: Result<ChoiceKey>| r.map_err(|e| e.to_string());
            prop_assert_eq!(same(best.checked()), same(sampler.choose(&row, context)));
        }
    }

    /// A drafter with the target's own logits, of a third of its tokens, at many positions. `noise_of` says whose
    /// noise a column gets. Returns how often, of 400 times, its best child was the target's token.
    fn perfect_drafts(
        params: &SamplingParams,
        masked: bool,
        noise_of: impl Fn(usize, TokenId) -> TokenId,
        shift: u32,
    ) -> u32 {
        let sampler = Sampler::new(params.clone()).unwrap();
        let columns: Vec<TokenId> = (0..30).map(|i| TokenId(3 * i + i % 2)).collect();
        let tokens: Vec<TokenId> = (0..).zip(&columns).map(|(i, token)| noise_of(i, *token)).collect();
        let text = [5, 6, 6, 12, 31, 33].map(TokenId);
        let mask = [0x7FFF_FFF7u32, 0x3333_3333, 0xFFFF_0FFF];
        let mut num_right = 0;
        for position in 0..400 {
            let allowed = masked.then_some(&mask[..]);
            let context = SamplingContext {
                position,
                prompt: &text[..2],
                output: &text[2..4],
                path: &text[4..],
                allowed,
            };
            let row: Vec<f32> = (0..90).map(|i| ((i * 37 + position * 11) % 90) as f32 / 15.0).collect();
            // The other tokens are impossible, so that the target's law over the columns is the drafter's.
            let mut target = vec![f32::NEG_INFINITY; 90];
            columns.iter().for_each(|token| target[token.0 as usize] = row[token.0 as usize]);
            let wanted = sampler.choose(&target, context).unwrap().token();
            let mut logits: Vec<f32> = columns.iter().map(|token| row[token.0 as usize]).collect();
            let mut noise = vec![0.0; columns.len()];
            gumbel_row(params.seed, position + shift, &tokens, &mut noise);
            couple(&sampler, Coupling::default(), &mut logits, &columns, &noise, context).unwrap();
            let mut best = Vec::new();
            ops::top_k(&logits, 1, &mut best);
            num_right += u32::from(columns[best[0].0 as usize] == wanted);
        }
        num_right
    }

    /// With the same noise and filters, a drafter that is as good as the target is never wrong.
    #[test]
    fn a_perfect_coupled_drafter_is_always_right() {
        let base = SamplingParams { temperature: 0.9, seed: 4, ..SamplingParams::default() };
        for params in [
            SamplingParams { temperature: 0.0, frequency_penalty: 0.5, ..base.clone() },
            base.clone(),
            SamplingParams { top_k: 5, ..base.clone() },
            SamplingParams { top_p: 0.6, min_p: 0.05, ..base.clone() },
            SamplingParams { repetition_penalty: 2.0, presence_penalty: 1.0, ..base.clone() },
            SamplingParams { logit_bias: vec![(TokenId(3), 4.0), (TokenId(4), -9.0)], ..base.clone() },
        ] {
            for masked in [false, true] {
                let num_right = perfect_drafts(&params, masked, |_, token| token, 0);
                assert_eq!(num_right, 400, "{params:?}");
            }
        }
        // Controls: noise by draft token, as if there were no d2t; and of the next position.
        let num_right = perfect_drafts(&base, false, |i, _| TokenId(i as u32), 0);
        assert!(num_right < 300, "{num_right}");
        let num_right = perfect_drafts(&base, false, |_, token| token, 1);
        assert!(num_right < 300, "{num_right}");
    }

    /// Large vocabularies, flat and peaked: where most tokens are ruled out by their bits.
    #[test]
    fn large_rows_too() {
        let mut numbers = 1u32;
        let mut next = || {
            numbers = numbers.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (numbers >> 8) as f32 / (1 << 24) as f32
        };
        for (vocab, scale) in [(49_152, 1.0), (128_256, 12.0), (163_840, 0.01), (50_257, 30.0)] {
            let row: Vec<f32> = (0..vocab).map(|_| scale * (next() + next() + next() - 1.5)).collect();
            for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (0, 0.95, 0.0), (50, 0.9, 0.0), (0, 1.0, 0.05)] {
                let params =
                    SamplingParams { temperature: 0.8, top_k, top_p, min_p, seed: 3, ..Default::default() };
                let sampler = Sampler::new(params).unwrap();
                for position in 0..3 {
                    let context =
                        SamplingContext { position, prompt: &[], output: &[], path: &[], allowed: None };
                    let seen = choose(&sampler, &row, 0, vocab, context).unwrap();
                    assert_eq!(
                        seen,
                        sampler.choose(&row, context).unwrap(),
                        "{vocab} {:?}",
                        sampler.params()
                    );
                }
            }
        }
    }
}
