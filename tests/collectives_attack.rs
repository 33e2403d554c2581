//! The push protocol under attack: seeded schedules with late, torn and stale memory, chains of calls, graph
//! replay, stalled ranks; and the deliberately broken twins that the same harness must catch.
//!
//! `EMU_SEEDS=n` runs n seeds of every scenario, `EMU_SECONDS=s` stops each after s seconds, `EMU_SEED=k`
//! replays one.
#![cfg(feature = "cuda")]

#[path = "common/collective.rs"]
mod collective;
#[path = "common/emulated.rs"]
mod emulated;

use std::time::Duration;

use collective::*;
use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{Cuda, Graph};
use eagle_verify::comm::{Algorithm, Crossovers, Group, GroupConfig, WorldSize};
use emulated::OnEmulator;
use half::bf16;

/// What a seed runs.
#[derive(Clone)]
struct Scenario {
    name: &'static str,
    world: WorldSize,
    hidden: usize,
    crossovers: Crossovers,
    /// Rows of each call of the chain. Empty: five calls with 1, 3, 8 or 2 (or 64) rows, as the seed says.
    rows: &'static [usize],
    epilogue: Epilogue,
    max_rows: usize,
    /// Captured in a graph and launched so many times; 0 for no graph.
    replays: usize,
    /// All ranks on one device.
    together: bool,
    max_blocks: usize,
    first_epoch: u32,
    /// Payload words with the bits that the protocol reserves, or with -0.0.
    patterns: &'static [u32],
    /// A device that launches another number of blocks than planned.
    odd_grid: Option<u32>,
}

const SMALL: Scenario = Scenario {
    name: "",
    world: WorldSize::Two,
    hidden: 64,
    crossovers: Crossovers::always(Algorithm::OneShot),
    rows: &[1, 1, 1, 1, 1],
    epilogue: NORM,
    max_rows: 8,
    replays: 0,
    together: false,
    max_blocks: 2,
    first_epoch: 0,
    patterns: &[],
    odd_grid: None,
};

/// One row is one-shot, three are two-shot, eight hierarchical.
const ALTERNATING: Crossovers = Crossovers { one_shot_max_bytes: 128, hierarchical_min_bytes: 1024 };
const TWO_KINDS: Crossovers = Crossovers { one_shot_max_bytes: 128, hierarchical_min_bytes: usize::MAX };
const RESERVED: &[u32] = &[0xFFFF_FFFF, 0xFFFF_FFFE, 0x8000_8000, 0x0001_8001];

/// A handful of threads each: run by the hundred.
fn small() -> Vec<Scenario> {
    let two_shot = Crossovers::always(Algorithm::TwoShot);
    vec![
        Scenario { name: "one-shot chain", ..SMALL },
        Scenario {
            name: "one-shot chain, wrap, reserved",
            first_epoch: u32::MAX - 2,
            patterns: RESERVED,
            ..SMALL
        },
        Scenario { name: "two-shot chain", crossovers: two_shot, ..SMALL },
        Scenario {
            name: "two-shot, sum, reserved, one device",
            crossovers: two_shot,
            epilogue: Epilogue::Sum,
            patterns: RESERVED,
            together: true,
            ..SMALL
        },
        Scenario { name: "odd graph, replayed", rows: &[1, 1, 1], replays: 2, ..SMALL },
        Scenario { name: "random sizes, both kinds", crossovers: TWO_KINDS, rows: &[], ..SMALL },
    ]
}

/// Many rows in a block, so that fast warps are a row ahead; and FP8's second barrier.
fn tall() -> Vec<Scenario> {
    let per_row = Epilogue::Norm { output: true, fp8: Fp8::PerRow, plus_one: true };
    vec![Scenario {
        name: "1, 8, 3 or 64 rows",
        crossovers: TWO_KINDS,
        rows: &[],
        max_rows: 64,
        max_blocks: 5,
        epilogue: per_row,
        ..SMALL
    }]
}

/// Four and eight ranks: run by the hundred.
fn large() -> Vec<Scenario> {
    let four = Scenario { world: WorldSize::Four, crossovers: TWO_KINDS, rows: &[], ..SMALL };
    let eight = Scenario { world: WorldSize::Eight, crossovers: ALTERNATING, rows: &[], ..SMALL };
    vec![
        Scenario { name: "4 ranks, random sizes", ..four.clone() },
        Scenario {
            name: "4 ranks, graph, wrap",
            rows: &[3, 1, 3],
            replays: 2,
            first_epoch: u32::MAX - 1,
            patterns: RESERVED,
            ..four
        },
        Scenario { name: "8 ranks, all kinds", rows: &[1, 3, 8], patterns: RESERVED, ..eight.clone() },
        Scenario { name: "8 ranks, random sizes", ..eight.clone() },
        Scenario { name: "8 ranks, hierarchical graph", rows: &[8], replays: 3, max_blocks: 1, ..eight },
    ]
}

