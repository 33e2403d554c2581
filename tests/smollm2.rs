//! The reference engine on the real model: golden vectors, exact text, and files that are not what they
//! should be. What needs the model is skipped, loudly, until `cargo run --release --example speedup` has
//! put it into the cache; nothing here downloads. With `EAGLE_VERIFY_REQUIRE_MODEL` set it fails instead.

use std::path::Path;

use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Rank, Rendezvous, VocabShard, VocabShardConfig, WorldSize};
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    Coupling, DraftBudget, DraftTree, Eagle3Checkpoint, RequestId, RequestOptions, Speculator,
    SpeculatorConfig, TokenId, VerifyBatch,
};

#[path = "common/golden.rs"]
mod golden;
#[path = "common/model.rs"]
mod model;
#[allow(dead_code)] // the example uses the rest
#[path = "../examples/smollm2/mod.rs"]
mod smollm2;
use golden::Golden;
use smollm2::model::{Pass, Target};
use smollm2::serve::Chooser;
use smollm2::shard::TIME_LIMIT;
use smollm2::{prompts, serve};

const MAX_LEN: usize = 512;

fn target(path: &Path) -> Target {
    let mut target = Target::load(path, &[Cpu::new().unwrap()], 4, MAX_LEN).unwrap().remove(0);
    target.capture(&[1, 14, 26]);
    target
}

fn speculator(target: &Target) -> Speculator<Cpu> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    let head = Eagle3Checkpoint::load(assets, target.target_shape()).unwrap();
    let config = SpeculatorConfig { max_requests: 4, max_len: MAX_LEN };
    Speculator::new(target.cpu.clone(), &head, Some(target.embedding()), config).unwrap()
}

/// Within 1e-3 of the row's size.
fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.chunks(576).zip(want.chunks(576)) {
        let size = want.iter().fold(0.0f32, |size, x| size.max(x.abs()));
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-3 * size, "{what}: {got}, recorded {want}");
        }
    }
}

#[test]
fn the_target_matches_the_golden_vectors() {
    let Some((path, _turn)) = model::cached() else { return };
    let mut target = target(&path);
    for i in 0..3 {
        let golden = Golden::prompt(i);
        let prompt = target.tokenizer.chat(&golden.prompt_text()).unwrap();
        assert_eq!(prompt, golden.tokens("prompt_ids"), "the tokenizer");
        let mut table = target.new_table();
        let lease = table.lease(prompt.len()).unwrap();
        let answer = target.forward(&Pass::prompt(lease.table(), 0, &prompt)).unwrap();
        assert_close("prompt features", answer.features, &golden.floats("prompt_features"));
        lease.commit(prompt.len()).unwrap();
        assert!(golden.num_rounds() >= 2, "golden {i} must not pass by comparing nothing");
        for round in 0..golden.num_rounds() {
            let of = |what: &str| format!("{what}.{round}");
            let tokens = golden.tokens(&of("tree_tokens"));
            let parents = golden.tokens(&of("tree_parents")); // -1 for the root
            let drafts: Vec<_> = (1..tokens.len()).map(|n| (parents[n].0 as usize, tokens[n])).collect();
            let tree = DraftTree::from_drafts(tokens[0], &drafts).unwrap();
            let mut batch = VerifyBatch::new();
            batch.push(RequestId(0), table.len() + 1, &tree).unwrap();
            let lease = table.lease(tree.len()).unwrap();
            let answer = target.forward(&Pass::verify(&batch, std::iter::once(lease.table()))).unwrap();
            assert_close(&of("tree_features"), answer.features, &golden.floats(&of("tree_features")));
            let argmax: Vec<TokenId> = answer.logits.chunks(49_152).map(serve::argmax).collect();
            assert_eq!(argmax, golden.tokens(&of("tree_argmax")), "golden {i}, round {round}");
            let mut verdict = eagle_verify::Verdict::new();
            let limits = eagle_verify::OutputLimits { stop_tokens: &[], num_remaining: 99 };
            verdict.walk(&batch.entries()[0], limits, |node| Ok(argmax[node.index()]));
            let path: Vec<TokenId> = verdict.path.iter().map(|n| TokenId(n.index() as u32)).collect();
            assert_eq!(path, golden.tokens(&of("accepted_path")));
            let plan = verdict.commit_plan();
            target.commit(lease.table(), plan).unwrap();
            lease.commit(plan.num_kept_rows()).unwrap();
        }
    }
}

