//! Drafting: where the candidates of a tree come from.

mod checkpoint;
mod eagle3;

pub use checkpoint::{DraftVocab, Eagle3Checkpoint, Eagle3Config, TargetShape};
pub(crate) use checkpoint::{Matrix, Weights};
pub(crate) use eagle3::CandidatePool;
pub use eagle3::{Coupling, DraftBudget};
