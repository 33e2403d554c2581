//! The rows that verify steps keep, moved in an engine's own paged KV cache: all requests and layers in one launch.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use super::context::{Cuda, Kernel};
use super::launch;
use super::memory::Memory;
use super::staging::Upload;
use crate::error::{Error, Result};
use crate::kv::{CommitPlan, PageTable};

/// Threads of a block of `kv.cu`: `kRowThreads`.
pub(super) const THREADS: u32 = 128;
/// Columns of a chunk, one for each lane of a warp.
const CHUNK_COLUMNS: u32 = 32;
/// Of one token in all planes. The largest models have about 1 MiB.
const MAX_ROW_BYTES: usize = 1 << 26;

/// How one array of a paged KV cache lies in memory.
///
/// The array is `[pages, rows of a page, parts of a row]`, in any order of its strides; a part is `part_bytes`
/// neighbouring bytes. Whatever an engine keeps for a token is one or more such arrays: keys, values, latent
/// rows, scales. Some layouts, with `e` bytes in an element:
///
/// | cache | layout |
/// |---|---|
/// | `[pages, page_size, heads, dim]` (NHD) | [`rows`](Self::rows)`(pages, page_size, heads * dim * e)` |
/// | `[2, pages, page_size, heads, dim]` | two of NHD |
/// | `[pages, heads, page_size, dim]` (HND) | [`heads`](Self::heads)`(pages, page_size, heads, dim * e)` |
/// | `[pages, 2, page_size, heads, dim]` | two of NHD with twice the `page_stride`; or one with two parts |
/// | `[pages, 2, heads, page_size, dim]` | [`heads`](Self::heads)`(pages, page_size, 2 * heads, dim * e)` |
/// | `[pages, heads, dim / x, page_size, x]` | [`heads`](Self::heads)`(pages, page_size, heads * dim / x, x * e)` |
/// | in a page all rows, then all rows' scales | two with the whole page's `page_stride` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Pages in the cache.
    pub num_pages: usize,
    /// Bytes from a page to the next.
    pub page_stride: usize,
    /// Bytes from a row to the next in its page.
    pub row_stride: usize,
    /// Parts of a row; 1 for rows without gaps.
    pub num_parts: usize,
    /// Bytes from a part to the next in its row.
    pub part_stride: usize,
    /// Bytes of a part.
    pub part_bytes: usize,
}

impl KvLayout {
    /// `[num_pages, page_size, row_bytes]`.
    pub const fn rows(num_pages: usize, page_size: usize, row_bytes: usize) -> Self {
        Self {
            num_pages,
            page_stride: page_size.saturating_mul(row_bytes),
            row_stride: row_bytes,
            num_parts: 1,
            part_stride: row_bytes,
            part_bytes: row_bytes,
        }
    }

    /// `[num_pages, num_heads, page_size, head_bytes]`: a row has its heads as parts.
    pub const fn heads(num_pages: usize, page_size: usize, num_heads: usize, head_bytes: usize) -> Self {
        let part_stride = page_size.saturating_mul(head_bytes);
        Self {
            num_pages,
            page_stride: num_heads.saturating_mul(part_stride),
            row_stride: head_bytes,
            num_parts: num_heads,
            part_stride,
            part_bytes: head_bytes,
        }
    }

    /// Count and stride of pages, rows and parts.
    fn dimensions(&self, page_size: usize) -> [(usize, usize); 3] {
        [(self.num_pages, self.page_stride), (page_size, self.row_stride), (self.num_parts, self.part_stride)]
    }

    /// The bytes from the first to the last; none when there are too many, or parts overlap: each stride must pass
    /// over all that the smaller ones span.
    fn extent(&self, page_size: usize) -> Option<usize> {
        let mut dimensions = self.dimensions(page_size);
        dimensions.sort_unstable_by_key(|(_, stride)| *stride);
        dimensions.iter().filter(|(count, _)| *count > 1).try_fold(
            self.part_bytes,
            |extent, (count, stride)| {
                let is_apart = *stride >= extent;
                (count - 1).checked_mul(*stride)?.checked_add(extent).filter(|_| is_apart)
            },
        )
    }
}

/// One array of an engine's KV cache in device memory.
#[derive(Clone, Copy, Debug)]
pub struct KvPlane {
    address: u64,
    layout: KvLayout,
}

