//! The kernel that chooses tokens, executed in the emulator through the real CUDA backend, against its
//! specification: keys and errors, bit for bit.
#![cfg(feature = "cuda")]

use std::ops::Range;

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{ChooseRow, Chooser, ChooserConfig, Cuda, DeviceSlice, Logit};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams, gumbel};
use eagle_verify::{Element, ErrorKind, TokenId};
use half::{bf16, f16};

mod common;
#[path = "common/device.rs"]
mod device;
use common::toy::Numbers;
use device::{catch_mutants, device, held};

/// Logits of a type, and what they are in f32.
trait Dtype: Logit {
    fn round(value: f32) -> Self;
    fn exact(self) -> f32;
}

impl Dtype for f32 {
    fn round(value: f32) -> Self {
        value
    }
    fn exact(self) -> f32 {
        self
    }
}

impl Dtype for bf16 {
    fn round(value: f32) -> Self {
        Element::from_f32(value)
    }
    fn exact(self) -> f32 {
        self.to_f32()
    }
}

impl Dtype for f16 {
    fn round(value: f32) -> Self {
        Element::from_f32(value)
    }
    fn exact(self) -> f32 {
        self.to_f32()
    }
}

struct Random(Numbers);

impl Random {
    fn new(seed: u64) -> Self {
        Self(Numbers::new(seed))
    }

    fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn tokens(&mut self, max: usize, vocab: usize) -> Vec<TokenId> {
        // A few are beyond the vocabulary, and many come again.
        (0..self.below(max + 1)).map(|_| TokenId(self.below(vocab + 3) as u32 / 2)).collect()
    }
}

#[derive(Clone)]
struct Row {
    logits: Vec<f32>,
    sampler: Sampler,
    position: u32,
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
    path: Vec<TokenId>,
    allowed: Option<Vec<u32>>,
}

impl Row {
    fn plain(logits: Vec<f32>, params: SamplingParams) -> Self {
        let sampler = Sampler::new(params).unwrap();
        Self { logits, sampler, position: 7, prompt: vec![], output: vec![], path: vec![], allowed: None }
    }

    fn context(&self) -> SamplingContext<'_> {
        SamplingContext {
            position: self.position,
            prompt: &self.prompt,
            output: &self.output,
            path: &self.path,
            allowed: self.allowed.as_deref(),
        }
    }

    fn rounded<T: Dtype>(&self) -> impl Iterator<Item = T> {
        self.logits.iter().map(|logit| T::round(*logit))
    }

    fn specified<T: Dtype>(&self) -> Result<ChoiceKey, String> {
        let logits: Vec<f32> = self.rounded::<T>().map(T::exact).collect();
        self.sampler.choose(&logits, self.context()).map_err(|error| error.to_string())
    }
}

/// A row of numbers of all kinds, with parameters of all kinds.
fn random_row(random: &mut Random, vocab: usize) -> Row {
    let kind = random.below(8);
    let scale = random.pick(&[0.01, 1.0, 4.0, 12.0]);
    let logits = (0..vocab).map(|_| match kind {
        0 => random.below(12) as f32 - 6.0, // many ties
        1 => {
            let special = [f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, 3e38, -3e38, 1e-40, 1e-3];
            if random.one_in(6) { random.pick(&special) } else { random.between(-9.0, 9.0) }
        }
        2 if random.one_in(3) => f32::NEG_INFINITY,
        3 => 1e-40 * random.below(5) as f32,
        _ => scale * (random.unit() + random.unit() + random.unit() - 1.5),
    });
    let logits = logits.collect();
    let has_penalty = random.one_in(3);
    let params = SamplingParams {
        temperature: match random.below(8) {
            0 => 0.0,
            1 => 1e-6,
            2 => 1e6,
            3 => 1.0,
            _ => random.between(0.3, 1.5),
        },
        top_k: if random.one_in(2) { random.below(vocab.min(70) + 2) } else { 0 },
        top_p: if random.one_in(2) { random.between(0.01, 1.0) } else { 1.0 },
        min_p: if random.one_in(3) { random.unit() * random.unit() } else { 0.0 },
        repetition_penalty: if has_penalty { random.between(0.5, 2.0) } else { 1.0 },
        presence_penalty: if has_penalty { random.between(-1.0, 1.0) } else { 0.0 },
        frequency_penalty: if has_penalty { random.between(-1.0, 1.0) } else { 0.0 },
        logit_bias: if random.one_in(4) {
            let tokens = random.tokens(9, vocab);
            tokens.into_iter().map(|token| (token, random.pick(&[1.5, -0.25, f32::NEG_INFINITY]))).collect()
        } else {
            Vec::new()
        },
        seed: random.bits(),
    };
    Row {
        position: random.bits() as u32,
        prompt: random.tokens(20, vocab),
        output: random.tokens(20, vocab),
        path: random.tokens(6, vocab),
        allowed: random.one_in(4).then(|| (0..vocab.div_ceil(32)).map(|_| random.bits() as u32).collect()),
        ..Row::plain(logits, params)
    }
}

