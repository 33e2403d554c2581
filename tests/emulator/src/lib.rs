//! Runs CUDA kernels on a CPU, under a seeded, adversarial schedule and the weak memory model of PTX.
//!
//! The kernels are the crate's own `kernels/*.cu`, compiled by a C++ compiler. They are launched directly
//! ([`Launch`]), or through a fake `libcuda.so` ([`install`]) on which unmodified `cudarc` runs. There is one
//! machine in a process: tests that use it hold [`exclusive`].
//!
//! A run is a function of the seed and of the sequence of calls from one host thread.
//!
//! # Programs
//!
//! A program that finds `fake-driver/libcuda.so` of the build on its library path runs on the emulator without knowing
//! it: nothing is checked, on one device. `EMU_RESIDENT_BLOCKS=4` keeps few blocks at a time, which large grids need.
//!
//! # Several processes
//!
//! Each process has a machine of its own, with the same devices. Memory that one exports and others import
//! (`cuMemExportToShareableHandle`) is really shared: a store that becomes visible is there for all. While a process
//! has such memory mapped, its threads that poll look again and again, and its clock does not jump: it runs with the
//! host's, so that limits end waits for a process that is gone. What others do is not part of the
//! seed's choices, nor of the search for races and for reads of memory never written. A standstill is a deadlock only
//! after 30 seconds, or after [`Config::patience`] if that is longer.
//!
//! # What it does not model
//!
//! * Load buffering: PTX lets two threads that each load and then store see each other's store; here they don't.
//! * The asynchronous proxy (TMA, `mbarrier`, bulk copies), clusters, textures, and of the tensor-core instructions
//!   all but `ldmatrix` and `mma.m16n8k16` of bf16 and f16. Kernels keep away from them, or the emulator learns
//!   them first.
//! * The bits of a tensor core: here products are added to the sum for ascending k, each sum rounded to nearest. A
//!   device adds in another order, and may truncate: the last bits differ.
//! * When `cp.async` reads and writes: here when it is waited for. Accesses in between are reported, but for a
//!   plain write, ordered after the copy's start, to where the copy writes.
//! * Races between a stream's copies or fills and a kernel that runs; and with work that had ended, unsynchronised,
//!   before everything was idle.
//! * The null stream's implicit synchronisation, the time that `__nanosleep` takes. What a graph leaves unordered,
//!   since it was captured on several streams, runs in the order of its capture.
//! * The overlap that programmatic dependent launches allow: kernels of a stream run one after the other.
//! * All that is not in the source: ptxas, occupancy, caches, bandwidth, latency; approximate instructions
//!   (`rsqrtf`, `__expf`) have the host's bits.

mod faults;
mod ffi;
include!("../mutants.rs");

