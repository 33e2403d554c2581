//! What the target thought of an emitted token.

use std::cmp::Reverse;

use super::ChoiceKey;
use crate::tree::TokenId;

/// A token's probability under the target's logits as they came, before temperature, penalties, biases, masks and
/// filters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogProb {
    /// `ln softmax(logits)[token]`, in nats.
    pub log_prob: f32,
    /// 1 + the number of tokens with a larger logit.
    pub rank: usize,
    /// The likeliest tokens and their log-probabilities, best first, at ties the lowest id first.
    pub alternatives: Vec<(TokenId, f32)>,
}

impl TokenLogProb {
    /// Of `token` in a row of logits, `[vocab]`, with the `count` likeliest tokens. The sum is in f64; a backend's
    /// own is within 1e-4 of it. A logit that is NaN or +infinity makes it NaN.
    pub fn new(logits: &[f32], token: TokenId, count: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - f64::from(largest)).exp()).sum();
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by_key(|id| Reverse(ChoiceKey::new(logits[*id as usize], TokenId(*id))));
        order.truncate(count);
        Self::from_parts(logits, token, (largest, sum.ln() as f32), order.into_iter())
    }

    /// From the largest logit, the logarithm of the sum of exponentials of distances to it, and the likeliest tokens
    /// in order.
    pub(crate) fn from_parts(
        logits: &[f32],
        token: TokenId,
        (largest, ln_sum): (f32, f32),
        best: impl Iterator<Item = u32>,
    ) -> Self {
        let logit = logits.get(token.0 as usize).copied().unwrap_or(f32::NAN);
        // The difference first: logits may be much larger than it.
        let log_prob = |logit: f32| (logit - largest) - ln_sum;
        Self {
            log_prob: log_prob(logit),
            rank: 1 + logits.iter().filter(|other| **other > logit).count(),
            alternatives: best.map(|id| (TokenId(id), log_prob(logits[id as usize]))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_ranks_and_alternatives() {
        let logits = [0.0, 2.0f32.ln(), 0.0, 4.0f32.ln(), f32::NEG_INFINITY]; // 1/8, 2/8, 1/8, 4/8, 0
        let of = |token, count| TokenLogProb::new(&logits, TokenId(token), count);
        assert!((of(1, 0).log_prob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!([3, 1, 0, 2, 4].map(|token| of(token, 0).rank), [1, 2, 3, 3, 5]);
        assert_eq!(of(4, 0).log_prob, f32::NEG_INFINITY);
        let ids: Vec<u32> = of(0, 4).alternatives.iter().map(|(token, _)| token.0).collect();
        assert_eq!(ids, [3, 1, 0, 2]);
        assert_eq!(of(0, 9).alternatives.len(), 5);
        for large in [1e4, 3e7] {
            assert!((TokenLogProb::new(&[large; 2], TokenId(1), 0).log_prob - 0.5f32.ln()).abs() < 1e-6);
        }
        assert!(TokenLogProb::new(&[0.0, f32::NAN], TokenId(0), 1).log_prob.is_nan());
        assert_eq!(TokenLogProb::new(&[5.0], TokenId(0), 1).log_prob, 0.0);
    }
}
