//! A device with a stream: memory, transfers, graphs. The only file that owns driver objects.

use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::{images, probe};
use crate::error::{Error, Result, expect_len};

/// A CUDA device, a stream of its own on it, and this crate's kernels.
///
/// Clones are the same stream. All work of a value is queued on its stream, in the order of the calls; values for
/// the same device run beside each other. Memory is allocated outside of the driver's pools, so that peers
/// can map it.
#[derive(Clone, Debug)]
pub struct Cuda(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
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
    /// *Unsupported* without a usable driver, or when the crate was built without nvcc: it says why. *Misuse*
    /// when there is no such device; *fault* when the device fails, or the kernels are not for it.
    pub fn new(ordinal: usize) -> Result<Self> {
        if images::IMAGES.is_empty() {
            let wanted = "a build that found nvcc (EAGLE_VERIFY_REQUIRE_KERNELS=1 makes sure)";
            return Err(Error::unsupported("CUDA kernels", wanted, images::WHY_NONE));
        }
        let images: Vec<&[u8]> = images::IMAGES.iter().map(|(_, image)| *image).collect();
        Self::with_kernels(ordinal, &images)
    }

    /// Device `ordinal` with other images (cubins or fatbins of the files in `kernels/`), for example
    /// compiled for another architecture.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_kernels(ordinal: usize, images: &[&[u8]]) -> Result<Self> {
        let num_devices = probe::num_devices()?;
        if ordinal >= num_devices {
            return Err(Error::misuse("device ordinal", format!("below {num_devices}"), ordinal));
        }
        let check = |call, result| checked(ordinal, call, result);
        let device = checked(ordinal, "cuDeviceGet", result::device::get(ordinal as c_int))?;
        // SAFETY: `device` is valid. Released by `Inner`.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = checked(ordinal, "cuDevicePrimaryCtxRetain", context)?;
        let mut inner = Inner { ordinal, device, context, stream: std::ptr::null_mut(), modules: Vec::new() };
        inner.bind()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        inner.stream = checked(ordinal, "cuStreamCreate", stream)?;
        for image in images {
            // Aligned, and for PTX ended with a 0.
            let mut copy: Vec<u64> = vec![0; image.len() / 8 + 1];
            bytemuck::cast_slice_mut(&mut copy)[..image.len()].copy_from_slice(image);
            // SAFETY: `copy` is readable to its end; the driver checks the image's format.
            let module = unsafe { result::module::load_data(copy.as_ptr().cast::<c_void>()) };
            inner.modules.push(check("cuModuleLoadData", module)?);
        }
        Ok(Self(Arc::new(inner)))
    }

    /// The device's ordinal.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Memory for `len` elements, all bits zero.
    ///
    /// # Errors
    /// *Fault* when the device has no more.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        Ok(Buffer { memory: Memory::new(self, len * size_of::<T>(), 0)?, len, element: PhantomData })
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
        if data.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the buffer has room for `data`, which lives until the stream is idle below.
        let copy = unsafe { result::memcpy_htod_async(buffer.memory.address, data, self.stream()) };
        self.check("cuMemcpyHtoDAsync", copy)?;
        self.synchronize()
    }

    /// What a buffer holds after all that was queued. Waits for it.
    ///
    /// # Errors
    /// *Fault* when the device fails.
    pub fn download<T: Pod>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        let mut data = vec![T::zeroed(); buffer.len];
        if !data.is_empty() {
            self.bind()?;
            // SAFETY: the buffer has `data.len()` elements; `data` lives until the stream is idle below.
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
        let queued = queue();
        // SAFETY: as above; the capture began.
        let graph = unsafe { result::stream::end_capture(self.stream()) };
        let graph = queued.and(self.check("cuStreamEndCapture", graph))?;
        let mut graph = Graph { cuda: self.clone(), graph, exec: std::ptr::null_mut() };
        // SAFETY: `graph.graph` was just made.
        let exec = unsafe { result::graph::instantiate(graph.graph, sys::CUgraphInstantiate_flags(0)) };
        graph.exec = self.check("cuGraphInstantiate", exec)?;
        // Now, not in the first launch while a peer already waits.
        // SAFETY: both handles are valid.
        self.check("cuGraphUpload", unsafe { result::graph::upload(graph.exec, self.stream()) })?;
        self.synchronize()?;
        Ok(graph)
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
        StreamId(self.0.stream as usize)
    }

    pub(super) fn context(&self) -> ContextHandle {
        ContextHandle(self.0.context)
    }

    pub(super) fn multiprocessors(&self) -> Result<usize> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the device is valid.
        let count = unsafe { result::device::get_attribute(self.0.device, attribute) };
        Ok(self.check("cuDeviceGetAttribute", count)? as usize)
    }

    /// Lets this device's kernels access memory of `peer`.
    pub(super) fn enable_peer(&self, peer: ContextHandle, peer_ordinal: usize) -> Result<()> {
        if peer_ordinal == self.0.ordinal {
            return Ok(());
        }
        self.bind()?;
        let mut can = 0;
        // SAFETY: both ordinals name devices of this driver, so their handles are the ordinals' devices.
        let asked = unsafe {
            let peer_device = result::device::get(peer_ordinal as c_int);
            let peer_device = self.check("cuDeviceGet", peer_device)?;
            sys::cuDeviceCanAccessPeer(&mut can, self.0.device, peer_device).result()
        };
        self.check("cuDeviceCanAccessPeer", asked)?;
        if can == 0 {
            let wanted = format!("device {} to reach the memory of device {peer_ordinal}", self.0.ordinal);
            return Err(Error::unsupported("peer access", wanted, "a driver or topology that does not allow it"));
        }
        // SAFETY: the peer's context is alive: its rank takes part in the same exchange.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.0, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            other => self.check("cuCtxEnablePeerAccess", other.result()),
        }
    }

    /// A kernel by its symbol, loaded now: a lazy load may wait for a kernel that waits for this one.
    pub(super) fn kernel(&self, symbol: &str) -> Result<Kernel> {
        self.bind()?;
        let missing = || Error::unsupported("CUDA kernel", symbol, "images without it");
        let name = CString::new(symbol).map_err(|_| missing())?;
        for module in &self.0.modules {
            // SAFETY: the module lives as long as `self`.
            if let Ok(function) = unsafe { result::module::get_function(*module, name.clone()) } {
                // SAFETY: `function` is of a live module.
                self.check("cuFuncLoad", unsafe { sys::cuFuncLoad(function).result() })?;
                return Ok(Kernel { function });
            }
        }
        Err(missing())
    }
}

