//! The tokenizer inside the GGUF file: byte-level BPE as in GPT-2, digits one by one.

use anyhow::{Result, anyhow, ensure};
use eagle_verify::TokenId;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer as Inner};

use super::weights::Gguf;

/// Text to tokens and back, with SmolLM2's chat template.
pub struct Tokenizer(Inner);

/// Ends an assistant's turn.
pub const END_OF_TURN: TokenId = TokenId(2);
/// `tokenizer.ggml.token_type` of a control token.
const CONTROL: i32 = 3;

impl Tokenizer {
    /// Reads the vocabulary and the merges.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let tokens = gguf.strings("tokenizer.ggml.tokens")?;
        let kinds = gguf.ints("tokenizer.ggml.token_type")?;
        ensure!(tokens.len() == kinds.len(), "{} tokens but {} token types", tokens.len(), kinds.len());
        let merges = gguf.strings("tokenizer.ggml.merges")?.into_iter();
        let merges = merges.map(|merge| {
            let parts = merge.split_once(' ').ok_or_else(|| anyhow!("a merge without a space: {merge:?}"))?;
            Ok((parts.0.to_owned(), parts.1.to_owned()))
        });
        let merges = merges.collect::<Result<Vec<_>>>()?;
        let control = tokens.iter().zip(&kinds).filter(|(_, kind)| **kind == CONTROL);
        let control: Vec<_> = control.map(|(token, _)| AddedToken::from(token.clone(), true)).collect();
        let vocab: Vocab = tokens.into_iter().zip(0..).collect();
        let bpe = BPE::builder().vocab_and_merges(vocab, merges);
        let mut inner = Inner::new(bpe.build().map_err(|e| anyhow!("the tokenizer's merges: {e}"))?);
        let split: [PreTokenizerWrapper; 2] =
            [Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
        inner.with_pre_tokenizer(Some(Sequence::new(split.to_vec())));
        inner.with_decoder(Some(ByteLevel::default()));
        inner.add_special_tokens(&control);
        Ok(Self(inner))
    }

    /// A user's message in the chat template, up to where the assistant's answer starts.
    pub fn chat(&self, message: &str) -> Result<Vec<TokenId>> {
        self.encode(&format!(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
             <|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        ))
    }

    /// Plain text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        let encoding = self.0.encode(text, false).map_err(|e| anyhow!("cannot tokenize: {e}"))?;
        Ok(encoding.get_ids().iter().map(|&id| TokenId(id)).collect())
    }

    /// The text of tokens, control tokens left out.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        self.0.decode(&ids, true).map_err(|e| anyhow!("cannot decode: {e}"))
    }
}
