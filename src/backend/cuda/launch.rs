//! The kernels' argument structs and instances, as `kernels/abi.h` and `kernels/*.cu` have them, and their launch.

use std::ffi::c_void;
use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{result, sys};

use super::context::{Cuda, Kernel};
use crate::comm::plan::{Algorithm, Shape};
use crate::comm::{Cause, Tag};
use crate::element::Element;
use crate::error::Result;

pub(super) const NORM: u32 = 1;
pub(super) const WEIGHT_PLUS_ONE: u32 = 2;
pub(super) const FP8_STATIC: u32 = 4;
pub(super) const FP8_PER_ROW: u32 = 8;

/// `EvAllReduceNorm`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AllReduceNorm {
    pub(super) slabs: [u64; 8],
    pub(super) partial: u64,
    pub(super) residual: u64,
    pub(super) weight: u64,
    pub(super) output: u64,
    pub(super) quantized: u64,
    pub(super) scales: u64,
    pub(super) epochs: u64,
    pub(super) fault: u64,
    pub(super) packs_offset: u64,
    pub(super) escapes_offset: u64,
    pub(super) wait_limit_ns: u64,
    pub(super) rank: u32,
    pub(super) rows: u32,
    pub(super) hidden: u32,
    pub(super) warps_per_group: u32,
    pub(super) max_blocks: u32,
    pub(super) block_rows: u32,
    pub(super) block_packs: u32,
    pub(super) flags: u32,
    pub(super) epsilon: f32,
    pub(super) static_scale: f32,
    pub(super) tag: u32,
    pub(super) reserved: u32,
}

// The offsets that abi.h asserts.
const _: () = {
    assert!(offset_of!(AllReduceNorm, slabs) == 0);
    assert!(offset_of!(AllReduceNorm, partial) == 64);
    assert!(offset_of!(AllReduceNorm, residual) == 72);
    assert!(offset_of!(AllReduceNorm, weight) == 80);
    assert!(offset_of!(AllReduceNorm, output) == 88);
    assert!(offset_of!(AllReduceNorm, quantized) == 96);
    assert!(offset_of!(AllReduceNorm, scales) == 104);
    assert!(offset_of!(AllReduceNorm, epochs) == 112);
    assert!(offset_of!(AllReduceNorm, fault) == 120);
    assert!(offset_of!(AllReduceNorm, packs_offset) == 128);
    assert!(offset_of!(AllReduceNorm, escapes_offset) == 136);
    assert!(offset_of!(AllReduceNorm, wait_limit_ns) == 144);
    assert!(offset_of!(AllReduceNorm, rank) == 152);
    assert!(offset_of!(AllReduceNorm, rows) == 156);
    assert!(offset_of!(AllReduceNorm, hidden) == 160);
    assert!(offset_of!(AllReduceNorm, warps_per_group) == 164);
    assert!(offset_of!(AllReduceNorm, max_blocks) == 168);
    assert!(offset_of!(AllReduceNorm, block_rows) == 172);
    assert!(offset_of!(AllReduceNorm, block_packs) == 176);
    assert!(offset_of!(AllReduceNorm, flags) == 180);
    assert!(offset_of!(AllReduceNorm, epsilon) == 184);
    assert!(offset_of!(AllReduceNorm, static_scale) == 188);
    assert!(offset_of!(AllReduceNorm, tag) == 192);
    assert!(size_of::<AllReduceNorm>() == 200);
};

/// `EvChooseRow`. What is 0, 1 for `top_p`, is not done.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct ChooseRow {
    pub(super) seed: u64,
    pub(super) position: u32,
    pub(super) temperature: f32,
    pub(super) threshold: f32,
    pub(super) top_k: u32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    pub(super) repetition_penalty: f32,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) text: u32,
    pub(super) num_text: u32,
    pub(super) path: u32,
    pub(super) num_path: u32,
    pub(super) bias: u32,
    pub(super) num_biases: u32,
    pub(super) mask: u32,
    pub(super) workspace: u32,
    pub(super) reserved: u32,
}

