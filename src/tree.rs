//! Draft trees and the attention masks that a target needs to score all their nodes in one pass.

use crate::error::{Error, Result};

/// A token of the *target's* vocabulary.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// A node of one [`DraftTree`]: its index in parents-before-children order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u8);

impl NodeId {
    /// Node 0: the last committed token.
    pub const ROOT: Self = Self(0);

    /// The node's index, `0..tree.len()`.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A set of nodes of one tree, one bit a node, in little-endian order: bit `i % 64` of word `i / 64`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeSet([u64; DraftTree::MAX_NODES / 64]);

impl NodeSet {
    /// The words, least significant nodes first.
    pub fn words(&self) -> &[u64; DraftTree::MAX_NODES / 64] {
        &self.0
    }

    /// Is the node with this index in the set? Indices from 256 on never are.
    pub fn contains(&self, index: usize) -> bool {
        index < DraftTree::MAX_NODES && self.0[index / 64] >> (index % 64) & 1 == 1
    }

    /// Indices of the members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(word, &bits)| {
            std::iter::successors((bits != 0).then_some(bits), |b| {
                let rest = b & (b - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |b| word * 64 + b.trailing_zeros() as usize)
        })
    }

    /// This set and one more index below 256.
    pub(crate) fn with(mut self, index: usize) -> Self {
        self.0[index / 64] |= 1 << (index % 64);
        self
    }
}

/// The drafts of one request: a tree of tokens in which every parent precedes its children.
///
/// Node 0 is the root, the last committed token: already sampled, not up for verification, and the one
/// whose row yields the first target token. A chain is a tree of width 1, and "no drafts" is a root alone.
/// Siblings never carry the same token, so the target's token selects at most one child.
///
/// ```
/// use eagle_verify::{DraftTree, NodeId, TokenId};
///
/// let mut tree = DraftTree::new(TokenId(7));
/// let a = tree.push(NodeId::ROOT, TokenId(1))?;
/// let b = tree.push(NodeId::ROOT, TokenId(2))?;
/// let c = tree.push(a, TokenId(2))?;
/// assert_eq!((tree.len(), tree.num_drafts(), tree.depth(c)), (4, 3, 2));
/// assert!(tree.ancestors(c).contains(a.index()) && !tree.ancestors(c).contains(b.index()));
/// assert!(tree.push(NodeId::ROOT, TokenId(2)).is_err(), "a second sibling with that token");
/// # Ok::<(), eagle_verify::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftTree {
    tokens: Vec<TokenId>,
    links: Vec<Links>,
    ancestors: Vec<NodeSet>,
}

/// Where a node hangs. Zero means "none" for children and siblings, since the root is nobody's child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Links {
    parent: u8,
    first_child: u8,
    next_sibling: u8,
    depth: u8,
}

impl DraftTree {
    /// Nodes that a tree can hold, root included.
    pub const MAX_NODES: usize = 256;

    /// A root alone: verifying it is plain decoding.
    pub fn new(root: TokenId) -> Self {
        Self {
            tokens: vec![root],
            links: vec![Links::default()],
            ancestors: vec![NodeSet::default().with(0)],
        }
    }

    /// Builds a tree from the tokens and parents of all nodes but the root.
    ///
    /// `drafts[i]` becomes node `i + 1`; its parent is an index into the finished tree (0 is the root).
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn from_drafts(root: TokenId, drafts: &[(usize, TokenId)]) -> Result<Self> {
        let mut tree = Self::new(root);
        for &(parent, token) in drafts {
            let node = tree.node(parent).ok_or_else(|| tree.no_such(parent))?;
            tree.push(node, token)?;
        }
        Ok(tree)
    }

    /// Becomes a root alone again and keeps its memory.
    pub fn reset(&mut self, root: TokenId) {
        self.tokens.clear();
        self.links.clear();
        self.ancestors.clear();
        self.tokens.push(root);
        self.links.push(Links::default());
        self.ancestors.push(NodeSet::default().with(0));
    }

    /// Appends a draft below `parent` as its last child.
    ///
    /// # Errors
    /// *Misuse* when the parent is not in the tree, when it already has a child with this token, or when
    /// the tree is full. The tree is then unchanged.
    pub fn push(&mut self, parent: NodeId, token: TokenId) -> Result<NodeId> {
        if parent.index() >= self.len() {
            return Err(self.no_such(parent.index()));
        }
        let node = u8::try_from(self.len())
            .map_err(|_| Error::misuse("draft tree", "at most 256 nodes", "one more"))?;
        let mut last_child = None;
        for sibling in self.children(parent) {
            if self.token(sibling) == token {
                return Err(Error::misuse(
                    "sibling drafts",
                    "distinct tokens",
                    format_args!("token {} twice below node {}", token.0, parent.0),
                ));
            }
            last_child = Some(sibling);
        }
        match last_child {
            Some(sibling) => self.links[sibling.index()].next_sibling = node,
            None => self.links[parent.index()].first_child = node,
        }
        let depth = self.links[parent.index()].depth + 1;
        self.tokens.push(token);
        self.links.push(Links { parent: parent.0, depth, ..Links::default() });
        self.ancestors.push(self.ancestors[parent.index()].with(node.into()));
        Ok(NodeId(node))
    }

