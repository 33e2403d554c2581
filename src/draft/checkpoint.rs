//! EAGLE-3 checkpoints: from files to one explicit configuration, or an error that names what is wrong.
//!
//! A head that loads but is wired wrongly still gives the right text, only slowly, so nobody notices. Hence
//! little is assumed here: every tensor is consumed, every shape checked, the captured layers must be named,
//! the two vocabulary tables must agree, and the known switches of dialects that this crate doesn't run are
//! refused. (A switch that nobody has heard of yet would still pass.)

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::tree::TokenId;

/// What a head must fit to: the target model's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetShape {
    /// Elements of a row of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Tokens in the vocabulary: the length of a row of logits.
    pub vocab: usize,
}

/// Everything that the head's forward pass depends on, made explicit.
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3Config {
    /// The target it was checked against.
    pub target: TargetShape,
    /// Target layers whose *output* (0-based, residual stream, not normalised) are the features, in the
    /// order in which they are concatenated.
    pub feature_layers: Vec<usize>,
    /// Elements of a row inside the head.
    pub hidden: usize,
    /// Elements inside its MLP.
    pub intermediate: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens that it can draft.
    pub draft_vocab: usize,
    /// Added to the mean square under the root of its norms.
    pub rms_epsilon: f32,
    /// Base of its rotary position embeddings.
    pub rope_theta: f32,
}

impl Eagle3Config {
    /// The table of a head without its own is the target's, and of either `[vocab, hidden]`.
    ///
    /// # Errors
    /// *Misuse* when it is of another shape.
    pub(crate) fn expect_table(&self, vocab: usize, hidden: usize) -> Result<()> {
        if (vocab, hidden) == (self.target.vocab, self.hidden) {
            return Ok(());
        }
        let wanted = format!("[{}, {}]", self.target.vocab, self.hidden);
        Err(Error::misuse("embedding table", wanted, format!("[{vocab}, {hidden}]")))
    }

    /// Length of a row of features: captured layers times the target's hidden size.
    pub fn feature_width(&self) -> usize {
        self.feature_layers.len() * self.target.hidden
    }
}

/// A weight matrix as it was stored, row-major.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Inputs of the layer, or elements of a table's entry.
    pub(crate) columns: usize,
    pub(crate) weights: Weights,
}

/// Elements of a [`Matrix`].
#[derive(Clone, Debug)]
pub(crate) enum Weights {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl Weights {
    /// Exactly these.
    pub(crate) fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            Self::Bf16(weights) => weights.iter().map(|x| x.to_f32()).collect(),
            Self::F16(weights) => weights.iter().map(|x| x.to_f32()).collect(),
            Self::F32(weights) => Cow::Borrowed(weights),
        }
    }
}

/// Which target tokens the head can draft, `[draft_vocab]`, strictly ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocab(Vec<TokenId>);

impl DraftVocab {
    /// The target's token for each draft token.
    pub fn tokens(&self) -> &[TokenId] {
        &self.0
    }
}

/// An EAGLE-3 head in the layout of the official code: one Llama layer (`midlayer.*`) over the
/// concatenation of a token's embedding and the previous feature.
#[derive(Clone, Debug)]
pub struct Eagle3Checkpoint {
    pub(crate) config: Eagle3Config,
    pub(crate) vocab: DraftVocab,
    /// The head's own embedding table, if it has one; otherwise it uses the target's.
    pub(crate) embedding: Option<Matrix>,
    pub(crate) fc: Matrix,
    pub(crate) query: Matrix,
    pub(crate) key: Matrix,
    pub(crate) value: Matrix,
    pub(crate) attention_output: Matrix,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
    pub(crate) lm_head: Matrix,
    pub(crate) input_norm: Vec<f32>,
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) post_attention_norm: Vec<f32>,
    pub(crate) final_norm: Vec<f32>,
}

