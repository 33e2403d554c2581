//! The CPU backend: fast enough that trees pay here too.
//!
//! Its building blocks are public, because an engine whose target runs on the CPU needs them as well: a
//! verify row equals a decode row bit for bit only if every operation between them treats each row alone.

mod attention;
#[cfg(test)]
mod golden;
mod group;
mod head;
mod linear;
mod ops;
mod sample;
mod simd;
mod threads;

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::{Backend, DraftLimits, DraftState, MasksBySlot};
use crate::comm::check_columns;
use crate::draft::{Eagle3Checkpoint, Matrix, Weights};
use crate::error::{Error, Result, expect_len};
use crate::kv::PageTable;
use crate::sampling::{ChoiceKey, Sampler, SamplingContext, TokenLogProb};
use crate::tree::TokenId;

pub use attention::{AttentionRow, KvCache, KvShape};
pub use linear::PackedLinear;
pub use ops::{Rope, silu_mul};
pub use simd::Weight;
use threads::Team;

/// The processor: its threads and its instruction set.
///
/// The calling thread works along with the backend's own, which spin for a millisecond after each operation
/// before they sleep. Clones share the threads; operations from several threads take turns.
#[derive(Clone, Debug)]
pub struct Cpu {
    team: Arc<Team>,
    isa: simd::Isa,
}

impl Cpu {
    /// One thread for each core that this process may use.
    ///
    /// # Errors
    /// *Fault* when the system gives no threads.
    pub fn new() -> Result<Self> {
        Self::with_threads(std::thread::available_parallelism().map_or(1, Into::into))
    }

    /// A given number of threads, the caller's included.
    ///
    /// # Errors
    /// *Misuse* unless it is in `1..=1024`; *fault* when the system gives no threads.
    pub fn with_threads(num_threads: usize) -> Result<Self> {
        if !(1..=1024).contains(&num_threads) {
            return Err(Error::misuse("threads", "1..=1024", num_threads));
        }
        Ok(Self { team: Arc::new(Team::new(num_threads)?), isa: simd::Isa::detect() })
    }

    /// [`Sampler::choose`] from one row of logits, `[vocab]`, fast: the same key, bit for bit. For an engine's own
    /// plain decoding; a [`Speculator`](crate::Speculator) uses it too.
    ///
    /// # Errors
    /// As [`Sampler::choose`].
    pub fn sample(
        &self,
        sampler: &Sampler,
        logits: &[f32],
        context: SamplingContext<'_>,
    ) -> Result<ChoiceKey> {
        sample::choose(sampler, logits, 0, logits.len(), context)?.checked()
    }

    /// The key of a shard of a row: `logits`, `[columns]`, are those of the tokens `columns` of a vocabulary of
    /// `vocab`. The largest key of all shards, [checked](ChoiceKey::checked), is what [`sample`](Self::sample) gives
    /// for the row: see [`VocabShard::combine`](crate::comm::VocabShard::combine).
    ///
    /// # Errors
    /// *Misuse* when the columns are not in the vocabulary, the logits are not so many, or the mask is not of the
    /// whole vocabulary; *unsupported* for top-k, top-p and min-p at a temperature above 0, which look at all tokens.
    pub fn sample_shard(
        &self,
        sampler: &Sampler,
        logits: &[f32],
        columns: Range<usize>,
        vocab: usize,
        context: SamplingContext<'_>,
    ) -> Result<ChoiceKey> {
        check_columns(&columns, vocab)?;
        expect_len("logits of a shard", columns.len(), logits.len())?;
        if sampler.has_filters() && columns.len() < vocab {
            let seen = format!("columns {columns:?} of {vocab}");
            return Err(Error::unsupported("top-k, top-p and min-p", "a whole row of logits", seen));
        }
        sample::choose(sampler, logits, columns.start, vocab, context)
    }

    /// Number of threads.
    pub fn num_threads(&self) -> usize {
        self.team.num_threads()
    }
}

/// An embedding table that engine and drafter share, `[vocab, hidden]` row-major.
#[derive(Clone, Debug)]
pub struct Embedding {
    hidden: usize,
    table: Table,
}

#[derive(Clone, Debug)]
enum Table {
    F32(Arc<[f32]>),
    Bf16(Arc<[bf16]>),
}

impl Embedding {
    /// A view of an f32 table.
    ///
    /// # Errors
    /// *Misuse* when it is not whole rows of `hidden` elements.
    pub fn f32(table: Arc<[f32]>, hidden: usize) -> Result<Self> {
        Self::checked(table.len(), hidden, Table::F32(table))
    }

