//! The EAGLE-3 head on the CPU: one Llama layer whose attention reads `[norm(embedding), norm(feature)]`.

use std::ops::Range;

use super::ops::{log_sum_exp, top_k};
use super::sample::couple;
use super::{AttentionRow, Cpu, Embedding, KvCache, KvShape, PackedLinear, Rope, silu_mul};
use crate::backend::{DraftLimits, DraftState, MasksBySlot};
use crate::draft::{DraftVocab, Eagle3Checkpoint, Eagle3Config, Matrix, Weights};
use crate::error::{Error, Result};
use crate::norm::RmsNorm;
use crate::sampling::gumbel_row;
use crate::tree::{DraftTree, NodeSet, TokenId};

/// Pairs that go through the head together while a prompt comes in.
const PAIR_ROWS: usize = 64;

/// The head's weights, KV cache and working memory.
#[derive(Debug)]
pub struct CpuHead {
    config: Eagle3Config,
    vocab: DraftVocab,
    /// The target's tokens whose logits are chosen from.
    columns: Range<usize>,
    embedding: Embedding,
    layers: Layers,
    rope: Rope,
    cache: KvCache,
    /// Target features that wait, by slot, `[waiting, feature_width]`.
    waiting: Vec<Vec<f32>>,
    work: Work,
}

#[derive(Debug)]
struct Layers {
    norm: RmsNorm,
    fc: PackedLinear,
    query: PackedLinear,
    key_value: PackedLinear,
    attention_output: PackedLinear,
    gate_up: PackedLinear,
    down: PackedLinear,
    lm_head: PackedLinear,
    input_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    post_attention_norm: Vec<f32>,
    final_norm: Vec<f32>,
}

/// One row of the head's forward pass.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Index into the draft states.
    slot: usize,
    /// The token after the feature.
    token: TokenId,
    /// RoPE position: that of the feature.
    position: usize,
    /// KV row of the request that it writes.
    kv_row: usize,
    /// It sees so many KV rows of the request, and of those that follow the ones in `nodes`.
    prefix_len: usize,
    nodes: NodeSet,
}

/// Rows on their way into the layer.
#[derive(Debug, Default)]
struct Inputs {
    rows: Vec<Row>,
    /// `[rows, hidden]`: `fc` of target features, or the parent's output. It is the layer's residual too.
    features: Vec<f32>,
    /// `[rows, 2 hidden]`: `[norm(embedding), norm(feature)]`.
    normed: Vec<f32>,
}

/// Buffers that keep their memory from step to step.
#[derive(Debug, Default)]
struct Work {
    /// Pairs of accepted tokens and target features, a chunk at a time.
    pairs: Inputs,
    target_features: Vec<f32>, // [pairs, feature_width]
    /// The rows whose children are drafted next.
    frontier: Inputs,
    query: Vec<f32>,
    key_value: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    slots: Vec<usize>,
    attention: Vec<f32>,
    outputs: Vec<f32>, // [rows, hidden]: the layer's output before the final norm
    projected: Vec<f32>,
    normed: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    logits: Vec<f32>,
    noise: Vec<f32>, // [draft_vocab]
    path: Vec<TokenId>,
    mask: Vec<u32>,
    best: Vec<(u32, f32)>,
}

impl CpuHead {
    pub(super) fn new(
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<Embedding>,
        limits: DraftLimits,
        columns: &Range<usize>,
    ) -> Result<Self> {
        let config = checkpoint.config.clone();
        let embedding = match &checkpoint.embedding {
            Some(own) => Embedding::from_matrix(own)?,
            None => embedding.ok_or_else(|| {
                Error::misuse("embedding table", "the target's, as the head has none", "none")
            })?,
        };
        config.expect_table(embedding.vocab(), embedding.hidden())?;
        let shape = KvShape { num_layers: 1, num_kv_heads: config.num_kv_heads, head_dim: config.head_dim };
        let num_positions = limits.max_len + DraftTree::MAX_NODES;
        Ok(Self {
            vocab: checkpoint.vocab.clone(),
            columns: columns.clone(),
            embedding,
            layers: Layers {
                norm: RmsNorm::new(config.hidden, config.rms_epsilon)?,
                fc: pack(&[&checkpoint.fc])?,
                query: pack(&[&checkpoint.query])?,
                key_value: pack(&[&checkpoint.key, &checkpoint.value])?,
                attention_output: pack(&[&checkpoint.attention_output])?,
                gate_up: pack(&[&checkpoint.gate, &checkpoint.up])?,
                down: pack(&[&checkpoint.down])?,
                lm_head: pack(&[&checkpoint.lm_head])?,
                input_norm: checkpoint.input_norm.clone(),
                hidden_norm: checkpoint.hidden_norm.clone(),
                post_attention_norm: checkpoint.post_attention_norm.clone(),
                final_norm: checkpoint.final_norm.clone(),
            },
            rope: Rope::new(config.head_dim, config.rope_theta, num_positions)?,
            cache: KvCache::new(shape, limits.num_kv_pages)?,
            waiting: vec![Vec::new(); limits.max_requests],
            work: Work::default(),
            config,
        })
    }

