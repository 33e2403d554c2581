//! RMSNorm, and its fusion with an all-reduce, defined once with their rounding points. The CUDA kernels and
//! the CPU collective match the functions here bit for bit.

use multiversion::multiversion;

use crate::element::{Element, e4m3_from_f32};
use crate::error::{Error, Result, expect_len};

/// The largest value of FP8 E4M3.
const MAX_E4M3: f32 = 448.0;
/// The smallest per-row scale: rows of zeros must not divide by zero.
const MIN_SCALE: f32 = 1.0 / (512.0 * 448.0);

/// Root-mean-square normalisation, `y = x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich, 2019).
///
/// # Rounding
///
/// All in f32. The sum of squares has one fixed shape, that of a GPU block, whatever the number of rows:
///
/// 1. The columns are eight groups of `hidden / 8`; a group is packs of eight consecutive columns; 32 packs
///    are a run, the last run of a group filled up with zeros.
/// 2. A pack's squares `q` add as `((q0+q1)+(q2+q3)) + ((q4+q5)+(q6+q7))`; a run's packs in halves: pack `i`
///    and pack `i + 16`, then `i` and `i + 8`, and so on; the runs of a group in order; the groups as
///    `((g0+g1)+(g2+g3)) + ((g4+g5)+(g6+g7))`.
///
/// Then `scale = 1 / sqrt(sum / hidden + epsilon)` with the IEEE division and square root, and
/// `y = (x * scale) * weight`, rounded once to the output's format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    hidden: usize,
    epsilon: f32,
    weight_plus_one: bool,
}

impl RmsNorm {
    /// A norm over rows of `hidden` elements that multiplies by the weight as it is.
    ///
    /// # Errors
    /// *Unsupported* when `hidden` is not a positive multiple of 64; *misuse* when `epsilon` is not a
    /// positive number.
    pub fn new(hidden: usize, epsilon: f32) -> Result<Self> {
        if hidden == 0 || !hidden.is_multiple_of(64) {
            return Err(Error::unsupported("hidden size", "a multiple of 64", hidden));
        }
        if !(epsilon > 0.0 && epsilon.is_finite()) {
            return Err(Error::misuse("RMSNorm epsilon", "a positive number", epsilon));
        }
        Ok(Self { hidden, epsilon, weight_plus_one: false })
    }

    /// The same norm multiplying by `1 + weight`, as Gemma's models store it. The addition is in f32.
    pub fn with_weight_plus_one(self) -> Self {
        Self { weight_plus_one: true, ..self }
    }

    /// Elements in a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// What is added to the mean square.
    pub fn epsilon(&self) -> f32 {
        self.epsilon
    }

    /// Whether it multiplies by `1 + weight`.
    pub fn weight_is_plus_one(&self) -> bool {
        self.weight_plus_one
    }

    /// Normalises `x`, `[rows, hidden]`, into `out`, `[rows, hidden]`, with `weight`, `[hidden]`.
    ///
    /// # Errors
    /// *Misuse* when the lengths don't fit together.
    pub fn apply(&self, x: &[f32], weight: &[f32], out: &mut [f32]) -> Result<()> {
        expect_len("norm weight", self.hidden, weight.len())?;
        expect_len("norm output", x.len(), out.len())?;
        expect_len("norm input's last row", 0, x.len() % self.hidden)?;
        for (x, out) in x.chunks_exact(self.hidden).zip(out.chunks_exact_mut(self.hidden)) {
            self.row(x, weight, out);
        }
        Ok(())
    }

    /// `residual += sum of partials; output = norm(residual)`, the specification of the fused collective.
    ///
    /// `partials` has one `[rows, hidden]` for each rank; `residual` and `output` are `[rows, hidden]`,
    /// `weight` is `[hidden]`.
    ///
    /// # Rounding
    ///
    /// 1. `h = residual + sum` in f32, where the sum of ranks has the order of [`sum_ranks`]; rounded once and
    ///    written back as the residual.
    /// 2. The mean square is that of the *rounded* `h`: the norm is a function of the residual that the next
    ///    layer reads.
    /// 3. `h * scale * weight` is rounded once.
    ///
    /// # Errors
    /// *Misuse* when the lengths don't fit together; *unsupported* when there is no order for so many ranks.
    pub fn reduce_add_norm<T: Element>(
        &self,
        partials: &[&[T]],
        residual: &mut [T],
        weight: &[T],
        output: &mut [T],
    ) -> Result<()> {
        check_partials(partials, residual.len())?;
        expect_len("norm weight", self.hidden, weight.len())?;
        expect_len("norm output", residual.len(), output.len())?;
        expect_len("residual's last row", 0, residual.len() % self.hidden)?;
        let mut h = vec![0.0; self.hidden];
        let rows = residual.chunks_exact_mut(self.hidden).zip(output.chunks_exact_mut(self.hidden));
        for (row, (residual, output)) in rows.enumerate() {
            for (i, (residual, h)) in residual.iter_mut().zip(&mut h).enumerate() {
                *residual = T::from_f32(residual.to_f32() + sum_at(partials, row * self.hidden + i));
                *h = residual.to_f32();
            }
            let scale = self.scale(&h);
            for ((output, h), weight) in output.iter_mut().zip(&h).zip(weight) {
                *output = T::from_f32(h * scale * self.factor(weight.to_f32()));
            }
        }
        Ok(())
    }

