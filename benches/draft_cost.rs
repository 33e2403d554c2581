//! What a draft step costs, counted: kernel launches and bytes of device memory, against the bytes that must be moved.
//! Nothing is run and nothing is timed. `tests/draft_cost.rs` compares the formulas with what kernels really do, byte
//! for byte, in an emulator.

use eagle_verify::backend::cuda::cost::{DraftCost, DraftStep, draft_cost};
use eagle_verify::{Eagle3Config, TargetShape};

/// The memory of an RTX PRO 6000 Blackwell, in bytes a second, as NVIDIA states it.
const BANDWIDTH: f64 = 1.79e12;
const PREFIX: usize = 4096;

fn kimi(draft_vocab: usize) -> Eagle3Config {
    head(TargetShape { hidden: 7168, num_layers: 61, vocab: 163_840 }, 18_432, (64, 8), draft_vocab)
}

fn llama() -> Eagle3Config {
    head(TargetShape { hidden: 4096, num_layers: 32, vocab: 128_256 }, 14_336, (32, 8), 32_000)
}

fn head(
    target: TargetShape,
    intermediate: usize,
    (num_heads, num_kv_heads): (usize, usize),
    draft_vocab: usize,
) -> Eagle3Config {
    Eagle3Config {
        target,
        feature_layers: vec![1, target.num_layers / 2 - 1, target.num_layers - 4],
        hidden: target.hidden,
        intermediate,
        num_heads,
        num_kv_heads,
        head_dim: 128,
        draft_vocab,
        rms_epsilon: 1e-5,
        rope_theta: 1e4,
    }
}

/// Drafts after `pairs` accepted tokens each, greedy, with a table of embeddings in bf16.
fn step(requests: usize, (width, depth): (usize, usize), pairs: usize) -> DraftStep {
    DraftStep {
        requests,
        max_requests: requests,
        width,
        depth,
        prefix_len: PREFIX,
        pairs,
        new_pages: 0,
        noise: false,
        embedding_bytes: 2,
    }
}

/// The answers: the weights by hand, and how costs grow.
fn check() {
    let config = kimi(32_000);
    let (hidden, query) = (7168, 64 * 128);
    let weights = |draft_vocab: usize| {
        2 * (2 * hidden * (query + 2 * 8 * 128) + query * hidden + 3 * hidden * 18_432 + hidden * draft_vocab)
    };
    let kv_bytes = PREFIX * 2 * 8 * 128 * 4;
    let pairs = 2 * (3 * hidden * hidden + 2 * hidden * 2 * 8 * 128);
    let of_pair = 3 * hidden * 4 + 2 * 8 * 128 * 4;
    for depth in [1, 3] {
        let cost = draft_cost(&config, &step(1, (1, depth), 1));
        let by_hand = depth * (weights(32_000) + kv_bytes) + pairs + of_pair;
        assert_eq!(cost.minimum_bytes, by_hand as u64, "{depth} levels");
        // Extension: four; start; levels of thirteen and `advance`.
        assert_eq!(cost.num_launches(), (4 + 1 + 14 * depth) as u64);
    }
    for step in [step(1, (8, 5), 3), step(8, (8, 5), 3)] {
        let (small, large) = (draft_cost(&config, &step), draft_cost(&kimi(163_840), &step));
        assert_eq!(small.num_launches(), large.num_launches());
        let more = 5 * (weights(163_840) - weights(32_000));
        assert_eq!(large.minimum_bytes - small.minimum_bytes, more as u64);
        assert!(small.moved_bytes() > small.minimum_bytes);
    }
}

/// What a cost has most of.
fn parts(cost: &DraftCost) -> String {
    let of = |name: &str| {
        let kernels = cost.kernels.iter().filter(|(kernel, _)| kernel.contains(name));
        kernels.map(|(_, cost)| cost.read_bytes + cost.written_bytes).sum::<u64>() as f64
    };
    let (linear, attention) = (of("linear"), of("attend") + of("combine"));
    let rest = cost.moved_bytes() as f64 - linear - attention;
    let percent = |bytes: f64| 100.0 * bytes / cost.minimum_bytes as f64;
    format!(
        "{:.1} | {:.1} | {:.1}",
        percent(linear - cost.weight_bytes as f64),
        percent(attention),
        percent(rest)
    )
}

fn main() {
    check();
    if std::env::args().any(|argument| argument == "--test") {
        println!("draft_cost: the answers are right");
        return;
    }
    println!(
        "Prefix of {PREFIX} tokens, one token accepted before, temperature 0. MB are 10^6 bytes. Counted by formula;"
    );
    println!("the times are predicted from the bytes, at {:.2} TB/s, and nothing else.\n", BANDWIDTH / 1e12);
    println!(
        "| head | batch | tree | launches | minimum MB | moved MB | ratio | linear again % | attention % | rest % | predicted ms, minimum | predicted ms, moved |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, config) in [
        ("Kimi-K2.5, 163,840 drafts", kimi(163_840)),
        ("Kimi-K2.5, 32,000 drafts", kimi(32_000)),
        ("Llama 8B, 32,000 drafts", llama()),
    ] {
        for requests in [1, 8] {
            for (tree, budget) in [("chain of 3", (1, 3)), ("8 wide, 5 deep", (8, 5))] {
                let cost = draft_cost(&config, &step(requests, budget, 1));
                let (least, moved) = (cost.minimum_bytes as f64, cost.moved_bytes() as f64);
                let ms = |bytes: f64| 1e3 * bytes / BANDWIDTH;
                println!(
                    "| {name} | {requests} | {tree} | {} | {:.0} | {:.0} | {:.3} | {} | {:.2} | {:.2} |",
                    cost.num_launches(),
                    least / 1e6,
                    moved / 1e6,
                    moved / least,
                    parts(&cost),
                    ms(least),
                    ms(moved),
                );
            }
        }
    }
}