    pub(super) fn keep_feature(&mut self, slot: usize, features: &[f32], row: usize) {
        let width = self.config.feature_width();
        self.waiting[slot].extend_from_slice(&features[row * width..][..width]);
    }

    pub(super) fn forget_features(&mut self, slot: usize, num_kept: usize) {
        self.waiting[slot].truncate(num_kept * self.config.feature_width());
    }

    /// The tokens of the target's logits, and how many its vocabulary has.
    pub(super) fn target_columns(&self) -> (Range<usize>, usize) {
        (self.columns.clone(), self.config.target.vocab)
    }

    pub(crate) fn cache(&self) -> &KvCache {
        &self.cache
    }

    #[cfg(test)]
    pub(super) fn feature_width(&self) -> usize {
        self.config.feature_width()
    }

    /// The layer's outputs for the rows that ran last, `[rows, hidden]`.
    #[cfg(test)]
    pub(super) fn outputs(&self) -> &[f32] {
        &self.work.outputs
    }

    pub(super) fn draft(
        &mut self,
        cpu: &Cpu,
        states: &mut [DraftState],
        active: &[usize],
        mut masks: Option<MasksBySlot<'_>>,
    ) -> Result<()> {
        self.extend(cpu, states, active)?;
        for level in 1.. {
            if self.work.frontier.rows.is_empty() {
                break;
            }
            self.forward(cpu, states)?;
            self.propose(states, level, &mut masks);
            self.next_frontier(states, level);
            let Self { layers, embedding, rope, cache, work, .. } = self;
            layers.embed(embedding, &mut work.frontier)?;
            let frontier = std::mem::take(&mut work.frontier);
            layers.write_keys(cpu, rope, cache, &frontier, states, work)?;
            work.frontier = frontier;
        }
        Ok(())
    }

    /// Feeds the pairs that wait, and leaves the last pair of each request that drafts as the frontier.
    ///
    /// With a single layer, a pair's keys and values depend on the pair alone, so only the last pair, whose
    /// output starts the tree, needs the rest of the layer.
    fn extend(&mut self, cpu: &Cpu, states: &mut [DraftState], active: &[usize]) -> Result<()> {
        let (hidden, width) = (self.config.hidden, self.config.feature_width());
        let Self { layers, embedding, rope, cache, waiting, work, .. } = self;
        let mut frontier = std::mem::take(&mut work.frontier);
        let mut pairs = std::mem::take(&mut work.pairs);
        frontier.clear();
        // Pairs of all requests as one sequence: (slot, which of its pairs).
        let states_ref = &*states;
        let pairs_of = |slot: usize| {
            let DraftState { next_tokens, first_is_written, .. } = &states_ref[slot];
            // A pair that has run before runs again only to start the tree.
            let skipped = usize::from(*first_is_written && next_tokens.len() > 1);
            (skipped..next_tokens.len()).map(move |i| (slot, i))
        };
        let mut rest = active.iter().flat_map(|&slot| pairs_of(slot));
        loop {
            pairs.clear();
            work.target_features.clear();
            for (slot, i) in rest.by_ref().take(PAIR_ROWS) {
                let state = &states_ref[slot];
                let kv_row = state.table.len() + i;
                work.target_features.extend_from_slice(&waiting[slot][i * width..][..width]);
                pairs.rows.push(Row {
                    slot,
                    token: state.next_tokens[i],
                    position: kv_row,
                    kv_row,
                    prefix_len: kv_row + 1,
                    nodes: NodeSet::default(),
                });
            }
            if pairs.rows.is_empty() {
                break;
            }
            pairs.features.resize(pairs.rows.len() * hidden, 0.0);
            layers.fc.forward(cpu, &work.target_features, &mut pairs.features)?;
            layers.embed(embedding, &mut pairs)?;
            layers.write_keys(cpu, rope, cache, &pairs, states_ref, work)?;
            for (i, row) in pairs.rows.iter().enumerate() {
                let state = &states_ref[row.slot];
                let last = row.kv_row + 1 == state.table.len() + state.next_tokens.len();
                if last && state.budget.depth() > 0 {
                    frontier.rows.push(*row);
                    frontier.features.extend_from_slice(&pairs.features[i * hidden..][..hidden]);
                    frontier.normed.extend_from_slice(&pairs.normed[i * 2 * hidden..][..2 * hidden]);
                }
            }
        }
        (work.frontier, work.pairs) = (frontier, pairs);
        for &slot in active {
            let num_committed = states[slot].commit_pairs();
            waiting[slot].drain(..num_committed * width);
        }
        Ok(())
    }

