//! The one inner loop of the CPU backend, for each instruction set: rows of `x` times a panel of weights.
//!
//! Everything that multiplies goes through [`accumulate`]: linear layers, attention scores (a page of keys
//! is a panel over the head's dimensions) and attention outputs (a page of values is one over positions).
//! An output element is always `acc = fma(x[k], w[k], acc)` for `k` in order, so its bits depend neither on
//! how many rows come along nor on the instruction set.
#![allow(unsafe_code)]

use half::bf16;
use once_cell::sync::Lazy;

/// Outputs in a panel: two AVX-512 registers, four AVX2 ones, eight NEON ones.
pub(super) const PANEL: usize = 32;

/// One row of accumulators.
pub(super) type Lanes = [f32; PANEL];

/// Bytes of weights that stay in the first-level cache while all groups of rows pass over them, and the
/// distance of the prefetch. Four pages of 4 KiB, see [`Prefetch`].
pub(super) const BLOCK_BYTES: usize = 4 * PAGE;
const PAGE: usize = 4096;
const LINE: usize = 64;

/// An element that weights are stored in. Sealed: the loads are written per instruction set.
pub trait Weight: sealed::Weight + bytemuck::Pod + Send + Sync {}
impl Weight for f32 {}
impl Weight for bf16 {}

mod sealed {
    pub trait Weight {
        /// `weights[0..32]` as f32.
        fn widen(weights: &[Self; super::PANEL]) -> super::Lanes
        where
            Self: Sized;
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code)]
        unsafe fn load_avx512(weights: *const Self) -> super::x86::Avx512;
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code)]
        unsafe fn load_avx2(weights: *const Self) -> super::x86::Avx2;
    }
}

/// An instruction set that this machine was found to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Isa(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of plain Rust: NEON on aarch64.
    Portable,
}

impl Isa {
    /// The best one of this machine.
    pub(super) fn detect() -> Self {
        static BEST: Lazy<Isa> = Lazy::new(|| Isa::available()[0]);
        *BEST
    }

    /// All that run here, best first.
    pub(super) fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                found.push(Self(Set::Avx512));
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(Self(Set::Avx2));
            }
        }
        found.push(Self(Set::Portable));
        found
    }

    /// Rows that one pass of the inner loop takes: as many as the registers hold accumulators for.
    const fn max_group(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => 8,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => 3,
            Set::Portable => 2,
        }
    }
}

/// For each row `r` and lane `c`: `acc[r][c] = fma(x[r * x_stride + k], w[k * 32 + c], acc[r][c])`, `k`
/// ascending over the `w.len() / 32` steps.
///
/// `ahead` is the block of weights that comes [`BLOCK_BYTES`] later, or nothing: it is prefetched, so that it
/// arrives from memory while this one is used.
///
/// # Panics
/// When `w` is not whole steps or `x` is too short. Callers' shapes are checked long before.
pub(super) fn accumulate<W: Weight>(
    isa: Isa,
    x: &[f32],
    x_stride: usize,
    w: &[W],
    acc: &mut [Lanes],
    ahead: &[W],
) {
    let depth = w.len() / PANEL;
    assert_eq!(w.len() % PANEL, 0);
    assert!(acc.is_empty() || (acc.len() - 1) * x_stride + depth <= x.len());
    let num_groups = acc.len().div_ceil(isa.max_group());
    let mut first = 0;
    for group in 0..num_groups {
        let rows = (acc.len() - first).div_ceil(num_groups - group);
        let prefetch = (!ahead.is_empty()).then(|| Prefetch::share(ahead, group, num_groups));
        // SAFETY:
        // - bounds: the assertions above cover `rows` rows of `depth` steps from row `first` on.
        // - `isa` was found on this machine: `Isa` values come from `available` alone.
        // - `rows` is at most `max_group`: the groups split the rows evenly over enough groups.
        unsafe {
            let x = x.as_ptr().add(first * x_stride);
            let acc = acc.as_mut_ptr().add(first);
            dispatch(isa, rows, Args { x, x_stride, w: w.as_ptr(), depth, acc, prefetch });
        }
        first += rows;
    }
}

