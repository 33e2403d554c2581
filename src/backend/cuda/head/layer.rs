//! The draft head on a device: its weights, its memory, and the launches of its passes.

use super::abi::{self, MAX_CHUNKS, MAX_DEPTH, MIN_CHUNK_KEYS, PASS_ROWS, SEGMENT_COLUMNS};
use super::linears::{Linears, half_of};
use crate::backend::DraftLimits;
use crate::backend::cpu::Rope;
use crate::backend::cuda::context::{Cuda, Kernel};
use crate::backend::cuda::launch;
use crate::backend::cuda::linear::{Halves, LinearWeights};
use crate::backend::cuda::memory::Memory;
use crate::backend::cuda::view::{Embedding, Format};
use crate::draft::{Eagle3Checkpoint, Eagle3Config};
use crate::error::{Error, Result};
use crate::tree::DraftTree;

/// Rows in a page of the draft KV cache.
pub(super) const PAGE_SIZE: usize = 16;

/// What the levels of a step are captured for: a graph serves all steps with the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Levels {
    /// Requests, rounded up to a power of two.
    pub(super) requests: usize,
    /// The largest of their widths and depths.
    pub(super) width: usize,
    pub(super) depth: usize,
    /// Chunks of the longest prefix, rounded up to a power of two.
    pub(super) chunks: usize,
    /// Whether any of them sees the target's noise.
    pub(super) noise: bool,
    /// Whether any of them has filters, penalties or bias.
    pub(super) filters: bool,
}

/// Where the parts of a step lie on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPlaces {
    pub(super) requests: u64,
    pub(super) rows: u64,
    pub(super) pairs: u64,
    pub(super) features: u64,
    pub(super) updates: u64,
    pub(super) filters: u64,
}

impl Levels {
    /// Most candidates of a request. One request may have the width and another the depth: none runs more draft rows
    /// than a budget allows.
    pub(super) fn num_candidates(&self) -> usize {
        1 + self.width + ((self.depth - 1) * self.width).min(DraftTree::MAX_NODES) * self.width
    }

    /// Words of a pool: how many candidates and draft rows there are, and the candidates.
    pub(super) fn pool_words(&self) -> usize {
        2 + self.num_candidates() * size_of::<abi::Candidate>() / 4
    }

    /// Rows of each request in a level.
    pub(super) fn row_width(&self, level: usize) -> usize {
        if level == 1 { 1 } else { self.width }
    }
}

/// Chunks that a prefix is attended to in, as `chunk_keys` in draft_attention.cu cuts it.
pub(super) fn num_chunks(prefix_len: usize) -> usize {
    let mut keys = MIN_CHUNK_KEYS;
    while keys * MAX_CHUNKS < prefix_len {
        keys *= 2;
    }
    prefix_len.div_ceil(keys)
}

#[derive(Debug)]
struct Kernels {
    embed_pairs: Kernel,
    embed: Kernel,
    turn_pairs: Kernel,
    turn: Kernel,
    attend: Kernel,
    combine: Kernel,
    add_norm: Kernel,
    activate: Kernel,
    finish: Kernel,
    noise: Kernel,
    rank: Kernel,
    filter: Kernel,
    advance: Kernel,
    start: Kernel,
    pages: Kernel,
}

impl Kernels {
    fn load(cuda: &Cuda, half: Format, head_dim: usize) -> Result<Self> {
        let kernel = |name: &str| cuda.kernel(&format!("ev_draft_{name}"));
        let of_half = |name: &str| kernel(&format!("{name}_{}", half.name()));
        Ok(Self {
            embed_pairs: of_half("embed_pairs")?,
            embed: of_half("embed")?,
            turn_pairs: kernel("turn_pairs")?,
            turn: kernel("turn")?,
            attend: kernel(&format!("attend_{head_dim}"))?,
            combine: of_half("combine")?,
            add_norm: of_half("add_norm")?,
            activate: of_half("activate")?,
            finish: of_half("finish")?,
            noise: kernel("noise")?,
            rank: kernel("rank")?,
            filter: kernel("filter")?,
            advance: kernel("advance")?,
            start: kernel("start")?,
            pages: kernel("pages")?,
        })
    }
}

/// What does not change from step to step.
#[derive(Debug)]
struct Constants {
    draft_tokens: Memory,
    rope: Memory,
    input_norm: Memory,
    hidden_norm: Memory,
    post_attention_norm: Memory,
    final_norm: Memory,
    embedding: Embedding,
}

