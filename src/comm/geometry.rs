//! With which blocks a call runs on a GPU, and over which memory: pure functions, as in `plan.rs`.

use super::plan::{Algorithm, Shape, WorldSize};

/// Elements in 16 bytes.
const PACK: usize = 8;

/// The geometry of a group's launches and the layout of its slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The warps of a block that share a column group. Bits don't depend on it.
    pub(crate) warps_per_group: u32,
    /// No call has more blocks.
    pub(crate) max_blocks: u32,
    /// Places for packs that each block has in one of a slab's two slots.
    pub(crate) block_packs: u32,
    pub(crate) packs_offset: u64,
    pub(crate) escapes_offset: u64,
    pub(crate) slab_bytes: usize,
}

/// What EV_MAX_THREADS in all_reduce_norm.cu allows.
const fn most_warps_per_group(world: WorldSize) -> usize {
    if matches!(world, WorldSize::Eight) { 2 } else { 4 }
}

/// The byte offset of what tells the slabs of processes apart, which no kernel touches: between `abort` and the tags.
pub(crate) const IDENTITY_OFFSET: usize = 128;
/// The byte offset of the tags in a slab.
const TAGS_OFFSET: usize = 256;
const NUM_SLOTS: usize = 2;

impl Geometry {
    /// `max_blocks` blocks of any rank can be resident at the same time.
    pub(crate) fn new(shape: &Shape, max_blocks: usize, max_warps_per_group: usize) -> Self {
        let max_blocks = max_blocks.min(shape.max_rows);
        let runs = (shape.hidden / 64).div_ceil(32);
        let mut geometry = Self {
            warps_per_group: runs.min(max_warps_per_group).min(most_warps_per_group(shape.world)) as u32,
            max_blocks: max_blocks as u32,
            block_packs: 0,
            packs_offset: 0,
            escapes_offset: 0,
            slab_bytes: 0,
        };
        let needed = |rows| geometry.block_packs_of(shape, rows);
        let block_packs = (1..=shape.max_rows).map(needed).max().unwrap_or(0);
        let slots = NUM_SLOTS * max_blocks * block_packs;
        let tags = NUM_SLOTS * shape.world.get() * max_blocks * 4;
        let packs_offset = (TAGS_OFFSET + tags).next_multiple_of(256);
        geometry.block_packs = block_packs as u32;
        geometry.packs_offset = packs_offset as u64;
        geometry.escapes_offset = (packs_offset + slots * 16) as u64;
        geometry.slab_bytes = packs_offset + slots * (16 + 4);
        geometry
    }

    /// Packs that a block receives, and sends to itself, in a call of `rows`.
    fn block_packs_of(&self, shape: &Shape, rows: usize) -> usize {
        let row_packs = shape.hidden / PACK;
        let payload = rows.div_ceil(self.blocks(rows) as usize) * row_packs;
        match (shape.world, shape.algorithm(rows)) {
            (WorldSize::One, _) => 0,
            (world, Algorithm::OneShot) => world.get() * payload,
            (_, Algorithm::TwoShot) => 2 * payload,
            // Partials, both islands' sums of a quarter in f32, results.
            (_, Algorithm::Hierarchical) => 3 * payload,
        }
    }

    /// Blocks of a call: as even as whole rows allow.
    pub(crate) fn blocks(&self, rows: usize) -> u32 {
        let rows = rows as u32;
        rows.div_ceil(rows.div_ceil(self.max_blocks))
    }

    pub(crate) fn threads(&self) -> u32 {
        8 * 32 * self.warps_per_group
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Crossovers;

    #[test]
    fn every_plan_is_launchable_and_fits_its_slab() {
        let mut planned = 0;
        for world in [WorldSize::One, WorldSize::Two, WorldSize::Four, WorldSize::Eight] {
            for hidden in [64, 576, 1024, 2880, 4096, 7168, 16_384] {
                for (max_rows, resident) in [(1, 1), (7, 188), (64, 47), (257, 23), (512, 64), (512, 1)] {
                    let crossovers = Crossovers::predicted(world, true);
                    let shape = Shape { world, hidden, max_rows, crossovers };
                    shape.check().unwrap();
                    let g = Geometry::new(&shape, resident, 4);
                    assert!(g.max_blocks as usize <= resident && g.threads() <= 1024);
                    assert!(g.packs_offset.is_multiple_of(16) && g.escapes_offset.is_multiple_of(4));
                    assert!(g.slab_bytes < 1 << 32);
                    for rows in 1..=max_rows {
                        assert_eq!(shape.rows(rows * hidden).unwrap(), rows);
                        let blocks = g.blocks(rows);
                        assert!(blocks >= 1 && blocks <= g.max_blocks);
                        assert!(g.block_packs_of(&shape, rows) <= g.block_packs as usize);
                        planned += 1;
                    }
                }
            }
        }
        assert!(planned > 10_000, "the sweep must not pass by planning nothing");
    }
}
