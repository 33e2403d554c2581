//! The number formats of activations and their roundings, as the kernels have them.

use bytemuck::Pod;
use half::{bf16, f16};

/// An element of activations that a collective carries: [`bf16`] or [`struct@f16`]. Sealed.
///
/// Conversions to f32 are exact. Conversions from f32 round to nearest, ties to even, overflow to infinity,
/// keep subnormals and the sign of zero, and turn every NaN into `0x7FFF`: the bits of the GPU's own
/// conversions.
pub trait Element: sealed::Sealed + Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The format's name: `bf16`, `f16`.
    const NAME: &'static str;

    /// Exactly this value.
    fn to_f32(self) -> f32;

    /// The nearest value.
    fn from_f32(value: f32) -> Self;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

// Both without branches, so that loops over them vectorise.
impl Element for bf16 {
    const NAME: &'static str = "bf16";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        Self::from_bits(if value.is_nan() { 0x7FFF } else { rounded as u16 })
    }
}

impl Element for f16 {
    const NAME: &'static str = "f16";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // Exponent and fraction at f32's places, then the difference of the biases as a factor: exact, and
        // right for subnormals too.
        let magnitude = (f32::from_bits((bits & 0x7FFF) << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 } else { 0 };
        f32::from_bits(magnitude | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = bits >> 16 & 0x8000;
        let magnitude = bits & 0x7FFF_FFFF;
        // Subnormal results: the addition of 0.5 leaves their bits, rounded, at the bottom of the sum.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + (magnitude >> 13 & 1)) >> 13;
        let finite = if magnitude < 113 << 23 { subnormal } else { normal };
        let overflow = if magnitude > 0x7F80_0000 { 0x7FFF } else { sign | 0x7C00 };
        Self::from_bits(if magnitude >= 0x4780_0000 { overflow } else { sign | finite } as u16)
    }
}

/// The FP8 E4M3 bits nearest to `value`: ties to even, beyond 448 the largest finite value, NaN `0x7F`.
pub(crate) fn e4m3_from_f32(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7F;
    }
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs().min(448.0);
    // Below the smallest normal number, 2^-6, all values are multiples of 2^-9.
    if magnitude < 0.015_625 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits() - (120 << 23);
    sign | (bits.wrapping_add(0x7_FFFF + (bits >> 20 & 1)) >> 20) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both neighbours of every rounding boundary, and the boundary itself.
    fn f32_near(value: f32) -> impl Iterator<Item = f32> {
        let bits = value.to_bits();
        [bits.wrapping_sub(1), bits, bits.wrapping_add(1)].into_iter().map(f32::from_bits)
    }

    fn equals_half<T: Element>(from_bits: fn(u16) -> T, to_half: fn(f32) -> u16, half_to: fn(u16) -> f32) {
        let mut checked = 0;
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (from_bits(bits).to_f32(), half_to(bits));
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:04x}");
            let next = half_to(bits.wrapping_add(1));
            for value in f32_near(ours).chain(f32_near(ours / 2.0 + next / 2.0)) {
                let want = if value.is_nan() { 0x7FFF } else { to_half(value) };
                assert_eq!(bytemuck::cast::<T, u16>(T::from_f32(value)), want, "{value:e}");
                checked += 1;
            }
        }
        assert!(checked > 300_000);
    }

    #[test]
    fn conversions_are_those_of_the_half_crate_with_one_nan() {
        equals_half(bf16::from_bits, |x| bf16::from_f32(x).to_bits(), |b| bf16::from_bits(b).to_f32());
        equals_half(f16::from_bits, |x| f16::from_f32(x).to_bits(), |b| f16::from_bits(b).to_f32());
    }

    #[test]
    fn e4m3_is_the_nearest_of_its_values() {
        let value = |bits: u8| {
            let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
            if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) }
        };
        for bits in 0..0x7E {
            let (low, high) = (value(bits), value(bits + 1));
            let middle = low / 2.0 + high / 2.0;
            assert_eq!(e4m3_from_f32(low), bits);
            assert_eq!(e4m3_from_f32(-low), bits | 0x80);
            assert_eq!(e4m3_from_f32(f32::from_bits(middle.to_bits() - 1)), bits);
            assert_eq!(e4m3_from_f32(middle), bits + (bits & 1)); // the even neighbour
            assert_eq!(e4m3_from_f32(f32::from_bits(middle.to_bits() + 1)), bits + 1);
        }
        assert_eq!([448.0, 1e9, f32::INFINITY].map(e4m3_from_f32), [0x7E; 3]);
        assert_eq!((e4m3_from_f32(f32::NEG_INFINITY), e4m3_from_f32(f32::NAN)), (0xFE, 0x7F));
    }
}