impl KvPlane {
    /// The array at a device address.
    ///
    /// # Safety
    /// For as long as a [`KvMover`] that it is given to queues work, and until that has run:
    ///
    /// * all rows of the layout are memory of the mover's device;
    /// * no other plane of the mover shares a byte with them;
    /// * other streams than the mover's neither read rows that are overwritten nor write any that are moved.
    pub unsafe fn from_raw(address: u64, layout: KvLayout) -> Self {
        Self { address, layout }
    }

    /// As the kernel has it, if there can be such pages. Its rows have at most [`MAX_ROW_BYTES`].
    fn pack(&self, page_size: usize) -> Result<Plane> {
        let layout = &self.layout;
        let seen = || format!("{:#x} and {layout:?}", self.address);
        let is_counted = (1..=1 << 31).contains(&layout.num_pages) && layout.num_parts > 0;
        if !is_counted || layout.part_bytes == 0 {
            return Err(Error::misuse("KV plane", "1..=2^31 pages of rows with parts and bytes", seen()));
        }
        let extent = layout.extent(page_size).map(|extent| extent as u64);
        if self.address == 0 || extent.and_then(|extent| self.address.checked_add(extent)).is_none() {
            let wanted = format!("an address, and pages of {page_size} rows that don't overlap");
            return Err(Error::misuse("KV plane", wanted, seen()));
        }
        let strides = layout.dimensions(page_size).into_iter().filter(|(count, _)| *count > 1);
        let bits =
            strides.fold(self.address | layout.part_bytes as u64, |bits, (_, stride)| bits | stride as u64);
        let unit_bytes = match bits.trailing_zeros() {
            4.. => 16,
            2.. => 4,
            _ => 1,
        };
        let part_units = layout.part_bytes as u32 / unit_bytes;
        Ok(Plane {
            address: self.address,
            page_stride: layout.page_stride as u64,
            row_stride: layout.row_stride as u64,
            part_stride: layout.part_stride as u64,
            part_units,
            columns: part_units * layout.num_parts as u32,
            unit_bytes,
            reserved: 0,
        })
    }
}

/// What a [`KvMover`] is made for.
#[derive(Clone, Debug)]
pub struct KvMoverConfig {
    /// All arrays of the cache: of each layer keys and values, or latent rows, and their scales.
    pub planes: Vec<KvPlane>,
    /// Rows in a page, the same for all planes.
    pub page_size: usize,
    /// The most moves of a call, from 1 to 65,535. A request has at most as many as its tree is deep.
    pub max_moves: usize,
}

/// A row to copy, in all planes. Both are slots: `page * page_size + row in the page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMove {
    /// The slot to read.
    pub from: usize,
    /// The slot to overwrite.
    pub to: usize,
}

/// Moves the rows that verify steps keep, in an engine's own KV cache in device memory.
///
/// A call takes all requests of a step, uploads their moves, and is one launch over all planes; with nothing to
/// move, it is nothing. It does not wait for the kernel, and allocates nothing; only for more than 64 KiB of moves,
/// about 3,000, may the driver wait for the stream to take them. As moves are of the step, graphs cannot capture
/// them.
///
/// Rows are moved in place, without a copy of the cache: each destination ends as its source was before the call,
/// however they overlap. Bytes between rows, and other rows, are not touched.
///
/// ```no_run
/// # fn main() -> eagle_verify::Result<()> {
/// use eagle_verify::PagePool;
/// use eagle_verify::backend::cuda::{Cuda, KvLayout, KvMover, KvMoverConfig, KvPlane};
///
/// // Two layers of a cache `[pages, 16, heads, dim]` in bf16.
/// # let (addresses, verdicts, mut tables) = ([[0u64; 2]; 2], Vec::<eagle_verify::Verdict>::new(), Vec::new());
/// let layout = KvLayout::rows(4096, 16, 8 * 128 * 2);
/// // SAFETY: the engine allocated both for its life, and its work on the cache is on this stream.
/// let planes = addresses.as_flattened().iter().map(|address| unsafe { KvPlane::from_raw(*address, layout) });
/// let cuda = Cuda::new(0)?;
/// let config = KvMoverConfig { planes: planes.collect(), page_size: 16, max_moves: 64 * 8 };
/// let mut mover = KvMover::new(&cuda, config)?;
///
/// let pool = PagePool::new(16, 4096)?;
/// # tables.push(pool.table());
/// // After a step, for all requests at once, before their leases are committed:
/// mover.commit(tables.iter().zip(&verdicts).map(|(table, verdict)| (table, verdict.commit_plan())))?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct KvMover {
    cuda: Cuda,
    kernel: Kernel,
    page_size: usize,
    /// Of the plane with the fewest.
    num_pages: usize,
    max_moves: usize,
    num_chunks: u32,
    /// Where the chunks are, and the planes.
    chunks: Memory,
    planes: Memory,
    /// What `list` has made.
    lists: Upload<u32>,
    list: MoveList,
}

