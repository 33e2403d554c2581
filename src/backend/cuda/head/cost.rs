//! What a draft step costs: its launches, and the bytes of device memory that they read and write. Counted here by
//! formula, beside the code that launches; `tests/draft_cost.rs` compares with what the emulator counts.
//!
//! A byte counts once for each block that reads it, and once for each that writes it: what a block reads again is in a
//! register or its multiprocessor's cache. What blocks share (the rows' halves, that every tile of a linear layer
//! reads) is counted for each, though most of it comes from the second-level cache.

use std::collections::BTreeMap;

use super::abi::{self, MAX_CHUNKS, MIN_CHUNK_KEYS, PASS_ROWS, SEGMENT_COLUMNS};
use super::layer::{Levels, PAGE_SIZE, num_chunks};
use crate::backend::cuda::linear::{TILE_OUTPUTS, instance_rows, num_slices};
use crate::draft::Eagle3Config;

/// Queries of a block of `draft_attention.cu`.
const TILE_QUERIES: usize = 16;
/// Dimensions of a block that combines chunks, or that activates.
const BLOCK_COLUMNS: usize = 8 * 256;

/// A step in which all requests draft alike, without filters, penalties, bias or masks.
#[derive(Clone, Copy, Debug)]
pub struct DraftStep {
    /// Requests: a power of two.
    pub requests: usize,
    /// Most requests of the speculator.
    pub max_requests: usize,
    /// Candidates of each node, and nodes of a level; at most the draft vocabulary.
    pub width: usize,
    /// Levels, at least 1.
    pub depth: usize,
    /// KV rows of each request before those of its drafts.
    pub prefix_len: usize,
    /// Of these, the rows that the step writes first, for the tokens accepted before; at least 1.
    pub pairs: usize,
    /// Pages that the requests have got since the step before, all together.
    pub new_pages: usize,
    /// Whether drafts see the target's noise (temperature above 0).
    pub noise: bool,
    /// Bytes of an element of the embedding table.
    pub embedding_bytes: usize,
}

/// What the launches of a kernel come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCost {
    /// Launches.
    pub num_launches: u64,
    /// Bytes read, at most.
    pub read_bytes: u64,
    /// Bytes that are not read in a tree whose nodes have most in common.
    pub varying_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// What a step comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftCost {
    /// By the kernel's name.
    pub kernels: BTreeMap<String, KernelCost>,
    /// Kernels that are launched one by one; all others are in the step's one graph.
    pub num_single_launches: u64,
    /// Bytes of the step's one copy to the device.
    pub upload_bytes: u64,
    /// Bytes of its one copy back.
    pub download_bytes: u64,
    /// The least that any implementation moves which runs the levels one after the other: the weights once for each
    /// pass of at most 64 rows, the prefix's keys and values once for each level, the features once, and the keys and
    /// values that are written.
    pub minimum_bytes: u64,
    /// Of these, the weights.
    pub weight_bytes: u64,
}

impl DraftCost {
    /// Launches of all kernels.
    pub fn num_launches(&self) -> u64 {
        self.kernels.values().map(|kernel| kernel.num_launches).sum()
    }

    /// Bytes read, at most, and written.
    pub fn moved_bytes(&self) -> u64 {
        self.kernels.values().map(|kernel| kernel.read_bytes + kernel.written_bytes).sum()
    }

    /// Counts a launch.
    fn add(&mut self, kernel: &str, read: usize, written: usize) {
        self.add_varying(kernel, read, 0, written);
    }

    fn add_varying(&mut self, kernel: &str, read: usize, varying: usize, written: usize) {
        let cost = self.kernels.entry(format!("ev_{kernel}")).or_default();
        cost.num_launches += 1;
        cost.read_bytes += read as u64;
        cost.varying_bytes += varying as u64;
        cost.written_bytes += written as u64;
    }
}

/// Counts a step of a head whose linear layers are bf16.
pub fn draft_cost(config: &Eagle3Config, step: &DraftStep) -> DraftCost {
    let mut counter = Counter { config, step, cost: DraftCost::default() };
    counter.extend();
    counter.cost.num_single_launches = counter.cost.num_launches();
    counter.levels();
    counter.cost
}

struct Counter<'a> {
    config: &'a Eagle3Config,
    step: &'a DraftStep,
    cost: DraftCost,
}