/// `config.json`, as far as it bears on the forward pass.
#[derive(Deserialize)]
struct RawConfig {
    architectures: Vec<String>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: f64,
    rope_theta: f64,
    vocab_size: usize,
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    eagle_config: Option<EagleSection>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct EagleSection {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// Keys that change the forward pass in a way that this crate does not run, unless they have this value.
const NEUTRAL: &[(&str, Value)] = &[
    ("attention_bias", Value::Bool(false)),
    ("bias", Value::Bool(false)),
    ("fc_norm", Value::Bool(false)),
    ("mlp_bias", Value::Bool(false)),
    ("norm_before_fc", Value::Bool(false)),
    ("norm_before_residual", Value::Bool(false)),
    ("norm_output", Value::Bool(false)),
    ("partial_rotary_factor", Value::Null),
    ("qkv_bias", Value::Bool(false)),
    ("quantization_config", Value::Null),
    ("rope_parameters", Value::Null),
    ("rope_scaling", Value::Null),
    ("sliding_window", Value::Null),
    ("speculators_model_type", Value::Null),
    ("tie_word_embeddings", Value::Bool(false)),
    ("use_aux_hidden_state", Value::Bool(true)),
    ("use_aux_norm", Value::Bool(false)),
];

impl Eagle3Checkpoint {
    /// Reads `config.json` and `model.safetensors` of a directory and checks them against the target.
    ///
    /// # Errors
    /// *Fault* when a file cannot be read, is damaged, or contradicts itself or the target; *unsupported*
    /// when it is of a dialect that this crate does not run. The message names the file, key or tensor.
    pub fn load(directory: impl AsRef<Path>, target: TargetShape) -> Result<Self> {
        let read = |name: &str| {
            let path = directory.as_ref().join(name);
            fs::read(&path).map_err(|e| Error::fault(path.display().to_string(), "a readable file", e))
        };
        Self::from_bytes(&read("config.json")?, &read("model.safetensors")?, target)
    }

    /// As [`load`](Self::load), from the files' contents.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_bytes(config: &[u8], tensors: &[u8], target: TargetShape) -> Result<Self> {
        let raw: RawConfig = serde_json::from_slice(config)
            .map_err(|e| Error::fault("config.json", "the configuration of an EAGLE-3 head", e))?;
        let config = Eagle3Config::checked(raw, target)?;
        let mut tensors = Tensors::parse(tensors)?;
        let Eagle3Config { hidden, intermediate, num_heads, num_kv_heads, head_dim, draft_vocab, .. } =
            config;
        let (query_width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
        let vocab = tensors.vocab(draft_vocab, target.vocab)?;
        let embedding = match tensors.has("embed_tokens.weight") {
            true => Some(tensors.matrix("embed_tokens.weight", target.vocab, hidden)?),
            false => None,
        };
        if embedding.is_none() && hidden != target.hidden {
            let wanted = format!("embed_tokens.weight, as its rows have {hidden} elements");
            let seen = format!("none, and the target's table has {}", target.hidden);
            return Err(Error::fault("embedding of the head", wanted, seen));
        }
        let head = Self {
            vocab,
            embedding,
            fc: tensors.matrix("fc.weight", hidden, config.feature_width())?,
            query: tensors.matrix("midlayer.self_attn.q_proj.weight", query_width, 2 * hidden)?,
            key: tensors.matrix("midlayer.self_attn.k_proj.weight", kv_width, 2 * hidden)?,
            value: tensors.matrix("midlayer.self_attn.v_proj.weight", kv_width, 2 * hidden)?,
            attention_output: tensors.matrix("midlayer.self_attn.o_proj.weight", hidden, query_width)?,
            gate: tensors.matrix("midlayer.mlp.gate_proj.weight", intermediate, hidden)?,
            up: tensors.matrix("midlayer.mlp.up_proj.weight", intermediate, hidden)?,
            down: tensors.matrix("midlayer.mlp.down_proj.weight", hidden, intermediate)?,
            lm_head: tensors.matrix("lm_head.weight", draft_vocab, hidden)?,
            input_norm: tensors.vector("midlayer.input_layernorm.weight", hidden)?,
            hidden_norm: tensors.vector("midlayer.hidden_norm.weight", hidden)?,
            post_attention_norm: tensors.vector("midlayer.post_attention_layernorm.weight", hidden)?,
            final_norm: tensors.vector("norm.weight", hidden)?,
            config,
        };
        tensors.all_consumed()?;
        Ok(head)
    }

    /// The explicit configuration.
    pub fn config(&self) -> &Eagle3Config {
        &self.config
    }

    /// The tokens that the head can draft.
    pub fn vocab(&self) -> &DraftVocab {
        &self.vocab
    }

    /// Does it bring its own embedding table? If not, it needs the target's.
    pub fn has_embedding(&self) -> bool {
        self.embedding.is_some()
    }
}

impl Eagle3Config {
    fn checked(raw: RawConfig, target: TargetShape) -> Result<Self> {
        let known = ["LlamaForCausalLMEagle3", "LlamaForCausalLM"];
        if !matches!(&raw.architectures[..], [name] if known.contains(&name.as_str())) {
            let seen = format!("{:?}", raw.architectures);
            return Err(Error::unsupported("architectures", "[\"LlamaForCausalLMEagle3\"]", seen));
        }
        let eagle = raw.eagle_config;
        let sections = [Some(&raw.other), eagle.as_ref().map(|section| &section.other)];
        for (key, neutral) in NEUTRAL {
            for seen in sections.iter().flatten().filter_map(|section| section.get(*key)) {
                if seen != neutral && !seen.is_null() {
                    return Err(Error::unsupported(*key, neutral, seen));
                }
            }
        }
        if raw.num_hidden_layers != 1 {
            return Err(Error::unsupported("num_hidden_layers", 1, raw.num_hidden_layers));
        }
        if let Some(act) = raw.hidden_act.filter(|act| act != "silu") {
            return Err(Error::unsupported("hidden_act", "silu", act));
        }
        let agree = |key: &'static str, seen: usize, wanted: usize| match seen == wanted {
            true => Ok(()),
            false => Err(Error::fault(key, format_args!("the target's {wanted}"), seen)),
        };
        agree("vocab_size", raw.vocab_size, target.vocab)?;
        let target_hidden = raw.target_hidden_size.unwrap_or(raw.hidden_size);
        agree("target_hidden_size", target_hidden, target.hidden)?;

        let ids = eagle.and_then(|section| section.eagle_aux_hidden_state_layer_ids);
        let key = "eagle_config.eagle_aux_hidden_state_layer_ids";
        let wanted =
            format!("ascending ids of layers below {}, whose outputs are the features", target.num_layers);
        let ids = ids.ok_or_else(|| Error::fault(key, &wanted, "none"))?;
        let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || ids.last().is_none_or(|&last| last >= target.num_layers) {
            return Err(Error::fault(key, wanted, format_args!("{ids:?}")));
        }

        let (num_heads, hidden) = (raw.num_attention_heads, raw.hidden_size);
        let num_kv_heads = raw.num_key_value_heads.unwrap_or(num_heads);
        if num_kv_heads == 0 || num_heads == 0 || num_heads % num_kv_heads != 0 {
            let seen = format!("{num_heads} heads and {num_kv_heads} key/value heads");
            return Err(Error::fault("num_attention_heads", "a multiple of num_key_value_heads", seen));
        }
        let config = Self {
            target,
            feature_layers: ids,
            hidden,
            intermediate: raw.intermediate_size,
            num_heads,
            num_kv_heads,
            head_dim: raw.head_dim.unwrap_or(hidden / num_heads),
            draft_vocab: raw.draft_vocab_size.unwrap_or(raw.vocab_size),
            rms_epsilon: raw.rms_norm_eps as f32,
            rope_theta: raw.rope_theta as f32,
        };
        // No size that could overflow a product below; the tensors' own shapes are compared later.
        let sizes = [
            ("hidden_size", config.hidden, 1 << 20),
            ("intermediate_size", config.intermediate, 1 << 24),
            ("num_attention_heads", config.num_heads, 1 << 16),
            ("head_dim", config.head_dim, 1 << 16),
            ("draft_vocab_size", config.draft_vocab, target.vocab),
        ];
        for (key, seen, most) in sizes {
            if !(1..=most).contains(&seen) {
                return Err(Error::fault(key, format_args!("1..={most}"), seen));
            }
        }
        for (key, seen) in [("rms_norm_eps", config.rms_epsilon), ("rope_theta", config.rope_theta)] {
            if !(seen > 0.0 && seen.is_finite()) {
                return Err(Error::fault(key, "a positive number", seen));
            }
        }
        Ok(config)
    }
}

/// The tensors that nobody has asked for yet.
struct Tensors<'a>(BTreeMap<String, TensorView<'a>>);