/// `EvChoose`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choose {
    pub(super) logits: u64,
    pub(super) rows: u64,
    pub(super) keys: u64,
    pub(super) thresholds: u64,
    pub(super) z: u64,
    pub(super) first_token: u32,
    pub(super) columns: u32,
}

const _: () = {
    assert!(offset_of!(ChooseRow, seed) == 0);
    assert!(offset_of!(ChooseRow, position) == 8);
    assert!(offset_of!(ChooseRow, temperature) == 12);
    assert!(offset_of!(ChooseRow, threshold) == 16);
    assert!(offset_of!(ChooseRow, top_k) == 20);
    assert!(offset_of!(ChooseRow, top_p) == 24);
    assert!(offset_of!(ChooseRow, min_p) == 28);
    assert!(offset_of!(ChooseRow, repetition_penalty) == 32);
    assert!(offset_of!(ChooseRow, presence_penalty) == 36);
    assert!(offset_of!(ChooseRow, frequency_penalty) == 40);
    assert!(offset_of!(ChooseRow, text) == 44);
    assert!(offset_of!(ChooseRow, num_text) == 48);
    assert!(offset_of!(ChooseRow, path) == 52);
    assert!(offset_of!(ChooseRow, num_path) == 56);
    assert!(offset_of!(ChooseRow, bias) == 60);
    assert!(offset_of!(ChooseRow, num_biases) == 64);
    assert!(offset_of!(ChooseRow, mask) == 68);
    assert!(offset_of!(ChooseRow, workspace) == 72);
    assert!(size_of::<ChooseRow>() == 80);
    assert!(offset_of!(Choose, logits) == 0);
    assert!(offset_of!(Choose, rows) == 8);
    assert!(offset_of!(Choose, keys) == 16);
    assert!(offset_of!(Choose, thresholds) == 24);
    assert!(offset_of!(Choose, z) == 32);
    assert!(offset_of!(Choose, first_token) == 40);
    assert!(offset_of!(Choose, columns) == 44);
    assert!(size_of::<Choose>() == 48);
};

/// The instances of `all_reduce_norm.cu` that a group may launch.
#[derive(Clone, Debug)]
pub(super) struct AllReduceKernels(Vec<(Algorithm, Kernel)>);

