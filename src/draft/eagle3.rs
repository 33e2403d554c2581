//! The EAGLE-3 draft tree: which candidates a step considers, extends and finally verifies.
//!
//! The rule is that of EAGLE-2 and EAGLE-3 (Li et al., 2024 and 2025) with every tie decided: a level's
//! frontier of at most `width` nodes each proposes its `width` likeliest tokens; the best `width` of those
//! by path log-probability are the next frontier; at the end the best `nodes - 1` candidates of all levels
//! are verified. *Better* is a higher score, then a lower candidate index. A child never scores above its
//! parent and always has a higher index, so the verified set contains the parent of each of its members.
//!
//! Pure: a backend computes log-probabilities and asks here what to do with them.

use crate::error::{Error, Result};
use crate::tree::{DraftTree, NodeId, NodeSet, TokenId};

/// How much one request may draft in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftBudget {
    width: usize,
    depth: usize,
    nodes: usize,
}

impl DraftBudget {
    /// The root alone: the step decodes plainly.
    pub const NONE: Self = Self { width: 1, depth: 0, nodes: 1 };

    /// A tree of `depth` levels below the root, `width` candidates for each node and a frontier of `width`,
    /// cut to the best `nodes` nodes, root included.
    ///
    /// # Errors
    /// *Misuse* when `nodes` is not in `1..=256`, `width` not in `1..=64`, or the draft model would run more
    /// than 256 rows, `(depth - 1) * width`.
    pub fn new(width: usize, depth: usize, nodes: usize) -> Result<Self> {
        if !(1..=DraftTree::MAX_NODES).contains(&nodes) {
            return Err(Error::misuse("node budget", "1..=256 nodes", nodes));
        }
        if !(1..=64).contains(&width) {
            return Err(Error::misuse("draft width", "1..=64", width));
        }
        if depth.saturating_sub(1).saturating_mul(width) > DraftTree::MAX_NODES {
            let wanted = "at most 256 rows of the draft model, (depth - 1) * width";
            return Err(Error::misuse("draft depth", wanted, format_args!("{depth} at width {width}")));
        }
        Ok(Self { width, depth, nodes })
    }

    /// A chain of `num_drafts` drafts: a tree of width 1.
    ///
    /// # Errors
    /// *Misuse* above 255 drafts.
    pub fn chain(num_drafts: usize) -> Result<Self> {
        Self::new(1, num_drafts, num_drafts.saturating_add(1))
    }

    /// Candidates for each node, and nodes in a frontier.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Levels below the root; 0 drafts nothing.
    pub fn depth(&self) -> usize {
        if self.nodes == 1 { 0 } else { self.depth }
    }

    /// Nodes to verify at most, root included.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// This budget without the levels below `depth`.
    pub(crate) fn at_most_deep(self, depth: usize) -> Self {
        Self { depth: self.depth.min(depth), ..self }
    }

    /// Rows of the draft model that run below the first: all frontiers but the last level's.
    pub(crate) fn num_draft_rows(&self) -> usize {
        self.depth().saturating_sub(1) * self.width
    }
}

/// How drafts are ranked at a temperature above 0.
///
/// The target takes the largest of `logit / T + G` with noise `G` that is known beforehand: a function of seed,
/// position and token. So the drafter can rank by its own logits *and the same noise*, `logit / T + s G`, and guess
/// the sampled token about as often as it guesses the likeliest one at temperature 0. The text is the target's
/// whatever the drafter looks at; tokens that the request's filters, penalties, biases or masks rule out are not
/// drafted.
///
/// A child's confidence is `softmax((logit + T s G) / tau)` over the tokens that are not ruled out. At temperature 0,
/// or with `s = 0`, and `tau = 1`, that is EAGLE-2's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coupling {
    /// `s`, from 0 (the classical tree, which does not see the noise) to 1.
    pub noise_scale: f32,
    /// `tau`, from 1e-3 to 1e3: larger values trust the draft model less. It decides between nodes, not between the
    /// children of one.
    pub confidence_temperature: f32,
}

