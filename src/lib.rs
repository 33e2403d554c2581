#![doc = "Speculative decoding with EAGLE-3 draft trees: see the README."]
#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(unreachable_pub))] // test fixtures are shared with other crates

// The tests' fixtures name the crate as users do.
#[cfg(test)]
extern crate self as eagle_verify;

pub mod backend;
mod draft;
mod error;
mod kv;
mod norm;
pub mod sampling;
mod speculator;
mod stats;
mod tree;
mod verify;

pub use backend::Backend;
pub use draft::{DraftBudget, DraftVocab, Eagle3Checkpoint, Eagle3Config, Matrix, TargetShape, Weights};
pub use error::{Error, ErrorKind, Result};
pub use kv::{CommitPlan, Lease, PagePool, PageTable, RowMove};
pub use norm::RmsNorm;
pub use speculator::{FirstToken, Output, RequestOptions, Speculator, SpeculatorConfig, StageTimes};
pub use stats::AcceptStats;
pub use tree::{DraftTree, NodeId, NodeSet, TokenId};
pub use verify::{BatchEntry, FinishReason, OutputLimits, RequestId, Verdict, VerifyBatch};
