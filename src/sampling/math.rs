//! Logarithm and exponential for sampling: IEEE additions, multiplications, divisions and conversions in a fixed
//! order and without contraction, and integers, so that kernels get the same bits. No library function is called.

/// The natural logarithm of a positive normal number, to about 1e-16 of its value.
#[inline(always)]
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

/// The weight of the likeliest token.
pub(crate) const LARGEST_WEIGHT: u64 = 1 << 40;

/// `exp(z - largest)` in units of 2^-40, rounded down, to about 2^-25 of its value; `z <= largest`. Never smaller
/// for a larger `z`. As an integer, so that sums have no order.
///
/// A subtraction and a rounding in f32, and products of integers: GPUs made for inference have next to no f64, and this
/// is worked out for a whole vocabulary. The difference is rounded no more than `z` itself was.
#[inline(always)]
pub(crate) fn weight(z: f32, largest: f32) -> u64 {
    const LOG2_E: u64 = 3_098_164_009; // of 2^-31, rounded
    // 2^-f = 1 - c1 f + c2 f^2 - ... for f in [0, 1]: the best fit that is exact at both ends (c6 to c1, of 2^-32).
    const COEFFICIENTS: [u64; 6] =
        [466_327, 5_469_618, 41_136_673, 238_328_358, 1_031_755_265, 2_977_043_937];
    // No term has more than 32 bits; said to the compiler, which else takes the slow product of 64 bits.
    let times = |a: u64, b: u64| ((a & 0xFFFF_FFFF) * (b & 0xFFFF_FFFF)) >> 32;
    let distance = largest - z;
    // Beyond 28 all is 0. Neither this nor infinities (which leave a NaN) get through.
    let distance = if distance < 31.0 { distance } else { 31.0 };
    // An integer of 2^-26, to the nearest, at ties the even one: after adding 2^52 it is in the lowest bits.
    let units = (f64::from(distance) * 67_108_864.0 + 4_503_599_627_370_496.0).to_bits() & 0xFFFF_FFFF;
    let exponent = (units * LOG2_E) >> 31;
    let fraction = (exponent << 6) & 0xFFFF_FFFF; // of 2^-32
    let mut series = 0;
    for coefficient in COEFFICIENTS {
        series = coefficient - times(series, fraction);
    }
    let power = (1 << 32) - times(series, fraction); // 2^-fraction of 2^-32
    let weight = (power << 8) >> (exponent >> 26);
    if z == largest { LARGEST_WEIGHT } else { weight }
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

    /// Weights at distances `range * 2^-26` from the largest: monotone, and the exponential. Returns how many.
    fn check_weights(range: impl Iterator<Item = u32>) -> u64 {
        let (mut before, mut num_checked) = (u64::MAX, 0);
        for units in range {
            let distance = units as f32 / (1 << 26) as f32;
            let seen = weight(-distance, 0.0);
            let want = (-f64::from(distance)).exp() * LARGEST_WEIGHT as f64;
            assert!(
                (seen as f64 - want).abs() <= 1.0 + want / f64::from(1 << 25),
                "{distance}: {seen} {want}"
            );
            assert!(seen <= before, "monotone at {distance}");
            before = seen;
            num_checked += 1;
        }
        num_checked
    }

    /// `EAGLE_VERIFY_ALL_NOISE=1` checks every distance, else stretches of neighbours.
    #[test]
    fn weights_are_the_exponential() {
        assert_eq!(weight(3.5, 3.5), LARGEST_WEIGHT);
        assert_eq!(weight(f32::INFINITY, f32::INFINITY), LARGEST_WEIGHT);
        for far in [f32::NEG_INFINITY, f32::MIN, -28.0] {
            assert_eq!(weight(far, 0.0), 0);
        }
        assert_eq!(weight(0.0, f32::INFINITY), 0);
        if std::env::var_os("EAGLE_VERIFY_ALL_NOISE").is_some() {
            assert_eq!(check_weights(0..=31 << 26), (31 << 26) + 1);
            return;
        }
        let num_checked: u64 = (0..(31 << 26) - 64).step_by(400_009).map(|u| check_weights(u..u + 64)).sum();
        // Around each power of two, where the series ends and starts again.
        let powers = (0..41).map(|k| (f64::from(k) * std::f64::consts::LN_2 * f64::from(1 << 26)) as u32);
        let around: u64 = powers.map(|units| check_weights(units.saturating_sub(1000)..units + 1000)).sum();
        assert!(num_checked + around > 300_000);
    }
}
