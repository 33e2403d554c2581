//! A device with a stream: contexts, modules, transfers, graphs.

use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::memory::{Buffer, Memory};
use super::{images, probe};
use crate::error::{Error, Result, expect_len};

/// A CUDA device, a stream of its own on it, and this crate's kernels.
///
/// Clones are the same stream. All work of a value is queued on its stream, in the order of the calls; values for
/// the same device run beside each other. Memory is allocated outside of the driver's pools, so that peers
/// can map it. Calls make the device's primary context the current one of their thread, and leave it so.
#[derive(Clone, Debug)]
pub struct Cuda(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    owns_stream: bool,
    modules: Vec<sys::CUmodule>,
}

// SAFETY: driver handles may be used from any thread; every use makes the context current on its thread first.
unsafe impl Send for Inner {}
// SAFETY: the driver locks its objects; the handles don't change after `new`.
unsafe impl Sync for Inner {}

/// Names the call and the device in the driver's answer. A `DriverError` must not be formatted: that would call
/// the driver again.
pub(super) fn checked<T>(ordinal: usize, call: &str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|DriverError(code)| {
        let subject = format!("{call} on device {ordinal}");
        Error::fault(subject, "success", format!("{code:?} ({})", code as u32))
    })
}

impl Cuda {
    /// Device `ordinal` with the kernels that this crate was built with.
    ///
    /// # Errors
    /// *Unsupported* without a usable driver, when the crate was built without nvcc (it says why), or without
    /// kernels for this device. *Misuse* when there is no such device; *fault* when the device fails.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_kernels(ordinal, images::IMAGES)
    }

    /// Device `ordinal` with other kernels than [`kernel_images`](super::kernel_images): named cubins or fatbins
    /// of the files in `kernels/`, for example compiled for another architecture.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_kernels(ordinal: usize, images: &[(&str, &[u8])]) -> Result<Self> {
        Self::open(ordinal, images, None)
    }

    /// As [`with_kernels`](Self::with_kernels), with all work queued on a stream of the engine (a `CUstream`, or
    /// a `cudaStream_t` of the runtime) and in order with the engine's own. The engine may capture it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, and outlives this value, its clones, and all buffers,
    /// graphs and groups made with them.
    pub unsafe fn on_stream(ordinal: usize, images: &[(&str, &[u8])], stream: *mut c_void) -> Result<Self> {
        Self::open(ordinal, images, Some(stream.cast()))
    }

    fn open(ordinal: usize, images: &[(&str, &[u8])], stream: Option<sys::CUstream>) -> Result<Self> {
        if images.is_empty() {
            let wanted = "a build that found nvcc (EAGLE_VERIFY_REQUIRE_KERNELS=1 makes sure)";
            return Err(Error::unsupported("CUDA kernels", wanted, images::WHY_NONE));
        }
        let num_devices = probe::num_devices()?;
        if ordinal >= num_devices {
            return Err(Error::misuse("device ordinal", format!("below {num_devices}"), ordinal));
        }
        let device = checked(ordinal, "cuDeviceGet", result::device::get(ordinal as c_int))?;
        // SAFETY: `device` is valid. Released by `Inner`.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = checked(ordinal, "cuDevicePrimaryCtxRetain", context)?;
        let owns_stream = stream.is_none();
        let stream = stream.unwrap_or(std::ptr::null_mut());
        let mut inner = Inner { ordinal, device, context, stream, owns_stream, modules: Vec::new() };
        inner.bind()?;
        if owns_stream {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
            inner.stream = checked(ordinal, "cuStreamCreate", stream)?;
        }
        for (name, image) in images {
            // Aligned, and for PTX ended with a 0.
            let mut copy: Vec<u64> = vec![0; image.len() / 8 + 1];
            bytemuck::cast_slice_mut(&mut copy)[..image.len()].copy_from_slice(image);
            // SAFETY: `copy` is readable to its end; the driver checks the image's format.
            match unsafe { result::module::load_data(copy.as_ptr().cast::<c_void>()) } {
                Err(DriverError(
                    sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
                    | sys::CUresult::CUDA_ERROR_INVALID_PTX
                    | sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                )) => {
                    let (major, minor) = inner.compute_capability()?;
                    let wanted = format!("code for sm_{major}{minor} (see EAGLE_VERIFY_CUDA_ARCHS)");
                    let seen = format!("code for {}", images::ARCHS);
                    return Err(Error::unsupported(format!("CUDA kernels `{name}`"), wanted, seen));
                }
                module => inner.modules.push(checked(ordinal, "cuModuleLoadData", module)?),
            }
        }
        Ok(Self(Arc::new(inner)))
    }

    /// The number of devices on this machine.
    ///
    /// # Errors
    /// *Unsupported* without a usable driver or device.
    pub fn num_devices() -> Result<usize> {
        probe::num_devices()
    }

    /// The device's ordinal.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Memory for `len` elements, all bits zero. Waits for the stream; and like any allocation it may wait for
    /// every kernel of the device, so not while a peer waits for this rank.
    ///
    /// # Errors
    /// *Fault* when the device has no more.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        let too_many =
            || Error::misuse("buffer", "fewer bytes than there are addresses", format!("{len} elements"));
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(too_many)?;
        Ok(Buffer { memory: Memory::new(self, bytes, 0)?, len, element: PhantomData })
    }

    /// A copy of `data` on the device. Returns when it is there.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn upload<T: Pod>(&self, data: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(data.len())?;
        self.write(&mut buffer, data)?;
        Ok(buffer)
    }

    /// Overwrites a buffer with `data`, as long as it is. Returns when it is there.
    ///
    /// # Errors
    /// *Misuse* when the lengths differ; *fault* when the device fails.
    pub fn write<T: Pod>(&self, buffer: &mut Buffer<T>, data: &[T]) -> Result<()> {
        expect_len("buffer", data.len(), buffer.len)?;
        self.expect_own(buffer)?;
        if data.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the buffer has room for `data`. The driver has read pageable memory when it returns.
        let copy = unsafe { result::memcpy_htod_async(buffer.memory.address, data, self.stream()) };
        self.check("cuMemcpyHtoDAsync", copy)?;
        self.synchronize()
    }

    /// What a buffer holds after all that was queued. Waits for it.
    ///
    /// # Errors
    /// *Fault* when the device fails.
    pub fn download<T: Pod>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        self.expect_own(buffer)?;
        let mut data = vec![T::zeroed(); buffer.len];
        if !data.is_empty() {
            self.bind()?;
            // SAFETY: the buffer has `data.len()` elements. The driver has written pageable memory when it returns.
            let copy = unsafe { result::memcpy_dtoh_async(&mut data, buffer.memory.address, self.stream()) };
            self.check("cuMemcpyDtoHAsync", copy)?;
        }
        self.synchronize()?;
        Ok(data)
    }

    /// Waits for all that was queued.
    ///
    /// # Errors
    /// *Fault* when any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        self.check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream()) })
    }

    /// Records what `queue` queues, without running it, as a graph.
    ///
    /// # Errors
    /// Those of `queue`; *fault* when something in it cannot be captured, such as a transfer or an allocation.
    pub fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        let begun = unsafe { result::stream::begin_capture(self.stream(), mode) };
        self.check("cuStreamBeginCapture", begun)?;
        let mut capture = Capture { cuda: self, is_open: true };
        let queued = queue();
        let mut graph = Graph { cuda: self.clone(), graph: capture.end()?, exec: std::ptr::null_mut() };
        queued?;
        // SAFETY: `graph.graph` was just made.
        let exec = unsafe { result::graph::instantiate(graph.graph, sys::CUgraphInstantiate_flags(0)) };
        graph.exec = self.check("cuGraphInstantiate", exec)?;
        // Now, not in the first launch while a peer already waits.
        // SAFETY: both handles are valid.
        self.check("cuGraphUpload", unsafe { result::graph::upload(graph.exec, self.stream()) })?;
        self.synchronize()?;
        Ok(graph)
    }

    fn expect_own<T>(&self, buffer: &Buffer<T>) -> Result<()> {
        if buffer.memory.cuda.stream_id() == self.stream_id() {
            return Ok(());
        }
        Err(Error::misuse("buffer", "one of this `Cuda`", "another's"))
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.0.bind()
    }

    pub(super) fn check<T>(&self, call: &str, result: Result<T, DriverError>) -> Result<T> {
        checked(self.0.ordinal, call, result)
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.0.stream
    }

    pub(super) fn stream_id(&self) -> StreamId {
        StreamId { ordinal: self.0.ordinal, stream: self.0.stream as usize }
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        self.0.attribute(attribute)
    }

    /// What names the device in every process.
    pub(super) fn uuid(&self) -> Result<Uuid> {
        uuid(self.0.ordinal, self.0.device)
    }

    pub(super) fn multiprocessors(&self) -> Result<usize> {
        let count = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count as usize)
    }

    /// Lets this device's kernels access memory of `peer`.
    pub(super) fn enable_peer(&self, peer: &Self) -> Result<()> {
        let (own, peer) = (&self.0, &peer.0);
        if own.ordinal == peer.ordinal {
            return Ok(());
        }
        self.bind()?;
        self.expect_peer_access(peer.ordinal, peer.device)?;
        // SAFETY: the peer's `Cuda` keeps its context.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            other => self.check("cuCtxEnablePeerAccess", other.result()),
        }
    }

    /// Looks whether this device can reach the memory of another process's device. One that this process does not
    /// see (`CUDA_VISIBLE_DEVICES`) cannot be asked for: then it is the mapping that fails.
    pub(super) fn expect_reach(&self, peer: &Uuid) -> Result<()> {
        for ordinal in (0..probe::num_devices()?).filter(|ordinal| *ordinal != self.0.ordinal) {
            let device = checked(ordinal, "cuDeviceGet", result::device::get(ordinal as c_int))?;
            if uuid(ordinal, device)? == *peer {
                self.expect_peer_access(ordinal, device)?;
            }
        }
        Ok(())
    }

    fn expect_peer_access(&self, ordinal: usize, device: sys::CUdevice) -> Result<()> {
        let mut can = 0;
        // SAFETY: both are devices of this driver.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.0.device, device).result() };
        self.check("cuDeviceCanAccessPeer", asked)?;
        if can != 0 {
            return Ok(());
        }
        let wanted = format!("device {} to reach the memory of device {ordinal}", self.0.ordinal);
        Err(Error::unsupported("peer access", wanted, "a driver or topology that does not allow it"))
    }

    /// A kernel by its symbol, loaded now: a lazy load may wait for a kernel that waits for this one.
    pub(super) fn kernel(&self, symbol: &str) -> Result<Kernel> {
        self.bind()?;
        let missing = || Error::unsupported("CUDA kernel", symbol, "images without it");
        let name = CString::new(symbol).map_err(|_| missing())?;
        for module in &self.0.modules {
            // SAFETY: the module lives as long as `self`.
            match unsafe { result::module::get_function(*module, name.clone()) } {
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                function => {
                    let function = self.check("cuModuleGetFunction", function)?;
                    // SAFETY: `function` is of a live module.
                    self.check("cuFuncLoad", unsafe { sys::cuFuncLoad(function).result() })?;
                    return Ok(Kernel { function });
                }
            }
        }
        Err(missing())
    }
}

