//! The collectives' kernels, executed in the emulator through the real CUDA backend: conformance, misuse, lost
//! peers.
#![cfg(feature = "cuda")]

#[path = "common/collective.rs"]
mod collective;
#[path = "common/emulated.rs"]
mod emulated;

use std::time::Duration;

use collective::*;
use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{Cuda, DeviceSliceMut, kernel_images};
use eagle_verify::comm::{Algorithm, Group, GroupConfig, NormOutputs, Rendezvous, WorldSize};
use eagle_verify::{Element, ErrorKind, RmsNorm};
use emulated::OnEmulator;
use half::{bf16, f16};

const ROWS: [usize; 8] = [1, 2, 3, 7, 8, 33, 64, 257];
const HIDDEN: [usize; 6] = [64, 576, 1024, 2880, 4096, 7168];

/// Results only, as fast as it goes; ranks are threads.
fn results_only() -> emulator::Config {
    emulator::Config { patience: Duration::from_secs(5), ..emulator::Config::fast() }
}

/// Every kernel with every epilogue, and every pair of rows and hidden size with every kernel; shapes with more
/// elements than CI has time for are left to `EMU_CONFORMANCE=all`.
fn conformance<T: Element>() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    let all = std::env::var("EMU_CONFORMANCE").is_ok_and(|value| value == "all");
    let (mut compared, mut left_out, mut turn) = (0, 0, 0);
    for world in WORLDS {
        for &algorithm in algorithms(world) {
            for hidden in HIDDEN {
                let mut calls = Vec::new();
                for rows in ROWS {
                    let elements = rows * hidden * world.get();
                    if !all && elements > 1 << 18 && (rows, hidden) != (1, 7168) {
                        left_out += 1;
                        continue;
                    }
                    // The small ones with all epilogues, the others with one after another.
                    for _ in 0..if elements < 1 << 12 { EPILOGUES.len() } else { 1 } {
                        turn += 1;
                        let payload = Payload::<T>::random(world.get(), rows, hidden, turn as u64);
                        calls.push((payload, EPILOGUES[turn % EPILOGUES.len()]));
                    }
                }
                let max_rows = calls.iter().map(|(payload, _)| payload.rows).max().unwrap();
                // Few blocks, so that some have several rows; and few threads, since each costs the emulator.
                let config = GroupConfig {
                    max_blocks: 3,
                    max_warps_per_group: 1 + turn % 2,
                    ..config(hidden, max_rows, Some(algorithm))
                };
                check_calls(&OnEmulator::spread(world), world, config, &calls);
                compared += calls.len();
            }
        }
    }
    eprintln!("{}: {compared} calls compared on all ranks, {left_out} shapes left out", T::NAME);
    assert!(compared > 300);
    assert_eq!(emulator::report().complaint(), None);
}

#[test]
fn kernels_equal_the_specification_bf16() {
    conformance::<bf16>();
}

#[test]
fn kernels_equal_the_specification_f16() {
    conformance::<f16>();
}

/// The largest hidden size: eight runs in a group, every number of warps.
#[test]
fn the_largest_hidden_size() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    for max_warps_per_group in 1..=4 {
        let calls: Vec<_> =
            EPILOGUES.iter().skip(7).map(|e| (Payload::<bf16>::random(2, 2, 16_384, 1), *e)).collect();
        let config = GroupConfig { max_warps_per_group, ..config(16_384, 2, Some(Algorithm::TwoShot)) };
        check_calls(&OnEmulator::spread(WorldSize::Two), WorldSize::Two, config, &calls);
    }
}

