//! A device with a stream: contexts, modules, transfers, graphs.

use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::codes::{self, checked};
use super::memory::{Buffer, Memory};
use super::staging::Progress;
use super::{images, probe};
use crate::error::{Error, Result, expect_len};

/// A CUDA device, a stream of its own on it, and this crate's kernels.
///
/// Clones are the same stream. All work of a value is queued on its stream, in the order of the calls; values for
/// the same device run beside each other. Memory is allocated outside of the driver's pools, so that peers
/// can map it. Calls make the device's primary context the current one of their thread, and leave it so.
///
/// # Errors of the device
///
/// A *fault* names the driver's call, its code and the device. Where it says that the device's context is lost, all
/// later calls on that device fail, in this process: other devices and the CPU go on.
#[derive(Clone, Debug)]
pub struct Cuda {
    inner: Arc<Inner>,
    launches_dependents: bool,
}

#[derive(Debug)]
struct Inner {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    owns_stream: bool,
    modules: Vec<sys::CUmodule>,
    /// Recorded again and again, by one thread at a time.
    event: Mutex<sys::CUevent>,
    progress: Progress,
    /// What drops could not give back yet.
    lent: Mutex<Vec<Lent>>,
}

/// What the driver has lent. It takes it back when nothing that was queued uses it any more.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lent {
    Memory(u64),
    HostMemory(*mut c_void),
    Graph(sys::CUgraph),
    GraphExec(sys::CUgraphExec),
}

