//! The noise of sampling: a fixed function of the request's seed, the output position and the token.
//!
//! Sampling at temperature T is `argmax(logit / T + G)` with independent Gumbel noise `G` (Gumbel, 1954; the
//! "Gumbel-max trick"). Here `G` belongs to a position and a token, not to a step or a row, so the text that comes
//! out does not depend on whether, or how, it was speculated.

use multiversion::multiversion;

use super::math::ln;
use crate::tree::TokenId;

/// What a stream of noise is for: streams are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Noise = 0,
    /// More bits for the smallest values, which decide who wins in a large vocabulary.
    Refinement = 1,
}

/// Uniform values below this have 32 more bits.
const REFINED_BELOW: u32 = 1 << 12;

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of `N` counters side by side,
/// each word of theirs in a row of its own.
#[inline(always)]
fn philox<const N: usize>(mut counter: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    for _ in 0..10 {
        let before = counter;
        for i in 0..N {
            let a = u64::from(before[0][i]) * 0xD251_1F53;
            let b = u64::from(before[2][i]) * 0xCD9E_8D57;
            counter[0][i] = (b >> 32) as u32 ^ before[1][i] ^ key[0];
            counter[1][i] = b as u32;
            counter[2][i] = (a >> 32) as u32 ^ before[3][i] ^ key[1];
            counter[3][i] = a as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

fn words(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

fn uniform_bits(seed: u64, position: u32, token: u32, purpose: Purpose) -> u32 {
    let counter = [[position], [token / 4], [purpose as u32], [0]];
    philox(counter, words(seed))[(token % 4) as usize][0]
}

/// Tokens of a block of noise bits.
pub(crate) const BLOCK: usize = 64;

/// The uniform bits of `BLOCK` tokens from `first`, a multiple of 4, in one go: each loop is over 16 counters.
#[inline(always)]
pub(crate) fn uniform_block(seed: u64, position: u32, first: u32) -> [u32; BLOCK] {
    const N: usize = BLOCK / 4;
    let mut counter = [[position; N], [0; N], [Purpose::Noise as u32; N], [0; N]];
    for (i, word) in counter[1].iter_mut().enumerate() {
        *word = (first / 4).wrapping_add(i as u32);
    }
    let counter = philox(counter, words(seed));
    let mut bits = [0; BLOCK];
    for i in 0..N {
        for lane in 0..4 {
            bits[4 * i + lane] = counter[lane][i];
        }
    }
    bits
}

/// No less than the noise that these uniform bits give: -ln v, with v rounded down to a power of two.
#[inline(always)]
pub(crate) fn noise_bound(bits: u32) -> f32 {
    // 24 bits are exact in f32; their exponent is the place of the highest one.
    let exponent = ((bits >> 8) as f32).to_bits() >> 23; // 127 + place, 0 for none
    (151.0 - exponent as f32) * 0.693_148 // a little more than ln 2
}

/// Standard Gumbel noise for one token at one output position (prompt length plus number of outputs before).
///
/// Computed in f64 from 32 uniform bits, 64 in the tail that wins; rounded once to f32.
pub fn gumbel(seed: u64, position: u32, token: u32) -> f32 {
    let bits = uniform_bits(seed, position, token, Purpose::Noise);
    let exponential = match bits {
        0..REFINED_BELOW => {
            let more = uniform_bits(seed, position, token, Purpose::Refinement);
            small_exponential(bits, more)
        }
        _ => exponential(bits),
    };
    -ln(exponential) as f32
}

/// [`gumbel`] of many tokens at one position: `noise[i]` is of `tokens[i]`. Both are equally long.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
pub(crate) fn gumbel_row(seed: u64, position: u32, tokens: &[TokenId], noise: &mut [f32]) {
    const N: usize = 16; // side by side
    for (tokens, noise) in tokens.chunks(N).zip(noise.chunks_mut(N)) {
        let mut counter = [[position; N], [0; N], [Purpose::Noise as u32; N], [0; N]];
        for (word, token) in counter[1].iter_mut().zip(tokens) {
            *word = token.0 / 4;
        }
        let words = philox(counter, words(seed));
        let mut bits = [u32::MAX; N];
        for (i, (bits, token)) in bits.iter_mut().zip(tokens).enumerate() {
            *bits = words[(token.0 % 4) as usize][i];
        }
        let mut row = [0.0; N];
        for (value, bits) in row.iter_mut().zip(bits) {
            *value = -ln(exponential(bits)) as f32;
        }
        for (((noise, value), bits), token) in noise.iter_mut().zip(row).zip(bits).zip(tokens) {
            *noise = if bits < REFINED_BELOW { gumbel(seed, position, token.0) } else { value };
        }
    }
}

/// `-ln(1 - v)` for `v = (2 bits + 1) / 2^33`: exponentially distributed, strictly increasing in `bits`.
#[inline(always)]
fn exponential(bits: u32) -> f64 {
    // Exact: an odd integer below 2^33.
    let complement = ((1u64 << 33) - (2 * u64::from(bits) + 1)) as f64 / (1u64 << 33) as f64;
    -ln(complement)
}

/// The same for `v = (2 r + 1) / 2^65` with `r = bits * 2^32 + more` and small `bits`.
fn small_exponential(bits: u32, more: u32) -> f64 {
    let r = u64::from(bits) << 32 | u64::from(more);
    let v = (r as f64 + 0.5) / (1u64 << 32) as f64 / (1u64 << 32) as f64;
    // v < 2^-20: the next term is below 2^-61 of the first.
    v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution.
    #[test]
    fn philox_is_philox() {
        let philox = |counter: [u32; 4], key| philox(counter.map(|word| [word]), key).map(|[word]| word);
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        let counter = [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344];
        let answer = [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1];
        assert_eq!(philox(counter, [0xA409_3822, 0x299F_31D0]), answer);
    }

    /// The law of the noise over inputs `range`: strictly monotone, and the distribution function right to 2^-32.
    fn check_law(range: impl Iterator<Item = u32>) -> u64 {
        let (mut before, mut num_checked) = (None, 0);
        for bits in range {
            let e = exponential(bits);
            assert!(before.is_none_or(|before| e > before), "{bits}");
            let cdf = -(-e).exp_m1();
            let (low, high) = (f64::from(bits) / 4_294_967_296.0, (f64::from(bits) + 1.0) / 4_294_967_296.0);
            assert!(low - 1e-15 <= cdf && cdf <= high + 1e-15, "{bits}: {cdf} not in {low}..{high}");
            before = Some(e);
            num_checked += 1;
        }
        num_checked
    }

    /// `EAGLE_VERIFY_ALL_NOISE=1` checks all 2^32 inputs; else runs of 64 neighbours, everywhere.
    #[test]
    fn the_noise_has_the_exponential_law() {
        if std::env::var_os("EAGLE_VERIFY_ALL_NOISE").is_some() {
            assert_eq!(check_law(0..=u32::MAX), 1 << 32);
            return;
        }
        let mut num_checked = 0;
        for start in (0..=u32::MAX - 64).step_by(1_000_003) {
            num_checked += check_law(start..start + 64);
        }
        num_checked += check_law(0..100_000) + check_law(u32::MAX - 100_000..=u32::MAX);
        assert!(num_checked > 400_000);
    }

    #[test]
    fn blocks_are_the_same_bits_and_bounds_hold() {
        for (seed, position, first) in [(1, 0, 0), (u64::MAX / 3, 17, 4096), (9, u32::MAX, u32::MAX - 63)] {
            let block = uniform_block(seed, position, first);
            for (i, bits) in block.into_iter().enumerate() {
                let token = first + i as u32;
                assert_eq!(bits, uniform_bits(seed, position, token, Purpose::Noise));
                assert!(gumbel(seed, position, token) <= noise_bound(bits));
            }
        }
        let noise =
            |bits| -ln(if bits < REFINED_BELOW { small_exponential(bits, 0) } else { exponential(bits) });
        for bits in (0..32).map(|place| 1 << place).chain(0..5000).chain(u32::MAX - 5000..=u32::MAX) {
            let (seen, bound) = (noise(bits) as f32, noise_bound(bits));
            assert!(seen <= bound, "{bits}: {seen} {bound}");
            assert!(bits < 512 || bound < seen.max(0.0) + 1.7, "{bits}: close enough to be of use");
        }
    }

    /// Refined values lie within the cell of their first 32 bits, in order, and meet the others.
    #[test]
    fn refinement_fills_its_cell() {
        for bits in 0..REFINED_BELOW {
            let cell = [0, 1, u32::MAX / 2, u32::MAX - 1, u32::MAX].map(|more| small_exponential(bits, more));
            assert!(cell.windows(2).all(|pair| pair[0] < pair[1]), "{bits}");
            let (low, middle, high) = (cell[0], exponential(bits), cell[4]);
            assert!(low < middle && middle < high, "{bits}: {low:e} {middle:e} {high:e}");
            assert!(high < exponential(bits + 1));
        }
    }

    #[test]
    fn noise_is_gumbel_and_its_keys_are_independent() {
        let sample: Vec<f64> = (0..200_000).map(|i| f64::from(gumbel(7, i / 1000, i % 1000))).collect();
        let mean = sample.iter().sum::<f64>() / sample.len() as f64;
        let variance = sample.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / sample.len() as f64;
        // Euler's constant and pi^2 / 6, six standard errors.
        assert!((mean - 0.577_215_66).abs() < 6.0 * 1.2825 / 200_000f64.sqrt(), "{mean}");
        assert!((variance - 1.644_934).abs() < 0.05, "{variance}");
        let base = gumbel(7, 3, 5);
        assert!(
            [gumbel(8, 3, 5), gumbel(7 + (1 << 32), 3, 5), gumbel(7, 4, 5), gumbel(7, 3, 6), gumbel(7, 3, 9)]
                .iter()
                .all(|other| *other != base)
        );
        assert_eq!(gumbel(7, 3, 5), base);
    }

    #[test]
    fn rows_are_the_same_noise() {
        let tokens: Vec<TokenId> = (0..5_000).map(|i| TokenId(i * 7 % 3 + i * 11)).collect();
        for len in [0, 1, 15, 16, 17, 5_000] {
            for position in 0..if len == 5_000 { 2_000 } else { 3 } {
                let (tokens, mut row) = (&tokens[..len], vec![0.0; len]);
                gumbel_row(9, position, tokens, &mut row);
                // Few are refined: a sample, and the largest, which those are among.
                let mut places: Vec<usize> = (position as usize % 97..len).step_by(97).collect();
                places.extend((0..len).max_by(|a, b| row[*a].total_cmp(&row[*b])));
                for i in places {
                    assert_eq!(row[i].to_bits(), gumbel(9, position, tokens[i].0).to_bits());
                }
            }
        }
    }

    /// The largest of many is where it must be: the tail that decides has its full resolution.
    #[test]
    fn the_winning_tail_is_fine() {
        let e = |bits, more| small_exponential(bits, more);
        assert!(e(0, 0) < 1e-19 && e(0, 0) > 0.0);
        let neighbours = e(0, 1 << 20) / e(0, (1 << 20) + 1);
        assert!((neighbours - 1.0).abs() < 1e-5);
        // The control: without refinement the two smallest values differ threefold.
        assert!((exponential(1) / exponential(0) - 3.0).abs() < 1e-6);
    }
}
