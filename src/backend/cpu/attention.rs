//! A paged KV cache in host memory, and attention over it for the rows of a verify pass.

use super::Cpu;
use super::ops::softmax_weights;
use super::simd::{self, Lanes, PANEL};
use crate::error::{Error, Result, expect_len};
use crate::kv::{CommitPlan, PageTable};
use crate::tree::NodeSet;

/// Rows of keys and values of all layers in f32, in pages of 32 rows.
///
/// Which pages belong to which request is for a [`PagePool`](crate::PagePool) of [`PAGE_SIZE`](Self::PAGE_SIZE)
/// to say. Memory for a page is taken when it is first written.
///
/// # Rounding
///
/// A row's attention is computed over the keys that it sees *in order of position*, in f32: scores by fused
/// multiply-adds over the head's dimensions in order, weights `exp(score - max)` summed in a fixed shape
/// that depends on their number alone, outputs by fused multiply-adds in position order, then one division.
/// So a tree node's output has the bits that plain decoding of its path would give, however many rows share
/// the call and wherever in memory the keys lie.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    num_pages: usize,
    pages: Vec<Vec<f32>>, // by page id; empty or missing until first written
    scratch: Vec<f32>,
}

/// What a row of a [`KvCache`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub num_layers: usize,
    /// Key/value heads in a layer.
    pub num_kv_heads: usize,
    /// Elements in a head, a multiple of 32.
    pub head_dim: usize,
}

/// One query row of a request: the keys it may attend to.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// The request's pages.
    pub table: &'a PageTable,
    /// It sees the request's rows `0..prefix_len`, and
    pub prefix_len: usize,
    /// row `prefix_len + n` for each `n` in this set. The rows of a prompt chunk see a longer prefix each
    /// and have an empty set; the nodes of a tree share a prefix and see their ancestors and themselves.
    pub nodes: NodeSet,
}

impl KvCache {
    /// Rows in a page.
    pub const PAGE_SIZE: usize = PANEL;

    /// A cache of up to `num_pages` pages.
    ///
    /// # Errors
    /// *Unsupported* when the head size is not a positive multiple of 32; *misuse* when a count is 0.
    pub fn new(shape: KvShape, num_pages: usize) -> Result<Self> {
        if shape.head_dim == 0 || !shape.head_dim.is_multiple_of(PANEL) {
            return Err(Error::unsupported("head size", "a multiple of 32", shape.head_dim));
        }
        let KvShape { num_layers, num_kv_heads, head_dim } = shape;
        if num_layers == 0 || num_kv_heads == 0 || num_pages == 0 {
            let seen = format!("{num_layers}, {num_kv_heads} and {num_pages}");
            return Err(Error::misuse("layers, KV heads and pages", "at least 1 of each", seen));
        }
        let page_len =
            [num_layers, num_kv_heads, head_dim].iter().try_fold(2 * PANEL, |a, b| a.checked_mul(*b));
        if page_len.is_none_or(|len| len > 1 << 40) || num_pages > 1 << 31 {
            let seen = format!("{shape:?} in {num_pages} pages");
            return Err(Error::misuse("KV cache", "a size that a machine could hold", seen));
        }
        Ok(Self { shape, num_pages, pages: Vec::new(), scratch: Vec::new() })
    }

    /// What a row holds.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Writes one layer's keys and values of some rows: `keys` and `values` are
    /// `[slots, num_kv_heads, head_dim]`, `slots` come from [`PageTable::slot`].
    ///
    /// # Errors
    /// *Misuse* on a wrong length, layer or slot; nothing is written then.
    pub fn write(&mut self, layer: usize, slots: &[usize], keys: &[f32], values: &[f32]) -> Result<()> {
        let KvShape { num_layers, num_kv_heads, head_dim } = self.shape;
        let width = num_kv_heads * head_dim;
        expect_len("keys", slots.len() * width, keys.len())?;
        expect_len("values", slots.len() * width, values.len())?;
        if layer >= num_layers {
            return Err(Error::misuse("layer", format_args!("below {num_layers}"), layer));
        }
        if let Some(slot) = slots.iter().find(|slot| **slot / PANEL >= self.num_pages) {
            let wanted = format!("below {}", self.num_pages * PANEL);
            return Err(Error::misuse("KV slot", wanted, slot));
        }
        let last_page = slots.iter().max().map_or(0, |slot| slot / PANEL);
        self.pages.resize_with(self.pages.len().max(last_page + 1), Vec::new);
        let layer = layer * self.layer_len()..(layer + 1) * self.layer_len();
        let mut first = 0;
        // Runs of neighbours in a page, as the nodes of a tree are: each line of keys is touched once.
        for run in slots.chunk_by(|a, b| a + 1 == *b && a / PANEL == b / PANEL) {
            let page = &mut self.pages[run[0] / PANEL];
            page.resize(num_layers * layer.len(), 0.0);
            let rows = first * width..(first + run.len()) * width;
            put_rows(&mut page[layer.clone()], run[0] % PANEL, width, &keys[rows.clone()], &values[rows]);
            first += run.len();
        }
        Ok(())
    }

