//! Device memory, and the host memory that kernels write to.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use super::context::{Cuda, Lent, StreamId};
use crate::error::{Error, Result};

/// Device memory, freed on drop.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) cuda: Cuda,
    pub(super) address: u64,
    bytes: usize,
}

impl Memory {
    /// `bytes` bytes that all are `fill`. Returns when they are.
    pub(super) fn new(cuda: &Cuda, bytes: usize, fill: u8) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self { cuda: cuda.clone(), address: 0, bytes });
        }
        cuda.give_back_all();
        cuda.bind()?;
        // SAFETY: filled below before anyone reads it.
        let address = cuda.check_memory("cuMemAlloc", bytes, unsafe { result::malloc_sync(bytes) })?;
        let memory = Self { cuda: cuda.clone(), address, bytes };
        // SAFETY: the memory has `bytes` bytes, and any bytes are fine for its users.
        let filled = unsafe { result::memset_d8_async(address, fill, bytes, cuda.stream()) };
        cuda.check("cuMemsetD8Async", filled)?;
        cuda.synchronize()?;
        Ok(memory)
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Makes it `bytes` bytes at least. What it held is lost if that takes other memory.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.bytes {
            // Beyond half of the address space no device has so much.
            *self = Self::new(&self.cuda, bytes.checked_next_power_of_two().unwrap_or(bytes), 0)?;
        }
        Ok(())
    }

    /// A copy of it that is `bytes` bytes; what is new is zero.
    pub(super) fn grown(&self, bytes: usize) -> Result<Self> {
        let grown = Self::new(&self.cuda, bytes.max(self.bytes), 0)?;
        if self.bytes > 0 {
            // SAFETY: both have so many bytes; they live until the copy has run, as they wait for the stream.
            let copy = unsafe {
                result::memcpy_dtod_async(grown.address, self.address, self.bytes, self.cuda.stream())
            };
            self.cuda.check("cuMemcpyDtoDAsync", copy)?;
        }
        Ok(grown)
    }

    /// Queues a copy of `data` to `offset` bytes after its start; `data` is free when this returns.
    pub(super) fn queue_write_at<T: Pod>(&mut self, offset: usize, data: &[T]) -> Result<()> {
        self.expect_room(offset + size_of_val(data))?;
        self.cuda.bind()?;
        let address = self.address + offset as u64;
        // SAFETY: there is room for `data`. The driver has read pageable memory when it returns.
        let copy = unsafe { result::memcpy_htod_async(address, data, self.cuda.stream()) };
        self.cuda.check("cuMemcpyHtoDAsync", copy)
    }

    /// Queues zeros for its first `bytes` bytes.
    pub(super) fn queue_zeros(&mut self, bytes: usize) -> Result<()> {
        self.expect_room(bytes)?;
        self.cuda.bind()?;
        // SAFETY: there are so many bytes.
        let filled = unsafe { result::memset_d8_async(self.address, 0, bytes, self.cuda.stream()) };
        self.cuda.check("cuMemsetD8Async", filled)
    }

    /// Misuse unless it has so many bytes.
    pub(super) fn expect_room(&self, bytes: usize) -> Result<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        Err(Error::misuse("device memory", format!("at most {} bytes", self.bytes), bytes))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 {
            self.cuda.give_back(Lent::Memory(self.address));
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
        let words = unsafe { result::malloc_host(N * 8, flags) };
        let words = cuda.check_memory("cuMemHostAlloc", N * 8, words)?;
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
        self.cuda.give_back(Lent::HostMemory(self.words.cast_mut().cast()));
    }
}

/// `len` elements in device memory. Dropping it waits for its stream, and perhaps for the device.
#[derive(Debug)]
pub struct Buffer<T> {
    pub(super) memory: Memory,
    pub(super) len: usize,
    pub(super) element: PhantomData<T>,
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

    /// Where it lies on the device, for kernels of the engine.
    pub fn address(&self) -> u64 {
        self.memory.address
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

    /// Some of the elements.
    ///
    /// # Errors
    /// *Misuse* when there are not so many.
    pub fn get(self, range: Range<usize>) -> Result<Self> {
        let address = part::<T>(self.address, self.len, &range)?;
        Ok(Self { address, len: range.len(), ..self })
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

    /// Some of the elements.
    ///
    /// # Errors
    /// *Misuse* when there are not so many.
    pub fn get(self, range: Range<usize>) -> Result<Self> {
        let address = part::<T>(self.address, self.len, &range)?;
        Ok(Self { address, len: range.len(), ..self })
    }
}

fn part<T>(address: u64, len: usize, range: &Range<usize>) -> Result<u64> {
    if range.start > range.end || range.end > len {
        return Err(Error::misuse(
            "range of device memory",
            format!("within 0..{len}"),
            format!("{range:?}"),
        ));
    }
    Ok(address + (range.start * size_of::<T>()) as u64)
}
