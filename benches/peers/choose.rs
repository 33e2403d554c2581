//! From logits to a token on the CPU: the backend's `choose`, checked against its specification first, against a
//! plain argmax (temperature 0), a sampler that sorts, and candle's `LogitsProcessor`.

use std::hint::black_box;
use std::time::Instant;

use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::sampling::{Sampler, SamplingContext, SamplingParams};
use multiversion::multiversion;

fn logits(vocab: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    (0..vocab).map(|_| 8.0 * (next() + next() + next() - 1.5)).collect()
}

fn context(position: u32) -> SamplingContext<'static> {
    SamplingContext { position, prompt: &[], output: &[], path: &[], allowed: None }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn argmax(row: &[f32]) -> usize {
    let mut largest = [f32::NEG_INFINITY; 32];
    for chunk in row.chunks(32) {
        for (largest, value) in largest.iter_mut().zip(chunk) {
            *largest = if *value > *largest { *value } else { *largest };
        }
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    row.iter().position(|value| *value == largest).unwrap_or(0)
}

/// Softmax in f32, sorted; tokens up to `top_p`; one of them by a uniform number.
fn by_sorting(row: &[f32], temperature: f32, top_p: f32, uniform: f32) -> u32 {
    let mut sorted: Vec<(f32, u32)> = row.iter().copied().zip(0..).collect();
    sorted.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    let largest = sorted[0].0;
    let weights: Vec<f32> = sorted.iter().map(|(z, _)| ((z - largest) / temperature).exp()).collect();
    let total: f32 = weights.iter().sum();
    let (mut kept, mut end) = (0.0, 0);
    while end < weights.len() && kept < top_p * total {
        kept += weights[end];
        end += 1;
    }
    let mut left = uniform * kept;
    let place = weights[..end].iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    sorted[place.unwrap_or(end - 1)].1
}

/// Medians of actions that take turns, so that a busy machine slows them alike; microseconds.
fn medians<const N: usize>(mut actions: [&mut dyn FnMut(u32); N]) -> [f64; N] {
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for i in 0..101 {
        for (action, times) in actions.iter_mut().zip(&mut times) {
            let started = Instant::now();
            action(i);
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

fn choose(criterion: &mut Criterion) {
    let cpu = Cpu::with_threads(1).expect("the caller's thread");
    let mut table = Vec::new();
    let mut group = criterion.benchmark_group("choose");
    for vocab in [49_152, 128_256, 163_840] {
        let row = logits(vocab);
        let tensor = Tensor::from_slice(&row, vocab, &Device::Cpu).expect("a tensor");
        let run = |sampler: &Sampler, position| {
            cpu.sample(sampler, &row, context(position)).expect("a token").token().0
        };
        for (temperature, top_p) in [(0.0, 1.0), (0.8, 1.0), (0.8, 0.95)] {
            let name = match (temperature, top_p) {
                (0.0, _) => "T 0",
                (_, 1.0) => "T 0.8",
                _ => "T 0.8, top-p 0.95",
            };
            let params = SamplingParams { temperature, top_p, seed: 5, ..SamplingParams::default() };
            let sampler = Sampler::new(params).expect("in range");
            for position in 0..5 {
                let want = sampler.choose(&row, context(position)).expect("a token").token().0;
                assert_eq!(run(&sampler, position), want, "{vocab} {name}");
            }
            group.bench_function(BenchmarkId::new(name, vocab), |bencher| bencher.iter(|| run(&sampler, 1)));
            let sampling = match (f64::from(temperature), f64::from(top_p)) {
                (0.0, _) => Sampling::ArgMax,
                (temperature, 1.0) => Sampling::All { temperature },
                (temperature, p) => Sampling::TopP { p, temperature },
            };
            let mut candle = LogitsProcessor::from_sampling(5, sampling);
            if temperature == 0.0 {
                assert_eq!(candle.sample(&tensor).expect("a token"), run(&sampler, 0));
                assert_eq!(argmax(&row) as u32, run(&sampler, 0));
            }
            let [ours, plain, candle] = medians([
                &mut |i| {
                    black_box(run(&sampler, i));
                },
                &mut |i| {
                    black_box(match temperature {
                        0.0 => argmax(black_box(&row)) as u32,
                        _ => by_sorting(&row, temperature, top_p, i as f32 / 101.0),
                    });
                },
                &mut |_| {
                    black_box(candle.sample(&tensor).expect("a token"));
                },
            ]);
            let what = if temperature == 0.0 { "argmax" } else { "sorting" };
            let ratio = plain.min(candle) / ours;
            table.push(format!(
                "| {vocab} | {name} | {ours:.0} | {what} {plain:.0} | {candle:.0} | {ratio:.2}x |"
            ));
        }
    }
    println!(
        "| vocabulary | sampling | us | baseline, us | candle, us | ratio to the better |\n|---|---|---|---|---|---|\n{}",
        table.join("\n")
    );
}

criterion_group!(benches, choose);
criterion_main!(benches);
