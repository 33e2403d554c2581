//! Order between streams, without a wait of the host.

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::context::Cuda;
use super::staging::Ticket;
use crate::error::Result;

/// A point in the work of a [`Cuda`]'s stream, which other streams or the host wait for.
#[derive(Debug)]
pub struct Event {
    cuda: Cuda,
    event: sys::CUevent,
    /// What has run when it is reached.
    last: Ticket,
}

// SAFETY: events may be used from any thread; recording takes `&mut self`.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks its objects.
unsafe impl Sync for Event {}

impl Event {
    /// An event for the stream of `cuda`. Who waits for it before it was recorded does not wait.
    ///
    /// # Errors
    /// *Fault* when the driver has no more.
    pub fn new(cuda: &Cuda) -> Result<Self> {
        cuda.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = cuda.check("cuEventCreate", event)?;
        Ok(Self { cuda: cuda.clone(), event, last: Ticket::default() })
    }

    /// Makes it the point that all work queued so far leads to. Earlier waits are for the point that they saw.
    ///
    /// # Errors
    /// *Fault* when the device fails.
    pub fn record(&mut self) -> Result<()> {
        self.cuda.bind()?;
        let last = self.cuda.progress().last();
        // SAFETY: event and stream live as long as `self`, and are of one context.
        let recorded = unsafe { result::event::record(self.event, self.cuda.stream()) };
        self.cuda.check("cuEventRecord", recorded)?;
        self.last = last;
        Ok(())
    }

    /// Waits until the stream has come to the point.
    ///
    /// # Errors
    /// *Fault* when work before it failed, or it was recorded in a capture.
    pub fn synchronize(&self) -> Result<()> {
        self.cuda.bind()?;
        // SAFETY: the event lives as long as `self`.
        let waited = unsafe { result::event::synchronize(self.event) };
        self.cuda.check("cuEventSynchronize", waited)?;
        self.cuda.progress().covered(self.last);
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.cuda.bind();
        // SAFETY: destroyed once. The driver keeps it until the waits for it have ended.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// # Working beside an engine's stream
///
/// With [`on_stream`](Self::on_stream) all work is queued on the engine's stream: nothing else is needed. A `Cuda`
/// with a stream of its own lets work overlap with the engine's. Then the engine says where one needs the other:
///
/// ```no_run
/// # use std::ffi::c_void;
/// # use eagle_verify::backend::cuda::Cuda;
/// # fn step(cuda: &Cuda, stream: *mut c_void) -> eagle_verify::Result<()> {
/// // The engine has queued the forward pass that writes the logits on its `stream`.
/// // SAFETY: `stream` is of the device's primary context and alive.
/// unsafe { cuda.wait_for_stream(stream)? };
/// // … calls that read the logits, queued on the stream of `cuda` …
/// // SAFETY: as above.
/// unsafe { cuda.let_stream_wait(stream)? };
/// // The engine may now queue work that overwrites the logits.
/// # Ok(())
/// # }
/// ```
///
/// The host waits for nothing, and both may be part of a graph: where the engine captures its stream,
/// `wait_for_stream` brings the stream of `cuda` into the capture, and `let_stream_wait`, which must follow before
/// the capture ends, leads back. What is dropped or allocated in between breaks the capture. A stream that is being
/// captured by [`capture`](Self::capture) cannot wait for work outside of it.
impl Cuda {
    /// Has the work that is queued from now on wait for an event, of whichever device.
    ///
    /// # Errors
    /// *Fault* when the device fails, or one of the two is captured and the other is not.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream live as long as their owners.
        let queued = unsafe { result::stream::wait_event(self.stream(), event.event, flags) };
        self.check("cuStreamWaitEvent", queued)
    }

    /// Has the work that is queued from now on wait for all that is queued on a stream of the engine (a `CUstream`,
    /// or a `cudaStream_t` of the runtime).
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, and alive.
    pub unsafe fn wait_for_stream(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as the caller's.
        unsafe { self.order(stream.cast(), self.stream()) }
    }

    /// Has the work that the engine queues on its stream from now on wait for all that is queued here.
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    ///
    /// # Safety
    /// As for [`wait_for_stream`](Self::wait_for_stream).
    pub unsafe fn let_stream_wait(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as the caller's.
        unsafe { self.order(self.stream(), stream.cast()) }
    }

    /// Has `then` wait for all that is queued on `first`.
    ///
    /// # Safety
    /// Both are streams of this device's primary context, and alive.
    unsafe fn order(&self, first: sys::CUstream, then: sys::CUstream) -> Result<()> {
        self.bind()?;
        // Locked, or a record in between would have `then` wait for something else. It waits for what was recorded
        // before, whatever is recorded later.
        let event = self.ordering_event();
        // SAFETY: the event lives as long as `self`; the streams are the caller's obligation.
        self.check("cuEventRecord", unsafe { result::event::record(*event, first) })?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        self.check("cuStreamWaitEvent", unsafe { result::stream::wait_event(then, *event, flags) })
    }
}
