//! Every failure of a driver call is an error that names the call, and nothing is lost by it: over the emulated
//! driver, each call of each operation is made to fail, once and for good.
#![cfg(feature = "cuda")]

#[path = "common/collective.rs"]
mod collective;

use std::collections::BTreeSet;
use std::time::Duration;

use collective::*;
use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::{Buffer, ChooseRow, Chooser, ChooserConfig, Cuda, Event, Graph};
use eagle_verify::comm::{Group, Rendezvous, WorldSize};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
use eagle_verify::{Error, ErrorKind, Result, TokenId};
use half::bf16;

const IMAGES: &[(&str, &[u8])] = &[("emulated", emulator::IMAGE)];
/// A code that says nothing about later calls.
const OPERATING_SYSTEM: u32 = 304;
const ILLEGAL_ADDRESS: u32 = 700;

/// All that the driver has lent.
fn held() -> [u64; 7] {
    let report = emulator::report();
    let driver = report.driver;
    [
        report.num_allocations,
        report.num_host_allocations,
        report.num_streams,
        report.num_modules,
        driver.num_contexts,
        driver.num_events,
        driver.num_graphs,
    ]
}

/// `cuMemAlloc` of `cuMemAlloc_v2`.
fn short(function: &str) -> &str {
    function.strip_suffix("_v2").unwrap_or(function)
}

fn assert_names(error: &Error, function: &str) {
    let call = format!("{} on device ", short(function));
    assert!(error.to_string().contains(&call), "{function} failed, the error is: {error}");
}

/// The driver is looked at once in a process, whichever test comes first: not in a walk.
fn prepare() {
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    Cuda::num_devices().unwrap();
}

/// Lets each driver call of `operation` fail, one after the other, on a fresh `scene`. Gives their names.
///
/// `operation` gives an error, or asserts that its results are right.
fn walk<S>(scene: impl Fn() -> S, operation: impl Fn(&mut S) -> Result<()>) -> Vec<String> {
    prepare();
    let mut functions = Vec::new();
    for nth in 1.. {
        let before = held();
        let mut failing = scene();
        emulator::fail(None, nth, OPERATING_SYSTEM);
        let outcome = operation(&mut failing);
        let failed = emulator::failed_call();
        emulator::fail(None, 0, 0);
        let Some(function) = failed else {
            outcome.unwrap();
            break;
        };
        let error = outcome.expect_err(&function);
        assert_names(&error, &function);
        assert_eq!(error.kind(), ErrorKind::Fault);
        assert!(error.seen().contains("CUDA_ERROR_OPERATING_SYSTEM (304)"), "{error}");
        operation(&mut failing).unwrap_or_else(|error| panic!("after a failure of {function}: {error}"));
        drop(failing);
        assert_eq!(held(), before, "after a failure of {function}");

        let mut lost = scene();
        emulator::fail_for_good(None, nth, ILLEGAL_ADDRESS);
        let error = operation(&mut lost).expect_err(&function);
        assert_names(&error, &function);
        assert!(error.seen().ends_with("the device's context is lost: start a new process"), "{error}");
        operation(&mut lost).expect_err("lost for good");
        drop(lost);
        start_anew();
        functions.push(function);
    }
    operation(&mut scene()).unwrap();
    functions
}

/// Lets each driver call that dropping a scene makes fail.
fn walk_drop<S>(scene: impl Fn() -> S) -> Vec<String> {
    emulator::configure(&emulator::Config::fast());
    let mut functions = Vec::new();
    for nth in 1.. {
        let before = held();
        let dropped = scene();
        emulator::fail(None, nth, OPERATING_SYSTEM);
        drop(dropped);
        let failed = emulator::failed_call();
        emulator::fail(None, 0, 0);
        let Some(function) = failed else { break };
        assert_eq!(held(), before, "after a failure of {function}");
        let dropped = scene();
        emulator::fail_for_good(None, nth, ILLEGAL_ADDRESS);
        drop(dropped);
        start_anew();
        functions.push(function);
    }
    functions
}

