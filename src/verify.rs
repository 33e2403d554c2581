//! The verify pass: packing trees into one target forward, and walking the target's answer.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::kv::CommitPlan;
use crate::sampling::TokenLogProb;
use crate::tree::{DraftTree, NodeId, TokenId};

/// An engine's name for one of its requests. The engine chooses it; it must be unused while admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// The trees of several requests, laid out as the rows of one target forward.
///
/// Rows are requests in order, and within a request its nodes in order, so node `n` of entry `i` is row
/// `entry(i).rows().start + n`. A batch owns its memory and is meant to be filled again and again.
#[derive(Clone, Debug, Default)]
pub struct VerifyBatch {
    /// Who filled it, and in which step; 0 and 0 if by hand.
    origin: Origin,
    entries: Vec<BatchEntry>, // the first `len` are in use, the rest is memory to fill
    len: usize,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
}

/// Where a batch comes from: which speculator of this process, and its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) speculator: u64,
    pub(crate) step: u64,
}

/// One request in a [`VerifyBatch`].
#[derive(Clone, Debug)]
pub struct BatchEntry {
    request: RequestId,
    committed_len: usize,
    first_row: usize,
    tree: DraftTree,
    confidences: Vec<f32>,
}

impl VerifyBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the batch, keeps its memory, and names who fills it.
    pub(crate) fn restart(&mut self, origin: Origin) {
        self.clear();
        self.origin = origin;
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.origin = Origin::default();
        self.len = 0;
        self.tokens.clear();
        self.positions.clear();
    }

    /// Appends a request with its tree. A batch that was changed by hand is no speculator's any more.
    ///
    /// `committed_len` counts the request's prompt and output tokens, the tree's root included. The target's
    /// KV cache holds the `committed_len - 1` tokens before the root; the rows of this batch follow them.
    ///
    /// # Errors
    /// *Misuse* when `committed_len` is 0, or the last node's position exceeds `u32`.
    pub fn push(&mut self, request: RequestId, committed_len: usize, tree: &DraftTree) -> Result<()> {
        self.origin = Origin::default();
        self.push_with(request, committed_len, |entry| {
            entry.tree.clone_from(tree);
            entry.confidences.clear();
        })
    }

    /// As [`push`](Self::push), with the tree and its confidences written in place.
    pub(crate) fn push_with(
        &mut self,
        request: RequestId,
        committed_len: usize,
        fill: impl FnOnce(&mut BatchEntry),
    ) -> Result<()> {
        let root_position = committed_len
            .checked_sub(1)
            .filter(|position| *position <= u32::MAX as usize - DraftTree::MAX_NODES)
            .ok_or_else(|| Error::misuse("committed length", "1..=2^32 - 257", committed_len))?;
        if self.len == self.entries.len() {
            self.entries.push(BatchEntry {
                request,
                committed_len,
                first_row: 0,
                tree: DraftTree::new(TokenId(0)),
                confidences: Vec::new(),
            });
        }
        let entry = &mut self.entries[self.len];
        (entry.request, entry.committed_len) = (request, committed_len);
        entry.first_row = self.tokens.len();
        fill(entry);
        self.tokens.extend_from_slice(entry.tree.tokens());
        let depths = entry.tree.nodes().map(|node| entry.tree.depth(node));
        // In range: the root's position was checked and depths are below 256.
        self.positions.extend(depths.map(|depth| (root_position + depth) as u32));
        self.len += 1;
        Ok(())
    }

    /// Number of rows of the target forward: the nodes of all trees.
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }

    /// The requests, in order.
    pub fn entries(&self) -> &[BatchEntry] {
        &self.entries[..self.len]
    }

    /// The token to embed in each row, `[rows]`.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The position of each row, `[rows]`: committed length - 1 + depth.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }
}

impl BatchEntry {
    /// Whose tree this is.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// Prompt and output tokens so far, the root included.
    pub fn committed_len(&self) -> usize {
        self.committed_len
    }

    /// Tokens before the root: what the target's KV cache already holds, and every row attends to.
    pub fn prefix_len(&self) -> usize {
        self.committed_len - 1
    }