/// The keys of `columns`, and the thresholds.
fn choose<T: Dtype>(
    cuda: &Cuda,
    rows: &[Row],
    columns: Range<usize>,
    max_warps: usize,
    thresholds: Option<&[f32]>,
) -> Result<(Vec<ChoiceKey>, Vec<f32>), String> {
    let vocab = rows[0].logits.len();
    let config =
        ChooserConfig { columns: columns.clone(), max_warps, ..ChooserConfig::new(rows.len(), vocab) };
    let mut chooser = Chooser::<T>::new(cuda, config).map_err(|error| error.to_string())?;
    let logits: Vec<T> =
        rows.iter().flat_map(|row| row.rounded::<T>().skip(columns.start).take(columns.len())).collect();
    let logits = cuda.upload(&logits).map_err(|error| error.to_string())?;
    let mut call: Vec<_> = rows.iter().map(|row| ChooseRow::new(&row.sampler, row.context())).collect();
    for (row, threshold) in call.iter_mut().zip(thresholds.unwrap_or_default()) {
        row.threshold = Some(*threshold);
    }
    let keys = chooser.choose(logits.slice(), &call).map(<[_]>::to_vec).map_err(|error| error.to_string());
    match emulator::report().complaint() {
        Some(complaint) => Err(complaint.to_owned()), // says more than the driver's error
        None => Ok((keys?, chooser.thresholds().to_vec())),
    }
}

/// What the keys are that differ from the specification's.
fn differences<T: Dtype>(rows: &[Row], keys: &[ChoiceKey], what: &str) -> Result<(), String> {
    assert_eq!(rows.len(), keys.len());
    for (i, (row, key)) in rows.iter().zip(keys).enumerate() {
        let (seen, want) = (key.checked().map_err(|error| error.to_string()), row.specified::<T>());
        if seen != want {
            return Err(format!(
                "{what}, {}, row {i} of {}: {seen:?}, not {want:?}; vocabulary {}, position {}, {:?}",
                T::NAME,
                rows.len(),
                row.logits.len(),
                row.position,
                row.sampler.params(),
            ));
        }
    }
    Ok(())
}

/// Whole rows against the specification, and the same in `shards` parts.
fn compare<T: Dtype>(cuda: &Cuda, rows: &[Row], max_warps: usize, shards: &[usize]) -> Result<(), String> {
    let vocab = rows[0].logits.len();
    let (keys, thresholds) = choose::<T>(cuda, rows, 0..vocab, max_warps, None)?;
    differences::<T>(rows, &keys, "whole")?;
    for &num in shards.iter().filter(|num| **num <= vocab) {
        let mut combined = vec![ChoiceKey::default(); rows.len()];
        for shard in 0..num {
            let columns = vocab * shard / num..vocab * (shard + 1) / num;
            let (keys, _) = choose::<T>(cuda, rows, columns, max_warps, Some(&thresholds))?;
            combined.iter_mut().zip(keys).for_each(|(all, key)| *all = key.max(*all));
        }
        differences::<T>(rows, &combined, &format!("{num} shards"))?;
    }
    Ok(())
}

