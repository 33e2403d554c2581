//! The formulas for what a draft step costs, against what the emulated driver and the kernels' own accesses come to.
#![cfg(feature = "cuda")]

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::backend::cuda::cost::{DraftCost, DraftStep, draft_cost};
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{Eagle3Config, RequestId, TargetShape, TokenId, VerifyBatch};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/draft.rs"]
mod draft;
#[path = "common/toy.rs"]
mod toy;

use backends::emulated;
use draft::{Engine, HeadShape, large, options, small};

/// A head with slices, several blocks to combine and to activate, and heads across the bounds of blocks.
fn sliced() -> HeadShape {
    HeadShape {
        target: TargetShape { hidden: 320, num_layers: 6, vocab: 300 },
        intermediate: 2304,
        num_heads: 24,
        num_kv_heads: 2,
        head_dim: 96,
        draft_tokens: (0..290).collect(),
    }
}

/// The head's blocks don't wait for each other: few at a time are faster.
fn fast() -> emulator::Config {
    emulator::Config { max_resident_blocks: 4, ..emulator::Config::fast() }
}

/// One block at a time, and its traffic counted.
fn counting() -> emulator::Config {
    emulator::Config { counts_traffic: true, max_resident_blocks: 1, ..emulator::Config::fast() }
}

fn config_of(shape: &HeadShape) -> Eagle3Config {
    Eagle3Config {
        target: shape.target,
        feature_layers: vec![1, 2, 4],
        hidden: shape.target.hidden,
        intermediate: shape.intermediate,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        draft_vocab: shape.draft_tokens.len(),
        rms_epsilon: 1e-5,
        rope_theta: 1e4,
    }
}

/// What the emulator has counted since it was configured.
struct Counted {
    traffic: Vec<(String, emulator::Traffic)>,
    driver: emulator::DriverCounts,
    copied_bytes: u64,
}

impl Counted {
    fn now() -> Self {
        let report = emulator::report();
        assert!(report.is_clean(), "{:?}", report.complaint());
        let traffic = emulator::traffic().into_iter().collect();
        Self { traffic, driver: report.driver, copied_bytes: report.stats.num_copied_bytes }
    }

    /// Where it differs from the formulas.
    fn compare(&self, cost: &DraftCost) -> Result<(), String> {
        let same = |what: &str, counted: u64, formula: u64| {
            if counted == formula { Ok(()) } else { Err(format!("{what}: {counted}, by formula {formula}")) }
        };
        let names: Vec<&String> = self.traffic.iter().map(|(name, _)| name).collect();
        let by_formula: Vec<&String> = cost.kernels.keys().collect();
        if names != by_formula {
            return Err(format!("kernels {names:?}, by formula {by_formula:?}"));
        }
        for ((name, counted), formula) in self.traffic.iter().zip(cost.kernels.values()) {
            same(&format!("launches of {name}"), counted.num_launches, formula.num_launches)?;
            same(&format!("bytes that {name} writes"), counted.written_bytes, formula.written_bytes)?;
            let (least, most) = (formula.read_bytes - formula.varying_bytes, formula.read_bytes);
            if !(least..=most).contains(&counted.read_bytes) {
                return Err(format!("{name} reads {}, by formula {least} to {most}", counted.read_bytes));
            }
        }
        let emulator::DriverCounts {
            num_launches,
            num_graph_launches,
            num_graph_kernels,
            num_uploads,
            upload_bytes,
            num_downloads,
            download_bytes,
            ..
        } = self.driver;
        same("kernels launched alone", num_launches, cost.num_single_launches)?;
        same("kernels in graphs", num_graph_kernels, cost.num_launches() - cost.num_single_launches)?;
        same("graphs, uploads, downloads", num_graph_launches * 100 + num_uploads * 10 + num_downloads, 111)?;
        same("bytes up", upload_bytes, cost.upload_bytes)?;
        same("bytes down", download_bytes, cost.download_bytes)?;
        // What linear layers read comes by asynchronous copies, but for their lists of rows.
        let is_linear = |name: &str| name.contains("linear");
        let linear = cost.kernels.iter().filter(|(name, _)| is_linear(name)).map(|(_, cost)| cost.read_bytes);
        let (linear, copied) = (linear.sum::<u64>(), self.copied_bytes);
        if copied > linear || (linear - copied) * 50 > linear {
            return Err(format!("{copied} bytes by asynchronous copies, by formula {linear}"));
        }
        Ok(())
    }
}

/// Some steps of requests that are all alike.
struct Case {
    name: &'static str,
    shape: fn() -> HeadShape,
    requests: usize,
    width: usize,
    depth: usize,
    prompt_len: usize,
    temperature: f32,
    mutant: Option<&'static str>,
}

const CHAIN: Case = Case {
    name: "a chain",
    shape: small,
    requests: 1,
    width: 1,
    depth: 3,
    prompt_len: 20,
    temperature: 0.0,
    mutant: None,
};