use std::{
    collections::BTreeMap,
    env,
    ffi::{CStr, CString, c_int, c_void},
    marker::PhantomData,
    mem::MaybeUninit,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use ffi::library;

/// An image that the fake driver accepts as the emulated kernels, whatever they are. It also accepts real fat
/// binaries, cubins and PTX, and ignores what is in them.
pub const IMAGE: &[u8] = b"CUDA-EMULATOR\0";

/// Makes the fake driver the process's `libcuda`, for whoever opens that name from now on. Idempotent.
pub fn install() {
    library();
}

/// The machine to run on.
#[derive(Clone, Debug)]
pub struct Config {
    /// Decides the schedule, when stores become visible, and which values loads return.
    pub seed: u64,
    /// How many devices the machine has; at most 64.
    pub devices: usize,
    /// Whether races, accesses out of bounds or after free, and reads of memory never written are errors.
    pub races: bool,
    /// Whether strong stores become visible late and strong loads may be stale.
    pub weak: bool,
    /// Whether a vector access is as many accesses as it has elements. Needs `weak`.
    pub torn: bool,
    /// Whether [`traffic`] is counted. With `max_resident_blocks` 1: what blocks that run at the same time share would
    /// be counted whenever they take turns.
    pub counts_traffic: bool,
    /// How many blocks a device holds at a time; 0 is no limit.
    pub max_resident_blocks: usize,
    /// What the devices say they are.
    pub compute_capability: (i32, i32),
    /// The name of the one of [`MUTANTS`] to inject.
    pub mutant: Option<&'static str>,
    /// For how long after the last call that enqueued work other host threads may still add to it. Only then
    /// is a standstill a deadlock, and only then does the clock jump for those that wait with a deadline.
    pub patience: Duration,
}

impl Config {
    /// Everything is checked: for a single host thread.
    pub fn checked(seed: u64) -> Self {
        Self { seed, races: true, weak: true, torn: true, ..Self::fast() }
    }

    /// Nothing is checked, memory is sequentially consistent, and threads take turns, whatever the seed: for long
    /// runs that look at results.
    pub fn fast() -> Self {
        Self {
            seed: 0,
            devices: 8,
            races: false,
            weak: false,
            torn: false,
            counts_traffic: false,
            max_resident_blocks: 0,
            compute_capability: (12, 0),
            mutant: None,
            patience: Duration::ZERO,
        }
    }
}

/// Sets the machine up for a run, and clears errors and counts of the last one. Memory, streams and modules
/// stay.
///
/// # Panics
///
/// If kernels are in flight, or there is no such mutant.
pub fn configure(config: &Config) {
    assert!((1..=64).contains(&config.devices), "1 to 64 devices, not {}", config.devices);
    let mutant = config.mutant.map_or(0, |name| {
        let index = MUTANTS.iter().position(|mutant| mutant.name == name);
        library().load_mutants();
        index.unwrap_or_else(|| panic!("there is no mutant `{name}`")) + 1
    });
    let raw = ffi::Config {
        seed: config.seed,
        patience_ns: i64::try_from(config.patience.as_nanos()).unwrap_or(i64::MAX),
        num_devices: config.devices as c_int,
        mutant: mutant as c_int,
        compute_capability: [config.compute_capability.0, config.compute_capability.1],
        max_resident_blocks: u32::try_from(config.max_resident_blocks).unwrap_or(0),
        races: config.races,
        weak: config.weak,
        torn: config.torn,
        counts_traffic: config.counts_traffic,
    };
    // SAFETY: the pointer is valid for the call.
    let is_configured = unsafe { (library().configure)(&raw) };
    assert!(
        is_configured,
        "the emulator cannot be configured while kernels are in flight: synchronise first"
    );
}

pub use faults::{
    DriverCounts, calls, fail, fail_for_good, failed_call, set_driver_version, set_memory_limit,
};
pub use ffi::{Stats, Traffic};

/// What a run has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The error that the machine stopped with.
    pub error: Option<String>,
    /// The races found, at most 20.
    pub races: Vec<String>,
    /// What was executed since the machine was configured.
    pub stats: Stats,
    /// Live device allocations.
    pub num_allocations: u64,
    /// Live allocations of pinned host memory.
    pub num_host_allocations: u64,
    /// Live streams of the driver, the default ones not counted.
    pub num_streams: u64,
    /// Modules that are loaded.
    pub num_modules: u64,
    /// What the fake driver did since the machine was configured, and what else it has lent.
    pub driver: DriverCounts,
    /// Handles of memory that processes share.
    pub num_memory_handles: u64,
    /// Address ranges reserved to map memory at.
    pub num_reservations: u64,
}

impl Report {
    /// Whether there were neither errors nor races.
    pub fn is_clean(&self) -> bool {
        self.error.is_none() && self.races.is_empty()
    }

    /// The error, or else the first race.
    pub fn complaint(&self) -> Option<&str> {
        self.error.as_deref().or(self.races.first().map(String::as_str))
    }
}

/// The state of the machine.
pub fn report() -> Report {
    let mut raw = MaybeUninit::<ffi::Report>::uninit();
    // SAFETY: the call fills the report; the texts stay valid since nothing else is called in between.
    unsafe {
        (library().report)(raw.as_mut_ptr());
        let raw = raw.assume_init();
        let text = |p| CStr::from_ptr(p).to_string_lossy().into_owned();
        Report {
            error: Some(text((library().error)())).filter(|error| !error.is_empty()),
            races: (0..raw.num_races).map(|i| text((library().race)(i as usize))).collect(),
            stats: raw.stats,
            num_allocations: raw.device_allocations,
            num_host_allocations: raw.host_allocations,
            num_streams: raw.streams,
            num_modules: raw.modules,
            driver: faults::counts(),
            num_memory_handles: raw.memory_handles,
            num_reservations: raw.reservations,
        }
    }
}

/// The traffic of each kernel that was launched since the machine was configured, by name; zeros but for the launches
/// where [`Config::counts_traffic`] is not set.
pub fn traffic() -> BTreeMap<String, Traffic> {
    let mut traffic = Traffic::default();
    (0..)
        // SAFETY: the call fills the traffic, and the name is copied before anything else is called; null ends the list.
        .map_while(|i| unsafe {
            let name = (library().traffic)(i, &mut traffic);
            (!name.is_null()).then(|| (CStr::from_ptr(name).to_string_lossy().into_owned(), traffic))
        })
        .collect()
}

/// The names of all kernels.
pub fn kernels() -> Vec<String> {
    (0..)
        // SAFETY: a name lives as long as the library, and null ends the list.
        .map_while(|i| unsafe {
            let name = (library().kernel)(i);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
        })
        .collect()
}

/// Makes the next launches on one device (or on any) have `blocks` blocks, whatever is asked for, until the
/// machine is configured again: what a rank does that planned differently from the others. 0 undoes it.
pub fn override_grid(device: Option<usize>, blocks: u32) {
    // SAFETY: any values are allowed.
    unsafe { (library().override_grid)(device.map_or(-1, |d| d as c_int), blocks) }
}