fn payloads(scenario: &Scenario, seed: u64) -> Vec<Payload<bf16>> {
    let mut random = Lcg(seed ^ 0xC0FFEE);
    let rows: Vec<usize> = match scenario.rows {
        [] => {
            (0..5).map(|_| [1, 8, 3, if scenario.max_rows < 64 { 2 } else { 64 }][random.below(4)]).collect()
        }
        rows => rows.to_vec(),
    };
    rows.iter()
        .enumerate()
        .map(|(i, &rows)| {
            let seed = seed * 31 + i as u64;
            let mut payload = Payload::random(scenario.world.get(), rows, scenario.hidden, seed);
            for partial in payload.partials.iter_mut().filter(|_| !scenario.patterns.is_empty()) {
                let words: &mut [u32] = bytemuck::cast_slice_mut(partial);
                for word in words.iter_mut() {
                    if random.below(3) == 0 {
                        *word = scenario.patterns[random.below(scenario.patterns.len())];
                    }
                }
            }
            payload
        })
        .collect()
}

/// Runs one seed. The error says what was seen: a complaint of the emulator, a fault, or other bits.
fn run(scenario: &Scenario, seed: u64, mutant: Option<&'static str>, torn: bool) -> Result<(), String> {
    emulator::configure(&emulator::Config { mutant, torn, ..emulator::Config::checked(seed) });
    if let Some(blocks) = scenario.odd_grid {
        emulator::override_grid(Some(1), blocks);
    }
    let machine = if scenario.together { OnEmulator::together } else { OnEmulator::spread }(scenario.world);
    let config = GroupConfig {
        time_limit: Duration::from_secs(2),
        crossovers: Some(scenario.crossovers),
        max_blocks: scenario.max_blocks,
        max_warps_per_group: 1,
        first_epoch: scenario.first_epoch,
        ..GroupConfig::new(scenario.hidden, scenario.max_rows)
    };
    let payloads = payloads(scenario, seed);
    let mut ranks = machine.form::<bf16>(scenario.world, config);
    let result = calls(scenario, seed, &payloads, &mut ranks);
    if let Some(complaint) = emulator::report().complaint() {
        return Err(complaint.to_owned());
    }
    result
}

type Rank = (Cuda, Group<Cuda, bf16>);

fn calls(
    scenario: &Scenario,
    seed: u64,
    payloads: &[Payload<bf16>],
    ranks: &mut [Rank],
) -> Result<(), String> {
    let mut buffers: Vec<Vec<Buffers<OnEmulator, bf16>>> = ranks
        .iter()
        .enumerate()
        .map(|(rank, (cuda, _))| {
            payloads.iter().map(|p| Buffers::new(cuda, p, rank, scenario.epilogue)).collect()
        })
        .collect();
    let text = |error: eagle_verify::Error| error.to_string();
    let mut graphs: Vec<Graph> = Vec::new();
    for ((cuda, group), buffers) in ranks.iter_mut().zip(&mut buffers) {
        let mut queue = || buffers.iter_mut().try_for_each(|buffers| buffers.call(group));
        if scenario.replays > 0 {
            graphs.push(cuda.capture(queue).map_err(text)?);
        } else {
            queue().map_err(text)?;
        }
    }
    for _ in 0..scenario.replays {
        for graph in &mut graphs {
            // SAFETY: buffers and groups live to the end of this function's caller.
            unsafe { graph.launch() }.map_err(text)?;
        }
    }
    // Any rank may be asked first.
    let first = seed as usize % ranks.len();
    for i in 0..ranks.len() {
        let (cuda, group) = &ranks[(first + i) % ranks.len()];
        cuda.synchronize().map_err(text)?;
        group.check().map_err(text)?;
    }
    for (call, payload) in payloads.iter().enumerate() {
        let mut payload = payload.clone();
        let mut want = specified(&payload, scenario.epilogue);
        for _ in 1..scenario.replays {
            if !want.residual.is_empty() {
                payload.residual = bytemuck::cast_slice(&want.residual).to_vec();
            }
            want = specified(&payload, scenario.epilogue);
        }
        for (rank, ((cuda, _), buffers)) in ranks.iter().zip(&buffers).enumerate() {
            if let Some(difference) = buffers[call].outcome(cuda).difference(&want, scenario.hidden) {
                return Err(format!("call {call}, rank {rank}: {difference}"));
            }
        }
    }
    Ok(())
}

fn attack(scenarios: Vec<Scenario>, num_seeds: u64) {
    let _machine = emulator::exclusive();
    for scenario in scenarios {
        let started = std::time::Instant::now();
        let mut num_runs = 0;
        for seed in emulator::seeds(num_seeds) {
            // Half of the seeds with 16-byte accesses in one piece, as the hardware mostly has them.
            if let Err(seen) = run(&scenario, seed, None, seed % 2 == 0) {
                panic!("{}: EMU_SEED={seed}: {seen}", scenario.name);
            }
            num_runs += 1;
        }
        eprintln!("{}: {num_runs} seeds in {:.1?}", scenario.name, started.elapsed());
    }
}

