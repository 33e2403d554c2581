//! The harness on a subject of its own, a small all-reduce with flags: the right kernel passes under every
//! seed, and each mutant is caught.

use cuda_emulator::{Buffer, Config, Launch, MUTANTS, configure, exclusive, report, seeds, synchronize};

#[repr(C)]
#[derive(Clone, Copy)]
struct FlagAllReduce {
    input: u64,
    output: u64,
    exchange: [u64; 8],
    flags: [u64; 8],
    epochs: u64,
    rank: i32,
    num_ranks: i32,
    num_elements: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Push,
    Pull,
}

const NUM_RANKS: usize = 3;
const NUM_BLOCKS: usize = 2;
const NUM_THREADS: u32 = 32;
const NUM_ELEMENTS: usize = 80;
const NUM_CALLS: usize = 4;

fn input(call: usize, rank: usize) -> Vec<f32> {
    (0..NUM_ELEMENTS).map(|i| ((call * 31 + rank * 7 + i) % 64) as f32).collect()
}

/// All calls back to back, as CUDA streams would run them.
fn run(protocol: Protocol, config: &Config) -> Result<(), String> {
    configure(config);
    let exchange: [_; NUM_RANKS] =
        std::array::from_fn(|r| Buffer::<f32>::new(r, 2 * NUM_RANKS * NUM_ELEMENTS));
    let flags: [_; NUM_RANKS] =
        std::array::from_fn(|r| Buffer::from_slice(r, &[0u32; NUM_RANKS * NUM_BLOCKS]));
    let epochs: [_; NUM_RANKS] = std::array::from_fn(|r| Buffer::from_slice(r, &[0u32; NUM_BLOCKS]));
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    let kernel = match protocol {
        Protocol::Push => "flag_all_reduce_push",
        Protocol::Pull => "flag_all_reduce_pull",
    };
    for call in 0..NUM_CALLS {
        for (rank, epochs) in epochs.iter().enumerate() {
            let x = Buffer::from_slice(rank, &input(call, rank));
            let y = Buffer::<f32>::new(rank, NUM_ELEMENTS);
            let mut argument = FlagAllReduce {
                input: x.address(),
                output: y.address(),
                exchange: [0; 8],
                flags: [0; 8],
                epochs: epochs.address(),
                rank: rank as i32,
                num_ranks: NUM_RANKS as i32,
                num_elements: NUM_ELEMENTS as i32,
            };
            for r in 0..NUM_RANKS {
                argument.exchange[r] = exchange[r].address();
                argument.flags[r] = flags[r].address();
            }
            Launch::new(kernel, rank, NUM_BLOCKS as u32, NUM_THREADS).start(&argument);
            inputs.push(x);
            outputs.push((call, rank, y));
        }
    }
    synchronize()?;
    for (call, rank, output) in &outputs {
        let sum = |i: usize| (0..NUM_RANKS).map(|r| input(*call, r)[i]).sum::<f32>();
        for (i, got) in output.read().into_iter().enumerate() {
            if got != sum(i) {
                return Err(format!("call {call} rank {rank} element {i}: {got} instead of {}", sum(i)));
            }
        }
    }
    Ok(())
}

/// Whether some seed shows the mutant; stops at the first.
fn is_caught(protocol: Protocol, config: impl Fn(u64) -> Config) -> Option<(u64, String)> {
    seeds(60).find_map(|seed| run(protocol, &config(seed)).err().map(|error| (seed, error)))
}

#[test]
fn the_right_kernel_is_clean() {
    let _machine = exclusive();
    for protocol in [Protocol::Push, Protocol::Pull] {
        for seed in seeds(60) {
            for torn in [false, true] {
                let result = run(protocol, &Config { torn, ..Config::checked(seed) });
                assert_eq!(result, Ok(()), "{protocol:?}, seed {seed}, torn {torn}");
            }
        }
        assert_eq!(run(protocol, &Config::fast()), Ok(()), "{protocol:?}, fast");
    }
}

#[test]
fn every_mutant_is_caught() {
    let _machine = exclusive();
    let mut num_caught = 0;
    for mutant in MUTANTS.iter().filter(|mutant| mutant.file == "flag_all_reduce.cu") {
        let protocol = match mutant.name {
            "flags: readers leave early" => Protocol::Pull,
            _ => Protocol::Push,
        };
        let caught =
            is_caught(protocol, |seed| Config { mutant: Some(mutant.name), ..Config::checked(seed) });
        let Some((seed, error)) = caught else { panic!("no seed shows the mutant `{}`", mutant.name) };
        println!("{:40} seed {seed}: {}", mutant.name, error.lines().next().unwrap_or_default());
        num_caught += 1;
    }
    assert_eq!(num_caught, 7);
}

/// A fence that is missing shows as a wrong value, too, and not only to whoever looks for races.
#[test]
fn values_show_the_mutants_of_order() {
    let _machine = exclusive();
    for name in ["flags: published without release", "flags: one buffer only"] {
        let config = |seed| Config { mutant: Some(name), races: false, ..Config::checked(seed) };
        let (seed, error) =
            is_caught(Protocol::Push, config).unwrap_or_else(|| panic!("no seed shows `{name}`"));
        println!("{name:40} seed {seed}: {error}");
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    let _machine = exclusive();
    for seed in seeds(5) {
        let twice = [(); 2].map(|()| (run(Protocol::Push, &Config::checked(seed)), report()));
        assert_eq!(twice[0], twice[1], "seed {seed}");
    }
    let broken = |seed| Config { mutant: Some("flags: no barrier after waiting"), ..Config::checked(seed) };
    let twice = [(); 2].map(|()| (run(Protocol::Push, &broken(3)), report()));
    assert_eq!(twice[0], twice[1]);
    assert!(!twice[0].1.is_clean());
}
