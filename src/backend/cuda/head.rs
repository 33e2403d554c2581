//! The EAGLE-3 head on a GPU: what to draft comes up in one copy, the candidates come down in one, and in between
//! all levels run as one graph.

mod abi;
pub mod cost;
mod layer;
mod linears;
mod waiting;

use std::collections::HashMap;
use std::ops::Range;

use super::choose::{ChooseRow, ChooserConfig, Packer, RowChooser};
use super::context::Cuda;
use super::gather::{GatherFeatures, queue_gather};
use super::graph::Graph;
use super::linear::Halves;
use super::staging::{Staging, Upload};
use super::view::{Embedding, Format, View};
use crate::backend::{Backend, DraftLimits, DraftState, MasksBySlot};
use crate::draft::{Eagle3Checkpoint, Eagle3Config, Weights};
use crate::error::{Error, Result};
use crate::kv::PageTable;
use crate::sampling::{ChoiceKey, Sampler, SamplingContext, TokenLogProb};
use crate::tree::{DraftTree, TokenId};
use abi::{NONE, PASS_ROWS};
use layer::{Layer, Levels, PAGE_SIZE, StepPlaces, num_chunks};
use waiting::Waiting;

/// Graphs that are kept at most: those used last. Each holds memory of the host and of the device.
const MAX_GRAPHS: usize = 64;

/// The head, the features that wait for it, and what a step needs.
#[derive(Debug)]
pub struct CudaHead {
    // Before the memory that they use.
    graphs: HashMap<Levels, LevelsGraph>,
    cuda: Cuda,
    config: Eagle3Config,
    layer: Layer,
    waiting: Waiting,
    step: Step,
    num_graph_launches: u64,
    /// The pages of each slot that the device knows.
    pages: Vec<Vec<u32>>,
    /// Requests of this step that draft: their slots. And of those, the ones with filters, penalties or bias.
    drafting: Vec<usize>,
    filtering: Vec<usize>,
    filters: Packer,
    filters_up: Upload<u32>,
    least_bucket: usize,
    pools: Staging<u32>,
    masks: Masks,
    chooser: RowChooser,
}

#[derive(Debug)]
struct LevelsGraph {
    graph: Graph,
    /// The launch of any graph that was its last.
    last_launch: u64,
}

/// What goes up in a step.
#[derive(Debug)]
struct Step {
    requests: Vec<abi::Request>,
    rows: Vec<abi::Row>,
    pairs: Vec<abi::Row>,
    /// Which of the waiting rows is each pair's.
    features: Vec<u32>,
    updates: Vec<abi::PageUpdate>,
    bytes: Vec<u8>,
    up: Upload<u8>,
    max_requests: usize,
}

/// Masks of allowed tokens for the rows of a level.
#[derive(Debug)]
struct Masks {
    rows: Staging<abi::Row>,
    path: Vec<TokenId>,
    words: Vec<u32>,
    up: Upload<u32>,
}

impl Backend for Cuda {
    type View<'a> = View<'a>;
    type Draft = CudaHead;
    type Embedding = Embedding;

    const KV_PAGE_SIZE: usize = PAGE_SIZE;
    const CHOOSES_AT_ONCE: bool = true;

    fn load_draft(
        &self,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<Embedding>,
        limits: DraftLimits,
        columns: &Range<usize>,
    ) -> Result<CudaHead> {
        CudaHead::new(self, checkpoint, embedding, limits, columns)
    }

    fn view_len(view: View<'_>) -> usize {
        view.len
    }