    /// Appends a row's keys and values, `[num_layers, 2, num_kv_heads, head_dim]`, to `out`.
    ///
    /// # Errors
    /// *Misuse* when no row of its page was ever written.
    pub fn read_row(&self, slot: usize, out: &mut Vec<f32>) -> Result<()> {
        let page = self.pages.get(slot / PANEL).filter(|page| !page.is_empty());
        let page = page.ok_or_else(|| Error::misuse("KV slot", "a row that was written", slot))?;
        let (offset, width) = (slot % PANEL, self.width());
        for layer in page.chunks_exact(self.layer_len()) {
            let (keys, values) = layer.split_at(width * PANEL);
            out.extend(keys.iter().skip(offset).step_by(PANEL));
            for panel in values.chunks_exact(PANEL * PANEL) {
                out.extend_from_slice(&panel[offset * PANEL..][..PANEL]);
            }
        }
        Ok(())
    }

    /// Moves the rows that a verify step keeps up against the committed ones, in all layers.
    ///
    /// # Errors
    /// *Misuse* when the table's pages are of another size, or a row of the plan has no page, or one that was
    /// never written; nothing is moved then.
    pub fn commit(&mut self, table: &PageTable, plan: CommitPlan<'_>) -> Result<()> {
        check_page_size(table)?;
        let written = |row: usize| {
            let page = table.pages().get(row / PANEL).and_then(|&page| self.pages.get(page as usize));
            page.is_some_and(|page| !page.is_empty())
        };
        if let Some(bad) = plan.moves().find(|step| !written(step.from) || !written(step.to)) {
            return Err(Error::misuse("KV row to keep", "a row of a page that was written", bad.from));
        }
        let mut row = std::mem::take(&mut self.scratch);
        let width = self.width();
        for step in plan.moves() {
            row.clear();
            self.read_row(table.slot(step.from), &mut row)?;
            let to = table.slot(step.to);
            let layer_len = self.layer_len();
            let layers = self.pages[to / PANEL].chunks_exact_mut(layer_len);
            for (layer, row) in layers.zip(row.chunks_exact(2 * width)) {
                let (keys, values) = row.split_at(width);
                put_rows(layer, to % PANEL, width, keys, values);
            }
        }
        self.scratch = row;
        Ok(())
    }

    fn width(&self) -> usize {
        self.shape.num_kv_heads * self.shape.head_dim
    }

    /// Floats of one layer in a page: keys `[kv_heads, head_dim, 32 rows]`, then values
    /// `[kv_heads, head_dim / 32, 32 rows, 32]`. Both are panels for [`simd::accumulate`].
    fn layer_len(&self) -> usize {
        2 * self.width() * PANEL
    }

