//! What the target's logits decide: a request's first token, and which drafts stand.

use std::time::Instant;

use super::choices::MasksByNode;
use super::{FirstToken, Speculator};
use crate::backend::Backend;
use crate::error::{Error, Result, expect_len};
use crate::tree::NodeId;
use crate::verify::{BatchEntry, FinishReason, Origin, OutputLimits, RequestId, Verdict, VerifyBatch};

impl<B: Backend> Speculator<B> {
    /// Ends the prompt and chooses the first output token from the logits of its last token, `[vocab]`; `[columns]` of
    /// a [sharded](Self::new_sharded) one.
    ///
    /// # Errors
    /// *Misuse* when the request is unknown or has begun, the prompt is empty or shorter than the outputs said to
    /// be in it, or the logits have another length; *fault* when they give no token.
    pub fn begin(&mut self, id: RequestId, logits: B::View<'_>) -> Result<FirstToken> {
        self.begin_where(id, logits, None)
    }

    /// As [`begin`](Self::begin), with a bit for each token, `[vocab / 32, rounded up]`, lowest first: whether it
    /// may be the first.
    ///
    /// # Errors
    /// As there; *misuse* also when the mask has another length.
    pub fn begin_masked(&mut self, id: RequestId, logits: B::View<'_>, mask: &[u32]) -> Result<FirstToken> {
        self.begin_where(id, logits, Some(mask))
    }

    fn begin_where(
        &mut self,
        id: RequestId,
        logits: B::View<'_>,
        allowed: Option<&[u32]>,
    ) -> Result<FirstToken> {
        let chosen = self.choose_first(id, logits, allowed);
        self.combine(chosen, || fingerprint([id.0]))?;
        let token = self.keys[0].checked()?.token();
        let slot = self.slot(id)?;
        let request = Self::request(&mut self.requests, slot)?;
        let log_prob = request.options.log_probs;
        let log_prob = log_prob.map(|count| self.backend.log_prob(logits, token, count)).transpose()?;
        let text = &mut self.states[slot].text;
        let prompt_len = text.committed.len();
        request.prompt_len = Some(prompt_len);
        // So that no later step allocates.
        text.committed.reserve(request.options.max_new_tokens.min(self.config.max_len - prompt_len));
        text.committed.push(token);
        if request.has_drafter {
            self.states[slot].next_tokens.push(token);
        }
        let finished = if request.options.stop_tokens.contains(&token) {
            Some(FinishReason::Stop(token))
        } else {
            let num_remaining = request.num_remaining(prompt_len + 1, self.config.max_len);
            (num_remaining == 0).then_some(FinishReason::Length)
        };
        if finished.is_some() {
            self.retire(slot);
        }
        Ok(FirstToken { token, log_prob, finished })
    }

    /// The first token's key, from this rank's columns.
    fn choose_first(&mut self, id: RequestId, logits: B::View<'_>, allowed: Option<&[u32]>) -> Result<()> {
        let slot = self.slot(id)?;
        let request = Self::request(&mut self.requests, slot)?;
        if request.prompt_len.is_some() {
            return Err(Error::misuse("begin", "a request that has not begun", id.0));
        }
        let text = &mut self.states[slot].text;
        let prompt_len = text.committed.len();
        if prompt_len == 0 {
            return Err(Error::misuse("prompt", "at least 1 token", 0));
        }
        let num_prior = request.options.num_prior_outputs;
        text.output_start = prompt_len.checked_sub(num_prior).ok_or_else(|| {
            Error::misuse("prior outputs", format!("at most the prompt's {prompt_len} tokens"), num_prior)
        })?;
        expect_len("logits", self.columns.len(), B::view_len(logits))?;
        let row = std::iter::once((&text.sampler, text.context(&[], allowed)));
        self.backend.choose_all(&mut self.draft, logits, row, &mut self.keys)
    }

    /// Verifies a batch: `logits` is `[rows, vocab]` and `features` `[rows, feature_width]`, the target's for
    /// the rows of `batch`. Returns a verdict for each entry, in order. For a [sharded](Self::new_sharded) one,
    /// `logits` is `[rows, columns]`.
    ///
    /// A request that was cancelled meanwhile gets a verdict without tokens, one whose logits are broken a
    /// verdict with [`FinishReason::Fault`]; the others are not affected.
    ///
    /// # Errors
    /// *Misuse* when the batch is not the last proposal of each of its requests, was accepted before, was not
    /// made by [`propose`](Self::propose), or has another number of rows than the logits or features.
    pub fn accept(
        &mut self,
        batch: &VerifyBatch,
        logits: B::View<'_>,
        features: B::View<'_>,
    ) -> Result<&[Verdict]> {
        self.accept_where(batch, logits, features, None)
    }

