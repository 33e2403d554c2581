//! The kernels that gather features for the draft head, as sums of two rounded planes, executed in the emulator
//! through the real CUDA backend, against the rounding in Rust: bit for bit.
#![cfg(feature = "cuda")]

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{Logit, gather_features};
use eagle_verify::{Element, ErrorKind};
use half::{bf16, f16};

mod common;
#[path = "common/device.rs"]
mod device;
use device::{Random, catch_mutants, device, outcome};

/// The values at the edges of three number formats.
const EDGES: [f32; 24] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-3,
    0.1,
    1e-7,
    1e-8,
    5.9e-8,
    6e-5,
    1e-39,
    1e-45,
    65504.0,
    65519.0,
    65520.0,
    -65536.0,
    1e5,
    -2e5,
    3.389e38,
    3.3961e38,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
];

trait Feature: Logit {
    fn round(value: f32) -> Self;
    fn exact(self) -> f32;
}

impl Feature for f32 {
    fn round(value: f32) -> Self {
        value
    }
    fn exact(self) -> f32 {
        self
    }
}

impl Feature for bf16 {
    fn round(value: f32) -> Self {
        Element::from_f32(value)
    }
    fn exact(self) -> f32 {
        self.to_f32()
    }
}

impl Feature for f16 {
    fn round(value: f32) -> Self {
        Element::from_f32(value)
    }
    fn exact(self) -> f32 {
        self.to_f32()
    }
}

/// What `split` in row.cuh does.
fn split<W: Element>(x: f32) -> [W; 2] {
    let largest = f32::from_bits(if W::NAME == "f16" { 0x477F_E000 } else { 0x7F7F_0000 });
    let nearest = |x: f32| W::from_f32(if x.is_finite() { x.clamp(-largest, largest) } else { x });
    let high = nearest(x);
    [high, nearest(if x.is_finite() { x - high.to_f32() } else { 0.0 })]
}

/// Gathers some rows of features; rows that are not named are NaN, and stay as they are in the planes.
fn gather<F: Feature, W: Element>(random: &mut Random, width: usize, skew: [usize; 2]) -> Result<(), String> {
    let cuda = device();
    let (num_rows, capacity, count) = (9, 11, random.below(8));
    let mut rows: Vec<[u32; 2]> = (0..count as u32).map(|i| [random.below(num_rows) as u32, i]).collect();
    let mut order: Vec<u32> = (0..capacity as u32).collect();
    for row in &mut rows {
        row[1] = order.swap_remove(random.below(order.len()));
    }
    let mut features = vec![F::round(f32::NAN); skew[0] + num_rows * width];
    for [from, _] in &rows {
        for feature in &mut features[skew[0] + *from as usize * width..][..width] {
            let small = random.0.next_f32() * 10.0;
            let scale = f32::powi(2.0, random.below(60) as i32 - 30);
            *feature = F::round(match random.below(8) {
                0 => EDGES[random.below(EDGES.len())],
                1 => f32::NAN,
                2 => small * scale,
                _ => small,
            });
        }
    }
    let poison = vec![<W as Element>::from_f32(-77.0); skew[1] + capacity * width];
    let mut want = [poison.clone(), poison.clone()];
    for [from, to] in &rows {
        for column in 0..width {
            let parts = split::<W>(features[skew[0] + *from as usize * width + column].exact());
            for (plane, part) in want.iter_mut().zip(parts) {
                plane[skew[1] + *to as usize * width + column] = part;
            }
        }
    }
    let (device_features, list) = (outcome(cuda.upload(&features))?, outcome(cuda.upload(&rows))?);
    let (mut high, mut low) = (outcome(cuda.upload(&poison))?, outcome(cuda.upload(&poison))?);
    let source = device_features.slice().get(skew[0]..features.len()).unwrap();
    let [to_high, to_low] =
        [&mut high, &mut low].map(|plane| plane.slice_mut().get(skew[1]..poison.len()).unwrap());
    // SAFETY: the rows are below `num_rows` and `capacity`, and each of the latter is there once.
    let queued = unsafe { gather_features(&cuda, width, source, list.slice(), to_high, to_low) };
    queued.map_err(|error| error.to_string())?;
    let seen = [outcome(cuda.download(&high))?, outcome(cuda.download(&low))?];
    for (name, (seen, want)) in ["high", "low"].into_iter().zip(seen.iter().zip(&want)) {
        let (seen, want) = (bytemuck::cast_slice::<W, u16>(seen), bytemuck::cast_slice::<W, u16>(want));
        if let Some(at) = (0..want.len()).find(|at| seen[*at] != want[*at]) {
            let text = format!("{} to {}, width {width}, {skew:?}, {rows:?}", F::NAME, W::NAME);
            return Err(format!("{name} at {at}: {:04x}, not {:04x}; {text}", seen[at], want[at]));
        }
    }
    Ok(())
}