/// Rows of every kind in calls of several rows, whole and in shards.
fn random_rows<T: Dtype>(seed: u64, calls: usize, vocabs: &[usize]) -> Result<usize, String> {
    let (cuda, mut random, mut num_rows) = (device(), Random::new(seed), 0);
    for call in 0..calls {
        let vocab = vocabs[call % vocabs.len()];
        let rows: Vec<Row> = (0..1 + random.below(9)).map(|_| random_row(&mut random, vocab)).collect();
        let shards = [random.pick(&[1, 2, 4, 8])];
        compare::<T>(&cuda, &rows, 1 + random.below(3), &shards)?;
        num_rows += rows.len();
    }
    Ok(num_rows)
}

const VOCABS: [usize; 10] = [1, 2, 7, 8, 31, 33, 64, 255, 300, 1000];

fn sampling(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::default() };
    change(&mut params);
    params
}

/// Rows in which something is at its edge, each with every kind of parameters.
fn edges(vocab: usize) -> Vec<Row> {
    let mut random = Random::new(5);
    let mut one_finite = vec![f32::NEG_INFINITY; vocab];
    one_finite[vocab / 2] = -1e30;
    let mut one_nan: Vec<f32> = (0..vocab).map(|_| random.between(-3.0, 3.0)).collect();
    let mut few = one_nan.clone();
    (one_nan[vocab / 3], one_nan[vocab - 1]) = (f32::NAN, f32::NAN);
    few[vocab / 4..].fill(f32::NEG_INFINITY);
    let signs = (0..vocab).map(|i| if i % 3 == 0 { 0.0 } else { -0.0 }).collect();
    let denormal = (0..vocab).map(|i| f32::from_bits(i as u32 % 7)).collect();
    let infinite = (0..vocab).map(|i| if i % 5 == 3 { f32::INFINITY } else { 1.0 }).collect();
    let huge = (0..vocab).map(|i| [f32::MAX, -f32::MAX, 6e4, -6e4][i % 4]).collect();
    let rows = [
        vec![2.5; vocab],
        vec![f32::MAX; vocab],
        vec![f32::NEG_INFINITY; vocab],
        one_finite,
        one_nan,
        few,
        signs,
        denormal,
        infinite,
        huge,
    ];
    let params = [
        sampling(|p| p.temperature = 0.0),
        sampling(|_| {}),
        sampling(|p| p.temperature = 1e-6),
        sampling(|p| p.temperature = 1e6),
        sampling(|p| (p.temperature, p.top_p, p.min_p) = (1e-6, 0.9, -0.0)),
        sampling(|p| p.top_k = 1),
        sampling(|p| p.top_k = vocab - 1),
        sampling(|p| p.top_p = 1e-30),
        sampling(|p| p.top_p = 0.999_999_94),
        sampling(|p| p.min_p = 1.0),
        sampling(|p| p.min_p = 1e-40),
        sampling(|p| (p.top_k, p.top_p, p.min_p) = (5, 0.5, 0.01)),
        // Infinite penalties meet infinite logits.
        sampling(|p| (p.frequency_penalty, p.repetition_penalty) = (f32::MAX, 3e38)),
        sampling(|p| (p.temperature, p.frequency_penalty, p.presence_penalty) = (0.0, -f32::MAX, f32::MAX)),
        sampling(|p| p.logit_bias = vec![(TokenId(0), f32::NEG_INFINITY), (TokenId(1), 3e38)]),
    ];
    let text: Vec<TokenId> = (0..vocab as u32 + 2).step_by(2).map(TokenId).collect();
    let all = rows.iter().flat_map(|logits| params.iter().map(|p| Row::plain(logits.clone(), p.clone())));
    let mut all: Vec<Row> = all.collect();
    for (i, row) in all.iter_mut().enumerate() {
        row.position = i as u32;
        row.output = [&text[..], &text[text.len() / 2..]].concat();
        row.path = text[..text.len() / 3].to_vec();
        row.allowed =
            (i % 4 == 0).then(|| vec![if i % 8 == 0 { 0 } else { 0x5555_FFFF }; vocab.div_ceil(32)]);
    }
    all
}