#[test]
fn algorithms_give_equal_bits_and_rows_don_t_depend_on_each_other() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    let world = WorldSize::Eight;
    let together = Payload::<bf16>::random(8, 9, 576, 5);
    let mut seen = Vec::new();
    for &algorithm in algorithms(world) {
        for max_blocks in [1, 4, 64] {
            let config = GroupConfig { max_blocks, ..config(576, 9, Some(algorithm)) };
            let outcomes =
                on_all_ranks::<_, bf16, _>(&OnEmulator::spread(world), world, config, |rank, cuda, group| {
                    let mut whole = Buffers::<OnEmulator, bf16>::new(cuda, &together, rank.index(), NORM);
                    whole.call(group).unwrap();
                    let rows = (0..9).map(|row| {
                        let row = together.rows(row..row + 1);
                        let mut alone = Buffers::<OnEmulator, bf16>::new(cuda, &row, rank.index(), NORM);
                        alone.call(group).unwrap();
                        alone.outcome(cuda)
                    });
                    let rows: Vec<Outcome> = rows.collect();
                    let whole = whole.outcome(cuda);
                    assert_eq!(
                        whole.output,
                        rows.iter().flat_map(|row| row.output.clone()).collect::<Vec<_>>()
                    );
                    assert_eq!(
                        whole.residual,
                        rows.iter().flat_map(|row| row.residual.clone()).collect::<Vec<_>>()
                    );
                    whole
                });
            seen.extend(outcomes);
        }
    }
    assert_eq!(seen.len(), 3 * 3 * 8);
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Every 16-bit pattern, the sentinel and the escape among the words, from every rank, through every algorithm.
#[test]
fn all_patterns_are_carried_intact() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config { weak: true, torn: true, ..results_only() });
    for (world, algorithm) in [
        (WorldSize::Two, Algorithm::OneShot),
        (WorldSize::Two, Algorithm::TwoShot),
        (WorldSize::Eight, Algorithm::Hierarchical),
    ] {
        let senders = if world == WorldSize::Two { 0..2 } else { 3..4 };
        let calls: Vec<_> = senders
            .map(|sender| {
                let mut payload = Payload::<bf16>::random(world.get(), 16, 4096, 0);
                for (rank, partial) in payload.partials.iter_mut().enumerate() {
                    for (i, value) in partial.iter_mut().enumerate() {
                        *value = if rank == sender { bf16::from_bits(i as u16) } else { bf16::NEG_ZERO };
                    }
                    if rank == sender {
                        let words: &mut [u32] = bytemuck::cast_slice_mut(partial);
                        // Escapes in every place of a pack, alone and with others.
                        for pattern in 0..256 {
                            for word in 0..4 {
                                let kind = pattern >> (2 * word) & 3;
                                let place = &mut words[1000 + 4 * pattern + word];
                                *place = [*place, 0xFFFF_FFFF, 0xFFFF_FFFE, 0x8000_8000][kind];
                            }
                        }
                    }
                }
                (payload, Epilogue::Sum)
            })
            .collect();
        let config = GroupConfig { max_blocks: 3, ..config(4096, 16, Some(algorithm)) };
        check_calls(&OnEmulator::spread(world), world, config, &calls);
    }
    assert_eq!(emulator::report().complaint(), None);
}

/// How a rank lets the others down in its second call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Odd {
    NeverCalls,
    /// Of the mutants: a rank that is silent from some point on.
    Stops(&'static str),
    CallsWithRows(usize),
}

