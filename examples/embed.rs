//! The smallest engine that embeds eagle-verify: no download, a toy target, a head made by hand.
//!
//! The toy target continues token `t` with `5 t + 3 (mod 64)`. It looks at one token only, so it needs no KV
//! cache and no mask; `examples/smollm2/serve.rs` is the same loop with both.

use std::error::Error;

use eagle_verify::backend::cpu::{Cpu, Embedding};
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, RequestId, RequestOptions, Speculator, SpeculatorConfig, TargetShape,
    TokenId, VerifyBatch,
};
use safetensors::tensor::{Dtype, TensorView};

const VOCAB: usize = 64;

/// The target's forward pass: a row of logits and a row of features for each token.
fn target(tokens: &[TokenId]) -> (Vec<f32>, Vec<f32>) {
    let mut logits = vec![0.0; tokens.len() * VOCAB];
    for (row, token) in logits.chunks_mut(VOCAB).zip(tokens) {
        row[(5 * token.0 as usize + 3) % VOCAB] = 1.0;
    }
    (logits, vec![0.0; tokens.len() * 64]) // this head makes no use of features
}

/// A head that knows the rule: it attends to its own token, copies it, and looks up what follows.
fn head() -> Result<Eagle3Checkpoint, Box<dyn Error>> {
    let config = r#"{
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "vocab_size": 64, "eagle_config": { "eagle_aux_hidden_state_layer_ids": [0] } }"#;
    type Element = fn(usize, usize) -> bool;
    let copy: Element = |row, column| row == column;
    let tensors: [(&str, usize, f32, Element); 13] = [
        ("fc", 64, 0.0, copy),
        ("midlayer.self_attn.q_proj", 128, 1.0, |_, column| column < 64),
        ("midlayer.self_attn.k_proj", 128, 1.0, |_, column| column < 64),
        ("midlayer.self_attn.v_proj", 128, 1.0, copy),
        ("midlayer.self_attn.o_proj", 64, 1.0, copy),
        ("midlayer.mlp.gate_proj", 64, 0.0, copy),
        ("midlayer.mlp.up_proj", 64, 0.0, copy),
        ("midlayer.mlp.down_proj", 64, 0.0, copy),
        ("lm_head", 64, 1.0, |next, token| next == (5 * token + 3) % VOCAB),
        ("midlayer.input_layernorm", 0, 1.0, copy),
        ("midlayer.hidden_norm", 0, 1.0, copy),
        ("midlayer.post_attention_layernorm", 0, 1.0, copy),
        ("norm", 0, 1.0, copy),
    ];
    let mut data = Vec::new();
    for (name, columns, value, element) in tensors {
        let shape = if columns == 0 { vec![64] } else { vec![64, columns] };
        let at = |i: usize| columns == 0 || element(i / columns, i % columns);
        let values = (0..shape.iter().product()).map(|i| if at(i) { value } else { 0.0 });
        data.push((format!("{name}.weight"), shape, values.flat_map(f32::to_le_bytes).collect::<Vec<_>>()));
    }
    let views = data
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
    let bytes =
        safetensors::serialize(views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?, None)?;
    let shape = TargetShape { hidden: 64, num_layers: 1, vocab: VOCAB };
    Ok(Eagle3Checkpoint::from_bytes(config.as_bytes(), &bytes, shape)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let one_hot: Vec<f32> = (0..VOCAB * 64).map(|i| if i / 64 == i % 64 { 1.0 } else { 0.0 }).collect();
    let embedding = Embedding::f32(one_hot.into(), 64)?;
    let config = SpeculatorConfig { max_requests: 8, max_len: 256 };
    let mut speculator = Speculator::new(Cpu::new()?, &head()?, Some(embedding), config)?;

    // A request: its options, its prompt with the target's features, the logits after the prompt.
    let (id, prompt) = (RequestId(1), [TokenId(7), TokenId(38)]);
    let options = RequestOptions {
        stop_tokens: vec![TokenId(0)],
        max_new_tokens: 24,
        budget: DraftBudget::new(2, 4, 8)?, // trees of width 2, depth 4, at most 8 nodes
        ..Default::default()                // temperature 0
    };
    speculator.admit(id, options)?;
    let (logits, features) = target(&prompt);
    speculator.prefill(id, &prompt, &features)?;
    let first = speculator.begin(id, &logits[VOCAB..])?;
    println!("first token {}", first.token.0);

    // Steps: draft a tree, run the target on all its nodes at once, keep what it confirms.
    let mut batch = VerifyBatch::new();
    loop {
        speculator.propose(&[id], &mut batch)?;
        let (logits, features) = target(batch.tokens());
        let verdict = &speculator.accept(&batch, &logits, &features)?[0];
        // With a KV cache: move the rows that `verdict.commit_plan()` names.
        let emitted: Vec<u32> = verdict.emitted.iter().map(|token| token.0).collect();
        println!("{} nodes verified, emitted {emitted:?}", batch.num_rows());
        if verdict.finished.is_some() {
            break;
        }
    }
    let output = speculator.finish(id)?;
    println!("{} tokens, acceptance length {:?}", output.tokens.len(), output.stats.acceptance_length());
    // The text is the target's own.
    assert!(output.tokens.windows(2).all(|pair| pair[1].0 == (5 * pair[0].0 + 3) % 64));
    Ok(())
}
