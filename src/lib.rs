//! Drafting and lossless verification for speculative decoding: EAGLE-3 draft trees, verified in batches.
//!
//! A target model decodes one token per forward pass, and most of that pass is reading weights. Speculation
//! lets a small head *draft* several continuations, as a tree, and has the target *verify* all nodes in one
//! pass. This crate is everything around the target: it drafts, packs, walks, keeps the books, and says which
//! KV rows to keep. The engine keeps its forward pass, its KV cache and its scheduler.
//!
//! # One step
//!
//! ```text
//! propose(requests) ──▶ VerifyBatch ──▶ the engine's forward ──▶ logits, features
//!      │ the head takes in what was accepted, then drafts level by level        │
//! next step's root ◀── Verdict ◀── accept(batch, logits, features) ◀────────────┘
//!                        └─ CommitPlan: the KV rows to keep, and where they go
//! ```
//!
//! [`Speculator`] is that loop, over a [`Backend`]: [`backend::cpu::Cpu`], or a GPU (`backend::cuda::Cuda`). Start with its
//! documentation and the example `embed`. For a target that is split over several devices, [`comm`] has the
//! all-reduce that ends each half of a layer, fused with what follows it; on GPUs too (`backend::cuda`). The pieces
//! can be used alone: [`DraftTree`] with its masks in four layouts, [`VerifyBatch`], the walk ([`Verdict::walk`]),
//! the sampler ([`sampling::Sampler`]), page and row accounting ([`PagePool`], [`Lease`], [`CommitPlan`]), and the
//! CPU operations in [`backend::cpu`].
//!
//! # What is guaranteed
//!
//! * **The text is that of plain decoding**, at every temperature, for every tree, batch and history, given equal
//!   logits: at every node the target's token is chosen by the ordinary rule ([`sampling`]), and a draft only
//!   decides whether that happened in the same pass. The CPU operations make the logits equal too: a row's bits don't depend on the rows
//!   beside it.
//! * **Bad input is an [`Error`]** that names what was wanted and seen, and changes nothing. Broken logits end
//!   the request they belong to, no other.
//! * **Positions** of nodes are committed length - 1 + depth; a tree is drafted from the KV that a fresh prompt
//!   with the committed text would give, bit for bit.
//! * **A sum over ranks** has the same bits on every rank, by every algorithm and backend, and waits for peers
//!   end.
//!
//! # Words
//!
//! The *root* is the last committed token, node 0 of every tree; it is not a draft. A *correct* draft is one
//! that the target confirmed. The *bonus* token is the one that the target adds after the last correct draft.
//! The *acceptance length* is the mean number of tokens emitted per verify step, bonus token included.
#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic))]

// The tests' fixtures name the crate as users do.
#[cfg(test)]
extern crate self as eagle_verify;

pub mod backend;
pub mod comm;
mod draft;
mod element;
mod error;
mod kv;
pub mod norm;
pub mod sampling;
mod speculator;
mod stats;
mod tree;
mod verify;

pub use backend::Backend;
pub use draft::{Coupling, DraftBudget, DraftVocab, Eagle3Checkpoint, Eagle3Config, TargetShape};
pub use element::Element;
pub use error::{Error, ErrorKind, Result};
pub use kv::{CommitPlan, Lease, PagePool, PageTable, RowMove};
pub use norm::RmsNorm;
pub use speculator::{FirstToken, Output, RequestOptions, Speculator, SpeculatorConfig, StageTimes};
pub use stats::AcceptStats;
pub use tree::{DraftTree, NodeId, NodeSet, TokenId};
pub use verify::{BatchEntry, FinishReason, OutputLimits, RequestId, Verdict, VerifyBatch};

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
