//! The structs of `kernels/abi.h` that the draft head's kernels take, and their launches.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

pub(super) const NONE: u32 = u32::MAX;
/// Rows of the head in one pass at most.
pub(super) const PASS_ROWS: usize = crate::backend::cuda::linear::MAX_ROWS;
pub(super) const MAX_DEPTH: usize = 258;
pub(super) const MAX_CHUNKS: usize = 32;
pub(super) const MIN_CHUNK_KEYS: usize = 256;
pub(super) const SEGMENT_COLUMNS: usize = 1024;

/// `EvDraftRow`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Row {
    pub(super) nodes: [u64; 4],
    pub(super) request: u32,
    pub(super) token: u32,
    pub(super) position: u32,
    pub(super) kv_slot: u32,
    pub(super) source: u32,
    pub(super) keep: u32,
    pub(super) candidate: u32,
    pub(super) reserved: u32,
}

/// `EvDraftRequest`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Request {
    pub(super) seed: u64,
    pub(super) slot: u32,
    pub(super) prefix_len: u32,
    pub(super) width: u32,
    pub(super) depth: u32,
    pub(super) position: u32,
    pub(super) root: u32,
    pub(super) temperature: f32,
    pub(super) noise_scale: f32,
    pub(super) confidence_temperature: f32,
    pub(super) filter: u32,
}

/// `EvCandidate`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) parent: u32,
    pub(super) score: f32,
}

/// `EvPageUpdate`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct PageUpdate {
    pub(super) slot: u32,
    pub(super) index: u32,
    pub(super) page: u32,
}

/// `EvDraft`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Draft {
    pub(super) embedding: u64,
    pub(super) draft_tokens: u64,
    pub(super) rope: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) page_tables: u64,
    pub(super) requests: u64,
    pub(super) pools: u64,
    pub(super) rows: u64,
    pub(super) next_rows: u64,
    pub(super) sources: u64,
    pub(super) outputs: u64,
    pub(super) partials: u64,
    pub(super) hidden_rows: u64,
    pub(super) norm_weight: u64,
    pub(super) token_norm_weight: u64,
    pub(super) high: u64,
    pub(super) low: u64,
    pub(super) query: u64,
    pub(super) attended: u64,
    pub(super) attended_sums: u64,
    pub(super) noise: u64,
    pub(super) segment_sums: u64,
    pub(super) segment_best: u64,
    pub(super) masks: u64,
    pub(super) updates: u64,
    pub(super) filters: u64,
    pub(super) edited: u64,
    pub(super) thresholds: u64,
    pub(super) paths: u64,
    pub(super) hidden: u32,
    pub(super) intermediate: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) vocab: u32,
    pub(super) draft_vocab: u32,
    pub(super) embedding_format: u32,
    pub(super) page_size: u32,
    pub(super) max_pages: u32,
    pub(super) pool_words: u32,
    pub(super) num_updates: u32,
    pub(super) num_outputs: u32,
    pub(super) num_slices: u32,
    pub(super) first_row: u32,
    pub(super) num_rows: u32,
    pub(super) row_width: u32,
    pub(super) width: u32,
    pub(super) level: u32,
    pub(super) epsilon: f32,
    pub(super) scale: f32,
    pub(super) reserved: u32,
}

