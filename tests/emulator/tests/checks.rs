//! What the emulator reports, each with a control that shows when it does not.

use std::time::Instant;

use cuda_emulator::{
    Buffer, Config, Launch, configure, exclusive, kernels, override_grid, report, seeds, synchronize,
};

/// The tests of `kernels/checks.cu`, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    SharedRace,
    SharedBarrier,
    OutOfBounds,
    Read,
    Misaligned,
    WideStoreAndLoad,
    WaitForAllBlocks,
    LaneOutsideMask,
    LanesMissing,
    BarrierKinds,
    WaitForever,
    Publish,
    PublishGpu,
    PushUnfenced,
    PushFenced,
    BoundedWait,
    Collectives,
    StrongLoop,
    PlainLoop,
    Trap,
    AtomicWait,
    Conversions,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Check {
    a: u64,
    b: u64,
    result: u64,
    limit: u64,
    test: i32,
    role: i32,
}

/// Launches of one test, with buffers of zeros on device 0.
struct Subject {
    test: Test,
    a: Buffer<u32>,
    b: Buffer<u32>,
    result: Buffer<u32>,
    limit: u64,
}

impl Subject {
    fn new(test: Test, config: &Config) -> Self {
        configure(config);
        let zeros = |n| Buffer::from_slice(0, &vec![0u32; n]);
        Self { test, a: zeros(4), b: zeros(4), result: zeros(256), limit: 0 }
    }

    fn start(&self, device: usize, role: i32, grid: u32, block: u32) -> &Self {
        let argument = Check {
            a: self.a.address(),
            b: self.b.address(),
            result: self.result.address(),
            limit: self.limit,
            test: self.test as i32,
            role,
        };
        Launch::new("check", device, grid, block).start(&argument);
        self
    }
}

/// One launch on device 0.
fn run(test: Test, config: &Config, grid: u32, block: u32) -> Result<(), String> {
    let subject = Subject::new(test, config);
    subject.start(0, 0, grid, block);
    synchronize()
}

/// Role 0 on device 0 and role 1 on device 1. Gives what role 1 wrote.
fn run_two(test: Test, config: &Config) -> Result<Vec<u32>, String> {
    let subject = Subject::new(test, config);
    subject.start(0, 0, 1, 1).start(1, 1, 1, 1);
    synchronize().map(|()| subject.result.read())
}