    fn part<'a>(view: Self::View<'a>, range: Range<usize>) -> Self::View<'a> {
        view.part(range)
    }

    fn keep_features(
        &self,
        draft: &mut CudaHead,
        features: View<'_>,
        rows: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()> {
        draft.keep_features(features, rows)
    }

    fn forget_features(&self, draft: &mut CudaHead, slot: usize, num_kept: usize) {
        let Waiting { of_slot, free, .. } = &mut draft.waiting;
        let num_kept = num_kept.min(of_slot[slot].len());
        free.extend(of_slot[slot].drain(num_kept..));
    }

    fn draft(
        &self,
        draft: &mut CudaHead,
        states: &mut [DraftState],
        active: &[usize],
        masks: Option<MasksBySlot<'_>>,
    ) -> Result<()> {
        let drafted = draft.draft(states, active, masks);
        if drafted.is_err() {
            // What the device knows of pages is unknown; and memory that graphs use may have moved before the failure.
            draft.pages.iter_mut().for_each(Vec::clear);
            draft.graphs.clear();
        }
        drafted
    }

    fn read_kv(&self, draft: &CudaHead, table: &PageTable, num_rows: usize) -> Result<Vec<f32>> {
        draft.layer.read_kv((0..num_rows).map(|row| table.slot(row)))
    }

    fn choose_all<'a>(
        &self,
        draft: &mut CudaHead,
        logits: View<'_>,
        rows: impl ExactSizeIterator<Item = (&'a Sampler, SamplingContext<'a>)>,
        keys: &mut Vec<ChoiceKey>,
    ) -> Result<()> {
        let rows = rows.map(|(sampler, context)| ChooseRow::new(sampler, context));
        let chosen = draft.chooser.choose(logits, rows)?;
        keys.clear();
        keys.extend_from_slice(chosen);
        Ok(())
    }

    fn log_prob(&self, logits: View<'_>, token: TokenId, count: usize) -> Result<TokenLogProb> {
        Ok(TokenLogProb::new(&logits.read(self)?, token, count))
    }
}

impl CudaHead {
    fn new(
        cuda: &Cuda,
        checkpoint: &Eagle3Checkpoint,
        embedding: Option<Embedding>,
        limits: DraftLimits,
        columns: &Range<usize>,
    ) -> Result<Self> {
        let config = checkpoint.config.clone();
        let embedding = match &checkpoint.embedding {
            Some(own) => match &own.weights {
                Weights::Bf16(table) => Embedding::new(cuda.upload(table)?, own.columns)?,
                Weights::F16(table) => Embedding::new(cuda.upload(table)?, own.columns)?,
                Weights::F32(table) => Embedding::new(cuda.upload(table)?, own.columns)?,
            },
            None => embedding.ok_or_else(|| {
                Error::misuse("embedding table", "the target's, as the head has none", "none")
            })?,
        };
        cuda.expect_own("embedding table", embedding.stream)?;
        config.expect_table(embedding.vocab(), embedding.hidden())?;
        let layer = Layer::new(cuda, checkpoint, embedding, limits)?;
        let max_requests = limits.max_requests;
        let max_rows = (max_requests * DraftTree::MAX_NODES).min(65_535);
        let chooser =
            ChooserConfig { columns: columns.clone(), ..ChooserConfig::new(max_rows, config.target.vocab) };
        Ok(Self {
            graphs: HashMap::with_capacity(MAX_GRAPHS),
            num_graph_launches: 0,
            waiting: Waiting::new(cuda, layer.half, &config, max_requests)?,
            step: Step::new(cuda, max_requests)?,
            pages: vec![Vec::new(); max_requests],
            drafting: Vec::new(),
            filtering: Vec::new(),
            filters: Packer::default(),
            filters_up: Upload::new(cuda, 0)?,
            least_bucket: 1,
            pools: Staging::new(cuda, 0)?,
            masks: Masks {
                rows: Staging::new(cuda, 0)?,
                path: Vec::new(),
                words: Vec::new(),
                up: Upload::new(cuda, 0)?,
            },
            chooser: RowChooser::new(cuda, chooser, &Format::ALL)?,
            layer,
            cuda: cuda.clone(),
            config,
        })
    }