    /// Attends: `queries` and `out` are `[rows, heads, head_dim]`, `scale` multiplies the scores. Query head
    /// `h` uses key/value head `h / (heads / num_kv_heads)`.
    ///
    /// # Errors
    /// *Misuse* when lengths don't fit, the scale is not a positive number, the heads are not a multiple of the
    /// KV heads, a table's pages are of another size, or a row sees no key, one past its reserved pages, or one
    /// in a page that was never written. Nothing is written then.
    pub fn attend(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        scale: f32,
        queries: &[f32],
        rows: &[AttentionRow<'_>],
        out: &mut [f32],
    ) -> Result<()> {
        let KvShape { num_layers, num_kv_heads, head_dim } = self.shape;
        expect_len("attention output", queries.len(), out.len())?;
        if rows.is_empty() && queries.is_empty() {
            return Ok(());
        }
        let query_width = queries.len() / rows.len().max(1);
        expect_len("attention queries", rows.len() * query_width, queries.len())?;
        if query_width == 0 || !query_width.is_multiple_of(self.width()) {
            let wanted = format!("a positive multiple of {} in each row", self.width());
            return Err(Error::misuse("attention queries", wanted, query_width));
        }
        if layer >= num_layers {
            return Err(Error::misuse("layer", format_args!("below {num_layers}"), layer));
        }
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(Error::misuse("attention scale", "a positive number", scale));
        }
        for row in rows {
            self.check(row)?;
        }
        let mut outputs = std::mem::take(&mut self.scratch);
        let group = query_width / self.width(); // query heads that share a KV head
        let block_rows = (MAX_VECTORS / group).max(1);
        // One task is one KV head of one block of rows. Its outputs are contiguous in `outputs`.
        let task_len = block_rows * group * head_dim;
        let num_blocks = rows.len().div_ceil(block_rows);
        outputs.resize(num_blocks * num_kv_heads * task_len, 0.0);
        let pages = &self.pages;
        let kv_len = head_dim * PANEL;
        let attend = |task: usize, out: &mut [f32]| {
            let (kv_head, block) = (task / num_blocks, task % num_blocks);
            let first = block * block_rows;
            let rows = &rows[first..(first + block_rows).min(rows.len())];
            let queries = queries[first * query_width..].chunks_exact(query_width);
            let start = layer * self.layer_len() + kv_head * kv_len;
            let keys = |page: u32| &pages[page as usize][start..][..kv_len];
            let values = |page: u32| &pages[page as usize][start + num_kv_heads * kv_len..][..kv_len];
            let columns = kv_head * group * head_dim..(kv_head + 1) * group * head_dim;
            let queries = queries.map(|row| &row[columns.clone()]);
            let head = Head { head_dim, group, scale };
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.attend(cpu.isa, head, rows, queries, keys, values, out);
            });
        };
        // Tasks are ordered so that a thread stays with a head, whose keys it has in its cache.
        cpu.team.run_parts(&mut outputs, task_len, &attend);
        for (r, row) in out.chunks_exact_mut(query_width).enumerate() {
            for (kv_head, row) in row.chunks_exact_mut(group * head_dim).enumerate() {
                let task = kv_head * num_blocks + r / block_rows;
                let from = task * task_len + r % block_rows * row.len();
                row.copy_from_slice(&outputs[from..from + row.len()]);
            }
        }
        self.scratch = outputs;
        Ok(())
    }

    fn check(&self, row: &AttentionRow<'_>) -> Result<()> {
        check_page_size(row.table)?;
        let wanted = "at least 1, and no overflow";
        let seen = row.last_row().ok_or_else(|| Error::misuse("keys of a row", wanted, row.prefix_len))?;
        let pages = row.table.pages().get(..seen / PANEL + 1);
        let written = |page: &u32| self.pages.get(*page as usize).is_some_and(|page| !page.is_empty());
        match pages {
            Some(pages) if pages.iter().all(written) => Ok(()),
            _ => Err(Error::misuse("keys of a row", "rows of pages that were written", seen)),
        }
    }
}

impl AttentionRow<'_> {
    /// The last row that it sees.
    fn last_row(&self) -> Option<usize> {
        match self.nodes.iter().last() {
            Some(node) => self.prefix_len.checked_add(node),
            None => self.prefix_len.checked_sub(1),
        }
    }
}

fn check_page_size(table: &PageTable) -> Result<()> {
    expect_len("page size of a KV table", PANEL, table.page_size())
}

/// Query vectors that one task takes through the keys together.
const MAX_VECTORS: usize = 24;

/// Writes neighbouring rows, `[rows, width]` of keys and of values, to one layer of a page.
fn put_rows(layer: &mut [f32], offset: usize, width: usize, keys: &[f32], values: &[f32]) {
    let (key_block, value_block) = layer.split_at_mut(width * PANEL);
    for (i, column) in key_block.chunks_exact_mut(PANEL).enumerate() {
        for (key, row) in column[offset..].iter_mut().zip(keys.chunks_exact(width)) {
            *key = row[i];
        }
    }
    for (r, row) in values.chunks_exact(width).enumerate() {
        let panels = value_block.chunks_exact_mut(PANEL * PANEL);
        for (panel, values) in panels.zip(row.chunks_exact(PANEL)) {
            panel[(offset + r) * PANEL..][..PANEL].copy_from_slice(values);
        }
    }
}

#[derive(Clone, Copy)]
struct Head {
    head_dim: usize,
    group: usize,
    scale: f32,
}

/// The rows `start..end`, cut where pages end: first rows and counts.
fn runs(start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
    let cut = move |first: usize| (first, (PANEL - first % PANEL).min(end - first));
    let some = move |first: usize| (first < end).then(|| cut(first));
    std::iter::successors(some(start), move |(first, count)| some(first + count))
}