impl Coupling {
    /// Drafts that do not see the noise.
    pub const NONE: Self = Self { noise_scale: 0.0, confidence_temperature: 1.0 };

    pub(crate) fn check(&self) -> Result<()> {
        let Self { noise_scale, confidence_temperature } = *self;
        if !(0.0..=1.0).contains(&noise_scale) {
            return Err(Error::misuse("noise scale", "from 0 to 1", noise_scale));
        }
        if !(1e-3..=1e3).contains(&confidence_temperature) {
            let wanted = "from 0.001 to 1000";
            return Err(Error::misuse("confidence temperature", wanted, confidence_temperature));
        }
        Ok(())
    }
}

impl Default for Coupling {
    fn default() -> Self {
        Self { noise_scale: 1.0, ..Self::NONE }
    }
}

/// A node whose children the draft model is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrontierNode {
    /// Its index among the candidates.
    pub(crate) candidate: usize,
    /// Its parent's place in the frontier before.
    pub(crate) parent_rank: usize,
    /// Draft rows that it attends to beside the committed ones: its ancestors' and its own, counted from
    /// the first draft row of this step.
    pub(crate) rows: NodeSet,
    /// Its own draft row.
    pub(crate) row: usize,
}

/// All candidates of one request's step, in the order in which they were proposed. Candidate 0 is the root.
#[derive(Clone, Debug, Default)]
pub(crate) struct CandidatePool {
    candidates: Vec<Candidate>,
    level_start: usize,
    frontier: Vec<FrontierNode>,
    next_frontier: Vec<FrontierNode>,
    order: Vec<usize>,
    num_rows: usize,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: TokenId,
    parent: usize,
    parent_rank: usize,
    /// Log-probability of the path, by the draft model.
    score: f32,
}

impl CandidatePool {
    /// Starts a step: the root is the only candidate and the frontier.
    pub(crate) fn restart(&mut self, root: TokenId) {
        self.candidates.clear();
        self.candidates.push(Candidate { token: root, parent: 0, parent_rank: 0, score: 0.0 });
        self.frontier.clear();
        let rows = NodeSet::default();
        self.frontier.push(FrontierNode { candidate: 0, parent_rank: 0, rows, row: 0 });
        self.level_start = 1;
        self.num_rows = 0;
    }

    /// Takes over all candidates, the root first, with their parents and scores, from a device that has picked the
    /// frontiers itself.
    #[cfg(feature = "cuda")]
    pub(crate) fn refill(&mut self, candidates: impl Iterator<Item = (TokenId, usize, f32)>) {
        self.candidates.clear();
        self.candidates.extend(candidates.map(|(token, parent, score)| Candidate {
            token,
            parent,
            parent_rank: 0,
            score,
        }));
    }

    /// The nodes that the draft model runs next.
    pub(crate) fn frontier(&self) -> &[FrontierNode] {
        &self.frontier
    }

    /// The drafts from below the root down to the frontier's `rank`-th node.
    pub(crate) fn path(&self, rank: usize, path: &mut Vec<TokenId>) {
        path.clear();
        let mut candidate = self.frontier[rank].candidate;
        while candidate != 0 {
            path.push(self.candidates[candidate].token);
            candidate = self.candidates[candidate].parent;
        }
        path.reverse();
    }

    pub(crate) fn token(&self, candidate: usize) -> TokenId {
        self.candidates[candidate].token
    }

    /// Adds children of the frontier's `rank`-th node, best first: tokens with their log-probabilities,
    /// which are at most 0. Impossible tokens (negative infinity) are left out.
    pub(crate) fn expand(&mut self, rank: usize, children: impl Iterator<Item = (TokenId, f32)>) {
        let parent = self.frontier[rank].candidate;
        let score = self.candidates[parent].score;
        let possible = children.filter(|(_, log_prob)| *log_prob > f32::NEG_INFINITY);
        self.candidates.extend(possible.map(|(token, log_prob)| Candidate {
            token,
            parent,
            parent_rank: rank,
            score: score + log_prob,
        }));
    }