#[test]
fn small_groups_by_the_hundred() {
    attack(small(), 500);
}

#[test]
fn large_groups_by_the_dozen() {
    attack(large(), 50);
    attack(tall(), 50);
}

/// The first seed that catches a mutant, and how.
fn caught(scenario: &Scenario, mutant: &'static str, torn: bool, most: u64) -> Option<(u64, String)> {
    (0..most).find_map(|seed| run(scenario, seed, Some(mutant), torn).err().map(|seen| (seed, seen)))
}

/// Every broken twin is caught within so many seeds.
#[test]
fn every_mutant_is_caught() {
    let _machine = emulator::exclusive();
    let two_shot = Crossovers::always(Algorithm::TwoShot);
    let chain = SMALL;
    let wide = Scenario { hidden: 128, ..SMALL };
    let four = Scenario { world: WorldSize::Four, ..SMALL };
    let reserved = Scenario { patterns: RESERVED, ..SMALL };
    // Block 0 makes a call alone: from then on it is in the other slot than its neighbours.
    let mixed = Scenario { rows: &[8, 1, 3, 8, 1, 3, 8], max_blocks: 4, ..SMALL };
    let mixed_sizes = Scenario { rows: &[2, 2, 1, 1], ..SMALL };
    let graph = Scenario { rows: &[1], replays: 3, ..SMALL };
    let eight = Scenario { world: WorldSize::Eight, ..SMALL };
    let cases: &[(&'static str, Scenario, bool)] = &[
        ("skipped clear", chain.clone(), false),
        ("one slot too few", chain.clone(), false),
        ("places shared by blocks", mixed, false),
        ("reserved words not escaped", reserved.clone(), false),
        ("-0.0 is the sentinel", reserved.clone(), false),
        ("escape word not waited for", reserved, false),
        ("first word only", chain.clone(), true),
        ("no barrier in the reduction", chain.clone(), false),
        ("no barrier before the count", Scenario { crossovers: two_shot, ..wide.clone() }, false),
        ("count kept by the host", graph, false),
        ("sum rotated by rank", four, false),
        ("eight ranks in one chain", eight, false),
        ("sum rounded twice", wide.clone(), false),
        ("mean square of the unrounded residual", wide, false),
        ("tag not emptied", mixed_sizes, false),
    ];
    // These change bits and nothing else: no race and no fault may be what catches them.
    let bits_only = ["eight ranks in one chain", "sum rounded twice", "sum rotated by rank"];
    let mut escaped = Vec::new();
    for (mutant, scenario, torn) in cases {
        assert!(run(scenario, 0, None, *torn).is_ok(), "{mutant}: the right one passes");
        match caught(scenario, mutant, *torn, 400) {
            Some((seed, seen)) => {
                let seen: String = seen.lines().next().unwrap_or("").chars().take(120).collect();
                eprintln!("{mutant}: seed {seed}: {seen}");
                assert!(!bits_only.contains(mutant) || seen.contains("wanted"), "{mutant}: {seen}");
                assert!(!bits_only.contains(mutant) || seen.starts_with("call"), "{mutant}: {seen}");
            }
            None => escaped.push(*mutant),
        }
    }
    // The rest have tests of their own.
    let elsewhere = ["escapes not undone", "abort ignored on entry"];
    let is_here = |m: &&emulator::Mutant| {
        // Mutants of other kernels are named `kernel: fault`.
        let is_of_others = m.name.starts_with("rank 1 stops") || m.name.contains(": ");
        !is_of_others && !elsewhere.contains(&m.name)
    };
    let num_here = emulator::MUTANTS.iter().filter(is_here).count();
    assert_eq!(cases.len(), num_here, "every mutant of the collectives has a case");
    assert!(escaped.is_empty(), "not caught: {escaped:?}");
}

/// A rank with another grid is an error that names it, not a hang.
#[test]
fn another_grid_is_named() {
    let _machine = emulator::exclusive();
    for blocks in [1, 3] {
        let world = WorldSize::Four;
        let scenario = Scenario { world, rows: &[2], odd_grid: Some(blocks), max_blocks: 4, ..SMALL };
        for seed in 0..50 {
            let seen = run(&scenario, seed, None, true).unwrap_err();
            let is_rank_1 = seen.contains("of rank 1:");
            assert!(seen.contains("blocks)") && (is_rank_1 || seen.contains("by rank 1;")), "{seen}");
        }
    }
}

/// The same seed is the same run.
#[test]
fn a_seed_replays() {
    let _machine = emulator::exclusive();
    let scenario = &large()[0];
    for seed in 0..3 {
        let stats = [(); 2].map(|()| {
            run(scenario, seed, None, true).unwrap();
            emulator::report().stats
        });
        assert_eq!(stats[0], stats[1]);
    }
}