struct Args<W> {
    x: *const f32,
    x_stride: usize,
    w: *const W,
    depth: usize,
    acc: *mut Lanes,
    prefetch: Option<Prefetch>,
}

/// Which lines of the next block a group of rows fetches, and how often.
///
/// Consecutive requests go to *different* pages, four in turn. The memory prefetcher of a core follows one
/// stream a page and runs a bounded number of lines ahead of each, so four streams keep four times as much
/// in flight: with one, eight rows on this code's first machine cost 1.3 times one row, with four 1.1 times.
#[derive(Clone, Copy)]
struct Prefetch {
    base: *const u8,
    first_line: usize,
    /// Fetch at every `1 << shift`-th step.
    shift: u32,
    /// Fetch two lines at a time.
    double: bool,
}

impl Prefetch {
    fn share<W>(ahead: &[W], group: usize, num_groups: usize) -> Self {
        let lines = BLOCK_BYTES / LINE;
        let lines_per_step = PANEL * size_of::<W>() / LINE; // 2 for f32, 1 for bf16
        let (at_once, shift) = match 2 * lines_per_step / num_groups {
            4.. => (2, 0),
            2..4 => (1, 0),
            _ => (1, 1),
        };
        let lines_per_group = (lines / lines_per_step * at_once) >> shift;
        Self {
            base: ahead.as_ptr().cast(),
            first_line: group * lines_per_group % lines,
            shift,
            double: at_once == 2,
        }
    }

    #[inline(always)]
    fn line(&self, index: usize) -> *const u8 {
        self.base.wrapping_add((index % 4) * PAGE + (index / 4) * LINE)
    }

    #[inline(always)]
    fn at(&self, step: usize) {
        if step & ((1 << self.shift) - 1) == 0 {
            if self.double {
                fetch(self.line(self.first_line + 2 * step));
                fetch(self.line(self.first_line + 2 * step + 1));
            } else {
                fetch(self.line(self.first_line + (step >> self.shift)));
            }
        }
    }
}

/// Asks for a block that is needed soon.
pub(super) fn prefetch(block: &[f32]) {
    block.chunks(LINE / size_of::<f32>()).for_each(|line| fetch(line.as_ptr().cast()));
}

#[inline(always)]
fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and never faults, so any address will do; SSE is in every x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// 32 accumulators in registers.
///
/// Implementations have no closures: those would not have the instruction set of the function they end up in, and
/// where the compiler does not inline them each instruction is a call.
trait Registers<W>: Copy {
    /// # Safety
    /// `from` holds 32 floats, and the machine has the instruction set.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// `from` holds 32 weights, and the machine has the instruction set.
    unsafe fn load_weights(from: *const W) -> Self;
    /// `fma(x, w, self)` in every lane.
    /// # Safety
    /// The machine has the instruction set.
    unsafe fn fma(self, x: f32, w: Self) -> Self;
    /// # Safety
    /// `to` takes 32 floats, and the machine has the instruction set.
    unsafe fn store(self, to: *mut f32);
}

/// # Safety
/// `args` points to `R` rows of `x` and `acc` and to `depth` steps of `w`; the machine has `V`'s set.
#[inline(always)]
unsafe fn rows<W, V: Registers<W>, const R: usize>(args: Args<W>) {
    // SAFETY: all offsets are below the bounds that the caller promises.
    unsafe {
        let mut acc = [V::load(args.acc.cast()); R];
        for (r, acc) in acc.iter_mut().enumerate().skip(1) {
            *acc = V::load(args.acc.add(r).cast());
        }
        for k in 0..args.depth {
            let w = V::load_weights(args.w.add(k * PANEL));
            if let Some(prefetch) = &args.prefetch {
                prefetch.at(k);
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = acc.fma(*args.x.add(r * args.x_stride + k), w);
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            acc.store(args.acc.add(r).cast());
        }
    }
}

/// # Safety
/// As [`rows`], with `rows` at most `isa.max_group()` and `isa` found on this machine.
unsafe fn dispatch<W: Weight>(isa: Isa, rows: usize, args: Args<W>) {
    // SAFETY: passed on.
    unsafe {
        match isa.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => x86::avx512(rows, args),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => x86::avx2(rows, args),
            Set::Portable => portable(rows, args),
        }
    }
}

