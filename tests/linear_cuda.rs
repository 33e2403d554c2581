//! The kernels of linear layers, executed in the emulator through the real CUDA backend, against plain loops: bit for
//! bit in the emulator's order of sums, and within the stated bounds whatever the order.
#![cfg(feature = "cuda")]

use std::time::Instant;

use cuda_emulator as emulator;
use eagle_verify::backend::cpu::{Cpu, PackedLinear};
use eagle_verify::backend::cuda::{Cuda, DeviceSlice, Linear};
use eagle_verify::{Element, ErrorKind};
use half::{bf16, f16};

mod common;
#[path = "common/device.rs"]
mod device;
use common::toy::Numbers;
use device::{catch_mutants, device, held, outcome};

const MAX_ROWS: usize = 64;

/// What the largest finite value of a type is, and half the distance of neighbours at 1.
trait Weight: Element {
    const MAX: f32;
    const HALF_STEP: f64;
}

impl Weight for bf16 {
    const MAX: f32 = f32::from_bits(0x7F7F_0000);
    const HALF_STEP: f64 = 1.0 / 256.0;
}

impl Weight for f16 {
    const MAX: f32 = 65504.0;
    const HALF_STEP: f64 = 1.0 / 2048.0;
}

/// A float as two of the type.
fn split<T: Weight>(x: f32) -> [T; 2] {
    if !x.is_finite() {
        return [x, 0.0].map(T::from_f32);
    }
    let high = T::from_f32(x.clamp(-T::MAX, T::MAX));
    [high, T::from_f32((x - high.to_f32()).clamp(-T::MAX, T::MAX))]
}

/// A layer's weights, `[outputs, inputs]`.
#[derive(Clone)]
struct Layer<T> {
    weights: Vec<T>,
    outputs: usize,
    inputs: usize,
}

impl<T: Weight> Layer<T> {
    fn random(outputs: usize, inputs: usize, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let weights = (0..outputs * inputs).map(|_| T::from_f32(2.0 * numbers.next_f32())).collect();
        Self { weights, outputs, inputs }
    }

    fn on(&self, cuda: &Cuda) -> Linear<T> {
        Linear::new(cuda, &self.weights, self.outputs, self.inputs).unwrap()
    }

    fn rows(&self) -> impl Iterator<Item = &[T]> {
        self.weights.chunks(self.inputs)
    }

    /// One row in the kernel's order: slices of chunks of 64, of which each of four warps has 16 inputs; products with
    /// the high parts of 16 inputs one after the other, then with their low parts.
    fn specified(&self, x: &[[T; 2]], slices: usize) -> Vec<f32> {
        let slice_inputs = self.inputs.div_ceil(64).div_ceil(slices) * 64;
        let output = |weights: &[T]| {
            let slice = |(x, weights): (&[[T; 2]], &[T])| {
                let mut sums = [0.0f32; 4];
                for (i, (x, weights)) in x.chunks(16).zip(weights.chunks(16)).enumerate() {
                    for part in 0..2 {
                        for (x, weight) in x.iter().zip(weights) {
                            sums[i % 4] += weight.to_f32() * x[part].to_f32();
                        }
                    }
                }
                ((sums[0] + sums[1]) + sums[2]) + sums[3]
            };
            let sums = x.chunks(slice_inputs).zip(weights.chunks(slice_inputs)).map(slice);
            sums.reduce(|sum, slice| sum + slice).unwrap()
        };
        self.rows().map(output).collect()
    }

    /// One row, and by how much an output may differ from it: two halves for each x, and a rounding for each sum.
    fn exact(&self, x: &[f32], slices: usize) -> Vec<(f64, f64)> {
        let num_sums = self.inputs.div_ceil(64).div_ceil(slices) * 32 + 3 + slices;
        let relative = T::HALF_STEP * T::HALF_STEP + num_sums as f64 / f64::from(1 << 24);
        let output = |weights: &[T]| {
            let products =
                weights.iter().zip(x).map(|(weight, x)| f64::from(weight.to_f32()) * f64::from(*x));
            let sizes = products.clone().map(f64::abs);
            // Half the step of subnormals in f16.
            (products.sum(), relative * sizes.sum::<f64>() + self.inputs as f64 * 2.0 * 2f64.powi(-25))
        };
        self.rows().map(output).collect()
    }
}