/// Returns the most pairs of a step, and the pages that the requests have got.
fn check(case: Case) -> (usize, usize) {
    let Case { name, shape, requests, width, depth, prompt_len, temperature, mutant } = case;
    let fast = emulator::Config { mutant, ..fast() };
    let counting = emulator::Config { mutant, ..counting() };
    emulator::configure(&fast);
    let mut engine: Engine<Cuda> = Engine::new(emulated(), shape(), requests, prompt_len + 100);
    let vocab = engine.shape.target.vocab;
    let prompt: Vec<TokenId> = (0..prompt_len).map(|i| TokenId((i * 7 % vocab) as u32)).collect();
    let ids: Vec<RequestId> = (0..requests as u64).map(RequestId).collect();
    for id in &ids {
        let sampling = SamplingParams { temperature, seed: 3, ..SamplingParams::default() };
        engine.admit(id.0, &prompt, options((width, depth, 256), sampling));
    }
    let mut batch = VerifyBatch::new();
    engine.speculator.propose(&ids, &mut batch).unwrap();
    let config = config_of(&engine.shape);
    let mut step = DraftStep {
        requests,
        max_requests: requests,
        width,
        depth,
        prefix_len: prompt_len,
        pairs: 1,
        new_pages: 0,
        noise: temperature > 0.0,
        embedding_bytes: 4,
    };
    let (mut most_pairs, mut new_pages) = (0, 0);
    for round in 0..3 {
        // The first again, with the last pair alone; then what verify passes leave, alike in all requests.
        if round > 0 {
            let verdicts = engine.accept(&batch);
            step.pairs = verdicts[0].emitted.len();
            assert!(verdicts.iter().all(|verdict| verdict.emitted == verdicts[0].emitted));
        }
        most_pairs = most_pairs.max(step.pairs);
        step.prefix_len = engine.speculator.committed(ids[0]).unwrap().len() - 1;
        emulator::configure(&counting);
        engine.speculator.propose(&ids, &mut batch).unwrap();
        let counted = Counted::now();
        emulator::configure(&fast);
        let pages = counted.traffic.iter().find(|(name, _)| name == "ev_draft_pages");
        step.new_pages = pages.map_or(0, |(_, pages)| pages.written_bytes as usize / 4);
        new_pages += step.new_pages;
        let cost = draft_cost(&config, &step);
        counted.compare(&cost).unwrap_or_else(|difference| panic!("{name}, round {round}: {difference}"));
        if round == 2 {
            // A formula that is off by one in anything is noticed.
            for wrong in [
                DraftStep { depth: depth + 1, ..step },
                DraftStep { width: width + 1, ..step },
                // By more than what rows of a tree may have in common.
                DraftStep { prefix_len: step.prefix_len + if width == 1 { 1 } else { 64 }, ..step },
                DraftStep { pairs: step.pairs + 1, ..step },
                DraftStep { new_pages: step.new_pages + 1, ..step },
                DraftStep { requests: 2 * requests, ..step },
                DraftStep { noise: !step.noise, ..step },
                DraftStep { embedding_bytes: 2, ..step },
            ] {
                assert!(counted.compare(&draft_cost(&config, &wrong)).is_err(), "{name}: {wrong:?}");
            }
            for wrong in [
                Eagle3Config { intermediate: config.intermediate + 8, ..config.clone() },
                Eagle3Config { draft_vocab: config.draft_vocab + 1, ..config.clone() },
                Eagle3Config { num_kv_heads: config.num_kv_heads / 2, ..config.clone() },
            ] {
                assert!(counted.compare(&draft_cost(&wrong, &step)).is_err(), "{name}: {wrong:?}");
            }
        }
        // What is moved is more than must be.
        assert!(cost.moved_bytes() > cost.minimum_bytes && cost.minimum_bytes > 0);
    }
    assert!(most_pairs > 1, "{name}: nothing was accepted");
    (requests * most_pairs, new_pages)
}

#[test]
fn formulas_equal_what_is_counted() {
    let _machine = emulator::exclusive();
    check(CHAIN);
    check(Case { name: "two chunks", requests: 2, width: 4, prompt_len: 300, ..CHAIN });
    check(Case { name: "two passes", requests: 8, width: 10, depth: 2, prompt_len: 31, ..CHAIN });
    let pairs = Case { name: "two passes of pairs", requests: 16, depth: 4, prompt_len: 27, ..CHAIN };
    let (num_pairs, new_pages) = check(pairs);
    assert!(num_pairs > 64 && new_pages > 0, "{num_pairs} pairs, {new_pages} pages");
    let noise =
        Case { name: "noise", shape: large, requests: 2, width: 3, depth: 4, temperature: 0.8, ..CHAIN };
    check(Case { prompt_len: 70, ..noise });
    check(Case { name: "slices", shape: sliced, width: 8, depth: 2, prompt_len: 40, ..CHAIN });
}

/// A kernel that reads what it need not is noticed.
#[test]
fn other_traffic_is_noticed() {
    let _machine = emulator::exclusive();
    for mutant in ["draft: attention reads past the prefix", "draft: attention sees the next draft row"] {
        let checked = std::panic::catch_unwind(|| check(Case { mutant: Some(mutant), ..CHAIN }));
        assert!(checked.is_err(), "`{mutant}` passes");
    }
    emulator::configure(&fast());
}