impl AllReduceKernels {
    /// The instances for all rows that a shape allows, loaded.
    pub(super) fn load<T: Element>(cuda: &Cuda, shape: &Shape) -> Result<Self> {
        let mut kernels: Vec<(Algorithm, Kernel)> = Vec::new();
        for algorithm in (1..=shape.max_rows).map(|rows| shape.algorithm(rows)) {
            if kernels.iter().all(|(loaded, _)| *loaded != algorithm) {
                kernels.push((algorithm, cuda.kernel(&symbol::<T>(algorithm, shape.world.get()))?));
            }
        }
        Ok(Self(kernels))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Kernel> {
        self.0.iter().map(|(_, kernel)| *kernel)
    }

    /// Queues a call.
    pub(super) fn launch(
        &self,
        cuda: &Cuda,
        algorithm: Algorithm,
        blocks: u32,
        threads: u32,
        arguments: &mut AllReduceNorm,
    ) -> Result<()> {
        let Some((_, kernel)) = self.0.iter().find(|(loaded, _)| *loaded == algorithm) else {
            return Ok(()); // `load` has every algorithm of the shape
        };
        // SAFETY:
        // - layout: `AllReduceNorm` is the kernel's only parameter (the offsets above).
        // - bounds: `Group` compared every length with the rows; the caller made `blocks` and the slabs' layout
        //   by one `Geometry`, which gives each block room for its rows.
        // - aliasing: the caller saw that nothing written overlaps anything else; outputs are borrowed mutably
        //   until the launch is queued, and are of this stream's work.
        // - lifetime: buffers wait for the stream before they are freed; slabs live until the last rank is gone.
        unsafe { queue(cuda, *kernel, (blocks, 1, 1), threads, arguments.hidden * 2, arguments) }
    }
}

/// Queues a call of `choose.cu`: so many blocks for each row, and rows.
pub(super) fn choose(
    cuda: &Cuda,
    kernel: Kernel,
    grid: (u32, u32),
    threads: u32,
    arguments: &mut Choose,
) -> Result<()> {
    // SAFETY:
    // - layout: `Choose` is the kernel's only parameter and `ChooseRow` what its rows are (the offsets above).
    // - bounds: `Chooser` compared the length of the logits with rows and columns, reserved what rows, results and
    //   workspaces need, and its packer lists only tokens of the columns.
    // - aliasing: all that is written is the `Chooser`'s own; logits are borrowed until its call has ended.
    // - lifetime: the `Chooser` waits for the kernel; after an error, its memory and buffers of logits still wait
    //   for the stream before they are freed.
    unsafe { queue(cuda, kernel, (grid.0, grid.1, 1), threads, 0, arguments) }
}

/// Queues a kernel with one parameter, which is copied now.
///
/// # Safety
/// `A` is laid out as the kernel's parameter. What the kernel reads and writes by it for this grid and these threads
/// is memory of the device, large enough, not used by other streams, and lives until the kernel has run.
pub(super) unsafe fn queue<A>(
    cuda: &Cuda,
    kernel: Kernel,
    grid: (u32, u32, u32),
    threads: u32,
    shared_bytes: u32,
    arguments: &mut A,
) -> Result<()> {
    cuda.bind()?;
    let mut parameters = [std::ptr::from_mut(arguments).cast::<c_void>()];
    if !cuda.launches_dependents() {
        // SAFETY: the function is of a module that `cuda` keeps; the rest is the caller's obligation.
        let queued = unsafe {
            let stream = cuda.stream();
            result::launch_kernel(
                kernel.function,
                grid,
                (threads, 1, 1),
                shared_bytes,
                stream,
                &mut parameters,
            )
        };
        return cuda.check("cuLaunchKernel", queued);
    }
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    attribute.value.programmaticStreamSerializationAllowed = 1;
    let config = sys::CUlaunchConfig {
        gridDimX: grid.0,
        gridDimY: grid.1,
        gridDimZ: grid.2,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared_bytes,
        hStream: cuda.stream(),
        attrs: &mut attribute,
        numAttrs: 1,
    };
    // SAFETY: as above; and the kernel waits for those before it, as all of `kernels/` do first: `Cuda::kernel` saw
    // that its code is for an architecture that can.
    let queued = unsafe {
        let (function, parameters) = (kernel.function, parameters.as_mut_ptr());
        sys::cuLaunchKernelEx(&config, function, parameters, std::ptr::null_mut()).result()
    };
    cuda.check("cuLaunchKernelEx", queued)
}

fn symbol<T: Element>(algorithm: Algorithm, world: usize) -> String {
    let algorithm = match algorithm {
        Algorithm::OneShot => "one_shot",
        Algorithm::TwoShot => "two_shot",
        Algorithm::Hierarchical => "hierarchical",
    };
    format!("ev_all_reduce_norm_{algorithm}_{}_w{world}", T::NAME)
}

/// What `Call::give_up` in sync.cuh has written.
pub(super) struct FaultRecord {
    pub(super) cause: Cause,
    pub(super) rank: usize,
    pub(super) peer: usize,
    pub(super) phase: &'static str,
    pub(super) epoch: u32,
}

impl FaultRecord {
    /// What the rank has seen itself, or else what it has heard.
    pub(super) fn read([seen, tags, heard]: [u64; 3]) -> Option<Self> {
        let byte = |word: u64, shift: u32| (word >> shift & 0xFF) as usize;
        let (record, cause) = match byte(seen, 24) {
            0 if byte(heard, 24) == 0 => return None,
            0 => (heard, Cause::Aborted),
            2 if tags == 0 => return None, // on its way
            2 => (seen, Cause::Mismatch { own: Tag((tags >> 32) as u32), peer: Tag(tags as u32) }),
            _ => (seen, Cause::Timeout),
        };
        let phases = ["its partial", "its island's sum", "its results", "its call"];
        let phase = phases.get(byte(record, 16)).unwrap_or(&"?");
        Some(Self {
            cause,
            rank: byte(record, 0),
            peer: byte(record, 8),
            phase,
            epoch: (record >> 32) as u32,
        })
    }
}
