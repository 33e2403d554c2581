//! The loop around the target: propose trees, then accept what the target made of them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::backend::{Backend, DraftLimits, DraftState, Text};
use crate::comm::VocabShard;
use crate::draft::{CandidatePool, Coupling, DraftBudget, Eagle3Checkpoint};
use crate::error::{Error, Result, expect_len};
use crate::kv::PagePool;
use crate::sampling::{ChoiceKey, Sampler};
use crate::stats::AcceptStats;
use crate::tree::{DraftTree, TokenId};
use crate::verify::{Origin, RequestId, Verdict, VerifyBatch};

mod accept;
mod choices;
mod request;

use choices::Choices;
use request::Request;
pub use request::{FirstToken, Output, RequestOptions};

/// Asked which tokens may follow some drafts of a request, as `MasksBySlot` is.
type MasksById<'a> = &'a mut dyn FnMut(RequestId, &[TokenId], &mut [u32]) -> bool;

/// Pairs that a request which drafts nothing lets wait before the head is run on them together.
const MAX_LAZY_PAIRS: usize = 32;

/// What a [`Speculator`] must have room for.
///
/// The draft model's KV cache has room for all of it, unless it is made
/// [`with_kv_rows`](Speculator::with_kv_rows).
#[derive(Clone, Copy, Debug)]
pub struct SpeculatorConfig {
    /// Requests admitted at the same time.
    pub max_requests: usize,
    /// The target's context: prompt and output tokens of a request.
    pub max_len: usize,
}

/// Time spent in a speculator since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes {
    /// Running the draft model: its forward passes and the choice of candidates.
    pub draft: Duration,
    /// All else in `propose` and `accept`: selection, packing, choosing target tokens, walking, bookkeeping.
    pub host: Duration,
}

/// Drafts for the requests of an engine and verifies what its target says.
///
/// The engine keeps its forward pass, its KV cache and its scheduler. For each request:
///
/// 1. [`admit`](Self::admit), then [`prefill`](Self::prefill) with the prompt's tokens and features in any
///    number of chunks, then [`begin`](Self::begin) with the logits of the last prompt token.
/// 2. [`propose`](Self::propose) for any set of requests; run the target on the batch;
///    [`accept`](Self::accept); move the KV rows that each [`Verdict`] keeps. Again until it has finished.
/// 3. [`finish`](Self::finish), or [`cancel`](Self::cancel) at any time.
///
/// A *feature* is the target's residual stream after each of the head's
/// [`feature_layers`](crate::Eagle3Config::feature_layers), concatenated: `[rows, feature_width]`.
///
/// A call that fails changes nothing, and a proposal that is never accepted leaves no trace: propose again.
/// Several batches over different requests may be on the way at once.
///
/// # Several ranks
///
/// Each rank of a tensor-parallel target has a speculator of its own, and all make the same calls in the same order,
/// with the same requests. The draft head is small: every rank runs all of it, and drafts the same trees. Where each
/// rank has the logits of its own part of the vocabulary, the speculators are made with
/// [`new_sharded`](Self::new_sharded); where all have whole rows, with [`new`](Self::new), and know nothing of each
/// other. Either way all ranks come to the same verdicts. What an engine decides by measured time, such as a budget, it
/// decides on rank 0 and shares by [`broadcast`](Self::broadcast).
#[derive(Debug)]
pub struct Speculator<B: Backend> {
    backend: B,
    draft: B::Draft,
    /// Unlike any other's in this process: whose batch is it?
    id: u64,
    vocab: usize,
    /// The tokens whose logits this rank has, and how it agrees with the others if it has not all.
    columns: Range<usize>,
    shard: Option<VocabShard>,
    feature_width: usize,
    config: SpeculatorConfig,
    slots: HashMap<RequestId, usize>,
    requests: Vec<Option<Request>>, // by slot
    states: Vec<DraftState>,        // by slot
    step: u64,
    active: Vec<usize>,
    verdicts: Vec<Verdict>,
    /// The drafts on the way of a walk.
    path: Vec<TokenId>,
    /// Tokens that the next one may be, a bit for each.
    mask: Vec<u32>,
    choices: Choices,
    /// Of the rows that were chosen last.
    keys: Vec<ChoiceKey>,
    stats: AcceptStats,
    times: StageTimes,
}

impl<B: Backend> Speculator<B> {
    /// Loads the head into the backend.
    ///
    /// `embedding` is the target's table, for a head without its own.
    ///
    /// # Errors
    /// *Misuse* when a limit is 0 or the table is missing or of another shape; *unsupported* when the backend
    /// cannot run the head's sizes.
    pub fn new(
        backend: B,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<B::Embedding>,
        config: SpeculatorConfig,
    ) -> Result<Self> {
        Self::build(backend, checkpoint, embedding, config, usize::MAX, None)
    }

