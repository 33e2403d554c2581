//! A small engine that serves SmolLM2-135M-Instruct on the CPU, and how it embeds eagle-verify.
//!
//! Read `serve.rs` first: it is the loop that an engine author writes. `model.rs` is the target's forward
//! pass over candle tensors, for the rows of a prompt chunk and of a verify pass alike, and its pass where it is split
//! over ranks, with `shard.rs`; `ops.rs` lends the crate's CPU operations to candle; `device.rs` is how logits and
//! features get to where the draft head runs. `weights.rs` reads the GGUF file, `tokenizer.rs` the tokenizer in it;
//! `fetch.rs` gets the file, `prompts.rs` holds the built-in prompts, `report.rs` prints, writes and draws the
//! results.

pub mod device;
pub mod fetch;
pub mod model;
pub mod ops;
pub mod prompts;
pub mod report;
pub mod serve;
pub mod shard;
pub mod tokenizer;
pub mod weights;