impl Counter<'_> {
    /// Queries and keys, or values, of a row.
    fn query_width(&self) -> usize {
        self.config.num_heads * self.config.head_dim
    }

    fn kv_width(&self) -> usize {
        self.config.num_kv_heads * self.config.head_dim
    }

    /// A linear layer on so many rows. Returns the bytes of a row's sums, of all slices, for the kernel that adds them.
    fn linear(&mut self, num_outputs: usize, num_inputs: usize, rows: usize, has_index: bool) -> usize {
        let (tiles, slices) = (num_outputs.div_ceil(TILE_OUTPUTS), num_slices(num_outputs, num_inputs));
        let weights = num_outputs * num_inputs * 2;
        // High and low, of every tile's slices of them.
        let halves = tiles * rows * num_inputs * 4;
        let index = if has_index { tiles * slices * rows * 4 } else { 0 };
        let sums = slices * num_outputs * 4;
        let kernel = format!("linear_bf16_r{}", instance_rows(rows));
        self.cost.add(&kernel, weights + halves + index, rows * sums);
        self.cost.weight_bytes += weights as u64;
        self.cost.minimum_bytes += weights as u64;
        sums
    }

    /// New pages, and the keys and values of the tokens that were accepted before.
    fn extend(&mut self) {
        let Self { config, step, .. } = *self;
        let (hidden, width) = (config.hidden, config.feature_width());
        let places = step.max_requests.next_power_of_two();
        let num_pairs = step.requests * step.pairs;
        let fixed = places * (size_of::<abi::Request>() + size_of::<abi::Row>());
        let of_pairs = num_pairs * (size_of::<abi::Row>() + 4);
        let of_pages = step.new_pages * size_of::<abi::PageUpdate>();
        self.cost.upload_bytes = (fixed + of_pairs + of_pages) as u64;
        if step.new_pages > 0 {
            self.cost.add("draft_pages", of_pages, step.new_pages * 4);
        }
        for first in (0..num_pairs).step_by(PASS_ROWS) {
            let n = PASS_ROWS.min(num_pairs - first);
            // The last pair of each request is kept for the first level.
            let kept = (first..first + n).filter(|pair| (pair + 1) % step.pairs == 0).count();
            let sums = self.linear(hidden, width, n, true);
            let row = hidden * (step.embedding_bytes + 3 * 4) + sums + 12;
            self.cost.add("draft_embed_pairs_bf16", n * row, n * hidden * (4 + 8) + kept * hidden * 4);
            let sums = self.linear(2 * self.kv_width(), 2 * hidden, n, false);
            self.cost.add(
                "draft_turn_pairs",
                n * (sums + config.head_dim * 4 + 12),
                n * 2 * self.kv_width() * 4,
            );
            self.cost.minimum_bytes += (n * (width * 4 + 2 * self.kv_width() * 4)) as u64;
        }
    }

    /// The graph.
    fn levels(&mut self) {
        let Self { config, step, .. } = *self;
        let chunks = num_chunks(step.prefix_len).next_power_of_two();
        let DraftStep { requests, width, depth, noise, .. } = *step;
        let levels = Levels { requests, width, depth, chunks, noise, filters: false };
        self.cost.download_bytes = (requests * levels.pool_words() * 4) as u64;
        self.cost.add("draft_start", requests * 4, requests * (8 + size_of::<abi::Candidate>()));
        for level in 1..=depth {
            if noise {
                let blocks = requests * config.draft_vocab.div_ceil(256);
                let columns = requests * config.draft_vocab * 4;
                self.cost.add("draft_noise", columns + blocks * 24, columns);
            }
            let num_rows = requests * levels.row_width(level);
            for first in (0..num_rows).step_by(PASS_ROWS) {
                self.pass(&levels, level, first, PASS_ROWS.min(num_rows - first));
            }
            self.advance(&levels, level);
            self.cost.minimum_bytes += (requests * step.prefix_len * 2 * self.kv_width() * 4) as u64;
        }
    }

    /// Rows `first` to `first + n` of a level.
    fn pass(&mut self, levels: &Levels, level: usize, first: usize, n: usize) {
        let Self { config, step, .. } = *self;
        let Eagle3Config { hidden, intermediate, head_dim, draft_vocab, .. } = *config;
        let (query, kv) = (self.query_width(), self.kv_width());
        let embed = hidden * (step.embedding_bytes + 3 * 4) + 12;
        self.cost.add("draft_embed_bf16", n * embed, n * 2 * hidden * 4);
        let sums = self.linear(query + 2 * kv, 2 * hidden, n, false);
        // The first level's keys and values are those of pairs.
        let written = query + if level > 1 { 2 * kv } else { 0 };
        self.cost.add("draft_turn", n * (sums + head_dim * 4 + 12), n * written * 4);
        self.attend(levels, level, first, n);
        self.combine(level, n);

        let sums = self.linear(hidden, query, n, false);
        // Residual, its sum with the layer's output, and the norm's weight.
        let row = 3 * hidden * 4 + sums;
        self.cost.add("draft_add_norm_bf16", n * (row + 8), n * hidden * 8);
        let sums = self.linear(2 * intermediate, hidden, n, false);
        let blocks = intermediate.div_ceil(BLOCK_COLUMNS);
        self.cost.add("draft_activate_bf16", n * (sums + blocks * 4), n * intermediate * 4);
        let sums = self.linear(hidden, intermediate, n, false);
        let row = 3 * hidden * 4 + sums;
        self.cost.add("draft_finish_bf16", n * (row + 4), n * hidden * 8);

        let sums = self.linear(draft_vocab, hidden, n, false);
        let segments = draft_vocab.div_ceil(SEGMENT_COLUMNS);
        let (of_noise, of_request) = if levels.noise { (draft_vocab * 4, 24) } else { (0, 20) };
        let read = sums + of_noise + segments.div_ceil(8) * of_request;
        self.cost.add("draft_rank", n * read, n * segments * 8 * (1 + levels.width));
    }

    fn attend(&mut self, levels: &Levels, level: usize, first: usize, n: usize) {
        let Self { config, step, .. } = *self;
        let Eagle3Config { num_heads, num_kv_heads, head_dim, .. } = *config;
        let (group, row_width) = (num_heads / num_kv_heads, levels.row_width(level));
        let (mut read, mut varying, mut written) = (0, 0, 0);
        let tiles = (row_width.min(n) * group).div_ceil(TILE_QUERIES);
        for request in first / row_width..=(first + n - 1) / row_width {
            let begin = first.max(request * row_width);
            let queries = ((first + n).min((request + 1) * row_width) - begin) * group;
            for tile in 0..tiles {
                let first_query = tile * TILE_QUERIES;
                let own = TILE_QUERIES.min(queries.saturating_sub(first_query));
                let chunks = prefix_chunks(step.prefix_len);
                read += num_kv_heads * (4 + levels.chunks * 8); // depths, prefixes
                if own == 0 {
                    continue;
                }
                for keys in chunks {
                    let pages = keys.end.div_ceil(PAGE_SIZE) - keys.start / PAGE_SIZE;
                    let kv = keys.len() * head_dim * 8;
                    read += num_kv_heads * (own * head_dim * 4 + kv + pages * 4 + 4);
                    written += num_kv_heads * own * (head_dim * 4 + 8);
                }
                // The draft rows.
                let rows = (first_query + own - 1) / group - first_query / group + 1;
                read += num_kv_heads * (own * head_dim * 4 + rows * 36);
                written += num_kv_heads * own * (head_dim * 4 + 8);
                if level > 1 {
                    // Each row sees its path, at least the last node of which it has alone.
                    let (most, least) = (rows * (level - 1), rows + level - 2);
                    let pages = num_pages(step.prefix_len, (level - 1) * levels.width);
                    read += num_kv_heads * (most * head_dim * 8 + pages * 4 + 8);
                    let pages_in_doubt = if levels.width == 1 { 0 } else { pages - 1 };
                    varying += num_kv_heads * ((most - least) * head_dim * 8 + pages_in_doubt * 4);
                }
            }
        }
        self.cost.add_varying(&format!("draft_attend_{head_dim}"), read, varying, written);
    }

    fn combine(&mut self, level: usize, n: usize) {
        let (query, head_dim) = (self.query_width(), self.config.head_dim);
        let chunks = num_chunks(self.step.prefix_len);
        // At the first level no draft row is seen.
        let parts = chunks + usize::from(level > 1);
        let mut read = parts * query * 4;
        for start in (0..query).step_by(BLOCK_COLUMNS) {
            let heads = (start + BLOCK_COLUMNS).min(query).div_ceil(head_dim) - start / head_dim;
            read += 8 + heads * (1 + chunks) * 8;
        }
        self.cost.add("draft_combine_bf16", n * read, n * query * 4);
    }

    fn advance(&mut self, levels: &Levels, level: usize) {
        let DraftStep { requests, width, depth, prefix_len, .. } = *self.step;
        let rows = levels.row_width(level);
        let segments = self.config.draft_vocab.div_ceil(SEGMENT_COLUMNS);
        // Counts, width and depth; of each row its request, its score, the segments' sums, and of their lists what is
        // taken and what comes after; the children's tokens.
        let mut read = 16 + rows * (12 + segments * 8 + (segments + width - 1) * 8) + rows * width * 4;
        let mut varying = (rows - 1) * width * 4;
        let mut written = rows * width * size_of::<abi::Candidate>() + 8;
        if level < depth {
            // Places of the next rows, and their parents' nodes.
            read += 8 + num_pages(prefix_len + (level - 1) * width, width) * 4 + rows * 32;
            varying += (rows - 1) * 32;
            written += width * (size_of::<abi::Row>() - 4);
        } else {
            written += width * 4;
        }
        self.cost.add_varying("draft_advance", requests * read, requests * varying, requests * written);
    }
}

/// The parts that a prefix is attended to in.
fn prefix_chunks(prefix_len: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut keys = MIN_CHUNK_KEYS;
    while keys * MAX_CHUNKS < prefix_len {
        keys *= 2;
    }
    (0..prefix_len).step_by(keys).map(move |start| start..(start + keys).min(prefix_len))
}

/// Pages that rows lie in.
fn num_pages(first_row: usize, num_rows: usize) -> usize {
    (first_row + num_rows).div_ceil(PAGE_SIZE) - first_row / PAGE_SIZE
}
