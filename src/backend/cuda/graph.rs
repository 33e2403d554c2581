//! Work that is recorded once and launched as one.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::context::{Cuda, Lent};
use crate::error::Result;

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
        let launched = unsafe { result::graph::launch(self.exec, self.cuda.stream()) };
        self.cuda.progress().queued(); // for staging memory of captured copies
        self.cuda.check("cuGraphLaunch", launched)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.exec.is_null() {
            self.cuda.give_back(Lent::GraphExec(self.exec));
        }
        self.cuda.give_back(Lent::Graph(self.graph));
    }
}

impl Cuda {
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
        let mut capture = Capture::new(self);
        let queued = queue();
        let ended = capture.end();
        let ended = ended.map(|graph| Graph { cuda: self.clone(), graph, exec: std::ptr::null_mut() });
        // What went wrong first: a capture that it broke ends with an error, too.
        queued?;
        let mut graph = ended?;
        // SAFETY: `graph.graph` was just made.
        let exec = unsafe { result::graph::instantiate(graph.graph, sys::CUgraphInstantiate_flags(0)) };
        graph.exec = self.check("cuGraphInstantiateWithFlags", exec)?;
        // Now, not in the first launch while a peer already waits.
        // SAFETY: both handles are valid.
        self.check("cuGraphUpload", unsafe { result::graph::upload(graph.exec, self.stream()) })?;
        self.synchronize()?;
        Ok(graph)
    }
}

/// A capture that is ended also when its caller's closure panics: else the stream would record for ever.
struct Capture<'a> {
    cuda: &'a Cuda,
    is_open: bool,
}

impl<'a> Capture<'a> {
    /// Of a capture that has begun.
    fn new(cuda: &'a Cuda) -> Self {
        cuda.progress().set_capturing(true);
        Self { cuda, is_open: true }
    }

    fn end(&mut self) -> Result<sys::CUgraph> {
        self.cuda.bind()?;
        // SAFETY: the stream lives as long as `cuda`.
        let graph = unsafe { result::stream::end_capture(self.cuda.stream()) };
        let invalidated = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        self.is_open = matches!(graph, Err(DriverError(code)) if code != invalidated);
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
        self.cuda.progress().set_capturing(false);
        self.cuda.give_back_all(); // what was dropped in the meantime
    }
}