/// # Safety
/// As [`rows`], with `rows` 1 or 2.
unsafe fn portable<W: Weight>(count: usize, args: Args<W>) {
    // SAFETY: passed on.
    unsafe {
        match count {
            1 => rows::<W, Portable, 1>(args),
            2 => rows::<W, Portable, 2>(args),
            _ => unreachable!("max_group"),
        }
    }
}

#[derive(Clone, Copy)]
struct Portable(Lanes);

impl<W: Weight> Registers<W> for Portable {
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 32 floats; an array of them has their alignment.
        Self(unsafe { *from.cast::<Lanes>() })
    }
    unsafe fn load_weights(from: *const W) -> Self {
        // SAFETY: as above.
        Self(W::widen(unsafe { &*from.cast::<[W; PANEL]>() }))
    }
    #[inline(always)]
    unsafe fn fma(mut self, x: f32, w: Self) -> Self {
        for (acc, w) in self.0.iter_mut().zip(w.0) {
            *acc = x.mul_add(w, *acc);
        }
        self
    }
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller takes 32 floats.
        unsafe { *to.cast::<Lanes>() = self.0 }
    }
}

impl sealed::Weight for f32 {
    #[inline(always)]
    fn widen(weights: &[f32; PANEL]) -> Lanes {
        *weights
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(weights: *const f32) -> x86::Avx512 {
        // SAFETY: passed on.
        unsafe { x86::Avx512::floats(weights) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(weights: *const f32) -> x86::Avx2 {
        // SAFETY: passed on.
        unsafe { x86::Avx2::floats(weights) }
    }
}

impl sealed::Weight for bf16 {
    #[inline(always)]
    fn widen(weights: &[bf16; PANEL]) -> Lanes {
        weights.map(|w| f32::from_bits(u32::from(w.to_bits()) << 16))
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(weights: *const bf16) -> x86::Avx512 {
        // SAFETY: passed on.
        unsafe { x86::Avx512::halves(weights.cast()) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(weights: *const bf16) -> x86::Avx2 {
        // SAFETY: passed on.
        unsafe { x86::Avx2::halves(weights.cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Args, Registers, Weight, rows};

    #[derive(Clone, Copy)]
    pub struct Avx512([__m512; 2]);

    #[derive(Clone, Copy)]
    pub struct Avx2([__m256; 4]);

    impl Avx512 {
        /// # Safety
        /// 32 floats at `from`; AVX-512F.
        #[inline(always)]
        pub(super) unsafe fn floats(from: *const f32) -> Self {
            // SAFETY: the caller's 32 floats.
            unsafe { Self([_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]) }
        }

        /// # Safety
        /// 32 bf16 at `from`; AVX-512F.
        #[inline(always)]
        pub(super) unsafe fn halves(from: *const u16) -> Self {
            // SAFETY: the caller's 32 halves. A bf16 is the upper half of the f32 it stands for.
            unsafe {
                let mut parts = [_mm512_setzero_ps(); 2];
                for (i, part) in parts.iter_mut().enumerate() {
                    let halves = _mm256_loadu_si256(from.add(16 * i).cast());
                    *part = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)));
                }
                Self(parts)
            }
        }
    }

    impl Avx2 {
        /// # Safety
        /// 32 floats at `from`; AVX2.
        #[inline(always)]
        pub(super) unsafe fn floats(from: *const f32) -> Self {
            // SAFETY: the caller's 32 floats.
            unsafe {
                let mut parts = [_mm256_setzero_ps(); 4];
                for (i, part) in parts.iter_mut().enumerate() {
                    *part = _mm256_loadu_ps(from.add(8 * i));
                }
                Self(parts)
            }
        }

        /// # Safety
        /// 32 bf16 at `from`; AVX2.
        #[inline(always)]
        pub(super) unsafe fn halves(from: *const u16) -> Self {
            // SAFETY: the caller's 32 halves.
            unsafe {
                let mut parts = [_mm256_setzero_ps(); 4];
                for (i, part) in parts.iter_mut().enumerate() {
                    let halves = _mm_loadu_si128(from.add(8 * i).cast());
                    *part = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)));
                }
                Self(parts)
            }
        }
    }

    impl<W: Weight> Registers<W> for Avx512 {
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: passed on.
            unsafe { Self::floats(from) }
        }
        #[inline(always)]
        unsafe fn load_weights(from: *const W) -> Self {
            // SAFETY: passed on.
            unsafe { W::load_avx512(from) }
        }
        #[inline(always)]
        unsafe fn fma(mut self, x: f32, w: Self) -> Self {
            // SAFETY: the caller has AVX-512F.
            unsafe {
                let x = _mm512_set1_ps(x);
                for (acc, w) in self.0.iter_mut().zip(w.0) {
                    *acc = _mm512_fmadd_ps(x, w, *acc);
                }
            }
            self
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            for (i, part) in self.0.into_iter().enumerate() {
                // SAFETY: the caller takes 32 floats.
                unsafe { _mm512_storeu_ps(to.add(16 * i), part) }
            }
        }
    }

    impl<W: Weight> Registers<W> for Avx2 {
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: passed on.
            unsafe { Self::floats(from) }
        }
        #[inline(always)]
        unsafe fn load_weights(from: *const W) -> Self {
            // SAFETY: passed on.
            unsafe { W::load_avx2(from) }
        }
        #[inline(always)]
        unsafe fn fma(mut self, x: f32, w: Self) -> Self {
            // SAFETY: the caller has AVX2 and FMA.
            unsafe {
                let x = _mm256_set1_ps(x);
                for (acc, w) in self.0.iter_mut().zip(w.0) {
                    *acc = _mm256_fmadd_ps(x, w, *acc);
                }
            }
            self
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            for (i, part) in self.0.into_iter().enumerate() {
                // SAFETY: the caller takes 32 floats.
                unsafe { _mm256_storeu_ps(to.add(8 * i), part) }
            }
        }
    }