/// A capture that is ended also when its caller's closure panics: else the stream would record for ever.
struct Capture<'a> {
    cuda: &'a Cuda,
    is_open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<sys::CUgraph> {
        self.is_open = false;
        self.cuda.bind()?;
        // SAFETY: the stream lives as long as `cuda`; the capture began, and ends once.
        let graph = unsafe { result::stream::end_capture(self.cuda.stream()) };
        self.cuda.check("cuStreamEndCapture", graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(graph) = self.end()
        {
            // SAFETY: just made, used by nobody.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }
}

impl Inner {
    fn bind(&self) -> Result<()> {
        // SAFETY: the primary context is retained.
        checked(self.ordinal, "cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device is valid.
        let value = unsafe { result::device::get_attribute(self.device, attribute) };
        checked(self.ordinal, "cuDeviceGetAttribute", value)
    }

    fn compute_capability(&self) -> Result<(i32, i32)> {
        let major = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major, minor))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let is_bound = self.bind().is_ok();
        // SAFETY: nothing else holds these handles: buffers and graphs hold a `Cuda`, so they are gone. What
        // fails here was an error of earlier work, which its caller was told of.
        unsafe {
            if is_bound && !self.stream.is_null() {
                let _ = result::stream::synchronize(self.stream);
                if self.owns_stream {
                    let _ = result::stream::destroy(self.stream);
                }
            }
            for module in self.modules.iter().filter(|_| is_bound) {
                let _ = result::module::unload(*module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Of a device, or of a part of one that is used as a device.
pub(super) type Uuid = [u8; 16];

fn uuid(ordinal: usize, device: sys::CUdevice) -> Result<Uuid> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the pointer is valid for the call, and the device is one of this driver.
    checked(ordinal, "cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device).result() })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Which stream's work memory is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StreamId {
    ordinal: usize,
    stream: usize, // the same for the default streams of two devices
}

impl StreamId {
    /// For comparison with those of other processes.
    pub(super) fn words(self) -> [u64; 2] {
        [self.ordinal as u64, self.stream as u64]
    }
}

/// A kernel of a `Cuda`'s modules. Its user keeps the `Cuda`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) function: sys::CUfunction,
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Kernel {}

/// Recorded work of one [`Cuda`], launched as one.
#[derive(Debug)]
pub struct Graph {
    cuda: Cuda,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread, one at a time: `launch` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues the recorded work on the stream that it was recorded on.
    ///
    /// # Errors
    /// *Fault* when the driver refuses.
    ///
    /// # Safety
    /// All memory and all groups of the recorded calls are still alive, and live until the work has run.
    pub unsafe fn launch(&mut self) -> Result<()> {
        self.cuda.bind()?;
        // SAFETY: both handles are valid; the memory is the caller's obligation.
        self.cuda.check("cuGraphLaunch", unsafe { result::graph::launch(self.exec, self.cuda.stream()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.cuda.synchronize().is_err() {
            return;
        }
        // SAFETY: made by `capture`, destroyed once, not running any more.
        unsafe {
            if !self.exec.is_null() {
                let _ = result::graph::exec_destroy(self.exec);
            }
            let _ = result::graph::destroy(self.graph);
        }
    }
}
