//! Work on several streams, an engine's among them, and launches as dependents: over the emulated driver.
#![cfg(feature = "cuda")]

#[path = "common/collective.rs"]
mod collective;

use std::ffi::c_void;
use std::time::Duration;

use collective::config;
use cuda_emulator as emulator;
use cudarc::driver::{DriverError, result, sys};
use eagle_verify::backend::cuda::{Buffer, Cuda, DeviceSlice, DeviceSliceMut, Event};
use eagle_verify::comm::{Group, Rendezvous, WorldSize};
use eagle_verify::{ErrorKind, Result};
use half::bf16;

const IMAGES: &[(&str, &[u8])] = &[("emulated", emulator::IMAGE)];
const LEN: usize = 128;

/// A stream and a kernel on it that copies `LEN` numbers.
struct Worker {
    cuda: Cuda,
    group: Group<Cuda, bf16>,
}

impl Worker {
    fn new(cuda: Cuda) -> Self {
        let rendezvous = Rendezvous::new(WorldSize::One, Duration::from_secs(20));
        let rank = WorldSize::One.ranks().next().unwrap();
        let group = Group::join(&cuda, &rendezvous, rank, config(64, 2, None)).unwrap();
        Self { cuda, group }
    }

    /// Queues a copy, whoever the memory belongs to.
    fn copy(&mut self, from: &Buffer<bf16>, to: &Buffer<bf16>) -> Result<()> {
        // SAFETY: buffers of this device that live on. That nothing else uses them at the same time is what the
        // emulator checks.
        let (from, to) = unsafe {
            let from = DeviceSlice::from_raw(&self.cuda, from.address(), LEN);
            (from, DeviceSliceMut::from_raw(&self.cuda, to.address(), LEN))
        };
        self.group.all_reduce(from, to)
    }
}

/// An engine with a stream that the crate knows nothing of, but for the door; the crate's stream; and memory: of
/// the engine, which it writes; of the crate, which writes it from the engine's.
struct Scene {
    stream: sys::CUstream,
    engine: Worker,
    own: Worker,
    ones: Buffer<bf16>,
    twos: Buffer<bf16>,
    logits: Buffer<bf16>,
    copy: Buffer<bf16>,
}

impl Scene {
    fn new() -> Self {
        emulator::install();
        let own = Worker::new(Cuda::with_kernels(0, IMAGES).unwrap());
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        // SAFETY: destroyed in `drop`, when its work has ended.
        let engine = Worker::new(unsafe { Cuda::on_stream(0, IMAGES, stream.cast()) }.unwrap());
        let upload = |value: f32| engine.cuda.upload(&[bf16::from_f32(value); LEN]).unwrap();
        let (ones, twos, logits) = (upload(1.0), upload(2.0), upload(0.0));
        let copy = own.cuda.alloc(LEN).unwrap();
        Self { stream, engine, own, ones, twos, logits, copy }
    }

    fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// The engine writes, the crate copies what was written, and the engine writes again. Each has a wait of its
    /// own, which may be left out.
    fn step(&mut self, waits: [bool; 2]) -> Result<()> {
        self.engine.copy(&self.ones, &self.logits)?;
        if waits[0] {
            // SAFETY: the stream is of the device, and alive.
            unsafe { self.own.cuda.wait_for_stream(self.raw()) }?;
        }
        self.own.copy(&self.logits, &self.copy)?;
        if waits[1] {
            // SAFETY: as above.
            unsafe { self.own.cuda.let_stream_wait(self.raw()) }?;
        }
        self.engine.copy(&self.twos, &self.logits)
    }

    /// Whether all is as it must be, in this run.
    fn is_right(&self) -> bool {
        let is_done = self.engine.cuda.synchronize().is_ok() && self.own.cuda.synchronize().is_ok();
        is_done
            && self.own.cuda.download(&self.copy).unwrap() == [bf16::ONE; LEN]
            && self.engine.cuda.download(&self.logits).unwrap() == [bf16::from_f32(2.0); LEN]
    }

    fn close(self) {
        let stream = self.stream;
        drop(self);
        // SAFETY: made by `new`, used by nobody any more.
        unsafe { result::stream::destroy(stream) }.unwrap();
    }
}

#[test]
fn an_engine_s_stream_and_ours_wait_for_each_other() {
    let _machine = emulator::exclusive();
    for seed in emulator::seeds(10) {
        for (waits, is_ordered) in [([true, true], true), ([false, true], false), ([true, false], false)] {
            emulator::configure(&emulator::Config::checked(seed));
            let mut scene = Scene::new();
            let before = emulator::report().driver.num_host_syncs;
            scene.step(waits).unwrap();
            assert_eq!(emulator::report().driver.num_host_syncs, before, "the host waits for nothing");
            assert_eq!(scene.is_right(), is_ordered, "EMU_SEED={seed}: {waits:?}");
            assert_eq!(emulator::report().is_clean(), is_ordered, "EMU_SEED={seed}: {waits:?}");
            scene.close();
        }
    }
}

