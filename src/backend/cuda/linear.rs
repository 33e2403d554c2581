//! Linear layers for few rows on a GPU: the weights stream from memory once for up to 64 rows.

use std::marker::PhantomData;
use std::mem::offset_of;

use super::context::{Cuda, Kernel};
use super::launch;
use super::memory::{DeviceSlice, DeviceSliceMut, Memory};
use crate::element::Element;
use crate::error::{Error, Result, expect_len};

/// The most rows of a launch.
pub(super) const MAX_ROWS: usize = 64;
/// Inputs that a block multiplies at a time.
const CHUNK: usize = 64;
/// Outputs of a block.
const TILE_OUTPUTS: usize = 64;
/// Of a block, for all kernels here.
const THREADS: u32 = 128;
/// Two for each multiprocessor of the largest SM120 device. Not that of the device in hand: bits must not depend on it.
const WANTED_BLOCKS: usize = 2 * 188;
/// Shorter slices would spend their time on filling the pipeline and on their sums.
const MIN_SLICE_CHUNKS: usize = 4;

/// The most rows of each instance of `linear.cu`, and the stages of its pipeline.
const INSTANCES: [(usize, usize); 4] = [(8, 4), (16, 4), (32, 3), (64, 2)];

/// `EvLinear`.
#[repr(C)]
struct LinearArguments {
    weights: u64,
    high: u64,
    low: u64,
    row_index: u64,
    partials: u64,
    rows: u32,
    inputs: u32,
    outputs: u32,
    slice_chunks: u32,
}

/// `EvSplit`.
#[repr(C)]
struct SplitArguments {
    values: u64,
    high: u64,
    low: u64,
    packs: u64,
}

/// `EvAddSlices`.
#[repr(C)]
struct AddSlicesArguments {
    partials: u64,
    sums: u64,
    outputs: u32,
    slices: u32,
}

// The offsets that abi.h asserts.
const _: () = {
    assert!(offset_of!(LinearArguments, weights) == 0);
    assert!(offset_of!(LinearArguments, high) == 8);
    assert!(offset_of!(LinearArguments, low) == 16);
    assert!(offset_of!(LinearArguments, row_index) == 24);
    assert!(offset_of!(LinearArguments, partials) == 32);
    assert!(offset_of!(LinearArguments, rows) == 40);
    assert!(offset_of!(LinearArguments, inputs) == 44);
    assert!(offset_of!(LinearArguments, outputs) == 48);
    assert!(offset_of!(LinearArguments, slice_chunks) == 52);
    assert!(size_of::<LinearArguments>() == 56);
    assert!(offset_of!(SplitArguments, values) == 0);
    assert!(offset_of!(SplitArguments, high) == 8);
    assert!(offset_of!(SplitArguments, low) == 16);
    assert!(offset_of!(SplitArguments, packs) == 24);
    assert!(size_of::<SplitArguments>() == 32);
    assert!(offset_of!(AddSlicesArguments, partials) == 0);
    assert!(offset_of!(AddSlicesArguments, sums) == 8);
    assert!(offset_of!(AddSlicesArguments, outputs) == 16);
    assert!(offset_of!(AddSlicesArguments, slices) == 20);
    assert!(size_of::<AddSlicesArguments>() == 24);
};

/// Rows of activations as two planes of the weights' type, `[.., inputs]` at addresses that are multiples of 16: each
/// value is its `high` plus its `low`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Halves {
    pub(super) high: u64,
    /// 0 for a plane of zeros.
    pub(super) low: u64,
    /// `[rows]` of u32: which row of the planes each row is. 0 for the first rows, in order.
    pub(super) row_index: u64,
}

/// The weights of a linear layer in device memory, and how they are multiplied.
#[derive(Debug)]
pub(super) struct LinearWeights {
    memory: Memory,
    kernels: [Kernel; INSTANCES.len()],
    num_inputs: usize,
    num_outputs: usize,
    slice_chunks: usize,
}

