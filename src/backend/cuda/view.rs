//! Number formats, and float matrices of an engine in any of them.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;
use half::{bf16, f16};

use super::context::{Cuda, StreamId};
use super::memory::{Buffer, DeviceSlice};
use crate::error::{Error, Result};

/// A number format of logits, features and embeddings on a GPU: [`bf16`], [`struct@f16`] or `f32`. Sealed.
pub trait Logit: sealed::Sealed + Pod {
    /// The format's name: `bf16`, `f16`, `f32`.
    const NAME: &'static str = Self::FORMAT.name();
}

impl Logit for bf16 {}
impl Logit for f16 {}
impl Logit for f32 {}

pub(super) use sealed::Format;

mod sealed {
    /// As `EV_BF16` and its like in `kernels/abi.h`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Format {
        Bf16 = 0,
        F16 = 1,
        F32 = 2,
    }

    pub trait Sealed {
        const FORMAT: Format;
    }
    impl Sealed for half::bf16 {
        const FORMAT: Format = Format::Bf16;
    }
    impl Sealed for half::f16 {
        const FORMAT: Format = Format::F16;
    }
    impl Sealed for f32 {
        const FORMAT: Format = Format::F32;
    }
}

impl Format {
    pub(super) const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }

    /// Bytes of a number.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A float matrix of the engine on a GPU, `[rows, width]` row-major, in any number format: a [`DeviceSlice`] whose
/// type is known at run time. What a [`Speculator`](crate::Speculator) on a GPU takes for logits and features.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(super) stream: StreamId,
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) format: Format,
    memory: PhantomData<&'a ()>,
}

impl View<'_> {
    /// Misuse unless the address is a multiple of `alignment`: an engine may give any.
    pub(super) fn expect_aligned(&self, subject: &'static str, alignment: usize) -> Result<()> {
        let is_aligned = self.address != 0 && self.address.is_multiple_of(alignment as u64);
        if is_aligned || self.len == 0 {
            return Ok(());
        }
        let wanted = format!("an address that is a multiple of {alignment}");
        Err(Error::misuse(subject, wanted, format!("{:#x}", self.address)))
    }

    /// Some of the numbers, which are there.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        let address = self.address + (range.start * self.format.bytes()) as u64;
        Self { address, len: range.len(), ..self }
    }

    /// The numbers, on the host. Waits for them.
    pub(super) fn read(&self, cuda: &Cuda) -> Result<Vec<f32>> {
        Ok(match self.format {
            Format::F32 => cuda.read(self.address, self.len)?,
            Format::Bf16 => cuda.read(self.address, self.len)?.into_iter().map(bf16::to_f32).collect(),
            Format::F16 => cuda.read(self.address, self.len)?.into_iter().map(f16::to_f32).collect(),
        })
    }
}

impl<'a, T: Logit> From<DeviceSlice<'a, T>> for View<'a> {
    fn from(slice: DeviceSlice<'a, T>) -> Self {
        let DeviceSlice { stream, address, len, .. } = slice;
        Self { stream, address, len, format: T::FORMAT, memory: PhantomData }
    }
}

impl<'a, T: Logit> From<&'a Buffer<T>> for View<'a> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        buffer.slice().into()
    }
}

/// The target's embedding table on a GPU, `[vocab, hidden]` row-major, shared by engine and draft head.
#[derive(Debug)]
pub struct Embedding {
    pub(super) address: u64,
    pub(super) format: Format,
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    pub(super) stream: StreamId,
    /// What keeps the table alive, unless the engine does.
    _owner: Option<Box<dyn Owner>>,
}

/// Any buffer.
trait Owner: std::fmt::Debug + Send {}
impl<T: Logit + std::fmt::Debug + Send> Owner for Buffer<T> {}

impl Embedding {
    /// A table that the draft head keeps to itself.
    ///
    /// # Errors
    /// *Misuse* when it is not whole rows of `hidden` elements.
    pub fn new<T: Logit + std::fmt::Debug + Send>(table: Buffer<T>, hidden: usize) -> Result<Self> {
        let embedding = Self::of(table.slice(), hidden)?;
        Ok(Self { _owner: Some(Box::new(table)), ..embedding })
    }

    /// The engine's own table.
    ///
    /// # Errors
    /// *Misuse* when it is not whole rows of `hidden` elements, or its address is not a multiple of 16.
    ///
    /// # Safety
    /// `table` is alive and unchanged as long as the speculator that gets this.
    pub unsafe fn shared<T: Logit>(table: DeviceSlice<'_, T>, hidden: usize) -> Result<Self> {
        Self::of(table, hidden)
    }

    fn of<T: Logit>(table: DeviceSlice<'_, T>, hidden: usize) -> Result<Self> {
        let len = table.len;
        if hidden == 0 || len == 0 || !len.is_multiple_of(hidden) {
            let wanted = format!("a positive multiple of the hidden size {hidden}");
            return Err(Error::misuse("embedding table", wanted, len));
        }
        // The head reads 16 bytes at a time.
        View::from(table).expect_aligned("embedding table", 16)?;
        let DeviceSlice { stream, address, .. } = table;
        Ok(Self { address, format: T::FORMAT, hidden, vocab: len / hidden, stream, _owner: None })
    }

    /// Number of tokens.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Elements of a token's row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }
}