// SAFETY: driver handles may be used from any thread; every use makes the context current on its thread first.
unsafe impl Send for Inner {}
// SAFETY: the driver locks its objects; the handles don't change after `new`.
unsafe impl Sync for Inner {}

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
    /// a `cudaStream_t` of the runtime) and in order with the engine's own. The engine may capture it: in the
    /// meantime nothing of this value is dropped or allocated, since that waits for the stream, and so breaks the
    /// capture.
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
        let mut inner = Inner {
            ordinal,
            device,
            context,
            stream,
            owns_stream,
            modules: Vec::new(),
            event: Mutex::new(std::ptr::null_mut()),
            progress: Progress::default(),
            lent: Mutex::default(),
        };
        inner.bind()?;
        if owns_stream {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
            inner.stream = checked(ordinal, "cuStreamCreate", stream)?;
        }
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        inner.event = Mutex::new(checked(ordinal, "cuEventCreate", event)?);
        for (name, image) in images {
            // Aligned, and for PTX ended with a 0.
            let mut copy: Vec<u64> = vec![0; image.len() / 8 + 1];
            bytemuck::cast_slice_mut(&mut copy)[..image.len()].copy_from_slice(image);
            // SAFETY: `copy` is readable to its end; the driver checks the image's format.
            let module = unsafe { result::module::load_data(copy.as_ptr().cast::<c_void>()) };
            let origin = if std::ptr::eq(images, images::IMAGES) {
                format!("code for {}", images::ARCHS)
            } else {
                format!("an image of {} bytes", image.len())
            };
            inner.modules.push(inner.loaded(name, &origin, module)?);
        }
        Ok(Self { inner: Arc::new(inner), launches_dependents: false })
    }

    /// The same stream, whose kernels are launched as programmatic dependents: the driver sets the next one up while
    /// the last one ends. Results and their order are the same. What is made with the value that this returns, or
    /// its clones, is launched so.
    ///
    /// # Errors
    /// *Unsupported* before compute capability 9.0.
    pub fn with_dependent_launches(mut self) -> Result<Self> {
        let (major, minor) = self.inner.compute_capability()?;
        if major < 9 {
            let subject = format!("dependent launches on device {}", self.inner.ordinal);
            let wanted = "compute capability 9.0 or newer";
            return Err(Error::unsupported(subject, wanted, format!("{major}.{minor}")));
        }
        self.launches_dependents = true;
        Ok(self)
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
        self.inner.ordinal
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
        self.expect_own("buffer", buffer.memory.cuda.stream_id())?;
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
        self.expect_own("buffer", buffer.memory.cuda.stream_id())?;
        self.read(buffer.memory.address, buffer.len)
    }

    /// What `len` elements at an address, which are there, hold after all that was queued.
    pub(super) fn read<T: Pod>(&self, address: u64, len: usize) -> Result<Vec<T>> {
        let mut data = vec![T::zeroed(); len];
        if !data.is_empty() {
            self.bind()?;
            // SAFETY: there are `data.len()` elements. The driver has written pageable memory when it returns.
            let copy = unsafe { result::memcpy_dtoh_async(&mut data, address, self.stream()) };
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
        self.inner.synchronize()
    }

    /// Misuse unless memory is for this stream's work.
    pub(super) fn expect_own(&self, subject: &'static str, stream: StreamId) -> Result<()> {
        if stream == self.stream_id() {
            return Ok(());
        }
        Err(Error::misuse(subject, "one of this `Cuda`", "another's"))
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.inner.bind()
    }

    pub(super) fn check<T>(&self, call: &str, result: Result<T, DriverError>) -> Result<T> {
        checked(self.inner.ordinal, call, result)
    }

    /// As [`check`](Self::check), for a call that was to give `bytes` bytes.
    pub(super) fn check_memory<T>(
        &self,
        call: &str,
        bytes: usize,
        result: Result<T, DriverError>,
    ) -> Result<T> {
        codes::checked_memory(self.inner.ordinal, call, bytes, result)
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.inner.progress
    }

    /// The event that orders other streams' work and this one's, and is recorded again and again.
    pub(super) fn ordering_event(&self) -> MutexGuard<'_, sys::CUevent> {
        self.inner.event.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether kernels are launched as dependents of those before.
    pub(super) fn launches_dependents(&self) -> bool {
        self.launches_dependents
    }

    /// Gives something back once the stream is idle, for drops. Where that fails or has to wait for the end of a
    /// capture, it is done with a later allocation, or with the last clone of this value.
    pub(super) fn give_back(&self, lent: Lent) {
        self.inner.lent().push(lent);
        self.give_back_all();
    }

    /// Gives back what could not be given back before.
    pub(super) fn give_back_all(&self) {
        let mut lent = self.inner.lent();
        // A wait would end the capture.
        let may_wait = !self.progress().is_capturing();
        if !lent.is_empty() && may_wait && self.synchronize().is_ok() {
            // SAFETY: the stream is idle.
            lent.retain(|lent| unsafe { !lent.give_back() });
        }
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.inner.stream
    }

    pub(super) fn stream_id(&self) -> StreamId {
        StreamId { ordinal: self.inner.ordinal, stream: self.inner.stream as usize }
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.inner.device
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        self.inner.attribute(attribute)
    }

    /// What names the device in every process.
    pub(super) fn uuid(&self) -> Result<Uuid> {
        uuid(self.inner.ordinal, self.inner.device)
    }

    pub(super) fn multiprocessors(&self) -> Result<usize> {
        let count = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count as usize)
    }

    /// Lets this device's kernels access memory of `peer`.
    pub(super) fn enable_peer(&self, peer: &Self) -> Result<()> {
        let (own, peer) = (&*self.inner, &*peer.inner);
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
        for ordinal in (0..probe::num_devices()?).filter(|ordinal| *ordinal != self.inner.ordinal) {
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
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.inner.device, device).result() };
        self.check("cuDeviceCanAccessPeer", asked)?;
        if can != 0 {
            return Ok(());
        }
        let wanted = format!("device {} to reach the memory of device {ordinal}", self.inner.ordinal);
        Err(Error::unsupported("peer access", wanted, "a driver or topology that does not allow it"))
    }

    /// A kernel by its symbol, loaded now: a lazy load may wait for a kernel that waits for this one.
    pub(super) fn kernel(&self, symbol: &str) -> Result<Kernel> {
        self.bind()?;
        let missing = || Error::unsupported("CUDA kernel", symbol, "images without it");
        let name = CString::new(symbol).map_err(|_| missing())?;
        for module in &self.inner.modules {
            // SAFETY: the module lives as long as `self`.
            match unsafe { result::module::get_function(*module, name.clone()) } {
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                function => {
                    let function = self.check("cuModuleGetFunction", function)?;
                    // SAFETY: `function` is of a live module.
                    self.check("cuFuncLoad", unsafe { sys::cuFuncLoad(function).result() })?;
                    self.expect_dependent(symbol, function)?;
                    return Ok(Kernel { function });
                }
            }
        }
        Err(missing())
    }

    /// Code for an older architecture, which the driver has compiled anew, does not wait for its predecessors.
    fn expect_dependent(&self, symbol: &str, function: sys::CUfunction) -> Result<()> {
        if !self.launches_dependents {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: `function` is of a live module.
        let version = unsafe { result::function::get_function_attribute(function, attribute) };
        match self.check("cuFuncGetAttribute", version)? {
            90.. => Ok(()),
            older => {
                let subject = format!("dependent launches of {symbol}");
                let wanted = "code compiled for compute_90 or newer (see EAGLE_VERIFY_CUDA_ARCHS)";
                Err(Error::unsupported(subject, wanted, format!("compute_{older}")))
            }
        }
    }
}