/// As in a new process, but for what a lost device still holds.
fn start_anew() {
    emulator::fail(None, 0, 0);
    emulator::synchronize().unwrap(); // what was queued before the failure
    emulator::configure(&emulator::Config::fast());
}

fn open() -> Cuda {
    Cuda::with_kernels(0, IMAGES).unwrap()
}

/// Everything that the backend has, on one device.
struct Scene {
    cuda: Cuda,
    numbers: Buffer<u32>,
    logits: Buffer<f32>,
    chooser: Chooser<f32>,
    group: Group<Cuda, bf16>,
    ones: Buffer<bf16>,
    output: Buffer<bf16>,
    event: Event,
    graph: Option<Graph>,
    /// Not dropped by what made it: failures in drops are another walk's.
    kept: Vec<Buffer<u8>>,
}

const VOCAB: usize = 40;

impl Scene {
    fn new() -> Self {
        Self::with(open())
    }

    fn with(cuda: Cuda) -> Self {
        let rendezvous = Rendezvous::new(WorldSize::One, Duration::from_secs(20));
        let rank = WorldSize::One.ranks().next().unwrap();
        let rows: Vec<f32> = (0..2 * VOCAB).map(|i| (i * 7 % 11) as f32).collect();
        Self {
            numbers: cuda.upload(&[1, 2, 3]).unwrap(),
            logits: cuda.upload(&rows).unwrap(),
            chooser: Chooser::new(&cuda, ChooserConfig::new(2, VOCAB)).unwrap(),
            group: Group::join(&cuda, &rendezvous, rank, config(64, 2, None)).unwrap(),
            ones: cuda.upload(&[bf16::ONE; 128]).unwrap(),
            output: cuda.alloc(128).unwrap(),
            event: Event::new(&cuda).unwrap(),
            graph: None,
            kept: Vec::new(),
            cuda,
        }
    }

    fn transfer(&mut self) -> Result<()> {
        self.cuda.write(&mut self.numbers, &[4, 5, 6])?;
        let fresh = self.cuda.upload(&[7u8; 5])?;
        assert_eq!(self.cuda.download(&self.numbers)?, [4, 5, 6]);
        assert_eq!(self.cuda.download(&fresh)?, [7; 5]);
        self.kept.push(fresh);
        Ok(())
    }

    fn choose(&mut self) -> Result<()> {
        let sampler = Sampler::new(SamplingParams::default()).unwrap();
        let context = SamplingContext { position: 3, prompt: &[], output: &[], path: &[], allowed: None };
        let rows = [ChooseRow::new(&sampler, context); 2];
        let keys = self.chooser.choose(self.logits.slice(), &rows)?.to_vec();
        let specified = |row: usize| {
            let logits: Vec<f32> = (0..VOCAB).map(|i| ((row * VOCAB + i) * 7 % 11) as f32).collect();
            sampler.choose(&logits, context)
        };
        assert_eq!(keys, [0, 1].map(|row| specified(row).unwrap()));
        Ok(())
    }

    fn reduce(&mut self) -> Result<()> {
        self.group.all_reduce(self.ones.slice(), self.output.slice_mut())?;
        assert_eq!(self.cuda.download(&self.output)?, [bf16::ONE; 128]);
        self.group.check()
    }

    fn capture(&mut self) -> Result<()> {
        self.cuda.write(&mut self.output, &[bf16::ZERO; 128])?;
        let (group, ones, output) = (&mut self.group, &self.ones, &mut self.output);
        let mut graph = self.cuda.capture(|| group.all_reduce(ones.slice(), output.slice_mut()))?;
        // SAFETY: all memory and the group live on.
        unsafe { graph.launch() }?;
        self.graph = Some(graph);
        assert_eq!(self.cuda.download(&self.output)?, [bf16::ONE; 128]);
        Ok(())
    }

