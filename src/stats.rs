//! What speculation did: counts whose names say what they count, and rates that follow from them.

use crate::error::{Error, Result};
use crate::tree::NodeId;
use crate::verify::{BatchEntry, Verdict};

/// Buckets of the calibration table: tenths of a probability.
const NUM_BUCKETS: usize = 10;

/// Counts over verify steps, of one request or of many.
///
/// A *verify step* is one request's part in one target forward. Steps that emitted nothing (cancelled, or a
/// faulty root row) are not counted. The identity [`num_emitted_tokens`](Self::num_emitted_tokens) =
/// [`num_correct_drafts`](Self::num_correct_drafts) + [`num_verify_steps`](Self::num_verify_steps) always
/// holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptStats {
    num_verify_steps: u64,
    num_proposed_drafts: u64,
    num_correct_drafts: u64,
    /// `[d]`: steps whose tree had a node at depth `d + 1`, and those that accepted one.
    depths: Vec<(u64, u64)>,
    /// `[r]`: accepted drafts that were their parent's `r`-th child.
    ranks: Vec<u64>,
    /// By the drafter's probability of the path: drafts proposed, and accepted.
    calibration: [(u64, u64); NUM_BUCKETS],
}

impl AcceptStats {
    /// Counts one verdict of a batch's entry.
    ///
    /// # Errors
    /// *Misuse* when the verdict's path is not one of the entry's tree.
    pub fn record(&mut self, entry: &BatchEntry, verdict: &Verdict) -> Result<()> {
        let tree = entry.tree();
        let known = |node: &NodeId| tree.node(node.index()).is_some();
        let linked = |pair: &[NodeId]| tree.parent(pair[1]) == Some(pair[0]);
        let path = &verdict.path;
        if !path.iter().all(known)
            || !path.windows(2).all(linked)
            || path.first().is_some_and(|n| n.index() != 0)
        {
            return Err(Error::misuse("verdict", "one of this entry", format_args!("the path {path:?}")));
        }
        if path.is_empty() {
            return Ok(());
        }
        self.num_verify_steps += 1;
        self.num_proposed_drafts += tree.num_drafts() as u64;
        self.num_correct_drafts += verdict.num_correct_drafts() as u64;
        let deepest = tree.nodes().map(|node| tree.depth(node)).max().unwrap_or(0);
        grow(&mut self.depths, deepest);
        self.depths[..deepest].iter_mut().for_each(|(proposed, _)| *proposed += 1);
        self.depths[..verdict.num_correct_drafts()].iter_mut().for_each(|(_, correct)| *correct += 1);
        for pair in verdict.path.windows(2) {
            let rank = tree.children(pair[0]).position(|child| child == pair[1]).unwrap_or(0);
            grow(&mut self.ranks, rank + 1);
            self.ranks[rank] += 1;
        }
        // A cut walk says nothing about the drafts behind the cut.
        if verdict.finished.is_none() {
            for (node, confidence) in tree.nodes().zip(entry.confidences()).skip(1) {
                let bucket = (confidence * NUM_BUCKETS as f32) as usize;
                let (proposed, correct) = &mut self.calibration[bucket.min(NUM_BUCKETS - 1)];
                *proposed += 1;
                *correct += u64::from(verdict.path.contains(&node));
            }
        }
        Ok(())
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        self.num_verify_steps += other.num_verify_steps;
        self.num_proposed_drafts += other.num_proposed_drafts;
        self.num_correct_drafts += other.num_correct_drafts;
        grow(&mut self.depths, other.depths.len());
        grow(&mut self.ranks, other.ranks.len());
        let add = |a: &mut (u64, u64), b: &(u64, u64)| *a = (a.0 + b.0, a.1 + b.1);
        self.depths.iter_mut().zip(&other.depths).for_each(|(a, b)| add(a, b));
        self.calibration.iter_mut().zip(&other.calibration).for_each(|(a, b)| add(a, b));
        self.ranks.iter_mut().zip(&other.ranks).for_each(|(a, b)| *a += b);
    }

    /// Verify steps that emitted something.
    pub fn num_verify_steps(&self) -> u64 {
        self.num_verify_steps
    }

    /// Nodes verified, roots excluded.
    pub fn num_proposed_drafts(&self) -> u64 {
        self.num_proposed_drafts
    }

    /// Drafts that the target confirmed; bonus tokens excluded.
    pub fn num_correct_drafts(&self) -> u64 {
        self.num_correct_drafts
    }

    /// Tokens emitted, bonus tokens included.
    pub fn num_emitted_tokens(&self) -> u64 {
        self.num_correct_drafts + self.num_verify_steps
    }

    /// τ: mean emitted tokens of a verify step, bonus token *included*, so never below 1. `None` before the
    /// first step.
    pub fn acceptance_length(&self) -> Option<f64> {
        ratio(self.num_emitted_tokens(), self.num_verify_steps)
    }

    /// The share of verify steps that confirmed a draft at each depth: element 0 is depth 1.
    pub fn rate_at_depth(&self) -> Vec<f64> {
        let rate = |&(_, correct): &(u64, u64)| ratio(correct, self.num_verify_steps).unwrap_or(0.0);
        self.depths.iter().map(rate).collect()
    }

    /// Of the steps whose tree reached each depth, the share that confirmed a draft there.
    pub fn acceptance_rate_at_depth(&self) -> Vec<f64> {
        self.depths.iter().map(|&(proposed, correct)| ratio(correct, proposed).unwrap_or(0.0)).collect()
    }

    /// Confirmed drafts by their rank among their siblings: element 0 is the drafter's favourite.
    pub fn num_correct_by_rank(&self) -> &[u64] {
        &self.ranks
    }

    /// For each tenth of the drafter's path probability: drafts proposed, and confirmed.
    pub fn calibration(&self) -> &[(u64, u64)] {
        &self.calibration
    }
}

fn grow<T: Clone + Default>(counts: &mut Vec<T>, len: usize) {
    if counts.len() < len {
        counts.resize(len, T::default());
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
