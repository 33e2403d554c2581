//! Sampling with all parameters of a request, as plainly as it can be written: what backends are compared with.

use super::math::{LARGEST_WEIGHT, weight};
use super::{ChoiceKey, choose, gumbel, nan_logit, reject_masked};
use crate::error::{Error, Result};
use crate::tree::TokenId;

/// How a request's tokens are sampled.
///
/// The default is temperature 0 with nothing else: the most likely token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// What logits are divided by, from 1e-6 to 1e6; 0 takes the largest.
    pub temperature: f32,
    /// Keeps the tokens with the `top_k` largest logits, and those that equal the last of them; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest tokens that together have this probability, among those that `top_k` and `min_p` left.
    pub top_p: f32,
    /// Keeps tokens with at least this share of the likeliest token's probability.
    pub min_p: f32,
    /// Divides the positive and multiplies the negative logits of tokens that the prompt or the output has; 1 is
    /// none (Keskar et al., 2019).
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the output has.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that the output has it.
    pub frequency_penalty: f32,
    /// Added to the logits of some tokens; the last entry of a token counts.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The key of the request's noise. Two requests with one seed and one text go on alike, so several samples of
    /// one prompt need a seed each.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    pub(crate) fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Where in a request's text a token is drawn.
#[derive(Clone, Copy, Debug)]
pub struct SamplingContext<'a> {
    /// The index of the token in the whole text: prompt, output and, in a tree, drafted tokens on the path count. It
    /// alone keys the noise: the texts below are looked at for penalties only, and may be left empty without.
    pub position: u32,
    /// The prompt.
    pub prompt: &'a [TokenId],
    /// The output so far.
    pub output: &'a [TokenId],
    /// Drafted tokens between the output and the token to draw: a node's own path, root excluded.
    pub path: &'a [TokenId],
    /// A bit for each token of the vocabulary, lowest first: whether it may be chosen. `None` allows all.
    pub allowed: Option<&'a [u32]>,
}

/// Parameters that have been checked.
///
/// ```
/// use eagle_verify::TokenId;
/// use eagle_verify::sampling::{Sampler, SamplingContext, SamplingParams};
///
/// let sampler = Sampler::new(SamplingParams { temperature: 0.8, top_k: 2, seed: 7, ..Default::default() })?;
/// let nothing = SamplingContext { position: 12, prompt: &[], output: &[], path: &[], allowed: None };
/// let token = sampler.choose(&[1.0, 3.0, -2.0, 2.5], nothing)?.token();
/// assert!([TokenId(1), TokenId(3)].contains(&token));
/// assert_eq!(sampler.choose(&[1.0, 3.0, -2.0, 2.5], nothing)?.token(), token); // always
/// # Ok::<(), eagle_verify::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampler {
    params: SamplingParams,
    /// One for each token, ascending.
    biases: Vec<(TokenId, f32)>,
}