impl KvMover {
    /// Loads the kernel, allocates, and uploads what the planes are.
    ///
    /// # Errors
    /// *Misuse* when there are no planes, a count is 0 or out of its range, a plane's rows overlap or are beyond all
    /// addresses, or a token has more than 64 MiB in all planes; *unsupported* when the images lack the kernel;
    /// *fault* when the device has no memory.
    pub fn new(cuda: &Cuda, config: KvMoverConfig) -> Result<Self> {
        let KvMoverConfig { planes, page_size, max_moves } = config;
        if !(1..=1 << 31).contains(&page_size) {
            return Err(Error::misuse("page size", "1..=2^31 rows", page_size));
        }
        if !(1..65_536).contains(&max_moves) {
            return Err(Error::misuse("moves of a call", "1..=65535", max_moves));
        }
        let Some(num_pages) = planes.iter().map(|plane| plane.layout.num_pages).min() else {
            return Err(Error::misuse("KV planes", "at least 1", 0));
        };
        let row_bytes = planes.iter().try_fold(0, |sum: usize, KvPlane { layout, .. }| {
            sum.checked_add(layout.part_bytes.checked_mul(layout.num_parts)?)
        });
        if row_bytes.is_none_or(|bytes| bytes > MAX_ROW_BYTES) {
            let seen = row_bytes.map_or("more than can be counted".into(), |bytes| bytes.to_string());
            return Err(Error::misuse(
                "bytes of a row in all KV planes",
                format!("at most {MAX_ROW_BYTES}"),
                seen,
            ));
        }
        let packed = planes.iter().map(|plane| plane.pack(page_size)).collect::<Result<Vec<Plane>>>()?;
        let chunks_of = |(plane, packed): (usize, &Plane)| {
            let columns = (0..packed.columns).step_by(CHUNK_COLUMNS as usize);
            columns.map(move |first_column| Chunk { plane: plane as u32, first_column })
        };
        let chunks: Vec<_> = packed.iter().enumerate().flat_map(chunks_of).collect();
        Ok(Self {
            cuda: cuda.clone(),
            kernel: cuda.kernel("ev_kv_commit")?,
            page_size,
            num_pages,
            max_moves,
            num_chunks: chunks.len() as u32, // far below 2^31, by the rows' bytes
            chunks: cuda.upload(&chunks)?.into_memory(),
            planes: cuda.upload(&packed)?.into_memory(),
            lists: Upload::new(cuda, MoveList::bytes(max_moves) / 4)?,
            list: MoveList::with_capacity(max_moves),
        })
    }

