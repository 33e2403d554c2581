//! From a row of logits to the target's token: the specification that every backend matches bit for bit.
//!
//! [`choose`] is the choice at temperature 0; a [`Sampler`] has all parameters of a request. The result is a
//! [`ChoiceKey`], so that blocks, threads and vocabulary shards can each choose and then combine by maximum
//! without changing the answer.

mod log_prob;
mod math;
mod noise;
mod sampler;

use crate::error::{Error, Result};
use crate::tree::TokenId;

pub use log_prob::TokenLogProb;
pub(crate) use math::{LARGEST_WEIGHT, weight};
pub use noise::gumbel;
pub(crate) use noise::{BLOCK, gumbel_row, noise_bound, uniform_block};
pub(crate) use sampler::{Columns, TokenCounts, scaled, share};
pub use sampler::{Sampler, SamplingContext, SamplingParams};

/// A score and its token in one ordered word: the larger key is the higher score, and at equal scores the
/// lower token id.
///
/// The high half holds the score's bits, mapped so that they compare as unsigned integers; the low half
/// the token's complement. The maximum of keys is associative and commutative.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct ChoiceKey(pub u64);

impl ChoiceKey {
    /// Packs a score that is not NaN. `-0.0` counts as `0.0`, as it does for `==`.
    pub fn new(score: f32, token: TokenId) -> Self {
        let ordered = ordered_bits(score + 0.0); // -0.0 + 0.0 is 0.0
        Self(u64::from(ordered) << 32 | u64::from(!token.0))
    }

    /// The chosen token.
    pub fn token(self) -> TokenId {
        TokenId(!(self.0 as u32)) // the low half, on purpose
    }

    /// The chosen token's score.
    pub fn score(self) -> f32 {
        from_ordered_bits((self.0 >> 32) as u32)
    }

    /// The key of a row with a NaN at `token`: in its logits, or else (`is_made`) once penalties and bias are applied.
    pub(crate) fn nan(token: TokenId, is_made: bool) -> Self {
        Self((LAST_NAN - u64::from(is_made)) << 32 | u64::from(!token.0))
    }

    /// The key of a row, combined from all its parts, or what is wrong with the row.
    ///
    /// Parts of a row that are worked on apart, such as vocabulary shards on GPUs, report a NaN by a key above
    /// those of all scores: the largest key is then that of the row's first NaN. A part without any token above
    /// negative infinity has key 0.
    ///
    /// # Errors
    /// *Fault* when the row holds a NaN, or no token above negative infinity.
    pub fn checked(self) -> Result<Self> {
        if self.0 >> 32 >= FIRST_NAN { Err(nan_logit(self.token())) } else { reject_masked(self) }
    }
}

/// Where scores end and NaNs begin in the high half of a key: first those that penalties and bias have made, then
/// those of the logits themselves.
const FIRST_NAN: u64 = 0xFFFF_FFFE;
const LAST_NAN: u64 = 0xFFFF_FFFF;

/// Bits that compare as their numbers do.
#[inline(always)]
pub(crate) fn ordered_bits(number: f32) -> u32 {
    let bits = number.to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

pub(crate) fn from_ordered_bits(ordered: u32) -> f32 {
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}

/// Chooses the target's token from one row of logits, `[vocab]`: the largest, at ties the lowest id.
///
/// # Errors
/// *Fault* when the row holds a NaN, or no token above negative infinity (an empty row, or all masked).
pub fn choose(logits: &[f32]) -> Result<ChoiceKey> {
    let mut best = ChoiceKey::default();
    for (token, &logit) in (0..).map(TokenId).zip(logits) {
        if logit.is_nan() {
            return Err(nan_logit(token));
        }
        best = best.max(ChoiceKey::new(logit, token));
    }
    reject_masked(best)
}

pub(crate) fn nan_logit(token: TokenId) -> Error {
    Error::fault("logits row", "no NaN", format_args!("NaN at token {}", token.0))
}

/// The last check of every implementation: somebody must have won.
pub(crate) fn reject_masked(best: ChoiceKey) -> Result<ChoiceKey> {
    if best > ChoiceKey::new(f32::NEG_INFINITY, TokenId(0)) {
        Ok(best)
    } else {
        Err(Error::fault("logits row", "a token above negative infinity", "none"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_lowest_id_and_zeros_are_equal() {
        assert_eq!(choose(&[1.0, 3.0, 3.0]).unwrap().token(), TokenId(1));
        assert_eq!(choose(&[-0.0, 0.0]).unwrap().token(), TokenId(0));
        assert_eq!(choose(&[f32::NEG_INFINITY, -1e30]).unwrap().token(), TokenId(1));
        assert_eq!(choose(&[0.0, f32::INFINITY]).unwrap().token(), TokenId(1));
    }

    #[test]
    fn rows_without_an_answer_are_faults() {
        for row in [&[][..], &[f32::NEG_INFINITY; 3], &[0.0, f32::NAN, 1.0]] {
            assert_eq!(choose(row).unwrap_err().kind(), crate::ErrorKind::Fault);
        }
        // The control: one finite value is enough.
        assert!(choose(&[f32::NEG_INFINITY, f32::MIN]).is_ok());
    }

    #[test]
    fn keys_say_what_is_wrong_with_their_row() {
        let nan = |high: u64, token: u32| ChoiceKey::nan(TokenId(token), high == 0xFFFF_FFFE);
        assert_eq!(nan(0xFFFF_FFFE, 7), ChoiceKey(0xFFFF_FFFE << 32 | u64::from(!7u32)));
        assert_eq!(nan(0xFFFF_FFFF, 7), ChoiceKey(0xFFFF_FFFF << 32 | u64::from(!7u32)));
        let best = choose(&[1.0, f32::INFINITY]).unwrap();
        assert_eq!(best.checked().unwrap(), best);
        for (key, wanted) in [
            (nan(0xFFFF_FFFF, 7).max(nan(0xFFFF_FFFF, 9)).max(best), "NaN at token 7"),
            (nan(0xFFFF_FFFE, 3).max(best), "NaN at token 3"),
            (nan(0xFFFF_FFFE, 3).max(nan(0xFFFF_FFFF, 7)), "NaN at token 7"),
            (ChoiceKey::default(), "a token above negative infinity"),
            (ChoiceKey::new(f32::NEG_INFINITY, TokenId(0)), "a token above negative infinity"),
        ] {
            assert!(key.checked().unwrap_err().to_string().contains(wanted), "{key:?}");
        }
    }

    proptest! {
        #[test]
        fn keys_order_as_scores_do(a in any::<f32>(), b in any::<f32>(), i in 0u32.., j in 0u32..) {
            prop_assume!(!a.is_nan() && !b.is_nan());
            let (x, y) = (ChoiceKey::new(a, TokenId(i)), ChoiceKey::new(b, TokenId(j)));
            let by_parts = a.partial_cmp(&b).unwrap().then(j.cmp(&i));
            prop_assert_eq!(x.cmp(&y), by_parts);
            prop_assert_eq!((x.token(), x.score()), (TokenId(i), a));
        }

        #[test]
        fn shards_combine_by_maximum(row in prop::collection::vec(-4i8..4, 2..60), cut in 1usize..59) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let cut = cut.min(row.len() - 1);
            let right = choose(&row[cut..]).unwrap();
            let right = ChoiceKey::new(right.score(), TokenId(right.token().0 + cut as u32));
            prop_assert_eq!(choose(&row[..cut]).unwrap().max(right), choose(&row).unwrap());
        }
    }
}
