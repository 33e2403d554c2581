//! A toy target whose answers depend on the text alone, and a random head for it.
//!
//! The vocabulary is so small that a random head is right often enough to exercise every path.

#![allow(dead_code)] // each test crate uses its part

use std::collections::BTreeMap;

use eagle_verify::{TargetShape, TokenId, VerifyBatch};
use safetensors::tensor::{Dtype, TensorView, serialize};

pub const TARGET: TargetShape = TargetShape { hidden: 64, num_layers: 6, vocab: 12 };
pub const FEATURE_WIDTH: usize = 3 * 64;

/// A cheap stream of numbers in [-1, 1).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn next_f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next_f32()).collect()
    }
}

/// Mixes a text to a seed.
fn hash(text: &[TokenId], salt: u64) -> u64 {
    text.iter().fold(salt, |hash, token| Numbers::new(hash ^ u64::from(token.0 + 1)).next_u64())
}

/// The target's logits after a text, `[vocab]`.
pub fn logits(text: &[TokenId]) -> Vec<f32> {
    Numbers::new(hash(text, 1)).floats(TARGET.vocab)
}

/// The target's feature of a text's last token, `[FEATURE_WIDTH]`.
pub fn feature(text: &[TokenId]) -> Vec<f32> {
    Numbers::new(hash(text, 2)).floats(FEATURE_WIDTH)
}

/// Features of a text's tokens from `start` on.
pub fn features(text: &[TokenId], start: usize) -> Vec<f32> {
    (start..text.len()).flat_map(|i| feature(&text[..=i])).collect()
}

/// The token that plain decoding emits after a text.
pub fn next_token(text: &[TokenId]) -> TokenId {
    let logits = logits(text);
    let best = (0..TARGET.vocab).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    TokenId(best.unwrap() as u32)
}

/// Plain decoding.
pub fn decode(prompt: &[TokenId], count: usize, stop: &[TokenId]) -> Vec<TokenId> {
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + count {
        let token = next_token(&text);
        text.push(token);
        if stop.contains(&token) {
            break;
        }
    }
    text.split_off(prompt.len())
}

/// A prompt of some length.
pub fn prompt(len: usize, seed: u64) -> Vec<TokenId> {
    let mut numbers = Numbers::new(seed);
    (0..len).map(|_| TokenId((numbers.next_u64() % TARGET.vocab as u64) as u32)).collect()
}

/// The target's forward pass over a batch: logits and features of every node, given each entry's text.
pub fn forward<'a>(batch: &VerifyBatch, text_of: impl Fn(usize) -> &'a [TokenId]) -> (Vec<f32>, Vec<f32>) {
    let (mut all_logits, mut all_features) = (Vec::new(), Vec::new());
    for (i, entry) in batch.entries().iter().enumerate() {
        assert_eq!(text_of(i).len(), entry.committed_len());
        for node in entry.tree().nodes() {
            let mut path: Vec<TokenId> = Vec::new();
            let mut at = node;
            while let Some(parent) = entry.tree().parent(at) {
                path.push(entry.tree().token(at));
                at = parent;
            }
            path.reverse();
            let text = [text_of(i), &path].concat();
            all_logits.extend(logits(&text));
            all_features.extend(feature(&text));
        }
    }
    (all_logits, all_features)
}

/// The files of a random head: `config.json` and `model.safetensors`.
pub struct HeadFiles {
    pub config: serde_json::Value,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

/// Sizes of a random head.
pub struct HeadShape {
    pub target: TargetShape,
    pub intermediate: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// The target's tokens that it drafts, ascending.
    pub draft_tokens: Vec<i64>,
}

/// The toy target's head.
pub fn head_files(seed: u64) -> HeadFiles {
    let draft_tokens = vec![0, 1, 3, 4, 6, 7, 9, 10];
    let shape = HeadShape {
        target: TARGET,
        intermediate: 96,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 32,
        draft_tokens,
    };
    random_head(&shape, seed)
}

pub fn random_head(shape: &HeadShape, seed: u64) -> HeadFiles {
    let HeadShape { target, intermediate, num_heads, num_kv_heads, head_dim, draft_tokens } = shape;
    let (hidden, vocab, draft_vocab) = (target.hidden, target.vocab, draft_tokens.len());
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null,
        "vocab_size": vocab, "draft_vocab_size": draft_vocab, "tie_word_embeddings": false,
        "eagle_config": { "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": true },
    });
    let mut numbers = Numbers::new(seed);
    let mut tensors = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize], offset: f32| {
        let count = shape.iter().product();
        let scale = 1.5 / (*shape.last().unwrap() as f32).sqrt();
        let values = numbers.floats(count).into_iter().map(|x| offset + x * scale);
        let bytes = values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
        tensors.insert(name.to_owned(), (Dtype::BF16, shape.to_vec(), bytes));
    };
    let (query, key) = (num_heads * head_dim, num_kv_heads * head_dim);
    add("fc.weight", &[hidden, 3 * hidden], 0.0);
    add("midlayer.self_attn.q_proj.weight", &[query, 2 * hidden], 0.0);
    add("midlayer.self_attn.k_proj.weight", &[key, 2 * hidden], 0.0);
    add("midlayer.self_attn.v_proj.weight", &[key, 2 * hidden], 0.0);
    add("midlayer.self_attn.o_proj.weight", &[hidden, query], 0.0);
    add("midlayer.mlp.gate_proj.weight", &[*intermediate, hidden], 0.0);
    add("midlayer.mlp.up_proj.weight", &[*intermediate, hidden], 0.0);
    add("midlayer.mlp.down_proj.weight", &[hidden, *intermediate], 0.0);
    add("lm_head.weight", &[draft_vocab, hidden], 0.0);
    for name in
        ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    {
        add(&format!("{name}.weight"), &[hidden], 1.0);
    }
    let offsets = draft_tokens.iter().enumerate().flat_map(|(i, id)| (id - i as i64).to_le_bytes()).collect();
    tensors.insert("d2t".to_owned(), (Dtype::I64, vec![draft_vocab], offsets));
    let marks = (0..vocab as i64).map(|id| u8::from(draft_tokens.contains(&id))).collect();
    tensors.insert("t2d".to_owned(), (Dtype::BOOL, vec![vocab], marks));
    HeadFiles { config, tensors }
}

impl HeadFiles {
    pub fn config_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.config).unwrap()
    }

    pub fn tensor_bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        serialize(views, None).unwrap()
    }
}

/// The target's embedding table, `[vocab, hidden]`.
pub fn embedding_table() -> Vec<f32> {
    Numbers::new(99).floats(TARGET.vocab * TARGET.hidden)
}