    /// One row, lengths known to fit.
    pub(crate) fn row(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let scale = self.scale(x);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * self.factor(*weight);
        }
    }

    /// `1 / sqrt(mean(x^2) + epsilon)` of a row.
    pub(crate) fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (square_sum(x) / self.hidden as f32 + self.epsilon).sqrt()
    }

    /// What a weight multiplies by.
    #[inline(always)]
    pub(crate) fn factor(&self, weight: f32) -> f32 {
        if self.weight_plus_one { 1.0 + weight } else { weight }
    }
}

/// `output = sum of partials`: the specification of the plain all-reduce, over any number of elements.
///
/// # Rounding
///
/// In f32, in an order that depends on the number of ranks alone: of one rank the value itself, of two `0+1`,
/// of four `((0+1)+2)+3`, of eight `(((0+1)+2)+3) + (((4+5)+6)+7)`. Rounded once.
///
/// # Errors
/// *Misuse* when the lengths differ; *unsupported* when there is no order for so many ranks.
pub fn sum_ranks<T: Element>(partials: &[&[T]], output: &mut [T]) -> Result<()> {
    check_partials(partials, output.len())?;
    for (i, output) in output.iter_mut().enumerate() {
        *output = T::from_f32(sum_at(partials, i));
    }
    Ok(())
}

/// `quantized = values / scale` in FP8 E4M3, the multiplication by `1 / scale` in f32 and rounded once;
/// saturates at 448, NaN is `0x7F`.
///
/// # Errors
/// *Misuse* when the lengths differ or `scale` is not a positive number.
pub fn quantize_static<T: Element>(values: &[T], scale: f32, quantized: &mut [u8]) -> Result<()> {
    expect_len("quantized output", values.len(), quantized.len())?;
    check_scale(scale)?;
    quantize(values, scale, quantized);
    Ok(())
}

pub(crate) fn quantize<T: Element>(values: &[T], scale: f32, quantized: &mut [u8]) {
    let inverse = 1.0 / scale;
    for (quantized, value) in quantized.iter_mut().zip(values) {
        *quantized = e4m3_from_f32(value.to_f32() * inverse);
    }
}

/// As [`quantize_static`] with one scale per row of `hidden` elements, written to `scales`: the row's largest
/// magnitude divided by 448, at least `1 / (512 * 448)`.
///
/// # Errors
/// *Misuse* when the lengths don't fit together.
pub fn quantize_rows<T: Element>(
    values: &[T],
    hidden: usize,
    quantized: &mut [u8],
    scales: &mut [f32],
) -> Result<()> {
    expect_len("quantized output", values.len(), quantized.len())?;
    expect_len("values", scales.len() * hidden, values.len())?;
    for ((values, quantized), scale) in
        values.chunks_exact(hidden.max(1)).zip(quantized.chunks_exact_mut(hidden.max(1))).zip(scales)
    {
        *scale = row_scale(values);
        quantize(values, *scale, quantized);
    }
    Ok(())
}

pub(crate) fn check_scale(scale: f32) -> Result<()> {
    if scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite() {
        return Ok(());
    }
    Err(Error::misuse("FP8 scale", "a positive number with a finite inverse", scale))
}

/// The scale of a row of values. NaNs don't count; an infinite row has an infinite scale, and becomes NaN.
pub(crate) fn row_scale<T: Element>(values: &[T]) -> f32 {
    let max_magnitude = values.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
    (max_magnitude / MAX_E4M3).max(MIN_SCALE)
}

fn check_partials<T: Element>(partials: &[&[T]], len: usize) -> Result<()> {
    if !matches!(partials.len(), 1 | 2 | 4 | 8) {
        return Err(Error::unsupported("world size", "1, 2, 4 or 8", partials.len()));
    }
    partials.iter().try_for_each(|partial| expect_len("partial", len, partial.len()))
}