    /// As [`new`](Self::new), with at most so many rows in the draft model's KV cache: tokens of all requests
    /// together.
    ///
    /// Room for all requests at their longest is more than most engines have: a row is `num_kv_heads * head_dim` keys
    /// and as many values in f32, 8 KiB for 8 heads of 128, so 64 requests of 128k tokens would take 64 GiB. With
    /// less, a request for which there is no more room stops drafting and goes on plainly, with the same text; its
    /// rows are free for others.
    ///
    /// # Errors
    /// As [`new`](Self::new); *misuse* when there are no rows.
    pub fn with_kv_rows(
        backend: B,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<B::Embedding>,
        config: SpeculatorConfig,
        num_kv_rows: usize,
    ) -> Result<Self> {
        Self::build(backend, checkpoint, embedding, config, num_kv_rows, None)
    }

    /// As [`new`](Self::new), for one rank of several that each have the logits of their own tokens: those that `shard`
    /// names. Its rows of logits are `[columns]`, its masks are of the whole vocabulary.
    ///
    /// A rank chooses from its columns, and the choices of all ranks are combined, with one exchange in each
    /// [`begin`](Self::begin) and [`accept`](Self::accept): the verdicts are those of whole rows, bit for bit, on
    /// every rank. Such a call fails on all ranks if it fails on one, or if ranks are lost or drafted differently;
    /// with the error of the rank that failed, within the shard's time limit. A rank that gives up drops its
    /// speculator: the others hear of it at their next call.
    ///
    /// # Errors
    /// As [`new`](Self::new); *misuse* also when the shard is of another vocabulary.
    pub fn new_sharded(
        backend: B,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<B::Embedding>,
        config: SpeculatorConfig,
        shard: VocabShard,
    ) -> Result<Self> {
        expect_len("vocabulary of the shard", checkpoint.config().target.vocab, shard.vocab())?;
        Self::build(backend, checkpoint, embedding, config, usize::MAX, Some(shard))
    }