    /// # Safety
    /// As [`rows`], with `count` 1..=8 and AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<W: Weight>(count: usize, args: Args<W>) {
        // SAFETY: passed on; this function has the feature.
        unsafe {
            match count {
                1 => rows::<W, Avx512, 1>(args),
                2 => rows::<W, Avx512, 2>(args),
                3 => rows::<W, Avx512, 3>(args),
                4 => rows::<W, Avx512, 4>(args),
                5 => rows::<W, Avx512, 5>(args),
                6 => rows::<W, Avx512, 6>(args),
                7 => rows::<W, Avx512, 7>(args),
                8 => rows::<W, Avx512, 8>(args),
                _ => unreachable!("max_group"),
            }
        }
    }

    /// # Safety
    /// As [`rows`], with `count` 1..=3, AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<W: Weight>(count: usize, args: Args<W>) {
        // SAFETY: passed on; this function has the features.
        unsafe {
            match count {
                1 => rows::<W, Avx2, 1>(args),
                2 => rows::<W, Avx2, 2>(args),
                3 => rows::<W, Avx2, 3>(args),
                _ => unreachable!("max_group"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<W: Weight>(from: impl Fn(f32) -> W, to: impl Fn(W) -> f32) {
        let mut seed = 1u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        for (rows, depth) in [(1, 1), (2, 7), (3, 64), (8, 33), (9, 128), (16, 5), (64, 40)] {
            let stride = depth + 3;
            let x: Vec<f32> = (0..rows * stride).map(|_| random()).collect();
            let w: Vec<W> = (0..depth * PANEL).map(|_| from(random())).collect();
            let start: Vec<Lanes> = (0..rows).map(|_| std::array::from_fn(|_| random())).collect();
            for isa in Isa::available() {
                let mut acc = start.clone();
                accumulate(isa, &x, stride, &w, &mut acc, &w);
                for (r, (got, start)) in acc.iter().zip(&start).enumerate() {
                    for c in 0..PANEL {
                        let terms = (0..depth).map(|k| (x[r * stride + k], to(w[k * PANEL + c])));
                        let want = terms.fold(start[c], |acc, (x, w)| x.mul_add(w, acc));
                        assert_eq!(got[c].to_bits(), want.to_bits(), "{isa:?} {rows}x{depth} {r},{c}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_bits_of_the_definition() {
        check::<f32>(|x| x, |w| w);
        check::<bf16>(bf16::from_f32, bf16::to_f32);
    }
}