impl LinearWeights {
    /// Uploads several layers over the same input as one, their outputs one after the other.
    ///
    /// # Errors
    /// *Misuse* when `num_inputs` is 0, a part is not whole rows of it, or there are no outputs. *Unsupported* when
    /// `num_inputs` is not a multiple of 8, a dimension is beyond 2^31, or the images lack the kernels. *Fault* when
    /// the device has no memory.
    pub(super) fn stack<T: Element>(cuda: &Cuda, parts: &[&[T]], num_inputs: usize) -> Result<Self> {
        let wanted = "a positive multiple of the number of inputs";
        for part in parts {
            if num_inputs == 0 || part.is_empty() || part.len() % num_inputs != 0 {
                return Err(Error::misuse("weights of a linear layer", wanted, part.len()));
            }
        }
        let num_weights: usize = parts.iter().map(|part| part.len()).sum();
        if num_weights == 0 {
            return Err(Error::misuse("weights of a linear layer", wanted, 0));
        }
        if !num_inputs.is_multiple_of(8) {
            return Err(Error::unsupported("inputs of a linear layer", "a multiple of 8", num_inputs));
        }
        let num_outputs = num_weights / num_inputs;
        for (what, size) in [("inputs", num_inputs), ("outputs", num_outputs)] {
            if size > 1 << 31 {
                return Err(Error::unsupported(format!("{what} of a linear layer"), "at most 2^31", size));
            }
        }
        let mut kernels = Vec::with_capacity(INSTANCES.len());
        for (rows, _) in INSTANCES {
            kernels.push(cuda.kernel(&format!("ev_linear_{}_r{rows}", T::NAME))?);
        }
        let mut memory = Memory::new(cuda, num_weights * size_of::<T>(), 0)?;
        let mut offset = 0;
        for part in parts {
            memory.queue_write_at(offset, part)?;
            offset += size_of_val(*part);
        }
        cuda.synchronize()?;
        Ok(Self {
            memory,
            kernels: std::array::from_fn(|i| kernels[i]),
            num_inputs,
            num_outputs,
            slice_chunks: slice_chunks(num_outputs, num_inputs),
        })
    }

    pub(super) fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    pub(super) fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// Parts of the inputs whose sums are apart in the partials.
    pub(super) fn num_slices(&self) -> usize {
        self.num_inputs.div_ceil(CHUNK).div_ceil(self.slice_chunks)
    }

    /// Floats that a call's partials have room for: `[slices, MAX_ROWS, outputs]`.
    pub(super) fn num_partials(&self) -> usize {
        self.num_slices() * MAX_ROWS * self.num_outputs
    }

    /// Queues `x W^T` for `num_rows` rows: a sum for each slice of the inputs. The layer's output is their sum,
    /// ascending: `((s0 + s1) + s2) + ..`. Of the partials, the first `num_rows` rows of each slice are written.
    ///
    /// # Errors
    /// *Misuse* when there are no rows or more than [`MAX_ROWS`]; *fault* when the driver refuses.
    ///
    /// # Safety
    /// For work on the stream of the weights' `Cuda`, and until it has run: the planes have the rows that `row_index`
    /// names, which has `num_rows` entries; `partials` is an address, a multiple of 16, of
    /// [`num_partials`](Self::num_partials) floats that overlap nothing of these.
    pub(super) unsafe fn queue(&self, inputs: Halves, num_rows: usize, partials: u64) -> Result<()> {
        if num_rows == 0 || num_rows > MAX_ROWS {
            return Err(Error::misuse("rows of a linear layer", format!("1 to {MAX_ROWS}"), num_rows));
        }
        let instance = num_rows.div_ceil(8).next_power_of_two().trailing_zeros() as usize;
        let (max_rows, stages) = INSTANCES[instance];
        let mut arguments = LinearArguments {
            weights: self.memory.address,
            high: inputs.high,
            low: inputs.low,
            row_index: inputs.row_index,
            partials,
            rows: num_rows as u32,
            inputs: self.num_inputs as u32,
            outputs: self.num_outputs as u32,
            slice_chunks: self.slice_chunks as u32,
        };
        let grid = (self.num_outputs.div_ceil(TILE_OUTPUTS) as u32, self.num_slices() as u32, 1);
        // High and low for each row, in two bytes.
        let shared_bytes = stages * (TILE_OUTPUTS + 2 * max_rows) * CHUNK * 2;
        let (cuda, kernel) = (&self.memory.cuda, self.kernels[instance]);
        // SAFETY:
        // - layout: `LinearArguments` is the kernel's only parameter (the offsets above).
        // - bounds: the weights have `num_outputs * num_inputs` elements; planes and partials are the caller's.
        // - aliasing: the weights are never written again; the rest is the caller's.
        // - lifetime: the memory of the weights waits for the stream before it is freed; the rest is the caller's.
        unsafe { launch::queue(cuda, kernel, grid, THREADS, shared_bytes as u32, &mut arguments) }
    }
}

