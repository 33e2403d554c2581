//! The collectives against their specification, on every backend: the CPU's, and the CUDA backend over the
//! emulated driver.

#[path = "common/collective.rs"]
mod collective;

use std::time::{Duration, Instant};

use collective::*;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Quantized, Rank, Rendezvous, WorldSize};
use eagle_verify::{ErrorKind, RmsNorm};
use half::{bf16, f16};

struct OnCpu(Cpu);

impl Machine for OnCpu {
    type Backend = Cpu;
    type Buffer<T: bytemuck::Pod> = Vec<T>;

    fn backend(&self, _rank: usize) -> Cpu {
        self.0.clone()
    }
    fn upload<T: bytemuck::Pod>(_: &Cpu, data: &[T]) -> Vec<T> {
        data.to_vec()
    }
    fn slice<T: bytemuck::Pod>(buffer: &Vec<T>) -> &[T] {
        buffer
    }
    fn slice_mut<T: bytemuck::Pod>(buffer: &mut Vec<T>) -> &mut [T] {
        buffer
    }
    fn download<T: bytemuck::Pod>(_: &Cpu, buffer: &Vec<T>) -> Vec<T> {
        buffer.clone()
    }
}

fn cpu() -> OnCpu {
    OnCpu(Cpu::with_threads(1).unwrap())
}

/// Rows and hidden sizes of the acceptance list.
const ROWS: [usize; 8] = [1, 2, 3, 7, 8, 33, 64, 257];
const HIDDEN: [usize; 6] = [64, 576, 1024, 2880, 4096, 7168];

#[test]
fn cpu_equals_the_specification() {
    let cpu = cpu();
    let mut compared = 0;
    for world in WORLDS {
        for hidden in HIDDEN {
            let rows = ROWS.iter().filter(|rows| *rows * hidden <= 1 << 19);
            let calls: Vec<_> = EPILOGUES
                .iter()
                .cycle()
                .skip(hidden / 64)
                .zip(rows.cycle())
                .take(EPILOGUES.len() * if hidden < 2048 { 2 } else { 1 })
                .map(|(epilogue, &rows)| (rows, *epilogue))
                .collect();
            let seed = hidden as u64;
            let payloads = |(i, (rows, epilogue)): (usize, &(usize, Epilogue))| {
                (Payload::<bf16>::random(world.get(), *rows, hidden, seed + i as u64), *epilogue)
            };
            check_calls(
                &cpu,
                world,
                config(hidden, 257, None),
                &calls.iter().enumerate().map(payloads).collect::<Vec<_>>(),
            );
            let payloads = |(i, (rows, epilogue)): (usize, &(usize, Epilogue))| {
                (Payload::<f16>::random(world.get(), *rows, hidden, seed + i as u64), *epilogue)
            };
            check_calls(
                &cpu,
                world,
                config(hidden, 257, None),
                &calls.iter().enumerate().map(payloads).collect::<Vec<_>>(),
            );
            compared += 2 * calls.len();
        }
    }
    assert!(compared > 400);
}

/// Ranks that are late by chance, in chains of calls of all sizes, over the wrap of the count.
#[test]
fn cpu_ranks_that_hurry_and_dawdle() {
    let cpu = cpu();
    for world in [WorldSize::Two, WorldSize::Four] {
        let mut random = Lcg(7);
        let calls: Vec<_> = (0..400)
            .map(|i| {
                let rows = [1, 8, 3, 64][random.below(4)];
                (Payload::<bf16>::random(world.get(), rows, 64, i), EPILOGUES[random.below(EPILOGUES.len())])
            })
            .collect();
        let config = GroupConfig { first_epoch: u32::MAX - 200, ..config(64, 64, None) };
        let compared = on_all_ranks::<OnCpu, bf16, _>(&cpu, world, config, |rank, backend, group| {
            let mut random = Lcg(rank.index() as u64);
            for (payload, epilogue) in &calls {
                let mut buffers = Buffers::<OnCpu, bf16>::new(backend, payload, rank.index(), *epilogue);
                match random.below(8) {
                    0 => std::thread::sleep(Duration::from_micros(random.below(300) as u64)),
                    1 => std::thread::yield_now(),
                    _ => {}
                }
                buffers.call(group).unwrap();
                assert_eq!(buffers.outcome(backend), specified(payload, *epilogue));
            }
            calls.len()
        });
        assert_eq!(compared, vec![400; world.get()]);
    }
}

