//! What calls take on a real GPU, each with its answer asserted before it is timed. Without a GPU it says SKIPPED,
//! and with `-- --test` rehearses all of it in the emulator, at tiny sizes. On a card it takes under two minutes.
//!
//! Times are the host's, over calls that are queued one after the other, medians of five rounds; of calls that answer
//! to the host they include that.

use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::cost::{DraftStep, draft_cost};
use eagle_verify::backend::cuda::{
    Buffer, ChooseRow, Chooser, ChooserConfig, Cuda, Linear, kernel_architectures,
};
use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Rendezvous, WorldSize};
use eagle_verify::sampling::{Sampler, SamplingContext, SamplingParams};
use eagle_verify::{
    DraftBudget, Eagle3Checkpoint, ErrorKind, RequestId, RequestOptions, Result, RmsNorm, Speculator,
    SpeculatorConfig, TargetShape, TokenId, VerifyBatch,
};
use half::bf16;

#[path = "../tests/common/backends.rs"]
mod backends;
#[path = "../tests/common/toy.rs"]
mod toy;

use backends::Device;
use toy::{HeadShape, Numbers};

/// What is timed: on a card the sizes of large models.
struct Sizes {
    vocab: usize,
    /// Outputs and inputs of linear layers, with their names.
    layers: Vec<(&'static str, usize, usize)>,
    /// Of weights that together are more than any cache.
    uncached_bytes: usize,
    head: HeadShape,
    prefix: usize,
    tree: (usize, usize),
    hidden: usize,
    reduced_rows: Vec<usize>,
    rounds: usize,
    calls: usize,
}

impl Sizes {
    fn of_a_card() -> Self {
        Self {
            vocab: 128_256,
            // Of Kimi-K2.5's head.
            layers: vec![
                ("fc", 7168, 21_504),
                ("query, key, value", 10_240, 14_336),
                ("attention output", 7168, 8192),
                ("gate, up", 36_864, 7168),
                ("down", 7168, 18_432),
                ("32,000 drafts", 32_000, 7168),
                ("163,840 drafts", 163_840, 7168),
            ],
            uncached_bytes: 512 << 20,
            head: HeadShape {
                target: TargetShape { hidden: 4096, num_layers: 32, vocab: 128_256 },
                intermediate: 14_336,
                num_heads: 32,
                num_kv_heads: 8,
                head_dim: 128,
                draft_tokens: (0..32_000).map(|i| 4 * i).collect(),
            },
            prefix: 2048,
            tree: (8, 5),
            hidden: 7168,
            reduced_rows: vec![1, 2, 4, 8, 16, 32, 64],
            rounds: 5,
            calls: 50,
        }
    }

    fn tiny() -> Self {
        Self {
            vocab: 500,
            layers: vec![("tiny", 96, 128)],
            uncached_bytes: 0,
            head: HeadShape {
                target: TargetShape { hidden: 64, num_layers: 6, vocab: 64 },
                intermediate: 96,
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 32,
                draft_tokens: (0..50).collect(),
            },
            prefix: 70,
            tree: (3, 2),
            hidden: 64,
            reduced_rows: vec![1, 3],
            rounds: 1,
            calls: 1,
        }
    }
}

/// Where it runs.
struct Bench {
    open: fn() -> Result<Cuda>,
    sizes: Sizes,
    /// Bytes a second, as the vendor states it; 0 if unknown.
    bandwidth: f64,
}

fn main() {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let open = || Cuda::new(0);
    let bench = match open() {
        Ok(_) => {
            let (name, bandwidth) = device();
            println!("{name}, {:.2} TB/s as its vendor states, 0 if unknown", bandwidth / 1e12);
            Bench { open, sizes: Sizes::of_a_card(), bandwidth }
        }
        Err(error) => {
            assert!(
                error.kind() == ErrorKind::Unsupported
                    && std::env::var_os("EAGLE_VERIFY_REQUIRE_GPU").is_none(),
                "{error}"
            );
            println!("SKIPPED: the bench needs a GPU (kernels: {}): {error}", kernel_architectures());
            if !is_test {
                return;
            }
            println!("Rehearsed in the emulator. The times below mean nothing.");
            let open = || Ok(backends::emulated());
            cuda_emulator::install();
            cuda_emulator::configure(&cuda_emulator::Config {
                patience: Duration::from_secs(5),
                ..cuda_emulator::Config::fast()
            });
            Bench { open, sizes: Sizes::tiny(), bandwidth: 0.0 }
        }
    };
    let started = Instant::now();
    bench.choices();
    bench.linear_layers();
    bench.drafts();
    bench.reductions();
    println!("\nall in {:.0} s", started.elapsed().as_secs_f64());
}

/// The first device's name and bandwidth.
fn device() -> (String, f64) {
    let output =
        Command::new("nvidia-smi").args(["--query-gpu=name", "--format=csv,noheader", "--id=0"]).output();
    let name =
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    let known = [
        ("H200", 4.8e12),
        ("H100 PCIe", 2.0e12),
        ("H100", 3.35e12),
        ("RTX PRO 6000", 1.79e12),
        ("RTX 5090", 1.79e12),
        ("RTX 5080", 0.96e12),
    ];
    let bandwidth =
        known.iter().find(|(part, _)| name.contains(part)).map_or(0.0, |(_, bandwidth)| *bandwidth);
    (name, bandwidth)
}

/// Many numbers at the price of few.
fn tiled(len: usize, scale: f32) -> Vec<bf16> {
    let few = Numbers::new(len as u64).floats(len.min(1_000_003));
    let few: Vec<bf16> = few.into_iter().map(|x| bf16::from_f32(x * scale)).collect();
    few.into_iter().cycle().take(len).collect()
}

impl Bench {
    fn cuda(&self) -> Cuda {
        (self.open)().expect("it opened before")
    }