    fn order(&mut self) -> Result<()> {
        self.event.record()?;
        self.cuda.wait_for(&self.event)?;
        self.event.synchronize()
    }
}

/// A group whose ranks are driven from this thread, on two devices; or the ranks' errors.
fn two_ranks() -> Vec<Result<(Cuda, Group<Cuda, bf16>)>> {
    let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(20));
    std::thread::scope(|scope| {
        let joining: Vec<_> = WorldSize::Two
            .ranks()
            .map(|rank| {
                let rendezvous = &rendezvous;
                scope.spawn(move || {
                    let cuda = Cuda::with_kernels(rank.index(), IMAGES)
                        .inspect_err(|error| rendezvous.abandon(rank, error))?;
                    let group = Group::join(&cuda, rendezvous, rank, config(64, 2, None))?;
                    Ok((cuda, group))
                })
            })
            .collect();
        joining.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Every function that the driver is asked for is one that was looked for first: without it, cudarc panics.
fn assert_probed(functions: &[String]) {
    let probe = include_str!("../src/backend/cuda/probe.rs");
    for function in functions {
        assert!(probe.contains(&format!("\"{function}\"")), "{function} is called, and not in SYMBOLS");
    }
}

#[test]
fn making_things() {
    let _machine = emulator::exclusive();
    emulator::install();
    let opened = walk(
        || None,
        |cuda| {
            *cuda = Some(Cuda::with_kernels(0, IMAGES)?);
            Ok(())
        },
    );
    let chooser = walk(
        || (open(), None),
        |(cuda, chooser)| {
            *chooser = Some(Chooser::<bf16>::new(cuda, ChooserConfig::new(3, VOCAB))?);
            Ok(())
        },
    );
    let group = walk(
        || (None, open()),
        |(group, cuda)| {
            let rendezvous = Rendezvous::new(WorldSize::One, Duration::from_secs(20));
            let rank = WorldSize::One.ranks().next().unwrap();
            *group = Some(Group::<Cuda, bf16>::join(cuda, &rendezvous, rank, config(64, 2, None))?);
            Ok(())
        },
    );
    let event = walk(
        || (None, open()),
        |(event, cuda)| {
            *event = Some(Event::new(cuda)?);
            Ok(())
        },
    );
    let dependent = walk(
        || (None, open()),
        |(chooser, cuda)| {
            let cuda = cuda.clone().with_dependent_launches()?;
            *chooser = Some(Chooser::<f32>::new(&cuda, ChooserConfig::new(1, VOCAB))?);
            Ok(())
        },
    );
    let walks = [opened, chooser, group, event, dependent];
    walks.iter().for_each(|functions| assert_probed(functions));
    let seen: BTreeSet<&str> = walks.iter().flatten().map(|function| short(function)).collect();
    for function in [
        "cuCtxSetCurrent",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuEventCreate",
        "cuFuncGetAttribute",
        "cuFuncLoad",
        "cuMemAlloc",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuMemcpyHtoDAsync",
        "cuMemsetD8Async",
        "cuModuleGetFunction",
        "cuModuleLoadData",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        "cuStreamCreate",
        "cuStreamSynchronize",
    ] {
        assert!(seen.contains(function), "{function} was not made to fail: {seen:?}");
    }
}

#[test]
fn using_them() {
    let _machine = emulator::exclusive();
    emulator::install();
    let mut functions = walk(Scene::new, Scene::transfer);
    functions.extend(walk(Scene::new, Scene::choose));
    functions.extend(walk(Scene::new, Scene::reduce));
    functions.extend(walk(Scene::new, Scene::capture));
    functions.extend(walk(Scene::new, Scene::order));
    functions.extend(walk(|| Scene::with(open().with_dependent_launches().unwrap()), Scene::reduce));
    assert_probed(&functions);
    let seen: BTreeSet<&str> = functions.iter().map(|function| short(function)).collect();
    for function in [
        "cuEventRecord",
        "cuEventSynchronize",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuGraphUpload",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuMemcpyDtoHAsync",
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuStreamWaitEvent",
    ] {
        assert!(seen.contains(function), "{function} was not made to fail: {seen:?}");
    }
}

#[test]
fn dropping_them() {
    let _machine = emulator::exclusive();
    emulator::install();
    let functions = walk_drop(|| {
        let mut scene = Scene::new();
        scene.transfer().unwrap();
        scene.choose().unwrap();
        scene.capture().unwrap();
        scene
    });
    assert_probed(&functions);
    let seen: BTreeSet<&str> = functions.iter().map(|function| short(function)).collect();
    for function in [
        "cuCtxSetCurrent",
        "cuDevicePrimaryCtxRelease",
        "cuEventDestroy",
        "cuGraphDestroy",
        "cuGraphExecDestroy",
        "cuMemFree",
        "cuMemFreeHost",
        "cuModuleUnload",
        "cuStreamDestroy",
        "cuStreamSynchronize",
    ] {
        assert!(seen.contains(function), "{function} was not made to fail: {seen:?}");
    }
}

/// The ranks of a group come in any order, so a number names another call in each run: all are met all the same.
#[test]
fn a_group_of_two_devices() {
    let _machine = emulator::exclusive();
    prepare();
    let before = held();
    let mut functions = Vec::new();
    for nth in 1.. {
        emulator::fail(None, nth, OPERATING_SYSTEM);
        let ranks = two_ranks();
        let failed = emulator::failed_call();
        emulator::fail(None, 0, 0);
        let errors: Vec<&Error> = ranks.iter().filter_map(|rank| rank.as_ref().err()).collect();
        let Some(function) = failed else {
            assert!(errors.is_empty(), "{errors:?}");
            break;
        };
        assert_eq!(errors.len(), 2, "{function}");
        // The rank itself, and the other which heard of it.
        errors.iter().for_each(|error| assert_names(error, &function));
        assert!(errors.iter().any(|error| error.subject().contains(" of rank ")), "{errors:?}");
        drop(ranks);
        assert_eq!(held(), before, "after a failure of {function}");
        functions.push(function);
    }
    assert_probed(&functions);
    for function in ["cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess"] {
        assert!(functions.iter().any(|seen| seen == function), "{function}: {functions:?}");
    }
    // A rank whose launch fails: the other gives up in time.
    let mut ranks: Vec<_> = two_ranks().into_iter().map(Result::unwrap).collect();
    let ones = [0, 1].map(|rank| ranks[rank].0.upload(&[bf16::ONE; 64]).unwrap());
    let mut outputs = [0, 1].map(|rank| ranks[rank].0.alloc::<bf16>(64).unwrap());
    emulator::fail(Some("cuLaunchKernel"), 2, OPERATING_SYSTEM);
    let calls: Vec<Result<()>> =
        (0..2).map(|rank| ranks[rank].1.all_reduce(ones[rank].slice(), outputs[rank].slice_mut())).collect();
    calls[0].as_ref().unwrap();
    assert_names(calls[1].as_ref().unwrap_err(), "cuLaunchKernel");
    ranks[0].0.synchronize().unwrap();
    let error = ranks[0].1.check().unwrap_err();
    assert!(error.to_string().contains("rank 1 to answer"), "{error}");
    drop((ranks, ones, outputs));
    assert_eq!(held(), before);
}

#[test]
fn memory_that_is_not_there() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    // Devices that no other test has lost memory of.
    let [cuda, other] = [2, 3].map(|device| Cuda::with_kernels(device, IMAGES).unwrap());
    let some = cuda.alloc::<u32>(1000).unwrap();
    emulator::set_memory_limit(2, 4000 + 4096);
    let error = cuda.alloc::<u32>(1025).unwrap_err();
    let wanted = "fault: cuMemAlloc on device 2: wanted 4100 bytes, seen CUDA_ERROR_OUT_OF_MEMORY (2)";
    assert_eq!(error.to_string(), wanted);
    other.alloc::<u32>(1025).unwrap();
    let rest = cuda.alloc::<u32>(1024).unwrap();
    assert_eq!(cuda.download(&rest).unwrap(), [0; 1024]);
    drop((some, rest));
    cuda.alloc::<u32>(1025).unwrap();

    // Host memory: 40 rows of 80 bytes are staged.
    emulator::fail(Some("cuMemHostAlloc"), 1, 2);
    let error = Chooser::<f32>::new(&cuda, ChooserConfig::new(40, VOCAB)).unwrap_err();
    let wanted = "fault: cuMemHostAlloc on device 2: wanted 3200 bytes, seen CUDA_ERROR_OUT_OF_MEMORY (2)";
    assert_eq!(error.to_string(), wanted);

    // A call that needs more than any before: what the chooser has stays good.
    let mut scene = Scene::with(cuda);
    scene.choose().unwrap();
    let sampler = Sampler::new(SamplingParams { top_k: 3, ..Default::default() }).unwrap();
    let context = SamplingContext { position: 3, prompt: &[], output: &[], path: &[], allowed: None };
    emulator::set_memory_limit(2, 0);
    let rows = [ChooseRow::new(&sampler, context); 2];
    let sampled = SamplingParams { top_k: 3, temperature: 1.0, ..Default::default() };
    let sampler = Sampler::new(sampled).unwrap();
    let filtered = [ChooseRow::new(&sampler, context); 2];
    let seen = scene.chooser.choose(scene.logits.slice(), &filtered).unwrap_err();
    assert!(seen.to_string().ends_with("seen CUDA_ERROR_OUT_OF_MEMORY (2)"), "{seen}");
    scene.chooser.choose(scene.logits.slice(), &rows).unwrap();
    scene.choose().unwrap();
}

/// What the driver says of images, and what the crate makes of it.
#[test]
fn kernels_for_another_device_or_driver() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config { compute_capability: (9, 0), ..emulator::Config::fast() });
    let code_for = "code for sm_90 (see EAGLE_VERIFY_CUDA_ARCHS)";
    let compiles = format!("{code_for}, or a newer driver that compiles its PTX");
    for (code, name, wanted) in [
        (209, "CUDA_ERROR_NO_BINARY_FOR_GPU", code_for),
        (218, "CUDA_ERROR_INVALID_PTX", &compiles),
        (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", &compiles),
        (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", &compiles),
        (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", &compiles),
        (200, "CUDA_ERROR_INVALID_IMAGE", "a fatbin, cubin or PTX that this driver can read"),
    ] {
        let before = held();
        emulator::fail(Some("cuModuleLoadData"), 1, code);
        let error = Cuda::with_kernels(0, IMAGES).unwrap_err();
        let seen = format!("an image of 14 bytes: {name} ({code}) from cuModuleLoadData on device 0");
        let text = format!("unsupported: CUDA kernels `emulated`: wanted {wanted}, seen {seen}");
        assert_eq!(error.to_string(), text);
        assert_eq!(held(), before);
    }
    let error = Cuda::with_kernels(99, IMAGES).unwrap_err();
    assert_eq!(error.to_string(), "misuse: device ordinal: wanted below 8, seen 99");
    let cuda = Cuda::with_kernels(0, IMAGES).unwrap();
    emulator::fail(Some("cuModuleGetFunction"), 1, 500);
    let error = Chooser::<f32>::new(&cuda, ChooserConfig::new(1, VOCAB)).unwrap_err();
    let wanted = "unsupported: CUDA kernel: wanted ev_choose_f32, seen images without it";
    assert_eq!(error.to_string(), wanted);
}

/// Memory dropped where the driver would not take it back, or could not be asked, comes back later.
#[test]
fn what_a_drop_cannot_give_back_comes_back_later() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    let before = held();
    let mut scene = Scene::new();
    let cuda = scene.cuda.clone();
    let (first, second) = (cuda.alloc::<u8>(10).unwrap(), cuda.alloc::<u8>(10).unwrap());
    let during = emulator::report().num_allocations;
    let (group, ones, output) = (&mut scene.group, &scene.ones, &mut scene.output);
    let graph = cuda.capture(|| {
        drop(first);
        group.all_reduce(ones.slice(), output.slice_mut())
    });
    // The drop did not end the capture.
    drop(graph.unwrap());
    assert_eq!(emulator::report().num_allocations, during - 1);
    emulator::fail(Some("cuStreamSynchronize"), 1, OPERATING_SYSTEM);
    drop(second);
    assert_eq!(emulator::report().num_allocations, during - 1);
    drop(cuda.alloc::<u8>(10).unwrap());
    assert_eq!(emulator::report().num_allocations, during - 2);
    // Another thread of the process captures in the mode that forbids it.
    let third = cuda.alloc::<u8>(10).unwrap();
    emulator::fail(Some("cuMemFree_v2"), 1, 900);
    drop(third);
    drop((scene, cuda));
    assert_eq!(held(), before);
}

/// What was captured before the failure says why, rather than the end of the capture that it broke.
#[test]
fn the_first_error_of_a_capture_is_the_one_that_is_told() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    let mut scene = Scene::new();
    let (cuda, numbers) = (scene.cuda.clone(), &scene.numbers);
    let error = cuda.capture(|| cuda.download(numbers).map(drop)).unwrap_err();
    let wanted = "fault: cuMemcpyDtoHAsync on device 0: wanted success, \
                  seen CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)";
    assert_eq!(error.to_string(), wanted);
    // A choice waits for its keys, so it cannot be captured; and is none the worse for the attempt.
    let chooser = &mut scene.chooser;
    let sampler = Sampler::new(SamplingParams::default()).unwrap();
    let context = SamplingContext { position: 3, prompt: &[], output: &[], path: &[], allowed: None };
    let rows = [ChooseRow::new(&sampler, context); 2];
    let logits = &scene.logits;
    let error = cuda.capture(|| chooser.choose(logits.slice(), &rows).map(drop)).unwrap_err();
    assert_names(&error, "cuStreamSynchronize");
    for _ in 0..2 {
        scene.choose().unwrap();
    }
}