fn forward<T: Weight>(cuda: &Cuda, layer: &mut Linear<T>, x: &[f32]) -> Result<Vec<f32>, String> {
    let input = cuda.upload(x).unwrap();
    let mut output = cuda.alloc(x.len() / layer.num_inputs() * layer.num_outputs()).unwrap();
    layer.forward(input.slice(), output.slice_mut()).map_err(|error| error.to_string())?;
    outcome(cuda.download(&output))
}

/// The same bits, or both NaN.
fn differences(seen: &[f32], want: &[f32], what: &str) -> Result<(), String> {
    assert_eq!(seen.len(), want.len(), "{what}");
    let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    match seen.iter().zip(want).position(|pair| !is_same(pair)) {
        None => Ok(()),
        Some(i) => Err(format!("{what}, output {i}: {}, not {}", seen[i], want[i])),
    }
}

/// Rows through a layer against the specification and the bounds.
fn compare<T: Weight>(cuda: &Cuda, layer: &Layer<T>, num_rows: &[usize], seed: u64) -> Result<(), String> {
    let (mut linear, inputs) = (layer.on(cuda), layer.inputs);
    let most = *num_rows.iter().max().unwrap();
    let x = Numbers::new(seed).floats(most * inputs);
    let slices = linear.num_slices();
    let row = |x: &[f32]| {
        let halves: Vec<[T; 2]> = x.iter().map(|x| split(*x)).collect();
        let want = layer.specified(&halves, slices);
        for (want, (exact, bound)) in want.iter().zip(layer.exact(x, slices)) {
            assert!((f64::from(*want) - exact).abs() <= bound, "{want}, not {exact}");
        }
        want
    };
    let want: Vec<f32> = x.chunks(inputs).flat_map(row).collect();
    for &rows in num_rows {
        let what = format!("{} rows of {} by {inputs}, {}", rows, layer.outputs, T::NAME);
        // The last rows: each is at every place.
        let skipped = most - rows;
        let seen = forward(cuda, &mut linear, &x[skipped * inputs..])?;
        differences(&seen, &want[skipped * layer.outputs..], &what)?;
    }
    Ok(())
}

/// Rows of planes that are full of NaN elsewhere, to partials that must be left alone elsewhere: with a list of rows
/// and without, with a low plane, with one of zeros and with none.
fn partials<T: Weight>(cuda: &Cuda, layer: &Layer<T>, num_rows: usize, seed: u64) -> Result<(), String> {
    const UNTOUCHED: f32 = 12345.0;
    let (linear, inputs, mut numbers) = (layer.on(cuda), layer.inputs, Numbers::new(seed));
    let plane_rows = num_rows + 9;
    let mut index: Vec<u32> = (0..plane_rows as u32).collect();
    (1..plane_rows).for_each(|i| index.swap(i, (numbers.next_u64() % (i as u64 + 1)) as usize));
    index.truncate(num_rows);
    let slices = linear.num_slices();
    let buffer = |values: &[T]| cuda.upload(values).unwrap();
    for has_index in [false, true] {
        let used = |row: usize| if has_index { index.contains(&(row as u32)) } else { row < num_rows };
        let planes: Vec<[T; 2]> = (0..plane_rows * inputs)
            .map(|i| if used(i / inputs) { split(numbers.next_f32()) } else { [T::from_f32(f32::NAN); 2] })
            .collect();
        let high: Vec<T> = planes.iter().map(|x| x[0]).collect();
        let zeros: Vec<T> =
            high.iter().map(|x| if x.to_f32().is_nan() { *x } else { T::from_f32(0.0) }).collect();
        let low: Vec<T> = planes.iter().map(|x| x[1]).collect();
        let (device_high, device_index) = (buffer(&high), cuda.upload(&index).unwrap());
        for low in [Some(&low), Some(&zeros), None] {
            let device_low = low.map(|low| buffer(low));
            let mut partials = cuda.upload(&vec![UNTOUCHED; slices * MAX_ROWS * layer.outputs]).unwrap();
            // SAFETY: all is of this device, and the planes have the rows of the list.
            let queued = unsafe {
                let low = device_low.as_ref().map(|low| low.slice());
                let index = has_index.then(|| device_index.slice());
                linear.queue_partials(device_high.slice(), low, index, num_rows, partials.slice_mut())
            };
            let seen = outcome(queued.and_then(|()| cuda.download(&partials)))?;
            for row in 0..MAX_ROWS {
                let of_slice = |slice| &seen[(slice * MAX_ROWS + row) * layer.outputs..][..layer.outputs];
                if row >= num_rows {
                    let is_untouched =
                        (0..slices).all(|slice| of_slice(slice).iter().all(|v| *v == UNTOUCHED));
                    if !is_untouched {
                        return Err(format!("row {row} of {num_rows} was written"));
                    }
                    continue;
                }
                let first = if has_index { index[row] as usize } else { row } * inputs;
                let x: Vec<[T; 2]> = (first..first + inputs)
                    .map(|i| [high[i], low.map_or(T::from_f32(0.0), |low| low[i])])
                    .collect();
                let mut sum = of_slice(0).to_vec();
                (1..slices)
                    .for_each(|slice| sum.iter_mut().zip(of_slice(slice)).for_each(|(sum, v)| *sum += v));
                let what = format!("row {row}, list {has_index}, low {}", low.is_some());
                differences(&sum, &layer.specified(&x, slices), &what)?;
            }
        }
    }
    Ok(())
}

