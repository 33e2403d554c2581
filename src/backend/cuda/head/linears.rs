//! The head's linear layers: from a checkpoint to the device.

use std::borrow::Cow;

use crate::backend::cuda::context::Cuda;
use crate::backend::cuda::linear::LinearWeights;
use crate::backend::cuda::view::Format;
use crate::draft::{Eagle3Checkpoint, Matrix, Weights};
use crate::element::Element;
use crate::error::Result;

/// The linear layers. The key and value projections are part of the query's, too.
#[derive(Debug)]
pub(super) struct Linears {
    pub(super) fc: LinearWeights,
    pub(super) query_key_value: LinearWeights,
    pub(super) key_value: LinearWeights,
    pub(super) attention_output: LinearWeights,
    pub(super) gate_up: LinearWeights,
    pub(super) down: LinearWeights,
    pub(super) lm_head: LinearWeights,
}

impl Linears {
    pub(super) fn load(cuda: &Cuda, half: Format, checkpoint: &Eagle3Checkpoint) -> Result<Self> {
        let upload = |parts: &[&Matrix]| upload(cuda, half, parts);
        let Eagle3Checkpoint { fc, query, key, value, attention_output, gate, up, down, lm_head, .. } =
            checkpoint;
        Ok(Self {
            fc: upload(&[fc])?,
            query_key_value: upload(&[query, key, value])?,
            key_value: upload(&[key, value])?,
            attention_output: upload(&[attention_output])?,
            gate_up: upload(&[gate, up])?,
            down: upload(&[down])?,
            lm_head: upload(&[lm_head])?,
        })
    }

    pub(super) fn all(&self) -> [&LinearWeights; 7] {
        let Self { fc, query_key_value, key_value, attention_output, gate_up, down, lm_head } = self;
        [fc, query_key_value, key_value, attention_output, gate_up, down, lm_head]
    }
}

/// f16 if all linear layers of a head are, or else bf16, to which f32 is rounded.
pub(super) fn half_of(checkpoint: &Eagle3Checkpoint) -> Format {
    let Eagle3Checkpoint { fc, query, key, value, attention_output, gate, up, down, lm_head, .. } =
        checkpoint;
    let all = [fc, query, key, value, attention_output, gate, up, down, lm_head];
    let all_f16 = all.iter().all(|matrix| matches!(matrix.weights, Weights::F16(_)));
    if all_f16 { Format::F16 } else { Format::Bf16 }
}

/// The weights of layers over the same input, one after the other.
fn upload(cuda: &Cuda, half: Format, parts: &[&Matrix]) -> Result<LinearWeights> {
    fn stack<T: Element>(
        cuda: &Cuda,
        parts: &[&Matrix],
        own: fn(&Weights) -> Option<&[T]>,
    ) -> Result<LinearWeights> {
        let columns = parts[0].columns;
        let parts_of = parts.iter().map(|part| match own(&part.weights) {
            Some(weights) => Cow::Borrowed(weights),
            None => Cow::Owned(part.weights.to_f32().iter().map(|x| T::from_f32(*x)).collect()),
        });
        let parts: Vec<Cow<'_, [T]>> = parts_of.collect();
        LinearWeights::stack(cuda, &parts.iter().map(|part| &part[..]).collect::<Vec<_>>(), columns)
    }
    match half {
        Format::F16 => stack(cuda, parts, |weights| match weights {
            Weights::F16(weights) => Some(weights),
            _ => None,
        }),
        _ => stack(cuda, parts, |weights| match weights {
            Weights::Bf16(weights) => Some(weights),
            _ => None,
        }),
    }
}
