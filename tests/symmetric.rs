//! Ranks as processes: they meet at a socket, map each other's slabs, and reduce. Every rank is this very binary,
//! started again with a role in its environment, on an emulator of its own whose shared memory is really shared.
#![cfg(all(feature = "cuda", target_os = "linux"))]

#[path = "common/collective.rs"]
mod collective;
#[path = "common/emulated.rs"]
mod emulated;
#[path = "common/processes.rs"]
mod processes;

use std::time::{Duration, Instant};

use collective::*;
use cuda_emulator as emulator;
use eagle_verify::backend::cpu::Cpu;
use eagle_verify::backend::cuda::Cuda;
use eagle_verify::comm::{Algorithm, Group, GroupConfig, Rank, Rendezvous, WorldSize};
use eagle_verify::{Element, Error};
use emulated::OnEmulator;
use emulator::SharingFault;
use half::{bf16, f16};
use processes::{Processes, Role, hear, say};
use sha2::{Digest, Sha256};

/// What no healthy run comes near to.
const LONG: Duration = Duration::from_secs(25);
/// The limit where a rank is lost: no healthy rank is late by half of it, even on a busy machine.
const SHORT: Duration = Duration::from_secs(4);

/// What a rank does, in its process.
#[test]
fn rank_process() {
    let Some(role) = Role::of_this_process() else { return };
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    match role.play.as_str() {
        "reduce" => reduce::<bf16>(&role),
        "reduce f16" => reduce::<f16>(&role),
        "reduce, checked" => {
            emulator::configure(&emulator::Config::checked(role.seed));
            reduce::<bf16>(&role);
        }
        "lose a rank in a call" => lose_in_a_call(&role),
        "lose a rank before joining" => {
            let place = role.meet(SHORT).unwrap();
            if role.rank.index() == role.odd {
                std::process::abort();
            }
            tell(join::<bf16>(&role, &place, GroupConfig::new(64, 4)));
        }
        "be killed some time" => be_killed_some_time(&role),
        "be another" => {
            let hidden = if role.rank.index() == role.odd { 128 } else { 64 };
            fail_to_join(&role, GroupConfig::new(hidden, 4), None);
        }
        "be late" => {
            if role.rank.index() != role.odd {
                tell(role.meet(SHORT / 2));
            }
        }
        "use a CPU" => {
            let place = role.meet(LONG).unwrap();
            tell(Group::<Cpu, bf16>::join(&Cpu::new().unwrap(), &place, role.rank, GroupConfig::new(64, 4)));
        }
        "die in export" => fail_to_join(&role, GroupConfig::new(64, 4), Some(SharingFault::DiesInExport)),
        "fail to map" => fail_to_join(&role, GroupConfig::new(64, 4), Some(SharingFault::FailsToMap)),
        "map other memory" => {
            fail_to_join(&role, GroupConfig::new(64, 4), Some(SharingFault::ImportsOtherMemory));
        }
        "lack support" => fail_to_join(&role, GroupConfig::new(64, 4), Some(SharingFault::Unsupported)),
        other => panic!("no such play: {other}"),
    }
}

impl Role {
    fn meet(&self, limit: Duration) -> eagle_verify::Result<Rendezvous> {
        Rendezvous::over_socket(&self.path, self.world, self.rank, limit)
    }

    fn cuda(&self) -> Cuda {
        let device = self.devices[self.rank.index()];
        Cuda::with_kernels(device, &[("emulated", emulator::IMAGE)]).unwrap()
    }
}

fn join<T: Element>(
    role: &Role,
    place: &Rendezvous,
    config: GroupConfig,
) -> eagle_verify::Result<(Cuda, Group<Cuda, T>)> {
    let cuda = role.cuda();
    let group = Group::join(&cuda, place, role.rank, config)?;
    Ok((cuda, group))
}

/// Says how it ended.
fn tell<T>(outcome: eagle_verify::Result<T>) {
    match outcome {
        Ok(_) => say("formed"),
        Err(error) => say(&format!("{error}")),
    }
}

/// Descriptors and mappings of this process, and what its emulated driver holds.
fn held() -> (usize, usize, [u64; 6]) {
    let report = emulator::report();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        std::fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.lines().filter(|line| line.contains("emulated device memory")).count(),
        [
            report.num_allocations,
            report.num_host_allocations,
            report.num_streams,
            report.num_modules,
            report.num_memory_handles,
            report.num_reservations,
        ],
    )
}

