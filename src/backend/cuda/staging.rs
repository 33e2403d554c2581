//! Pinned host memory that transfers go through: they run while the host goes on, and can be captured.
//!
//! The host touches staging memory only when no transfer that was queued uses it, and that is not left to its user.
//! Transfers get a number when they are queued, and every wait for the stream tells which numbers it has covered.
//! So a step that ends with a wait, as every step does, pays nothing for the next one's check; whoever does not
//! wait in between is made to wait by [`Staging::elements_mut`]. A captured transfer runs with each launch of its
//! graph: its memory is free once all launches have run.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use super::context::{Cuda, Lent};
use super::memory::Memory;
use crate::error::{Error, Result};

/// `len` elements of pinned host memory, for transfers on one stream.
#[derive(Debug)]
pub(super) struct Staging<T> {
    cuda: Cuda,
    elements: *mut T,
    len: usize,
    /// The last transfer.
    user: Ticket,
    element: PhantomData<T>,
}

// SAFETY: the memory is this value's alone, and may be used from any thread.
unsafe impl<T: Send> Send for Staging<T> {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl<T: Sync> Sync for Staging<T> {}

impl<T: Pod> Staging<T> {
    /// `len` elements, all bits zero.
    pub(super) fn new(cuda: &Cuda, len: usize) -> Result<Self> {
        let staging = |elements| Self {
            cuda: cuda.clone(),
            elements,
            len,
            user: Ticket::default(),
            element: PhantomData,
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| too_long(len))?;
        if bytes == 0 {
            return Ok(staging(std::ptr::dangling_mut()));
        }
        cuda.give_back_all();
        cuda.bind()?;
        // SAFETY: zeroed below before anyone reads it.
        let memory = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let elements = cuda.check_memory("cuMemHostAlloc", bytes, memory)?.cast::<T>();
        // SAFETY: the allocation has room for `len` elements and is aligned to a page.
        unsafe { elements.write_bytes(0, len) };
        Ok(staging(elements))
    }

    /// Makes it `len` elements at least. What it held is lost if that takes other memory.
    pub(super) fn reserve(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            *self = Self::new(&self.cuda, len.checked_next_power_of_two().ok_or_else(|| too_long(len))?)?;
        }
        Ok(())
    }

    /// The elements, to read. Waits for the stream if a transfer may still use them.
    pub(super) fn elements(&self) -> Result<&[T]> {
        self.settle()?;
        // SAFETY: allocated by `new` with `len` elements, initialised; nothing writes them until a transfer is
        // queued, which takes `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.elements, self.len) })
    }

    /// As [`elements`](Self::elements), to write.
    pub(super) fn elements_mut(&mut self) -> Result<&mut [T]> {
        self.settle()?;
        // SAFETY: as in `elements`; borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.elements, self.len) })
    }

    /// Queues a copy of the first `len` elements to the start of `to`.
    pub(super) fn queue_upload(&mut self, len: usize, to: &mut Memory) -> Result<()> {
        if !self.expect_room(len, to)? {
            return Ok(());
        }
        // SAFETY: both have room for `len` elements. They stay allocated until the stream is idle, and the host
        // writes them only after the copy.
        let copy = unsafe {
            let from = std::slice::from_raw_parts(self.elements, len);
            result::memcpy_htod_async(to.address, from, self.cuda.stream())
        };
        self.user = self.user.max(self.cuda.progress().queued());
        self.cuda.check("cuMemcpyHtoDAsync", copy)
    }

    /// Queues a copy of as many bytes at the start of `from` to the first `len` elements.
    pub(super) fn queue_download(&mut self, len: usize, from: &Memory) -> Result<()> {
        if !self.expect_room(len, from)? {
            return Ok(());
        }
        // SAFETY: as in `queue_upload`; and the host reads them only after the copy.
        let copy = unsafe {
            let to = std::slice::from_raw_parts_mut(self.elements, len);
            result::memcpy_dtoh_async(to, from.address, self.cuda.stream())
        };
        self.user = self.user.max(self.cuda.progress().queued());
        self.cuda.check("cuMemcpyDtoHAsync", copy)
    }

    /// Whether there is anything to copy.
    fn expect_room(&self, len: usize, memory: &Memory) -> Result<bool> {
        if len > self.len {
            return Err(Error::misuse("staging memory", format!("at most {} elements", self.len), len));
        }
        memory.expect_room(len * size_of::<T>())?;
        self.cuda.expect_own("device memory", memory.cuda.stream_id())?;
        self.cuda.bind()?;
        Ok(len * size_of::<T>() > 0)
    }