    /// As [`accept`](Self::accept), for output that must follow a grammar.
    ///
    /// `masks(entry, node, mask)` is asked for nodes, parents before children: which tokens may follow `node`. The CPU
    /// backend asks for those that the walk reaches; a GPU, which chooses all rows at once, and one rank of several
    /// ask for all. It clears bits of `mask`, `[vocab / 32, rounded up]`, lowest bit first, all set before; or
    /// returns false if there is no restriction. A node without an allowed token ends its request with
    /// [`FinishReason::Fault`].
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn accept_masked(
        &mut self,
        batch: &VerifyBatch,
        logits: B::View<'_>,
        features: B::View<'_>,
        mut masks: impl FnMut(&BatchEntry, NodeId, &mut [u32]) -> bool,
    ) -> Result<&[Verdict]> {
        self.accept_where(batch, logits, features, Some(&mut masks))
    }

    fn accept_where(
        &mut self,
        batch: &VerifyBatch,
        logits: B::View<'_>,
        features: B::View<'_>,
        mut masks: Option<MasksByNode<'_>>,
    ) -> Result<&[Verdict]> {
        let started = Instant::now();
        // What may fail comes first: a failure leaves every request as it was.
        let chosen = self.choose_at_once(batch, logits, features, &mut masks);
        self.combine(chosen, || {
            let requests = batch.entries().iter().map(|entry| entry.request().0);
            let rows = batch.tokens().iter().zip(batch.positions());
            fingerprint(requests.chain(rows.map(|(token, at)| u64::from(*at) << 32 | u64::from(token.0))))
        })?;
        self.walk(batch, logits, masks)?;
        let kept = self.active.iter().zip(&self.verdicts).zip(batch.entries());
        let drafts = |slot: usize| self.requests[slot].as_ref().is_some_and(|request| request.has_drafter);
        let kept = kept.filter(|((slot, verdict), _)| verdict.finished.is_none() && drafts(**slot));
        let kept = kept.flat_map(|((slot, verdict), entry)| {
            verdict.path.iter().map(|node| (*slot, entry.rows().start + node.index()))
        });
        let kept = self.backend.keep_features(&mut self.draft, features, kept);
        if let (Err(error), Some(shard)) = (&kept, &self.shard) {
            shard.abandon(error); // the other ranks go on from here
        }
        kept?;
        self.commit(batch)?;
        self.times.host += started.elapsed();
        Ok(&self.verdicts)
    }

    /// Finds the slots of a batch and, where rows are not chosen as the walk reaches them, the keys of all rows from
    /// this rank's columns.
    fn choose_at_once(
        &mut self,
        batch: &VerifyBatch,
        logits: B::View<'_>,
        features: B::View<'_>,
        masks: &mut Option<MasksByNode<'_>>,
    ) -> Result<()> {
        expect_len("logits of the batch", batch.num_rows() * self.columns.len(), B::view_len(logits))?;
        expect_len("features of the batch", batch.num_rows() * self.feature_width, B::view_len(features))?;
        let Origin { speculator, step } = batch.origin();
        if speculator != self.id {
            return Err(Error::misuse("batch", "one that this speculator proposed", "another"));
        }
        self.active.clear();
        for entry in batch.entries() {
            // A slot's request is the entry's, unless that one is gone and its id was taken anew.
            let id = entry.request();
            let slot = self.slots.get(&id).copied().filter(|&slot| {
                self.requests[slot].as_ref().is_some_and(|request| request.admitted_step < step)
            });
            let Some(slot) = slot else {
                self.active.push(usize::MAX);
                continue;
            };
            let proposed = self.requests[slot].as_ref().and_then(|request| request.proposed_step);
            if proposed != Some(step) {
                let wanted = match proposed {
                    Some(last) => format!("the one of step {last}, the last proposal for request {}", id.0),
                    None => format!("an open proposal for request {}", id.0),
                };
                return Err(Error::misuse("batch", wanted, format_args!("step {step}")));
            }
            self.active.push(slot);
        }
        if !self.chooses_at_once() {
            return Ok(());
        }
        self.choices.prepare(batch, &self.active, self.vocab, masks.as_mut());
        let rows = self.choices.rows(batch, &self.active, &self.states);
        self.backend.choose_all(&mut self.draft, logits, rows, &mut self.keys)
    }

