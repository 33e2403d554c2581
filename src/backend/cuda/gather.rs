//! Features of accepted rows, gathered for the draft head by the second half of `kv.cu`.

use std::mem::offset_of;

use super::context::{Cuda, Kernel};
use super::kv::THREADS;
use super::launch;
use super::memory::{DeviceSlice, DeviceSliceMut};
use super::view::Logit;
use crate::element::Element;
use crate::error::{Error, Result, expect_len};

/// `EvGatherFeatures`: what to gather, by device addresses.
///
/// Row `i` of the list says which row of the features goes to which row of two planes of the head's type: rounded
/// to `high`, and what is then missing rounded to `low`. What is finite stays finite in both: beyond the largest
/// element `high` is that one. Infinities and NaNs are in `high`, with a `low` of 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct GatherFeatures {
    /// `[.., width]`.
    pub(super) features: u64,
    /// `[count, 2]` of `u32`.
    pub(super) rows: u64,
    /// `[.., width]`.
    pub(super) high: u64,
    /// `[.., width]`.
    pub(super) low: u64,
    /// A multiple of 2. Accesses are of 16 bytes where it is one of 8 and all addresses are multiples of 16.
    pub(super) width: u32,
    pub(super) reserved: u32,
}

// The offsets that abi.h asserts.
const _: () = {
    assert!(offset_of!(GatherFeatures, features) == 0);
    assert!(offset_of!(GatherFeatures, rows) == 8);
    assert!(offset_of!(GatherFeatures, high) == 16);
    assert!(offset_of!(GatherFeatures, low) == 24);
    assert!(offset_of!(GatherFeatures, width) == 32);
    assert!(size_of::<GatherFeatures>() == 40);
};

/// The kernel from features of one type to a head of another, by their names.
pub(super) fn gather_kernel(cuda: &Cuda, features: &str, half: &str) -> Result<Kernel> {
    cuda.kernel(&format!("ev_gather_features_{features}_{half}"))
}

/// Queues the gathering of `count` rows. Neither allocates nor waits, and may be captured.
///
/// # Errors
/// *Misuse* when the width is odd or 0, there are more than 65,535 rows, or an address is not a multiple of what
/// it holds; *fault* when the device fails.
///
/// # Safety
/// `kernel` is [`gather_kernel`]'s for the features' and the planes' types. The list, the rows that it names, and
/// as many rows of the planes are memory of the device that lives until the kernel has run and that other streams
/// don't use. No two entries name one row of the planes; planes, list and features don't overlap.
pub(super) unsafe fn queue_gather(
    cuda: &Cuda,
    kernel: Kernel,
    count: usize,
    arguments: &mut GatherFeatures,
) -> Result<()> {
    if arguments.width == 0 || !arguments.width.is_multiple_of(2) {
        return Err(Error::misuse("width of features", "a positive multiple of 2", arguments.width));
    }
    let rows = u32::try_from(count).ok().filter(|rows| *rows < 65_536);
    let rows = rows.ok_or_else(|| Error::misuse("rows to gather", "at most 65535", count))?;
    for (name, address, unit) in [
        ("list of rows to gather", arguments.rows, 8),
        ("gathered features, high", arguments.high, 4),
        ("gathered features, low", arguments.low, 4),
    ] {
        if !address.is_multiple_of(unit) {
            let wanted = format!("an address that is a multiple of {unit}");
            return Err(Error::misuse(name, wanted, format!("{address:#x}")));
        }
    }
    if rows == 0 {
        return Ok(());
    }
    let blocks = (arguments.width / 8).div_ceil(THREADS).max(1);
    // SAFETY: `GatherFeatures` is the kernel's only parameter (the offsets above); the rest is the caller's
    // obligation.
    unsafe { launch::queue(cuda, kernel, (blocks, rows, 1), THREADS, 0, arguments) }
}

/// Gathers as the draft head does, for its tests: `features` is `[.., width]`, `rows` has pairs of a row of the
/// features and a row of `high` and `low`, both `[.., width]`.
///
/// # Errors
/// *Misuse* when a length is no multiple of the width, the planes' lengths differ, or a slice is of another stream;
/// and as `queue_gather`.
///
/// # Safety
/// The rows that the list names are there, and none of the planes is named twice.
#[doc(hidden)]
pub unsafe fn gather_features<F: Logit, W: Element>(
    cuda: &Cuda,
    width: usize,
    features: DeviceSlice<'_, F>,
    rows: DeviceSlice<'_, [u32; 2]>,
    high: DeviceSliceMut<'_, W>,
    low: DeviceSliceMut<'_, W>,
) -> Result<()> {
    let width_words = u32::try_from(width).map_err(|_| Error::misuse("width of features", "a u32", width))?;
    expect_len("gathered features, low", high.len, low.len)?;
    if width == 0 || !features.len.is_multiple_of(width) || !high.len.is_multiple_of(width) {
        let wanted = format!("whole rows of {width}");
        return Err(Error::misuse("features", wanted, format!("{} and {}", features.len, high.len)));
    }
    if [features.stream, rows.stream, high.stream, low.stream].iter().any(|id| *id != cuda.stream_id()) {
        return Err(Error::misuse("features", "memory of this `Cuda`", "another's"));
    }
    let mut arguments = GatherFeatures {
        features: features.address,
        rows: rows.address,
        high: high.address,
        low: low.address,
        width: width_words,
        reserved: 0,
    };
    let kernel = gather_kernel(cuda, F::NAME, W::NAME)?;
    // SAFETY: the types are the kernel's; lengths and streams were compared above, planes are borrowed mutably;
    // the rows are the caller's obligation, as are slices of the engine.
    unsafe { queue_gather(cuda, kernel, rows.len, &mut arguments) }
}
