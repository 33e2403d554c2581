//! The target: a Llama forward pass over candle tensors, for any mix of rows; and the pass of one rank of several.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use eagle_verify::backend::cpu::{
    AttentionRow, Cpu, Embedding, KvCache, KvShape, PackedLinear, Rope, silu_mul,
};
use eagle_verify::comm::{Rank, Rendezvous};
use eagle_verify::{CommitPlan, NodeSet, PagePool, PageTable, RmsNorm, TargetShape, TokenId, VerifyBatch};

use super::ops;
use super::shard::{self, Residual, Shard};
use super::tokenizer::Tokenizer;
use super::weights::{Gguf, LlamaShape};

/// The target model with its KV cache, or a rank's part of both.
pub struct Target {
    pub cpu: Cpu,
    pub shape: LlamaShape,
    pub shard: Shard,
    pub tokenizer: Tokenizer,
    /// What this rank shares with the others, once it has met them.
    residual: Option<Residual>,
    pool: PagePool,
    attention: Attention,
    embedding: Embedding,
    norm: RmsNorm,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    lm_head: PackedLinear,
    /// Layers whose outputs are the features.
    feature_layers: Vec<usize>,
    scratch: Vec<f32>,
    logits: Vec<f32>,
    features: Vec<f32>,
}

struct Layer {
    attention_norm: Vec<f32>,
    /// None on a rank without attention heads.
    attention: Option<AttentionWeights>,
    mlp_norm: Vec<f32>,
    gate_up: PackedLinear,
    down: PackedLinear,
}

struct AttentionWeights {
    query_key_value: PackedLinear,
    output: PackedLinear,
}

/// The rows of one forward pass. Each belongs to a request and sees some of that request's keys.
pub struct Pass<'a> {
    tokens: Vec<TokenId>,
    positions: Vec<usize>,
    /// Where each row's keys and values go.
    slots: Vec<usize>,
    attention: Vec<AttentionRow<'a>>,
    /// Rows whose logits are wanted.
    logits_of: Vec<u32>,
}

impl<'a> Pass<'a> {
    /// A chunk of a prompt after `start` committed tokens; logits of its last token.
    pub fn prompt(table: &'a PageTable, start: usize, tokens: &[TokenId]) -> Self {
        let positions = start..start + tokens.len();
        let row = |position| AttentionRow { table, prefix_len: position + 1, nodes: NodeSet::default() };
        Self {
            tokens: tokens.to_vec(),
            slots: positions.clone().map(|row| table.slot(row)).collect(),
            attention: positions.clone().map(row).collect(),
            positions: positions.collect(),
            logits_of: vec![tokens.len() as u32 - 1],
        }
    }

    /// One token for each request: plain decoding.
    pub fn decode(requests: impl Iterator<Item = (&'a PageTable, TokenId)>) -> Self {
        let mut pass = Self::empty();
        for (table, token) in requests {
            let prefix = Self::prompt(table, table.len(), &[token]);
            pass.logits_of.push(pass.tokens.len() as u32);
            pass.tokens.push(token);
            pass.positions.extend(prefix.positions);
            pass.slots.extend(prefix.slots);
            pass.attention.extend(prefix.attention);
        }
        pass
    }

    /// All nodes of all trees of a batch: each sees its request's committed tokens, its ancestors and itself.
    pub fn verify(batch: &VerifyBatch, tables: impl Iterator<Item = &'a PageTable>) -> Self {
        let mut pass = Self::empty();
        for (entry, table) in batch.entries().iter().zip(tables) {
            let (tree, prefix_len) = (entry.tree(), entry.prefix_len());
            for node in tree.nodes() {
                pass.slots.push(table.slot(prefix_len + node.index()));
                let nodes = *tree.ancestors(node);
                pass.attention.push(AttentionRow { table, prefix_len, nodes });
            }
        }
        pass.tokens.extend_from_slice(batch.tokens());
        pass.positions.extend(batch.positions().iter().map(|&position| position as usize));
        pass.logits_of.extend(0..batch.num_rows() as u32);
        pass
    }

    fn empty() -> Self {
        Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            slots: Vec::new(),
            attention: Vec::new(),
            logits_of: Vec::new(),
        }
    }
}

/// What a forward pass gives.
pub struct Answer<'a> {
    /// `[wanted rows, vocab]`; of a rank, `[wanted rows, its columns]`.
    pub logits: &'a [f32],
    /// `[rows, feature layers * hidden]`: the residual stream after each feature layer.
    pub features: &'a [f32],
}

