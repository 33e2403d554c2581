//! Element-wise and row-wise operations, vectorised by the compiler for each instruction set.
//!
//! The dispatched functions use only operations that IEEE 754 rounds exactly, fused multiply-add among them:
//! the same bits from every version of a function. (Logarithms and rotary tables come from the C library.)

use multiversion::multiversion;

use super::Cpu;
use crate::error::{Error, Result, expect_len};
use crate::sampling::ChoiceKey;
use crate::tree::TokenId;

/// Elements that a reduction keeps apart until its end. Its shape depends on the length alone.
const LANES: usize = 32;

/// `e^x` to about 1 ulp, by Cody-Waite reduction to `2^n e^r` and a polynomial; 0 below -87, `e^88` above 88,
/// NaN for NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    let clamped = if x > 88.0 { 88.0 } else { x };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 5e-1);
    let y = (p * r).mul_add(r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -87.0 { 0.0 } else { y * power }
}

/// Replaces scores by `exp((score - max) * scale)` and returns the sum of those weights.
///
/// `scale` is positive. Lane `i` sums every 32nd weight from the `i`-th on, in order; the lanes are added
/// pairwise.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
pub(super) fn softmax_weights(scores: &mut [f32], scale: f32) -> f32 {
    let max = max(scores);
    let mut sums = [0.0f32; LANES];
    let mut weigh = |chunk: &mut [f32; LANES]| {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            *score = exp((*score - max) * scale);
            *sum += *score;
        }
    };
    let (chunks, rest) = scores.as_chunks_mut();
    chunks.iter_mut().for_each(&mut weigh);
    let mut padded = pad(rest); // weights of 0
    weigh(&mut padded);
    rest.copy_from_slice(&padded[..rest.len()]);
    fold(sums, |a, b| a + b)
}

