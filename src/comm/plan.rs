//! Which algorithm runs: a pure function of what was agreed when the group formed and of the number of rows, so
//! that ranks decide alike without a word.

use crate::error::{Error, Result};

/// The largest hidden size that a collective carries.
pub(super) const MAX_HIDDEN: usize = 16_384;
/// The most rows of one call; more are better served by a bandwidth-optimal collective.
pub(super) const MAX_ROWS: usize = 512;
/// How partials travel. All algorithms give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank sends its whole partial to every other: one hop, `world - 1` payloads.
    OneShot,
    /// Each rank owns a slice of the columns, collects their partials, finishes them and sends the result:
    /// two hops, `2 (world - 1) / world` payloads.
    TwoShot,
    /// Two shots within each island of four ranks, and one exchange of the islands' sums between: three hops,
    /// two payloads, half of a payload between the islands.
    Hierarchical,
}

/// From how many bytes on which algorithm is used: data, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Crossovers {
    /// Payloads (rows x hidden x 2 bytes) up to this are reduced in one shot.
    pub one_shot_max_bytes: usize,
    /// Payloads from this on are reduced hierarchically, if the world is 8; `usize::MAX` for never.
    pub hierarchical_min_bytes: usize,
}

impl Crossovers {
    /// What a model of the PCIe fabric predicts (54 GB/s per card and direction, 1 us per hop). Not measured on
    /// any card. Hierarchical is for hosts whose ranks 0-3 and 4-7 sit on two sockets or switches.
    pub const fn predicted(world: WorldSize, two_islands: bool) -> Self {
        let one_shot_max_bytes = match world {
            WorldSize::One | WorldSize::Two => usize::MAX,
            WorldSize::Four => 24 << 10,
            WorldSize::Eight => 6 << 10,
        };
        let hierarchical_min_bytes =
            if two_islands && matches!(world, WorldSize::Eight) { 28 << 10 } else { usize::MAX };
        Self { one_shot_max_bytes, hierarchical_min_bytes }
    }

    /// One algorithm for every payload, for measurements.
    pub const fn always(algorithm: Algorithm) -> Self {
        let (one_shot_max_bytes, hierarchical_min_bytes) = match algorithm {
            Algorithm::OneShot => (usize::MAX, usize::MAX),
            Algorithm::TwoShot => (0, usize::MAX),
            Algorithm::Hierarchical => (0, 0),
        };
        Self { one_shot_max_bytes, hierarchical_min_bytes }
    }
}

/// The number of ranks in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorldSize {
    /// No peers: the epilogue alone.
    One = 1,
    /// Two ranks.
    Two = 2,
    /// Four ranks.
    Four = 4,
    /// Eight ranks.
    Eight = 8,
}

impl WorldSize {
    /// The number of ranks.
    pub const fn get(self) -> usize {
        self as usize
    }

    /// Its ranks, in order.
    pub fn ranks(self) -> impl Iterator<Item = Rank> {
        (0..self as u8).map(Rank)
    }
}

impl TryFrom<usize> for WorldSize {
    type Error = Error;

    /// # Errors
    /// *Unsupported* for other numbers than 1, 2, 4 and 8.
    fn try_from(size: usize) -> Result<Self> {
        match size {
            1 => Ok(Self::One),
            2 => Ok(Self::Two),
            4 => Ok(Self::Four),
            8 => Ok(Self::Eight),
            _ => Err(Error::unsupported("world size", "1, 2, 4 or 8", size)),
        }
    }
}

/// A rank's index in its group. Not a device ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(u8);

impl Rank {
    /// Rank `index` of a group of `world`.
    ///
    /// # Errors
    /// *Misuse* when there is no such rank.
    pub fn new(index: usize, world: WorldSize) -> Result<Self> {
        match u8::try_from(index) {
            Ok(rank) if index < world.get() => Ok(Self(rank)),
            _ => Err(Error::misuse("rank", format!("below {}", world.get()), index)),
        }
    }