impl Target {
    /// Loads the model, a part of it for each of `cpus`, with room for `max_requests` requests of `max_len` tokens and
    /// their trees. The only part is all of it; the ranks that have several run them together.
    pub fn load(path: &Path, cpus: &[Cpu], max_requests: usize, max_len: usize) -> Result<Vec<Self>> {
        let mut gguf = Gguf::open(path)?;
        let shape = gguf.shape()?;
        ensure!(max_len <= shape.context, "the model's context is {}, not {max_len}", shape.context);
        let LlamaShape { hidden, head_dim, vocab, .. } = shape;
        let shards: Vec<Shard> = (0..cpus.len()).map(|rank| Shard::new(&shape, rank, cpus.len())).collect();
        let mut layers: Vec<Vec<Layer>> = shards.iter().map(|_| Vec::new()).collect();
        for i in 0..shape.num_layers {
            let parts = Layer::load(&mut gguf, i, &shape, &shards)?;
            layers.iter_mut().zip(parts).for_each(|(layers, part)| layers.push(part));
        }
        let table = gguf.matrix("token_embd.weight", vocab, hidden)?;
        let output_norm = gguf.vector("output_norm.weight", hidden)?;
        let num_rows = max_len + eagle_verify::DraftTree::MAX_NODES;
        let num_pages = max_requests * num_rows.div_ceil(KvCache::PAGE_SIZE);
        let embedding = Embedding::f32(Arc::from(table.as_slice()), hidden)?;
        let ranks = cpus.iter().zip(shards).zip(layers).map(|((cpu, shard), layers)| {
            let num_kv_heads = shard.kv_heads.len().max(1); // where there is none, nothing is written
            let cache =
                KvCache::new(KvShape { num_layers: shape.num_layers, num_kv_heads, head_dim }, num_pages)?;
            let rope = Rope::new(head_dim, shape.rope_theta, num_rows)?;
            // SmolLM2 ties it to the embedding.
            let lm_head = shard::rows(&table, hidden, shard.vocab.clone());
            Ok(Self {
                attention: Attention::new(
                    cache,
                    rope,
                    shape.num_heads / shape.num_kv_heads * num_kv_heads,
                    head_dim,
                ),
                scratch: Vec::new(),
                logits: Vec::new(),
                features: Vec::new(),
                cpu: cpu.clone(),
                shape,
                tokenizer: Tokenizer::from_gguf(&gguf)?,
                residual: None,
                pool: PagePool::new(KvCache::PAGE_SIZE, num_pages)?,
                norm: RmsNorm::new(hidden, shape.rms_epsilon)?,
                layers,
                output_norm: output_norm.clone(),
                lm_head: PackedLinear::new(lm_head, shard.vocab.len(), hidden)?,
                embedding: embedding.clone(),
                feature_layers: Vec::new(),
                shard,
            })
        });
        ranks.collect()
    }

    /// Meets the other ranks' parts: from here on, all make the same passes.
    pub fn join(&mut self, rendezvous: &Rendezvous, rank: Rank) -> eagle_verify::Result<()> {
        self.residual = Some(Residual::join(&self.cpu, self.norm, rendezvous, rank)?);
        Ok(())
    }

    /// What a head for this model must fit to.
    pub fn target_shape(&self) -> TargetShape {
        let LlamaShape { hidden, num_layers, vocab, .. } = self.shape;
        TargetShape { hidden, num_layers, vocab }
    }

    /// The embedding table, for a head without its own.
    pub fn embedding(&self) -> Embedding {
        self.embedding.clone()
    }

    /// Which layers' outputs a pass returns as features.
    pub fn capture(&mut self, feature_layers: &[usize]) {
        self.feature_layers = feature_layers.to_vec();
    }

    /// An empty KV table for a new request.
    pub fn new_table(&self) -> PageTable {
        self.pool.table()
    }

    /// Moves the KV rows that a verdict keeps.
    pub fn commit(&mut self, table: &PageTable, plan: CommitPlan<'_>) -> Result<()> {
        if !self.shard.kv_heads.is_empty() {
            self.attention.cache.commit(table, plan)?;
        }
        Ok(())
    }