    /// Walks all trees.
    ///
    /// # Errors
    /// Those of the device. What is wrong with a request's logits is in its verdict.
    fn walk(
        &mut self,
        batch: &VerifyBatch,
        logits: B::View<'_>,
        mut masks: Option<MasksByNode<'_>>,
    ) -> Result<()> {
        let mut failure = None;
        let (width, is_chosen) = (self.columns.len(), self.chooses_at_once());
        self.verdicts.truncate(batch.entries().len());
        self.verdicts.resize_with(batch.entries().len(), Verdict::new);
        for place in 0..self.active.len() {
            let (entry, slot) = (&batch.entries()[place], self.active[place]);
            let verdict = &mut self.verdicts[place];
            let Some(request) = self.requests.get(slot).and_then(Option::as_ref) else {
                verdict.nothing(entry, FinishReason::Cancelled);
                continue;
            };
            let text = &self.states[slot].text;
            let limits = OutputLimits {
                stop_tokens: &request.options.stop_tokens,
                num_remaining: request.num_remaining(text.committed.len(), self.config.max_len),
            };
            let first_row = entry.rows().start;
            let (backend, draft, keys) = (&self.backend, &mut self.draft, &mut self.keys);
            let (path, mask) = (&mut self.path, &mut self.mask);
            path.clear();
            let mut log_probs = std::mem::take(&mut verdict.log_probs);
            log_probs.clear();
            verdict.walk(entry, limits, |node| {
                let row = first_row + node.index();
                let row_logits = || B::part(logits, row * width..(row + 1) * width);
                let key = if is_chosen {
                    keys[row]
                } else {
                    // The walk goes down: each node is a child of the one before.
                    if node != NodeId::ROOT {
                        path.push(entry.tree().token(node));
                    }
                    let is_masked = masks.as_mut().is_some_and(|masks| {
                        mask.fill(u32::MAX);
                        masks(entry, node, mask)
                    });
                    let context = text.context(path, is_masked.then_some(mask));
                    backend.choose_all(
                        draft,
                        row_logits(),
                        std::iter::once((&text.sampler, context)),
                        keys,
                    )?;
                    keys[0]
                };
                let token = key.checked()?.token();
                if let Some(count) = request.options.log_probs {
                    let log_prob = backend.log_prob(row_logits(), token, count);
                    log_probs.push(log_prob.inspect_err(|error| failure = Some(error.clone()))?);
                }
                Ok(token)
            });
            verdict.log_probs = log_probs;
            if let Some(error) = failure {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Enters the verdicts in the books.
    fn commit(&mut self, batch: &VerifyBatch) -> Result<()> {
        for place in 0..self.active.len() {
            let (entry, slot) = (&batch.entries()[place], self.active[place]);
            let verdict = &self.verdicts[place];
            let Some(request) = self.requests.get_mut(slot).and_then(Option::as_mut) else { continue };
            let state = &mut self.states[slot];
            request.proposed_step = None;
            state.text.committed.extend_from_slice(&verdict.emitted);
            request.stats.record(entry, verdict)?;
            self.stats.record(entry, verdict)?;
            if verdict.finished.is_some() {
                self.retire(slot);
            } else if request.has_drafter {
                state.next_tokens.extend_from_slice(&verdict.emitted);
            }
        }
        Ok(())
    }

    /// Whether the keys of all rows are there before the walk.
    fn chooses_at_once(&self) -> bool {
        B::CHOOSES_AT_ONCE || self.shard.is_some()
    }

    /// Makes keys from this rank's columns those of whole rows. What kept this rank from choosing is the error of all
    /// ranks, and so is another `fingerprint` of what the rows are.
    fn combine(&mut self, chosen: Result<()>, fingerprint: impl FnOnce() -> u64) -> Result<()> {
        match &mut self.shard {
            None => chosen,
            Some(shard) => shard.combine_prepared(chosen, &mut self.keys, fingerprint()),
        }
    }
}

/// FNV-1a over words.
fn fingerprint(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3))
}