#[test]
fn whole_outputs_and_acceptance_match_the_golden_runs() {
    let Some((path, _turn)) = model::cached() else { return };
    let mut target = target(&path);
    let mut speculator = speculator(&target);
    let budget = DraftBudget::new(8, 5, 32).unwrap();
    for i in 0..3 {
        let golden = Golden::prompt(i);
        let (prompt, want) = (golden.tokens("prompt_ids"), golden.tokens("output_ids"));
        let options = RequestOptions { max_new_tokens: want.len(), budget, ..Default::default() };
        let run = serve::speculative(&mut target, &mut speculator, &[prompt], 1, &options).unwrap();
        assert_eq!(run.outputs[0], want);
        // The recorded run had no limit to cut its last step.
        let recorded = golden.tokens("accepted_lengths").len() as u64;
        assert_eq!(run.stats.num_verify_steps(), recorded);
    }
}

#[test]
fn text_is_plain_decodings_in_every_mode_and_batch() {
    let Some((path, _turn)) = model::cached() else { return };
    let mut target = target(&path);
    let mut speculator = speculator(&target);
    // All, or one of each of four kinds, which are seven each.
    let is_whole = std::env::var_os("EAGLE_VERIFY_ALL_PROMPTS").is_some();
    let texts = prompts::BUILT_IN.iter().step_by(if is_whole { 1 } else { 7 });
    let texts = texts.take(if is_whole { 42 } else { 4 }).map(|(_, text)| text);
    let prompts: Vec<_> = texts.map(|text| target.tokenizer.chat(text).unwrap()).collect();
    let mut chooser = Chooser::Whole(Cpu::new().unwrap());
    let tree = |width, depth, nodes| DraftBudget::new(width, depth, nodes).unwrap();
    let greedy = SamplingParams::default();
    let sampled = |temperature, top_p| SamplingParams { temperature, top_p, seed: 11, ..Default::default() };
    let penalised = SamplingParams { frequency_penalty: 0.4, min_p: 0.02, ..sampled(0.7, 1.0) };
    let mut texts = Vec::new();
    let few = [(1, tree(8, 4, 12)), (3, DraftBudget::chain(4).unwrap())];
    let many = [
        (1, tree(8, 4, 12)),
        (1, DraftBudget::chain(3).unwrap()),
        (4, DraftBudget::NONE),
        (4, DraftBudget::chain(4).unwrap()),
        (3, tree(8, 5, 32)),
        (4, tree(4, 3, 8)),
    ];
    for (params, num_prompts, budgets, least) in [
        (greedy, prompts.len(), &many[..], 1.3),
        (sampled(0.3, 1.0), 1, &few[..1], 1.0),
        (sampled(0.7, 0.95), 3, &few[..], 1.05),
        (sampled(1.0, 1.0), 2, &few[..], 0.99),
        (sampled(1.5, 1.0), 1, &few[..1], 0.99),
        (penalised, 2, &few[..], 0.99),
    ] {
        let prompts = &prompts[..num_prompts];
        let plain = serve::plain(&mut target, &mut chooser, prompts, 1, 24, &params).unwrap();
        assert_eq!(
            serve::plain(&mut target, &mut chooser, prompts, 3, 24, &params).unwrap().outputs,
            plain.outputs
        );
        for &(batch, budget) in budgets {
            // With the noise and without: the text is the same.
            let coupling = if batch == 3 { Coupling::NONE } else { Coupling::default() };
            let sampling = params.clone();
            let options =
                RequestOptions { max_new_tokens: 24, budget, sampling, coupling, ..Default::default() };
            let run = serve::speculative(&mut target, &mut speculator, prompts, batch, &options).unwrap();
            assert_eq!(run.outputs, plain.outputs, "batch {batch}, {options:?}");
            assert!(
                budget == DraftBudget::NONE || run.stats.acceptance_length().unwrap() > least,
                "{options:?}"
            );
        }
        texts.push(plain.outputs[0].clone());
    }
    // The control: from 0.7 on they are not the most likely text.
    assert!(texts[2..].iter().all(|text| *text != texts[0]));
}