    /// Makes the best `width` candidates of the finished level the next frontier, best first.
    pub(crate) fn advance(&mut self, width: usize) {
        self.rank(self.level_start, width);
        self.level_start = self.candidates.len();
        self.next_frontier.clear();
        for &candidate in &self.order {
            let parent_rank = self.candidates[candidate].parent_rank;
            let row = self.num_rows;
            let rows = self.frontier[parent_rank].rows.with(row);
            self.num_rows += 1;
            self.next_frontier.push(FrontierNode { candidate, parent_rank, rows, row });
        }
        std::mem::swap(&mut self.frontier, &mut self.next_frontier);
    }

    /// Writes the best `nodes - 1` candidates below the root into `tree`, and each node's path probability.
    pub(crate) fn select(
        &mut self,
        nodes: usize,
        tree: &mut DraftTree,
        confidences: &mut Vec<f32>,
    ) -> Result<()> {
        tree.reset(self.candidates[0].token);
        confidences.clear();
        confidences.push(1.0);
        self.rank(1, nodes - 1);
        self.order.sort_unstable();
        for place in 0..self.order.len() {
            let Candidate { token, parent, score, .. } = self.candidates[self.order[place]];
            // Node `i + 1` is the `i`-th selected candidate; parents were selected (see the module's text).
            let parent = match self.order[..place].binary_search(&parent) {
                Ok(place) => tree.node(place + 1).unwrap_or(NodeId::ROOT),
                Err(_) => NodeId::ROOT,
            };
            tree.push(parent, token)?;
            confidences.push(score.exp());
        }
        Ok(())
    }

