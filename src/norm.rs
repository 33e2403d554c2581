//! RMSNorm, defined once with its rounding points.

use multiversion::multiversion;

use crate::error::{Error, Result, expect_len};

/// Root-mean-square normalisation, `y = x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich, 2019).
///
/// # Rounding
///
/// All in f32. The mean square is the sum of eight column groups of `hidden / 8` elements, combined as
/// `((g0+g1)+(g2+g3)) + ((g4+g5)+(g6+g7))`. Within a group, eight lanes each add every eighth square in
/// order, and the lanes combine in the same shape. Then `scale = 1 / sqrt(sum / hidden + epsilon)` with the
/// IEEE division and square root, and `y = (x * scale) * weight`. No step depends on how many rows there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    hidden: usize,
    epsilon: f32,
}

impl RmsNorm {
    /// A norm over rows of `hidden` elements.
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
        Ok(Self { hidden, epsilon })
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

    /// One row, lengths known to fit.
    pub(crate) fn row(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        normalise(x, weight, self.epsilon, out);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn normalise(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let mut lanes = [[0.0f32; 8]; 8];
    for (lanes, group) in lanes.iter_mut().zip(x.chunks_exact(x.len() / 8)) {
        for squares in group.chunks_exact(8) {
            for (lane, x) in lanes.iter_mut().zip(squares) {
                *lane += x * x;
            }
        }
    }
    let sum = combine(lanes.map(combine));
    let scale = 1.0 / (sum / x.len() as f32 + epsilon).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

fn combine(v: [f32; 8]) -> f32 {
    ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition_in_f64() {
        for hidden in [64, 576, 7168] {
            let x: Vec<f32> = (0..hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let weight: Vec<f32> = (0..hidden).map(|i| 1.0 + (i % 5) as f32).collect();
            let mut out = vec![0.0; hidden];
            RmsNorm::new(hidden, 1e-5).unwrap().apply(&x, &weight, &mut out).unwrap();
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64;
            for ((x, w), y) in x.iter().zip(&weight).zip(&out) {
                let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                assert!((f64::from(*y) - want).abs() <= 1e-6 * want.abs(), "{y} {want}");
            }
        }
    }

    #[test]
    fn bad_shapes_are_errors() {
        assert!(RmsNorm::new(72, 1e-5).is_err() && RmsNorm::new(0, 1e-5).is_err());
        assert!(RmsNorm::new(64, 0.0).is_err() && RmsNorm::new(64, f32::NAN).is_err());
        let norm = RmsNorm::new(64, 1e-5).unwrap();
        assert!(norm.apply(&[0.0; 65], &[0.0; 64], &mut [0.0; 65]).is_err());
        assert!(norm.apply(&[0.0; 64], &[0.0; 63], &mut [0.0; 64]).is_err());
        assert!(norm.apply(&[0.0; 64], &[0.0; 64], &mut [0.0; 128]).is_err());
    }
}