/// Flat rows at places where a token wins by noise that has 64 bits, found by the specification.
fn refined_rows(vocab: usize) -> Vec<Row> {
    let is_refined = |position| (0..vocab as u32).any(|token| gumbel(11, position, token) > 13.9);
    let positions: Vec<u32> = (0..).filter(|position| is_refined(*position)).take(6).collect();
    let row = |position| Row { position, ..Row::plain(vec![0.0; vocab], sampling(|_| {})) };
    positions.into_iter().map(row).collect()
}

/// Penalties on what the whole text has, also by a path alone.
fn paths(vocab: usize) -> Vec<Row> {
    let mut random = Random::new(17);
    let shared: [Vec<TokenId>; 2] = [random.tokens(30, vocab), random.tokens(30, vocab)];
    let row = |i: usize| Row {
        position: i as u32,
        prompt: shared[0].clone(),
        output: shared[1].clone(),
        path: random.tokens(7, vocab),
        ..Row::plain(
            (0..vocab).map(|token| (token * 7 % 11) as f32 / 8.0).collect(),
            sampling(|p| {
                p.temperature = [0.0, 0.2][i % 2];
                (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) = (1.3, 0.7, 0.2);
            }),
        )
    };
    (0..24).map(row).collect()
}

/// Almost flat rows whose luckiest token is about the last, or the first not, that a filter keeps: a threshold that
/// is off by one token shows.
fn boundaries(vocab: usize) -> Vec<Row> {
    let z = |rank: usize| 1.0 - 0.1 * rank as f32 / vocab as f32;
    let weights: Vec<f64> = (0..vocab).map(|rank| f64::from(z(rank)).exp()).collect();
    let half = weights.iter().sum::<f64>() / 2.0;
    let mut sum = 0.0;
    let num_kept = 1 + weights
        .iter()
        .position(|w| {
            sum += w;
            sum >= half
        })
        .unwrap();
    let params = [
        sampling(|p| p.top_p = 0.5),
        sampling(|p| p.top_k = num_kept),
        sampling(|p| p.min_p = (z(num_kept - 1) - z(0)).exp()),
        sampling(|p| (p.top_k, p.top_p) = (vocab - 1, 0.5)),
    ];
    let row = |position: usize| {
        let noise = |token: &usize| gumbel(11, position as u32, *token as u32);
        let luckiest = (0..vocab).max_by(|a, b| noise(a).total_cmp(&noise(b))).unwrap();
        let rank = num_kept + position / 4 - 5;
        let mut logits: Vec<f32> = (0..vocab).map(|token| z((token * 7 + 3) % vocab)).collect();
        let other = logits.iter().position(|logit| *logit == z(rank)).unwrap();
        logits.swap(luckiest, other);
        Row { position: position as u32, ..Row::plain(logits, params[position % 4].clone()) }
    };
    (0..40).map(row).collect()
}

/// More tokens than the kernel's list has room for: all equal, with noise or without, or all near.
fn crowds() -> Vec<Row> {
    let mut random = Random::new(31);
    let mut rows = Vec::new();
    for logit in [1.0, f32::MAX, f32::INFINITY] {
        rows.push(Row::plain(vec![logit; 2600], sampling(|_| {})));
        rows.push(Row::plain(vec![logit; 2600], sampling(|p| p.top_k = 2599)));
        rows.push(Row::plain(vec![logit; 2600], sampling(|p| p.top_p = 0.3)));
    }
    // So large that noise is rounded away: each token ties with its neighbours, and those after them are better.
    let ascending = (0..2600).map(|token| 1_073_741_824.0 + 128.0 * (token / 256) as f32);
    rows.push(Row::plain(ascending.collect(), sampling(|p| p.top_k = 2599))); // in one block
    for position in 0..6 {
        let logits = (0..2600).map(|_| random.between(0.0, 0.01)).collect();
        let filter =
            |p: &mut SamplingParams| (p.top_k, p.top_p) = [(0, 0.4), (900, 1.0), (1500, 0.5)][position % 3];
        rows.push(Row { position: position as u32, ..Row::plain(logits, sampling(filter)) });
    }
    rows
}

/// Many draws without anything else.
fn draws(seed: u64) -> Vec<Row> {
    let mut random = Random::new(seed);
    let row = |position| Row {
        position,
        ..Row::plain((0..31).map(|_| random.between(-2.0, 2.0)).collect(), sampling(|p| p.seed = seed))
    };
    (0..400).map(row).collect()
}

