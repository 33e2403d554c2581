//! Damaged, mismatched and foreign checkpoints: each an error that names the culprit, never a panic.

use std::path::Path;

use eagle_verify::{Eagle3Checkpoint, ErrorKind, Result, TargetShape};
use proptest::prelude::*;
use safetensors::tensor::Dtype;
use serde_json::json;

mod common;
use common::toy::{HeadFiles, TARGET, head_files};

const SMOLLM2: TargetShape = TargetShape { hidden: 576, num_layers: 30, vocab: 49_152 };

fn load(files: &HeadFiles) -> Result<Eagle3Checkpoint> {
    Eagle3Checkpoint::from_bytes(&files.config_bytes(), &files.tensor_bytes(), TARGET)
}

/// Changes the files; the error must have this kind and subject.
fn refuses(kind: ErrorKind, subject: &str, change: impl FnOnce(&mut HeadFiles)) {
    let mut files = head_files(1);
    change(&mut files);
    let error = load(&files).err().unwrap_or_else(|| panic!("{subject} was accepted"));
    assert_eq!((error.subject(), error.kind()), (subject, kind), "{error}");
    let text = error.to_string();
    assert!(text.contains("wanted") && text.contains("seen"), "{text}");
}

fn refuses_config(kind: ErrorKind, key: &str, value: serde_json::Value) {
    refuses(kind, key, |files| files.config[key] = value);
}

#[test]
fn the_shipped_head_loads_and_says_what_it_is() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(&directory, SMOLLM2).unwrap();
    let config = head.config();
    assert_eq!(config.feature_layers, [1, 14, 26]);
    assert_eq!((config.feature_width(), config.hidden, config.draft_vocab), (1728, 576, 8192));
    assert!(!head.has_embedding());
    let tokens = head.vocab().tokens();
    assert!(tokens.len() == 8192 && tokens.windows(2).all(|pair| pair[0] < pair[1]));
    // For another target it is refused.
    for (key, target) in [
        ("target_hidden_size", TargetShape { hidden: 640, ..SMOLLM2 }),
        ("vocab_size", TargetShape { vocab: 49_153, ..SMOLLM2 }),
        ("eagle_config.eagle_aux_hidden_state_layer_ids", TargetShape { num_layers: 26, ..SMOLLM2 }),
    ] {
        assert_eq!(Eagle3Checkpoint::load(&directory, target).unwrap_err().subject(), key);
    }
}

#[test]
fn missing_files_are_named() {
    let error = Eagle3Checkpoint::load("no/such/folder", SMOLLM2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fault);
    assert!(error.subject().contains("config.json"), "{error}");
}

#[test]
fn tensors_must_be_the_layout_exactly() {
    let names: Vec<String> = head_files(1).tensors.into_keys().collect();
    for name in &names {
        refuses(ErrorKind::Fault, name, |files| drop(files.tensors.remove(name)));
        refuses(ErrorKind::Fault, name, |files| {
            let (dtype, shape, bytes) = files.tensors.get_mut(name).unwrap();
            shape[0] -= 1;
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            bytes.truncate(len);
        });
        refuses(ErrorKind::Unsupported, name, |files| {
            let (dtype, shape, bytes) = files.tensors.get_mut(name).unwrap();
            *dtype = Dtype::I16;
            *bytes = vec![0; 2 * shape.iter().product::<usize>()];
        });
    }
    refuses(ErrorKind::Unsupported, "fc.bias", |files| {
        files.tensors.insert("fc.bias".into(), (Dtype::BF16, vec![64], vec![0; 128]));
    });
    refuses(ErrorKind::Fault, "embed_tokens.weight", |files| {
        files.tensors.insert("embed_tokens.weight".into(), (Dtype::BF16, vec![11, 64], vec![0; 11 * 128]));
    });
}

#[test]
fn other_element_types_and_an_own_embedding_are_fine() {
    let mut files = head_files(1);
    for (dtype, _, bytes) in files.tensors.values_mut().filter(|tensor| tensor.0 == Dtype::BF16) {
        let values = bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32());
        (*dtype, *bytes) = (Dtype::F32, values.flat_map(f32::to_le_bytes).collect());
    }
    let own = vec![0; TARGET.vocab * 64 * 2];
    files.tensors.insert("embed_tokens.weight".into(), (Dtype::F16, vec![TARGET.vocab, 64], own));
    assert!(load(&files).unwrap().has_embedding());
}