    fn no_such(&self, parent: usize) -> Error {
        Error::misuse("parent of a draft", format_args!("a node below {}", self.len()), parent)
    }

    /// Number of nodes, root included; never 0.
    #[allow(clippy::len_without_is_empty)] // a tree always has its root
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Number of drafts: all nodes but the root.
    pub fn num_drafts(&self) -> usize {
        self.len() - 1
    }

    /// Tokens of all nodes, root first.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// All nodes, root first.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        // A tree has at most 256 nodes, so the cast is exact.
        (0..self.len()).map(|index| NodeId(index as u8))
    }

    /// The node with this index, if the tree has it.
    pub fn node(&self, index: usize) -> Option<NodeId> {
        u8::try_from(index).ok().filter(|_| index < self.len()).map(NodeId)
    }

    /// The token of a node.
    ///
    /// # Panics
    /// This and every other accessor that takes a [`NodeId`] panics on a node of a larger tree.
    pub fn token(&self, node: NodeId) -> TokenId {
        self.tokens[node.index()]
    }

    /// The parent; `None` for the root.
    pub fn parent(&self, node: NodeId) -> Option<NodeId> {
        (node != NodeId::ROOT).then(|| NodeId(self.links[node.index()].parent))
    }

    /// Edges between the root and the node.
    pub fn depth(&self, node: NodeId) -> usize {
        self.links[node.index()].depth.into()
    }

    /// The node and all its ancestors: its row of the tree mask.
    pub fn ancestors(&self, node: NodeId) -> &NodeSet {
        &self.ancestors[node.index()]
    }

    /// The children, in the order they were drafted.
    pub fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let link = |node: u8| (node != 0).then_some(NodeId(node));
        std::iter::successors(link(self.links[node.index()].first_child), move |sibling| {
            link(self.links[sibling.index()].next_sibling)
        })
    }

    /// The child that carries `token`, and its rank among its siblings (0 is the drafter's favourite).
    pub fn child_with(&self, node: NodeId, token: TokenId) -> Option<(NodeId, usize)> {
        self.children(node).zip(0..).find(|&(child, _)| self.token(child) == token)
    }

    /// Appends the dense mask `[nodes, prefix + nodes]`, row-major: may this node attend to that key?
    ///
    /// Columns start with the `prefix` committed tokens before the root, which every node sees. Give 0 for
    /// the tree's own square.
    pub fn mask_dense(&self, prefix: usize, out: &mut Vec<bool>) {
        out.reserve(self.len() * (prefix + self.len()));
        for row in &self.ancestors {
            out.extend(std::iter::repeat_n(true, prefix));
            out.extend((0..self.len()).map(|column| row.contains(column)));
        }
    }

    /// Appends the mask `[nodes, prefix + nodes]` to add to attention scores: `0.0` or negative infinity.
    pub fn mask_additive(&self, prefix: usize, out: &mut Vec<f32>) {
        out.reserve(self.len() * (prefix + self.len()));
        for row in &self.ancestors {
            out.extend(std::iter::repeat_n(0.0, prefix));
            out.extend((0..self.len()).map(
                |column| {
                    if row.contains(column) { 0.0 } else { f32::NEG_INFINITY }
                },
            ));
        }
    }

    /// Appends the mask `[nodes, prefix + nodes]`, row-major, as one run of little-endian bits padded with
    /// zeros to whole bytes: the packed `custom_mask` segment of one request in FlashInfer.
    pub fn mask_bits(&self, prefix: usize, out: &mut Vec<u8>) {
        let start = out.len();
        let columns = prefix + self.len();
        out.resize(start + (self.len() * columns).div_ceil(8), 0);
        let bytes = &mut out[start..];
        let mut set = |bit: usize| bytes[bit / 8] |= 1 << (bit % 8);
        for (row, ancestors) in self.ancestors.iter().enumerate() {
            let first = row * columns;
            (first..first + prefix).for_each(&mut set);
            ancestors.iter().for_each(|column| set(first + prefix + column));
        }
    }

    /// Appends the tree's own square as u16 words, `[nodes, 2 * ceil(nodes / 32)]`: the spec-decode mask of
    /// TensorRT-LLM's XQA kernels. Bit `j % 16` of word `j / 16` is column `j`.
    pub fn mask_words(&self, out: &mut Vec<u16>) {
        let words_per_row = self.len().div_ceil(32) * 2;
        for row in &self.ancestors {
            let words = row.words().iter().flat_map(|w| (0..4).map(move |i| (w >> (16 * i)) as u16));
            out.extend(words.take(words_per_row));
        }
    }
}