/// The sum over ranks at one place, in the canonical order.
fn sum_at<T: Element>(partials: &[&[T]], at: usize) -> f32 {
    let chain = |ranks: &[&[T]]| ranks.iter().map(|rank| rank[at].to_f32()).reduce(|a, b| a + b);
    let (lower, upper) = partials.split_at(partials.len().min(4));
    let lower = chain(lower).unwrap_or_default();
    chain(upper).map_or(lower, |upper| lower + upper)
}

/// The sum of a row's squares in the order of [`RmsNorm`].
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
pub(crate) fn square_sum(x: &[f32]) -> f32 {
    let mut groups = [0.0; 8];
    for (group, columns) in groups.iter_mut().zip(x.chunks_exact(x.len() / 8)) {
        for (i, run) in columns.chunks(32 * 8).enumerate() {
            let mut packs = [0.0; 32];
            for (sum, pack) in packs.iter_mut().zip(run.chunks_exact(8)) {
                let square = |i: usize| pack[i] * pack[i];
                *sum = ((square(0) + square(1)) + (square(2) + square(3)))
                    + ((square(4) + square(5)) + (square(6) + square(7)));
            }
            for half in [16, 8, 4, 2, 1] {
                for i in 0..half {
                    packs[i] += packs[i + half];
                }
            }
            *group = if i == 0 { packs[0] } else { *group + packs[0] };
        }
    }
    let [a, b, c, d, e, f, g, h] = groups;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn row(hidden: usize) -> (Vec<f32>, Vec<f32>) {
        let x = (0..hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
        (x, (0..hidden).map(|i| 1.0 + (i % 5) as f32).collect())
    }

    #[test]
    fn equals_the_definition_in_f64() {
        for hidden in [64, 576, 7168] {
            for plus_one in [false, true] {
                let (x, weight) = row(hidden);
                let mut out = vec![0.0; hidden];
                let norm = RmsNorm::new(hidden, 1e-5).unwrap();
                let norm = if plus_one { norm.with_weight_plus_one() } else { norm };
                norm.apply(&x, &weight, &mut out).unwrap();
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64;
                for ((x, w), y) in x.iter().zip(&weight).zip(&out) {
                    let w = f64::from(*w) + f64::from(u8::from(plus_one));
                    let want = f64::from(*x) / (mean + 1e-5).sqrt() * w;
                    assert!((f64::from(*y) - want).abs() <= 1e-6 * want.abs(), "{y} {want}");
                }
            }
        }
    }

    /// The sum's shape, spelled out again for one hidden size with a short last run.
    #[test]
    fn the_order_of_squares_is_the_documented_one() {
        let hidden = 8 * (256 + 24);
        let x: Vec<f32> = (0..hidden).map(|i| 1.0 + ((i * 7919) % 1009) as f32 * 1e-3).collect();
        let pack = |at: usize| {
            let q: Vec<f32> = x[at..at + 8].iter().map(|x| x * x).collect();
            ((q[0] + q[1]) + (q[2] + q[3])) + ((q[4] + q[5]) + (q[6] + q[7]))
        };
        let tree = |packs: &[f32]| {
            let mut packs = packs.to_vec();
            while packs.len() > 1 {
                let (a, b) = packs.split_at(packs.len() / 2);
                packs = a.iter().zip(b).map(|(a, b)| a + b).collect();
            }
            packs[0]
        };
        let group = |g: usize| {
            let packs: Vec<f32> = (0..35).map(|p| pack(g * 280 + p * 8)).collect();
            let mut last = packs[32..].to_vec();
            last.resize(32, 0.0);
            tree(&packs[..32]) + tree(&last)
        };
        let g: Vec<f32> = (0..8).map(group).collect();
        let want = ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7]));
        assert_eq!(square_sum(&x).to_bits(), want.to_bits());
        // The plain order gives other bits: the assertion above can fail.
        let plain: f32 = x.iter().map(|x| x * x).sum();
        assert_ne!(plain.to_bits(), want.to_bits());
    }

    /// Eight ranks whose sum depends on the order, and a residual that depends on the rounding points.
    #[test]
    fn rounding_points_are_the_documented_ones() {
        let value = |i: usize, k: usize| ((i * 7919 + k * 104_729) % 65_521) as f32 / 16_384.0 - 2.0;
        let hidden = 128;
        let partials: Vec<Vec<bf16>> = (0..8)
            .map(|rank| {
                // Two ranks cancel, and swallow some of what is added between them.
                let large = |i: usize| 3e7 * f32::from([0i8, 1, 0, 0, 0, 0, -1, 0][(rank + i) % 8]);
                (0..hidden).map(|i| Element::from_f32(value(i, rank) + large(i))).collect()
            })
            .collect();
        let partials: Vec<&[bf16]> = partials.iter().map(Vec::as_slice).collect();
        let weight: Vec<bf16> = (0..hidden).map(|i| Element::from_f32(value(i, 9))).collect();
        let before: Vec<bf16> = (0..hidden).map(|i| Element::from_f32(value(i, 10))).collect();
        let (mut residual, mut output) = (before.clone(), vec![bf16::ZERO; hidden]);
        let norm = RmsNorm::new(hidden, 1e-6).unwrap();
        norm.reduce_add_norm(&partials, &mut residual, &weight, &mut output).unwrap();

        let p = |rank: usize, i: usize| partials[rank][i].to_f32();
        let (mut seen_order, mut seen_rounding) = (false, false);
        let mut unrounded = Vec::new();
        for i in 0..hidden {
            let lower = ((p(0, i) + p(1, i)) + p(2, i)) + p(3, i);
            let upper = ((p(4, i) + p(5, i)) + p(6, i)) + p(7, i);
            let h = before[i].to_f32() + (lower + upper);
            assert_eq!(residual[i], Element::from_f32(h));
            let rotated = (1..9).map(|k| p(k % 8, i)).sum::<f32>();
            let rotated: bf16 = Element::from_f32(before[i].to_f32() + rotated);
            let twice: bf16 = Element::from_f32(lower + upper);
            let twice: bf16 = Element::from_f32(before[i].to_f32() + twice.to_f32());
            seen_order |= rotated != residual[i];
            seen_rounding |= twice != residual[i];
            unrounded.push(h);
        }
        assert!(seen_order && seen_rounding, "controls: the data can tell the choices apart");
        let rounded: Vec<f32> = residual.iter().map(|h| h.to_f32()).collect();
        assert_ne!(norm.scale(&rounded).to_bits(), norm.scale(&unrounded).to_bits());
        for i in 0..hidden {
            let want: bf16 = Element::from_f32(rounded[i] * norm.scale(&rounded) * weight[i].to_f32());
            assert_eq!(output[i], want);
        }
    }

    #[test]
    fn quantisation_scales_and_saturates() {
        let values = [0.0f32, 1.0, -2.0, 896.0].map(f16::from_f32);
        let (mut quantized, mut scales) = ([0u8; 4], [0.0f32; 2]);
        quantize_rows(&values, 2, &mut quantized, &mut scales).unwrap();
        assert_eq!(scales, [1.0 / 448.0, 2.0]);
        assert_eq!(quantized, [0, 0x7E, 0xB8, 0x7E]); // 448, -1, 448
        quantize_static(&values, 1.0, &mut quantized).unwrap();
        assert_eq!(quantized, [0, 0x38, 0xC0, 0x7E]);
        quantize_rows(&[f16::ZERO; 4], 4, &mut quantized, &mut scales[..1]).unwrap();
        assert_eq!((quantized, scales[0]), ([0; 4], MIN_SCALE));
        assert!(quantize_static(&values, 0.0, &mut quantized).is_err());
        assert!(quantize_rows(&values, 3, &mut quantized, &mut scales).is_err());
    }

    #[test]
    fn bad_shapes_are_errors() {
        assert!(RmsNorm::new(72, 1e-5).is_err() && RmsNorm::new(0, 1e-5).is_err());
        assert!(RmsNorm::new(64, 0.0).is_err() && RmsNorm::new(64, f32::NAN).is_err());
        let norm = RmsNorm::new(64, 1e-5).unwrap();
        assert!(norm.apply(&[0.0; 65], &[0.0; 64], &mut [0.0; 65]).is_err());
        assert!(norm.apply(&[0.0; 64], &[0.0; 63], &mut [0.0; 64]).is_err());
        assert!(norm.apply(&[0.0; 64], &[0.0; 64], &mut [0.0; 128]).is_err());
        let x = [bf16::ZERO; 64];
        let reduce = |partials: &[&[bf16]]| norm.reduce_add_norm(partials, &mut { x }, &x, &mut { x });
        assert!(reduce(&[&x, &x]).is_ok());
        assert!(reduce(&[&x, &x, &x]).is_err() && reduce(&[]).is_err() && reduce(&[&x, &x[1..]]).is_err());
    }
}