/// The others name the odd rank within the limit, outputs are NaN, later calls fail at once, and dropping the
/// groups frees everything.
fn is_named(world: WorldSize, algorithm: Algorithm, odd: Odd, seed: u64) {
    let what = format!("{world:?} {algorithm:?} {odd:?} seed {seed}");
    let mutant = if let Odd::Stops(mutant) = odd { Some(mutant) } else { None };
    emulator::configure(&emulator::Config { mutant, ..emulator::Config::checked(seed) });
    let odd_rank = if mutant.is_some() { 1 } else { world.get() / 2 };
    let time_limit = Duration::from_secs(2);
    let config = GroupConfig { time_limit, max_blocks: 3, ..config(64, 8, Some(algorithm)) };
    let mut ranks = OnEmulator::spread(world).form::<bf16>(world, config);
    let payload = |rows| Payload::<bf16>::random(world.get(), rows, 64, 1);
    let rows_of = |rank: usize| match odd {
        Odd::NeverCalls if rank == odd_rank => None,
        Odd::CallsWithRows(rows) if rank == odd_rank => Some(rows),
        _ => Some(4),
    };
    // Memory before any call: an allocation may wait for kernels that wait for those not yet queued.
    let buffers = |rank: usize, cuda: &Cuda, rows| {
        Buffers::<OnEmulator, bf16>::new(cuda, &payload(rows), rank, EPILOGUES[9])
    };
    let memory = |rows: &dyn Fn(usize) -> usize| -> Vec<_> {
        ranks.iter().enumerate().map(|(rank, (cuda, _))| buffers(rank, cuda, rows(rank))).collect()
    };
    let mut good = memory(&|_| 2);
    let mut bad = memory(&|rank| rows_of(rank).unwrap_or(1));
    let mut behind = memory(&|_| 4);
    // A good call first, so that something could be left over.
    for ((_, group), buffers) in ranks.iter_mut().zip(&mut good) {
        buffers.call(group).unwrap();
    }
    for ((cuda, _), buffers) in ranks.iter().zip(&good) {
        assert_eq!(buffers.outcome(cuda), specified(&payload(2), EPILOGUES[9]));
    }
    let callers: Vec<usize> = (0..ranks.len()).filter(|rank| rows_of(*rank).is_some()).collect();
    for &rank in &callers {
        bad[rank].call(&mut ranks[rank].1).unwrap();
        // An engine queues the next call before it knows: a rank may be a call ahead.
        behind[rank].call(&mut ranks[rank].1).unwrap();
    }
    let mut num_right = 0;
    for &rank in &callers {
        let (cuda, group) = &ranks[rank];
        cuda.synchronize().unwrap_or_else(|e| panic!("{what}: {e}\n{:?}", emulator::report()));
        let error = group.check().expect_err(&what);
        assert_eq!(error.kind(), ErrorKind::Fault);
        if rank != odd_rank {
            assert!(error.to_string().contains(&format!("rank {odd_rank}")), "{what}, rank {rank}: {error}");
        }
        // A rank may have had all it needed, and be right; the next call is lost to all.
        let outcome = bad[rank].outcome(cuda);
        if matches!(odd, Odd::Stops(_)) && outcome == specified(&payload(4), EPILOGUES[9]) {
            num_right += 1;
        } else {
            assert_nan(&outcome, &what);
        }
        assert_nan(&behind[rank].outcome(cuda), &what);
    }
    assert!(num_right < callers.len(), "{what}");
    for &rank in &callers {
        bad[rank].call(&mut ranks[rank].1).expect_err("the group is lost");
    }
    drop((good, bad, behind));
    drop(ranks);
    let report = emulator::report();
    assert_eq!(report.complaint(), None);
    assert!(report.stats.num_clock_jumps <= 20, "{what}: two seconds at most");
    let left = (report.num_allocations, report.num_host_allocations, report.num_streams, report.num_modules);
    assert_eq!(left, (0, 0, 0, 0), "all is freed");
}

fn assert_nan(outcome: &Outcome, what: &str) {
    let is_nan = |bits: &u16| bf16::from_bits(*bits).is_nan();
    assert!(outcome.output.iter().chain(&outcome.residual).all(is_nan), "{what}");
    assert!(outcome.quantized.iter().all(|byte| byte & 0x7F == 0x7F), "{what}");
    assert!(outcome.scales.iter().all(|bits| f32::from_bits(*bits).is_nan()), "{what}");
}

/// The transport alone, without sums that would make every NaN the same: words with all their patterns.
fn packs_bit_for_bit(seed: u64, mutant: Option<&'static str>) -> Result<(), String> {
    use emulator::{Buffer, Launch};
    /// `ExchangePacks` of the emulator's packs.cu.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Exchange {
        slabs: [u64; 2],
        sent: u64,
        received: u64,
        num_packs: u32,
        rank: u32,
    }
    emulator::configure(&emulator::Config { mutant, ..emulator::Config::checked(seed) });
    let mut random = Lcg(seed);
    // All 65,536 patterns in both halves of a word; then words that the protocol reserves, in all places.
    let patterns = (0..1 << 16).map(|bits| bits << 16 | (bits ^ 0x5A5A)).skip(seed as usize % 4).step_by(4);
    let reserved = (0..1024).map(|_| [0xFFFF_FFFF, 0xFFFF_FFFE, 0x8000_8000, 7][random.below(4)]);
    let mut words: Vec<u32> = patterns.chain(reserved).collect();
    words.truncate(words.len() / 4 * 4);
    let num_packs = words.len() / 4;
    let slabs = [0, 1].map(|rank| Buffer::from_slice(rank, &vec![0xFFu8; 256 + num_packs * 2 * 20]));
    let sent = [0, 1].map(|rank| Buffer::from_slice(rank, &words));
    let received = [0, 1].map(|rank| Buffer::<u32>::new(rank, words.len()));
    for rank in 0..2 {
        let argument = Exchange {
            slabs: [slabs[0].address(), slabs[1].address()],
            sent: sent[rank].address(),
            received: received[rank].address(),
            num_packs: num_packs as u32,
            rank: rank as u32,
        };
        Launch::new("exchange_packs", rank, 1, 256).start(&argument);
    }
    emulator::synchronize()?;
    for received in received {
        let received = received.read();
        if let Some(at) = received.iter().zip(&words).position(|(a, b)| a != b) {
            return Err(format!("word {at}: {:08x} of {:08x}", received[at], words[at]));
        }
    }
    Ok(())
}