    /// Runs the model on some rows.
    pub fn forward(&mut self, pass: &Pass<'_>) -> Result<Answer<'_>> {
        let (rows, hidden) = (pass.tokens.len(), self.shape.hidden);
        let mut embedded = vec![0.0; rows * hidden];
        for (token, row) in pass.tokens.iter().zip(embedded.chunks_exact_mut(hidden)) {
            self.embedding.copy_row(*token, row)?;
        }
        if self.residual.is_some() {
            return self.forward_with_others(pass, embedded);
        }
        let Self { cpu, norm, .. } = self;
        let mut x = Tensor::from_vec(embedded, (rows, hidden), &Device::Cpu)?;
        let feature_width = self.feature_layers.len() * hidden;
        self.features.resize(rows * feature_width, 0.0);
        for (i, layer) in self.layers.iter().enumerate() {
            let normed = ops::rms_norm(norm, &layer.attention_norm, &x)?;
            let weights = layer.attention.as_ref().context("a model without attention heads")?;
            let attended = ops::map_rows(&normed, "tree-attention", self.attention.query_width, |x, y| {
                self.attention.forward(cpu, i, &weights.query_key_value, pass, x, y)
            })?;
            x = ops::add_linear(cpu, &x, &weights.output, &attended)?;
            let normed = ops::rms_norm(norm, &layer.mlp_norm, &x)?;
            let activated = ops::gated(cpu, &layer.gate_up, &normed, &mut self.scratch)?;
            x = ops::add_linear(cpu, &x, &layer.down, &activated)?;
            if let Some(place) = self.feature_layers.iter().position(|&layer| layer == i) {
                let rows = self.features.chunks_exact_mut(feature_width);
                ops::with_slice(&x, |x| {
                    for (features, x) in rows.zip(x.chunks_exact(hidden)) {
                        features[place * hidden..][..hidden].copy_from_slice(x);
                    }
                })?;
            }
        }
        let wanted = Tensor::new(pass.logits_of.as_slice(), &Device::Cpu)?;
        let normed = ops::rms_norm(norm, &self.output_norm, &x.index_select(&wanted, 0)?)?;
        self.logits.resize(pass.logits_of.len() * self.shape.vocab, 0.0);
        ops::with_slice(&normed, |normed| self.lm_head.forward(cpu, normed, &mut self.logits))??;
        Ok(Answer { logits: &self.logits, features: &self.features })
    }

    /// The pass of one rank of several: its part of every half of a layer, then the sum with the others'. Here on
    /// plain slices, since `Group` takes them.
    fn forward_with_others(&mut self, pass: &Pass<'_>, embedded: Vec<f32>) -> Result<Answer<'_>> {
        let Self { cpu, layers, attention, scratch, features, logits, shard, .. } = self;
        let residual = self.residual.as_mut().context("a rank that has not met the others")?;
        let (num_rows, hidden) = (pass.tokens.len(), self.shape.hidden);
        let feature_width = self.feature_layers.len() * hidden;
        features.resize(num_rows * feature_width, 0.0);
        let mut attended = vec![0.0; num_rows * attention.query_width];
        let mut activated = vec![0.0; num_rows * shard.intermediate.len()];
        // One rank brings the embedding.
        let mut partial = embedded;
        if shard.vocab.start > 0 {
            partial.fill(0.0);
        }
        residual.restart();
        residual.add(&partial, &layers[0].attention_norm)?;
        for (i, layer) in layers.iter().enumerate() {
            partial.fill(0.0);
            if let Some(weights) = &layer.attention {
                let query_key_value = &weights.query_key_value;
                attention.forward(cpu, i, query_key_value, pass, &residual.input, &mut attended)?;
                weights.output.forward(cpu, &attended, &mut partial)?;
            }
            residual.add(&partial, &layer.mlp_norm)?;
            scratch.resize(2 * activated.len(), 0.0);
            layer.gate_up.forward(cpu, &residual.input, scratch)?;
            silu_mul(cpu, scratch, shard.intermediate.len(), &mut activated)?;
            layer.down.forward(cpu, &activated, &mut partial)?;
            let next_norm = layers.get(i + 1).map_or(&self.output_norm, |layer| &layer.attention_norm);
            residual.add(&partial, next_norm)?;
            if let Some(place) = self.feature_layers.iter().position(|&layer| layer == i) {
                for (features, row) in features.chunks_exact_mut(feature_width).zip(residual.rows()) {
                    let features = &mut features[place * hidden..][..hidden];
                    features.iter_mut().zip(row).for_each(|(feature, x)| *feature = x.to_f32());
                }
            }
        }
        let wanted = pass.logits_of.iter().map(|&row| row as usize);
        let normed: Vec<f32> =
            wanted.flat_map(|row| shard::rows(&residual.input, hidden, row..row + 1)).copied().collect();
        logits.resize(pass.logits_of.len() * shard.vocab.len(), 0.0);
        self.lm_head.forward(cpu, &normed, logits)?;
        Ok(Answer { logits, features })
    }
}

impl Layer {
    /// Layer `i`, cut into its shards.
    fn load(gguf: &mut Gguf, i: usize, shape: &LlamaShape, shards: &[Shard]) -> Result<Vec<Self>> {
        let LlamaShape { hidden, intermediate, num_heads, num_kv_heads, head_dim, .. } = *shape;
        let (query_width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
        let name = |part: &str| format!("blk.{i}.{part}.weight");
        let query = gguf.rotary_matrix(&name("attn_q"), query_width, hidden, head_dim)?;
        let key = gguf.rotary_matrix(&name("attn_k"), kv_width, hidden, head_dim)?;
        let value = gguf.matrix(&name("attn_v"), kv_width, hidden)?;
        let output = gguf.matrix(&name("attn_output"), hidden, query_width)?;
        let gate = gguf.matrix(&name("ffn_gate"), intermediate, hidden)?;
        let up = gguf.matrix(&name("ffn_up"), intermediate, hidden)?;
        let down = gguf.matrix(&name("ffn_down"), hidden, intermediate)?;
        let attention_norm = gguf.vector(&name("attn_norm"), hidden)?;
        let mlp_norm = gguf.vector(&name("ffn_norm"), hidden)?;
        let part = |shard: &Shard| {
            let scaled = |factor| shard.kv_heads.start * factor..shard.kv_heads.end * factor;
            let (keys, queries) = (scaled(head_dim), scaled(num_heads / num_kv_heads * head_dim));
            let rows = |matrix, range| shard::rows(matrix, hidden, range);
            let weights = || -> Result<AttentionWeights> {
                let parts =
                    [rows(&query, queries.clone()), rows(&key, keys.clone()), rows(&value, keys.clone())];
                let output = shard::columns(&output, query_width, queries.clone());
                Ok(AttentionWeights {
                    query_key_value: PackedLinear::stack(&parts, hidden)?,
                    output: PackedLinear::new(&output, hidden, queries.len())?,
                })
            };
            let columns = shard.intermediate.clone();
            let down = shard::columns(&down, intermediate, columns.clone());
            Ok(Self {
                attention: (!shard.kv_heads.is_empty()).then(weights).transpose()?,
                attention_norm: attention_norm.clone(),
                mlp_norm: mlp_norm.clone(),
                gate_up: PackedLinear::stack(
                    &[rows(&gate, columns.clone()), rows(&up, columns.clone())],
                    hidden,
                )?,
                down: PackedLinear::new(&down, hidden, columns.len())?,
            })
        };
        shards.iter().map(part).collect()
    }
}

/// The attention layers' KV cache and working memory.
struct Attention {
    cache: KvCache,
    rope: Rope,
    query_width: usize,
    head_dim: usize,
    projected: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Attention {
    fn new(cache: KvCache, rope: Rope, num_heads: usize, head_dim: usize) -> Self {
        let query_width = num_heads * head_dim;
        let (projected, queries, keys, values) = Default::default();
        Self { cache, rope, query_width, head_dim, projected, queries, keys, values }
    }

    /// One layer: projects, rotates queries and keys, writes keys and values, then reads. `normed` is
    /// `[rows, hidden]`, `out` is `[rows, query_width]`.
    fn forward(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        query_key_value: &PackedLinear,
        pass: &Pass<'_>,
        normed: &[f32],
        out: &mut [f32],
    ) -> eagle_verify::Result<()> {
        let Self { cache, rope, projected, queries, keys, values, .. } = self;
        let (query_width, width) = (self.query_width, query_key_value.num_outputs());
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        projected.resize(pass.tokens.len() * width, 0.0);
        query_key_value.forward(cpu, normed, projected)?;
        for buffer in [&mut *queries, keys, values] {
            buffer.clear();
        }
        for (row, &position) in projected.chunks_exact_mut(width).zip(&pass.positions) {
            let (query, key_value) = row.split_at_mut(query_width);
            let (key, value) = key_value.split_at_mut((width - query_width) / 2);
            rope.turn(position, query)?;
            rope.turn(position, key)?;
            queries.extend_from_slice(query);
            keys.extend_from_slice(key);
            values.extend_from_slice(value);
        }
        cache.write(layer, &pass.slots, keys, values)?;
        cache.attend(cpu, layer, scale, queries, &pass.attention, out)
    }
}