/// All that a fault in the kernel may show in, for vocabularies that the emulator is quick with.
fn suite(seed: u64) -> Result<(), String> {
    random_rows::<bf16>(seed, 20, &VOCABS)?;
    random_rows::<f32>(seed + 1, 20, &VOCABS)?;
    let cuda = device();
    compare::<f32>(&cuda, &paths(100), 2, &[3])?;
    compare::<f32>(&cuda, &draws(seed), 1, &[])?;
    compare::<f32>(&cuda, &boundaries(1000), 2, &[])?;
    compare::<f32>(&cuda, &crowds(), 1, &[])?;
    compare::<f32>(&cuda, &edges(40), 2, &[])?;
    compare::<f16>(&cuda, &refined_rows(64), 1, &[2])
}

#[test]
fn random_rows_equal_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let num_rows = random_rows::<bf16>(1, 300, &VOCABS).unwrap()
        + random_rows::<f16>(2, 300, &VOCABS).unwrap()
        + random_rows::<f32>(3, 300, &VOCABS).unwrap();
    assert!(num_rows > 3000);
}

#[test]
fn edges_equal_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let cuda = device();
    for (i, vocab) in [2, 5, 40, 333, 1100].into_iter().enumerate() {
        let rows = edges(vocab);
        compare::<f32>(&cuda, &rows, 2, &[1 + i]).unwrap();
        compare::<f16>(&cuda, &rows, 1, &[2]).unwrap();
        compare::<bf16>(&cuda, &rows, 3, &[2]).unwrap();
    }
    compare::<f32>(&cuda, &crowds(), 4, &[2]).unwrap();
    compare::<bf16>(&cuda, &refined_rows(64), 1, &[2, 8]).unwrap();
    compare::<bf16>(&cuda, &paths(100), 2, &[4]).unwrap();
    compare::<f32>(&cuda, &draws(1), 1, &[2]).unwrap();
    compare::<f32>(&cuda, &boundaries(2000), 4, &[2]).unwrap();
}

/// The sizes of real vocabularies, rows as models make them: a few likely tokens and a wide rest.
#[test]
fn large_vocabularies_equal_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config { max_resident_blocks: 8, ..emulator::Config::fast() });
    fn check<T: Dtype>(vocab: usize, shards: &[usize]) {
        let mut random = Random::new(vocab as u64);
        let params = [
            sampling(|p| p.temperature = 0.0),
            sampling(|p| p.temperature = 0.8),
            sampling(|p| (p.temperature, p.top_k, p.top_p) = (0.7, 50, 0.9)),
            sampling(|p| p.top_p = 0.95),
            sampling(|p| (p.min_p, p.frequency_penalty) = (0.02, 0.5)),
        ];
        let row = |(i, params): (usize, SamplingParams)| {
            let scale = [1.0, 6.0, 0.1][i % 3];
            let mut logits: Vec<f32> =
                (0..vocab).map(|_| scale * (random.unit() + random.unit() + random.unit() - 1.5)).collect();
            for _ in 0..20 {
                logits[random.below(vocab)] += scale * 2.0 * random.unit();
            }
            let output = random.tokens(200, vocab);
            Row { position: i as u32, output, ..Row::plain(logits, params) }
        };
        let rows: Vec<Row> = params.into_iter().enumerate().map(row).collect();
        compare::<T>(&device(), &rows, 16, shards).unwrap();
    }
    check::<bf16>(49_152, &[8]);
    check::<f16>(50_257, &[3]);
    check::<bf16>(128_256, &[4]);
    check::<f32>(163_840, &[]);
    check::<bf16>(262_144, &[]);
}

/// Every schedule gives the same, without a race.
#[test]
fn schedules_make_no_difference() {
    let _machine = emulator::exclusive();
    let before = held(); // by machines that failed, in other tests
    for seed in emulator::seeds(4) {
        emulator::configure(&emulator::Config::checked(seed));
        suite(seed).unwrap_or_else(|seen| panic!("EMU_SEED={seed}: {seen}"));
    }
    assert_eq!(held(), before, "all is freed");
}