#[test]
fn packs_arrive_bit_for_bit() {
    let _machine = emulator::exclusive();
    emulator::install();
    for seed in emulator::seeds(8) {
        packs_bit_for_bit(seed, None).unwrap_or_else(|seen| panic!("EMU_SEED={seed}: {seen}"));
    }
    let seen = packs_bit_for_bit(0, Some("escapes not undone")).expect_err("the control");
    assert!(seen.contains("fffffffe of ffffffff"), "{seen}");
}

#[test]
fn lost_and_odd_peers_are_named() {
    let _machine = emulator::exclusive();
    let everywhere = [
        Odd::NeverCalls,
        Odd::CallsWithRows(1),
        Odd::CallsWithRows(6),
        Odd::Stops("rank 1 stops before its partials"),
        Odd::Stops("rank 1 stops towards rank 0"),
    ];
    let with_owners = [Odd::Stops("rank 1 stops before its results")];
    let with_islands =
        ["rank 1 stops before its island's sum", "rank 1 stops within its island's sum"].map(Odd::Stops);
    for world in [WorldSize::Two, WorldSize::Four, WorldSize::Eight] {
        for &algorithm in algorithms(world) {
            let mut odds = everywhere.to_vec();
            if algorithm != Algorithm::OneShot {
                odds.extend(with_owners);
            }
            if algorithm == Algorithm::Hierarchical {
                odds.extend(with_islands);
            }
            for odd in odds {
                for seed in emulator::seeds(4) {
                    is_named(world, algorithm, odd, seed);
                }
            }
        }
    }
}

/// After a fault replays that nobody watches end at once with NaN; and so does the call of the rank that was
/// late, though all that it needs is there.
fn calls_after_a_fault(mutant: Option<&'static str>) -> Result<(), String> {
    let world = WorldSize::Two;
    emulator::configure(&emulator::Config { mutant, ..emulator::Config::checked(5) });
    let config = GroupConfig { time_limit: Duration::from_secs(2), ..config(64, 4, None) };
    let mut ranks = OnEmulator::spread(world).form::<bf16>(world, config);
    let payload = Payload::<bf16>::random(2, 4, 64, 1);
    let mut late = Buffers::<OnEmulator, bf16>::new(&ranks[1].0, &payload, 1, NORM);
    let (cuda, group) = &mut ranks[0];
    let mut buffers = Buffers::<OnEmulator, bf16>::new(cuda, &payload, 0, NORM);
    let mut graph = cuda.capture(|| buffers.call(group)).unwrap();
    // SAFETY: buffers and group live on.
    unsafe { graph.launch() }.unwrap();
    cuda.synchronize().unwrap();
    group.check().expect_err("rank 1 has not called");
    let jumps = emulator::report().stats.num_clock_jumps;
    cuda.write(&mut buffers.residual, &payload.residual).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch() }.unwrap();
    cuda.synchronize().unwrap();
    assert_eq!(emulator::report().stats.num_clock_jumps, jumps, "nobody waited");
    assert_nan(&buffers.outcome(cuda), "the replay");
    let (cuda, group) = &mut ranks[1];
    late.call(group).unwrap();
    cuda.synchronize().unwrap();
    if late.outcome(cuda) == specified(&payload, NORM) {
        return Err("an answer from a group that is lost".into());
    }
    assert_nan(&late.outcome(cuda), "the late call");
    group.check().expect_err("the group is lost");
    Ok(())
}

#[test]
fn calls_after_a_fault_are_nan() {
    let _machine = emulator::exclusive();
    calls_after_a_fault(None).unwrap();
    calls_after_a_fault(Some("abort ignored on entry")).expect_err("the control");
}

/// Infinities, NaNs and sums that overflow, in every place, through every epilogue.
#[test]
fn special_values_equal_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    fn check<T: Element>(world: WorldSize) {
        let calls: Vec<_> = EPILOGUES
            .iter()
            .enumerate()
            .map(|(i, epilogue)| {
                let mut payload = Payload::<T>::random(world.get(), 3, 128, i as u64);
                let mut random = Lcg(i as u64);
                let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3e38, -3e38, 60_000.0, 1e-40];
                let mut spoil = |values: &mut [T], one_in: usize| {
                    for value in values {
                        if random.below(one_in) == 0 {
                            *value = T::from_f32(special[random.below(special.len())]);
                        }
                    }
                };
                payload.partials.iter_mut().for_each(|partial| spoil(&mut partial[128..], 40)); // row 0 stays
                spoil(&mut payload.residual[256..], 20);
                spoil(&mut payload.weight, 30);
                (payload, *epilogue)
            })
            .collect();
        check_calls(&OnEmulator::spread(world), world, config(128, 3, None), &calls);
    }
    for world in WORLDS {
        check::<bf16>(world);
        check::<f16>(world);
    }
}

