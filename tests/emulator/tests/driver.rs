//! Unmodified `cudarc` on the fake driver: devices, peers, streams, events, graphs, threads, errors, leaks.

use std::{
    ffi::{CString, c_void},
    sync::{Arc, MutexGuard},
    thread,
    time::Duration,
};

use cuda_emulator::{Config, IMAGE, configure, exclusive, install, report};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, result, sys};

/// The argument of `kernels/checks.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Check {
    a: u64,
    b: u64,
    result: u64,
    limit: u64,
    test: i32,
    role: i32,
}

const OUT_OF_BOUNDS: i32 = 2;
const READ: i32 = 3;
const WAIT_FOREVER: i32 = 10;
const PUBLISH: i32 = 11;
const BOUNDED_WAIT: i32 = 15;
const TRAP: i32 = 19;

fn emulator(config: &Config) -> MutexGuard<'static, ()> {
    let guard = exclusive();
    install();
    configure(config);
    guard
}

/// A context with one stream, the kernel and buffers of zeros. (The module is cudarc's plain handle: its safe
/// one would need the feature `nvrtc`.)
struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    module: sys::CUmodule,
    check: sys::CUfunction,
    a: CudaSlice<u32>,
    b: CudaSlice<u32>,
    result: CudaSlice<u32>,
}
// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Device {}

impl Device {
    fn new(ordinal: usize) -> Result<Self, DriverError> {
        let context = CudaContext::new(ordinal)?;
        // SAFETY: every buffer here is used on one stream.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        context.bind_to_thread()?;
        // SAFETY: the image is one that the driver knows, and the module is alive as long as the function.
        let (module, check) = unsafe {
            let module = result::module::load_data(IMAGE.as_ptr().cast())?;
            (module, result::module::get_function(module, CString::from(c"check"))?)
        };
        let zeros = |n| stream.alloc_zeros::<u32>(n);
        let (a, b, result) = (zeros(4)?, zeros(4)?, zeros(256)?);
        Ok(Self { context, stream, module, check, a, b, result })
    }

    fn argument(&mut self, test: i32) -> Check {
        let (a, b) = (self.a.device_ptr(&self.stream).0, self.b.device_ptr(&self.stream).0);
        Check { a, b, result: self.result.device_ptr_mut(&self.stream).0, limit: 1 << 30, test, role: 0 }
    }