impl Lent {
    /// False if the driver takes nothing back while some thread captures. After another error it is not known what
    /// the driver has done, and a second try might free what is somebody else's by then.
    ///
    /// # Safety
    /// Nothing uses it any more.
    unsafe fn give_back(self) -> bool {
        // SAFETY: given back once; unused, as the caller sees to.
        let given = unsafe {
            match self {
                Self::Memory(address) => result::free_sync(address),
                Self::HostMemory(address) => result::free_host(address),
                Self::Graph(graph) => result::graph::destroy(graph),
                Self::GraphExec(exec) => result::graph::exec_destroy(exec),
            }
        };
        given != Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))
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

    fn synchronize(&self) -> Result<()> {
        self.bind()?;
        let last = self.progress.last();
        // SAFETY: the stream lives as long as `self`.
        let waited = unsafe { result::stream::synchronize(self.stream) };
        checked(self.ordinal, "cuStreamSynchronize", waited)?;
        self.progress.covered(last);
        Ok(())
    }

    fn lent(&self) -> MutexGuard<'_, Vec<Lent>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A module that was to be loaded, or why this device and driver cannot run it.
    fn loaded(
        &self,
        name: &str,
        origin: &str,
        module: Result<sys::CUmodule, DriverError>,
    ) -> Result<sys::CUmodule> {
        use sys::CUresult as Code;
        let Err(DriverError(code)) = module else {
            return checked(self.ordinal, "cuModuleLoadData", module);
        };
        let code_for_device = || -> Result<String> {
            let (major, minor) = self.compute_capability()?;
            Ok(format!("code for sm_{major}{minor} (see EAGLE_VERIFY_CUDA_ARCHS)"))
        };
        let wanted = match code {
            Code::CUDA_ERROR_NO_BINARY_FOR_GPU => code_for_device()?,
            Code::CUDA_ERROR_INVALID_PTX
            | Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | Code::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | Code::CUDA_ERROR_JIT_COMPILATION_DISABLED => {
                format!("{}, or a newer driver that compiles its PTX", code_for_device()?)
            }
            Code::CUDA_ERROR_INVALID_IMAGE => "a fatbin, cubin or PTX that this driver can read".to_owned(),
            _ => return checked(self.ordinal, "cuModuleLoadData", module),
        };
        let seen =
            format!("{origin}: {} from cuModuleLoadData on device {}", codes::name(code), self.ordinal);
        Err(Error::unsupported(format!("CUDA kernels `{name}`"), wanted, seen))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let has_stream = !self.owns_stream || !self.stream.is_null();
        // What fails now was an error of earlier work, which its caller was told of, or passes.
        let is_idle = has_stream && (self.synchronize().is_ok() || self.synchronize().is_ok());
        let lent = std::mem::take(self.lent.get_mut().unwrap_or_else(PoisonError::into_inner));
        let event = *self.event.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nothing else holds these handles: buffers and graphs hold a `Cuda`, so they are gone. Memory and
        // code are given up only where nothing can use them any more; the driver keeps streams and events until
        // their work has ended.
        unsafe {
            for lent in lent.into_iter().filter(|_| is_idle) {
                lent.give_back();
            }
            for module in self.modules.iter().filter(|_| is_idle) {
                let _ = result::module::unload(*module);
            }
            if !event.is_null() {
                let _ = result::event::destroy(event);
            }
            if self.owns_stream && has_stream {
                let _ = result::stream::destroy(self.stream);
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