    /// The rows of the batch that are this tree's nodes.
    pub fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.tree.len()
    }

    /// The tree.
    pub fn tree(&self) -> &DraftTree {
        &self.tree
    }

    /// The drafter's probability that the whole path to each node is right, `[nodes]`, the root's being 1;
    /// empty when the tree came without.
    pub fn confidences(&self) -> &[f32] {
        &self.confidences
    }

    pub(crate) fn parts_mut(&mut self) -> (&mut DraftTree, &mut Vec<f32>) {
        (&mut self.tree, &mut self.confidences)
    }
}

/// Why a request emits no more.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FinishReason {
    /// This stop token was emitted; it is the last emitted token.
    Stop(TokenId),
    /// The request's `max_new_tokens` are out, or the target's context is full.
    Length,
    /// The request was cancelled while its batch was on the way.
    Cancelled,
    /// The target's logits gave no token. What was emitted before stands.
    Fault(Error),
}

/// What one verify step made of one request.
///
/// `path[i]` is the node whose row chose `emitted[i]`, so both have the same length: the root's row chose
/// the first emitted token, each accepted draft's row the next. The last emitted token is the bonus token
/// (unless the walk was cut by a stop token or a limit), and the next step's root.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The request.
    pub request: RequestId,
    /// The root and the accepted drafts whose rows were used, from the root down.
    pub path: Vec<NodeId>,
    /// The tokens emitted by this step, in order.
    pub emitted: Vec<TokenId>,
    /// Of the emitted tokens, if the request's options ask for them.
    pub log_probs: Vec<TokenLogProb>,
    /// Set when the request is done.
    pub finished: Option<FinishReason>,
    pub(crate) prefix_len: usize,
}

/// Where a request's output ends, for the cut inside the walk.
#[derive(Clone, Copy, Debug)]
pub struct OutputLimits<'a> {
    /// Tokens that end the request; the one that does is still emitted.
    pub stop_tokens: &'a [TokenId],
    /// Tokens that may still be emitted; at least 1.
    pub num_remaining: usize,
}

impl Verdict {
    /// An empty verdict, to be filled by [`walk`](Self::walk) again and again.
    pub fn new() -> Self {
        Self {
            request: RequestId::default(),
            path: Vec::new(),
            emitted: Vec::new(),
            log_probs: Vec::new(),
            finished: None,
            prefix_len: 0,
        }
    }

    /// Walks a tree by the one acceptance rule: at every node take the target's token; if a child carries
    /// it, emit it and descend, else emit it and stop.
    ///
    /// The emitted tokens are those of plain decoding, whatever the tree; the tree only decides how many
    /// there are (Theorem 1: no lossless verifier gets more out of a tree that was chosen before the
    /// target's coins). `choose` is asked for the target's token of a node, only for nodes on the path.
    /// If it fails, the tokens emitted so far stand and the request finishes with the fault.
    pub fn walk(
        &mut self,
        entry: &BatchEntry,
        limits: OutputLimits<'_>,
        mut choose: impl FnMut(NodeId) -> Result<TokenId>,
    ) {
        self.restart(entry);
        let mut node = NodeId::ROOT;
        loop {
            let token = match choose(node) {
                Ok(token) => token,
                Err(error) => {
                    self.finished = Some(FinishReason::Fault(error));
                    return;
                }
            };
            self.path.push(node);
            self.emitted.push(token);
            if limits.stop_tokens.contains(&token) {
                self.finished = Some(FinishReason::Stop(token));
                return;
            }
            if self.emitted.len() >= limits.num_remaining {
                self.finished = Some(FinishReason::Length);
                return;
            }
            match entry.tree.child_with(node, token) {
                Some((child, _)) => node = child,
                None => return,
            }
        }
    }

    /// No token of `entry`, and why.
    pub(crate) fn nothing(&mut self, entry: &BatchEntry, reason: FinishReason) {
        self.restart(entry);
        self.finished = Some(reason);
    }

    fn restart(&mut self, entry: &BatchEntry) {
        self.request = entry.request;
        self.prefix_len = entry.prefix_len();
        self.path.clear();
        self.emitted.clear();
        self.log_probs.clear();
        self.finished = None;
    }

    /// Drafts confirmed by the target in this step; the bonus token is not one.
    pub fn num_correct_drafts(&self) -> usize {
        self.path.len().saturating_sub(1)
    }

    /// Which KV rows of the request to keep, and where to move them.
    pub fn commit_plan(&self) -> CommitPlan<'_> {
        CommitPlan::new(self.prefix_len, &self.path)
    }
}

impl Default for Verdict {
    fn default() -> Self {
        Self::new()
    }
}