    /// The median of a call's time in microseconds, over rounds of so many calls, each round with one wait.
    fn micros(&self, cuda: &Cuda, mut call: impl FnMut(usize)) -> f64 {
        call(0); // what is loaded or grown once
        cuda.synchronize().expect("the device works");
        let Sizes { rounds, calls, .. } = self.sizes;
        let mut times: Vec<f64> = (0..rounds)
            .map(|_| {
                let started = Instant::now();
                (0..calls).for_each(&mut call);
                cuda.synchronize().expect("the device works");
                started.elapsed().as_secs_f64() * 1e6 / calls as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[rounds / 2]
    }

    fn rate(&self, bytes: usize, micros: f64) -> String {
        let rate = bytes as f64 / micros * 1e6;
        let share = if self.bandwidth > 0.0 { 100.0 * rate / self.bandwidth } else { 0.0 };
        format!("{micros:.1} | {:.0} | {share:.0}", rate / 1e9)
    }

    /// Tokens of rows of f32 logits.
    fn choices(&self) {
        let (cuda, vocab) = (self.cuda(), self.sizes.vocab);
        println!("\n| choose, {vocab} columns | rows | us | GB/s | % |\n|---|---|---|---|---|");
        let mut chooser = Chooser::<f32>::new(&cuda, ChooserConfig::new(64, vocab)).expect("a chooser");
        let logits: Vec<f32> = Numbers::new(1).floats(64 * vocab).into_iter().map(|x| 8.0 * x).collect();
        let on_device = cuda.upload(&logits).expect("memory");
        let greedy = SamplingParams::default();
        let sampled = SamplingParams { temperature: 0.8, seed: 7, ..greedy.clone() };
        let top_p = SamplingParams { top_p: 0.9, ..sampled.clone() };
        for (name, params) in [("T = 0", greedy), ("T = 0.8", sampled), ("T = 0.8, top-p 0.9", top_p)] {
            let sampler = Sampler::new(params).expect("valid");
            for num_rows in [1, 16, 64] {
                let context = |row: usize| {
                    let position = row as u32;
                    SamplingContext { position, prompt: &[], output: &[], path: &[], allowed: None }
                };
                let rows: Vec<_> = (0..num_rows).map(|row| ChooseRow::new(&sampler, context(row))).collect();
                let slice = on_device.slice().get(0..num_rows * vocab).expect("in bounds");
                let keys = chooser.choose(slice, &rows).expect("keys");
                for (row, logits) in logits.chunks(vocab).take(num_rows).enumerate() {
                    assert_eq!(
                        keys[row],
                        sampler.choose(logits, context(row)).expect("a key"),
                        "{name} {row}"
                    );
                }
                let time = self.micros(&cuda, |_| {
                    chooser.choose(slice, &rows).expect("keys");
                });
                println!("| {name} | {num_rows} | {} |", self.rate(num_rows * vocab * 4, time));
            }
        }
    }

    /// Linear layers whose weights come from memory each time.
    fn linear_layers(&self) {
        let cuda = self.cuda();
        println!("\n| linear, bf16 | shape | rows | us | GB/s of weights | % |\n|---|---|---|---|---|---|");
        for &(name, outputs, inputs) in &self.sizes.layers {
            let weights = tiled(outputs * inputs, 1.0);
            let copies = self.sizes.uncached_bytes / (2 * weights.len()) + 1;
            let layers: Result<Vec<_>> =
                (0..copies).map(|_| Linear::new(&cuda, &weights, outputs, inputs)).collect();
            let mut layers = match layers {
                Ok(layers) => layers,
                Err(error) => {
                    println!("| {name} | {outputs} x {inputs} | SKIPPED: {error} | | | |");
                    continue;
                }
            };
            let x = Numbers::new(2).floats(64 * inputs);
            for rows in [1, 8, 64] {
                let input = cuda.upload(&x[..rows * inputs]).expect("memory");
                let mut output = cuda.alloc::<f32>(rows * outputs).expect("memory");
                layers[0].forward(input.slice(), output.slice_mut()).expect("queued");
                let seen = cuda.download(&output).expect("a product");
                for (row, column) in
                    [(0, 0), (0, outputs - 1), (rows - 1, outputs / 2), (rows - 1, outputs - 1)]
                {
                    let pairs = weights[column * inputs..][..inputs].iter().zip(&x[row * inputs..]);
                    let products = pairs.map(|(w, x)| f64::from(w.to_f32()) * f64::from(*x));
                    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), y| (sum + y, size + y.abs()));
                    let seen = f64::from(seen[row * outputs + column]);
                    assert!(
                        (seen - sum).abs() <= 1e-4 * size,
                        "{name}, row {row}, column {column}: {seen}, not {sum}"
                    );
                }
                let time = self.micros(&cuda, |call| {
                    let layer = &mut layers[call % copies];
                    layer.forward(input.slice(), output.slice_mut()).expect("queued");
                });
                let rate = self.rate(2 * weights.len(), time);
                println!("| {name} | {outputs} x {inputs} | {rows} | {rate} |");
            }
        }
    }

