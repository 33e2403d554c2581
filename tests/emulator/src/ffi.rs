//! The emulator's C interface. It is taken from the fake driver's shared object, and not linked a second
//! time, so that it works on the same machine as the driver's functions.

use crate::faults::DriverCounts;
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    mem,
    sync::OnceLock,
};

#[repr(C)]
pub struct Config {
    pub seed: u64,
    pub patience_ns: i64,
    pub num_devices: c_int,
    pub mutant: c_int,
    pub compute_capability: [c_int; 2],
    pub max_resident_blocks: c_uint,
    pub races: bool,
    pub weak: bool,
    pub torn: bool,
    pub counts_traffic: bool,
}

/// What the machine has executed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Strong loads, strong stores and atomics.
    pub num_strong_accesses: u64,
    /// Plain accesses to device and shared memory. Not counted without checks.
    pub num_plain_accesses: u64,
    /// Switches between threads.
    pub num_switches: u64,
    /// Stores that left a store buffer.
    pub num_commits: u64,
    /// Loads that returned an old value.
    pub num_stale_loads: u64,
    /// Barriers of blocks.
    pub num_barriers: u64,
    /// Blocks that were started.
    pub num_blocks: u64,
    /// Times that the clock jumped, since everything waited for it.
    pub num_clock_jumps: u64,
    /// Bytes that asynchronous copies have read.
    pub num_copied_bytes: u64,
    /// Multiplications of a matrix of 16 rows with one of 8 columns.
    pub num_multiplied_tiles: u64,
}

/// What a kernel's launches have read and written of device memory, by plain accesses and asynchronous copies, in words
/// of four bytes. A word counts once for each block that reads it, and once for each that writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Launches, also those in graphs.
    pub num_launches: u64,
    /// See above.
    pub read_bytes: u64,
    /// See above.
    pub written_bytes: u64,
}

#[repr(C)]
pub struct Report {
    pub stats: Stats,
    pub device_allocations: u64,
    pub host_allocations: u64,
    pub streams: u64,
    pub modules: u64,
    pub memory_handles: u64,
    pub reservations: u64,
    pub num_races: u64,
}

/// The table of the functions in c_api.cpp, and how it is filled.
macro_rules! interface {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn from_handle(handle: *mut c_void) -> Self {
                $(
                    // SAFETY: the handle is open, and the type is the function's in c_api.cpp.
                    let $name = unsafe {
                        let symbol = dlsym(handle, $symbol.as_ptr());
                        assert!(!symbol.is_null(), "the emulator lacks {:?}", $symbol);
                        type Function = unsafe extern "C" fn($($argument),*) $(-> $result)?;
                        mem::transmute::<*mut c_void, Function>(symbol)
                    };
                )*
                Self { $($name),* }
            }
        }
    };
}

interface! {
    configure = c"emulator_configure": fn(*const Config) -> bool;
    report = c"emulator_report": fn(*mut Report);
    error = c"emulator_error": fn() -> *const c_char;
    race = c"emulator_race": fn(usize) -> *const c_char;
    traffic = c"emulator_traffic": fn(usize, *mut Traffic) -> *const c_char;
    kernel = c"emulator_kernel": fn(usize) -> *const c_char;
    override_grid = c"emulator_override_grid": fn(c_int, u32);
    break_sharing = c"emulator_break_sharing": fn(c_int);
    allocate = c"emulator_allocate": fn(c_int, usize) -> *mut c_void;
    free = c"emulator_free": fn(*mut c_void) -> bool;
    copy = c"emulator_copy": fn(*mut c_void, *const c_void, usize);
    launch = c"emulator_launch": fn(
        *const c_char, c_int, c_uint, c_uint, c_uint, usize, *const c_void, usize
    ) -> bool;
    synchronize = c"emulator_synchronize": fn() -> bool;
    fail = c"emulator_fail": fn(*const c_char, u64, c_int, bool);
    failed_call = c"emulator_failed_call": fn() -> *const c_char;
    call = c"emulator_call": fn(usize) -> *const c_char;
    set_memory_limit = c"emulator_set_memory_limit": fn(c_int, usize);
    set_driver_version = c"emulator_set_driver_version": fn(c_int);
    driver_counts = c"emulator_driver_counts": fn(*mut DriverCounts);
}

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

fn open(path: &str) -> *mut c_void {
    const RTLD_NOW: c_int = 0x2;
    const RTLD_GLOBAL: c_int = 0x100;
    let file = CString::new(path).expect("a path has no null byte");
    // SAFETY: the file is one that this package's build script has linked.
    unsafe {
        let handle = dlopen(file.as_ptr(), RTLD_NOW | RTLD_GLOBAL);
        assert!(
            !handle.is_null(),
            "cannot load the emulator: {}",
            CStr::from_ptr(dlerror()).to_string_lossy()
        );
        handle
    }
}

/// Loads the fake driver once, for the whole process.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let handle = open(env!("EMULATOR_LIBCUDA"));
        open(env!("EMULATOR_LIBCUDA_1"));
        let library = Library::from_handle(handle);
        // Devices and the like exist from the start, not only once somebody has configured the machine.
        let config = Config {
            seed: 0,
            patience_ns: 0,
            num_devices: 8,
            mutant: 0,
            compute_capability: [12, 0],
            max_resident_blocks: 0,
            races: false,
            weak: false,
            torn: false,
            counts_traffic: false,
        };
        // SAFETY: the pointer is valid for the call.
        assert!(unsafe { (library.configure)(&config) }, "nothing runs yet");
        library
    })
}

impl Library {
    /// Loads the kernels with mutants, which then register themselves.
    pub fn load_mutants(&self) {
        static LOADED: OnceLock<()> = OnceLock::new();
        LOADED.get_or_init(|| {
            open(env!("EMULATOR_MUTATED"));
        });
    }
}
