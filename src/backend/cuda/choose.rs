//! The target's tokens from rows of logits on a GPU: all rows of a call in one launch.

mod pack;

use std::marker::PhantomData;
use std::ops::Range;

use super::context::{Cuda, Kernel};
use super::launch;
use super::memory::{DeviceSlice, Memory};
use super::staging::{Staging, Upload};
use super::view::{Format, Logit, View};
use crate::error::{Error, Result, expect_len};
use crate::sampling::{ChoiceKey, Sampler, SamplingContext};
pub(super) use pack::Packer;

/// What a [`Chooser`] is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChooserConfig {
    /// The most rows of a call, from 1 to 65,535.
    pub max_rows: usize,
    /// Tokens of the vocabulary, from 1 to 262,144.
    pub vocab: usize,
    /// Which tokens the columns of the logits are: all, or a shard of the vocabulary.
    pub columns: Range<usize>,
    /// The most warps of a block, from 1 to 16. Results don't depend on it.
    #[doc(hidden)]
    pub max_warps: usize,
}

impl ChooserConfig {
    /// Whole rows of `vocab` tokens, at most `max_rows` a call.
    pub const fn new(max_rows: usize, vocab: usize) -> Self {
        Self { max_rows, vocab, columns: 0..vocab, max_warps: 16 }
    }

    fn check(&self) -> Result<()> {
        let check = |name, range: Range<usize>, value| {
            let wanted = || format!("{} to {}", range.start, range.end - 1);
            if range.contains(&value) { Ok(()) } else { Err(Error::misuse(name, wanted(), value)) }
        };
        check("rows of a call", 1..65_536, self.max_rows)?;
        check("vocabulary", 1..262_145, self.vocab)?;
        check("warps of a block", 1..17, self.max_warps)?;
        if self.columns.is_empty() || self.columns.end > self.vocab {
            let wanted = format!("some of 0..{}", self.vocab);
            return Err(Error::misuse("columns", wanted, format!("{:?}", self.columns)));
        }
        Ok(())
    }
}

/// How one row of a call is sampled.
#[derive(Clone, Copy, Debug)]
pub struct ChooseRow<'a> {
    /// The request's parameters.
    pub sampler: &'a Sampler,
    /// Where in its text.
    pub context: SamplingContext<'a>,
    /// The least logit over temperature that the sampler's filters keep, if it is known: see
    /// [`Chooser::thresholds`]. Not used without filters, or at temperature 0.
    pub threshold: Option<f32>,
}

impl<'a> ChooseRow<'a> {
    /// A row whose threshold, if its sampler has filters, is to be found.
    pub fn new(sampler: &'a Sampler, context: SamplingContext<'a>) -> Self {
        Self { sampler, context, threshold: None }
    }
}

/// Chooses tokens from logits on a GPU: for each row the key that [`Sampler::choose`] gives, bit for bit.
///
/// A row without filters (top-k, top-p, min-p), penalties and bias is read once, by several blocks. Penalties and
/// bias take two passes more; filters three to six, of one block (more where thousands of tokens are within a 64th
/// of the threshold). Rows of one call that have the same prompt and
/// output, as slices, are cheapest beside each other: their text is counted and copied once.
///
/// # Shards of a vocabulary
///
/// Where each device has its own columns of the logits, each has a `Chooser` for them, and the row's key is the
/// largest of its keys on all devices ([`VocabShard::combine`](crate::comm::VocabShard::combine)). A row with filters needs its threshold, which depends on all columns: gather
/// the row's logits on one device, whose `Chooser` for whole rows then has the answer; or, if its
/// [`thresholds`](Self::thresholds) are known, give the row's on every device.
///
/// # Memory
///
/// 92 bytes for a row, on the device and pinned on the host. Rows with filters, penalties or bias need four bytes for each column, and text, bias and
/// masks what they have: a call that has more of these than any before allocates, and so waits for the device.
#[derive(Debug)]
pub struct Chooser<T> {
    rows: RowChooser,
    logit: PhantomData<fn(T)>,
}

/// A chooser from logits of any format.
#[derive(Debug)]
pub(super) struct RowChooser {
    cuda: Cuda,
    /// By format; those that it was made for.
    kernels: [Option<Kernel>; 3],
    config: ChooserConfig,
    multiprocessors: usize,
    packer: Packer,
    /// What the packer has made.
    rows: Upload<u32>,
    /// Keys, then thresholds.
    results: Memory,
    /// Of the last call.
    staged_results: Staging<u64>,
    workspaces: Memory,
    num_rows: usize,
}

impl<T: Logit> Chooser<T> {
    /// Loads the kernel and allocates.
    ///
    /// # Errors
    /// *Misuse* when a number of the configuration is out of its range; *unsupported* when the images lack the
    /// kernel; *fault* when the device has no memory.
    pub fn new(cuda: &Cuda, config: ChooserConfig) -> Result<Self> {
        Ok(Self { rows: RowChooser::new(cuda, config, &[T::FORMAT])?, logit: PhantomData })
    }