/// Rows with numbers that are none, or too large for the weights' type, among others.
fn extremes<T: Weight>(cuda: &Cuda) -> Result<(), String> {
    let layer = Layer::<T>::random(70, 72, 5);
    let mut linear = layer.on(cuda);
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        -f32::MAX,
        65504.0,
        65519.9,
        -65520.0,
        70_000.0,
        131_008.0,
        -1e6,
        1e-7,
        -1e-40,
        -0.0,
    ];
    let mut x = Numbers::new(6).floats(2 * special.len() * layer.inputs);
    let plain = forward(cuda, &mut linear, &x)?;
    for (i, special) in special.into_iter().enumerate() {
        x[2 * i * layer.inputs + 5 * i] = special;
    }
    let seen = forward(cuda, &mut linear, &x)?;
    for (row, (x, seen)) in x.chunks(layer.inputs).zip(seen.chunks(layer.outputs)).enumerate() {
        let halves: Vec<[T; 2]> = x.iter().map(|x| split(*x)).collect();
        differences(seen, &layer.specified(&halves, linear.num_slices()), &format!("extremes, row {row}"))?;
        if row % 2 == 1 {
            let want = &plain[row * layer.outputs..][..layer.outputs];
            differences(seen, want, &format!("beside extremes, row {row}"))?;
        }
    }
    Ok(())
}

/// All that a fault in the kernels may show in, small enough for the emulator with all checks.
fn suite(seed: u64) -> Result<(), String> {
    let cuda = device();
    compare::<bf16>(&cuda, &Layer::random(70, 712, seed), &[3, 13], seed + 1)?;
    compare::<f16>(&cuda, &Layer::random(7, 72, seed), &[1, 20, 40], seed + 2)?;
    partials::<bf16>(&cuda, &Layer::random(66, 536, seed), 5, seed + 3)?;
    partials::<f16>(&cuda, &Layer::random(68, 40, seed), 17, seed + 4)?;
    extremes::<bf16>(&cuda)?;
    extremes::<f16>(&cuda)
}

/// The machine as fast as it is, with few blocks at a time: more threads than the host's cache has room for are slow.
fn fast() -> emulator::Config {
    emulator::Config { max_resident_blocks: 2, ..emulator::Config::fast() }
}

#[test]
fn every_number_of_rows_equals_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&fast());
    let cuda = device();
    let all: Vec<usize> = (1..=MAX_ROWS).chain([65, 130]).collect();
    compare::<bf16>(&cuda, &Layer::random(65, 200, 1), &all, 2).unwrap();
    compare::<f16>(&cuda, &Layer::random(3, 8, 3), &all, 4).unwrap();
}

#[test]
fn every_shape_equals_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&fast());
    let cuda = device();
    for inputs in [8, 16, 56, 64, 72, 128, 520, 576, 1152, 1736] {
        for outputs in [1, 4, 15, 64, 130] {
            let seed = (inputs * outputs) as u64;
            compare::<bf16>(&cuda, &Layer::random(outputs, inputs, seed), &[1, 8, 9], seed).unwrap();
            compare::<f16>(&cuda, &Layer::random(outputs, inputs, seed), &[2, 33], seed).unwrap();
        }
    }
    for rows in [1, 8, 23, 64] {
        partials::<bf16>(&cuda, &Layer::random(129, 1096, 7), rows, 8).unwrap();
        partials::<f16>(&cuda, &Layer::random(31, 136, 9), rows, 10).unwrap();
    }
    extremes::<bf16>(&cuda).unwrap();
    extremes::<f16>(&cuda).unwrap();
}