/// Buffers whose sizes depend on what is drafted: they grow.
#[derive(Debug)]
struct Work {
    pools: Memory,
    rows: [Memory; 2],
    outputs: [Memory; 2],
    attended: Memory,
    attended_sums: Memory,
    noise: Memory,
    segment_sums: Memory,
    segment_best: Memory,
    edited: Memory,
    thresholds: Memory,
    paths: Memory,
}

/// The head on a device.
#[derive(Debug)]
pub(super) struct Layer {
    cuda: Cuda,
    config: Eagle3Config,
    /// What linear layers take.
    pub(super) half: Format,
    kernels: Kernels,
    linears: Linears,
    constants: Constants,
    keys: Memory,
    values: Memory,
    page_tables: Memory,
    max_pages: usize,
    /// Inputs of a linear layer, `[PASS_ROWS, widest]` of halves each.
    high: Memory,
    low: Memory,
    partials: Memory,
    hidden_rows: Memory,
    query: Memory,
    work: Work,
}

impl Layer {
    pub(super) fn new(
        cuda: &Cuda,
        checkpoint: &Eagle3Checkpoint,
        embedding: Embedding,
        limits: DraftLimits,
    ) -> Result<Self> {
        let config = checkpoint.config.clone();
        let Eagle3Config { hidden, intermediate, num_heads, num_kv_heads, head_dim, .. } = config;
        if !matches!(head_dim, 32 | 64 | 96 | 128) {
            return Err(Error::unsupported("head size on a GPU", "32, 64, 96 or 128", head_dim));
        }
        if hidden > 16_384 {
            return Err(Error::unsupported("hidden size on a GPU", "at most 16384", hidden));
        }
        for (name, size) in
            [("intermediate size on a GPU", intermediate), ("features on a GPU", config.feature_width())]
        {
            if !size.is_multiple_of(8) {
                return Err(Error::unsupported(name, "a multiple of 8", size));
            }
        }
        let half = half_of(checkpoint);
        let linears = Linears::load(cuda, half, checkpoint)?;
        let upload = |values: &[f32]| cuda.upload(values).map(|buffer| buffer.into_memory());
        let rope = Rope::new(head_dim, config.rope_theta, limits.max_len + DraftTree::MAX_NODES)?;
        let constants = Constants {
            draft_tokens: cuda.upload(checkpoint.vocab.tokens())?.into_memory(),
            rope: upload(rope.table())?,
            input_norm: upload(&checkpoint.input_norm)?,
            hidden_norm: upload(&checkpoint.hidden_norm)?,
            post_attention_norm: upload(&checkpoint.post_attention_norm)?,
            final_norm: upload(&checkpoint.final_norm)?,
            embedding,
        };
        let memory = |bytes: usize| Memory::new(cuda, bytes, 0);
        let kv_bytes = limits.num_kv_pages * PAGE_SIZE * num_kv_heads * head_dim * 4;
        let max_pages = (limits.max_len + DraftTree::MAX_NODES).div_ceil(PAGE_SIZE);
        let widest = [2 * hidden, num_heads * head_dim, intermediate].into_iter().max().unwrap_or(0);
        let partials = linears.all().map(LinearWeights::num_partials).into_iter().max().unwrap_or(0);
        let empty = || Memory::new(cuda, 0, 0);
        Ok(Self {
            kernels: Kernels::load(cuda, half, head_dim)?,
            linears,
            constants,
            keys: memory(kv_bytes)?,
            values: memory(kv_bytes)?,
            page_tables: memory(limits.max_requests * max_pages * 4)?,
            max_pages,
            high: memory(PASS_ROWS * widest * 2)?,
            low: memory(PASS_ROWS * widest * 2)?,
            partials: memory(partials * 4)?,
            hidden_rows: memory(PASS_ROWS * hidden * 4)?,
            query: memory(PASS_ROWS * num_heads * head_dim * 4)?,
            work: Work {
                pools: empty()?,
                rows: [empty()?, empty()?],
                outputs: [memory(limits.max_requests * hidden * 4)?, empty()?],
                attended: empty()?,
                attended_sums: empty()?,
                noise: empty()?,
                segment_sums: empty()?,
                segment_best: empty()?,
                edited: empty()?,
                thresholds: empty()?,
                paths: empty()?,
            },
            cuda: cuda.clone(),
            half,
            config,
        })
    }