/// What can go wrong with memory that processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingFault {
    /// Nothing does.
    None,
    /// The devices cannot share memory.
    Unsupported,
    /// The process is killed when it exports memory.
    DiesInExport,
    /// Memory can be mapped once, but not again while it is.
    FailsToMap,
    /// What is imported is other memory than what was exported.
    ImportsOtherMemory,
}

/// Lets that go wrong from now on.
pub fn break_sharing(fault: SharingFault) {
    // SAFETY: any value is allowed.
    unsafe { (library().break_sharing)(fault as c_int) }
}

/// The one machine of the process, to oneself.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::new(());
    MACHINE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The seeds to run a test with: `default` many or `EMU_SEEDS`, for at most `EMU_SECONDS` seconds; or just
/// the one of `EMU_SEED`, to replay a failure.
pub fn seeds(default: u64) -> impl Iterator<Item = u64> {
    let number = |name| {
        let text = env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
    };
    let range = number("EMU_SEED").map_or(0..number("EMU_SEEDS").unwrap_or(default), |seed| seed..seed + 1);
    let end = number("EMU_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    range.take_while(move |_| end.is_none_or(|end| Instant::now() < end))
}

/// Values that are plain bytes: any bits are a value, and all bytes are initialised.
///
/// # Safety
///
/// As said.
pub unsafe trait Plain: Copy {}
// SAFETY: these are plain bytes.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// Device memory outside the driver. Fresh, it is poison.
pub struct Buffer<T: Plain> {
    address: *mut c_void,
    len: usize,
    marker: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` values on a device.
    pub fn new(device: usize, len: usize) -> Self {
        // SAFETY: any size is allowed.
        let address = unsafe { (library().allocate)(device as c_int, len * size_of::<T>()) };
        assert!(!address.is_null(), "the emulator is out of memory");
        Self { address, len, marker: PhantomData }
    }

    /// Allocates and writes.
    pub fn from_slice(device: usize, values: &[T]) -> Self {
        let buffer = Self::new(device, values.len());
        buffer.write(values);
        buffer
    }

    /// Where it lies, for a kernel's argument.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// Writes from the start.
    pub fn write(&self, values: &[T]) {
        assert!(values.len() <= self.len, "{} values into {}", values.len(), self.len);
        // SAFETY: the buffer has room for the values.
        unsafe { (library().copy)(self.address, values.as_ptr().cast(), size_of_val(values)) }
    }

    /// All values.
    pub fn read(&self) -> Vec<T> {
        let mut values = Vec::with_capacity(self.len);
        // SAFETY: the copy initialises all values, and any bits are a value.
        unsafe {
            (library().copy)(values.as_mut_ptr() as *mut c_void, self.address, self.len * size_of::<T>());
            values.set_len(self.len);
        }
        values
    }

    /// Frees it now: a kernel that still uses it is at fault.
    pub fn free(self) {}
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the address came from `allocate`, and is freed once.
        unsafe { (library().free)(self.address) };
    }
}

/// A launch outside the driver, of a kernel that takes one argument by value.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// The device that runs it.
    pub device: usize,
    /// The number of a stream of that device: launches of one stream run one after the other.
    pub stream: u32,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block, at most 1024.
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: usize,
}

impl<'a> Launch<'a> {
    /// A launch on stream 0, without dynamic shared memory.
    pub fn new(kernel: &'a str, device: usize, grid: u32, block: u32) -> Self {
        Self { kernel, device, stream: 0, grid, block, shared_bytes: 0 }
    }

    /// Enqueues the launch; it runs in [`synchronize`].
    ///
    /// # Panics
    ///
    /// If there is no such device or kernel, or its argument has another size.
    pub fn start<T: Copy>(&self, argument: &T) {
        assert!((1..=1024).contains(&self.block) && self.grid > 0, "not launchable: {self:?}");
        let name = CString::new(self.kernel).expect("a kernel's name has no null byte");
        // SAFETY: the machine copies the argument in the call, after comparing its size.
        let is_launched = unsafe {
            (library().launch)(
                name.as_ptr(),
                self.device as c_int,
                self.stream,
                self.grid,
                self.block,
                self.shared_bytes,
                (argument as *const T).cast(),
                size_of::<T>(),
            )
        };
        assert!(is_launched, "not launchable with an argument of {} bytes: {self:?}", size_of::<T>());
    }
}

/// Runs all that is enqueued. The error is the report's first complaint.
pub fn synchronize() -> Result<(), String> {
    // SAFETY: no arguments.
    if unsafe { (library().synchronize)() } {
        return Ok(());
    }
    Err(report().complaint().unwrap_or("unknown").to_owned())
}