/// Chunks of a slice: as few slices as fill the device. Depends on the layer's sizes alone.
fn slice_chunks(num_outputs: usize, num_inputs: usize) -> usize {
    let (tiles, chunks) = (num_outputs.div_ceil(TILE_OUTPUTS), num_inputs.div_ceil(CHUNK));
    let slices = (WANTED_BLOCKS / tiles).min(chunks / MIN_SLICE_CHUNKS).max(1);
    chunks.div_ceil(slices)
}

/// A linear layer `y = x W^T` without bias on a GPU, made for 1 to 64 rows. `T` is that of the weights:
/// [`bf16`](half::bf16) or [`f16`](struct@half::f16).
///
/// One pass over the weights serves 64 rows, and its time is that of reading them; more rows take more passes. Calls
/// allocate nothing, wait for nothing, and can be captured in a graph.
///
/// # Rounding
///
/// x is used as the sum of two numbers of the weights' type: the nearest to x, and the nearest to what remains. So it
/// is x to 2^-16 of it for bf16, and for f16 to 2^-22 of it or to 2^-25, whichever is more, as long as it is at most
/// 65,504 (beyond that less exact, and from 131,008 on like 131,008). Products are exact, sums are in f32, in an order
/// that depends on the layer's sizes alone: a row's bits don't depend on which rows come with it. A row with a NaN or
/// an infinity has no effect on other rows.
#[derive(Debug)]
pub struct Linear<T> {
    cuda: Cuda,
    weights: LinearWeights,
    split: Kernel,
    add_slices: Kernel,
    /// High, then low, each `[MAX_ROWS, inputs]`.
    planes: Memory,
    partials: Memory,
    element: PhantomData<fn(T)>,
}

impl<T: Element> Linear<T> {
    /// Uploads `weights`, `[num_outputs, num_inputs]` row-major. Waits for the stream.
    ///
    /// # Errors
    /// *Misuse* when a dimension is 0 or the length is not their product. *Unsupported* when `num_inputs` is not a
    /// multiple of 8, a dimension is beyond 2^31, or the images lack the kernels. *Fault* when the device has no
    /// memory.
    pub fn new(cuda: &Cuda, weights: &[T], num_outputs: usize, num_inputs: usize) -> Result<Self> {
        let seen = weights.len().checked_div(num_inputs).unwrap_or(0);
        expect_len("outputs of a linear layer", num_outputs, seen)?;
        Self::stack(cuda, &[weights], num_inputs)
    }

    /// Uploads several layers over the same input as one, their outputs one after the other: query, key and value
    /// projections, or the gate and up projections of an MLP. Waits for the stream.
    ///
    /// # Errors
    /// *Misuse* when `num_inputs` is 0, a part is not whole rows of it, or there are no outputs. Otherwise as
    /// [`new`](Self::new).
    pub fn stack(cuda: &Cuda, parts: &[&[T]], num_inputs: usize) -> Result<Self> {
        let weights = LinearWeights::stack(cuda, parts, num_inputs)?;
        Ok(Self {
            cuda: cuda.clone(),
            split: cuda.kernel(&format!("ev_split_{}", T::NAME))?,
            add_slices: cuda.kernel("ev_add_slices_f32")?,
            planes: Memory::new(cuda, 2 * MAX_ROWS * num_inputs * size_of::<T>(), 0)?,
            partials: Memory::new(cuda, weights.num_partials() * size_of::<f32>(), 0)?,
            weights,
            element: PhantomData,
        })
    }

    /// Length of an input row.
    pub fn num_inputs(&self) -> usize {
        self.weights.num_inputs()
    }

    /// Length of an output row.
    pub fn num_outputs(&self) -> usize {
        self.weights.num_outputs()
    }

