//! Where the target's tokens of a whole batch are drawn, for backends that draw them together.

use crate::backend::DraftState;
use crate::sampling::{Sampler, SamplingContext};
use crate::tree::{NodeId, TokenId};
use crate::verify::{BatchEntry, VerifyBatch};

/// Asked which tokens may follow a node: clears bits of the mask, or returns false.
pub(super) type MasksByNode<'a> = &'a mut dyn FnMut(&BatchEntry, NodeId, &mut [u32]) -> bool;

/// Paths and masks of all rows of a batch. Keeps its memory.
#[derive(Debug, Default)]
pub(super) struct Choices {
    /// The drafts on the way to each row's node, one row's after another's.
    paths: Vec<TokenId>,
    rows: Vec<Row>,
    /// Bits of allowed tokens, `[masked rows, vocab / 32, rounded up]`.
    masks: Vec<u32>,
    mask_words: usize,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    entry: usize,
    path_start: usize,
    path_len: usize,
    mask: Option<usize>,
}

impl Choices {
    /// Collects what the rows' choices depend on beside their logits. `slots` are those of the batch's entries: no
    /// masks are asked for of a request that is gone.
    pub(super) fn prepare(
        &mut self,
        batch: &VerifyBatch,
        slots: &[usize],
        vocab: usize,
        mut masks: Option<&mut MasksByNode<'_>>,
    ) {
        self.paths.clear();
        self.rows.clear();
        self.masks.clear();
        self.mask_words = vocab.div_ceil(32);
        for (place, entry) in batch.entries().iter().enumerate() {
            let tree = entry.tree();
            for node in tree.nodes() {
                let path_start = self.paths.len();
                let ancestors = tree.ancestors(node);
                // In order from the root, which is no draft.
                self.paths.extend(ancestors.iter().skip(1).map(|index| tree.tokens()[index]));
                let mask = masks.as_mut().filter(|_| slots[place] != usize::MAX).and_then(|masks| {
                    let start = self.masks.len();
                    self.masks.resize(start + self.mask_words, u32::MAX);
                    let is_masked = masks(entry, node, &mut self.masks[start..]);
                    if !is_masked {
                        self.masks.truncate(start);
                    }
                    is_masked.then_some(start)
                });
                let path_len = self.paths.len() - path_start;
                self.rows.push(Row { entry: place, path_start, path_len, mask });
            }
        }
    }

    /// The rows, in order. `slots` are those of the batch's entries; rows of a request that is gone are drawn
    /// plainly, and nobody looks at them.
    pub(super) fn rows<'a>(
        &'a self,
        batch: &'a VerifyBatch,
        slots: &'a [usize],
        states: &'a [DraftState],
    ) -> impl ExactSizeIterator<Item = (&'a Sampler, SamplingContext<'a>)> {
        debug_assert_eq!(self.rows.len(), batch.num_rows());
        self.rows.iter().map(move |row| {
            let text = &states[slots[row.entry].min(states.len() - 1)].text;
            let path = &self.paths[row.path_start..][..row.path_len];
            let allowed = row.mask.map(|start| &self.masks[start..][..self.mask_words]);
            (&text.sampler, text.context(path, allowed))
        })
    }
}