    fn keep_features(
        &mut self,
        features: View<'_>,
        rows: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()> {
        self.cuda.expect_own("features", features.stream)?;
        features.expect_aligned("features", features.format.bytes())?;
        let waiting = &mut self.waiting;
        waiting.list.clear();
        let mut num_kept = 0;
        let kept = || -> Result<()> {
            for (slot, row) in rows {
                let place = waiting.place(&self.config)?;
                waiting.of_slot[slot].push_back(place);
                waiting.list.push([row as u32, place]);
                num_kept += 1;
            }
            if num_kept == 0 {
                return Ok(());
            }
            waiting.list_up.queue(&waiting.list)?;
            let mut arguments = GatherFeatures {
                features: features.address,
                rows: waiting.list_up.address(),
                high: waiting.high.address,
                low: waiting.low.address,
                width: self.config.feature_width() as u32,
                reserved: 0,
            };
            let kernel = waiting.gather[features.format as usize];
            // SAFETY: the kernel is that of the features' format and the planes' halves. `Speculator` compared the
            // view's length with its rows; the list and the planes are this store's own and wait for the stream
            // before they are freed; each place was free, so none is named twice.
            unsafe { queue_gather(&self.cuda, kernel, num_kept, &mut arguments) }
        };
        kept().inspect_err(|_| self.waiting.take_back())
    }

    fn draft(
        &mut self,
        states: &mut [DraftState],
        active: &[usize],
        masks: Option<MasksBySlot<'_>>,
    ) -> Result<()> {
        let levels = self.pack(states, active)?;
        if let Some(levels) = &levels
            && self.layer.reserve(levels)?
        {
            self.graphs.clear();
        }
        let before = (self.step.up.address(), self.filters_up.address());
        let mut places = self.step.upload(levels.map_or(0, |levels| levels.requests))?;
        places.filters = self.upload_filters(states)?;
        if (self.step.up.address(), self.filters_up.address()) != before {
            self.graphs.clear();
        }
        if !self.step.updates.is_empty() {
            self.layer.update_pages(places.updates, self.step.updates.len())?;
        }
        for first in (0..self.step.pairs.len()).step_by(PASS_ROWS) {
            let num_rows = PASS_ROWS.min(self.step.pairs.len() - first);
            let rows = places.pairs + (first * size_of::<abi::Row>()) as u64;
            let row_index = places.features + (first * 4) as u64;
            let Waiting { high, low, .. } = &self.waiting;
            let inputs = Halves { high: high.address, low: low.address, row_index };
            self.layer.extend(rows, num_rows, inputs)?;
        }
        if let Some(levels) = &levels {
            match masks {
                None => self.run_graph(levels, places)?,
                Some(masks) => self.run_masked(levels, places, masks)?,
            }
            let num_words = levels.requests * levels.pool_words();
            self.pools.reserve(num_words)?;
            self.pools.queue_download(num_words, self.layer.pools())?;
            // The one wait.
            let pools = self.pools.elements()?.chunks_exact(levels.pool_words());
            for (pool, &slot) in pools.zip(&self.drafting) {
                fill_pool(pool, self.config.target.vocab, &mut states[slot])?;
            }
        }
        for &slot in active {
            let num_committed = states[slot].commit_pairs();
            let Waiting { of_slot, free, .. } = &mut self.waiting;
            free.extend(of_slot[slot].drain(..num_committed));
        }
        Ok(())
    }

    /// Keys and values of all slots: their addresses and bytes. For tests that poison them.
    #[doc(hidden)]
    pub fn kv_memory(&self) -> [(u64, usize); 2] {
        self.layer.kv_memory()
    }

    /// Memory that no step finds anything in, as [`kv_memory`](Self::kv_memory).
    #[doc(hidden)]
    pub fn scratch_memory(&self) -> Vec<(u64, usize)> {
        let scratch = self.layer.scratch_memory().filter(|memory| memory.len() > 0);
        scratch.map(|memory| (memory.address, memory.len())).collect()
    }

    /// Captures levels for so many requests at least: for tests of graphs that are larger than their batch.
    #[doc(hidden)]
    pub fn set_least_bucket(&mut self, requests: usize) {
        self.least_bucket = requests;
    }

    /// Collects what goes up: pairs that wait, new pages, and of the requests that draft the last pair as the first
    /// row. `None` if no request drafts.
    fn pack(&mut self, states: &[DraftState], active: &[usize]) -> Result<Option<Levels>> {
        let Self { step, pages, waiting, drafting, filtering, .. } = self;
        step.clear();
        drafting.clear();
        filtering.clear();
        let (mut width, mut depth, mut longest, mut noise) = (0, 0, 0, false);
        for &slot in active {
            let DraftState { table, next_tokens, first_is_written, budget, text, .. } = &states[slot];
            let known = &mut pages[slot];
            for (index, &page) in table.pages().iter().enumerate() {
                if known.get(index) != Some(&page) {
                    known.truncate(index);
                    known.push(page);
                    step.updates.push(abi::PageUpdate { slot: slot as u32, index: index as u32, page });
                }
            }
            if next_tokens.is_empty() {
                continue;
            }
            let last = table.len() + next_tokens.len() - 1;
            let request = (budget.depth() > 0).then_some(drafting.len() as u32);
            // A pair that has run before runs again only to start the tree.
            let skipped = usize::from(*first_is_written && next_tokens.len() > 1);
            for (i, token) in next_tokens.iter().enumerate().skip(skipped) {
                let kv_row = table.len() + i;
                step.features.push(waiting.of_slot[slot][i]);
                step.pairs.push(abi::Row {
                    token: token.0,
                    position: kv_row as u32,
                    kv_slot: table.slot(kv_row) as u32,
                    keep: request.filter(|_| kv_row == last).unwrap_or(NONE),
                    ..abi::Row::default()
                });
            }
            let Some(request) = request else { continue };
            let params = text.sampler.params();
            let is_filtered =
                text.sampler.has_filters() || params.has_penalty() || !text.sampler.biases().is_empty();
            step.requests.push(abi::Request {
                seed: params.seed,
                slot: slot as u32,
                prefix_len: last as u32 + 1,
                width: budget.width() as u32,
                depth: budget.depth() as u32,
                position: text.committed.len() as u32,
                root: text.committed[text.committed.len() - 1].0,
                temperature: params.temperature,
                noise_scale: text.coupling.noise_scale,
                confidence_temperature: text.coupling.confidence_temperature,
                filter: if is_filtered { filtering.len() as u32 } else { NONE },
            });
            if is_filtered {
                filtering.push(slot);
            }
            step.rows.push(abi::Row {
                request,
                token: next_tokens[next_tokens.len() - 1].0,
                position: last as u32,
                kv_slot: NONE, // it is written already
                source: request,
                keep: NONE,
                ..abi::Row::default()
            });
            drafting.push(slot);
            (width, depth) = (width.max(budget.width()), depth.max(budget.depth()));
            longest = longest.max(last + 1);
            noise |= params.temperature > 0.0 && text.coupling.noise_scale > 0.0;
        }
        if drafting.is_empty() {
            return Ok(None);
        }
        let chunks = num_chunks(longest).next_power_of_two();
        let requests = drafting.len().max(self.least_bucket).next_power_of_two();
        let filters = !filtering.is_empty();
        Ok(Some(Levels { requests, width, depth, chunks, noise, filters }))
    }

    /// Queues a copy of what the requests with filters need, and says where it will be.
    fn upload_filters(&mut self, states: &[DraftState]) -> Result<u64> {
        if !self.filtering.is_empty() {
            let vocab = self.config.target.vocab;
            let rows = self.filtering.iter().map(|&slot| {
                let text = &states[slot].text;
                ChooseRow::new(&text.sampler, text.context(&[], None))
            });
            self.filters.pack(rows, vocab, &(0..vocab))?;
            self.filters_up.queue(self.filters.words())?;
        }
        Ok(self.filters_up.address())
    }

    /// All levels, with no word from the host in between.
    fn run_graph(&mut self, levels: &Levels, places: StepPlaces) -> Result<()> {
        self.num_graph_launches += 1;
        if !self.graphs.contains_key(levels) {
            if self.graphs.len() == MAX_GRAPHS
                && let Some((&oldest, _)) = self.graphs.iter().min_by_key(|(_, graph)| graph.last_launch)
            {
                self.graphs.remove(&oldest);
            }
            let layer = &self.layer;
            let graph = self.cuda.capture(|| {
                layer.start(levels, places)?;
                (1..=levels.depth).try_for_each(|level| layer.level(levels, level, places, 0))
            })?;
            self.graphs.insert(*levels, LevelsGraph { graph, last_launch: 0 });
        }
        let Some(LevelsGraph { graph, last_launch }) = self.graphs.get_mut(levels) else { return Ok(()) };
        *last_launch = self.num_graph_launches;
        // SAFETY: the recorded launches use memory of the layer and of the step, which live as long as the graph:
        // graphs are dropped when any of it moves, and before it when the head is dropped.
        unsafe { graph.launch() }
    }

    /// Level by level, since masks depend on what was drafted.
    fn run_masked(&mut self, levels: &Levels, places: StepPlaces, masks: MasksBySlot<'_>) -> Result<()> {
        let mask_words = self.config.target.vocab.div_ceil(32);
        self.layer.start(levels, places)?;
        for level in 1..=levels.depth {
            let Masks { rows, path, words, up } = &mut self.masks;
            let (num_rows, pool_words) = (levels.requests * levels.row_width(level), levels.pool_words());
            rows.reserve(num_rows)?;
            if level == 1 {
                rows.elements_mut()?[..num_rows].copy_from_slice(&self.step.rows);
            } else {
                rows.queue_download(num_rows, self.layer.level_rows(level))?;
            }
            self.pools.reserve(levels.requests * pool_words)?;
            self.pools.queue_download(levels.requests * pool_words, self.layer.pools())?;
            let (rows, pools) = (&rows.elements()?[..num_rows], self.pools.elements()?);
            words.clear();
            words.resize(num_rows * mask_words, u32::MAX);
            for (row, mask) in rows.iter().zip(words.chunks_exact_mut(mask_words)) {
                let Some(&slot) = self.drafting.get(row.request as usize) else { continue };
                let pool = &pools[row.request as usize * pool_words..][..pool_words];
                path_of(pool, row.candidate, path);
                if !masks(slot, path, mask) {
                    mask.fill(u32::MAX);
                }
            }
            up.queue(words)?;
            self.layer.level(levels, level, places, up.address())?;
        }
        Ok(())
    }
}

/// The candidates of a pool as it came down.
fn candidates(pool: &[u32]) -> &[abi::Candidate] {
    let num_candidates = (pool[0] as usize).min((pool.len() - 2) / 3);
    bytemuck::cast_slice(&pool[2..2 + 3 * num_candidates])
}

/// The drafts down to a candidate.
fn path_of(pool: &[u32], candidate: u32, path: &mut Vec<TokenId>) {
    let candidates = candidates(pool);
    path.clear();
    let mut at = candidate as usize;
    while at != 0
        && let Some(candidate) = candidates.get(at)
    {
        path.push(TokenId(candidate.token));
        at = (candidate.parent as usize).min(at - 1); // parents come first
    }
    path.reverse();
}

/// Gives a request its candidates.
fn fill_pool(pool: &[u32], vocab: usize, state: &mut DraftState) -> Result<()> {
    let candidates = candidates(pool);
    if candidates.is_empty() || candidates.len() != pool[0] as usize {
        let wanted = format!("1 to {} candidates", (pool.len() - 2) / 3);
        return Err(Error::fault("candidates from the device", wanted, pool[0]));
    }
    for (i, candidate) in candidates.iter().enumerate().skip(1) {
        let abi::Candidate { token, parent, score } = *candidate;
        if parent as usize >= i || token as usize >= vocab || score.is_nan() {
            let wanted = format!("tokens below {vocab} with a parent before them and a score");
            return Err(Error::fault("candidates from the device", wanted, format!("{candidate:?}")));
        }
    }
    let parts = candidates.iter().map(|c| (TokenId(c.token), c.parent as usize, c.score));
    state.pool.refill(parts);
    Ok(())
}

impl Step {
    fn new(cuda: &Cuda, max_requests: usize) -> Result<Self> {
        let fixed = Self::fixed_bytes(max_requests);
        Ok(Self {
            requests: Vec::new(),
            rows: Vec::new(),
            pairs: Vec::new(),
            features: Vec::new(),
            updates: Vec::new(),
            bytes: Vec::new(),
            up: Upload::new(cuda, fixed + 64 * 1024)?,
            max_requests,
        })
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.rows.clear();
        self.pairs.clear();
        self.features.clear();
        self.updates.clear();
    }