    /// Bytes of weights that one pass reads.
    pub fn num_bytes(&self) -> usize {
        self.num_outputs() * self.num_inputs() * size_of::<T>()
    }

    /// Queues `x W^T` to `y`: `x` is `[rows, num_inputs]`, `y` is `[rows, num_outputs]`, of any number of rows.
    ///
    /// # Errors
    /// *Misuse*, before anything is queued, when the lengths are not the same number of rows, or `x` and `y` overlap,
    /// are of another stream, or lie at an address that is not a multiple of 16 or 4. *Fault* when the driver refuses.
    pub fn forward(&mut self, x: DeviceSlice<'_, f32>, y: DeviceSliceMut<'_, f32>) -> Result<()> {
        let num_rows = self.check(x, &y)?;
        let plane_bytes = MAX_ROWS * self.num_inputs() * size_of::<T>();
        let (high, low) = (self.planes.address, self.planes.address + plane_bytes as u64);
        for first in (0..num_rows).step_by(MAX_ROWS) {
            let rows = MAX_ROWS.min(num_rows - first);
            let packs = rows * self.num_inputs() / 8;
            let values = x.address + (first * self.num_inputs() * size_of::<f32>()) as u64;
            let mut arguments = SplitArguments { values, high, low, packs: packs as u64 };
            let grid = (packs.div_ceil(THREADS as usize) as u32, 1, 1);
            // SAFETY:
            // - layout: `SplitArguments` is the kernel's only parameter (the offsets above).
            // - bounds: `x` has `first + rows` rows, and the planes have room for `MAX_ROWS`.
            // - aliasing: the planes are this layer's own, and the pass before has read them, in the stream's order.
            // - lifetime: buffers wait for the stream before they are freed, the engine's memory is its obligation
            //   (`DeviceSlice::from_raw`).
            unsafe { launch::queue(&self.cuda, self.split, grid, THREADS, 0, &mut arguments)? };
            self.pass(Halves { high, low, row_index: 0 }, rows, &y, first)?;
        }
        Ok(())
    }

