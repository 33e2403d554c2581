//! Logarithm and exponential for sampling: IEEE additions, multiplications, divisions and conversions in f64, in a
//! fixed order and without contraction, so that kernels get the same bits. No library function is called.

/// The natural logarithm of a positive normal number, to about 1e-16 of its value.
pub(super) fn ln(x: f64) -> f64 {
    // x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)).
    let bits = x.to_bits();
    let offset = bits.wrapping_sub(0x3FE6_A09E_667F_3BCD); // the bits of sqrt(1/2)
    let exponent = (offset as i64 >> 52) as f64;
    let m = f64::from_bits(bits.wrapping_sub(offset & 0xFFF0_0000_0000_0000));
    // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.1716.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 1.0 / 23.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = series * z + 1.0 / odd;
    }
    let artanh = s + s * (z * series);
    exponent * std::f64::consts::LN_2 + 2.0 * artanh
}

/// `exp(x)` for `x <= 0` in units of 2^-40, rounded to nearest. As an integer, so that sums have no order.
///
/// Without branches and conversions, so that loops over it vectorise.
#[inline(always)]
pub(super) fn exp_fixed(x: f64) -> u64 {
    // Adding 1.5 * 2^52 rounds to an integer, and leaves it in the lowest bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // 1 / n! for n = 13 to 0.
    const COEFFICIENTS: [f64; 14] = {
        let mut coefficients = [1.0; 14];
        let (mut n, mut factorial) = (1, 1.0);
        while n < 14 {
            factorial *= n as f64;
            coefficients[13 - n] = 1.0 / factorial;
            n += 1;
        }
        coefficients
    };
    // Under 2^-41 all is 0.
    let x = if x > -40.0 { x } else { -40.0 };
    // x = k ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts: the product with the first is exact.
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (x - k * 0.693_147_180_369_123_8) - k * 1.908_214_929_270_587_7e-10;
    let mut series = 0.0;
    for coefficient in COEFFICIENTS {
        series = series * r + coefficient;
    }
    // 2^(k + 40), by its bits.
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(1023 + 40);
    let value = series * f64::from_bits(power << 52);
    // Adding 2^52 rounds to an integer once more.
    const INTEGER: f64 = 4_503_599_627_370_496.0;
    (value + INTEGER).to_bits() - INTEGER.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ln_is_the_logarithm() {
        let mut x: f64 = 1e-300;
        while x < 1e300 {
            for x in [x, 1.0 + x.min(1.0) / 7.0, 1.0 - x.min(1.0) / 7.0] {
                let error = (ln(x) - x.ln()).abs();
                assert!(error <= 4e-16 * x.ln().abs().max(1e-300), "{x:e}: {} {}", ln(x), x.ln());
            }
            x *= 1.37;
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn exp_is_the_exponential() {
        assert_eq!((exp_fixed(0.0), exp_fixed(-28.5), exp_fixed(f64::NEG_INFINITY)), (1 << 40, 0, 0));
        let (mut x, mut before) = (0.0f64, u64::MAX);
        while x > -28.0 {
            let (seen, want) = (exp_fixed(x), x.exp() * (1u64 << 40) as f64);
            assert!((seen as f64 - want).abs() <= 0.501, "{x}: {seen} {want}");
            assert!(seen <= before, "monotone at {x}");
            before = seen;
            x -= 0.000_731;
        }
    }
}