/// `d2t` holds offsets; `t2d` marks the same tokens.
#[test]
fn vocabulary_tables_must_agree() {
    let set = |files: &mut HeadFiles, draft: usize, offset: i64| {
        files.tensors.get_mut("d2t").unwrap().2[8 * draft..8 * draft + 8]
            .copy_from_slice(&offset.to_le_bytes());
    };
    for offset in [i64::MAX, i64::MIN, -8, 5, 1000] {
        refuses(ErrorKind::Fault, "d2t", |files| set(files, 7, offset));
    }
    refuses(ErrorKind::Fault, "d2t", |files| (0..8).for_each(|draft| set(files, draft, 0)));
    // Ids instead of offsets: the classical mistake.
    refuses(ErrorKind::Fault, "d2t", |files| {
        [0, 1, 3, 4, 6, 7, 9, 10].into_iter().enumerate().for_each(|(draft, id)| set(files, draft, id));
    });
    refuses(ErrorKind::Fault, "d2t", |files| files.tensors.get_mut("t2d").unwrap().2[10] = 0);
    refuses(ErrorKind::Fault, "t2d", |files| files.tensors.get_mut("t2d").unwrap().2[11] = 1);
    // Without tables the vocabularies must be one.
    refuses(ErrorKind::Fault, "d2t", |files| {
        files.tensors.remove("d2t");
        files.tensors.remove("t2d");
    });
    let mut files = head_files(1);
    files.tensors.remove("d2t");
    files.tensors.remove("t2d");
    files.config["draft_vocab_size"] = json!(TARGET.vocab);
    files
        .tensors
        .insert("lm_head.weight".into(), (Dtype::BF16, vec![TARGET.vocab, 64], vec![0; TARGET.vocab * 128]));
    let tokens = load(&files).unwrap().vocab().tokens().to_vec();
    assert!(tokens.iter().enumerate().all(|(draft, token)| token.0 as usize == draft));
}

#[test]
fn foreign_dialects_are_refused_by_name() {
    use ErrorKind::{Fault, Unsupported};
    for key in
        ["attention_bias", "bias", "fc_norm", "norm_output", "norm_before_residual", "tie_word_embeddings"]
    {
        refuses_config(Unsupported, key, json!(true));
    }
    refuses_config(Unsupported, "architectures", json!(["Eagle3DeepseekV2ForCausalLM"]));
    refuses_config(Unsupported, "architectures", json!([]));
    refuses_config(Unsupported, "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 }));
    refuses_config(Unsupported, "num_hidden_layers", json!(2));
    refuses_config(Unsupported, "hidden_act", json!("gelu"));
    refuses(Unsupported, "use_aux_hidden_state", |files| {
        files.config["eagle_config"]["use_aux_hidden_state"] = json!(false)
    });
    refuses_config(Fault, "num_attention_heads", json!(0));
    refuses_config(Fault, "num_attention_heads", json!(u32::MAX));
    refuses_config(Fault, "head_dim", json!(0));
    refuses_config(Fault, "intermediate_size", json!(0));
    refuses_config(Fault, "intermediate_size", json!(u64::MAX));
    refuses_config(Fault, "draft_vocab_size", json!(13));
    refuses_config(Fault, "draft_vocab_size", json!(0));
    refuses_config(Fault, "rms_norm_eps", json!(0.0));
    refuses_config(Fault, "rope_theta", json!(-1.0));
    refuses_config(Fault, "vocab_size", json!(13));
    refuses_config(Fault, "target_hidden_size", json!(128));
    for ids in [json!([1, 2, 6]), json!([2, 1, 4]), json!([1, 1, 4]), json!([]), json!(null)] {
        refuses(Fault, "eagle_config.eagle_aux_hidden_state_layer_ids", |files| {
            files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids;
        });
    }
    refuses(Fault, "eagle_config.eagle_aux_hidden_state_layer_ids", |files| {
        files.config["eagle_config"] = json!(null)
    });
    // One id more than `fc` is wide for.
    refuses(Fault, "fc.weight", |files| {
        files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 2, 3, 4]);
    });
    refuses(Fault, "config.json", |files| {
        files.config = json!({ "architectures": ["LlamaForCausalLMEagle3"] })
    });
    refuses(Fault, "config.json", |files| files.config["hidden_size"] = json!(-64));
}

proptest! {
    /// Cut or flipped anywhere, a file loads or is refused; it never panics.
    #[test]
    fn damaged_files_do_no_harm(cut in 0.0f64..1.0, flips in prop::collection::vec((0.0f64..1.0, any::<u8>()), 0..4)) {
        let files = head_files(1);
        let (config, tensors) = (files.config_bytes(), files.tensor_bytes());
        let whole = load(&files).is_ok();
        prop_assert!(whole);
        let short = &tensors[..(cut * tensors.len() as f64) as usize];
        prop_assert!(Eagle3Checkpoint::from_bytes(&config, short, TARGET).is_err());
        let short = &config[..(cut * config.len() as f64) as usize];
        prop_assert!(Eagle3Checkpoint::from_bytes(short, &tensors, TARGET).is_err());
        for (target, head) in [(&config, true), (&tensors, false)] {
            let mut bytes = target.clone();
            // The header is where it hurts.
            let len = if head { bytes.len() } else { 2000.min(bytes.len()) };
            for (place, value) in &flips {
                bytes[(place * len as f64) as usize] = *value;
            }
            let _ = match head {
                true => Eagle3Checkpoint::from_bytes(&bytes, &tensors, TARGET),
                false => Eagle3Checkpoint::from_bytes(&config, &bytes, TARGET),
            };
        }
    }
}