    /// As [`forward`](Self::forward), for rows that are of the weights' type already. The bits are the same as for
    /// these numbers in f32; it takes half the arithmetic.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_exact(&mut self, x: DeviceSlice<'_, T>, y: DeviceSliceMut<'_, f32>) -> Result<()> {
        let num_rows = self.check(x, &y)?;
        for first in (0..num_rows).step_by(MAX_ROWS) {
            let high = x.address + (first * self.num_inputs() * size_of::<T>()) as u64;
            let rows = MAX_ROWS.min(num_rows - first);
            self.pass(Halves { high, low: 0, row_index: 0 }, rows, &y, first)?;
        }
        Ok(())
    }

    /// The number of rows of a call that may be queued.
    fn check<X>(&self, x: DeviceSlice<'_, X>, y: &DeviceSliceMut<'_, f32>) -> Result<usize> {
        let num_rows = x.len / self.num_inputs();
        expect_len("input of a linear layer", num_rows * self.num_inputs(), x.len)?;
        expect_len("output of a linear layer", num_rows * self.num_outputs(), y.len)?;
        if num_rows == 0 {
            return Ok(0);
        }
        for (subject, stream, address, alignment) in [
            ("input of a linear layer", x.stream, x.address, 16),
            ("output of a linear layer", y.stream, y.address, 4),
        ] {
            if stream != self.cuda.stream_id() {
                return Err(Error::misuse(subject, "memory of the layer's `Cuda`", "another's"));
            }
            if address == 0 || !address.is_multiple_of(alignment) {
                let wanted = format!("an address that is a multiple of {alignment}");
                return Err(Error::misuse(subject, wanted, format!("{address:#x}")));
            }
        }
        let end = |address: u64, len: usize, size: usize| address.saturating_add(len as u64 * size as u64);
        let (x_end, y_end) = (end(x.address, x.len, size_of::<X>()), end(y.address, y.len, size_of::<f32>()));
        if x.address < y_end && y.address < x_end {
            let wanted = "memory apart from the input";
            return Err(Error::misuse("output of a linear layer", wanted, "an overlap"));
        }
        Ok(num_rows)
    }

    /// Multiplies at most [`MAX_ROWS`] rows, to the rows of `y` from `first` on, which `check` has seen.
    fn pass(&mut self, x: Halves, rows: usize, y: &DeviceSliceMut<'_, f32>, first: usize) -> Result<()> {
        let num_outputs = self.num_outputs();
        let mut arguments = AddSlicesArguments {
            partials: self.partials.address,
            sums: y.address + (first * num_outputs * size_of::<f32>()) as u64,
            outputs: num_outputs as u32,
            slices: self.weights.num_slices() as u32,
        };
        let grid = (num_outputs.div_ceil(THREADS as usize) as u32, rows as u32, 1);
        // SAFETY:
        // - layout: `AddSlicesArguments` is the kernel's only parameter (the offsets above).
        // - bounds: planes and `y` have so many rows, partials have room for `MAX_ROWS`.
        // - aliasing: `check` saw that `x` and `y` are apart; the partials are this layer's own, and the pass before
        //   has read them, in the stream's order.
        // - lifetime: as in `forward`.
        unsafe {
            self.weights.queue(x, rows, self.partials.address)?;
            launch::queue(&self.cuda, self.add_slices, grid, THREADS, 0, &mut arguments)
        }
    }

    /// Parts of the inputs whose sums are apart in the partials.
    #[doc(hidden)]
    pub fn num_slices(&self) -> usize {
        self.weights.num_slices()
    }

    /// What the draft head queues, for tests: the partials, `[num_slices, 64, num_outputs]`, of rows of two planes.
    ///
    /// # Safety
    /// All is memory of the layer's `Cuda`, and at multiples of 16 but for `row_index`, which has `num_rows` rows of
    /// the planes.
    #[doc(hidden)]
    pub unsafe fn queue_partials(
        &self,
        high: DeviceSlice<'_, T>,
        low: Option<DeviceSlice<'_, T>>,
        row_index: Option<DeviceSlice<'_, u32>>,
        num_rows: usize,
        partials: DeviceSliceMut<'_, f32>,
    ) -> Result<()> {
        expect_len("partials of a linear layer", self.weights.num_partials(), partials.len)?;
        let (low, row_index) = (low.map_or(0, |low| low.address), row_index.map_or(0, |index| index.address));
        // SAFETY: the caller's obligation, and the length of the partials.
        unsafe {
            self.weights.queue(Halves { high: high.address, low, row_index }, num_rows, partials.address)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks_and_slices(num_outputs: usize, num_inputs: usize) -> (usize, usize) {
        let slices = num_inputs.div_ceil(CHUNK).div_ceil(slice_chunks(num_outputs, num_inputs));
        (num_outputs.div_ceil(TILE_OUTPUTS) * slices, slices)
    }

    /// Layers of a large head fill 188 multiprocessors, with few slices; those of a small one are cut as far as pays.
    #[test]
    fn slices_fill_the_device() {
        for (num_outputs, num_inputs, blocks, slices) in [
            (7168, 21_504, 336, 3),
            (10_240, 14_336, 320, 2),
            (7168, 8192, 336, 3),
            (36_864, 7168, 576, 1),
            (7168, 18_432, 336, 3),
            (32_000, 7168, 500, 1),
            (163_840, 7168, 2560, 1),
            (576, 1728, 54, 6),
            (960, 1152, 60, 4),
            (576, 576, 18, 2),
            (3072, 576, 96, 2),
            (576, 1536, 54, 6),
            (8192, 576, 256, 2),
            (1, 8, 1, 1),
        ] {
            assert_eq!(blocks_and_slices(num_outputs, num_inputs), (blocks, slices), "{num_outputs}");
        }
    }

    /// Every chunk is of one slice, and every slice has some.
    #[test]
    fn slices_cover_the_inputs() {
        for num_inputs in (8..5000).step_by(8) {
            for num_outputs in [1, 64, 65, 576, 2000, 30_000] {
                let each = slice_chunks(num_outputs, num_inputs);
                let (_, slices) = blocks_and_slices(num_outputs, num_inputs);
                let chunks = num_inputs.div_ceil(CHUNK);
                assert!((slices - 1) * each < chunks && chunks <= slices * each);
                assert!(slices == 1 || each >= MIN_SLICE_CHUNKS);
            }
        }
    }
}