    /// Requests after `prefix` tokens, all of one text.
    fn speculator<D: Device>(
        &self,
        device: &D,
        head: &Eagle3Checkpoint,
        (batch, prefix): (usize, usize),
        (width, depth): (usize, usize),
    ) -> Speculator<D> {
        const CHUNK: usize = 256;
        let TargetShape { hidden, vocab, .. } = self.sizes.head.target;
        let few = Numbers::new(5).floats(1_000_003);
        let table: Vec<f32> = few.iter().copied().cycle().take(vocab * hidden).collect();
        let table = device.embedding(&table, hidden);
        let config = SpeculatorConfig { max_requests: batch, max_len: prefix + 400 };
        let mut speculator =
            Speculator::new(device.clone(), head, Some(table), config).expect("a speculator");
        let features = device.floats(&Numbers::new(3).floats(CHUNK * 3 * hidden));
        let rest = device.floats(&Numbers::new(3).floats(prefix % CHUNK * 3 * hidden));
        let logits = device.floats(&Numbers::new(4).floats(vocab));
        let budget = DraftBudget::new(width, depth, 256).expect("a budget");
        for id in (0..batch as u64).map(RequestId) {
            let options = RequestOptions { max_new_tokens: 100, budget, ..RequestOptions::default() };
            speculator.admit(id, options).expect("room");
            for start in (0..prefix).step_by(CHUNK) {
                let end = prefix.min(start + CHUNK);
                let tokens: Vec<TokenId> = (start..end).map(|i| TokenId((i * 31 % vocab) as u32)).collect();
                let features = if end - start == CHUNK { &features } else { &rest };
                speculator.prefill(id, &tokens, D::view(features)).expect("a prompt");
            }
            speculator.begin(id, D::view(&logits)).expect("a first token");
        }
        speculator
    }

    /// Whole draft steps of a head: copies, extension, the graph of all levels, and candidates.
    fn drafts(&self) {
        let cuda = self.cuda();
        let Sizes { head: shape, prefix, tree, .. } = &self.sizes;
        let files = toy::random_head(shape, 7);
        let (config, tensors) = (files.config_bytes(), files.tensor_bytes());
        drop(files);
        let head = Eagle3Checkpoint::from_bytes(&config, &tensors, shape.target).expect("a head");
        drop(tensors);

        // A chain after few tokens is the CPU's.
        let (ids, mut batch) = ([RequestId(0)], VerifyBatch::new());
        let cpu = Cpu::new().expect("threads");
        self.speculator(&cpu, &head, (1, 20), (1, 3)).propose(&ids, &mut batch).expect("drafts");
        let mut on_device = VerifyBatch::new();
        self.speculator(&cuda, &head, (1, 20), (1, 3)).propose(&ids, &mut on_device).expect("drafts");
        assert_eq!(batch.entries()[0].tree(), on_device.entries()[0].tree());

        println!(
            "\n| draft step, after {prefix} tokens | batch | us | GB/s of what must be moved | % |\n|---|---|---|---|---|"
        );
        for (name, (width, depth)) in [("a chain of 3", (1, 3)), ("a tree", *tree)] {
            let mut alone = None;
            for requests in [1, 8] {
                let mut speculator = self.speculator(&cuda, &head, (requests, *prefix), (width, depth));
                let ids: Vec<RequestId> = (0..requests as u64).map(RequestId).collect();
                speculator.propose(&ids, &mut batch).expect("drafts");
                // Alike, whatever is drafted beside them.
                let tree = alone.get_or_insert_with(|| batch.entries()[0].tree().clone());
                assert!(
                    batch.entries().iter().all(|entry| entry.tree() == tree && tree.num_drafts() >= depth)
                );
                let time = self.micros(&cuda, |_| {
                    speculator.propose(&ids, &mut batch).expect("drafts");
                });
                let step = DraftStep {
                    requests,
                    max_requests: requests,
                    width,
                    depth,
                    prefix_len: *prefix,
                    pairs: 1,
                    new_pages: 0,
                    noise: false,
                    embedding_bytes: 4,
                };
                let cost = draft_cost(head.config(), &step);
                println!("| {name} | {requests} | {} |", self.rate(cost.minimum_bytes as usize, time));
            }
        }
    }