/// The same comparison sees each of these faults.
#[test]
fn faults_are_caught() {
    let _machine = emulator::exclusive();
    assert_eq!(catch_mutants("choose", &emulator::seeds(3).collect::<Vec<_>>(), suite), 23);
}

#[test]
fn misuse_is_an_error_before_anything_is_queued() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::checked(1));
    let cuda = device();
    for (config, why) in [
        (ChooserConfig::new(0, 10), "rows of a call"),
        (ChooserConfig::new(65_536, 10), "65536"),
        (ChooserConfig::new(1, 0), "vocabulary"),
        (ChooserConfig::new(1, 262_145), "262144"),
        (ChooserConfig { columns: 4..4, ..ChooserConfig::new(1, 10) }, "4..4"),
        (ChooserConfig { columns: 4..11, ..ChooserConfig::new(1, 10) }, "0..10"),
    ] {
        let error = Chooser::<f32>::new(&cuda, config).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{error}");
    }
    let shard = ChooserConfig { columns: 0..32, ..ChooserConfig::new(2, 40) };
    let mut chooser = Chooser::<bf16>::new(&cuda, shard).unwrap();
    let logits = cuda.upload(&[bf16::ONE; 96]).unwrap();
    let (plain, top_p) = (sampling(|_| {}), sampling(|p| p.top_p = 0.5));
    let (plain, top_p) = (Sampler::new(plain).unwrap(), Sampler::new(top_p).unwrap());
    let nothing = SamplingContext { position: 0, prompt: &[], output: &[], path: &[], allowed: None };
    let row = ChooseRow::new(&plain, nothing);
    let short = SamplingContext { allowed: Some(&[1]), ..nothing };
    // SAFETY: never read: the call must fail.
    let raw = |address| unsafe { DeviceSlice::<bf16>::from_raw(&cuda, address, 32) };
    let other = device();
    let elsewhere = other.upload(&[bf16::ONE; 32]).unwrap();
    let before = emulator::report().stats;
    let one = logits.slice().get(0..32).unwrap();
    for (logits, rows, why) in [
        (logits.slice(), &[row; 3][..], "at most 2"),
        (one, &[row; 2][..], "logits: wanted 64, seen 32"),
        (elsewhere.slice(), &[row][..], "`Cuda` that made"),
        (raw(0), &[row][..], "multiple of 2"),
        (raw(logits.address() + 1), &[row][..], "multiple of 2"),
        (one, &[ChooseRow::new(&plain, short)][..], "mask of allowed tokens, in words: wanted 2"),
        (one, &[ChooseRow::new(&top_p, nothing)][..], "row 0 with filters"),
        (one, &[ChooseRow { threshold: Some(f32::NAN), ..ChooseRow::new(&top_p, nothing) }][..], "NaN"),
    ] {
        let error = chooser.choose(logits, rows).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(why), "{error}");
        assert!(chooser.thresholds().is_empty());
    }
    assert_eq!(emulator::report().stats, before, "nothing ran");
    // The control: with its threshold the row is fine; and no rows are.
    let known = ChooseRow { threshold: Some(0.5), ..ChooseRow::new(&top_p, nothing) };
    chooser.choose(one, &[known]).unwrap()[0].checked().unwrap();
    assert_eq!(chooser.thresholds(), [0.5]);
    assert!(chooser.choose(logits.slice().get(0..0).unwrap(), &[]).unwrap().is_empty());
}

/// Calls of all sizes through one chooser: what one leaves behind does not matter to the next.
#[test]
fn calls_do_not_depend_on_those_before() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let (cuda, mut random) = (device(), Random::new(23));
    let mut chooser = Chooser::<f32>::new(&cuda, ChooserConfig::new(12, 500)).unwrap();
    for _ in 0..40 {
        let rows: Vec<Row> = (0..1 + random.below(12)).map(|_| random_row(&mut random, 500)).collect();
        let logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
        let logits = cuda.upload(&logits).unwrap();
        let call: Vec<_> = rows.iter().map(|row| ChooseRow::new(&row.sampler, row.context())).collect();
        let keys = chooser.choose(logits.slice(), &call).unwrap();
        differences::<f32>(&rows, keys, "again").unwrap();
    }
}
