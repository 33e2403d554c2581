//! The target: a Llama forward pass over candle tensors, for any mix of rows.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use eagle_verify::backend::cpu::{AttentionRow, Cpu, Embedding, KvCache, KvShape, PackedLinear, Rope};
use eagle_verify::{NodeSet, PagePool, PageTable, RmsNorm, TargetShape, TokenId, VerifyBatch};

use super::ops;
use super::tokenizer::Tokenizer;
use super::weights::{Gguf, LlamaShape};

/// The target model with its KV cache.
pub struct Target {
    pub cpu: Cpu,
    pub shape: LlamaShape,
    pub tokenizer: Tokenizer,
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
    query_key_value: PackedLinear,
    attention_output: PackedLinear,
    mlp_norm: Vec<f32>,
    gate_up: PackedLinear,
    down: PackedLinear,
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
    /// `[wanted rows, vocab]`.
    pub logits: &'a [f32],
    /// `[rows, feature layers * hidden]`: the residual stream after each feature layer.
    pub features: &'a [f32],
}

impl Target {
    /// Loads the model, with room for `max_requests` requests of `max_len` tokens and their trees.
    pub fn load(path: &Path, cpu: &Cpu, max_requests: usize, max_len: usize) -> Result<Self> {
        let mut gguf = Gguf::open(path)?;
        let shape = gguf.shape()?;
        ensure!(max_len <= shape.context, "the model's context is {}, not {max_len}", shape.context);
        let LlamaShape { hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, .. } = shape;
        let (query_width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
        let mut layers = Vec::with_capacity(shape.num_layers);
        for i in 0..shape.num_layers {
            let name = |part: &str| format!("blk.{i}.{part}.weight");
            let query = gguf.rotary_matrix(&name("attn_q"), query_width, hidden, head_dim)?;
            let key = gguf.rotary_matrix(&name("attn_k"), kv_width, hidden, head_dim)?;
            let value = gguf.matrix(&name("attn_v"), kv_width, hidden)?;
            let output = gguf.matrix(&name("attn_output"), hidden, query_width)?;
            let gate = gguf.matrix(&name("ffn_gate"), intermediate, hidden)?;
            let up = gguf.matrix(&name("ffn_up"), intermediate, hidden)?;
            let down = gguf.matrix(&name("ffn_down"), hidden, intermediate)?;
            layers.push(Layer {
                attention_norm: gguf.vector(&name("attn_norm"), hidden)?,
                query_key_value: PackedLinear::stack(&[&query, &key, &value], hidden)?,
                attention_output: PackedLinear::new(&output, hidden, query_width)?,
                mlp_norm: gguf.vector(&name("ffn_norm"), hidden)?,
                gate_up: PackedLinear::stack(&[&gate, &up], hidden)?,
                down: PackedLinear::new(&down, hidden, intermediate)?,
            });
        }
        let table = gguf.matrix("token_embd.weight", vocab, hidden)?;
        let rows = max_len + eagle_verify::DraftTree::MAX_NODES;
        let num_pages = max_requests * rows.div_ceil(KvCache::PAGE_SIZE);
        let kv_shape = KvShape { num_layers: shape.num_layers, num_kv_heads, head_dim };
        let cache = KvCache::new(kv_shape, num_pages)?;
        Ok(Self {
            attention: Attention::new(cache, Rope::new(head_dim, shape.rope_theta, rows)?, &shape),
            scratch: Vec::new(),
            logits: Vec::new(),
            features: Vec::new(),
            cpu: cpu.clone(),
            shape,
            tokenizer: Tokenizer::from_gguf(&gguf)?,
            pool: PagePool::new(KvCache::PAGE_SIZE, num_pages)?,
            norm: RmsNorm::new(hidden, shape.rms_epsilon)?,
            layers,
            output_norm: gguf.vector("output_norm.weight", hidden)?,
            lm_head: PackedLinear::new(&table, vocab, hidden)?, // SmolLM2 ties it to the embedding
            embedding: Embedding::f32(Arc::from(table), hidden)?,
            feature_layers: Vec::new(),
        })
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

    /// The KV cache, whose rows a verdict's commit plan moves.
    pub fn cache(&mut self) -> &mut KvCache {
        &mut self.attention.cache
    }

    /// Runs the model on some rows.
    pub fn forward(&mut self, pass: &Pass<'_>) -> Result<Answer<'_>> {
        let Self { cpu, norm, embedding, .. } = self;
        let (rows, hidden) = (pass.tokens.len(), self.shape.hidden);
        let mut embedded = vec![0.0; rows * hidden];
        for (token, row) in pass.tokens.iter().zip(embedded.chunks_exact_mut(hidden)) {
            embedding.copy_row(*token, row)?;
        }
        let mut x = Tensor::from_vec(embedded, (rows, hidden), &Device::Cpu)?;
        let feature_width = self.feature_layers.len() * hidden;
        self.features.resize(rows * feature_width, 0.0);
        for (i, layer) in self.layers.iter().enumerate() {
            let normed = ops::rms_norm(norm, &layer.attention_norm, &x)?;
            let attended = self.attention.forward(cpu, i, &layer.query_key_value, pass, &normed)?;
            x = ops::add_linear(cpu, &x, &layer.attention_output, &attended)?;
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
    fn new(cache: KvCache, rope: Rope, shape: &LlamaShape) -> Self {
        let (query_width, head_dim) = (shape.num_heads * shape.head_dim, shape.head_dim);
        let (projected, queries, keys, values) = Default::default();
        Self { cache, rope, query_width, head_dim, projected, queries, keys, values }
    }

    /// One layer: projects, rotates queries and keys, writes keys and values, then reads.
    fn forward(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        query_key_value: &PackedLinear,
        pass: &Pass<'_>,
        normed: &Tensor,
    ) -> Result<Tensor> {
        let Self { cache, rope, projected, queries, keys, values, .. } = self;
        let (query_width, width) = (self.query_width, query_key_value.num_outputs());
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        Ok(ops::map_rows(normed, "tree-attention", query_width, |normed, out| {
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
        })?)
    }
}