    /// Tokens, parents and scores of all candidates.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> (Vec<TokenId>, Vec<i64>, Vec<f32>) {
        let all = &self.candidates;
        let tokens = all.iter().map(|c| c.token).collect();
        (tokens, all.iter().map(|c| c.parent as i64).collect(), all.iter().map(|c| c.score).collect())
    }

    /// Fills `order` with the best `count` candidates from `start` on, best first.
    fn rank(&mut self, start: usize, count: usize) {
        self.order.clear();
        self.order.extend(start..self.candidates.len());
        let better = |a: &usize, b: &usize| {
            let (a_score, b_score) = (self.candidates[*a].score, self.candidates[*b].score);
            b_score.total_cmp(&a_score).then(a.cmp(b))
        };
        if count < self.order.len() {
            if count > 0 {
                self.order.select_nth_unstable_by(count - 1, better);
            }
            self.order.truncate(count);
        }
        self.order.sort_unstable_by(better);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A pretend draft model: log-probabilities of 12 tokens after a path, coarse so that they tie.
    fn children(path: &[TokenId], width: usize, seed: u64) -> Vec<(TokenId, f32)> {
        let hash = path.iter().fold(seed, |hash, token| {
            (hash ^ u64::from(token.0 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
        });
        let log_prob = |token: u32| f32::from((hash >> (5 * token)) as u8 % 4) / -2.0;
        let mut all: Vec<_> = (0..12).map(|token| (TokenId(token), log_prob(token).min(0.0))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(width);
        all
    }

    fn draft(budget: DraftBudget, seed: u64) -> (CandidatePool, DraftTree, Vec<f32>) {
        let mut pool = CandidatePool::default();
        pool.restart(TokenId(77));
        for level in 0..budget.depth() {
            if level > 0 {
                pool.advance(budget.width());
            }
            for rank in 0..pool.frontier().len() {
                let mut path = Vec::new();
                pool.path(rank, &mut path);
                pool.expand(rank, children(&path, budget.width(), seed).into_iter());
            }
        }
        let (mut tree, mut confidences) = (DraftTree::new(TokenId(0)), Vec::new());
        pool.select(budget.nodes(), &mut tree, &mut confidences).unwrap();
        (pool, tree, confidences)
    }

    proptest! {
        /// The rule, written the slow way: sort everything.
        #[test]
        fn trees_follow_the_rule(width in 1usize..9, depth in 0usize..6, nodes in 1usize..70, seed in any::<u64>()) {
            let budget = DraftBudget::new(width, depth, nodes).unwrap();
            let (pool, tree, confidences) = draft(budget, seed);
            let mut all: Vec<(Vec<TokenId>, f32)> = vec![(vec![], 0.0)];
            let mut level: Vec<usize> = vec![0];
            for _ in 0..budget.depth() {
                let start = all.len();
                for &parent in &level {
                    let (path, score) = all[parent].clone();
                    for (token, log_prob) in children(&path, width, seed) {
                        all.push(([&path[..], &[token]].concat(), score + log_prob));
                    }
                }
                level = (start..all.len()).collect();
                level.sort_by(|a, b| all[*b].1.total_cmp(&all[*a].1).then(a.cmp(b)));
                level.truncate(width);
            }
            prop_assert_eq!(pool.candidates.len(), all.len());
            let mut best: Vec<usize> = (1..all.len()).collect();
            best.sort_by(|a, b| all[*b].1.total_cmp(&all[*a].1).then(a.cmp(b)));
            best.truncate(nodes - 1);
            best.sort_unstable();
            prop_assert_eq!(tree.num_drafts(), best.len());
            prop_assert_eq!(confidences.len(), tree.len());
            for (node, candidate) in tree.nodes().skip(1).zip(best) {
                let (path, score) = &all[candidate];
                let mut tokens: Vec<TokenId> = tree.ancestors(node).iter().map(|i| tree.tokens()[i]).collect();
                tokens.remove(0);
                prop_assert_eq!(&tokens, path);
                prop_assert_eq!(confidences[node.index()], score.exp());
            }
        }

        /// A tree of width 1 is the greedy chain, by the same code.
        #[test]
        fn width_one_is_the_chain(num_drafts in 0usize..20, seed in any::<u64>()) {
            let (_, tree, _) = draft(DraftBudget::chain(num_drafts).unwrap(), seed);
            let mut path = Vec::new();
            for _ in 0..num_drafts {
                path.push(children(&path, 1, seed)[0].0);
            }
            prop_assert_eq!(&tree.tokens()[1..], &path[..]);
            let chain: Vec<_> = path.iter().copied().enumerate().collect();
            prop_assert_eq!(DraftTree::from_drafts(TokenId(77), &chain).unwrap(), tree);
        }
    }

    /// A child of probability 1 ties with its parent; the parent must still come with it.
    #[test]
    fn ties_with_the_parent_keep_the_set_closed() {
        let mut pool = CandidatePool::default();
        pool.restart(TokenId(0));
        pool.expand(0, [(TokenId(1), -1.0), (TokenId(2), -1.0)].into_iter());
        pool.advance(2);
        pool.expand(0, [(TokenId(3), 0.0), (TokenId(4), f32::NEG_INFINITY)].into_iter());
        pool.expand(1, [(TokenId(5), 0.0)].into_iter());
        let (mut tree, mut confidences) = (DraftTree::new(TokenId(0)), Vec::new());
        for (nodes, tokens) in [(2, &[0, 1][..]), (3, &[0, 1, 2]), (4, &[0, 1, 2, 3]), (9, &[0, 1, 2, 3, 5])]
        {
            pool.select(nodes, &mut tree, &mut confidences).unwrap();
            assert_eq!(tree.tokens().iter().map(|t| t.0).collect::<Vec<_>>(), tokens);
        }
        assert_eq!(tree.depth(tree.node(4).unwrap()), 2);
    }
}