impl Sampler {
    /// A sampler with these parameters.
    ///
    /// # Errors
    /// *Misuse* when one is out of its range: it says which.
    pub fn new(mut params: SamplingParams) -> Result<Self> {
        let check = |name: &'static str, value: f32, is_good: bool, wanted: &str| {
            if is_good { Ok(()) } else { Err(Error::misuse(name, wanted, value)) }
        };
        let p = &params;
        let is_positive = |x: f32| x > 0.0 && x.is_finite();
        let is_temperature = p.temperature == 0.0 || (1e-6..=1e6).contains(&p.temperature);
        check("temperature", p.temperature, is_temperature, "0, or from 1e-6 to 1e6")?;
        check("top_p", p.top_p, p.top_p > 0.0 && p.top_p <= 1.0, "above 0, at most 1")?;
        check("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p), "from 0 to 1")?;
        check("repetition_penalty", p.repetition_penalty, is_positive(p.repetition_penalty), "above 0")?;
        check("presence_penalty", p.presence_penalty, p.presence_penalty.is_finite(), "a number")?;
        check("frequency_penalty", p.frequency_penalty, p.frequency_penalty.is_finite(), "a number")?;
        for (token, bias) in &p.logit_bias {
            let is_good = !bias.is_nan() && *bias != f32::INFINITY;
            let name = format!("logit bias of token {}", token.0);
            if !is_good {
                return Err(Error::misuse(name, "a number, or negative infinity", bias));
            }
        }
        params.min_p += 0.0; // -0.0 is in its range too
        let mut biases = params.logit_bias.clone();
        biases.reverse(); // the last entry of a token counts
        biases.sort_by_key(|(token, _)| *token);
        biases.dedup_by_key(|(token, _)| *token);
        Ok(Self { params, biases })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The bias of each token that has one, ascending.
    pub(crate) fn biases(&self) -> &[(TokenId, f32)] {
        &self.biases
    }

    /// Whether it takes the largest logit as it is, wherever in a text.
    pub(crate) fn is_plain(&self) -> bool {
        let seed = self.params.seed;
        self.params == SamplingParams { seed, ..SamplingParams::default() }
    }

    /// Chooses from one row of logits, `[vocab]`.
    ///
    /// # Order and rounding
    ///
    /// In f32: repetition penalty, then `frequency * count` and presence penalty, each subtracted, then bias; the
    /// mask. At temperature 0 the largest wins. Else `z = logit / temperature`, finite if the logit is; `top_k` and
    /// `min_p` look at all tokens, `top_p` at those that are left; the key's score is
    /// `z + gumbel(seed, position, token)`, rounded.
    ///
    /// Probabilities are only compared: a token's weight is `exp(z - largest z)` as an integer in units of 2^-40,
    /// so that sums have no order. Tokens with equal `z` are kept or dropped together.
    ///
    /// # Errors
    /// *Fault* when the row holds a NaN, or leaves no token above negative infinity; *misuse* when the mask is of
    /// another length.
    pub fn choose(&self, logits: &[f32], context: SamplingContext<'_>) -> Result<ChoiceKey> {
        if let Some(token) = logits.iter().position(|logit| logit.is_nan()) {
            return Err(nan_logit(TokenId(token as u32)));
        }
        let mut adjusted = logits.to_vec();
        let columns = Columns::From { first: 0, vocab: logits.len() };
        if let Some(token) = self.adjust(&mut adjusted, columns, context, &mut TokenCounts::default())? {
            return Err(nan_logit(token));
        }
        let params = &self.params;
        if params.temperature == 0.0 {
            return choose(&adjusted);
        }
        let z: Vec<f32> = adjusted.iter().map(|logit| scaled(*logit, params.temperature)).collect();
        let threshold = self.threshold(&z);
        let mut best = ChoiceKey::default();
        for (token, &z) in (0..).zip(&z).filter(|(_, z)| **z >= threshold) {
            let score = z + gumbel(params.seed, context.position, token);
            best = best.max(ChoiceKey::new(score, TokenId(token)));
        }
        reject_masked(best)
    }

    /// Whether its choice looks at all tokens of a row, so that parts of the row cannot choose apart.
    pub(crate) fn has_filters(&self) -> bool {
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        temperature > 0.0 && (top_k > 0 || top_p < 1.0 || min_p > 0.0)
    }

    /// Applies penalties, bias and mask to logits of `columns`. Returns the first token, if any, whose logit is NaN
    /// now, which it was not before: infinite logits and infinite penalties have met.
    ///
    /// # Errors
    /// *Misuse* when the mask is of another length.
    pub(crate) fn adjust(
        &self,
        logits: &mut [f32],
        columns: Columns<'_>,
        context: SamplingContext<'_>,
        counts: &mut TokenCounts,
    ) -> Result<Option<TokenId>> {
        let SamplingContext { prompt, output, path, allowed, .. } = context;
        let params = &self.params;
        let has_penalty = params.has_penalty();
        if !has_penalty && params.logit_bias.is_empty() && allowed.is_none() {
            return Ok(None);
        }
        if has_penalty {
            counts.of(columns.num_tokens(logits.len()), prompt, [output, path], |counts| {
                let penalise = |logit: &mut f32, count: &mut u32| {
                    if *count == 0 {
                        return;
                    }
                    let penalty = params.repetition_penalty;
                    *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                    let num_outputs = *count >> 1;
                    *logit -= params.frequency_penalty * num_outputs as f32;
                    *logit -= if num_outputs > 0 { params.presence_penalty } else { 0.0 };
                    *count = 0; // a token that comes again was penalised already
                };
                match columns {
                    Columns::From { .. } => {
                        for token in [prompt, output, path].into_iter().flatten() {
                            let column = columns.find(*token);
                            if let Some(logit) = column.and_then(|column| logits.get_mut(column)) {
                                penalise(logit, &mut counts[token.0 as usize]);
                            }
                        }
                    }
                    Columns::Of(tokens) => {
                        for (logit, token) in logits.iter_mut().zip(tokens) {
                            penalise(logit, &mut counts[token.0 as usize]);
                        }
                    }
                }
            });
        }
        for (token, bias) in self.biases() {
            if let Some(logit) = columns.find(*token).and_then(|column| logits.get_mut(column)) {
                *logit += bias;
            }
        }
        if let Some(allowed) = allowed {
            if let Columns::From { vocab, .. } = columns {
                let words = vocab.div_ceil(32);
                crate::error::expect_len("mask of allowed tokens, in words", words, allowed.len())?;
            }
            for (column, logit) in logits.iter_mut().enumerate() {
                let token = columns.token(column).0 as usize;
                if allowed.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(logits.iter().position(|logit| logit.is_nan()).map(|column| columns.token(column)))
    }

    /// The smallest `z` that the filters keep.
    fn threshold(&self, z: &[f32]) -> f32 {
        let params = &self.params;
        let mut sorted = z.to_vec();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let largest = sorted.first().copied().unwrap_or(f32::NEG_INFINITY);
        if params.top_k > 0 && params.top_k < sorted.len() {
            let last = sorted[params.top_k - 1];
            sorted.retain(|z| *z >= last);
        }
        if params.min_p > 0.0 {
            let least = share(LARGEST_WEIGHT, params.min_p);
            sorted.retain(|z| u128::from(weight(*z, largest)) >= least);
        }
        if params.top_p < 1.0 {
            let total: u64 = sorted.iter().map(|z| weight(*z, largest)).sum();
            let wanted = share(total, params.top_p);
            let mut sum = 0;
            let last = sorted.iter().copied().find(|z| {
                sum += u128::from(weight(*z, largest));
                sum >= wanted
            });
            let last = last.unwrap_or(f32::NEG_INFINITY);
            sorted.retain(|z| *z >= last);
        }
        sorted.last().copied().unwrap_or(f32::NEG_INFINITY)
    }
}

/// Which tokens the columns of a row of logits are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Columns<'a> {
    /// Column `i` is token `first + i`: a shard of a vocabulary of `vocab` tokens, or all of it.
    From { first: usize, vocab: usize },
    /// Column `i` is the `i`-th of these, which ascend.
    Of(&'a [TokenId]),
}

impl Columns<'_> {
    pub(crate) fn token(self, column: usize) -> TokenId {
        match self {
            Self::From { first, .. } => TokenId((first + column) as u32),
            Self::Of(tokens) => tokens[column],
        }
    }

    fn find(self, token: TokenId) -> Option<usize> {
        match self {
            Self::From { first, .. } => (token.0 as usize).checked_sub(first),
            Self::Of(tokens) => tokens.binary_search(&token).ok(),
        }
    }

    /// All tokens of the columns are below this.
    fn num_tokens(self, num_columns: usize) -> usize {
        match self {
            Self::From { first, .. } => first + num_columns,
            Self::Of(tokens) => tokens.last().map_or(0, |token| token.0 as usize + 1),
        }
    }
}

/// Memory to count a text's tokens in; all zeros between its uses.
#[derive(Debug, Default)]
pub(crate) struct TokenCounts(Vec<u32>);

impl TokenCounts {
    /// Lends out, by token, twice the number of times that the output has it, plus 1 if it is in the text at all.
    fn of(
        &mut self,
        num_tokens: usize,
        prompt: &[TokenId],
        output: [&[TokenId]; 2],
        use_them: impl FnOnce(&mut [u32]),
    ) {
        self.0.resize(num_tokens.max(self.0.len()), 0);
        let counts = &mut self.0[..];
        let slot = |token: &TokenId| Some(token.0 as usize).filter(|token| *token < num_tokens);
        prompt.iter().filter_map(slot).for_each(|token| counts[token] |= 1);
        let of_output = || output.into_iter().flatten().filter_map(slot);
        of_output().for_each(|token| counts[token] = (counts[token] | 1) + 2);
        use_them(counts);
        prompt.iter().filter_map(slot).chain(of_output()).for_each(|token| counts[token] = 0);
    }
}

/// `logit / temperature`, finite if the logit is.
#[inline(always)]
pub(crate) fn scaled(logit: f32, temperature: f32) -> f32 {
    let z = logit / temperature;
    if logit.is_finite() { z.clamp(f32::MIN, f32::MAX) } else { z }
}

/// `whole * part` rounded up, exactly; `part` from 0 to 1.
pub(crate) fn share(whole: u64, part: f32) -> u128 {
    // part = mantissa / 2^shift
    let bits = part.to_bits();
    let exponent = bits >> 23;
    let mantissa = if exponent == 0 { bits } else { bits & 0x7F_FFFF | 0x80_0000 };
    let shift = 150 - exponent.max(1);
    let product = u128::from(whole) * u128::from(mantissa);
    if shift >= 128 { u128::from(product > 0) } else { (product + (1 << shift) - 1) >> shift }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EMPTY: SamplingContext<'static> =
        SamplingContext { position: 0, prompt: &[], output: &[], path: &[], allowed: None };

    fn sampler(change: impl FnOnce(&mut SamplingParams)) -> Sampler {
        let mut params = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        change(&mut params);
        Sampler::new(params).unwrap()
    }

    /// Which tokens ever come out, over many positions.
    fn support(sampler: &Sampler, logits: &[f32], context: SamplingContext<'_>) -> Vec<u32> {
        let draw =
            |position| sampler.choose(logits, SamplingContext { position, ..context }).unwrap().token().0;
        let mut seen: Vec<u32> = (0..4000).map(draw).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    /// The law of one draw against the softmax, by a G-test with 5 degrees of freedom at about 1e-6.
    #[test]
    fn draws_have_the_softmax_law() {
        let logits = [0.3f32, -1.2, 2.0, 0.0, 1.1, -0.4];
        let g = |sampler: &Sampler, temperature: f64, num: u32| {
            let weights: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut counts = [0u32; 6];
            for position in 0..num {
                let context = SamplingContext { position, ..EMPTY };
                counts[sampler.choose(&logits, context).unwrap().token().0 as usize] += 1;
            }
            let term = |(count, weight): (&u32, &f64)| {
                let expected = f64::from(num) * weight / total;
                2.0 * f64::from(*count) * (f64::from(*count) / expected).ln()
            };
            counts.iter().zip(&weights).filter(|(count, _)| **count > 0).map(term).sum::<f64>()
        };
        for temperature in [0.5f32, 1.0, 1.5] {
            let sampler = sampler(|p| p.temperature = temperature);
            let seen = g(&sampler, f64::from(temperature), 60_000);
            assert!(seen < 36.0, "G = {seen} at {temperature}");
        }
        // The control: a temperature that is off by a tenth shows.
        assert!(g(&sampler(|p| p.temperature = 1.1), 1.0, 60_000) > 36.0);
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 1/2, 1/4, 1/8, 1/16, 1/16.
        let logits = [3.0f32, 4.0, 2.0, 1.0, 1.0].map(|x| x * std::f32::consts::LN_2);
        let keeps = |change: fn(&mut SamplingParams)| support(&sampler(change), &logits, EMPTY);
        assert_eq!(keeps(|_| {}), [0, 1, 2, 3, 4]);
        assert_eq!(keeps(|p| p.top_k = 2), [0, 1]);
        assert_eq!(keeps(|p| p.top_k = 4), [0, 1, 2, 3, 4], "equal logits stay together");
        assert_eq!(keeps(|p| p.top_p = 0.5), [1]);
        assert_eq!(keeps(|p| p.top_p = 0.51), [0, 1]);
        assert_eq!(keeps(|p| p.top_p = 0.76), [0, 1, 2]);
        assert_eq!(keeps(|p| p.top_p = 1e-9), [1]);
        assert_eq!(keeps(|p| p.min_p = 0.24), [0, 1, 2]);
        assert_eq!(keeps(|p| p.min_p = 0.26), [0, 1]);
        assert_eq!(keeps(|p| p.min_p = 1.0), [1]);
        // top_p looks at what top_k left: 2/3 of it is the first of two. Of all it would be the first two.
        assert_eq!(keeps(|p| (p.top_k, p.top_p) = (2, 0.6)), [1]);
        assert_eq!(keeps(|p| p.top_p = 0.6), [0, 1], "the control");
    }

    #[test]
    fn penalties_bias_and_mask_change_logits() {
        let greedy = |change: fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            change(&mut params);
            Sampler::new(params).unwrap()
        };
        let logits = [1.0f32, 2.0, 1.9, -1.0];
        let tokens = |ids: &[u32]| ids.iter().map(|id| TokenId(*id)).collect::<Vec<_>>();
        let (one, two) = (tokens(&[1]), tokens(&[1, 1]));
        let pick = |sampler: &Sampler, context| sampler.choose(&logits, context).unwrap().token().0;
        let repetition = greedy(|p| p.repetition_penalty = 1.2);
        assert_eq!(pick(&repetition, EMPTY), 1);
        assert_eq!(pick(&repetition, SamplingContext { prompt: &one, ..EMPTY }), 2);
        let presence = greedy(|p| p.presence_penalty = 0.2);
        assert_eq!(
            pick(&presence, SamplingContext { prompt: &one, ..EMPTY }),
            1,
            "the prompt does not count"
        );
        assert_eq!(pick(&presence, SamplingContext { output: &one, ..EMPTY }), 2);
        assert_eq!(pick(&presence, SamplingContext { path: &one, ..EMPTY }), 2, "a draft on the path does");
        let frequency = greedy(|p| p.frequency_penalty = 0.06);
        assert_eq!(pick(&frequency, SamplingContext { output: &one, ..EMPTY }), 1);
        assert_eq!(pick(&frequency, SamplingContext { output: &one, path: &one, ..EMPTY }), 2);
        assert_eq!(pick(&frequency, SamplingContext { path: &two, ..EMPTY }), 2);
        let bias = greedy(|p| p.logit_bias = vec![(TokenId(3), 9.0), (TokenId(3), 4.0), (TokenId(99), 1.0)]);
        let key = bias.choose(&logits, EMPTY).unwrap();
        assert_eq!((key.token(), key.score()), (TokenId(3), 3.0), "the last entry counts");
        assert_eq!(pick(&greedy(|_| {}), SamplingContext { allowed: Some(&[0b1001]), ..EMPTY }), 0);
        let masked = SamplingContext { allowed: Some(&[0]), ..EMPTY };
        assert_eq!(greedy(|_| {}).choose(&logits, masked).unwrap_err().kind(), crate::ErrorKind::Fault);
        let long = SamplingContext { allowed: Some(&[1, 1]), ..EMPTY };
        assert_eq!(greedy(|_| {}).choose(&logits, long).unwrap_err().kind(), crate::ErrorKind::Misuse);
        // A token of another vocabulary in the text is nobody's logit.
        assert_eq!(pick(&repetition, SamplingContext { output: &tokens(&[4_000_000]), ..EMPTY }), 1);
    }

    #[test]
    fn odd_rows_have_answers_or_errors() {
        let inf = f32::INFINITY;
        for temperature in [1e-6, 0.7, 1e6] {
            let sampler = sampler(|p| (p.temperature, p.top_p, p.min_p) = (temperature, 0.9, 0.01));
            assert_eq!(sampler.choose(&[5.0], EMPTY).unwrap().token(), TokenId(0));
            assert_eq!(sampler.choose(&[0.0, inf, 3e38], EMPTY).unwrap().token(), TokenId(1));
            assert_eq!(sampler.choose(&[-inf, -3e38, -inf], EMPTY).unwrap().token(), TokenId(1));
            for bad in [&[][..], &[-inf; 3], &[1.0, f32::NAN]] {
                assert_eq!(sampler.choose(bad, EMPTY).unwrap_err().kind(), crate::ErrorKind::Fault);
            }
        }
        // Cold is greedy, hot is uniform.
        let logits: Vec<f32> = (0..50).map(|i| (i * 17 % 50) as f32 / 10.0).collect();
        assert_eq!(support(&sampler(|p| p.temperature = 1e-6), &logits, EMPTY), [47]);
        assert_eq!(support(&sampler(|p| p.temperature = 1e6), &logits, EMPTY).len(), 50);
        type Change = fn(&mut SamplingParams);
        let bad: [Change; 11] = [
            |p| p.temperature = -1.0,
            |p| p.temperature = f32::MIN_POSITIVE, // all scores would be infinite
            |p| p.temperature = 2e6,
            |p| p.temperature = f32::NAN,
            |p| p.top_p = 0.0,
            |p| p.top_p = 1.1,
            |p| p.min_p = -0.1,
            |p| p.repetition_penalty = 0.0,
            |p| p.presence_penalty = f32::INFINITY,
            |p| p.frequency_penalty = f32::NAN,
            |p| p.logit_bias = vec![(TokenId(0), f32::NAN)],
        ];
        for change in bad {
            let mut params = SamplingParams::default();
            change(&mut params);
            assert_eq!(Sampler::new(params).unwrap_err().kind(), crate::ErrorKind::Misuse);
        }
    }

    proptest! {
        /// `top_p` against the definition in f64, away from its rounding.
        #[test]
        fn top_p_is_the_smallest_set(
            row in prop::collection::vec(-8.0f32..8.0, 1..60), top_p in 0.01f32..0.99, top_k in 0usize..40,
        ) {
            let sampler = sampler(|p| (p.top_p, p.top_k) = (top_p, top_k));
            let threshold = sampler.threshold(&row);
            let mut sorted = row.clone();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            if top_k > 0 && top_k < sorted.len() {
                let last = sorted[top_k - 1];
                sorted.retain(|z| *z >= last);
            }
            let weights: Vec<f64> = sorted.iter().map(|z| f64::from(z - sorted[0]).exp()).collect();
            let wanted = weights.iter().sum::<f64>() * f64::from(top_p);
            let mut sum = 0.0;
            let count = 1 + weights.iter().position(|w| { sum += w; sum >= wanted }).unwrap();
            prop_assume!((sum - wanted).abs() > 1e-5 && (sum - weights[count - 1] - wanted).abs() > 1e-5);
            prop_assert_eq!(threshold, sorted[count - 1]);
        }

        /// A choice is the same however the row was cut, once its threshold is known to all.
        #[test]
        fn temperature_zero_is_choose(row in prop::collection::vec(-4i8..4, 1..60)) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let greedy = Sampler::new(SamplingParams::default()).unwrap();
            prop_assert_eq!(greedy.choose(&row, EMPTY).unwrap(), choose(&row).unwrap());
        }

        #[test]
        fn shares_are_exact(whole in 0u64..1 << 58, part in 0.0f32..=1.0) {
            let seen = share(whole, part);
            prop_assert!(seen <= u128::from(whole));
            // f64 holds the product of 58 and 24 bits only roughly.
            let want = whole as f64 * f64::from(part);
            prop_assert!((seen as f64 - want).abs() <= 1.0 + want * 1e-15);
            prop_assert_eq!(share(whole, 1.0), u128::from(whole));
        }
    }
}