    pub(super) fn kv_memory(&self) -> [(u64, usize); 2] {
        [&self.keys, &self.values].map(|memory| (memory.address, memory.len()))
    }

    /// What means nothing from one step to the next.
    pub(super) fn scratch_memory(&self) -> impl Iterator<Item = &Memory> {
        let Self { high, low, partials, hidden_rows, query, work, .. } = self;
        let Work { pools, rows, outputs, attended, attended_sums, .. } = work;
        let Work { noise, segment_sums, segment_best, edited, thresholds, paths, .. } = work;
        let of_levels =
            [pools, attended, attended_sums, noise, segment_sums, segment_best, edited, thresholds, paths];
        [high, low, partials, hidden_rows, query].into_iter().chain(rows).chain(outputs).chain(of_levels)
    }

    /// Keys and values of some slots, one after the other.
    pub(super) fn read_kv(&self, slots: impl Iterator<Item = usize>) -> Result<Vec<f32>> {
        let width = self.config.num_kv_heads * self.config.head_dim;
        let mut rows = Vec::new();
        for slot in slots {
            for memory in [&self.keys, &self.values] {
                rows.extend(self.cuda.read::<f32>(memory.address + (slot * width * 4) as u64, width)?);
            }
        }
        Ok(rows)
    }

    /// Makes room for these levels. True if memory has moved: then graphs that were captured before are void.
    pub(super) fn reserve(&mut self, levels: &Levels) -> Result<bool> {
        let Eagle3Config { hidden, num_heads, head_dim, draft_vocab, .. } = self.config;
        let num_rows = levels.requests * levels.width;
        let places = (1 + levels.chunks) * PASS_ROWS * num_heads;
        let segments = draft_vocab.div_ceil(SEGMENT_COLUMNS);
        let noise_bytes = if levels.noise { levels.requests * draft_vocab * 4 } else { 0 };
        let filtered_rows = if levels.filters { PASS_ROWS } else { 0 };
        let Work {
            pools,
            rows,
            outputs,
            attended,
            attended_sums,
            noise,
            segment_sums,
            segment_best,
            edited,
            thresholds,
            paths,
        } = &mut self.work;
        let ([a, b], [even, odd]) = (rows, outputs);
        let sizes = [
            (pools, levels.requests * levels.pool_words() * 4),
            (a, num_rows * size_of::<abi::Row>()),
            (b, num_rows * size_of::<abi::Row>()),
            (even, num_rows * hidden * 4),
            (odd, num_rows * hidden * 4),
            (attended, places * head_dim * 4),
            (attended_sums, places * 8),
            (noise, noise_bytes),
            (segment_sums, num_rows * segments * 8),
            (segment_best, num_rows * segments * levels.width * 8),
            (edited, filtered_rows * draft_vocab.next_multiple_of(8) * 4),
            (thresholds, filtered_rows * 4),
            (paths, filtered_rows * MAX_DEPTH * 8),
        ];
        let mut has_moved = false;
        for (memory, bytes) in sizes {
            let before = memory.address;
            memory.reserve(bytes)?;
            has_moved |= memory.address != before;
        }
        Ok(has_moved)
    }

    /// What all launches have in common.
    fn arguments(&self) -> abi::Draft {
        let Self { config, constants, work, .. } = self;
        abi::Draft {
            embedding: constants.embedding.address,
            draft_tokens: constants.draft_tokens.address,
            rope: constants.rope.address,
            keys: self.keys.address,
            values: self.values.address,
            page_tables: self.page_tables.address,
            pools: work.pools.address,
            partials: self.partials.address,
            hidden_rows: self.hidden_rows.address,
            high: self.high.address,
            low: self.low.address,
            query: self.query.address,
            attended: work.attended.address,
            attended_sums: work.attended_sums.address,
            noise: work.noise.address,
            segment_sums: work.segment_sums.address,
            segment_best: work.segment_best.address,
            edited: work.edited.address,
            thresholds: work.thresholds.address,
            paths: work.paths.address,
            token_norm_weight: constants.input_norm.address,
            hidden: config.hidden as u32,
            intermediate: config.intermediate as u32,
            heads: config.num_heads as u32,
            kv_heads: config.num_kv_heads as u32,
            head_dim: config.head_dim as u32,
            vocab: config.target.vocab as u32,
            draft_vocab: config.draft_vocab as u32,
            embedding_format: constants.embedding.format as u32,
            page_size: PAGE_SIZE as u32,
            max_pages: self.max_pages as u32,
            epsilon: config.rms_epsilon,
            scale: 1.0 / (config.head_dim as f32).sqrt(),
            ..abi::Draft::default()
        }
    }