impl<'a> Tensors<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|e| Error::fault("model.safetensors", "a whole safetensors file", e))?;
        Ok(Self(tensors.tensors().into_iter().collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn take(&mut self, name: &'static str, shape: &[usize]) -> Result<TensorView<'a>> {
        let missing = || Error::fault(name, format_args!("a tensor of shape {shape:?}"), "no such tensor");
        let tensor = self.0.remove(name).ok_or_else(missing)?;
        if tensor.shape() != shape {
            let seen = format!("{:?}", tensor.shape());
            return Err(Error::fault(name, format_args!("shape {shape:?}"), seen));
        }
        Ok(tensor)
    }

    fn floats(&mut self, name: &'static str, shape: &[usize]) -> Result<Weights> {
        let tensor = self.take(name, shape)?;
        let data = tensor.data();
        let halves = || data.chunks_exact(2).map(|b| [b[0], b[1]]);
        Ok(match tensor.dtype() {
            Dtype::BF16 => Weights::Bf16(halves().map(bf16::from_le_bytes).collect()),
            Dtype::F16 => Weights::F16(halves().map(f16::from_le_bytes).collect()),
            Dtype::F32 => {
                let words = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                Weights::F32(words.collect())
            }
            other => return Err(Error::unsupported(name, "bf16, f16 or f32", format_args!("{other:?}"))),
        })
    }

    fn matrix(&mut self, name: &'static str, rows: usize, columns: usize) -> Result<Matrix> {
        Ok(Matrix { columns, weights: self.floats(name, &[rows, columns])? })
    }

    fn vector(&mut self, name: &'static str, len: usize) -> Result<Vec<f32>> {
        Ok(self.floats(name, &[len])?.to_f32().into_owned())
    }

    /// `d2t` holds *offsets*: target id = draft id + `d2t[draft id]`. `t2d` marks the same ids.
    fn vocab(&mut self, draft_vocab: usize, vocab: usize) -> Result<DraftVocab> {
        if !self.has("d2t") && !self.has("t2d") {
            // No tables: only right if the two vocabularies are one.
            if draft_vocab != vocab {
                let wanted = format!("offsets for {draft_vocab} draft tokens of {vocab}");
                return Err(Error::fault("d2t", wanted, "no such tensor"));
            }
            return Ok(DraftVocab((0..vocab as u32).map(TokenId).collect()));
        }
        let d2t = self.take("d2t", &[draft_vocab])?;
        let t2d = self.take("t2d", &[vocab])?;
        for (name, wanted, seen) in [("d2t", Dtype::I64, d2t.dtype()), ("t2d", Dtype::BOOL, t2d.dtype())] {
            if seen != wanted {
                return Err(Error::unsupported(name, format_args!("{wanted:?}"), format_args!("{seen:?}")));
            }
        }
        let mut marked = t2d.data().iter().enumerate().filter(|(_, mark)| **mark != 0).map(|(id, _)| id);
        let mut tokens = Vec::with_capacity(draft_vocab);
        for (draft, offset) in d2t.data().chunks_exact(8).enumerate() {
            let offset = i64::from_le_bytes(std::array::from_fn(|i| offset[i]));
            let id = (draft as i64).checked_add(offset).and_then(|id| usize::try_from(id).ok());
            let wanted = marked.next();
            match (id, wanted) {
                (Some(id), Some(wanted)) if id == wanted => tokens.push(TokenId(id as u32)),
                _ => {
                    let wanted = match wanted {
                        Some(id) => format!("target token {id} (marked in t2d) for draft token {draft}"),
                        None => format!("as many tokens marked in t2d as draft tokens, {draft_vocab}"),
                    };
                    return Err(Error::fault("d2t", wanted, format_args!("offset {offset}")));
                }
            }
        }
        match marked.count() {
            0 => Ok(DraftVocab(tokens)),
            more => Err(Error::fault("t2d", draft_vocab, draft_vocab + more)),
        }
    }

    fn all_consumed(self) -> Result<()> {
        match self.0.into_keys().next() {
            None => Ok(()),
            Some(name) => Err(Error::unsupported(
                name,
                "only tensors of the official EAGLE-3 layout",
                "a tensor that the head would not use",
            )),
        }
    }
}