/// The calls that all ranks make: shapes, seeds and epilogues, by algorithm.
fn calls<T: Element>(world: usize, seed: u64) -> Vec<(Payload<T>, Epilogue)> {
    let shapes = [(1, 64), (5, 64), (1, 1024), (3, 2880), (2, 4096)];
    let number = shapes.len() * 2;
    let calls = (0..number).map(|i| {
        let (rows, hidden) = shapes[i % shapes.len()];
        let epilogue = if i < shapes.len() { NORM } else { EPILOGUES[(i + seed as usize) % EPILOGUES.len()] };
        (Payload::random(world, rows, hidden, seed + i as u64), epilogue)
    });
    calls.collect()
}

fn few_blocks(hidden: usize, algorithm: Algorithm) -> GroupConfig {
    GroupConfig { time_limit: LONG, max_blocks: 2, ..config(hidden, 8, Some(algorithm)) }
}

fn digest(outcome: &Outcome) -> String {
    let mut hash = Sha256::new();
    hash.update(bytemuck::cast_slice::<_, u8>(&outcome.residual));
    hash.update(bytemuck::cast_slice::<_, u8>(&outcome.output));
    hash.update(&outcome.quantized);
    hash.update(bytemuck::cast_slice::<_, u8>(&outcome.scales));
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// One group after the other at the same path; each is gone without a trace when the next one forms.
fn reduce<T: Element>(role: &Role) {
    let world = role.world;
    let before = held();
    for &algorithm in algorithms(world) {
        let calls = calls::<T>(world.get(), role.seed);
        let mut hiddens: Vec<usize> = calls.iter().map(|(payload, _)| payload.weight.len()).collect();
        hiddens.dedup();
        for hidden in hiddens.into_iter().take(if role.play == "reduce, checked" { 1 } else { usize::MAX }) {
            let place = role.meet(LONG).unwrap();
            let (cuda, mut group) = join::<T>(role, &place, few_blocks(hidden, algorithm)).unwrap();
            drop(place); // nothing needs it any more
            let calls = calls.iter().filter(|(payload, _)| payload.weight.len() == hidden);
            let mut buffers: Vec<_> = calls
                .map(|(payload, epilogue)| {
                    Buffers::<OnEmulator, T>::new(&cuda, payload, role.rank.index(), *epilogue)
                })
                .collect();
            for buffers in &mut buffers {
                buffers.call(&mut group).unwrap();
            }
            for buffers in &buffers {
                say(&digest(&buffers.outcome(&cuda)));
            }
            group.check().unwrap();
        }
    }
    assert_eq!(held(), before, "of {:?}", role.rank);
    assert_eq!(emulator::report().complaint(), None);
    say("done");
}

/// What they say together equals what ranks of one process compute, and the specification.
fn reduces_as_threads_do<T: Element>(play: &str, world: WorldSize, devices: &[usize], seed: u64) {
    let processes = Processes::start(play, world, devices, 0, seed);
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config { patience: Duration::from_secs(5), ..emulator::Config::fast() });
    let calls = calls::<T>(world.get(), seed);
    let mut num_compared = 0;
    for &algorithm in algorithms(world) {
        let mut hiddens: Vec<usize> = calls.iter().map(|(payload, _)| payload.weight.len()).collect();
        hiddens.dedup();
        for hidden in hiddens.into_iter().take(if play == "reduce, checked" { 1 } else { usize::MAX }) {
            let calls: Vec<_> = calls.iter().filter(|(payload, _)| payload.weight.len() == hidden).collect();
            let threads = on_all_ranks::<_, T, _>(
                &OnEmulator::spread(world),
                world,
                few_blocks(hidden, algorithm),
                |rank, cuda, group| {
                    let outcomes = calls.iter().map(|(payload, epilogue)| {
                        let mut buffers =
                            Buffers::<OnEmulator, T>::new(cuda, payload, rank.index(), *epilogue);
                        buffers.call(group).unwrap();
                        buffers.outcome(cuda)
                    });
                    outcomes.collect::<Vec<_>>()
                },
            );
            for (i, (payload, epilogue)) in calls.iter().enumerate() {
                let want = specified(payload, *epilogue);
                for rank in world.ranks() {
                    assert_eq!(threads[rank.index()][i].difference(&want, hidden), None);
                    let seen = processes.hear(rank.index(), LONG);
                    assert_eq!(
                        seen,
                        digest(&want),
                        "{play} {world:?} {algorithm:?} {hidden} call {i} {rank}"
                    );
                    num_compared += 1;
                }
            }
        }
    }
    for rank in world.ranks() {
        assert_eq!(processes.hear(rank.index(), LONG), "done");
    }
    processes.end_well();
    assert!(num_compared >= 4 * world.get());
}

#[test]
fn two_processes_reduce_as_two_threads_do() {
    reduces_as_threads_do::<bf16>("reduce", WorldSize::Two, &[0, 1], 1);
    reduces_as_threads_do::<f16>("reduce f16", WorldSize::Two, &[0, 1], 2);
}