/// One limit for a whole call, however many peers are late; and a peer that leaves is noticed at once.
#[test]
fn cpu_limits_and_leavers() {
    let cpu = cpu();
    let config = GroupConfig { time_limit: Duration::from_secs(60), ..config(64, 4, None) };
    let started = Instant::now();
    let seen = on_all_ranks::<OnCpu, bf16, _>(&cpu, WorldSize::Four, config, |rank, backend, group| {
        let payload = Payload::random(4, 2, 64, 1);
        let mut buffers = Buffers::<OnCpu, bf16>::new(backend, &payload, rank.index(), NORM);
        buffers.call(group).unwrap();
        // Rank 2 leaves after a good call, which the others may still be finishing.
        if rank.index() == 2 { String::new() } else { buffers.call(group).unwrap_err().to_string() }
    });
    for rank in [0, 1, 3] {
        assert!(seen[rank].contains("rank 2"), "{seen:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(30), "nobody waited for the limit");
}

/// A call on a lost group changes nothing: the caller may still have use for the residual.
#[test]
fn cpu_calls_on_a_lost_group_change_nothing() {
    let cpu = cpu();
    let config = GroupConfig { time_limit: Duration::from_millis(50), ..config(64, 4, None) };
    on_all_ranks::<OnCpu, bf16, _>(&cpu, WorldSize::Two, config, |rank, backend, group| {
        if rank.index() == 1 {
            return;
        }
        let payload = Payload::random(2, 2, 64, 1);
        let mut lost = Buffers::<OnCpu, bf16>::new(backend, &payload, 0, NORM);
        lost.call(group).unwrap_err();
        assert!(lost.outcome(backend).residual.iter().all(|bits| bf16::from_bits(*bits).is_nan()));
        let mut later = Buffers::<OnCpu, bf16>::new(backend, &payload, 0, NORM);
        let before = later.outcome(backend);
        later.call(group).unwrap_err();
        assert_eq!(later.outcome(backend), before);
    });
}

#[test]
fn rows_together_equal_rows_alone() {
    let cpu = cpu();
    let together = Payload::<bf16>::random(4, 33, 576, 3);
    let mut calls = vec![(together.clone(), NORM)];
    calls.extend((0..33).map(|row| (together.rows(row..row + 1), NORM)));
    check_calls(&cpu, WorldSize::Four, config(576, 33, None), &calls);
    // And the specification itself treats a row alone.
    let rows: Vec<u16> = calls[1..].iter().flat_map(|(row, e)| specified(row, *e).output).collect();
    assert_eq!(specified(&together, NORM).output, rows);
}

/// Every bf16 pattern, from every rank in turn, added to -0.0: what is not NaN comes out as it went in.
#[test]
fn all_patterns_are_carried_intact() {
    let cpu = cpu();
    let calls: Vec<_> = (0..2)
        .map(|sender| {
            let mut payload = Payload::<bf16>::random(2, 64, 1024, 0);
            for (rank, partial) in payload.partials.iter_mut().enumerate() {
                for (i, value) in partial.iter_mut().enumerate() {
                    *value = if rank == sender { bf16::from_bits(i as u16) } else { bf16::NEG_ZERO };
                }
            }
            let sum = specified(&payload, Epilogue::Sum).output;
            for (i, sum) in sum.iter().enumerate() {
                let nan = bf16::from_bits(i as u16).is_nan();
                assert_eq!(*sum, if nan { 0x7FFF } else { i as u16 });
            }
            (payload, Epilogue::Sum)
        })
        .collect();
    check_calls(&cpu, WorldSize::Two, config(1024, 64, None), &calls);
}

/// A rank that never calls: the others name it within the limit, outputs are NaN, later calls fail at once.
#[test]
fn cpu_names_a_rank_that_never_calls() {
    let cpu = cpu();
    for world in [WorldSize::Two, WorldSize::Four, WorldSize::Eight] {
        let config = GroupConfig { time_limit: Duration::from_millis(200), ..config(64, 4, None) };
        let lost = world.get() - 1;
        let all_done = std::sync::Barrier::new(world.get());
        on_all_ranks::<OnCpu, bf16, _>(&cpu, world, config, |rank, backend, group| {
            let payload = Payload::random(world.get(), 2, 64, 1);
            Buffers::<OnCpu, bf16>::new(backend, &payload, rank.index(), NORM).call(group).unwrap();
            if rank.index() != lost {
                let mut buffers = Buffers::<OnCpu, bf16>::new(backend, &payload, rank.index(), NORM);
                let started = Instant::now();
                let error = buffers.call(group).unwrap_err();
                assert!(started.elapsed() < Duration::from_secs(10));
                assert_eq!(error.kind(), ErrorKind::Fault);
                assert!(error.to_string().contains(&format!("rank {lost}")), "{error}");
                let outcome = buffers.outcome(backend);
                let is_nan = |bits: &u16| bf16::from_bits(*bits).is_nan();
                assert!(outcome.output.iter().chain(&outcome.residual).all(is_nan));
                assert!(buffers.call(group).is_err() && group.check().is_err());
            }
            all_done.wait(); // the lost rank has not left: it is silent
        });
    }
}

#[test]
fn cpu_names_a_rank_with_another_call() {
    let cpu = cpu();
    let plus_one = Epilogue::Norm { output: true, fp8: Fp8::No, plus_one: true };
    for other in [(3, NORM), (2, Epilogue::Sum), (2, plus_one)] {
        let seen = on_all_ranks::<OnCpu, bf16, _>(
            &cpu,
            WorldSize::Four,
            config(64, 4, None),
            |rank, backend, group| {
                let (rows, epilogue) = if rank.index() == 1 { other } else { (2, NORM) };
                let payload = Payload::random(4, rows, 64, 1);
                let mut buffers = Buffers::<OnCpu, bf16>::new(backend, &payload, rank.index(), epilogue);
                buffers.call(group).unwrap_err().to_string()
            },
        );
        for (rank, error) in seen.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            assert!(error.contains("rank 1"), "rank {rank}: {error}");
        }
        assert!(seen.iter().any(|error| error.contains("reduce_add_norm (weight")), "{seen:?}");
    }
}

#[test]
fn misuse_is_an_error_and_changes_nothing() {
    let cpu = Cpu::with_threads(1).unwrap();
    let place = || Rendezvous::new(WorldSize::One, Duration::from_secs(1));
    let rank = Rank::new(0, WorldSize::One).unwrap();
    let join = |config| Group::<Cpu, bf16>::join(&cpu, &place(), rank, config);
    for hidden in [0, 32, 72, 16_448] {
        assert!(join(GroupConfig::new(hidden, 4)).is_err(), "{hidden}");
    }
    assert_eq!(join(GroupConfig::new(64, 513)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(join(GroupConfig::new(64, 0)).is_err());
    assert!(join(GroupConfig { time_limit: Duration::from_micros(5), ..GroupConfig::new(64, 4) }).is_err());

    let mut group = join(GroupConfig::new(64, 4)).unwrap();
    assert!([0, 5, usize::MAX].iter().all(|rows| group.algorithm(*rows).is_none()));
    assert!(group.algorithm(4).is_some());
    let norm = RmsNorm::new(64, 1e-5).unwrap();
    let one = [bf16::ONE; 5 * 64];
    let mut residual = one;
    let mut call = |norm: &RmsNorm, partial, residual_len, weight, output_len, scales: Option<usize>| {
        let (mut out, mut bytes, mut scale) = ([bf16::ZERO; 512], [0; 512], [0.0; 8]);
        let quantized = scales
            .map(|scales| Quantized::PerRow { values: &mut bytes[..partial], scales: &mut scale[..scales] });
        let outputs = NormOutputs { output: Some(&mut out[..output_len]), quantized };
        group.reduce_add_norm(norm, &one[..partial], &mut residual[..residual_len], &one[..weight], outputs)
    };
    assert!(call(&norm, 128, 128, 64, 128, Some(2)).is_ok());
    assert!(call(&norm, 0, 0, 64, 0, None).is_err(), "no rows");
    assert!(call(&norm, 100, 100, 64, 100, None).is_err(), "part of a row");
    let many = call(&norm, 320, 320, 64, 320, None).unwrap_err();
    assert_eq!(many.kind(), ErrorKind::Unsupported, "too many rows");
    assert!(call(&norm, 128, 64, 64, 128, None).is_err(), "residual");
    assert!(call(&norm, 128, 128, 63, 128, None).is_err(), "weight");
    assert!(call(&norm, 128, 128, 64, 64, None).is_err(), "output");
    assert!(call(&norm, 128, 128, 64, 128, Some(1)).is_err(), "scales");
    assert!(call(&RmsNorm::new(128, 1e-5).unwrap(), 128, 128, 64, 128, None).is_err(), "norm");
    assert!(call(&norm, 128, 128, 64, 128, None).is_ok(), "the group goes on");
    let nothing = NormOutputs { output: None, quantized: None };
    let mut rest = one;
    assert!(group.reduce_add_norm(&norm, &one[..64], &mut rest[..64], &one[..64], nothing).is_err());
    assert_eq!(rest, one);
    let mut bytes = [0; 64];
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let quantized = Some(Quantized::Static { values: &mut bytes[..], scale });
        let outputs = NormOutputs { output: None, quantized };
        assert!(group.reduce_add_norm(&norm, &one[..64], &mut rest[..64], &one[..64], outputs).is_err());
    }
}

/// A shape that nobody can have is *unsupported* on every rank: they may all take something else.
#[test]
fn ranks_fail_alike() {
    let cpu = Cpu::with_threads(1).unwrap();
    let rendezvous = Rendezvous::new(WorldSize::Four, Duration::from_secs(20));
    std::thread::scope(|scope| {
        for rank in WorldSize::Four.ranks() {
            let (cpu, rendezvous) = (&cpu, &rendezvous);
            scope.spawn(move || {
                let error =
                    Group::<Cpu, bf16>::join(cpu, rendezvous, rank, GroupConfig::new(72, 4)).unwrap_err();
                assert!(
                    error.kind() == ErrorKind::Unsupported && error.to_string().contains("72"),
                    "{error}"
                );
            });
        }
    });
}

/// Configurations that differ are seen when the group forms, by all ranks.
#[test]
fn unequal_configurations_are_misuse_on_all_ranks() {
    let cpu = Cpu::with_threads(1).unwrap();
    type Change = fn(&mut GroupConfig);
    let changes: [Change; 4] = [
        |config| config.hidden = 128,
        |config| config.max_rows = 5,
        |config| config.max_blocks = 3,
        |config| config.time_limit = Duration::from_secs(3),
    ];
    for change in changes {
        let rendezvous = Rendezvous::new(WorldSize::Four, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for rank in WorldSize::Four.ranks() {
                let (cpu, rendezvous) = (&cpu, &rendezvous);
                scope.spawn(move || {
                    let mut config = GroupConfig::new(64, 4);
                    if rank.index() == 2 {
                        change(&mut config);
                    }
                    let error = Group::<Cpu, bf16>::join(cpu, rendezvous, rank, config).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Misuse);
                    assert!(error.to_string().contains("rank 2"), "{error}");
                });
            }
        });
    }
    let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(20));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = WorldSize::Two.ranks().collect();
        let (cpu, rendezvous) = (&cpu, &rendezvous);
        let config = GroupConfig::new(64, 4);
        scope.spawn(move || assert!(Group::<Cpu, bf16>::join(cpu, rendezvous, ranks[0], config).is_err()));
        let one = WorldSize::Two.ranks().nth(1).unwrap();
        assert!(Group::<Cpu, f16>::join(cpu, rendezvous, one, config).is_err());
    });
}
