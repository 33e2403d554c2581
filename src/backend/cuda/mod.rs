//! The CUDA backend: devices, streams, memory and graphs; the collectives, the draft head, the choice of tokens, and
//! the moves of KV rows.
//!
//! A [`Cuda`] value is a device with a stream of its own, or of the engine's. Give it to a
//! [`Speculator`](crate::Speculator) or a [`Group`](crate::comm::Group). Nothing falls back: a machine without a driver,
//! or a build without nvcc, is an [`Error`](crate::Error) that says so.
//!
//! No figure of this crate has been measured on an SM120 card yet. The kernels are compiled for it, and run in
//! an emulator on every change.
#![allow(unsafe_code)]

mod choose;
mod codes;
mod context;
mod event;
mod gather;
mod graph;
mod group;
mod head;
mod kv;
mod launch;
mod linear;
mod memory;
mod probe;
mod staging;
mod symmetric;
mod view;

mod images {
    /// Images are read in words by the driver.
    #[repr(C, align(64))]
    #[allow(dead_code)] // a build without kernels has none to align
    struct Aligned<T: ?Sized>(T);

    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

pub use choose::{ChooseRow, Chooser, ChooserConfig};
pub use context::Cuda;
pub use event::Event;
#[doc(hidden)]
pub use gather::gather_features;
pub use graph::Graph;
pub use head::CudaHead;
#[doc(hidden)]
pub use head::cost;
pub use kv::{KvLayout, KvMover, KvMoverConfig, KvPlane, SlotMove};
pub use linear::Linear;
pub use memory::{Buffer, DeviceSlice, DeviceSliceMut};
pub use view::{Embedding, Logit, View};

/// The kernel images in this build, a fatbin for each file of `kernels/`; none without nvcc.
pub fn kernel_images() -> &'static [(&'static str, &'static [u8])] {
    images::IMAGES
}

/// The architectures in [`kernel_images`], as in `EAGLE_VERIFY_CUDA_ARCHS`.
pub fn kernel_architectures() -> &'static str {
    images::ARCHS
}