#[test]
fn files_that_are_not_the_model_are_named() {
    let folder = std::env::temp_dir().join(format!("eagle-verify-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let cpu = [Cpu::with_threads(1).unwrap()];
    let refused =
        |path: &Path| format!("{:#}", Target::load(path, &cpu, 1, 64).err().expect("it was accepted"));
    assert!(refused(&folder.join("absent.gguf")).contains("cannot open the model"));
    let file = folder.join("file.gguf");
    for garbage in [&b""[..], b"GGUF", b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", &[7; 4096]] {
        std::fs::write(&file, garbage).unwrap();
        assert!(refused(&file).contains("is not a whole GGUF file"), "{}", refused(&file));
    }
    if let Some((path, _turn)) = model::cached() {
        let whole = std::fs::read(path).unwrap();
        for len in [1 << 12, 1 << 20, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&file, &whole[..len]).unwrap();
            let text = refused(&file);
            assert!(text.contains("GGUF") || text.contains("tensor"), "{len}: {text}");
        }
        // Longer than the context.
        std::fs::write(&file, &whole).unwrap();
        let text = format!("{:#}", Target::load(&file, &cpu, 1, 8193).err().unwrap());
        assert!(text.contains("context is 8192"), "{text}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn prompt_files_are_lines_or_json_lines() {
    let file = |name: &str, text: &str| {
        let path = std::env::temp_dir().join(format!("eagle-verify-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let prompts = prompts::from_file(&path);
        std::fs::remove_file(&path).unwrap();
        prompts
    };
    assert_eq!(file("a.txt", "one\n\ntwo\n").unwrap(), ["one", "two"]);
    let lines = "{\"prompt\": \"one\"}\n{\"id\": 3, \"turns\": [\"two\", \"three\"]}\n";
    assert_eq!(file("b.jsonl", lines).unwrap(), ["one", "two"]);
    for bad in ["", "{\"turns\": []}", "{\"text\": \"x\"}", "no json"] {
        assert!(file("c.jsonl", bad).is_err(), "{bad}");
    }
}

/// The target split over ranks: their texts are equal, and those of chains and trees are plain decoding's.
#[test]
fn ranks_that_share_the_target_emit_plain_decodings_text() {
    let Some((path, _turn)) = model::cached() else { return };
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/assets/smollm2-135m-eagle3");
    for world in [WorldSize::Two, WorldSize::Four] {
        let cpus: Vec<Cpu> = world.ranks().map(|_| Cpu::with_threads(1).unwrap()).collect();
        let targets = Target::load(&path, &cpus, 2, 128).unwrap();
        let head = Eagle3Checkpoint::load(&assets, targets[0].target_shape()).unwrap();
        let prompt = targets[0].tokenizer.chat("Name three colours.").unwrap();
        let meetings = [(); 3].map(|()| Rendezvous::new(world, TIME_LIMIT));
        let life = |rank: Rank, mut target: Target| {
            target.capture(&[1, 14, 26]);
            target.join(&meetings[0], rank).unwrap();
            let columns = VocabShardConfig::new(target.shape.vocab, target.shard.vocab.clone());
            let shard = |meeting| VocabShard::join(meeting, rank, columns.clone()).unwrap();
            let (cpu, table) = (target.cpu.clone(), Some(target.embedding()));
            let mut chooser = Chooser::Shard(cpu.clone(), shard(&meetings[1]));
            let config = SpeculatorConfig { max_requests: 2, max_len: 128 };
            let mut speculator =
                Speculator::new_sharded(cpu, &head, table, config, shard(&meetings[2])).unwrap();
            let sampling = SamplingParams { temperature: 0.7, seed: 3, ..Default::default() };
            let budgets = [DraftBudget::new(8, 4, 12).unwrap(), DraftBudget::chain(3).unwrap()];
            let mut texts = Vec::new();
            for (sampling, budgets) in [(SamplingParams::default(), &budgets[..]), (sampling, &budgets[..1])]
            {
                let prompts = [prompt.clone()];
                let plain = serve::plain(&mut target, &mut chooser, &prompts, 1, 12, &sampling).unwrap();
                for &budget in budgets {
                    let sampling = sampling.clone();
                    let options =
                        RequestOptions { max_new_tokens: 12, budget, sampling, ..Default::default() };
                    let run =
                        serve::speculative(&mut target, &mut speculator, &prompts, 1, &options).unwrap();
                    assert_eq!(run.outputs, plain.outputs, "{world:?}, {budget:?}");
                }
                texts.push(plain.outputs);
            }
            assert!(speculator.stats().num_correct_drafts() > 10, "{:?}", speculator.stats());
            texts
        };
        let life = &life;
        let texts: Vec<_> = std::thread::scope(|scope| {
            let ranks = world.ranks().zip(targets);
            let ranks: Vec<_> = ranks.map(|(rank, target)| scope.spawn(move || life(rank, target))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        assert_ne!(texts[0][0], texts[0][1], "the noise decides");
    }
}
