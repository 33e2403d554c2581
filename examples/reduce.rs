//! A group of four ranks, each a thread, on the backend of your choice: all-reduce + residual + RMSNorm in one
//! call, compared bit for bit with its specification.
//!
//! `cargo run --release --example reduce` runs on the CPU; `-- --backend cuda` on the CUDA devices of this
//! machine, with all ranks on device 0 if there are fewer than four.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use eagle_verify::RmsNorm;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Rank, Rendezvous, WorldSize};
use half::bf16;

const ROWS: [usize; 6] = [1, 4, 8, 16, 32, 64];
const HIDDEN: usize = 7168;
const CALLS: u32 = 50;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    Cpu,
    Cuda,
}

#[derive(Parser)]
#[command(about = "All-reduce + residual + RMSNorm in a group of four ranks")]
struct Options {
    /// Where the ranks run.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
}

fn values(count: usize, seed: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0)).collect()
}

/// The residual and the output of one call, as they must be.
fn specified(norm: &RmsNorm, rows: usize) -> Result<(Vec<bf16>, Vec<bf16>)> {
    let partials: Vec<_> = (0..4).map(|rank| values(rows * HIDDEN, rank)).collect();
    let partials: Vec<&[bf16]> = partials.iter().map(Vec::as_slice).collect();
    let (mut residual, mut output) = (values(rows * HIDDEN, 8), vec![bf16::ZERO; rows * HIDDEN]);
    norm.reduce_add_norm(&partials, &mut residual, &values(HIDDEN, 9), &mut output)?;
    Ok((residual, output))
}

/// What a rank measures for one number of rows: the algorithm's name and seconds per call.
type Measured = Vec<(String, f64)>;

fn cpu_rank(meeting: &Rendezvous, rank: Rank, norm: &RmsNorm) -> Result<Measured> {
    let cpu = Cpu::with_threads(1)?;
    let mut group = Group::join(&cpu, meeting, rank, GroupConfig::new(HIDDEN, 64))?;
    let (mut measured, weight) = (Vec::new(), values(HIDDEN, 9));
    for rows in ROWS {
        let (partial, mut residual) = (values(rows * HIDDEN, rank.index()), values(rows * HIDDEN, 8));
        let mut output = vec![bf16::ZERO; rows * HIDDEN];
        let mut started = Instant::now();
        for call in 0..=CALLS {
            let outputs = NormOutputs { output: Some(&mut output[..]), quantized: None };
            group.reduce_add_norm(norm, &partial[..], &mut residual[..], &weight[..], outputs)?;
            if call == 0 {
                ensure!((residual.clone(), output.clone()) == specified(norm, rows)?, "wrong bits");
                started = Instant::now();
            }
        }
        measured.push(("shared memory".into(), started.elapsed().as_secs_f64() / f64::from(CALLS)));
    }
    Ok(measured)
}

fn cuda_rank(meeting: &Rendezvous, rank: Rank, norm: &RmsNorm) -> Result<Measured> {
    let cuda = Cuda::new(if Cuda::num_devices()? < 4 { 0 } else { rank.index() })?;
    let mut group = Group::join(&cuda, meeting, rank, GroupConfig::new(HIDDEN, 64))?;
    let (mut measured, weight) = (Vec::new(), cuda.upload(&values(HIDDEN, 9))?);
    // All memory before the first call: an allocation may wait for a peer's kernel that waits for us.
    let put = |rows: usize, seed| cuda.upload(&values(rows * HIDDEN, seed));
    let buffers = |rows| Ok((put(rows, rank.index())?, put(rows, 8)?, put(rows, 0)?));
    let mut memory = ROWS.into_iter().map(buffers).collect::<Result<Vec<_>>>()?;
    for (rows, (partial, residual, output)) in ROWS.into_iter().zip(&mut memory) {
        let mut started = Instant::now();
        for call in 0..=CALLS {
            let outputs = NormOutputs { output: Some(output.slice_mut()), quantized: None };
            group.reduce_add_norm(norm, partial.slice(), residual.slice_mut(), weight.slice(), outputs)?;
            if call == 0 {
                let seen = (cuda.download(residual)?, cuda.download(output)?);
                ensure!(seen == specified(norm, rows)?, "wrong bits");
                started = Instant::now();
            }
        }
        cuda.synchronize()?;
        group.check()?;
        let seconds = started.elapsed().as_secs_f64() / f64::from(CALLS);
        measured.push((format!("{:?}", group.algorithm(rows).expect("as many as agreed")), seconds));
    }
    Ok(measured)
}

fn main() -> Result<()> {
    let Options { backend } = Options::parse();
    let (norm, meeting) =
        (RmsNorm::new(HIDDEN, 1e-5)?, Rendezvous::new(WorldSize::Four, Duration::from_secs(30)));
    let life = match backend {
        Backend::Cpu => cpu_rank,
        Backend::Cuda => cuda_rank,
    };
    let ranks: Vec<Measured> = std::thread::scope(|scope| {
        let (norm, meeting) = (&norm, &meeting);
        let ranks: Vec<_> =
            WorldSize::Four.ranks().map(|r| scope.spawn(move || life(meeting, r, norm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect::<Result<_>>()
    })?;
    println!("4 ranks on {backend:?}, hidden {HIDDEN}, bf16; on every rank the bits of the specification\n");
    println!("| rows | by | slowest rank, us per call |\n|---|---|---|");
    for (i, rows) in ROWS.iter().enumerate() {
        let slowest = ranks.iter().map(|rank| rank[i].1).fold(0.0, f64::max);
        println!("| {rows} | {} | {:.1} |", ranks[0][i].0, slowest * 1e6);
    }
    Ok(())
}