#[test]
fn an_engine_s_capture_takes_our_work_in() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(2));
    let mut scene = Scene::new();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let mut capture = |waits: [bool; 2]| {
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(scene.stream, mode) }.unwrap();
        let queued = scene.step(waits);
        // SAFETY: as above.
        (queued, unsafe { result::stream::end_capture(scene.stream) })
    };
    let (queued, graph) = capture([true, true]);
    queued.unwrap();
    let graph = graph.unwrap();
    // A branch that does not lead back.
    let (queued, unjoined) = capture([true, false]);
    queued.unwrap();
    assert_eq!(unjoined, Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)));
    scene.own.cuda.synchronize().unwrap();
    let num_kernels = emulator::report().driver.num_launches;
    // SAFETY: all that was captured lives on; the handles are given back once.
    unsafe {
        let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).unwrap();
        for _ in 0..2 {
            result::graph::launch(exec, scene.stream).unwrap();
            assert!(scene.is_right());
        }
        result::graph::exec_destroy(exec).unwrap();
        result::graph::destroy(graph).unwrap();
    }
    let driver = emulator::report().driver;
    assert_eq!((driver.num_graph_launches, driver.num_graph_kernels), (2, 6));
    assert_eq!(driver.num_launches, num_kernels, "all ran in the graph");
    assert_eq!(emulator::report().complaint(), None);
    // Our capture cannot wait for work outside of it, and says so.
    let (own, stream) = (scene.own.cuda.clone(), scene.raw());
    // SAFETY: the stream is of the device, and alive.
    let error = own.capture(|| unsafe { own.wait_for_stream(stream) }).unwrap_err();
    assert!(error.to_string().contains("cuStreamWaitEvent on device 0"), "{error}");
    scene.step([true, true]).unwrap();
    assert!(scene.is_right());
    scene.close();
}

#[test]
fn events_order_streams_and_tell_the_host() {
    let _machine = emulator::exclusive();
    for seed in emulator::seeds(10) {
        for is_ordered in [true, false] {
            emulator::configure(&emulator::Config::checked(seed));
            let before = emulator::report().driver.num_events;
            let mut scene = Scene::new();
            let mut event = Event::new(&scene.engine.cuda).unwrap();
            event.synchronize().unwrap(); // not recorded yet
            scene.engine.copy(&scene.ones, &scene.logits).unwrap();
            if is_ordered {
                event.record().unwrap();
            }
            scene.own.cuda.wait_for(&event).unwrap();
            scene.own.copy(&scene.logits, &scene.copy).unwrap();
            let mut end = Event::new(&scene.own.cuda).unwrap();
            end.record().unwrap();
            let is_clean = end.synchronize().is_ok() && scene.engine.cuda.synchronize().is_ok();
            assert_eq!(is_clean, is_ordered, "EMU_SEED={seed}");
            assert_eq!(emulator::report().is_clean(), is_ordered, "EMU_SEED={seed}");
            drop((event, end));
            scene.close();
            assert_eq!(
                emulator::report().driver.num_events == before,
                is_ordered,
                "a lost device keeps them"
            );
        }
    }
}

#[test]
fn dependent_launches_are_an_option() {
    let _machine = emulator::exclusive();
    emulator::install();
    for is_dependent in [false, true] {
        emulator::configure(&emulator::Config::checked(1));
        let mut cuda = Cuda::with_kernels(0, IMAGES).unwrap();
        if is_dependent {
            cuda = cuda.with_dependent_launches().unwrap();
        }
        let mut worker = Worker::new(cuda);
        let upload = |value: f32| worker.cuda.upload(&[bf16::from_f32(value); LEN]).unwrap();
        let (from, between, to) = (upload(1.0), upload(0.0), upload(0.0));
        let twice = |worker: &mut Worker| {
            worker.copy(&from, &between)?;
            worker.copy(&between, &to)
        };
        twice(&mut worker).unwrap();
        let cuda = worker.cuda.clone();
        let mut graph = cuda.capture(|| twice(&mut worker)).unwrap();
        // SAFETY: all that was captured lives on.
        unsafe { graph.launch() }.unwrap();
        assert_eq!(cuda.download(&to).unwrap(), [bf16::ONE; LEN]);
        let driver = emulator::report().driver;
        assert_eq!((driver.num_launches, driver.num_graph_kernels), (2, 2));
        assert_eq!(driver.num_dependent_launches, if is_dependent { 4 } else { 0 });
    }
    emulator::configure(&emulator::Config { compute_capability: (8, 9), ..emulator::Config::fast() });
    let error = Cuda::with_kernels(0, IMAGES).unwrap().with_dependent_launches().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let wanted =
        "unsupported: dependent launches on device 0: wanted compute capability 9.0 or newer, seen 8.9";
    assert_eq!(error.to_string(), wanted);
}