fn random_gathers(seed: u64, calls: usize) -> Result<(), String> {
    let mut random = Random::new(seed);
    for _ in 0..calls {
        // Wide accesses or not, by the width or by an address.
        let width = random.pick(&[2, 6, 8, 10, 64, 264, 1032, 2080]);
        let skew = random.pick(&[[0, 0], [0, 0], [8, 8], [1, 0], [0, 2], [3, 6]]);
        gather::<bf16, bf16>(&mut random, width, skew)?;
        gather::<f16, bf16>(&mut random, width, skew)?;
        gather::<f32, bf16>(&mut random, width, skew)?;
        gather::<bf16, f16>(&mut random, width, skew)?;
        gather::<f16, f16>(&mut random, width, skew)?;
        gather::<f32, f16>(&mut random, width, skew)?;
    }
    Ok(())
}

#[test]
fn gathers_equal_the_rounding_in_rust() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    random_gathers(1, 60).unwrap();
    // The halves carry what one alone would lose.
    let x = 1.0 + f32::EPSILON * 300.0;
    let [high, low] = split::<bf16>(x);
    assert!(high == bf16::ONE && high.to_f32() + low.to_f32() == x);
}

/// Every schedule gives the same, without a race.
#[test]
fn schedules_make_no_difference() {
    let _machine = emulator::exclusive();
    for seed in emulator::seeds(6) {
        emulator::configure(&emulator::Config::checked(seed));
        random_gathers(seed, 2).unwrap_or_else(|seen| panic!("EMU_SEED={seed}: {seen}"));
    }
}

/// The same comparison sees each of these faults.
#[test]
fn faults_are_caught() {
    let _machine = emulator::exclusive();
    assert_eq!(catch_mutants("gather", &[3], |seed| random_gathers(seed, 20)), 6);
}

#[test]
fn misuse_of_a_gather_is_an_error() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let (cuda, other) = (device(), device());
    let features = cuda.upload(&[1.0f32; 24]).unwrap();
    let elsewhere = other.upload(&[1.0f32; 24]).unwrap();
    let (list, none) = (cuda.upload(&[[0u32, 0]]).unwrap(), cuda.upload::<[u32; 2]>(&[]).unwrap());
    let many = cuda.upload(&vec![[0u32, 0]; 65_536]).unwrap();
    let [mut high, mut low] = [(); 2].map(|_| cuda.upload(&[bf16::ONE; 25]).unwrap());
    let before = emulator::report().stats;
    for (width, source, rows, planes, why) in [
        (0, &features, &list, 0..24, "whole rows of 0"),
        (5, &features, &list, 0..24, "whole rows of 5"),
        (8, &features, &list, 0..23, "whole rows of 8"),
        (3, &features, &list, 0..24, "a positive multiple of 2"),
        (8, &elsewhere, &list, 0..24, "memory of this `Cuda`"),
        (8, &features, &many, 0..24, "at most 65535"),
        (8, &features, &list, 1..25, "multiple of 4"),
        (8, &features, &none, 0..24, ""),
    ] {
        let [to_high, to_low] =
            [&mut high, &mut low].map(|plane| plane.slice_mut().get(planes.clone()).unwrap());
        // SAFETY: row 0 is there, and only named where the call must fail.
        let queued = unsafe { gather_features(&cuda, width, source.slice(), rows.slice(), to_high, to_low) };
        match queued {
            Ok(()) => assert_eq!(why, "", "an empty list is no launch"),
            Err(error) => {
                assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{error}");
            }
        }
    }
    cuda.synchronize().unwrap();
    assert_eq!(emulator::report().stats, before, "nothing ran");
}

/// A captured gather reads the list anew in every replay.
#[test]
fn a_gather_is_replayed_with_another_list() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let cuda = device();
    let features: Vec<f32> = (0..3 * 16).map(|i| i as f32 + 1.0 / 1024.0).collect();
    let source = cuda.upload(&features).unwrap();
    let mut list = cuda.upload(&[[0u32, 0]]).unwrap();
    let [mut high, mut low] = [(); 2].map(|_| cuda.upload(&[bf16::ZERO; 2 * 16]).unwrap());
    let mut graph = cuda
        .capture(|| {
            let (to_high, to_low) = (high.slice_mut(), low.slice_mut());
            // SAFETY: all lists below name rows that are there.
            unsafe { gather_features(&cuda, 16, source.slice(), list.slice(), to_high, to_low) }
        })
        .unwrap();
    for [from, to] in [[2, 1], [1, 0]] {
        cuda.write(&mut list, &[[from, to]]).unwrap();
        // SAFETY: the buffers are alive.
        unsafe { graph.launch() }.unwrap();
        let seen = [cuda.download(&high).unwrap(), cuda.download(&low).unwrap()];
        for column in 0..16 {
            let want = split::<bf16>(features[from as usize * 16 + column]);
            assert_eq!([0, 1].map(|half: usize| seen[half][to as usize * 16 + column]), want);
        }
    }
    assert!(emulator::report().is_clean());
}