    /// The layer and the draft logits of the frontier.
    fn forward(&mut self, cpu: &Cpu, states: &[DraftState]) -> Result<()> {
        let Eagle3Config { hidden, intermediate, num_heads, head_dim, draft_vocab, .. } = self.config;
        let Self { layers, rope, cache, work, .. } = self;
        let rows = &work.frontier.rows;
        let count = rows.len();
        let query_width = num_heads * head_dim;
        work.query.resize(count * query_width, 0.0);
        layers.query.forward(cpu, &work.frontier.normed, &mut work.query)?;
        for (row, query) in rows.iter().zip(work.query.chunks_exact_mut(query_width)) {
            rope.turn(row.position, query)?;
        }
        let visible = rows.iter().map(|row| AttentionRow {
            table: &states[row.slot].table,
            prefix_len: row.prefix_len,
            nodes: row.nodes,
        });
        let visible: Vec<AttentionRow<'_>> = visible.collect();
        work.attention.resize(count * query_width, 0.0);
        let scale = 1.0 / (head_dim as f32).sqrt();
        cache.attend(cpu, 0, scale, &work.query, &visible, &mut work.attention)?;

        work.projected.resize(count * hidden, 0.0);
        layers.attention_output.forward(cpu, &work.attention, &mut work.projected)?;
        work.outputs.clear();
        work.outputs.extend(work.frontier.features.iter().zip(&work.projected).map(|(a, b)| a + b));
        work.normed.resize(count * hidden, 0.0);
        layers.norm.apply(&work.outputs, &layers.post_attention_norm, &mut work.normed)?;
        work.gate_up.resize(count * 2 * intermediate, 0.0);
        layers.gate_up.forward(cpu, &work.normed, &mut work.gate_up)?;
        work.activated.resize(count * intermediate, 0.0);
        silu_mul(cpu, &work.gate_up, intermediate, &mut work.activated)?;
        layers.down.forward(cpu, &work.activated, &mut work.projected)?;
        for (output, projected) in work.outputs.iter_mut().zip(&work.projected) {
            *output += projected;
        }
        layers.norm.apply(&work.outputs, &layers.final_norm, &mut work.normed)?;
        work.logits.resize(count * draft_vocab, 0.0);
        layers.lm_head.forward(cpu, &work.normed, &mut work.logits)
    }

    /// Gives each row's best children, nodes of level `level`, to its request's pool.
    fn propose(&mut self, states: &mut [DraftState], level: usize, masks: &mut Option<MasksBySlot<'_>>) {
        let Self { work, vocab, config, .. } = self;
        work.noise.resize(config.draft_vocab, 0.0);
        let mut logits = work.logits.chunks_exact_mut(config.draft_vocab);
        for rows in work.frontier.rows.chunk_by(|a, b| a.slot == b.slot) {
            let slot = rows[0].slot;
            let DraftState { pool, budget, text, .. } = &mut states[slot];
            let params = text.sampler.params();
            if params.temperature > 0.0 && text.coupling.noise_scale > 0.0 {
                // One row of noise for all nodes of a level: it belongs to the position.
                let position = (text.committed.len() + level - 1) as u32;
                gumbel_row(params.seed, position, vocab.tokens(), &mut work.noise);
            }
            for (rank, logits) in logits.by_ref().take(rows.len()).enumerate() {
                pool.path(rank, &mut work.path);
                let is_masked = masks.as_mut().is_some_and(|masks| {
                    work.mask.clear();
                    work.mask.resize(config.target.vocab.div_ceil(32), u32::MAX);
                    masks(slot, &work.path, &mut work.mask)
                });
                let context = text.context(&work.path, is_masked.then_some(&work.mask));
                let coupled =
                    couple(&text.sampler, text.coupling, logits, vocab.tokens(), &work.noise, context);
                let (largest, ln_sum) = log_sum_exp(logits);
                if coupled.is_err() || ln_sum.is_nan() {
                    continue; // no drafts here: the target will say what is wrong with its features
                }
                top_k(logits, budget.width(), &mut work.best);
                let children = work
                    .best
                    .iter()
                    .map(|&(draft, logit)| (vocab.tokens()[draft as usize], (logit - largest) - ln_sum));
                pool.expand(rank, children);
            }
        }
    }