/// Rows of the weights' type: the bits of the same numbers in f32. In a graph, too.
#[test]
fn exact_rows_and_graphs_give_the_same_bits() {
    let _machine = emulator::exclusive();
    emulator::configure(&fast());
    let cuda = device();
    let layer = Layer::<bf16>::random(100, 640, 1);
    let (mut linear, rows) = (layer.on(&cuda), 70);
    let halves: Vec<bf16> = Numbers::new(2).floats(rows * 640).into_iter().map(Element::from_f32).collect();
    let floats: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    let want = forward(&cuda, &mut linear, &floats).unwrap();
    let (exact, x) = (cuda.upload(&halves).unwrap(), cuda.upload(&floats).unwrap());
    let mut y = cuda.alloc(rows * 100).unwrap();
    linear.forward_exact(exact.slice(), y.slice_mut()).unwrap();
    differences(&cuda.download(&y).unwrap(), &want, "exact").unwrap();
    let mut graph = cuda.capture(|| linear.forward(x.slice(), y.slice_mut())).unwrap();
    for _ in 0..2 {
        cuda.write(&mut y, &vec![0.0; rows * 100]).unwrap();
        // SAFETY: all is still alive.
        unsafe { graph.launch().unwrap() };
        differences(&cuda.download(&y).unwrap(), &want, "graph").unwrap();
    }
}

/// The CPU's layer computes with unrounded f32: the difference is that of two halves and of the order of sums.
#[test]
fn results_are_close_to_the_cpus() {
    let _machine = emulator::exclusive();
    emulator::configure(&fast());
    let (cuda, cpu) = (device(), Cpu::with_threads(1).unwrap());
    for (outputs, inputs, rows) in [(576, 1728, 8), (200, 576, 64), (64, 4096, 3)] {
        let layer = Layer::<bf16>::random(outputs, inputs, 3);
        let x = Numbers::new(4).floats(rows * inputs);
        let seen = forward(&cuda, &mut layer.on(&cuda), &x).unwrap();
        let mut want = vec![0.0; seen.len()];
        PackedLinear::new(&layer.weights, outputs, inputs).unwrap().forward(&cpu, &x, &mut want).unwrap();
        for (seen, want) in seen.chunks(outputs).zip(want.chunks(outputs)) {
            let scale = want.iter().fold(0.0f32, |scale, y| scale.max(y.abs()));
            let most = seen.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most <= 2e-5 * scale, "{most} of {scale}");
        }
    }
}

/// A call reads the weights once, and each tile of 64 outputs the rows once, in two planes.
#[test]
fn weights_are_read_once() {
    let _machine = emulator::exclusive();
    let cuda = device();
    for (outputs, inputs, rows) in [(130, 720, 1), (130, 720, 23), (64, 640, 64), (1, 8, 5)] {
        let mut linear = Layer::<bf16>::random(outputs, inputs, 1).on(&cuda);
        let x = Numbers::new(2).floats(rows * inputs);
        emulator::configure(&fast());
        forward(&cuda, &mut linear, &x).unwrap();
        let want = linear.num_bytes() + outputs.div_ceil(64) * rows * inputs * 2 * 2;
        assert_eq!(emulator::report().stats.num_copied_bytes, want as u64);
    }
}

/// For the record: what the layers of a small head cost here.
#[test]
fn what_a_small_heads_layers_cost() {
    let _machine = emulator::exclusive();
    emulator::configure(&fast());
    let cuda = device();
    for (outputs, inputs) in [(576, 1728), (3072, 576)] {
        let mut linear = Layer::<bf16>::random(outputs, inputs, 1).on(&cuda);
        let (x, mut y) = (cuda.upload(&vec![0.5f32; 8 * inputs]).unwrap(), cuda.alloc(8 * outputs).unwrap());
        emulator::configure(&fast());
        let start = Instant::now();
        linear.forward(x.slice(), y.slice_mut()).unwrap();
        cuda.synchronize().unwrap();
        let (elapsed, tiles) = (start.elapsed(), emulator::report().stats.num_multiplied_tiles);
        println!(
            "{outputs} by {inputs}: {tiles} tiles, {:.2} us each",
            elapsed.as_secs_f64() * 1e6 / tiles as f64
        );
        assert_eq!(tiles as usize, 2 * outputs.div_ceil(64) * 4 * inputs.div_ceil(64) * 4);
    }
}