    fn launch(
        &self,
        kernel: Kernel,
        grid: (usize, usize, usize),
        threads: u32,
        draft: &abi::Draft,
    ) -> Result<()> {
        self.launch_with(kernel, grid, threads, 0, draft)
    }

    fn launch_with(
        &self,
        kernel: Kernel,
        (x, y, z): (usize, usize, usize),
        threads: u32,
        shared_bytes: usize,
        draft: &abi::Draft,
    ) -> Result<()> {
        let grid = (x as u32, y as u32, z as u32);
        // SAFETY:
        // - layout: `abi::Draft` is the kernel's only parameter, and the structs that it points to are those of
        //   abi.rs.
        // - bounds: `new` and `reserve` made every buffer for the rows, levels and chunks that grids are made of;
        //   rows name slots and pages of the page tables, which `CudaHead` takes from the requests' own.
        // - aliasing: all that is written is the head's own.
        // - lifetime: buffers wait for the stream before they are freed; the embedding's owner promised it.
        unsafe { launch::queue(&self.cuda, kernel, grid, threads, shared_bytes as u32, &mut { *draft }) }
    }

    /// Runs a linear layer on rows of a pass, and has the next kernel add its slices.
    fn linear(
        &self,
        linear: &LinearWeights,
        inputs: Halves,
        num_rows: usize,
        draft: &mut abi::Draft,
    ) -> Result<()> {
        draft.num_outputs = linear.num_outputs() as u32;
        draft.num_slices = linear.num_slices() as u32;
        // SAFETY: the planes are this layer's, which have a pass's rows of the widest inputs, or the waiting features,
        // whose list names rows that are there; `partials` has room for every layer's. All is of this stream's work,
        // and waits for it before it is freed.
        unsafe { linear.queue(inputs, num_rows, self.partials.address) }
    }

    fn halves(&self) -> Halves {
        Halves { high: self.high.address, low: self.low.address, row_index: 0 }
    }

    /// Takes over pages: `updates` is where so many of them are.
    pub(super) fn update_pages(&self, updates: u64, num_updates: usize) -> Result<()> {
        let draft = abi::Draft { updates, num_updates: num_updates as u32, ..self.arguments() };
        self.launch(self.kernels.pages, (num_updates.div_ceil(256), 1, 1), 256, &draft)
    }

    /// Writes the keys and values of pairs, at most a pass: `rows` says where they are, and `inputs` their features.
    pub(super) fn extend(&self, rows: u64, num_rows: usize, inputs: Halves) -> Result<()> {
        let mut draft = abi::Draft {
            rows,
            sources: self.work.outputs[0].address,
            norm_weight: self.constants.hidden_norm.address,
            num_rows: num_rows as u32,
            ..self.arguments()
        };
        self.linear(&self.linears.fc, inputs, num_rows, &mut draft)?;
        self.launch(self.kernels.embed_pairs, (num_rows, 1, 1), 256, &draft)?;
        self.linear(&self.linears.key_value, self.halves(), num_rows, &mut draft)?;
        self.launch(self.kernels.turn_pairs, (num_rows, 1, 1), 256, &draft)
    }

    /// Starts the pools of a step's requests.
    pub(super) fn start(&self, levels: &Levels, places: StepPlaces) -> Result<()> {
        let draft = abi::Draft {
            requests: places.requests,
            pool_words: levels.pool_words() as u32,
            ..self.arguments()
        };
        self.launch(self.kernels.start, (levels.requests, 1, 1), 32, &draft)
    }

    /// Two words and the candidates of each request.
    pub(super) fn pools(&self) -> &Memory {
        &self.work.pools
    }

    /// The rows of a level after the first.
    pub(super) fn level_rows(&self, level: usize) -> &Memory {
        &self.work.rows[level % 2]
    }

