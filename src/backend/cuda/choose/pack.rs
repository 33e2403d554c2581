//! Rows of a call as the kernel reads them: in one piece of memory, so that one copy brings all.

use std::ops::Range;

use super::super::launch;
use super::ChooseRow;
use crate::error::{Error, Result, expect_len};
use crate::sampling::SamplingContext;
use crate::tree::TokenId;

const ROW_WORDS: usize = size_of::<launch::ChooseRow>() / 4;

/// The rows, then their lists. Allocates only when a call has more than all before.
#[derive(Debug, Default)]
pub(in super::super) struct Packer {
    words: Vec<u32>,
    num_workspaces: usize,
    text: Text,
    bias: Bias,
}

/// A list in the words: where, and how many entries.
type List = (u32, u32);

/// A slice's address and length: within a call those with the same are the same.
type Place = (usize, usize);

fn place<T>(slice: &[T]) -> Place {
    (slice.as_ptr().addr(), slice.len())
}

/// Prompt and output of the last row with penalties: the rows of a tree have them in common.
#[derive(Debug, Default)]
struct Text {
    of: Option<[Place; 2]>,
    list: List,
    /// By token: 0 if the text has it not, else 1 more than the number of times that the output has it.
    counts: Vec<u32>,
    tokens: Vec<TokenId>,
}

/// The bias of the last row with one.
#[derive(Debug, Default)]
struct Bias {
    of: Option<Place>,
    list: List,
}

impl Packer {
    /// Packs `rows` for a device that has `columns` of a vocabulary of `vocab` tokens.
    pub(in super::super) fn pack<'a>(
        &mut self,
        rows: impl ExactSizeIterator<Item = ChooseRow<'a>>,
        vocab: usize,
        columns: &Range<usize>,
    ) -> Result<()> {
        self.words.clear();
        self.words.resize(rows.len() * ROW_WORDS, 0);
        self.num_workspaces = 0;
        // The same addresses in another call may hold another text.
        (self.text.of, self.bias.of) = (None, None);
        for (i, row) in rows.enumerate() {
            let packed = self.row(i, &row, vocab, columns)?;
            let place = &mut self.words[i * ROW_WORDS..][..ROW_WORDS];
            bytemuck::cast_slice_mut(place).copy_from_slice(bytemuck::bytes_of(&packed));
        }
        if u32::try_from(self.words.len()).is_err() {
            let wanted = "text, bias and masks of less than 16 GB";
            return Err(Error::misuse("rows of a call", wanted, format!("{} words", self.words.len())));
        }
        Ok(())
    }

    pub(in super::super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// How many rows need one.
    pub(super) fn num_workspaces(&self) -> usize {
        self.num_workspaces
    }

    fn row(
        &mut self,
        index: usize,
        row: &ChooseRow<'_>,
        vocab: usize,
        columns: &Range<usize>,
    ) -> Result<launch::ChooseRow> {
        let (params, context) = (row.sampler.params(), row.context);
        let mut packed = launch::ChooseRow {
            seed: params.seed,
            position: context.position,
            temperature: params.temperature,
            threshold: f32::NEG_INFINITY,
            top_p: 1.0,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            ..launch::ChooseRow::default()
        };
        let top_k = if params.top_k < vocab { params.top_k } else { 0 };
        let has_filters = top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0;
        if has_filters && params.temperature > 0.0 {
            match row.threshold {
                Some(threshold) if threshold.is_nan() => {
                    return Err(Error::misuse(format!("threshold of row {index}"), "a number", threshold));
                }
                Some(threshold) => packed.threshold = threshold,
                None if *columns != (0..vocab) => {
                    let wanted =
                        "a threshold, or all columns of the row's logits: its filters look at all tokens";
                    let seen = format!("no threshold, and columns {columns:?} of {vocab}");
                    return Err(Error::misuse(format!("row {index} with filters"), wanted, seen));
                }
                None => {
                    packed.top_k = top_k as u32;
                    (packed.top_p, packed.min_p) = (params.top_p, params.min_p);
                }
            }
        }
        if params.has_penalty() {
            self.text(context, vocab, columns);
            (packed.text, packed.num_text) = self.text.list;
            (packed.path, packed.num_path) = self.path(context.path, columns);
        }
        if !row.sampler.biases().is_empty() {
            self.bias(row.sampler.biases(), columns);
            (packed.bias, packed.num_biases) = self.bias.list;
        }
        if let Some(allowed) = context.allowed {
            expect_len("mask of allowed tokens, in words", vocab.div_ceil(32), allowed.len())?;
            packed.mask = self.words.len() as u32;
            self.words.extend_from_slice(&allowed[columns.start / 32..columns.end.div_ceil(32)]);
        }
        let has_edits = packed.num_text + packed.num_path + packed.num_biases > 0;
        if has_edits || packed.top_k > 0 || packed.top_p < 1.0 || packed.min_p > 0.0 {
            packed.workspace = self.num_workspaces as u32;
            self.num_workspaces += 1;
        }
        Ok(packed)
    }

    /// Lists the tokens of prompt and output that are in `columns`, with their counts.
    fn text(&mut self, context: SamplingContext<'_>, vocab: usize, columns: &Range<usize>) {
        let of = [place(context.prompt), place(context.output)];
        let text = &mut self.text;
        if text.of == Some(of) {
            return;
        }
        text.of = Some(of);
        text.counts.resize(vocab, 0);
        for token in text.tokens.drain(..) {
            text.counts[token.0 as usize] = 0;
        }
        let prompt = context.prompt.iter().map(|token| (token, 0));
        for (token, times) in prompt.chain(context.output.iter().map(|token| (token, 1))) {
            let Some(count) = text.counts.get_mut(token.0 as usize) else { continue };
            if *count == 0 {
                text.tokens.push(*token);
                *count = 1;
            }
            *count += times;
        }
        let start = self.words.len();
        for token in text.tokens.iter().filter(|token| columns.contains(&(token.0 as usize))) {
            self.words.extend([token.0, text.counts[token.0 as usize] - 1]);
        }
        text.list = list(start, self.words.len());
    }

    /// Lists the tokens of a path that are in `columns`, with their counts in the last text's output and the path.
    fn path(&mut self, path: &[TokenId], columns: &Range<usize>) -> List {
        let start = self.words.len();
        for (i, token) in path.iter().enumerate() {
            if columns.contains(&(token.0 as usize)) && !path[..i].contains(token) {
                let in_output = self.text.counts[token.0 as usize].saturating_sub(1);
                let in_path = path.iter().filter(|other| *other == token).count() as u32;
                self.words.extend([token.0, in_output + in_path]);
            }
        }
        list(start, self.words.len())
    }

    /// Lists the entries whose tokens are in `columns`.
    fn bias(&mut self, entries: &[(TokenId, f32)], columns: &Range<usize>) {
        let of = place(entries);
        if self.bias.of == Some(of) {
            return;
        }
        let start = self.words.len();
        for (token, bias) in entries.iter().filter(|(token, _)| columns.contains(&(token.0 as usize))) {
            self.words.extend([token.0, bias.to_bits()]);
        }
        self.bias = Bias { of: Some(of), list: list(start, self.words.len()) };
    }
}

fn list(start: usize, end: usize) -> List {
    (start as u32, ((end - start) / 2) as u32)
}
