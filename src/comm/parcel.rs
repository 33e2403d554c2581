//! What ranks bring to a stage of their meeting, in the form in which it goes to another process.
#![cfg_attr(not(target_os = "linux"), allow(dead_code))]

use std::time::Duration;

use crate::error::Result;

/// What one process can give to another: a number in each, for one thing in the kernel.
#[cfg(target_os = "linux")]
pub(crate) type Descriptor = std::os::fd::OwnedFd;
/// There are none that travel.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
pub(crate) enum Descriptor {}

/// What a rank brings to a stage. Threads of one process pass it on as it is.
pub(crate) trait Offer: Sized + Send + Sync + 'static {
    /// Of all kinds of offers this one.
    const KIND: &'static str;

    /// For other processes.
    ///
    /// # Errors
    /// *Unsupported* for what cannot leave its process.
    fn pack(&self) -> Result<Parcel>;

    /// What another process has packed; `None` if it has not.
    fn unpack(parcel: Parcel) -> Option<Self>;
}

/// A rank that has nothing to say but that it is ready.
impl Offer for () {
    const KIND: &'static str = "ready";

    fn pack(&self) -> Result<Parcel> {
        Ok(Parcel::default())
    }

    fn unpack(_: Parcel) -> Option<Self> {
        Some(())
    }
}

/// Bytes and descriptors.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<Descriptor>,
}

/// Appends numbers, little-endian, and texts.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

/// A longer text is cut.
const MAX_TEXT: usize = 1024;

impl Writer {
    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn usize(self, value: usize) -> Self {
        self.u64(value as u64)
    }

    pub(crate) fn duration(self, value: Duration) -> Self {
        self.u64(value.as_secs()).u64(value.subsec_nanos().into())
    }

    pub(crate) fn text(self, text: &str) -> Self {
        let end = (0..=text.len().min(MAX_TEXT)).rev().find(|end| text.is_char_boundary(*end));
        self.bytes(&text.as_bytes()[..end.unwrap_or(0)])
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self = self.usize(bytes.len());
        self.0.extend(bytes);
        self
    }
}

/// Takes them off again, in the same order; `None` where there is something else.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub(crate) fn usize(&mut self) -> Option<usize> {
        self.u64()?.try_into().ok()
    }

    pub(crate) fn duration(&mut self) -> Option<Duration> {
        let (seconds, nanos) = (self.u64()?, self.u64()?);
        (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos as u32))
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.usize()?;
        self.take(len)
    }

    /// `value`, if nothing is left over.
    pub(crate) fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}