/// What a thread reuses from task to task.
#[derive(Default)]
struct Scratch {
    queries: Vec<f32>,  // [vectors, head_dim]
    weights: Vec<f32>,  // [vectors, stride]: scores, then softmax weights, by visible key
    sums: Vec<f32>,     // [vectors]
    gathered: Vec<f32>, // [nodes, 32]: values of a row's nodes
    acc: Vec<Lanes>,    // [vectors]
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

impl Scratch {
    /// One KV head of a block of rows. Rows of one request go through its keys together: the nodes of a
    /// tree (one prefix) or the rows of a prompt (no nodes).
    #[allow(clippy::too_many_arguments)] // the inside of `attend`, split off to keep it readable
    fn attend<'p, 'q>(
        &mut self,
        isa: simd::Isa,
        head: Head,
        rows: &[AttentionRow<'_>],
        mut queries: impl Iterator<Item = &'q [f32]>,
        keys: impl Fn(u32) -> &'p [f32],
        values: impl Fn(u32) -> &'p [f32],
        mut out: &mut [f32],
    ) {
        let together = |a: &AttentionRow<'_>, b: &AttentionRow<'_>| {
            let is_node = |row: &AttentionRow<'_>| row.nodes != NodeSet::default();
            let alike = match (is_node(a), is_node(b)) {
                (false, false) => true,
                (true, true) => a.prefix_len == b.prefix_len,
                _ => false,
            };
            alike && std::ptr::eq(a.table, b.table)
        };
        for run in rows.chunk_by(together) {
            self.queries.clear();
            queries.by_ref().take(run.len()).for_each(|query| self.queries.extend_from_slice(query));
            let (run_out, rest) = out.split_at_mut(run.len() * head.group * head.head_dim);
            self.run(isa, head, run, &keys, &values, run_out);
            out = rest;
        }
    }

    /// Rows of one request.
    fn run<'p>(
        &mut self,
        isa: simd::Isa,
        Head { head_dim, group, scale }: Head,
        rows: &[AttentionRow<'_>],
        keys: impl Fn(u32) -> &'p [f32],
        values: impl Fn(u32) -> &'p [f32],
        out: &mut [f32],
    ) {
        let num_vectors = rows.len() * group;
        let pages = rows[0].table.pages();
        let num_rows = rows.iter().filter_map(AttentionRow::last_row).max().map_or(0, |last| last + 1);
        let num_pages = num_rows.div_ceil(PANEL);
        let stride = num_pages * PANEL;
        self.weights.resize(num_vectors * stride, 0.0);
        self.acc.resize(num_vectors, [0.0; PANEL]);
        // Scores of all keys, visible or not.
        for (place, &page) in pages[..num_pages].iter().enumerate() {
            // The caches have seen all of the model's weights since these were last read.
            simd::prefetch(values(page));
            if let Some(&next) = pages[..num_pages].get(place + 1) {
                simd::prefetch(keys(next));
            }
            self.acc.fill([0.0; PANEL]);
            simd::accumulate(isa, &self.queries, head_dim, keys(page), &mut self.acc, &[]);
            for (weights, acc) in self.weights.chunks_exact_mut(stride).zip(&self.acc) {
                weights[place * PANEL..][..PANEL].copy_from_slice(acc);
            }
        }
        // Per vector: close the gaps, so that visible keys stand in order of position; then the softmax.
        self.sums.clear();
        for (row, weights) in rows.iter().zip(self.weights.chunks_exact_mut(stride * group)) {
            for weights in weights.chunks_exact_mut(stride) {
                let mut visible = row.prefix_len;
                for node in row.nodes.iter() {
                    weights[visible] = weights[row.prefix_len + node];
                    visible += 1;
                }
                self.sums.push(softmax_weights(&mut weights[..visible], scale));
                weights[visible..].fill(0.0);
            }
        }
        // Outputs: the prefix that all rows have, together; then each row's own rest, so that no row
        // touches a value that it doesn't see (which may be anything).
        let shared = rows.iter().map(|row| row.prefix_len).min().unwrap_or(0);
        for panel in 0..head_dim / PANEL {
            let values_at = |key: usize, count: usize| {
                let panel = &values(pages[key / PANEL])[panel * PANEL * PANEL..][..PANEL * PANEL];
                &panel[key % PANEL * PANEL..][..count * PANEL]
            };
            self.acc.fill([0.0; PANEL]);
            for (first, count) in runs(0, shared) {
                let (weights, values) = (&self.weights[first..], values_at(first, count));
                simd::accumulate(isa, weights, stride, values, &mut self.acc, &[]);
            }
            for (r, row) in rows.iter().enumerate() {
                let weights = &self.weights[r * group * stride..];
                let acc = &mut self.acc[r * group..(r + 1) * group];
                for (first, count) in runs(shared, row.prefix_len) {
                    simd::accumulate(isa, &weights[first..], stride, values_at(first, count), acc, &[]);
                }
                self.gathered.clear();
                for node in row.nodes.iter() {
                    self.gathered.extend_from_slice(values_at(row.prefix_len + node, 1));
                }
                simd::accumulate(isa, &weights[row.prefix_len..], stride, &self.gathered, acc, &[]);
            }
            let rows = out.chunks_exact_mut(head_dim);
            for ((out, acc), sum) in rows.zip(&self.acc).zip(&self.sums) {
                for (out, acc) in out[panel * PANEL..][..PANEL].iter_mut().zip(acc) {
                    *out = acc / sum;
                }
            }
        }
        debug_assert_eq!(num_vectors, self.sums.len());
    }
}

#[cfg(test)]
mod tests;