    fn build(
        backend: B,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<B::Embedding>,
        config: SpeculatorConfig,
        num_kv_rows: usize,
        shard: Option<VocabShard>,
    ) -> Result<Self> {
        let SpeculatorConfig { max_requests, max_len } = config;
        if max_requests == 0 {
            return Err(Error::misuse("max_requests", "at least 1", 0));
        }
        if !(2..=1 << 22).contains(&max_len) {
            return Err(Error::misuse("max_len", "2..=2^22", max_len));
        }
        // Every request can be as long as the context and draft as much as a budget allows.
        let rows = max_len + DraftTree::MAX_NODES;
        let num_kv_pages = rows.div_ceil(B::KV_PAGE_SIZE).saturating_mul(max_requests);
        let num_kv_pages = num_kv_pages.min(num_kv_rows.div_ceil(B::KV_PAGE_SIZE));
        let limits = DraftLimits { max_requests, max_len, num_kv_pages };
        let pool = PagePool::new(B::KV_PAGE_SIZE, num_kv_pages)?;
        let state = || DraftState {
            table: pool.table(),
            next_tokens: Vec::new(),
            first_is_written: false,
            budget: DraftBudget::NONE,
            pool: CandidatePool::default(),
            text: Text::default(),
        };
        let vocab = checkpoint.config().target.vocab;
        let columns = shard.as_ref().map_or(0..vocab, VocabShard::columns);
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            draft: backend.load_draft(checkpoint, embedding, limits, &columns)?,
            backend,
            vocab,
            columns,
            shard,
            feature_width: checkpoint.config().feature_width(),
            config,
            slots: HashMap::with_capacity(max_requests),
            requests: (0..max_requests).map(|_| None).collect(),
            states: (0..max_requests).map(|_| state()).collect(),
            step: 0,
            active: Vec::with_capacity(max_requests),
            verdicts: Vec::new(),
            path: Vec::new(),
            mask: vec![0; vocab.div_ceil(32)],
            choices: Choices::default(),
            keys: Vec::new(),
            stats: AcceptStats::default(),
            times: StageTimes::default(),
        })
    }

    /// Takes in a request, whose prompt will follow.
    ///
    /// # Errors
    /// *Misuse* when the id is in use, no output token is wanted, or a parameter of sampling or coupling is out of
    /// its range; *fault* when all places are taken. *Unsupported*, of a [sharded](Self::new_sharded) one, when the
    /// request wants log-probabilities, or top-k, top-p or min-p at a temperature above 0: these look at whole rows.
    pub fn admit(&mut self, id: RequestId, options: RequestOptions) -> Result<()> {
        if self.slots.contains_key(&id) {
            return Err(Error::misuse("request", "an id that is not in use", id.0));
        }
        if options.max_new_tokens == 0 {
            return Err(Error::misuse("max_new_tokens", "at least 1", 0));
        }
        let sampler = Sampler::new(options.sampling.clone())?;
        options.coupling.check()?;
        let num_alternatives = options.log_probs.unwrap_or(0);
        if num_alternatives > RequestOptions::MAX_ALTERNATIVES {
            let wanted = format!("at most {} alternatives", RequestOptions::MAX_ALTERNATIVES);
            return Err(Error::misuse("log-probabilities", wanted, num_alternatives));
        }
        if self.shard.is_some() && (sampler.has_filters() || options.log_probs.is_some()) {
            let wanted =
                "whole rows of logits: gather them, and make a speculator for whole rows on every rank";
            let subject = "top-k, top-p, min-p and log-probabilities";
            return Err(Error::unsupported(subject, wanted, "a shard of the vocabulary"));
        }
        let free = self.requests.iter().position(Option::is_none);
        let slot = free.ok_or_else(|| {
            Error::fault("requests", format_args!("at most {}", self.config.max_requests), "one more")
        })?;
        self.slots.insert(id, slot);
        self.states[slot].text = Text { sampler, coupling: options.coupling, ..Text::default() };
        self.requests[slot] = Some(Request {
            id,
            options,
            prompt_len: None,
            finished: false,
            has_drafter: true,
            admitted_step: self.step,
            proposed_step: None,
            named_step: 0,
            stats: AcceptStats::default(),
        });
        Ok(())
    }

    /// Takes the next chunk of a request's prompt: `tokens`, `[chunk]`, and the target's features of those
    /// tokens, `[chunk, feature_width]`.
    ///
    /// How the prompt is cut into chunks changes nothing: the last feature of a chunk waits and pairs with
    /// the first token of the next. On a GPU the features of a chunk wait in memory of the draft model, which grows to
    /// the longest chunk; it has at most 65,535 tokens.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown or has begun, the chunk is empty, a token is not in the
    /// vocabulary, the features have another length, or the prompt leaves no room for an output token.
    pub fn prefill(&mut self, id: RequestId, tokens: &[TokenId], features: B::View<'_>) -> Result<()> {
        let started = Instant::now();
        let slot = self.slot(id)?;
        let (vocab, max_len) = (self.vocab, self.config.max_len);
        let request = Self::request(&mut self.requests, slot)?;
        if request.prompt_len.is_some() {
            return Err(Error::misuse("prompt chunk", "a request that has not begun", id.0));
        }
        if tokens.is_empty() {
            return Err(Error::misuse("prompt chunk", "at least 1 token", 0));
        }
        let state = &mut self.states[slot];
        let len = state.text.committed.len() + tokens.len();
        if len >= max_len {
            return Err(Error::misuse("prompt length", format_args!("below the context, {max_len}"), len));
        }
        if let Some(bad) = tokens.iter().find(|token| token.0 as usize >= vocab) {
            return Err(Error::misuse("prompt token", format_args!("below {vocab}"), bad.0));
        }
        expect_len("prompt features", tokens.len() * self.feature_width, B::view_len(features))?;
        if request.has_drafter && state.table.reserve(state.next_tokens.len() + tokens.len()).is_err() {
            self.stop_drafting(slot);
        }
        let state = &mut self.states[slot];
        let num_committed = state.text.committed.len();
        if self.requests[slot].as_ref().is_some_and(|request| request.has_drafter) {
            let num_pairs = state.next_tokens.len();
            let num_waiting = num_committed - state.table.len();
            let rows = (0..tokens.len()).map(|row| (slot, row));
            self.backend.keep_features(&mut self.draft, features, rows)?;
            // The very first token has no feature before it.
            let unpaired = usize::from(num_committed == 0);
            state.next_tokens.extend_from_slice(&tokens[unpaired..]);
            state.budget = DraftBudget::NONE;
            let drafted = self.backend.draft(&mut self.draft, &mut self.states, &[slot], None);
            if let Err(error) = drafted {
                self.states[slot].next_tokens.truncate(num_pairs);
                self.backend.forget_features(&mut self.draft, slot, num_waiting);
                return Err(error);
            }
        }
        self.states[slot].text.committed.extend_from_slice(tokens);
        self.times.draft += started.elapsed();
        Ok(())
    }

    /// Drafts a tree for each of these requests and packs them into `batch`, in this order.
    ///
    /// Requests may join and leave from step to step; there may be none. A tree never reaches past the
    /// request's last token, and is a root alone when the budget is [`DraftBudget::NONE`].
    ///
    /// # Errors
    /// *Misuse* when a request is unknown, named twice, has not begun or has finished; *fault* when the draft
    /// model fails.
    pub fn propose(&mut self, requests: &[RequestId], batch: &mut VerifyBatch) -> Result<()> {
        self.propose_where(requests, batch, None)
    }

    /// As [`propose`](Self::propose), with drafts that a grammar allows.
    ///
    /// `masks(request, path, mask)` is asked for each node that the draft model runs, also those that the tree leaves
    /// out in the end: which tokens may follow the request's committed tokens and the drafts of `path`. It clears bits of `mask`, `[vocab / 32, rounded up]`, lowest bit
    /// first, all set before; or returns false if there is no restriction. It only saves drafts that
    /// [`accept_masked`](Self::accept_masked) would refuse: that call decides.
    ///
    /// # Errors
    /// As [`propose`](Self::propose).
    pub fn propose_masked(
        &mut self,
        requests: &[RequestId],
        batch: &mut VerifyBatch,
        mut masks: impl FnMut(RequestId, &[TokenId], &mut [u32]) -> bool,
    ) -> Result<()> {
        self.propose_where(requests, batch, Some(&mut masks))
    }

    fn propose_where(
        &mut self,
        requests: &[RequestId],
        batch: &mut VerifyBatch,
        masks: Option<MasksById<'_>>,
    ) -> Result<()> {
        let started = Instant::now();
        // A step is used up also if it fails: its marks must not be met again.
        self.step += 1;
        let step = self.step;
        self.active.clear();
        for id in requests {
            let slot = self.slot(*id)?;
            let request = Self::request(&mut self.requests, slot)?;
            if request.prompt_len.is_none() || request.finished {
                let state = if request.finished { "has finished" } else { "has not begun" };
                return Err(Error::misuse(
                    "request",
                    "one that emits tokens",
                    format_args!("{} {state}", id.0),
                ));
            }
            if std::mem::replace(&mut request.named_step, step) == step {
                return Err(Error::misuse("requests", "distinct ids", format_args!("{} twice", id.0)));
            }
            self.active.push(slot);
        }
        for &slot in &self.active {
            let request = Self::request(&mut self.requests, slot)?;
            let state = &mut self.states[slot];
            // The bonus token follows the deepest draft.
            let committed = &state.text.committed;
            let deepest = request.num_remaining(committed.len(), self.config.max_len) - 1;
            state.budget = request.options.budget.at_most_deep(deepest);
            state.pool.restart(committed[committed.len() - 1]);
        }
        for place in 0..self.active.len() {
            let slot = self.active[place];
            let DraftState { table, next_tokens, budget, .. } = &mut self.states[slot];
            let has_room = table.reserve(next_tokens.len() + budget.num_draft_rows()).is_ok();
            if !has_room {
                self.stop_drafting(slot);
            }
            if !Self::request(&mut self.requests, slot)?.has_drafter {
                self.states[slot].budget = DraftBudget::NONE;
            }
        }
        let states = &mut self.states;
        self.active.retain(|&slot| {
            states[slot].budget.depth() > 0 || states[slot].next_tokens.len() > MAX_LAZY_PAIRS
        });
        let drafting = Instant::now();
        let requests_by_slot = &self.requests;
        let (backend, draft, active) = (&self.backend, &mut self.draft, &self.active);
        match masks {
            None => backend.draft(draft, states, active, None)?,
            Some(masks) => {
                let mut by_slot = |slot: usize, path: &[TokenId], mask: &mut [u32]| {
                    requests_by_slot[slot].as_ref().is_some_and(|request| masks(request.id, path, mask))
                };
                backend.draft(draft, states, active, Some(&mut by_slot))?;
            }
        }
        let draft_time = drafting.elapsed();
        batch.restart(Origin { speculator: self.id, step });
        for id in requests {
            let slot = self.slot(*id)?;
            let request = Self::request(&mut self.requests, slot)?;
            let DraftState { pool, budget, text, .. } = &mut self.states[slot];
            let mut selected = Ok(());
            batch.push_with(*id, text.committed.len(), |entry| {
                let (tree, confidences) = entry.parts_mut();
                selected = pool.select(budget.nodes(), tree, confidences);
            })?;
            selected?;
            request.proposed_step = Some(step);
        }
        self.times.draft += draft_time;
        self.times.host += started.elapsed() - draft_time;
        Ok(())
    }

    /// Takes a request out and returns its output, finished or not.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown.
    pub fn finish(&mut self, id: RequestId) -> Result<Output> {
        let slot = self.slot(id)?;
        self.retire(slot);
        self.slots.remove(&id);
        let request = self.requests[slot].take().ok_or_else(|| unknown(id))?;
        let text = std::mem::take(&mut self.states[slot].text);
        let prompt_len = request.prompt_len.unwrap_or(text.committed.len());
        Ok(Output { tokens: text.committed[prompt_len..].to_vec(), stats: request.stats })
    }

    /// Takes a request out and forgets it. A batch that holds it may still be accepted.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown.
    pub fn cancel(&mut self, id: RequestId) -> Result<()> {
        self.finish(id).map(drop)
    }

    /// Changes what a request drafts from the next step on.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown.
    pub fn set_budget(&mut self, id: RequestId, budget: DraftBudget) -> Result<()> {
        let slot = self.slot(id)?;
        Self::request(&mut self.requests, slot)?.options.budget = budget;
        Ok(())
    }

    /// Changes how a request's drafts are ranked from the next step on.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown or a parameter is out of its range.
    pub fn set_coupling(&mut self, id: RequestId, coupling: Coupling) -> Result<()> {
        let slot = self.slot(id)?;
        coupling.check()?;
        self.states[slot].text.coupling = coupling;
        Ok(())
    }

    /// Replaces `values` by those of rank 0, on every rank of a [sharded](Self::new_sharded) speculator: what depends on
    /// measured time is decided by rank 0 alone. All ranks call it, with as many values. Without other ranks, nothing
    /// happens.
    ///
    /// # Errors
    /// As [`VocabShard::broadcast`].
    pub fn broadcast(&mut self, values: &mut [u64]) -> Result<()> {
        self.shard.as_mut().map_or(Ok(()), |shard| shard.broadcast(values))
    }

    /// Where it runs.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Prompt and output tokens of a request so far.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown.
    pub fn committed(&self, id: RequestId) -> Result<&[TokenId]> {
        let slot = self.slot(id)?;
        Ok(&self.states[slot].text.committed)
    }

    /// The draft model's keys and values of a request's committed tokens but the last ones, whose pairs wait:
    /// `[rows, 2, num_kv_heads, head_dim]`. For tests.
    #[doc(hidden)]
    pub fn draft_kv(&self, id: RequestId) -> Result<Vec<f32>> {
        let table = &self.states[self.slot(id)?].table;
        self.backend.read_kv(&self.draft, table, table.len())
    }

    /// The draft model, for tests.
    #[doc(hidden)]
    pub fn draft_model(&mut self) -> &mut B::Draft {
        &mut self.draft
    }

    /// Pages that requests hold, for tests.
    #[doc(hidden)]
    pub fn num_draft_pages(&self) -> usize {
        self.states.iter().map(|state| state.table.pages().len()).sum()
    }

    /// Acceptance over all requests since the speculator was made.
    pub fn stats(&self) -> &AcceptStats {
        &self.stats
    }

    /// Where its time went.
    pub fn times(&self) -> StageTimes {
        self.times
    }

    fn slot(&self, id: RequestId) -> Result<usize> {
        self.slots.get(&id).copied().ok_or_else(|| unknown(id))
    }

    /// The request in a slot that `slot` gave.
    fn request(requests: &mut [Option<Request>], slot: usize) -> Result<&mut Request> {
        requests[slot].as_mut().ok_or_else(|| Error::misuse("request", "an admitted one", "none"))
    }

    /// Gives back all that the draft side holds for a request.
    fn retire(&mut self, slot: usize) {
        if let Some(request) = &mut self.requests[slot] {
            request.finished = true;
        }
        self.stop_drafting(slot);
    }

    /// The rest of the request is decoded plainly.
    fn stop_drafting(&mut self, slot: usize) {
        if let Some(request) = &mut self.requests[slot] {
            request.has_drafter = false;
        }
        let state = &mut self.states[slot];
        state.next_tokens.clear();
        state.first_is_written = false;
        state.table.clear();
        self.backend.forget_features(&mut self.draft, slot, 0);
    }
}

fn unknown(id: RequestId) -> Error {
    Error::misuse("request", "an admitted one", id.0)
}

#[cfg(test)]
mod tests;
