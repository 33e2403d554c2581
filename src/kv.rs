//! KV rows: which pages hold a request's rows, which rows a verify step reserves, and which it keeps.
//!
//! A *row* is one token's keys and values in all layers. Rows of a request are numbered from 0; page `i` of
//! its table holds rows `i * page_size ..`. Nothing here touches memory: an engine or a backend does.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::tree::NodeId;

/// A fixed number of equal pages that requests share.
#[derive(Clone, Debug)]
pub struct PagePool {
    page_size: usize,
    num_pages: usize,
    free: Arc<Mutex<FreePages>>,
}

/// Pages that no table holds: those that came back, and all from `unused` on.
#[derive(Debug)]
struct FreePages {
    returned: Vec<u32>,
    unused: std::ops::Range<u32>,
}

impl FreePages {
    fn len(&self) -> usize {
        self.returned.len() + self.unused.len()
    }

    fn take(&mut self) -> Option<u32> {
        self.returned.pop().or_else(|| self.unused.next())
    }
}

impl PagePool {
    /// A pool of `num_pages` pages of `page_size` rows.
    ///
    /// # Errors
    /// *Misuse* when either is 0 or the pool has more than 2^31 pages.
    pub fn new(page_size: usize, num_pages: usize) -> Result<Self> {
        if page_size == 0 {
            return Err(Error::misuse("page size", "at least 1 row", 0));
        }
        let last = u32::try_from(num_pages).ok().filter(|pages| (1..=1 << 31).contains(pages));
        let last = last.ok_or_else(|| Error::misuse("number of pages", "1..=2^31", num_pages))?;
        let free = FreePages { returned: Vec::new(), unused: 0..last };
        Ok(Self { page_size, num_pages, free: Arc::new(Mutex::new(free)) })
    }

    /// Rows in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages in the pool, free or not.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Pages that no table holds.
    pub fn num_free_pages(&self) -> usize {
        self.with_free(|free| free.len())
    }

    /// A table without rows. Its pages return to this pool when it is dropped.
    pub fn table(&self) -> PageTable {
        PageTable { pool: self.clone(), pages: Vec::new(), len: 0 }
    }

    fn with_free<R>(&self, action: impl FnOnce(&mut FreePages) -> R) -> R {
        // The list is whole after every action, so a panic elsewhere leaves nothing to repair.
        action(&mut self.free.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The pages of one request, and how many rows of them are committed.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    pages: Vec<u32>,
    len: usize,
}

impl PageTable {
    /// Number of committed rows.
    #[allow(clippy::len_without_is_empty)] // a count of rows, not a collection
    pub fn len(&self) -> usize {
        self.len
    }

    /// Rows in a page.
    pub fn page_size(&self) -> usize {
        self.pool.page_size
    }

    /// The page ids, in row order; pages past the committed rows are reserved.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Where a row lies: `page * page_size + offset`, an index over all pages of the pool.
    ///
    /// # Panics
    /// When the row's page is not reserved.
    pub fn slot(&self, row: usize) -> usize {
        let size = self.pool.page_size;
        self.pages[row / size] as usize * size + row % size
    }

    /// Reserves `num_rows` rows after the committed ones. Dropping the lease gives them back.
    ///
    /// # Errors
    /// *Fault* when the pool has too few free pages; nothing is reserved then.
    pub fn lease(&mut self, num_rows: usize) -> Result<Lease<'_>> {
        self.reserve(num_rows)?;
        Ok(Lease { table: self, num_rows })
    }

    pub(crate) fn reserve(&mut self, num_rows: usize) -> Result<()> {
        let wanted = self.len.saturating_add(num_rows).div_ceil(self.pool.page_size);
        let missing = wanted.saturating_sub(self.pages.len());
        let pages = &mut self.pages;
        self.pool.with_free(|free| {
            if free.len() < missing {
                return Err(Error::fault("free KV pages", missing, free.len()));
            }
            pages.extend(std::iter::from_fn(|| free.take()).take(missing));
            Ok(())
        })
    }

    /// Commits the first `num_rows` reserved rows; what was reserved beyond stays reserved.
    pub(crate) fn advance(&mut self, num_rows: usize) {
        debug_assert!(self.len + num_rows <= self.pages.len() * self.pool.page_size);
        self.len += num_rows;
    }

    /// Gives back every page that holds no committed row.
    pub(crate) fn trim(&mut self) {
        let kept = self.len.div_ceil(self.pool.page_size);
        let spare = self.pages.drain(kept.min(self.pages.len())..).rev();
        self.pool.with_free(|free| free.returned.extend(spare));
    }

    /// Gives back all rows.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.trim();
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Rows reserved for one verify step. Commit some, or drop the lease and it is as if it had never been.
#[derive(Debug)]
#[must_use = "dropping a lease rolls it back"]
pub struct Lease<'table> {
    table: &'table mut PageTable,
    num_rows: usize,
}

impl Lease<'_> {
    /// The table, with pages for the reserved rows.
    pub fn table(&self) -> &PageTable {
        self.table
    }

    /// Number of reserved rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Keeps the first `num_rows` reserved rows and gives the rest back.
    ///
    /// # Errors
    /// *Misuse* when that is more than was reserved. The lease is rolled back then: no row is committed.
    pub fn commit(self, num_rows: usize) -> Result<()> {
        if num_rows > self.num_rows {
            let wanted = format_args!("at most the {} leased", self.num_rows).to_string();
            return Err(Error::misuse("committed rows", wanted, num_rows));
        }
        self.table.advance(num_rows);
        Ok(()) // the drop trims
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.table.trim();
    }
}

/// One row to copy within a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMove {
    /// The row to read, counted from the request's first.
    pub from: usize,
    /// The row to overwrite; always below `from`.
    pub to: usize,
}

/// What a verify step keeps of the rows it wrote: the accepted path, moved up against the committed rows.
///
/// A verify pass writes node `n` to row `prefix_len + n`. Of those rows the path's are kept, in path order,
/// from row `prefix_len` on. Positions need no fix: a node's position is its final one.
#[derive(Clone, Copy, Debug)]
pub struct CommitPlan<'a> {
    prefix_len: usize,
    path: &'a [NodeId],
}

impl<'a> CommitPlan<'a> {
    pub(crate) fn new(prefix_len: usize, path: &'a [NodeId]) -> Self {
        Self { prefix_len, path }
    }

    /// Rows that were committed before.
    #[cfg(feature = "cuda")]
    pub(crate) fn prefix_len(&self) -> usize {
        self.prefix_len
    }

    /// Rows that become committed by this plan.
    pub fn num_kept_rows(&self) -> usize {
        self.path.len()
    }

    /// The moves, ascending. Done in this order they may overlap: every row is read before it is
    /// overwritten, since each `to` is below its own `from` and above every earlier `to`.
    pub fn moves(&self) -> impl Iterator<Item = RowMove> + use<'a> {
        let prefix_len = self.prefix_len;
        let placed = self.path.iter().enumerate();
        placed
            .filter(|(place, node)| node.index() != *place)
            .map(move |(place, node)| RowMove { from: prefix_len + node.index(), to: prefix_len + place })
    }
}