    /// Queues the moves of a step's plans, each with the table of its request, as it was for the step: with the pages
    /// of all nodes, before its lease is committed.
    ///
    /// # Errors
    /// *Misuse*, before anything is queued, when a table's pages are of another size or not of this cache, a plan is
    /// of another step or request than its table (it starts after other committed rows, or a row has no page), two
    /// tables share a row that is overwritten, or there are too many moves. *Fault* when the device fails.
    pub fn commit<'a>(
        &mut self,
        kept: impl IntoIterator<Item = (&'a PageTable, CommitPlan<'a>)>,
    ) -> Result<()> {
        self.list.clear();
        for (table, plan) in kept {
            if table.page_size() != self.page_size {
                return Err(Error::misuse("page size of a KV table", self.page_size, table.page_size()));
            }
            if table.len() != plan.prefix_len() {
                let wanted = format!("as many as before the plan's, {}", plan.prefix_len());
                return Err(Error::misuse("committed rows of a KV table", wanted, table.len()));
            }
            let num_rows = table.pages().len() * self.page_size;
            for step in plan.moves() {
                // Sources are above destinations.
                if step.from >= num_rows {
                    let wanted = format!("below the {num_rows} that its table has pages for");
                    return Err(Error::misuse("KV row to keep", wanted, step.from));
                }
                self.push(SlotMove { from: table.slot(step.from), to: table.slot(step.to) })?;
            }
            self.list.end_request();
        }
        self.queue()
    }

    /// Queues moves by slots, for engines with tables of their own: an item is the moves of one request.
    ///
    /// In each request's order, no source may be the destination of an earlier move: then every row is read before
    /// it is overwritten. That is so for [`CommitPlan::moves`], with rows made slots by any table.
    ///
    /// # Errors
    /// *Misuse*, before anything is queued, when a slot is beyond the cache, a source is the destination of an
    /// earlier move, or of any move of another request, two moves have one destination, or there are too many.
    /// *Fault* when the device fails.
    pub fn move_slots<M: IntoIterator<Item = SlotMove>>(
        &mut self,
        requests: impl IntoIterator<Item = M>,
    ) -> Result<()> {
        self.list.clear();
        for moves in requests {
            moves.into_iter().try_for_each(|step| self.push(step))?;
            self.list.end_request();
        }
        self.queue()
    }

    fn push(&mut self, step: SlotMove) -> Result<()> {
        // Both counts are at most 2^31.
        let num_slots = self.num_pages as u64 * self.page_size as u64;
        if let Some(slot) = [step.from, step.to].into_iter().find(|slot| *slot as u64 >= num_slots) {
            return Err(Error::misuse("KV slot", format!("below {num_slots}"), slot));
        }
        if self.list.moves.len() == self.max_moves {
            return Err(Error::misuse("moves of a call", format!("at most {}", self.max_moves), "more"));
        }
        let place = |slot: usize| ((slot / self.page_size) as u32, (slot % self.page_size) as u32);
        let ((from_page, from_row), (to_page, to_row)) = (place(step.from), place(step.to));
        self.list.push(step, Move { from_page, from_row, to_page, to_row });
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        self.list.check()?;
        let (num_moves, num_requests) = (self.list.moves.len(), self.list.num_requests());
        if num_moves == 0 {
            return Ok(());
        }
        self.lists.queue(self.list.words())?;
        let mut arguments = Commit {
            planes: self.planes.address,
            chunks: self.chunks.address,
            moves: self.lists.address(),
            starts: self.lists.address() + (num_moves * size_of::<Move>()) as u64,
            num_chunks: self.num_chunks,
            reserved: 0,
        };
        let blocks = self.num_chunks.div_ceil(THREADS / CHUNK_COLUMNS);
        let grid = (blocks, num_requests as u32, 1); // at most as many requests as moves
        // SAFETY:
        // - layout: `Commit` is the kernel's only parameter, and the tables have what it says (the offsets below).
        // - bounds: `push` saw that slots are in the cache, `KvPlane::pack` how far that reaches; that it is there is
        //   the obligation of who made the planes.
        // - aliasing: `MoveList::check` saw that a row that is written is no other request's; a thread has its
        //   columns to itself, since parts of a plane don't overlap (`extent`), nor do planes.
        // - lifetime: the tables are this value's, which waits for the stream before it frees them.
        unsafe { launch::queue(&self.cuda, self.kernel, grid, THREADS, 0, &mut arguments) }
    }
}

/// The moves of a call, as the kernel reads them. Allocates no more than once.
#[derive(Debug)]
struct MoveList {
    moves: Vec<Move>,
    /// The first move of each request that has any, and the end.
    starts: Vec<u32>,
    slots: Vec<SlotUse>,
    words: Vec<u32>,
}

/// A slot of a move, for [`MoveList::check`]: in its order destinations come before the sources of the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SlotUse {
    slot: u64,
    is_source: bool,
    index: u32,
}

impl MoveList {
    fn with_capacity(max_moves: usize) -> Self {
        let mut starts = Vec::with_capacity(max_moves + 1);
        starts.push(0);
        Self {
            moves: Vec::with_capacity(max_moves),
            starts,
            slots: Vec::with_capacity(2 * max_moves),
            words: Vec::with_capacity(Self::bytes(max_moves) / 4),
        }
    }