// The offsets that abi.h asserts.
const _: () = {
    assert!(offset_of!(Row, nodes) == 0);
    assert!(offset_of!(Row, request) == 32);
    assert!(offset_of!(Row, token) == 36);
    assert!(offset_of!(Row, position) == 40);
    assert!(offset_of!(Row, kv_slot) == 44);
    assert!(offset_of!(Row, source) == 48);
    assert!(offset_of!(Row, keep) == 52);
    assert!(offset_of!(Row, candidate) == 56);
    assert!(size_of::<Row>() == 64);
    assert!(offset_of!(Request, seed) == 0);
    assert!(offset_of!(Request, slot) == 8);
    assert!(offset_of!(Request, prefix_len) == 12);
    assert!(offset_of!(Request, width) == 16);
    assert!(offset_of!(Request, depth) == 20);
    assert!(offset_of!(Request, position) == 24);
    assert!(offset_of!(Request, root) == 28);
    assert!(offset_of!(Request, temperature) == 32);
    assert!(offset_of!(Request, noise_scale) == 36);
    assert!(offset_of!(Request, confidence_temperature) == 40);
    assert!(offset_of!(Request, filter) == 44);
    assert!(size_of::<Request>() == 48);
    assert!(size_of::<Candidate>() == 12 && size_of::<PageUpdate>() == 12);
    assert!(offset_of!(Draft, embedding) == 0);
    assert!(offset_of!(Draft, draft_tokens) == 8);
    assert!(offset_of!(Draft, rope) == 16);
    assert!(offset_of!(Draft, keys) == 24);
    assert!(offset_of!(Draft, values) == 32);
    assert!(offset_of!(Draft, page_tables) == 40);
    assert!(offset_of!(Draft, requests) == 48);
    assert!(offset_of!(Draft, pools) == 56);
    assert!(offset_of!(Draft, rows) == 64);
    assert!(offset_of!(Draft, next_rows) == 72);
    assert!(offset_of!(Draft, sources) == 80);
    assert!(offset_of!(Draft, outputs) == 88);
    assert!(offset_of!(Draft, partials) == 96);
    assert!(offset_of!(Draft, hidden_rows) == 104);
    assert!(offset_of!(Draft, norm_weight) == 112);
    assert!(offset_of!(Draft, token_norm_weight) == 120);
    assert!(offset_of!(Draft, high) == 128);
    assert!(offset_of!(Draft, low) == 136);
    assert!(offset_of!(Draft, query) == 144);
    assert!(offset_of!(Draft, attended) == 152);
    assert!(offset_of!(Draft, attended_sums) == 160);
    assert!(offset_of!(Draft, noise) == 168);
    assert!(offset_of!(Draft, segment_sums) == 176);
    assert!(offset_of!(Draft, segment_best) == 184);
    assert!(offset_of!(Draft, masks) == 192);
    assert!(offset_of!(Draft, updates) == 200);
    assert!(offset_of!(Draft, filters) == 208);
    assert!(offset_of!(Draft, edited) == 216);
    assert!(offset_of!(Draft, thresholds) == 224);
    assert!(offset_of!(Draft, paths) == 232);
    assert!(offset_of!(Draft, hidden) == 240);
    assert!(offset_of!(Draft, intermediate) == 244);
    assert!(offset_of!(Draft, heads) == 248);
    assert!(offset_of!(Draft, kv_heads) == 252);
    assert!(offset_of!(Draft, head_dim) == 256);
    assert!(offset_of!(Draft, vocab) == 260);
    assert!(offset_of!(Draft, draft_vocab) == 264);
    assert!(offset_of!(Draft, embedding_format) == 268);
    assert!(offset_of!(Draft, page_size) == 272);
    assert!(offset_of!(Draft, max_pages) == 276);
    assert!(offset_of!(Draft, pool_words) == 280);
    assert!(offset_of!(Draft, num_updates) == 284);
    assert!(offset_of!(Draft, num_outputs) == 288);
    assert!(offset_of!(Draft, num_slices) == 292);
    assert!(offset_of!(Draft, first_row) == 296);
    assert!(offset_of!(Draft, num_rows) == 300);
    assert!(offset_of!(Draft, row_width) == 304);
    assert!(offset_of!(Draft, width) == 308);
    assert!(offset_of!(Draft, level) == 312);
    assert!(offset_of!(Draft, epsilon) == 316);
    assert!(offset_of!(Draft, scale) == 320);
    assert!(size_of::<Draft>() == 328);
};