    /// A view of a bf16 table.
    ///
    /// # Errors
    /// As [`f32`](Self::f32).
    pub fn bf16(table: Arc<[bf16]>, hidden: usize) -> Result<Self> {
        Self::checked(table.len(), hidden, Table::Bf16(table))
    }

    fn checked(len: usize, hidden: usize, table: Table) -> Result<Self> {
        if hidden == 0 || len == 0 || !len.is_multiple_of(hidden) {
            let wanted = format!("a positive multiple of the hidden size {hidden}");
            return Err(Error::misuse("embedding table", wanted, len));
        }
        Ok(Self { hidden, table })
    }

    fn from_matrix(matrix: &Matrix) -> Result<Self> {
        match &matrix.weights {
            Weights::F32(weights) => Self::f32(weights.as_slice().into(), matrix.columns),
            Weights::Bf16(weights) => Self::bf16(weights.as_slice().into(), matrix.columns),
            Weights::F16(_) => Self::f32(matrix.weights.to_f32().into(), matrix.columns),
        }
    }

    /// Number of tokens.
    pub fn vocab(&self) -> usize {
        let len = match &self.table {
            Table::F32(table) => table.len(),
            Table::Bf16(table) => table.len(),
        };
        len / self.hidden
    }

    /// Elements of a token's row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Copies a token's row, `[hidden]`, widened to f32.
    ///
    /// # Errors
    /// *Misuse* when the token is not in the table or `out` has another length.
    pub fn copy_row(&self, token: TokenId, out: &mut [f32]) -> Result<()> {
        expect_len("embedding row", self.hidden, out.len())?;
        let index = token.0 as usize;
        if index >= self.vocab() {
            return Err(Error::misuse("token", format_args!("below {}", self.vocab()), index));
        }
        let row = index * self.hidden..(index + 1) * self.hidden;
        match &self.table {
            Table::F32(table) => out.copy_from_slice(&table[row]),
            Table::Bf16(table) => {
                for (out, value) in out.iter_mut().zip(&table[row]) {
                    *out = value.to_f32();
                }
            }
        }
        Ok(())
    }
}

impl Backend for Cpu {
    type View<'a> = &'a [f32];
    type Draft = head::CpuHead;
    type Embedding = Embedding;

    const KV_PAGE_SIZE: usize = KvCache::PAGE_SIZE;
    const CHOOSES_AT_ONCE: bool = false;

    fn load_draft(
        &self,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<Embedding>,
        limits: DraftLimits,
        columns: &Range<usize>,
    ) -> Result<Self::Draft> {
        head::CpuHead::new(checkpoint, embedding, limits, columns)
    }

    fn view_len(view: &[f32]) -> usize {
        view.len()
    }

    fn part<'a>(view: Self::View<'a>, range: Range<usize>) -> Self::View<'a> {
        &view[range]
    }

    fn keep_features(
        &self,
        draft: &mut Self::Draft,
        features: &[f32],
        rows: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()> {
        rows.for_each(|(slot, row)| draft.keep_feature(slot, features, row));
        Ok(())
    }

    fn forget_features(&self, draft: &mut Self::Draft, slot: usize, num_kept: usize) {
        draft.forget_features(slot, num_kept);
    }

    fn draft(
        &self,
        draft: &mut Self::Draft,
        states: &mut [DraftState],
        active: &[usize],
        masks: Option<MasksBySlot<'_>>,
    ) -> Result<()> {
        draft.draft(self, states, active, masks)
    }

    fn read_kv(&self, draft: &Self::Draft, table: &PageTable, num_rows: usize) -> Result<Vec<f32>> {
        let mut rows = Vec::new();
        (0..num_rows).try_for_each(|row| draft.cache().read_row(table.slot(row), &mut rows))?;
        Ok(rows)
    }

    fn choose_all<'a>(
        &self,
        draft: &mut Self::Draft,
        logits: &[f32],
        rows: impl ExactSizeIterator<Item = (&'a Sampler, SamplingContext<'a>)>,
        keys: &mut Vec<ChoiceKey>,
    ) -> Result<()> {
        let (columns, vocab) = draft.target_columns();
        keys.clear();
        for (row, (sampler, context)) in logits.chunks_exact(columns.len()).zip(rows) {
            keys.push(sample::choose(sampler, row, columns.start, vocab, context)?);
        }
        Ok(())
    }

    fn log_prob(&self, logits: &[f32], token: TokenId, count: usize) -> Result<TokenLogProb> {
        let mut best = Vec::new();
        ops::top_k(logits, count, &mut best);
        let ids = best.iter().map(|(id, _)| *id);
        Ok(TokenLogProb::from_parts(logits, token, ops::log_sum_exp(logits), ids))
    }
}