    /// One level: its rows go through the head, its candidates to the pools, and the best are the next one's rows.
    /// `masks` is where the rows' masks of allowed tokens are, or 0.
    pub(super) fn level(&self, levels: &Levels, level: usize, places: StepPlaces, masks: u64) -> Result<()> {
        let row_width = levels.row_width(level);
        let mut draft = abi::Draft {
            requests: places.requests,
            filters: places.filters,
            rows: if level == 1 { places.rows } else { self.level_rows(level).address },
            next_rows: self.work.rows[(level + 1) % 2].address,
            sources: self.work.outputs[(level - 1) % 2].address,
            outputs: self.work.outputs[level % 2].address,
            masks,
            pool_words: levels.pool_words() as u32,
            row_width: row_width as u32,
            width: levels.width as u32,
            level: level as u32,
            ..self.arguments()
        };
        if levels.noise {
            let grid = (self.config.draft_vocab.div_ceil(256), levels.requests, 1);
            self.launch(self.kernels.noise, grid, 256, &draft)?;
        }
        let num_rows = levels.requests * row_width;
        for first in (0..num_rows).step_by(PASS_ROWS) {
            draft.first_row = first as u32;
            draft.num_rows = PASS_ROWS.min(num_rows - first) as u32;
            self.pass(levels, &mut draft)?;
        }
        let shared = levels.width * levels.width * 8;
        self.launch_with(self.kernels.advance, (levels.requests, 1, 1), 256, shared, &draft)
    }

    /// The layer and the draft logits of some rows of a level, up to the best of each segment.
    fn pass(&self, levels: &Levels, draft: &mut abi::Draft) -> Result<()> {
        let Self { kernels, linears, constants, config, .. } = self;
        let Eagle3Config { intermediate, num_heads, num_kv_heads, head_dim, draft_vocab, .. } = *config;
        let (first, n, row_width) =
            (draft.first_row as usize, draft.num_rows as usize, draft.row_width as usize);

        draft.norm_weight = constants.hidden_norm.address;
        self.launch(kernels.embed, (n, 1, 1), 256, draft)?;
        self.linear(&linears.query_key_value, self.halves(), n, draft)?;
        self.launch(kernels.turn, (n, 1, 1), 256, draft)?;
        let requests = (first + n - 1) / row_width - first / row_width + 1;
        let tiles = (row_width.min(n) * (num_heads / num_kv_heads)).div_ceil(16);
        self.launch(kernels.attend, (tiles * num_kv_heads, 1 + levels.chunks, requests), 128, draft)?;
        self.launch(kernels.combine, ((num_heads * head_dim).div_ceil(8 * 256), n, 1), 256, draft)?;

        self.linear(&linears.attention_output, self.halves(), n, draft)?;
        draft.norm_weight = constants.post_attention_norm.address;
        self.launch(kernels.add_norm, (n, 1, 1), 256, draft)?;
        self.linear(&linears.gate_up, self.halves(), n, draft)?;
        self.launch(kernels.activate, (intermediate.div_ceil(8 * 256), n, 1), 256, draft)?;
        self.linear(&linears.down, self.halves(), n, draft)?;
        draft.norm_weight = constants.final_norm.address;
        self.launch(kernels.finish, (n, 1, 1), 256, draft)?;

        self.linear(&linears.lm_head, self.halves(), n, draft)?;
        if levels.filters {
            self.launch(kernels.filter, (n, 1, 1), 512, draft)?;
        }
        let segments = draft_vocab.div_ceil(SEGMENT_COLUMNS);
        self.launch(kernels.rank, (segments.div_ceil(8), n, 1), 256, draft)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::DraftBudget;

    /// Pools have room for every request of a step, and are no larger for a wide one beside a deep one.
    #[test]
    fn pools_fit_every_budget() {
        for (width, depth) in [(1, 1), (1, 257), (10, 8), (64, 5), (64, 257), (10, 26)] {
            let levels = Levels { requests: 1, width, depth, chunks: 1, noise: false, filters: false };
            let mut most = 0;
            for (own_width, own_depth) in (1..=width).flat_map(|w| (1..=depth).map(move |d| (w, d))) {
                if DraftBudget::new(own_width, own_depth, 256).is_ok() {
                    most = most.max(1 + own_width + (own_depth - 1) * own_width * own_width);
                }
            }
            assert!(levels.num_candidates() >= most, "{levels:?}: {most}");
            assert!(levels.num_candidates() <= 2 * most, "{levels:?}: {most}");
        }
    }
}