    /// Chooses from `logits`, `[rows, columns]`, one token for each of `rows`. Waits for the keys.
    ///
    /// A key says by [`ChoiceKey::checked`] what is wrong with its row: a NaN, or no token that may be chosen. The
    /// other rows are not affected.
    ///
    /// # Errors
    /// *Misuse*, before anything is queued, when there are too many rows, `logits` has another length or is of
    /// another stream, a mask has another length, or a row with filters lacks its threshold where the columns are
    /// a shard. *Fault* when the device fails.
    pub fn choose(&mut self, logits: DeviceSlice<'_, T>, rows: &[ChooseRow<'_>]) -> Result<&[ChoiceKey]> {
        self.rows.choose(logits.into(), rows.iter().copied())
    }

    /// The least logit over temperature that each row's filters kept in the last call: negative infinity for a
    /// row without filters or at temperature 0, and what was given where it was given. Of no use where the row's key is an error. None after a call that failed.
    pub fn thresholds(&self) -> &[f32] {
        let num_rows = self.rows.num_rows;
        let thresholds = self.rows.results().get(num_rows..).unwrap_or_default();
        bytemuck::cast_slice(thresholds).get(..num_rows).unwrap_or_default()
    }
}

impl RowChooser {
    pub(super) fn new(cuda: &Cuda, config: ChooserConfig, formats: &[Format]) -> Result<Self> {
        config.check()?;
        let mut kernels = [None; 3];
        for format in formats {
            kernels[*format as usize] = Some(cuda.kernel(&format!("ev_choose_{}", format.name()))?);
        }
        let num_words = result_words(config.max_rows);
        Ok(Self {
            cuda: cuda.clone(),
            kernels,
            multiprocessors: cuda.multiprocessors()?,
            packer: Packer::default(),
            rows: Upload::new(cuda, config.max_rows * size_of::<launch::ChooseRow>() / 4)?,
            results: Memory::new(cuda, num_words * size_of::<u64>(), 0)?,
            staged_results: Staging::new(cuda, num_words)?,
            workspaces: Memory::new(cuda, 0, 0)?,
            num_rows: 0,
            config,
        })
    }

    /// As [`Chooser::choose`].
    pub(super) fn choose<'a>(
        &mut self,
        logits: View<'_>,
        rows: impl ExactSizeIterator<Item = ChooseRow<'a>>,
    ) -> Result<&[ChoiceKey]> {
        self.num_rows = 0;
        let (config, num_rows) = (&self.config, rows.len());
        if num_rows > config.max_rows {
            return Err(Error::misuse("rows of a call", format!("at most {}", config.max_rows), num_rows));
        }
        expect_len("logits", num_rows * config.columns.len(), logits.len)?;
        if logits.stream != self.cuda.stream_id() {
            return Err(Error::misuse("logits", "memory of the `Cuda` that made the chooser", "another's"));
        }
        let Some(kernel) = self.kernels[logits.format as usize] else {
            return Err(Error::misuse(
                "logits",
                "a format that the chooser was made for",
                logits.format.name(),
            ));
        };
        if num_rows == 0 {
            return Ok(&[]);
        }
        logits.expect_aligned("logits", logits.format.bytes())?;
        self.packer.pack(rows, config.vocab, &config.columns)?;
        let row_units = config.columns.end.div_ceil(8) - config.columns.start / 8;
        self.workspaces.reserve(self.packer.num_workspaces() * row_units * 8 * size_of::<f32>())?;
        self.rows.queue(self.packer.words())?;
        self.results.queue_zeros(num_rows * 8)?;
        let mut arguments = launch::Choose {
            logits: logits.address,
            rows: self.rows.address(),
            keys: self.results.address,
            thresholds: self.results.address + (num_rows * 8) as u64,
            z: self.workspaces.address,
            first_token: config.columns.start as u32,
            columns: config.columns.len() as u32,
        };
        let warps = row_units.div_ceil(32).min(config.max_warps);
        // Two blocks for each multiprocessor, unless their threads had nothing to do.
        let blocks = (2 * self.multiprocessors).div_ceil(num_rows).min(row_units.div_ceil(32 * warps));
        let grid = (blocks as u32, num_rows as u32);
        launch::choose(&self.cuda, kernel, grid, 32 * warps as u32, &mut arguments)?;
        self.staged_results.queue_download(result_words(num_rows), &self.results)?;
        // The call's one wait.
        self.staged_results.elements()?;
        self.num_rows = num_rows;
        Ok(self.keys())
    }

    /// The keys of the last call; none after one that failed.
    pub(super) fn keys(&self) -> &[ChoiceKey] {
        bytemuck::cast_slice(self.results().get(..self.num_rows).unwrap_or_default())
    }

    fn results(&self) -> &[u64] {
        // The call has waited: this neither waits nor fails.
        let words = self.staged_results.elements().unwrap_or_default();
        words.get(..result_words(self.num_rows)).unwrap_or_default()
    }
}

/// Keys of eight bytes, then thresholds of four.
fn result_words(rows: usize) -> usize {
    rows + rows.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use crate::sampling::{BLOCK, gumbel, noise_bound, uniform_block};

    /// What `kNoiseSpan` and `has_lower_bound` in sampling.cuh say of the noise.
    #[test]
    fn noise_has_the_lower_bound_that_the_kernel_prunes_with() {
        let (mut least, mut num_bounded) = (f32::INFINITY, 0);
        for block in 0..40_000u32 {
            let (position, first) = (block / 100, block % 100 * BLOCK as u32);
            for (token, bits) in (first..).zip(uniform_block(3, position, first)) {
                if (256..1 << 31).contains(&bits) {
                    least = least.min(gumbel(3, position, token) - (noise_bound(bits) - 1.02));
                    num_bounded += 1;
                }
            }
        }
        assert!(num_bounded > 1_000_000);
        // Tight, too: the span is no more than the noise needs.
        assert!((0.0..1e-3).contains(&least), "{least}");
    }
}