    /// The index.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// What all plans of a group have in common.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub(crate) world: WorldSize,
    pub(crate) hidden: usize,
    pub(crate) max_rows: usize,
    pub(crate) crossovers: Crossovers,
}

impl Shape {
    pub(crate) fn check(&self) -> Result<()> {
        if self.hidden == 0 || !self.hidden.is_multiple_of(64) || self.hidden > MAX_HIDDEN {
            let wanted = format!("a multiple of 64 up to {MAX_HIDDEN}");
            return Err(Error::unsupported("hidden size", wanted, self.hidden));
        }
        if self.max_rows == 0 {
            return Err(Error::misuse("max_rows", "at least 1", 0));
        }
        if self.max_rows > MAX_ROWS {
            let wanted = format!("at most {MAX_ROWS} (use another collective for more)");
            return Err(Error::unsupported("max_rows", wanted, self.max_rows));
        }
        if self.world != WorldSize::Eight && self.crossovers.hierarchical_min_bytes != usize::MAX {
            let seen = format!("{} ranks with hierarchical_min_bytes", self.world.get());
            return Err(Error::misuse("crossovers", "a world of 8 for the hierarchical algorithm", seen));
        }
        Ok(())
    }

    /// The number of rows of a call with `len` elements.
    pub(crate) fn rows(&self, len: usize) -> Result<usize> {
        let rows = len / self.hidden;
        if rows == 0 || len != rows * self.hidden {
            let wanted = format!("one or more rows of {}", self.hidden);
            return Err(Error::misuse("partial", wanted, format!("{len} elements")));
        }
        if rows > self.max_rows {
            let wanted = format!("at most {}, as agreed when the group formed", self.max_rows);
            return Err(Error::unsupported("rows", wanted, rows));
        }
        Ok(rows)
    }

    pub(crate) fn algorithm(&self, rows: usize) -> Algorithm {
        let bytes = rows * self.hidden * 2;
        if self.world == WorldSize::One || bytes <= self.crossovers.one_shot_max_bytes {
            Algorithm::OneShot
        } else if bytes >= self.crossovers.hierarchical_min_bytes {
            Algorithm::Hierarchical
        } else {
            Algorithm::TwoShot
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(world: WorldSize, hidden: usize, max_rows: usize) -> Shape {
        Shape { world, hidden, max_rows, crossovers: Crossovers::predicted(world, true) }
    }

    #[test]
    fn crossovers_choose() {
        let algorithm = |world, rows| shape(world, 7168, 512).algorithm(rows);
        use {Algorithm::*, WorldSize::*};
        assert_eq!([1, 8, 512].map(|rows| algorithm(Two, rows)), [OneShot; 3]);
        assert_eq!([1, 2, 64].map(|rows| algorithm(Four, rows)), [OneShot, TwoShot, TwoShot]);
        assert_eq!([1, 2, 64].map(|rows| algorithm(Eight, rows)), [TwoShot, Hierarchical, Hierarchical]);
        assert_eq!(shape(Eight, 64, 8).algorithm(8), OneShot);
        let flat = Shape { crossovers: Crossovers::predicted(Eight, false), ..shape(Eight, 7168, 512) };
        assert_eq!(flat.algorithm(512), TwoShot);
    }

    #[test]
    fn impossible_shapes_are_errors() {
        use WorldSize::*;
        for bad in [shape(Two, 72, 1), shape(Two, 0, 1), shape(Two, 16_448, 1), shape(Two, 64, 0)] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(shape(Two, 64, 513).check().unwrap_err().to_string().contains("another collective"));
        let island = Shape { crossovers: Crossovers::always(Algorithm::Hierarchical), ..shape(Four, 64, 1) };
        assert!(island.check().is_err());
        let good = shape(Two, 64, 4);
        assert!(good.rows(0).is_err() && good.rows(65).is_err() && good.rows(5 * 64).is_err());
        assert!(WorldSize::try_from(3).is_err() && Rank::new(2, Two).is_err());
    }
}
