//! What a speculator is told of a request, and what it keeps of it.

use crate::draft::{Coupling, DraftBudget};
use crate::sampling::{SamplingParams, TokenLogProb};
use crate::stats::AcceptStats;
use crate::tree::TokenId;
use crate::verify::{FinishReason, RequestId};

/// How one request is served.
///
/// The default decodes plainly, at temperature 0, until the target's context is full.
#[derive(Clone, Debug)]
pub struct RequestOptions {
    /// Tokens that end the output; the one that does is emitted.
    pub stop_tokens: Vec<TokenId>,
    /// Output tokens at most, from this admission on.
    pub max_new_tokens: usize,
    /// Drafts in each step.
    pub budget: DraftBudget,
    /// How the target's tokens are sampled.
    pub sampling: SamplingParams,
    /// How drafts are ranked at a temperature above 0. Never changes the text.
    pub coupling: Coupling,
    /// The last so many tokens of the prompt are output of an earlier admission: a request that was preempted
    /// comes back with its prompt and output as the prompt, and goes on with the text it would have had.
    pub num_prior_outputs: usize,
    /// Reports each emitted token's log-probability and rank, and this many of the likeliest tokens, at most
    /// [`MAX_ALTERNATIVES`](Self::MAX_ALTERNATIVES).
    pub log_probs: Option<usize>,
}

impl RequestOptions {
    /// The most that `log_probs` may ask for.
    pub const MAX_ALTERNATIVES: usize = 128;
}

impl Default for RequestOptions {
    fn default() -> Self {
        Self {
            stop_tokens: Vec::new(),
            max_new_tokens: usize::MAX,
            budget: DraftBudget::NONE,
            sampling: SamplingParams::default(),
            coupling: Coupling::default(),
            num_prior_outputs: 0,
            log_probs: None,
        }
    }
}

/// The first output token of a request.
#[derive(Clone, Debug)]
pub struct FirstToken {
    /// It is committed, and the root of the first draft tree.
    pub token: TokenId,
    /// If [`RequestOptions::log_probs`] asks for it.
    pub log_prob: Option<TokenLogProb>,
    /// Set when it is also the last.
    pub finished: Option<FinishReason>,
}

/// What remains of a request that was taken out.
#[derive(Clone, Debug)]
pub struct Output {
    /// The output tokens since it was admitted, the stop token included.
    pub tokens: Vec<TokenId>,
    /// Its verify steps.
    pub stats: AcceptStats,
}

/// An admitted request, beside what drafting and sampling have of it (`DraftState`).
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) options: RequestOptions,
    /// Set once the prompt is complete.
    pub(super) prompt_len: Option<usize>,
    pub(super) finished: bool,
    /// Unless there was no room for its rows in the draft model's KV cache.
    pub(super) has_drafter: bool,
    /// The step that was under way when it was admitted.
    pub(super) admitted_step: u64,
    /// The last step that proposed for it, while not accepted.
    pub(super) proposed_step: Option<u64>,
    /// The last `propose` that named it, to find duplicates.
    pub(super) named_step: u64,
    pub(super) stats: AcceptStats,
}

impl Request {
    /// Output tokens that may still come, of a text with `committed_len` tokens.
    pub(super) fn num_remaining(&self, committed_len: usize, max_len: usize) -> usize {
        let num_emitted = committed_len - self.prompt_len.unwrap_or(committed_len);
        let by_request = self.options.max_new_tokens.saturating_sub(num_emitted);
        by_request.min(max_len.saturating_sub(committed_len))
    }
}