fn assert_reports(result: Result<(), String>, wanted: &[&str]) {
    let error = result.expect_err("nothing was reported");
    for part in wanted {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let _machine = exclusive();
    for seed in seeds(10) {
        let result = run(Test::SharedRace, &Config::checked(seed), 1, 64);
        let error = result.expect_err("no barrier");
        assert!(error.contains("shared memory of device 0"), "{error}");
        assert!(error.starts_with("race at ") || error.starts_with("uninitialised read"), "{error}");
        assert_eq!(run(Test::SharedBarrier, &Config::checked(seed), 1, 64), Ok(()), "seed {seed}");
    }
}

#[test]
fn bad_accesses_are_reported() {
    let _machine = exclusive();
    let config = Config::checked(1);
    assert_reports(
        run(Test::OutOfBounds, &config, 1, 1),
        &["out-of-bounds 4-byte plain read at offset 16 of a 16-byte", "check device 0 block 0 thread 0"],
    );
    assert_reports(run(Test::Misaligned, &config, 1, 1), &["misaligned strong load of 8 bytes at offset 4"]);
    assert_eq!(run(Test::Read, &config, 1, 1), Ok(()));

    let mut unwritten = Subject::new(Test::Read, &config);
    unwritten.a = Buffer::new(0, 4);
    unwritten.start(0, 0, 1, 1);
    assert_reports(synchronize(), &["uninitialised read: 4-byte plain read at offset 0"]);

    let mut freed = Subject::new(Test::Read, &config);
    freed.start(0, 0, 1, 1);
    std::mem::replace(&mut freed.a, Buffer::new(0, 4)).free();
    assert_reports(synchronize(), &["use after free", "offset 0 of a 16-byte allocation of device memory"]);

    assert_reports(run(Test::Trap, &config, 1, 1), &["trap: __trap() in check device 0 block 0 thread 0"]);
}

#[test]
fn fresh_memory_is_poison() {
    let _machine = exclusive();
    configure(&Config::fast());
    assert_eq!(Buffer::<u8>::new(3, 100).read(), [0xFF; 100]);
}

#[test]
fn wide_accesses_tear_only_when_told_to() {
    let _machine = exclusive();
    let torn = |torn| {
        let is_mixed = |seed| {
            let result = run_two(Test::WideStoreAndLoad, &Config { torn, ..Config::checked(seed) });
            let words = result.expect("both accesses are strong");
            words[..4].iter().any(|&word| word != words[0])
        };
        seeds(300).filter(|&seed| is_mixed(seed)).count()
    };
    assert!(torn(true) > 0);
    assert_eq!(torn(false), 0);
}

#[test]
fn blocks_that_wait_for_blocks_without_room_deadlock() {
    let _machine = exclusive();
    for seed in seeds(10) {
        let with_room = |max_resident_blocks| {
            let config = Config { max_resident_blocks, ..Config::checked(seed) };
            run(Test::WaitForAllBlocks, &config, 3, 1)
        };
        assert_eq!(with_room(3), Ok(()), "seed {seed}");
        let wanted = ["deadlock", "load at offset 0 of", "1 blocks of check on device 0 wait for room"];
        assert_reports(with_room(2), &wanted);
    }
    configure(&Config::fast());
    let subject = Subject::new(Test::WaitForAllBlocks, &Config::fast());
    override_grid(Some(0), 2);
    subject.start(0, 0, 3, 1);
    assert_eq!(synchronize(), Ok(()));
    assert_eq!(report().stats.num_blocks, 2, "the override replaces the grid");
}

#[test]
fn collectives_met_by_the_wrong_threads_are_reported() {
    let _machine = exclusive();
    for config in [Config::checked(1), Config::fast()] {
        assert_reports(
            run(Test::LaneOutsideMask, &config, 1, 32),
            &["a lane is not in its own mask", "thread 31"],
        );
        assert_reports(
            run(Test::LanesMissing, &config, 1, 32),
            &["deadlock", "31 threads", "a warp collective"],
        );
        assert_reports(run(Test::BarrierKinds, &config, 1, 64), &["barrier divergence"]);
    }
}

#[test]
fn collectives_give_what_cuda_gives() {
    let _machine = exclusive();
    for config in [Config::checked(5), Config::fast()] {
        let subject = Subject::new(Test::Collectives, &config);
        subject.start(0, 0, 1, 32);
        assert_eq!(synchronize(), Ok(()));
        for (t, got) in subject.result.read().chunks(8).enumerate() {
            let t = t as u32;
            let down = if t + 2 < 32 { t + 2 } else { t };
            let every_third = (0..32).filter(|t| t % 3 == 0).map(|t| 1u32 << t).sum();
            let wanted = [496, t.saturating_sub(1), down, t / 8 * 8 + 3, every_third, 31, 16, 1];
            assert_eq!(got, wanted, "lane {t}");
        }
    }
}

#[test]
fn a_deadlock_says_who_waits_where() {
    let _machine = exclusive();
    for config in [Config::checked(2), Config::fast()] {
        let wanted =
            ["deadlock:", "3 threads of check device 0 block 1", "load at offset 0 of a 16-byte allocation"];
        assert_reports(run(Test::WaitForever, &config, 2, 3), &wanted);
    }
}

#[test]
fn a_wait_by_atomics_ends_or_is_a_deadlock() {
    let _machine = exclusive();
    for config in [Config::checked(2), Config::checked(3), Config::fast()] {
        assert!(run_two(Test::AtomicWait, &config).is_ok());
        assert_reports(run(Test::AtomicWait, &config, 1, 2), &["deadlock", "2 threads of check device 0"]);
    }
}

/// A small float format: its finite values by code, and what becomes of the rest.
struct Format {
    name: &'static str,
    exponent_bits: u32,
    mantissa_bits: u32,
    largest_code: u32,
    overflow_code: u32,
    nan_code: u32,
}

impl Format {
    fn value(&self, code: u32) -> f64 {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        let mantissa =
            f64::from(code & ((1 << self.mantissa_bits) - 1)) / f64::from(1u32 << self.mantissa_bits);
        match (code >> self.mantissa_bits) as i32 {
            0 => mantissa * 2f64.powi(1 - bias),
            exponent => (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    }

    /// The code nearest to a float, by bisection over the codes; of two equally near ones, the even.
    fn nearest(&self, f: f32) -> u32 {
        let sign = u32::from(f.is_sign_negative()) << (self.exponent_bits + self.mantissa_bits);
        let magnitude = f64::from(f.abs());
        if f.is_nan() {
            return self.nan_code;
        }
        let (mut below, mut above) = (0, self.largest_code + 1);
        while above - below > 1 {
            let middle = (below + above) / 2;
            *(if self.value(middle) <= magnitude { &mut below } else { &mut above }) = middle;
        }
        let half_way = (self.value(below) + self.value(below + 1)) / 2.0;
        let is_up = magnitude > half_way || (magnitude == half_way && below % 2 == 1);
        let code = below + u32::from(is_up);
        sign | if code > self.largest_code { self.overflow_code } else { code }
    }
}

#[test]
fn small_floats_round_to_the_nearest_even() {
    let _machine = exclusive();
    let format = |name, exponent_bits, mantissa_bits, largest_code, overflow_code, nan_code| Format {
        name,
        exponent_bits,
        mantissa_bits,
        largest_code,
        overflow_code,
        nan_code,
    };
    let formats = [
        format("bf16", 8, 7, 0x7F7F, 0x7F80, 0x7FFF),
        format("half", 5, 10, 0x7BFF, 0x7C00, 0x7FFF),
        format("e4m3", 4, 3, 0x7E, 0x7E, 0x7F),
    ];
    let special =
        [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 464.0, 448.0, 465.0];
    let mut floats: Vec<u32> = special.map(f32::to_bits).to_vec();
    // Around every value and every half-way point of the formats, and all over the range.
    for format in &formats {
        for code in (0..format.largest_code).step_by(if format.largest_code > 1000 { 37 } else { 1 }) {
            for point in [format.value(code), (format.value(code) + format.value(code + 1)) / 2.0] {
                let bits = (point as f32).to_bits();
                floats.extend([bits.saturating_sub(1), bits, bits + 1, bits | 1 << 31]);
            }
        }
    }
    floats.extend((0..20_000u32).map(|i| i.wrapping_mul(0x9E37_79B9)));
    let mut subject = Subject::new(Test::Conversions, &Config::fast());
    subject.a = Buffer::from_slice(0, &floats);
    subject.b = Buffer::new(0, 6 * floats.len());
    subject.limit = floats.len() as u64;
    subject.start(0, 0, 1, 32);
    assert_eq!(synchronize(), Ok(()));
    for (&bits, got) in floats.iter().zip(subject.b.read().chunks(6)) {
        let f = f32::from_bits(bits);
        for (i, format) in formats.iter().enumerate() {
            assert_eq!(got[i], format.nearest(f), "{} of {f:e} ({bits:#x})", format.name);
            let magnitude = got[i] & !(1 << (format.exponent_bits + format.mantissa_bits));
            if magnitude <= format.largest_code {
                let back = f64::from(f32::from_bits(got[3 + i]));
                assert_eq!(back.abs(), format.value(magnitude), "{} {:#x}", format.name, got[i]);
            }
        }
    }
}

#[test]
fn a_scope_that_is_too_narrow_is_reported() {
    let _machine = exclusive();
    for seed in seeds(10) {
        assert_eq!(run_two(Test::Publish, &Config::checked(seed)).map(|r| r[0]), Ok(1));
        let error = run_two(Test::PublishGpu, &Config::checked(seed)).expect_err("gpu scope between devices");
        assert!(error.contains("race at "), "{error}");
        let near = Subject::new(Test::PublishGpu, &Config::checked(seed));
        near.start(0, 0, 1, 1);
        let argument = Check {
            a: near.a.address(),
            b: near.b.address(),
            result: near.result.address(),
            limit: 0,
            test: Test::PublishGpu as i32,
            role: 1,
        };
        Launch { stream: 1, ..Launch::new("check", 0, 1, 1) }.start(&argument);
        assert_eq!(synchronize(), Ok(()), "seed {seed}: two ranks on one device");
    }
}

#[test]
fn a_push_is_late_without_a_fence_and_never_with_one() {
    let _machine = exclusive();
    let late = |test| {
        let is_late = |seed| {
            let result = run_two(test, &Config { races: false, ..Config::checked(seed) });
            result.expect("values only")[0] == 0
        };
        seeds(300).filter(|&seed| is_late(seed)).count()
    };
    assert!(late(Test::PushUnfenced) > 0);
    assert_eq!(late(Test::PushFenced), 0);
    let races = |test| run_two(test, &Config::checked(1)).is_err();
    assert!(races(Test::PushUnfenced) && !races(Test::PushFenced));
}

#[test]
fn a_wait_with_a_deadline_ends() {
    let _machine = exclusive();
    const TEN_SECONDS: u64 = 10_000_000_000;
    for config in [Config::checked(1), Config::checked(2), Config::fast()] {
        let mut subject = Subject::new(Test::BoundedWait, &config);
        subject.limit = TEN_SECONDS;
        subject.start(0, 0, 2, 32);
        assert_eq!(synchronize(), Ok(()));
        assert_eq!(subject.result.read()[0], 0xFA017, "the record of the fault");
        assert!((100..110).contains(&report().stats.num_clock_jumps), "{:?}", report().stats);
    }
}

#[test]
fn stores_that_end_the_wait_come_before_its_deadline() {
    let _machine = exclusive();
    for seed in seeds(20) {
        let mut subject = Subject::new(Test::BoundedWait, &Config::checked(seed));
        subject.limit = 1_000_000_000;
        subject.a.write(&[1]);
        subject.start(0, 0, 1, 32);
        assert_eq!(synchronize(), Ok(()));
        assert_eq!((subject.result.read()[0], report().stats.num_clock_jumps), (0, 0));
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    let _machine = exclusive();
    let run = |test, seed| (run(test, &Config::checked(seed), 1, 32), report());
    for seed in seeds(10) {
        for test in [Test::SharedRace, Test::Collectives, Test::WaitForever] {
            assert_eq!(run(test, seed), run(test, seed), "{test:?}, seed {seed}");
        }
    }
    assert_ne!(run(Test::Collectives, 1).1.stats, run(Test::Collectives, 4).1.stats);
}

#[test]
fn many_runs_do_not_grow() {
    let _machine = exclusive();
    let start = Instant::now();
    for seed in 0..2000 {
        assert_eq!(run(Test::SharedBarrier, &Config::checked(seed), 1, 32), Ok(()));
    }
    println!("{:.0} us for a small run", start.elapsed().as_secs_f64() * 1e6 / 2000.0);
    assert_eq!(report().num_allocations, 0);
}

#[test]
fn ten_thousand_threads_fit() {
    let _machine = exclusive();
    let start = Instant::now();
    assert_eq!(run(Test::SharedBarrier, &Config { weak: false, ..Config::checked(1) }, 1, 64), Ok(()));
    let subject = Subject::new(Test::WaitForAllBlocks, &Config::checked(3));
    for device in 0..8 {
        subject.start(device, 0, 5, 256);
    }
    // Each launch adds its threads at gpu scope: between devices that is a race, but here the size counts.
    assert!(synchronize().is_err());
    println!("10240 threads: {:?}", start.elapsed());
}

#[test]
fn what_an_access_costs() {
    let _machine = exclusive();
    for (name, config) in [("fast", Config::fast()), ("checked", Config::checked(1))] {
        for (test, per_round) in [(Test::StrongLoop, 2), (Test::PlainLoop, 3)] {
            let mut subject = Subject::new(test, &config);
            subject.limit = if name == "fast" { 1_000_000 } else { 50_000 };
            subject.start(0, 0, 1, 1);
            let start = Instant::now();
            assert_eq!(synchronize(), Ok(()));
            let each = start.elapsed().as_secs_f64() * 1e9 / (subject.limit * per_round) as f64;
            println!("{name} {test:?}: {each:.1} ns for an access");
        }
    }
}

#[test]
fn kernels_are_listed() {
    let kernels = kernels();
    assert!(["litmus", "check", "flag_all_reduce_push"].iter().all(|k| kernels.iter().any(|name| name == k)));
}