    fn launch_on(&self, stream: &CudaStream, argument: &Check, threads: u32) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        let mut arguments = [(argument as *const Check) as *mut c_void];
        // SAFETY: the argument is what the kernel takes.
        unsafe {
            let shape = ((1, 1, 1), (threads, 1, 1));
            result::launch_kernel(self.check, shape.0, shape.1, 0, stream.cu_stream(), &mut arguments)
        }
    }

    fn launch(&mut self, test: i32) -> Result<(), DriverError> {
        let argument = self.argument(test);
        self.launch_on(&self.stream, &argument, 32)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the module is unloaded once. After a failure there is nothing to be done about another.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

fn code<T>(result: Result<T, DriverError>) -> u32 {
    result.err().map_or(0, |error| error.0 as u32)
}

fn enable_peer(from: &CudaContext, to: &CudaContext) -> u32 {
    from.bind_to_thread().expect("the context is alive");
    // SAFETY: both contexts are alive.
    unsafe { sys::cuCtxEnablePeerAccess(to.cu_ctx(), 0) as u32 }
}

#[test]
fn devices_are_what_the_configuration_says() {
    let _machine = emulator(&Config { devices: 3, compute_capability: (9, 0), ..Config::fast() });
    assert_eq!(CudaContext::device_count().expect("a driver"), 3);
    let context = CudaContext::new(2).expect("the last device");
    assert_eq!(context.compute_capability().expect("an attribute"), (9, 0));
    assert_eq!(context.name().expect("a name"), "Emulated GPU 2");
    assert_eq!(code(CudaContext::new(3)), 101);
}

#[test]
fn memory_goes_there_and_back() {
    let _machine = emulator(&Config::checked(1));
    let device = Device::new(0).expect("a device");
    let values: Vec<u32> = (0..1000).collect();
    let there = device.stream.clone_htod(&values).expect("copied");
    let copy = device.stream.clone_dtod(&there).expect("copied");
    assert_eq!(device.stream.clone_dtoh(&copy).expect("copied"), values);
    assert_eq!(device.stream.clone_dtoh(&device.a).expect("copied"), [0; 4]);
}

#[test]
fn peers_must_be_enabled() {
    let _machine = emulator(&Config::checked(1));
    let (mut near, mut far) = (Device::new(0).expect("a device"), Device::new(1).expect("a device"));
    far.stream.synchronize().expect("its buffers are filled");
    near.stream.synchronize().expect("its buffers are filled");
    let argument = Check { a: far.argument(READ).a, ..near.argument(READ) };
    assert_eq!(enable_peer(&near.context, &far.context), 0);
    assert_eq!(enable_peer(&near.context, &far.context), 704);
    near.launch_on(&near.stream, &argument, 1).expect("launched");
    near.stream.synchronize().expect("the peer is enabled");

    near.context.bind_to_thread().expect("the context is alive");
    // SAFETY: both contexts are alive.
    unsafe { sys::cuCtxDisablePeerAccess(far.context.cu_ctx()) }.result().expect("was enabled");
    near.launch_on(&near.stream, &argument, 1).expect("launched");
    assert_eq!(code(near.stream.synchronize()), 700);
    let error = report().error.expect("an error");
    assert!(error.contains("no peer access enabled") && error.contains("memory of device 1"), "{error}");
}

#[test]
fn events_order_streams() {
    let _machine = emulator(&Config::checked(4));
    for has_event in [true, false] {
        configure(&Config::checked(4));
        let mut device = Device::new(0).expect("a device");
        device.stream.synchronize().expect("its buffers are filled");
        let writer = device.argument(PUBLISH);
        let other = device.context.new_stream().expect("a stream");
        device.launch_on(&device.stream, &writer, 1).expect("launched");
        if has_event {
            let event = device.stream.record_event(None).expect("recorded");
            other.wait(&event).expect("enqueued");
        }
        let reader = Check { b: writer.a, ..device.argument(READ) };
        device.launch_on(&other, &reader, 1).expect("launched");
        assert_eq!(code(device.context.synchronize()), if has_event { 0 } else { 700 });
        assert_eq!(report().races.is_empty(), has_event, "{:?}", report().races);
    }
}

#[test]
fn a_graph_is_captured_once_and_replayed() {
    let _machine = emulator(&Config::checked(2));
    let mut device = Device::new(0).expect("a device");
    device.stream.synchronize().expect("its buffers are filled");
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    device.stream.begin_capture(mode).expect("begun");
    // SAFETY: the stream is alive.
    assert_eq!(code(unsafe { result::stream::synchronize(device.stream.cu_stream()) }), 900);
    let broken = device.stream.end_capture(sys::CUgraphInstantiate_flags(0));
    assert_eq!(code(broken), 901);

    device.stream.begin_capture(mode).expect("begun");
    // SAFETY: nothing is read from the memory.
    assert_eq!(code(unsafe { result::malloc_sync(16) }), 900);
    let argument = Check { limit: 1 << 20, ..device.argument(BOUNDED_WAIT) };
    device.launch_on(&device.stream, &argument, 32).expect("captured");
    let graph = device.stream.end_capture(sys::CUgraphInstantiate_flags(0)).expect("ended").expect("a graph");
    assert_eq!(report().stats.num_blocks, 0, "capture runs nothing");
    for _ in 0..3 {
        graph.launch().expect("launched");
    }
    device.stream.synchronize().expect("all waits end");
    assert_eq!(report().stats.num_blocks, 3);
    assert_eq!(device.stream.clone_dtoh(&device.result).expect("copied")[0], 0xFA017);
}

#[test]
fn a_query_lets_the_work_go_on() {
    let _machine = emulator(&Config::fast());
    let mut device = Device::new(0).expect("a device");
    device.launch(BOUNDED_WAIT).expect("launched");
    // SAFETY: the stream is alive.
    let query = || unsafe { sys::cuStreamQuery(device.stream.cu_stream()) } as u32;
    let num_queries = (1..1000).find(|_| query() == 0).expect("it ends");
    assert!(num_queries > 1, "a query lets only a little of it happen");
}

#[test]
fn ranks_on_threads_of_their_own_meet() {
    let _machine = emulator(&Config { patience: Duration::from_secs(20), ..Config::checked(7) });
    let mut ranks = [0, 1].map(|ordinal| Device::new(ordinal).expect("a device"));
    for rank in &ranks {
        rank.stream.synchronize().expect("its buffers are filled");
    }
    assert_eq!(enable_peer(&ranks[1].context, &ranks[0].context), 0);
    let shared = ranks[0].argument(PUBLISH);
    let results = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (role, rank) in ranks.iter_mut().enumerate() {
            threads.push(scope.spawn(move || {
                // The reader waits for a writer that comes later, from another thread.
                thread::sleep(Duration::from_millis(if role == 0 { 60 } else { 0 }));
                let argument =
                    Check { a: shared.a, b: shared.b, role: role as i32, ..rank.argument(PUBLISH) };
                rank.launch_on(&rank.stream, &argument, 1).expect("launched");
                rank.stream.clone_dtoh(&rank.result).expect("clean")[0]
            }));
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
    });
    assert_eq!(results, [0, 1]);
    assert_eq!(report().complaint(), None);
}

