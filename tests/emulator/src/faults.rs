//! What the fake driver was asked to do, and failures on request. Configuring the machine undoes them.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    mem::MaybeUninit,
    ptr,
};

use crate::ffi::library;

/// What the fake driver did since the machine was configured, and the handles that it has lent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverCounts {
    /// Waits of the host: for streams, contexts, events, and copies that are synchronous or of pageable memory.
    pub num_host_syncs: u64,
    /// Kernels launched, but for those in graphs.
    pub num_launches: u64,
    /// Kernels launched as programmatic dependents, also those in graphs.
    pub num_dependent_launches: u64,
    /// Launches of graphs.
    pub num_graph_launches: u64,
    /// Kernels that these have launched.
    pub num_graph_kernels: u64,
    /// Allocations of device memory.
    pub num_device_allocations: u64,
    /// Allocations of pinned host memory.
    pub num_host_allocations: u64,
    /// Copies from the host to a device, also those in graphs, and their bytes.
    pub num_uploads: u64,
    /// See above.
    pub upload_bytes: u64,
    /// Copies from a device to the host, also those in graphs, and their bytes.
    pub num_downloads: u64,
    /// See above.
    pub download_bytes: u64,
    /// Primary contexts that are retained, each as often as it is.
    pub num_contexts: u64,
    /// Live events.
    pub num_events: u64,
    /// Live graphs, executable ones too.
    pub num_graphs: u64,
}

/// Makes one call of a driver function fail with a code of cuda.h: the `nth` from now, beginning with 1, of
/// `function`, or of any. The call does nothing, unless it gives something back: then it does so, but for code 900,
/// with which a driver refuses in a capture. One failure is planned at a time; 0 plans none.
pub fn fail(function: Option<&str>, nth: u64, code: u32) {
    plan(function, nth, code, false);
}

/// As [`fail`]; and after it all calls fail that need a context, as when that is lost.
pub fn fail_for_good(function: Option<&str>, nth: u64, code: u32) {
    plan(function, nth, code, true);
}

fn plan(function: Option<&str>, nth: u64, code: u32, is_sticky: bool) {
    let name = function.map(|name| CString::new(name).expect("a function's name has no null byte"));
    let name = name.as_ref().map_or(ptr::null(), |name| name.as_ptr());
    // SAFETY: the name is copied in the call.
    unsafe { (library().fail)(name, nth, code as c_int, is_sticky) }
}

/// The function whose call has failed as planned.
pub fn failed_call() -> Option<String> {
    // SAFETY: null, or the name of a function, which lives as long as the library.
    unsafe { text((library().failed_call)()) }
}

/// The driver functions called since the machine was configured.
pub fn calls() -> Vec<String> {
    // SAFETY: as above; null ends the list.
    (0..).map_while(|i| unsafe { text((library().call)(i)) }).collect()
}

unsafe fn text(name: *const c_char) -> Option<String> {
    // SAFETY: as the callers'.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Gives a device so many bytes of memory, in place of all that there is.
pub fn set_memory_limit(device: usize, bytes: usize) {
    assert!(device < 64, "there is no device {device}");
    // SAFETY: there is such a device.
    unsafe { (library().set_memory_limit)(device as c_int, bytes) }
}

/// What the driver says it is, as `(12, 4)`.
pub fn set_driver_version((major, minor): (u32, u32)) {
    // SAFETY: any number is allowed.
    unsafe { (library().set_driver_version)((1000 * major + 10 * minor) as c_int) }
}

pub fn counts() -> DriverCounts {
    let mut counts = MaybeUninit::uninit();
    // SAFETY: the call fills them.
    unsafe {
        (library().driver_counts)(counts.as_mut_ptr());
        counts.assume_init()
    }
}
