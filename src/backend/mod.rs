//! Backends: where the draft model runs and the target's logits are read.
//!
//! Users hold a backend *value* and give it to a [`Speculator`](crate::Speculator) or a
//! [`Group`](crate::comm::Group); nothing is inferred and there is no global default.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use std::ops::Range;

use crate::draft::{CandidatePool, Coupling, DraftBudget, Eagle3Checkpoint};
use crate::error::Result;
use crate::kv::PageTable;
use crate::sampling::{ChoiceKey, Sampler, SamplingContext, TokenLogProb};
use crate::tree::TokenId;

/// Memory and the coarse operations that touch it.
///
/// Everything that *decides* is in the pure modules; a backend computes, on arguments that were checked
/// before. Sealed, so that an operation can be added later: users name a backend, they don't call it.
pub trait Backend: sealed::Sealed + Sized {
    /// A float matrix of the engine, `[rows, width]` row-major, borrowed for one call. On [`cpu::Cpu`]
    /// it is `&[f32]`.
    type View<'a>: Copy;
    /// The target's embedding table, shared with the engine.
    type Embedding;
    /// A draft model: weights, KV pages, and the features that wait to be drafted from.
    type Draft;

    /// Rows in a page of the draft model's KV cache.
    #[doc(hidden)]
    const KV_PAGE_SIZE: usize;
    /// Whether the rows of a batch are chosen together, before the walk: on a device, where a row alone costs as
    /// much. Else row by row, and only those that the walk reaches.
    #[doc(hidden)]
    const CHOOSES_AT_ONCE: bool;

    /// Brings a head's weights into this backend's memory. `columns` are the tokens whose logits it will choose from.
    ///
    /// # Errors
    /// *Unsupported* when the backend has no kernel for a size of the head; *misuse* when the head needs the
    /// target's embedding table and `embedding` is missing or of another shape.
    #[doc(hidden)]
    fn load_draft(
        &self,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<Self::Embedding>,
        limits: DraftLimits,
        columns: &Range<usize>,
    ) -> Result<Self::Draft>;

    /// Number of elements of a view.
    #[doc(hidden)]
    fn view_len(view: Self::View<'_>) -> usize;

    /// Some of a view's elements, which are there.
    #[doc(hidden)]
    fn part<'a>(view: Self::View<'a>, range: Range<usize>) -> Self::View<'a>;

    /// Appends rows of `features` to those that wait: each item is a slot and a row for it.
    ///
    /// # Errors
    /// *Misuse* when the view is not of this backend; *fault* when the device fails. Nothing was appended then.
    #[doc(hidden)]
    fn keep_features(
        &self,
        draft: &mut Self::Draft,
        features: Self::View<'_>,
        rows: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()>;

    /// Drops the features that wait in `slot`, but for the first `num_kept`.
    #[doc(hidden)]
    fn forget_features(&self, draft: &mut Self::Draft, slot: usize, num_kept: usize);

    /// Runs the draft model for the requests in the slots `active`: extends the KV of each by the pairs that
    /// wait, then fills its candidate pool level by level. The last pair goes on waiting.
    ///
    /// # Errors
    /// *Fault* when the device fails. Then the same pairs wait as before.
    #[doc(hidden)]
    fn draft(
        &self,
        draft: &mut Self::Draft,
        states: &mut [DraftState],
        active: &[usize],
        masks: Option<MasksBySlot<'_>>,
    ) -> Result<()>;

    /// Keys and values of the first `num_rows` rows of a table, `[rows, 2, num_kv_heads, head_dim]`. Waits for them:
    /// for tests.
    ///
    /// # Errors
    /// *Fault* when the device fails.
    #[doc(hidden)]
    fn read_kv(&self, draft: &Self::Draft, table: &PageTable, num_rows: usize) -> Result<Vec<f32>>;

    /// Chooses from all rows of `logits`, `[rows, columns]`, each with its sampler and context: `keys` becomes those of
    /// [`Sampler::choose`], combined over the draft's columns. What is wrong with a row is in its key.
    ///
    /// # Errors
    /// *Misuse* when the view is not of this backend or a mask has another length; *fault* when the device fails.
    #[doc(hidden)]
    fn choose_all<'a>(
        &self,
        draft: &mut Self::Draft,
        logits: Self::View<'_>,
        rows: impl ExactSizeIterator<Item = (&'a Sampler, SamplingContext<'a>)>,
        keys: &mut Vec<ChoiceKey>,
    ) -> Result<()>;

    /// The log-probability of a token in a row of logits, `[vocab]`, and the `count` likeliest tokens:
    /// [`TokenLogProb::new`].
    ///
    /// # Errors
    /// *Fault* when the device fails.
    #[doc(hidden)]
    fn log_prob(&self, logits: Self::View<'_>, token: TokenId, count: usize) -> Result<TokenLogProb>;
}

/// Asked which tokens may follow some drafts (`slot, path, mask`): clears bits of the mask, or returns false.
#[doc(hidden)]
pub type MasksBySlot<'a> = &'a mut dyn FnMut(usize, &[TokenId], &mut [u32]) -> bool;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::cpu::Cpu {}
    #[cfg(feature = "cuda")]
    impl Sealed for super::cuda::Cuda {}
}

/// What a draft model must have room for.
#[derive(Clone, Copy, Debug)]
pub struct DraftLimits {
    /// Requests admitted at the same time.
    pub max_requests: usize,
    /// Prompt and output tokens of a request.
    pub max_len: usize,
    /// Pages of the draft model's KV cache.
    pub num_kv_pages: usize,
}

/// The draft side of one request. Slot `i` of a speculator and of its backend is the same request.
#[derive(Debug)]
pub struct DraftState {
    /// Draft KV: one row for each pair of a target feature and the token after it, but for those that wait.
    pub(crate) table: PageTable,
    /// The tokens after the features that wait. There may be one feature more than tokens. The last pair
    /// that ran goes on waiting, so that a step can be drafted again.
    pub(crate) next_tokens: Vec<TokenId>,
    /// Whether the first pair that waits has run already: its KV row is written, after the table's rows.
    pub(crate) first_is_written: bool,
    /// For this step.
    pub(crate) budget: DraftBudget,
    pub(crate) pool: CandidatePool,
    pub(crate) text: Text,
}

impl DraftState {
    /// The pairs that waited have run: all but the last are committed. Returns how many.
    fn commit_pairs(&mut self) -> usize {
        let num_committed = self.next_tokens.len().saturating_sub(1);
        self.table.advance(num_committed);
        self.next_tokens.drain(..num_committed);
        self.first_is_written = !self.next_tokens.is_empty();
        num_committed
    }
}

/// A request's text so far, and how it goes on.
#[derive(Debug, Default)]
pub(crate) struct Text {
    pub(crate) sampler: Sampler,
    pub(crate) coupling: Coupling,
    /// Prompt and output.
    pub(crate) committed: Vec<TokenId>,
    /// Where the output starts, outputs before a preemption included.
    pub(crate) output_start: usize,
}

impl Text {
    /// Where the token after the drafts of `path` is drawn.
    pub(crate) fn context<'a>(
        &'a self,
        path: &'a [TokenId],
        allowed: Option<&'a [u32]>,
    ) -> SamplingContext<'a> {
        let (prompt, output) = self.committed.split_at(self.output_start);
        let position = (self.committed.len() + path.len()) as u32; // below 2^22
        SamplingContext { position, prompt, output, path, allowed }
    }
}