#[test]
fn four_processes_reduce_as_four_threads_do() {
    reduces_as_threads_do::<bf16>("reduce", WorldSize::Four, &[0, 1, 2, 3], 3);
}

/// Several ranks on a device, in several processes.
#[test]
fn processes_share_a_device() {
    reduces_as_threads_do::<bf16>("reduce", WorldSize::Two, &[0, 0], 4);
}

/// Each process with races, bounds, late and torn stores.
#[test]
fn processes_reduce_with_weak_memory() {
    for seed in emulator::seeds(3) {
        reduces_as_threads_do::<bf16>("reduce, checked", WorldSize::Two, &[0, 1], seed);
    }
}

/// A good call; then one in which the odd rank is gone, or does not run.
fn lose_in_a_call(role: &Role) {
    let place = role.meet(LONG).unwrap();
    let config = GroupConfig { time_limit: SHORT, max_blocks: 2, ..GroupConfig::new(64, 4) };
    let (cuda, mut group) = join::<bf16>(role, &place, config).unwrap();
    let payload = Payload::random(role.world.get(), 4, 64, 1);
    let mut good = Buffers::<OnEmulator, bf16>::new(&cuda, &payload, role.rank.index(), NORM);
    let mut bad = Buffers::<OnEmulator, bf16>::new(&cuda, &payload, role.rank.index(), NORM);
    good.call(&mut group).unwrap();
    assert_eq!(good.outcome(&cuda), specified(&payload, NORM));
    say("formed");
    hear();
    bad.call(&mut group).unwrap();
    cuda.synchronize().unwrap();
    tell(group.check());
    assert!(bad.outcome(&cuda).output.iter().all(|bits| bf16::from_bits(*bits).is_nan()));
    assert!(bad.call(&mut group).is_err());
    drop((bad, good, group, cuda, place));
    assert_eq!(held().1, 0);
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named_by_all() {
    for (world, odd, signal) in
        [(WorldSize::Two, 0, "KILL"), (WorldSize::Four, 2, "KILL"), (WorldSize::Two, 0, "STOP")]
    {
        let devices: Vec<usize> = (0..world.get()).collect();
        let mut processes = Processes::start("lose a rank in a call", world, &devices, odd, 0);
        for rank in 0..world.get() {
            assert_eq!(processes.hear(rank, LONG), "formed");
        }
        processes.signal(odd, signal);
        let started = Instant::now();
        let others: Vec<usize> = (0..world.get()).filter(|rank| *rank != odd).collect();
        others.iter().for_each(|rank| processes.say(*rank));
        for rank in others {
            let seen = processes.hear(rank, LONG);
            assert!(
                seen.starts_with("fault") && seen.contains(&format!("rank {odd}")),
                "{signal} {rank}: {seen}"
            );
            processes.end_one_well(rank);
        }
        assert!(started.elapsed() < SHORT + Duration::from_secs(4), "{:?}", started.elapsed());
    }
}

#[test]
fn a_rank_that_ends_before_joining_is_named_by_all() {
    let mut processes = Processes::start("lose a rank before joining", WorldSize::Four, &[0, 1, 2, 3], 3, 0);
    for rank in 0..3 {
        let seen = processes.hear(rank, LONG);
        assert!(seen.starts_with("fault") && seen.contains("the end of rank 3"), "{seen}");
        processes.end_one_well(rank);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    for odd in [0, 1] {
        let started = Instant::now();
        let processes = Processes::start("be late", WorldSize::Two, &[0, 1], odd, 0);
        let seen = processes.hear(1 - odd, LONG);
        assert!(seen.starts_with("fault") && seen.contains(&format!("no sign of rank {odd}")), "{seen}");
        assert!(started.elapsed() < SHORT + Duration::from_secs(3));
        processes.end_well();
    }
}

/// A rank that fails at a stage, and leaves nothing behind.
fn fail_to_join(role: &Role, config: GroupConfig, fault: Option<SharingFault>) {
    if let Some(fault) = fault
        && role.rank.index() == role.odd
    {
        emulator::break_sharing(fault);
    }
    let before = held();
    let place = role.meet(LONG).unwrap();
    tell(join::<bf16>(role, &place, config));
    drop(place);
    assert_eq!(held(), before, "of {:?}", role.rank);
}

/// What all ranks say of a stage at which one failed: the kind and the words that each must use.
fn all_fail(play: &str, odd: usize, words: &[&str]) {
    let started = Instant::now();
    let mut processes = Processes::start(play, WorldSize::Four, &[0, 1, 2, 3], odd, 0);
    for rank in 0..4 {
        if play == "die in export" && rank == odd {
            continue;
        }
        let seen = processes.hear(rank, LONG);
        assert!(words.iter().all(|word| seen.contains(word)), "{play}, rank {rank}: {seen}");
        processes.end_one_well(rank);
    }
    assert!(started.elapsed() < LONG / 2);
}

#[test]
fn a_failed_stage_fails_all_ranks_and_leaves_nothing() {
    all_fail("be another", 2, &["misuse: group configuration", "rank 2", "hidden: 128"]);
    all_fail("lack support", 1, &["unsupported: device 1", "file descriptor"]);
    all_fail("die in export", 1, &["fault: group", "the end of rank 1"]);
    all_fail("die in export", 0, &["fault: group", "the end of rank 0"]);
    all_fail("fail to map", 3, &["fault: cuMemMap on device 3 of rank 0's slab", "OUT_OF_MEMORY"]);
    // The control: without the identity in the slab, the ranks would form a group and wait for each other in vain.
    all_fail("map other memory", 2, &["fault: shared memory of rank 0's slab", "what the peer offered"]);
    all_fail("use a CPU", 0, &["unsupported: ranks as processes", "CPU"]);
}

/// Joins and calls, until it is killed or hears that another one was.
fn be_killed_some_time(role: &Role) {
    say("begun");
    let config = GroupConfig { time_limit: SHORT, max_blocks: 2, ..GroupConfig::new(64, 4) };
    let lives = || -> Result<(), Error> {
        let place = role.meet(SHORT)?;
        let (cuda, mut group) = join::<bf16>(role, &place, config)?;
        let payload = Payload::random(role.world.get(), 1, 64, 1);
        let mut buffers = Buffers::<OnEmulator, bf16>::new(&cuda, &payload, role.rank.index(), NORM);
        loop {
            buffers.call(&mut group)?;
            cuda.synchronize()?;
        }
    };
    tell(lives());
}

#[test]
fn wherever_a_rank_is_killed_the_others_name_it() {
    for (delay, odd) in [(0, 1), (1, 0), (2, 1), (4, 2), (8, 0), (16, 1), (32, 2)] {
        let mut processes = Processes::start("be killed some time", WorldSize::Four, &[0, 1, 2, 3], odd, 0);
        for rank in 0..4 {
            assert_eq!(processes.hear(rank, LONG), "begun");
        }
        std::thread::sleep(Duration::from_millis(delay));
        processes.signal(odd, "KILL");
        for rank in (0..4).filter(|rank| *rank != odd) {
            let seen = processes.hear(rank, LONG);
            // Or that rank 0 is not there any more, for a rank that came to the meeting only after all this.
            let names = seen.contains(&format!("rank {odd}")) || seen.contains("no sign of rank 0 at");
            assert!(seen.starts_with("fault") && names, "{delay} ms, {rank}: {seen}");
            processes.end_one_well(rank);
        }
    }
}

/// Threads of one process may meet at a socket, too, and then map as processes do; but not with one `Cuda` for two.
#[test]
fn threads_that_meet_at_a_socket() {
    let _machine = emulator::exclusive();
    emulator::install();
    emulator::configure(&emulator::Config::fast());
    let world = WorldSize::Two;
    let path = processes::new_path();
    let join = |cudas: [Cuda; 2]| {
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|index| {
                let (cuda, path) = (&cudas[index], &path);
                scope.spawn(move || {
                    let rank = Rank::new(index, world).unwrap();
                    let place = Rendezvous::over_socket(path, world, rank, LONG)?;
                    Group::<Cuda, bf16>::join(cuda, &place, rank, GroupConfig::new(64, 4))
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        })
    };
    let machine = OnEmulator::spread(world);
    let payload = Payload::random(2, 4, 64, 9);
    let cudas = [0, 1].map(|rank| machine.backend(rank));
    let mut groups = join(cudas.clone()).map(|group| group.unwrap());
    let mut buffers = [0, 1].map(|rank| Buffers::<OnEmulator, bf16>::new(&cudas[rank], &payload, rank, NORM));
    for (buffers, group) in buffers.iter_mut().zip(&mut groups) {
        buffers.call(group).unwrap();
    }
    for (buffers, cuda) in buffers.iter().zip(&cudas) {
        assert_eq!(buffers.outcome(cuda), specified(&payload, NORM));
    }
    drop((groups, buffers));
    let cuda = machine.backend(0);
    for group in join([cuda.clone(), cuda]) {
        let error = group.unwrap_err();
        assert!(error.to_string().contains("rank 1 on the stream of another rank"), "{error}");
    }
    drop(cudas);
    assert_eq!(held().2, [0; 6]);
    assert!(!path.exists());
}