/// A full chunk, filled up with negative infinity. Loops over arrays of a fixed length become straight
/// vector code; loops over what is left of a slice don't.
#[inline(always)]
fn pad(rest: &[f32]) -> [f32; LANES] {
    let mut padded = [f32::NEG_INFINITY; LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// Combines lane `i` with lane `i + n / 2`, then halves `n`: a tree, so that a vector does it in five steps.
#[inline(always)]
fn fold(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [16, 8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = combine(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// The largest element that is not NaN; negative infinity if there is none.
#[inline(always)]
fn max(values: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut compare = |chunk: &[f32; LANES]| {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, value);
        }
    };
    let (chunks, rest) = values.as_chunks();
    chunks.iter().for_each(&mut compare);
    compare(&pad(rest));
    fold(lanes, greater)
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn silu_mul_row(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// The gated activation of a Llama MLP: `out = silu(gate) * up`.
///
/// `gate_up` is `[rows, 2, width]`, the output of a stacked gate and up projection; `out` is
/// `[rows, width]`. f32, each element by itself.
///
/// # Errors
/// *Misuse* when the lengths are not the same number of rows.
pub fn silu_mul(cpu: &Cpu, gate_up: &[f32], width: usize, out: &mut [f32]) -> Result<()> {
    let num_rows = out.len() / width.max(1);
    expect_len("activation output", num_rows * width, out.len())?;
    expect_len("gate and up projections", 2 * out.len(), gate_up.len())?;
    if num_rows == 0 {
        return Ok(());
    }
    cpu.team.run_parts(out, width, &|row, out| {
        let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
        silu_mul_row(gate, up, out);
    });
    Ok(())
}

/// The largest value, or the place of the first NaN.
pub(super) fn largest(values: &[f32]) -> Result<f32, usize> {
    let (max, has_nan) = max_and_nan(values);
    let nan = has_nan.then(|| values.iter().position(|value| value.is_nan()).unwrap_or_default());
    nan.map_or(Ok(max), Err)
}

/// [`choose`](crate::sampling::choose), fast, from the columns of a row that start with token `first`: errors are in
/// the key.
pub(super) fn choose(logits: &[f32], first: usize) -> ChoiceKey {
    let token = |column| TokenId((first + column) as u32);
    let max = match largest(logits) {
        Ok(max) => max,
        Err(column) => return ChoiceKey::nan(token(column), false),
    };
    let place = logits.chunks(LANES).position(|chunk| chunk.contains(&max)).unwrap_or_default();
    let offset = logits.iter().skip(place * LANES).position(|logit| *logit == max);
    // A row that is all negative infinity, or empty, has a position or not; its key is refused either way.
    ChoiceKey::new(max, token(place * LANES + offset.unwrap_or_default()))
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn max_and_nan(values: &[f32]) -> (f32, bool) {
    let (mut largest, mut nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    for chunk in values.chunks(LANES) {
        for ((value, largest), nan) in chunk.iter().zip(&mut largest).zip(&mut nan) {
            *largest = if *value > *largest { *value } else { *largest };
            *nan |= value.is_nan();
        }
    }
    (fold(largest, |a, b| if b > a { b } else { a }), nan.contains(&true))
}

/// `ln(sum(exp(values)))` in two parts: the largest, and the rest; which is NaN if a value is NaN or +infinity, or all
/// are negative infinity.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
pub(super) fn log_sum_exp(values: &[f32]) -> (f32, f32) {
    let max = max(values);
    let mut sums = [0.0f32; LANES];
    let mut add = |chunk: &[f32; LANES]| {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += exp(value - max);
        }
    };
    let (chunks, rest) = values.as_chunks();
    chunks.iter().for_each(&mut add);
    add(&pad(rest));
    (max, fold(sums, |a, b| a + b).ln())
}

/// The indices and values of the `k` largest, largest first, at ties the lowest index first. No NaN.
pub(super) fn top_k(values: &[f32], k: usize, best: &mut Vec<(u32, f32)>) {
    best.clear();
    if k == 0 {
        return;
    }
    let mut bar = f32::NEG_INFINITY; // a value must exceed it, once there are k
    for (place, chunk) in values.chunks(LANES).enumerate() {
        if best.len() == k && !any_above(chunk, bar) {
            continue;
        }
        for (index, &value) in ((place * LANES) as u32..).zip(chunk) {
            if best.len() == k {
                if value <= bar {
                    continue;
                }
                best.pop();
            }
            let place = best.partition_point(|&(_, other)| other >= value);
            best.insert(place, (index, value));
            bar = best[best.len() - 1].1;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn any_above(chunk: &[f32], bar: f32) -> bool {
    let mut above = [0u32; LANES];
    for (above, value) in above.iter_mut().zip(chunk) {
        *above = u32::from(*value > bar);
    }
    above.into_iter().fold(0, |a, b| a | b) != 0
}

/// Cosines and sines of rotary position embeddings, in the half-split ("NeoX") form that Llama uses.
///
/// Pair `i` of a head of `head_dim` elements is elements `i` and `i + head_dim / 2`; at position `p` it
/// turns by `p * theta^(-2 i / head_dim)` (Su et al., 2021). Angles are products in f32, as in the
/// Transformers library.
#[derive(Clone, Debug)]
pub struct Rope {
    half: usize,
    table: Vec<f32>, // [positions, 2, half]: cosines, sines
}

impl Rope {
    /// A table for positions `0..num_positions`.
    ///
    /// # Errors
    /// *Misuse* unless `head_dim` is even and positive and `theta` a positive number.
    pub fn new(head_dim: usize, theta: f32, num_positions: usize) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(Error::misuse("head size for rotary embeddings", "even and positive", head_dim));
        }
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(Error::misuse("rotary theta", "a positive number", theta));
        }
        let half = head_dim / 2;
        let frequency = |i: usize| 1.0 / theta.powf((2 * i) as f32 / head_dim as f32);
        let frequencies: Vec<f32> = (0..half).map(frequency).collect();
        let mut table = Vec::with_capacity(2 * half * num_positions);
        for position in 0..num_positions {
            let angle = |frequency: &f32| position as f32 * frequency;
            table.extend(frequencies.iter().map(|frequency| angle(frequency).cos()));
            table.extend(frequencies.iter().map(|frequency| angle(frequency).sin()));
        }
        Ok(Self { half, table })
    }

    /// Number of positions in the table.
    pub fn num_positions(&self) -> usize {
        self.table.len() / (2 * self.half)
    }

    /// `[positions, 2, head_dim / 2]`: cosines, sines.
    #[cfg(feature = "cuda")]
    pub(crate) fn table(&self) -> &[f32] {
        &self.table
    }

    /// Turns all heads of one row, `[heads, head_dim]`, to `position`.
    ///
    /// # Errors
    /// *Misuse* when the position is not in the table or the row not whole heads.
    pub fn turn(&self, position: usize, row: &mut [f32]) -> Result<()> {
        expect_len("row's last head", 0, row.len() % (2 * self.half))?;
        let Some(table) = self.table.chunks_exact(2 * self.half).nth(position) else {
            let wanted = format!("below {}", self.num_positions());
            return Err(Error::misuse("rotary position", wanted, position));
        };
        let (cos, sin) = table.split_at(self.half);
        turn_heads(cos, sin, row);
        Ok(())
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn turn_heads(cos: &[f32], sin: &[f32], row: &mut [f32]) {
    let half = cos.len();
    for head in row.chunks_exact_mut(2 * half) {
        let (first, second) = head.split_at_mut(half);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sampling;

    #[test]
    fn exp_is_close_everywhere() {
        for i in -900_000..=880_000 {
            let x = i as f32 / 10_000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            if x < -87.0 {
                assert_eq!(got, 0.0);
            } else {
                assert!((got - want).abs() <= 2e-7 * want, "{x}: {got} {want}");
            }
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    }

    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => (-6i8..6).prop_map(f32::from),
            4 => -50.0f32..50.0,
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::INFINITY),
            1 => Just(-0.0),
        ]
    }

    proptest! {
        #[test]
        fn choose_is_the_specification(
            mut row in prop::collection::vec(logit(), 0..200),
            nan in prop::option::weighted(0.1, 0usize..200),
        ) {
            if let Some(slot) = nan.and_then(|nan| row.get_mut(nan)) {
                *slot = f32::NAN;
            }
            let same = |r: Result<ChoiceKey>| r.map_err(|e| e.to_string());
            prop_assert_eq!(same(choose(&row, 0).checked()), same(sampling::choose(&row)));
        }

        #[test]
        fn top_k_is_a_stable_sort(row in prop::collection::vec(logit(), 1..300), k in 0usize..12) {
            let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
            sorted.truncate(k);
            let mut best = Vec::new();
            top_k(&row, k, &mut best);
            prop_assert_eq!(best, sorted);
        }

        #[test]
        fn log_sum_exp_is_close(row in prop::collection::vec(-40.0f32..40.0, 1..300)) {
            let want = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
            let (largest, rest) = log_sum_exp(&row);
            prop_assert!((f64::from(largest + rest) - want).abs() < 1e-4);
        }

        #[test]
        fn softmax_sums_to_one(mut row in prop::collection::vec(-40.0f32..40.0, 1..300)) {
            let plain = row.clone();
            let sum = softmax_weights(&mut row, 0.125);
            let max = plain.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = plain.iter().map(|&x| f64::from((x - max) * 0.125).exp()).sum();
            prop_assert!((f64::from(sum) - total).abs() < 1e-5 * total);
            for (weight, x) in row.iter().zip(&plain) {
                prop_assert!((f64::from(*weight) - f64::from((x - max) * 0.125).exp()).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn log_sum_exp_of_a_bad_row_is_nan() {
        assert!(log_sum_exp(&[0.0, f32::NAN]).1.is_nan());
        assert!(log_sum_exp(&[0.0, f32::INFINITY]).1.is_nan());
        assert!(log_sum_exp(&[f32::NEG_INFINITY; 4]).1.is_nan());
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY, 2.0]), (2.0, 0.0));
    }

    /// The dispatched versions give the bits of the same formulas compiled for the plainest machine.
    #[test]
    fn every_version_gives_the_same_bits() {
        let cpu = Cpu::with_threads(2).unwrap();
        let x: Vec<f32> = (0..5 * 192).map(|i| ((i * 7919 % 2003) as f32 - 1000.0) / 37.0).collect();
        let mut out = vec![0.0; x.len() / 2];
        silu_mul(&cpu, &x, 96, &mut out).unwrap();
        for (row, out) in x.chunks(192).zip(out.chunks(96)) {
            for i in 0..96 {
                let want = row[i] / (1.0 + exp(-row[i])) * row[96 + i];
                assert_eq!(out[i].to_bits(), want.to_bits());
            }
        }
        for len in [1, 31, 32, 33, 200] {
            let mut weights = x[..len].to_vec();
            let sum = softmax_weights(&mut weights, 0.25);
            let most = x[..len].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut lanes = [0.0f32; LANES];
            for (i, (weight, x)) in weights.iter().zip(&x).enumerate() {
                let want = exp((x - most) * 0.25);
                assert_eq!(weight.to_bits(), want.to_bits());
                lanes[i % LANES] += want;
            }
            assert_eq!(sum.to_bits(), fold(lanes, |a, b| a + b).to_bits());
        }
        let rope = Rope::new(64, 10_000.0, 100).unwrap();
        let mut row = x[..192].to_vec();
        rope.turn(77, &mut row).unwrap();
        for (head, turned) in x[..192].chunks(64).zip(row.chunks(64)) {
            for i in 0..32 {
                let angle = 77.0 * (1.0 / 10_000f32.powf((2 * i) as f32 / 64.0));
                let (a, b) = (head[i], head[i + 32]);
                assert_eq!(turned[i].to_bits(), (a * angle.cos() - b * angle.sin()).to_bits());
                assert_eq!(turned[i + 32].to_bits(), (b * angle.cos() + a * angle.sin()).to_bits());
            }
        }
    }

    #[test]
    fn misuse_is_named() {
        let cpu = Cpu::with_threads(1).unwrap();
        let mut out = [7.0; 4];
        assert!(
            silu_mul(&cpu, &[0.0; 8], 3, &mut out).is_err()
                && silu_mul(&cpu, &[0.0; 7], 2, &mut out).is_err()
        );
        assert!(silu_mul(&cpu, &[0.0; 8], 0, &mut out).is_err());
        assert_eq!(out, [7.0; 4]);
        silu_mul(&cpu, &[], 2, &mut []).unwrap();
        assert!(
            Rope::new(0, 1e4, 9).is_err() && Rope::new(63, 1e4, 9).is_err() && Rope::new(64, 0.0, 9).is_err()
        );
        let rope = Rope::new(2, 1e4, 9).unwrap();
        assert_eq!(rope.num_positions(), 9);
        assert!(rope.turn(9, &mut out).is_err() && rope.turn(0, &mut out[..3]).is_err());
        assert_eq!(out, [7.0; 4]);
    }
}