/// Rows that a queued copy still reads are not overwritten: after a call that failed in the middle, the next one
/// waits for it first.
#[test]
fn a_chooser_does_not_overwrite_what_is_being_copied() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    let mut scene = Scene::new();
    scene.choose().unwrap();
    let num_waits = |scene: &mut Scene| {
        let before = emulator::report().driver.num_host_syncs;
        scene.choose().unwrap();
        emulator::report().driver.num_host_syncs - before
    };
    assert_eq!(num_waits(&mut scene), 1);
    emulator::fail(Some("cuLaunchKernel"), 1, OPERATING_SYSTEM);
    assert_names(&scene.choose().unwrap_err(), "cuLaunchKernel");
    assert_eq!(num_waits(&mut scene), 2);
    assert_eq!(num_waits(&mut scene), 1);
}

#[test]
fn the_cpu_goes_on() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    let mut scene = Scene::new();
    emulator::fail_for_good(Some("cuLaunchKernel"), 1, ILLEGAL_ADDRESS);
    scene.choose().unwrap_err();
    let cpu = Cpu::with_threads(1).unwrap();
    let sampler = Sampler::new(SamplingParams::default()).unwrap();
    let context = SamplingContext { position: 0, prompt: &[], output: &[], path: &[], allowed: None };
    let key: ChoiceKey = cpu.sample(&sampler, &[0.0, 2.0, 1.0], context).unwrap();
    assert_eq!(key.checked().unwrap().token(), TokenId(1));
    // Dropping what is lost neither panics nor hangs. The codes' names are the crate's own: a driver that fails
    // is not asked for them.
    drop(scene);
    assert!(emulator::calls().iter().all(|function| !function.starts_with("cuGetError")));
    start_anew();
    Scene::new().choose().unwrap();
}