    /// The fused all-reduce, with all ranks on one device: what the protocol takes, not what PCIe does.
    fn reductions(&self) {
        let hidden = self.sizes.hidden;
        println!("\n| reduce_add_norm, {hidden} columns | virtual ranks | rows | us |\n|---|---|---|---|");
        for world in [WorldSize::Two, WorldSize::Four, WorldSize::Eight] {
            for &rows in &self.sizes.reduced_rows {
                println!("| bf16 | {} | {rows} | {:.1} |", world.get(), self.reduction(world, rows));
            }
        }
    }

    /// The slowest rank's time of a call.
    fn reduction(&self, world: WorldSize, rows: usize) -> f64 {
        let (hidden, len) = (self.sizes.hidden, rows * self.sizes.hidden);
        let numbers = |len: usize, seed: u64| -> Vec<bf16> {
            Numbers::new(seed).floats(len).into_iter().map(bf16::from_f32).collect()
        };
        let norm = RmsNorm::new(hidden, 1e-5).expect("a multiple of 64");
        let (mut residual, weight) = (numbers(len, 8), numbers(hidden, 9));
        let partials: Vec<Vec<bf16>> = world.ranks().map(|rank| numbers(len, rank.index() as u64)).collect();
        let mut wanted = vec![bf16::ZERO; len];
        let slices: Vec<&[bf16]> = partials.iter().map(Vec::as_slice).collect();
        let start_residual = residual.clone();
        norm.reduce_add_norm(&slices, &mut residual, &weight, &mut wanted).expect("lengths fit");

        let rendezvous = Rendezvous::new(world, Duration::from_secs(30));
        let barrier = Barrier::new(world.get());
        let times: Vec<f64> = std::thread::scope(|scope| {
            let threads: Vec<_> = world
                .ranks()
                .map(|rank| {
                    let (rendezvous, barrier, partial) = (&rendezvous, &barrier, &partials[rank.index()]);
                    let (norm, weight, residual, wanted) = (&norm, &weight, &start_residual, &wanted);
                    scope.spawn(move || {
                        let cuda = self.cuda();
                        // All ranks' blocks are resident on the one device.
                        let config = GroupConfig { max_blocks: 8, ..GroupConfig::new(hidden, 64) };
                        let mut group = Group::join(&cuda, rendezvous, rank, config).expect("a group");
                        let upload = |values: &[bf16]| cuda.upload(values).expect("memory");
                        let (partial, weight) = (upload(partial), upload(weight));
                        let (mut residual, mut output) = (upload(residual), upload(wanted));
                        cuda.write(&mut output, &vec![bf16::ZERO; len]).expect("a copy");
                        barrier.wait();
                        let mut call = |output: &mut Buffer<bf16>| {
                            let outputs = NormOutputs { output: Some(output.slice_mut()), quantized: None };
                            let (partial, weight) = (partial.slice(), weight.slice());
                            let queued =
                                group.reduce_add_norm(norm, partial, residual.slice_mut(), weight, outputs);
                            queued.expect("queued");
                        };
                        call(&mut output);
                        assert!(
                            cuda.download(&output).expect("all ranks call") == *wanted,
                            "{world:?}, {rows} rows"
                        );
                        barrier.wait();
                        let started = Instant::now();
                        let calls = 4 * self.sizes.calls;
                        (0..calls).for_each(|_| call(&mut output));
                        cuda.synchronize().expect("all ranks call");
                        let time = started.elapsed().as_secs_f64() * 1e6 / calls as f64;
                        group.check().expect("no fault");
                        time
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        times.into_iter().fold(0.0, f64::max)
    }
}