impl Inner {
    fn bind(&self) -> Result<()> {
        // SAFETY: the primary context is retained.
        checked(self.ordinal, "cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return; // the driver is shutting down
        }
        // SAFETY: nothing else holds these handles: buffers and graphs hold a `Cuda`, so they are gone. What
        // fails here was an error of earlier work, which its caller was told of.
        unsafe {
            if !self.stream.is_null() {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
            }
            for module in &self.modules {
                let _ = result::module::unload(*module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Which stream's work memory is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StreamId(usize);

/// A context that another rank may be told of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ContextHandle(sys::CUcontext);

// SAFETY: a context may be named from any thread.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}

/// A kernel of a `Cuda`'s modules. Its user keeps the `Cuda`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) function: sys::CUfunction,
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Kernel {}

/// Device memory, freed on drop.
#[derive(Debug)]
pub(super) struct Memory {
    cuda: Cuda,
    pub(super) address: u64,
}

impl Memory {
    /// `bytes` bytes that all are `fill`. Returns when they are.
    pub(super) fn new(cuda: &Cuda, bytes: usize, fill: u8) -> Result<Self> {
        cuda.bind()?;
        if bytes == 0 {
            return Ok(Self { cuda: cuda.clone(), address: 0 });
        }
        // SAFETY: filled below before anyone reads it.
        let address = cuda.check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        let memory = Self { cuda: cuda.clone(), address };
        // SAFETY: the memory has `bytes` bytes, and any bytes are fine for its users.
        let filled = unsafe { result::memset_d8_async(address, fill, bytes, cuda.stream()) };
        cuda.check("cuMemsetD8Async", filled)?;
        cuda.synchronize()?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 && self.cuda.synchronize().and_then(|()| self.cuda.bind()).is_ok() {
            // SAFETY: allocated by `new`, freed once; the stream that used it is idle.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Host memory that kernels write to.
#[derive(Debug)]
pub(super) struct HostWords<const N: usize> {
    cuda: Cuda,
    words: *const AtomicU64,
    pub(super) address: u64,
}

// SAFETY: the words are atomics.
unsafe impl<const N: usize> Send for HostWords<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for HostWords<N> {}

impl<const N: usize> HostWords<N> {
    /// `N` zeros.
    pub(super) fn new(cuda: &Cuda) -> Result<Self> {
        cuda.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: zeroed below before anyone reads it.
        let words = cuda.check("cuMemHostAlloc", unsafe { result::malloc_host(N * 8, flags) })?;
        // SAFETY: the allocation has `N * 8` bytes, aligned to a page.
        unsafe { words.cast::<u64>().write_bytes(0, N) };
        let mut host = Self { cuda: cuda.clone(), words: words.cast(), address: 0 };
        // SAFETY: `words` is mapped host memory.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut host.address, words, 0).result() };
        cuda.check("cuMemHostGetDevicePointer", mapped)?;
        Ok(host)
    }

    pub(super) fn load(&self) -> [u64; N] {
        // SAFETY: allocated by `new`, freed on drop; the device writes whole words.
        std::array::from_fn(|i| unsafe { &*self.words.add(i) }.load(Ordering::Acquire))
    }
}

impl<const N: usize> Drop for HostWords<N> {
    fn drop(&mut self) {
        if self.cuda.synchronize().and_then(|()| self.cuda.bind()).is_ok() {
            // SAFETY: allocated by `new`, freed once; the stream whose kernels write it is idle.
            let _ = unsafe { result::free_host(self.words.cast_mut().cast()) };
        }
    }
}

/// `len` elements in device memory.
#[derive(Debug)]
pub struct Buffer<T> {
    memory: Memory,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub(super) fn into_memory(self) -> Memory {
        self.memory
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to read.
    pub fn slice(&self) -> DeviceSlice<'_, T> {
        let stream = self.memory.cuda.stream_id();
        DeviceSlice { stream, address: self.memory.address, len: self.len, memory: PhantomData }
    }

    /// All of it, to write.
    pub fn slice_mut(&mut self) -> DeviceSliceMut<'_, T> {
        let stream = self.memory.cuda.stream_id();
        DeviceSliceMut { stream, address: self.memory.address, len: self.len, memory: PhantomData }
    }
}

/// Device memory to read: of a [`Buffer`], or of the engine.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a, T> {
    pub(super) stream: StreamId,
    pub(super) address: u64,
    pub(super) len: usize,
    memory: PhantomData<&'a [T]>,
}

/// Device memory to write: of a [`Buffer`], or of the engine.
#[derive(Debug)]
pub struct DeviceSliceMut<'a, T> {
    pub(super) stream: StreamId,
    pub(super) address: u64,
    pub(super) len: usize,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    /// `len` elements at a device address of the engine, for work on the stream of `cuda`.
    ///
    /// # Safety
    /// They are initialised, on the device of `cuda`, and are neither freed nor written by other streams before
    /// that work has run.
    pub unsafe fn from_raw(cuda: &Cuda, address: u64, len: usize) -> Self {
        Self { stream: cuda.stream_id(), address, len, memory: PhantomData }
    }

    /// The first `len` elements, or as many as there are.
    pub fn first(self, len: usize) -> Self {
        Self { len: len.min(self.len), ..self }
    }
}

impl<'a, T: Pod> DeviceSliceMut<'a, T> {
    /// `len` elements at a device address of the engine, for work on the stream of `cuda`.
    ///
    /// # Safety
    /// They are on the device of `cuda`, and are neither freed nor used by other streams before that work has
    /// run.
    pub unsafe fn from_raw(cuda: &Cuda, address: u64, len: usize) -> Self {
        Self { stream: cuda.stream_id(), address, len, memory: PhantomData }
    }

    /// The first `len` elements, or as many as there are.
    pub fn first(self, len: usize) -> Self {
        Self { len: len.min(self.len), ..self }
    }
}

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