#[test]
fn misuse_is_an_error_before_anything_is_launched() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let mut ranks = OnEmulator::spread(WorldSize::One).form::<bf16>(WorldSize::One, GroupConfig::new(64, 4));
    let (cuda, group) = &mut ranks[0];
    let norm = RmsNorm::new(64, 1e-5).unwrap();
    let ones = vec![bf16::ONE; 256];
    let partial = cuda.upload(&ones).unwrap();
    let weight = cuda.upload(&ones[..64]).unwrap();
    let (residual, mut output) = (cuda.upload(&ones).unwrap(), cuda.upload(&ones).unwrap());
    let before = emulator::report().stats;

    // SAFETY: addresses of live buffers of `cuda`, or calls that must fail.
    let raw = |address, len| unsafe { DeviceSliceMut::<bf16>::from_raw(cuda, address, len) };
    let at = residual.address();
    let mut fails = |residual: DeviceSliceMut<'_, bf16>, output: DeviceSliceMut<'_, bf16>, why: &str| {
        let outputs = NormOutputs { output: Some(output), quantized: None };
        let error = group.reduce_add_norm(&norm, partial.slice(), residual, weight.slice(), outputs);
        let error = error.expect_err(why);
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{error}");
    };
    fails(raw(at, 256), raw(at, 256), "overlap");
    fails(raw(at, 256), raw(at + 256, 256), "overlap");
    fails(raw(at + 2, 256), output.slice_mut(), "multiple of 16");
    fails(raw(0, 256), output.slice_mut(), "multiple of 16");
    fails(raw(at, 128), output.slice_mut(), "residual");
    let other = Cuda::with_kernels(0, &[("emulated", emulator::IMAGE)]).unwrap();
    let mut elsewhere = other.upload(&ones).unwrap();
    fails(elsewhere.slice_mut(), output.slice_mut(), "`Cuda` that joined");
    let outputs = NormOutputs { output: Some(output.slice_mut()), quantized: None };
    let too_many = cuda.upload(&vec![bf16::ONE; 320]).unwrap();
    let mut rest = cuda.upload(&vec![bf16::ONE; 320]).unwrap();
    let error = group.reduce_add_norm(&norm, too_many.slice(), rest.slice_mut(), weight.slice(), outputs);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(emulator::report().stats.num_plain_accesses, before.num_plain_accesses, "nothing ran");
    assert_eq!(cuda.download(&residual).unwrap(), ones);
}

#[test]
fn devices_and_kernels_that_are_not_there_are_errors() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    emulator::install();
    let error = Cuda::with_kernels(99, &[("emulated", emulator::IMAGE)]).unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("99"), "{error}");
    let error = Cuda::with_kernels(0, &[("bad", b"not an image")]).unwrap_err();
    assert!(error.to_string().contains("cuModuleLoadData on device 0"), "{error}");
    if kernel_images().is_empty() {
        let error = Cuda::new(0).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("nvcc"), "{error}");
    } else {
        Cuda::new(0).unwrap();
    }
}

/// Every instance that Rust can ask for is there: a group of each kind forms.
#[test]
fn every_instance_is_present() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    let mut kernels = emulator::kernels();
    kernels.retain(|name| name.starts_with("ev_all_reduce_norm_"));
    assert_eq!(kernels.len(), 16);
    for world in WORLDS {
        for &algorithm in algorithms(world) {
            OnEmulator::spread(world).form::<bf16>(world, config(64, 1, Some(algorithm)));
            OnEmulator::together(world).form::<f16>(world, config(64, 1, Some(algorithm)));
        }
    }
}