    /// Of moves and starts.
    fn bytes(max_moves: usize) -> usize {
        max_moves * size_of::<Move>() + (max_moves + 1) * 4
    }

    fn clear(&mut self) {
        self.moves.clear();
        self.starts.truncate(1);
        self.slots.clear();
    }

    fn push(&mut self, step: SlotMove, packed: Move) {
        let index = self.moves.len() as u32; // at most 65,535
        self.slots.push(SlotUse { slot: step.from as u64, is_source: true, index });
        self.slots.push(SlotUse { slot: step.to as u64, is_source: false, index });
        self.moves.push(packed);
    }

    fn end_request(&mut self) {
        let end = self.moves.len() as u32;
        if self.starts.last() != Some(&end) {
            self.starts.push(end);
        }
    }

    fn num_requests(&self) -> usize {
        self.starts.len() - 1
    }

    /// Sees that every row is read before it is overwritten, and by the request that overwrites it alone.
    fn check(&mut self) -> Result<()> {
        self.slots.sort_unstable();
        let starts = &self.starts;
        let request = |index: u32| starts.partition_point(|start| *start <= index);
        for uses in self.slots.chunk_by(|a, b| a.slot == b.slot) {
            let [SlotUse { slot, is_source: false, index: writer }, others @ ..] = uses else { continue };
            for other in others {
                if !other.is_source {
                    return Err(Error::misuse("moves of KV rows", "one for each slot to overwrite", slot));
                }
                if request(other.index) != request(*writer) {
                    let wanted = "requests that don't overwrite each other's";
                    return Err(Error::misuse("moves of KV rows", wanted, format!("slot {slot} in two")));
                }
                if other.index > *writer {
                    let wanted = "an order in which each slot is read before it is overwritten";
                    return Err(Error::misuse("moves of KV rows", wanted, format!("slot {slot} read after")));
                }
            }
        }
        Ok(())
    }

    /// The moves, then the starts.
    fn words(&mut self) -> &[u32] {
        self.words.clear();
        self.words.extend_from_slice(bytemuck::cast_slice(&self.moves));
        self.words.extend_from_slice(&self.starts);
        &self.words
    }
}

/// `EvKvPlane`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Plane {
    address: u64,
    page_stride: u64,
    row_stride: u64,
    part_stride: u64,
    part_units: u32,
    columns: u32,
    unit_bytes: u32,
    reserved: u32,
}

/// `EvKvChunk`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Chunk {
    plane: u32,
    first_column: u32,
}

/// `EvKvMove`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Move {
    from_page: u32,
    from_row: u32,
    to_page: u32,
    to_row: u32,
}

/// `EvKvCommit`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Commit {
    planes: u64,
    chunks: u64,
    moves: u64,
    starts: u64,
    num_chunks: u32,
    reserved: u32,
}

// The offsets that abi.h asserts.
const _: () = {
    assert!(offset_of!(Plane, address) == 0);
    assert!(offset_of!(Plane, page_stride) == 8);
    assert!(offset_of!(Plane, row_stride) == 16);
    assert!(offset_of!(Plane, part_stride) == 24);
    assert!(offset_of!(Plane, part_units) == 32);
    assert!(offset_of!(Plane, columns) == 36);
    assert!(offset_of!(Plane, unit_bytes) == 40);
    assert!(size_of::<Plane>() == 48);
    assert!(offset_of!(Chunk, plane) == 0);
    assert!(offset_of!(Chunk, first_column) == 4);
    assert!(size_of::<Chunk>() == 8);
    assert!(offset_of!(Move, from_page) == 0);
    assert!(offset_of!(Move, from_row) == 4);
    assert!(offset_of!(Move, to_page) == 8);
    assert!(offset_of!(Move, to_row) == 12);
    assert!(size_of::<Move>() == 16);
    assert!(offset_of!(Commit, planes) == 0);
    assert!(offset_of!(Commit, chunks) == 8);
    assert!(offset_of!(Commit, moves) == 16);
    assert!(offset_of!(Commit, starts) == 24);
    assert!(offset_of!(Commit, num_chunks) == 32);
    assert!(size_of::<Commit>() == 40);
};