    /// Bytes of requests and first rows, which graphs find at the start.
    fn fixed_bytes(max_requests: usize) -> usize {
        let places = max_requests.next_power_of_two();
        places * (size_of::<abi::Request>() + size_of::<abi::Row>())
    }

    /// Queues one copy of all; `num_requests` counts those that fill up a graph's.
    fn upload(&mut self, num_requests: usize) -> Result<StepPlaces> {
        let places = self.max_requests.next_power_of_two();
        self.requests.resize(num_requests, abi::Request::default());
        self.rows.resize(num_requests, abi::Row { request: NONE, ..abi::Row::default() });
        let rows_at = places * size_of::<abi::Request>();
        let pairs_at = Self::fixed_bytes(self.max_requests);
        let features_at = pairs_at + size_of_val(&self.pairs[..]);
        let updates_at = features_at + size_of_val(&self.features[..]);
        self.bytes.clear();
        let parts: [(usize, &[u8]); 5] = [
            (0, bytemuck::cast_slice(&self.requests)),
            (rows_at, bytemuck::cast_slice(&self.rows)),
            (pairs_at, bytemuck::cast_slice(&self.pairs)),
            (features_at, bytemuck::cast_slice(&self.features)),
            (updates_at, bytemuck::cast_slice(&self.updates)),
        ];
        for (at, part) in parts {
            self.bytes.resize(at, 0);
            self.bytes.extend_from_slice(part);
        }
        self.up.queue(&self.bytes)?;
        let at = |offset: usize| self.up.address() + offset as u64;
        Ok(StepPlaces {
            requests: at(0),
            rows: at(rows_at),
            pairs: at(pairs_at),
            features: at(features_at),
            updates: at(updates_at),
            filters: 0,
        })
    }
}
