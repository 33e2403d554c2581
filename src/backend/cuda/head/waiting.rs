//! Target features that wait until the head takes them in.

use std::collections::VecDeque;

use super::abi::PASS_ROWS;
use crate::backend::cuda::context::{Cuda, Kernel};
use crate::backend::cuda::gather::gather_kernel;
use crate::backend::cuda::memory::Memory;
use crate::backend::cuda::staging::Upload;
use crate::backend::cuda::view::Format;
use crate::draft::Eagle3Config;
use crate::error::{Error, Result};

/// Target features that wait, on the device, by slot.
#[derive(Debug)]
pub(super) struct Waiting {
    /// `[capacity, feature_width]` each.
    pub(super) high: Memory,
    pub(super) low: Memory,
    pub(super) capacity: usize,
    pub(super) free: Vec<u32>,
    pub(super) of_slot: Vec<VecDeque<u32>>,
    /// Pairs of a row of the engine's and a row here.
    pub(super) list: Vec<[u32; 2]>,
    pub(super) list_up: Upload<[u32; 2]>,
    /// By the format of features.
    pub(super) gather: [Kernel; 3],
}

impl Waiting {
    pub(super) fn new(cuda: &Cuda, half: Format, config: &Eagle3Config, max_requests: usize) -> Result<Self> {
        let kernel = |format: Format| gather_kernel(cuda, format.name(), half.name());
        let mut waiting = Self {
            high: Memory::new(cuda, 0, 0)?,
            low: Memory::new(cuda, 0, 0)?,
            capacity: 0,
            free: Vec::new(),
            of_slot: vec![VecDeque::new(); max_requests],
            list: Vec::new(),
            list_up: Upload::new(cuda, 256)?,
            gather: [kernel(Format::Bf16)?, kernel(Format::F16)?, kernel(Format::F32)?],
        };
        // A chunk of a prompt, and what a few accepted drafts of each request leave.
        waiting.grow(config, PASS_ROWS + 8 * max_requests)?;
        Ok(waiting)
    }

    /// A free row.
    pub(super) fn place(&mut self, config: &Eagle3Config) -> Result<u32> {
        if self.free.is_empty() {
            self.grow(config, 2 * self.capacity)?;
        }
        self.free.pop().ok_or_else(|| Error::fault("rows for features", "one that is free", 0))
    }

    pub(super) fn grow(&mut self, config: &Eagle3Config, capacity: usize) -> Result<()> {
        let row_bytes = config.feature_width() * 2;
        let (high, low) = (self.high.grown(capacity * row_bytes)?, self.low.grown(capacity * row_bytes)?);
        (self.high, self.low) = (high, low);
        self.free.extend((self.capacity as u32..capacity as u32).rev());
        self.capacity = capacity;
        Ok(())
    }

    /// Undoes the list, the last place first: so each is the last that waits in its slot.
    pub(super) fn take_back(&mut self) {
        for [_, place] in self.list.drain(..).rev() {
            for of_slot in &mut self.of_slot {
                if of_slot.back() == Some(&place) {
                    of_slot.pop_back();
                }
            }
            self.free.push(place);
        }
    }
}
