//! The CPU group: all-reduce + residual + RMSNorm in one call, against three: all-reduce, addition, norm.
//!
//! Both are checked bit for bit before they are timed: against the specification, and, with payloads whose sums
//! are exact in bf16 so that the extra rounding of the three steps shows nowhere, against each other.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Rendezvous, WorldSize};
use eagle_verify::{Element, RmsNorm};
use half::bf16;
use multiversion::multiversion;

const HIDDEN: usize = 7168;
const ROWS: [usize; 6] = [1, 4, 8, 16, 32, 64];

/// Sixteenths, and few of them: every sum of four and a residual is exact.
fn exact(count: usize, seed: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(((i * 37 + seed * 11) % 17) as f32 / 16.0 - 0.5)).collect()
}

fn norm() -> RmsNorm {
    RmsNorm::new(HIDDEN, 1e-5).expect("7168 is a multiple of 64")
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn add(residual: &mut [bf16], sum: &[bf16]) {
    for (residual, sum) in residual.iter_mut().zip(sum) {
        *residual = <bf16 as Element>::from_f32(Element::to_f32(*residual) + Element::to_f32(*sum));
    }
}

/// This crate's own norm, on rows in f32 and rounded afterwards. `row` is scratch, two rows.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn normalise(norm: &RmsNorm, residual: &[bf16], weight: &[f32], row: &mut [f32], output: &mut [bf16]) {
    let (row, normalised) = row.split_at_mut(HIDDEN);
    for (residual, output) in residual.chunks_exact(HIDDEN).zip(output.chunks_exact_mut(HIDDEN)) {
        for (row, residual) in row.iter_mut().zip(residual) {
            *row = Element::to_f32(*residual);
        }
        norm.apply(row, weight, normalised).expect("lengths fit");
        for (output, normalised) in output.iter_mut().zip(normalised.iter()) {
            *output = <bf16 as Element>::from_f32(*normalised);
        }
    }
}

/// Runs the calls on every rank and returns the slowest rank's time and one rank's residual and output.
fn run(world: WorldSize, rows: usize, calls: u64, fused: bool) -> (Duration, Vec<bf16>, Vec<bf16>) {
    let cpu = Cpu::with_threads(1).expect("the caller's thread");
    let rendezvous = Rendezvous::new(world, Duration::from_secs(30));
    let start = Barrier::new(world.get());
    let len = rows * HIDDEN;
    let mut ranks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (cpu, rendezvous, start) = (&cpu, &rendezvous, &start);
                scope.spawn(move || {
                    let config = GroupConfig::new(HIDDEN, 64);
                    let mut group = Group::join(cpu, rendezvous, rank, config).expect("a group");
                    let partial = exact(len, rank.index());
                    let weight = exact(HIDDEN, 9);
                    let weight_f32: Vec<f32> = weight.iter().map(|w| w.to_f32()).collect();
                    let (norm, mut row) = (norm(), vec![0.0; 2 * HIDDEN]);
                    let (mut residual, mut output) = (exact(len, 8), vec![bf16::ZERO; len]);
                    let mut sum = output.clone();
                    start.wait();
                    let started = Instant::now();
                    for _ in 0..calls {
                        if fused {
                            let outputs = NormOutputs { output: Some(&mut output[..]), quantized: None };
                            group
                                .reduce_add_norm(&norm, &partial[..], &mut residual[..], &weight[..], outputs)
                                .expect("all ranks call");
                        } else {
                            group.all_reduce(&partial[..], &mut sum[..]).expect("all ranks call");
                            add(&mut residual, &sum);
                            normalise(&norm, &residual, &weight_f32, &mut row, &mut output);
                        }
                    }
                    (started.elapsed(), residual, output)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let slowest = ranks.iter().map(|(time, ..)| *time).max().unwrap_or_default();
    let (_, residual, output) = ranks.swap_remove(0);
    assert!(ranks.iter().all(|(_, r, o)| *r == residual && *o == output), "ranks differ");
    (slowest, residual, output)
}

fn check(world: WorldSize, rows: usize) {
    let len = rows * HIDDEN;
    let partials: Vec<Vec<bf16>> = (0..world.get()).map(|rank| exact(len, rank)).collect();
    let partials: Vec<&[bf16]> = partials.iter().map(Vec::as_slice).collect();
    let (mut residual, mut output) = (exact(len, 8), vec![bf16::ZERO; len]);
    norm().reduce_add_norm(&partials, &mut residual, &exact(HIDDEN, 9), &mut output).expect("lengths fit");
    for fused in [true, false] {
        let (_, r, o) = run(world, rows, 1, fused);
        assert!(r == residual && o == output, "{world:?} {rows} rows, fused {fused}");
    }
}

fn reduce(criterion: &mut Criterion) {
    let mut table = Vec::new();
    for world in [WorldSize::Two, WorldSize::Four] {
        let mut group = criterion.benchmark_group(format!("reduce_add_norm/{}", world.get()));
        group.sample_size(20).measurement_time(Duration::from_secs(2));
        for rows in ROWS {
            check(world, rows);
            for (name, fused) in [("fused", true), ("three_steps", false)] {
                group.bench_function(BenchmarkId::new(name, rows), |bencher| {
                    bencher.iter_custom(|calls| run(world, rows, calls, fused).0);
                });
            }
            // In turn, so that both see the same machine; medians.
            let calls = (2000 / rows) as u64;
            let mut times: [Vec<f64>; 2] = Default::default();
            for round in 0..22 {
                times[round % 2]
                    .push(run(world, rows, calls, round % 2 == 0).0.as_secs_f64() * 1e6 / calls as f64);
            }
            let [fused, steps] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
            table.push(format!(
                "| {} | {rows} | {fused:.1} | {steps:.1} | {:.2}x |",
                world.get(),
                steps / fused
            ));
        }
    }
    println!(
        "| ranks | rows | fused, us | three steps, us | ratio |\n|---|---|---|---|---|\n{}",
        table.join("\n")
    );
}

criterion_group!(benches, reduce);
criterion_main!(benches);
