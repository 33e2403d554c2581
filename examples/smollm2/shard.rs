//! A target that is split over ranks: what each of them has, and how they sum what they computed.
//!
//! Every rank is a thread with its own cores, KV cache and part of every layer, as a GPU would be: some attention heads,
//! some columns of the MLP, some rows of the output projection. After the attention and after the MLP each rank has
//! a partial sum of all rows; `Group::reduce_add_norm` adds them to the residual stream and normalises, on all ranks
//! alike. Between ranks numbers are bf16, as they are between GPUs.

use std::ops::Range;
use std::time::Duration;

use anyhow::Result;
use eagle_verify::RmsNorm;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Rank, Rendezvous};
use half::bf16;

use super::weights::LlamaShape;

/// How long a rank waits for the others. Long enough for a busy machine: a rank that fails is noticed at once.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The most rows of a forward pass: what a group carries in one call.
const MAX_ROWS: usize = 512;

/// The part of the model that a rank has. Parts may differ in size, and a rank may have no attention head.
#[derive(Clone, Debug)]
pub struct Shard {
    /// KV heads, with the query heads that read them.
    pub kv_heads: Range<usize>,
    /// Columns of the MLP.
    pub intermediate: Range<usize>,
    /// Tokens of the output projection.
    pub vocab: Range<usize>,
}

impl Shard {
    /// The part of `rank` of `world`; of one, all.
    pub fn new(shape: &LlamaShape, rank: usize, world: usize) -> Self {
        let part = |count: usize| count * rank / world..count * (rank + 1) / world;
        Self {
            kv_heads: part(shape.num_kv_heads),
            intermediate: part(shape.intermediate),
            vocab: part(shape.vocab),
        }
    }
}

/// Some rows of a matrix, `[rows, width]`.
pub fn rows(matrix: &[f32], width: usize, range: Range<usize>) -> &[f32] {
    &matrix[range.start * width..range.end * width]
}

/// Some columns of a matrix, `[rows, width]`.
pub fn columns(matrix: &[f32], width: usize, range: Range<usize>) -> Vec<f32> {
    matrix.chunks_exact(width).flat_map(|row| &row[range.clone()]).copied().collect()
}

/// What ranks have in common during a forward pass: the residual stream.
pub struct Residual {
    group: Group<Cpu, bf16>,
    norm: RmsNorm,
    rows: Vec<bf16>,
    partial: Vec<bf16>,
    weight: Vec<bf16>,
    normed: Vec<bf16>,
    /// `[rows, hidden]`, normalised: the input of the next half of a layer.
    pub input: Vec<f32>,
}

impl Residual {
    /// Meets the other ranks.
    pub fn join(cpu: &Cpu, norm: RmsNorm, rendezvous: &Rendezvous, rank: Rank) -> eagle_verify::Result<Self> {
        let config = GroupConfig { time_limit: TIME_LIMIT, ..GroupConfig::new(norm.hidden(), MAX_ROWS) };
        let group = Group::join(cpu, rendezvous, rank, config)?;
        let (rows, partial, weight, normed, input) = Default::default();
        Ok(Self { group, norm, rows, partial, weight, normed, input })
    }

    /// Starts with zeros.
    pub fn restart(&mut self) {
        self.rows.clear();
    }

    /// Adds the sum of all ranks' `partial`, `[rows, hidden]`, and normalises. Each row by itself: how many rows there
    /// are changes no bit.
    pub fn add(&mut self, partial: &[f32], weight: &[f32]) -> Result<()> {
        let Self { group, norm, rows, normed, .. } = self;
        rows.resize(partial.len(), bf16::ZERO);
        normed.resize(partial.len(), bf16::ZERO);
        round(partial, &mut self.partial);
        round(weight, &mut self.weight);
        let outputs = NormOutputs { output: Some(&mut normed[..]), quantized: None };
        group.reduce_add_norm(norm, &self.partial[..], &mut rows[..], &self.weight[..], outputs)?;
        self.input.clear();
        self.input.extend(self.normed.iter().map(|x| x.to_f32()));
        Ok(())
    }

    /// Rows of the residual stream.
    pub fn rows(&self) -> impl Iterator<Item = &[bf16]> {
        self.rows.chunks_exact(self.norm.hidden())
    }
}

fn round(numbers: &[f32], rounded: &mut Vec<bf16>) {
    rounded.clear();
    rounded.extend(numbers.iter().map(|x| bf16::from_f32(*x)));
}