#[test]
fn failures_have_their_codes_and_stick_until_configured() {
    let _machine = emulator(&Config::checked(1));
    for (test, wanted) in [(OUT_OF_BOUNDS, 700), (WAIT_FOREVER, 702), (TRAP, 719)] {
        configure(&Config::checked(1));
        let mut device = Device::new(0).expect("a device");
        device.launch(test).expect("launched");
        assert_eq!(code(device.stream.synchronize()), wanted);
        assert_eq!(code(device.launch(READ)), wanted);
        assert!(report().error.is_some());
    }
    configure(&Config::checked(1));
    let mut device = Device::new(0).expect("a device");
    assert!(device.launch(READ).is_ok() && report().is_clean());
    device.stream.synchronize().expect_err("32 threads write one word");
}

/// The host is told that a copy failed, and may free where it was to go: it must not happen later.
#[test]
fn a_copy_behind_a_failed_kernel_never_happens() {
    let _machine = emulator(&Config::checked(1));
    let mut device = Device::new(0).expect("a device");
    let mut words = [7u32; 4];
    let copy = |device: &Device, words: &mut [u32; 4]| {
        let (address, _guard) = device.a.device_ptr(&device.stream);
        // SAFETY: the buffer has so many words; the driver has written pageable memory when it returns.
        unsafe { result::memcpy_dtoh_async(words, address, device.stream.cu_stream()) }
    };
    device.launch(TRAP).expect("launched");
    assert_eq!(code(copy(&device, &mut words)), 719);
    configure(&Config::checked(1)); // gives up what was queued
    assert_eq!(words, [7; 4]);
    copy(&device, &mut words).expect("the machine is whole again");
    assert_eq!(words, [0; 4]);
}

#[test]
fn arguments_are_checked() {
    let _machine = emulator(&Config { max_resident_blocks: 4, ..Config::fast() });
    let mut device = Device::new(0).expect("a device");
    // SAFETY: the handles are alive, and the image is never run.
    unsafe {
        let name = CString::from(c"no such kernel");
        assert_eq!(code(result::module::get_function(device.module, name)), 500);
        assert_eq!(code(result::module::load_data([0u8; 64].as_ptr().cast())), 200);
    }
    let argument = device.argument(READ);
    let launch = |grid: u32, block: u32, shared: u32| {
        let mut arguments = [(&raw const argument) as *mut c_void];
        // SAFETY: the argument is what the kernel takes.
        code(unsafe {
            let (f, stream) = (device.check, device.stream.cu_stream());
            result::launch_kernel(f, (grid, 1, 1), (block, 1, 1), shared, stream, &mut arguments)
        })
    };
    assert_eq!(launch(1, 1025, 0), 1);
    assert_eq!(launch(0, 32, 0), 1);
    assert_eq!(launch(1, 32, 60_000), 1);
    let shared = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function is alive.
    unsafe { result::function::set_function_attribute(device.check, shared, 60_000) }
        .expect("it may have as much");
    assert_eq!(launch(1, 32, 60_000), 0);
    let cooperative = |grid: u32| {
        let mut arguments = [(&raw const argument) as *mut c_void];
        // SAFETY: the argument is what the kernel takes.
        code(unsafe {
            let (f, stream) = (device.check, device.stream.cu_stream());
            sys::cuLaunchCooperativeKernel(f, grid, 1, 1, 32, 1, 1, 0, stream, arguments.as_mut_ptr())
                .result()
        })
    };
    assert_eq!((cooperative(5), cooperative(4)), (720, 0));
    device.stream.synchronize().expect("no checks");
}

#[test]
fn pinned_memory_is_the_devices_too() {
    let _machine = emulator(&Config { races: false, ..Config::checked(3) });
    let mut device = Device::new(0).expect("a device");
    device.context.bind_to_thread().expect("the context is alive");
    // SAFETY: the memory is written before it is read, and freed once.
    unsafe {
        let record = result::malloc_host(64, 0).expect("pinned").cast::<u64>();
        record.write_volatile(0);
        let argument = Check { result: record as u64, ..device.argument(BOUNDED_WAIT) };
        device.launch_on(&device.stream, &argument, 32).expect("launched");
        device.stream.synchronize().expect("the wait ends");
        assert_eq!(record.read_volatile(), 0xFA017);
        assert_eq!(report().num_host_allocations, 1);
        result::free_host(record.cast()).expect("freed");
    }
}

#[test]
fn dropping_everything_leaves_nothing() {
    let _machine = emulator(&Config::checked(1));
    let before = report();
    let device = Device::new(5).expect("a device");
    device.stream.synchronize().expect("its buffers are filled");
    let during = report();
    assert_eq!(
        (during.num_allocations - before.num_allocations, during.num_streams - before.num_streams),
        (3, 1)
    );
    assert_eq!(during.num_modules - before.num_modules, 1);
    let stream = device.stream.clone();
    drop(device);
    stream.synchronize().expect("frees are in stream order");
    drop(stream);
    let after = report();
    assert_eq!(
        (after.num_allocations, after.num_streams, after.num_modules),
        (before.num_allocations, before.num_streams, before.num_modules)
    );
}