    /// Makes the frontier of level `level`: its tokens, with their parents' outputs as features.
    fn next_frontier(&mut self, states: &mut [DraftState], level: usize) {
        let hidden = self.config.hidden;
        let Work { frontier, pairs, outputs, .. } = &mut self.work;
        std::mem::swap(frontier, pairs); // `pairs` holds the old frontier now
        frontier.clear();
        let mut first = 0;
        for rows in pairs.rows.chunk_by(|a, b| a.slot == b.slot) {
            let slot = rows[0].slot;
            let state = &mut states[slot];
            if level < state.budget.depth() {
                let stable = state.table.len() + 1; // with the last pair
                state.pool.advance(state.budget.width());
                for node in state.pool.frontier() {
                    frontier.rows.push(Row {
                        slot,
                        token: state.pool.token(node.candidate),
                        position: stable + level - 1,
                        kv_row: stable + node.row,
                        prefix_len: stable,
                        nodes: node.rows,
                    });
                    let parent = (first + node.parent_rank) * hidden;
                    frontier.features.extend_from_slice(&outputs[parent..][..hidden]);
                }
            }
            first += rows.len();
        }
    }
}

impl Inputs {
    fn clear(&mut self) {
        self.rows.clear();
        self.features.clear();
        self.normed.clear();
    }
}

impl Layers {
    /// Fills `normed` from the rows' tokens and features.
    fn embed(&self, embedding: &Embedding, inputs: &mut Inputs) -> Result<()> {
        let hidden = embedding.hidden();
        inputs.normed.resize(inputs.rows.len() * 2 * hidden, 0.0);
        let features = inputs.features.chunks_exact(hidden);
        let normed = inputs.normed.chunks_exact_mut(2 * hidden);
        for ((row, feature), normed) in inputs.rows.iter().zip(features).zip(normed) {
            let (token_half, feature_half) = normed.split_at_mut(hidden);
            // The feature's half is room for the plain embedding until the feature is written there.
            embedding.copy_row(row.token, feature_half)?;
            self.norm.row(feature_half, &self.input_norm, token_half);
            self.norm.row(feature, &self.hidden_norm, feature_half);
        }
        Ok(())
    }

    /// Writes the rows' keys and values.
    fn write_keys(
        &self,
        cpu: &Cpu,
        rope: &Rope,
        cache: &mut KvCache,
        inputs: &Inputs,
        states: &[DraftState],
        work: &mut Work,
    ) -> Result<()> {
        let kv_width = self.key_value.num_outputs() / 2;
        work.key_value.resize(inputs.rows.len() * 2 * kv_width, 0.0);
        self.key_value.forward(cpu, &inputs.normed, &mut work.key_value)?;
        work.keys.clear();
        work.values.clear();
        work.slots.clear();
        for (row, key_value) in inputs.rows.iter().zip(work.key_value.chunks_exact_mut(2 * kv_width)) {
            let (key, value) = key_value.split_at_mut(kv_width);
            rope.turn(row.position, key)?;
            work.keys.extend_from_slice(key);
            work.values.extend_from_slice(value);
            work.slots.push(states[row.slot].table.slot(row.kv_row));
        }
        cache.write(0, &work.slots, &work.keys, &work.values)
    }
}

/// Layers over the same input, in bf16 if all are, or else in f32.
fn pack(parts: &[&Matrix]) -> Result<PackedLinear> {
    let in_bf16 = parts.iter().map(|part| match &part.weights {
        Weights::Bf16(weights) => Some(weights.as_slice()),
        Weights::F16(_) | Weights::F32(_) => None,
    });
    let columns = parts[0].columns;
    match in_bf16.collect::<Option<Vec<_>>>() {
        Some(parts) => PackedLinear::stack(&parts, columns),
        None => {
            let widened: Vec<_> = parts.iter().map(|part| part.weights.to_f32()).collect();
            let parts: Vec<&[f32]> = widened.iter().map(|part| &part[..]).collect();
            PackedLinear::stack(&parts, columns)
        }
    }
}