    fn settle(&self) -> Result<()> {
        if self.cuda.progress().has_run(self.user) { Ok(()) } else { self.cuda.synchronize() }
    }
}

/// What goes up again and again: device memory and the staging memory before it. Both grow.
#[derive(Debug)]
pub(super) struct Upload<T> {
    staging: Staging<T>,
    memory: Memory,
}

impl<T: Pod> Upload<T> {
    /// Room for `len` elements to start with.
    pub(super) fn new(cuda: &Cuda, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| too_long(len))?;
        Ok(Self { staging: Staging::new(cuda, len)?, memory: Memory::new(cuda, bytes, 0)? })
    }

    /// Where they go. Another place after a call of `queue` with more elements than ever.
    pub(super) fn address(&self) -> u64 {
        self.memory.address
    }

    /// Queues a copy; `elements` is free when this returns.
    pub(super) fn queue(&mut self, elements: &[T]) -> Result<()> {
        self.memory.reserve(size_of_val(elements))?;
        self.staging.reserve(elements.len())?;
        self.staging.elements_mut()?[..elements.len()].copy_from_slice(elements);
        self.staging.queue_upload(elements.len(), &mut self.memory)
    }
}

fn too_long(len: usize) -> Error {
    Error::misuse("staging memory", "fewer bytes than there are addresses", format!("{len} elements"))
}

impl<T> Drop for Staging<T> {
    fn drop(&mut self) {
        if self.len * size_of::<T>() > 0 {
            self.cuda.give_back(Lent::HostMemory(self.elements.cast()));
        }
    }
}

/// How much of a stream's work that uses staging memory has run. Work has a number, in the order in which it was
/// queued.
#[derive(Debug, Default)]
pub(super) struct Progress {
    num_queued: AtomicU64,
    num_run: AtomicU64,
    is_capturing: AtomicBool,
}

/// The number of some work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

impl Ticket {
    /// Of work in a graph, which runs again with any later launch.
    const CAPTURED: Self = Self(u64::MAX);
}

impl Progress {
    /// Numbers the work that was queued just now. Not before: a wait may begin in between and would not cover it.
    pub(super) fn queued(&self) -> Ticket {
        if self.is_capturing() {
            return Ticket::CAPTURED;
        }
        Ticket(self.num_queued.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// The last work that has a number: what a wait that begins now will cover.
    pub(super) fn last(&self) -> Ticket {
        Ticket(self.num_queued.load(Ordering::Acquire))
    }

    /// A wait for the stream has covered `last`.
    pub(super) fn covered(&self, last: Ticket) {
        self.num_run.fetch_max(last.0, Ordering::AcqRel);
    }

    pub(super) fn set_capturing(&self, is_capturing: bool) {
        self.is_capturing.store(is_capturing, Ordering::Release);
    }

    pub(super) fn is_capturing(&self) -> bool {
        self.is_capturing.load(Ordering::Acquire)
    }

    fn has_run(&self, work: Ticket) -> bool {
        if work == Ticket::CAPTURED && self.is_capturing() {
            return false; // and a wait is refused
        }
        let needed = if work == Ticket::CAPTURED { self.last() } else { work };
        self.num_run.load(Ordering::Acquire) >= needed.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_covers_what_was_queued_before_it_began() {
        let progress = Progress::default();
        assert!(progress.has_run(Ticket::default()));
        let first = progress.queued();
        let begun = progress.last();
        let second = progress.queued();
        assert!(!progress.has_run(first) && !progress.has_run(second));
        progress.covered(begun);
        assert!(progress.has_run(first) && !progress.has_run(second));
        progress.covered(progress.last());
        progress.covered(begun); // another thread's wait, heard of late
        assert!(progress.has_run(second));
    }

    #[test]
    fn captured_work_has_run_when_all_launches_have() {
        let progress = Progress::default();
        progress.set_capturing(true);
        let captured = progress.queued();
        assert!(!progress.has_run(captured), "it cannot run before the capture ends");
        progress.set_capturing(false);
        assert!(captured == Ticket::CAPTURED && progress.has_run(captured), "no launch is under way");
        progress.queued(); // a launch
        assert!(!progress.has_run(captured));
        progress.covered(progress.last());
        assert!(progress.has_run(captured));
        // Queued directly, too: it remains in the graph.
        assert_eq!(captured.max(progress.queued()), captured);
    }
}