#[test]
fn groups_that_cannot_form_are_errors_on_all_ranks() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    let join = |cudas: Vec<Cuda>, limit: Duration| -> Vec<eagle_verify::Error> {
        let rendezvous = Rendezvous::new(WorldSize::Two, limit);
        std::thread::scope(|scope| {
            let joining: Vec<_> = cudas
                .iter()
                .zip(WorldSize::Two.ranks())
                .map(|(cuda, rank)| {
                    let rendezvous = &rendezvous;
                    let config = GroupConfig::new(64, 1);
                    scope
                        .spawn(move || Group::<Cuda, bf16>::join(cuda, rendezvous, rank, config).unwrap_err())
                })
                .collect();
            joining.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let machine = OnEmulator::spread(WorldSize::Two);
    let seen = join(vec![machine.backend(0)], Duration::from_millis(100));
    assert!(seen[0].to_string().contains("no sign of rank 1"), "{seen:?}");
    // One stream for two ranks: the second's kernel could not start before the first's ends.
    let cuda = machine.backend(0);
    let seen = join(vec![cuda.clone(), cuda], Duration::from_secs(20));
    assert!(seen.iter().all(|error| error.kind() == ErrorKind::Misuse), "{seen:?}");
}

/// The meeting place does not keep the ranks' memory.
#[test]
fn a_rendezvous_that_lives_on_holds_nothing() {
    let _machine = emulator::exclusive();
    emulator::configure(&results_only());
    let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(20));
    std::thread::scope(|scope| {
        for rank in WorldSize::Two.ranks() {
            let rendezvous = &rendezvous;
            scope.spawn(move || {
                let cuda = OnEmulator::spread(WorldSize::Two).backend(rank.index());
                Group::<Cuda, bf16>::join(&cuda, rendezvous, rank, GroupConfig::new(64, 1)).unwrap()
            });
        }
    });
    let report = emulator::report();
    let left = (report.num_allocations, report.num_host_allocations, report.num_streams, report.num_modules);
    assert_eq!(left, (0, 0, 0, 0));
    drop(rendezvous);
}

/// An engine's stream, memory and capture.
#[test]
fn the_engine_s_stream_and_memory() {
    use cudarc::driver::result;
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(3));
    let images: &[(&str, &[u8])] = &[("emulated", emulator::IMAGE)];
    let engine = OnEmulator::spread(WorldSize::One).backend(0);
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    // SAFETY: the stream is of device 0 and is destroyed at the end.
    let cuda = unsafe { Cuda::on_stream(0, images, stream.cast()) }.unwrap();
    let payload = Payload::<bf16>::random(1, 3, 64, 1);
    let whole = cuda.upload(&[payload.partials[0].clone(), payload.residual.clone()].concat()).unwrap();
    let weight = cuda.upload(&payload.weight).unwrap();
    let mut output = cuda.alloc::<bf16>(3 * 64).unwrap();
    assert!(engine.download(&whole).is_err(), "another stream's buffer");
    assert!(whole.slice().get(1..whole.len() + 1).is_err());
    assert!(cuda.alloc::<u64>(usize::MAX / 4).is_err());
    let rendezvous = Rendezvous::new(WorldSize::One, Duration::from_secs(20));
    let rank = WorldSize::One.ranks().next().unwrap();
    let mut group = Group::join(&cuda, &rendezvous, rank, GroupConfig::new(64, 3)).unwrap();
    // A panic in the closure ends the capture.
    let queue = std::panic::AssertUnwindSafe(|| cuda.capture(|| panic!("on purpose")));
    assert!(std::panic::catch_unwind(queue).is_err());
    cuda.synchronize().unwrap();
    assert!(cuda.capture(|| Err(eagle_verify::RmsNorm::new(1, 1.0).unwrap_err())).is_err());
    let at = whole.address() + 3 * 64 * 2;
    let mut graph = cuda
        .capture(|| {
            // SAFETY: the second half of `whole`, on the stream of `cuda`, read by nobody else.
            let residual = unsafe { DeviceSliceMut::from_raw(&cuda, at, 3 * 64) };
            let outputs = NormOutputs { output: Some(output.slice_mut()), quantized: None };
            let partial = whole.slice().get(0..3 * 64)?;
            group.reduce_add_norm(&norm(64, NORM), partial, residual, weight.slice(), outputs)
        })
        .unwrap();
    // SAFETY: all memory and the group live on.
    unsafe { graph.launch() }.unwrap();
    let want = specified(&payload, NORM);
    assert_eq!(bytemuck::cast_slice::<_, u16>(&cuda.download(&output).unwrap()), want.output);
    assert_eq!(bytemuck::cast_slice::<_, u16>(&cuda.download(&whole).unwrap()[3 * 64..]), want.residual);
    group.check().unwrap();
    drop((graph, group, whole, weight, output, cuda));
    // SAFETY: made above, used by nobody any more.
    unsafe { result::stream::destroy(stream) }.unwrap();
    assert_eq!(emulator::report().complaint(), None);
}