/// Every schedule gives the same, without a race.
#[test]
fn schedules_make_no_difference() {
    let _machine = emulator::exclusive();
    let before = held(); // by machines that failed, in other tests
    for seed in emulator::seeds(3) {
        emulator::configure(&emulator::Config::checked(seed));
        suite(seed).unwrap_or_else(|seen| panic!("EMU_SEED={seed}: {seen}"));
    }
    assert_eq!(held(), before, "all is freed");
}

/// The same comparison sees each of these faults.
#[test]
fn faults_are_caught() {
    let _machine = emulator::exclusive();
    assert_eq!(catch_mutants("linear", &emulator::seeds(3).collect::<Vec<_>>(), suite), 15);
}

#[test]
fn misuse_is_an_error_before_anything_is_queued() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let cuda = device();
    let ones = [bf16::ONE; 64];
    for (made, kind, why) in [
        (Linear::new(&cuda, &ones, 4, 8), ErrorKind::Misuse, "wanted 4, seen 8"),
        (Linear::new(&cuda, &ones, 0, 8), ErrorKind::Misuse, "wanted 0, seen 8"),
        (Linear::new(&cuda, &ones, 8, 0), ErrorKind::Misuse, "wanted 8, seen 0"),
        (Linear::new(&cuda, &ones, 2, 24), ErrorKind::Misuse, "positive multiple of the number of inputs"),
        (Linear::new(&cuda, &ones, 16, 4), ErrorKind::Unsupported, "multiple of 8"),
        (Linear::stack(&cuda, &[], 8), ErrorKind::Misuse, "seen 0"),
        (Linear::stack(&cuda, &[&ones[..], &[]], 8), ErrorKind::Misuse, "seen 0"),
        (Linear::stack(&cuda, &[&ones[..], &ones[..4]], 8), ErrorKind::Misuse, "seen 4"),
    ] {
        let error = made.unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(why), "{error}");
    }
    let mut linear = Linear::new(&cuda, &ones, 8, 8).unwrap();
    let other = device();
    let (x, elsewhere) = (cuda.upload(&[1.0f32; 64]).unwrap(), other.upload(&[1.0f32; 16]).unwrap());
    let mut y = cuda.alloc::<f32>(64).unwrap();
    let two = x.slice().get(0..16).unwrap();
    // SAFETY: never read: the call must fail.
    let raw = |address| unsafe { DeviceSlice::<f32>::from_raw(&cuda, address, 16) };
    let y_address = y.address();
    let before = emulator::report().stats;
    for (x, len, why) in [
        (x.slice().get(0..15).unwrap(), 16, "input of a linear layer: wanted 8, seen 15"),
        (two, 15, "output of a linear layer: wanted 16, seen 15"),
        (two, 24, "output of a linear layer: wanted 16, seen 24"),
        (elsewhere.slice(), 16, "the layer's `Cuda`"),
        (raw(0), 16, "multiple of 16"),
        (raw(x.address() + 4), 16, "multiple of 16"),
        (raw(y_address + 32), 16, "apart from the input"),
        (raw(y_address - 32), 16, "apart from the input"),
    ] {
        let error = linear.forward(x, y.slice_mut().get(0..len).unwrap()).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{error}");
    }
    for num_rows in [0, 65] {
        let high = cuda.upload(&ones).unwrap();
        let mut partials = cuda.alloc(MAX_ROWS * 8).unwrap();
        // SAFETY: never read: the call must fail.
        let queued =
            unsafe { linear.queue_partials(high.slice(), None, None, num_rows, partials.slice_mut()) };
        let error = queued.unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("1 to 64"), "{error}");
    }
    assert_eq!(emulator::report().stats, before, "nothing ran");
    // The control; and no rows are fine.
    linear.forward(two, y.slice_mut().get(0..16).unwrap()).unwrap();
    linear.forward(x.slice().get(0..0).unwrap(), y.slice_mut().get(0..0).unwrap()).unwrap();
    assert_eq!(cuda.download(&y).unwrap()[..17], [[8.0; 16].as_slice(), &[0.0]].concat());
    let stacked = Linear::stack(&cuda, &[&ones[..8], &ones[..]], 8).unwrap();
    assert_eq!((stacked.num_outputs(), stacked.num_inputs(), stacked.num_bytes()), (9, 8, 144));
}
