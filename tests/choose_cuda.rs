//! The kernel that chooses tokens, executed in the emulator through the real CUDA backend, against its
//! specification: keys and errors, bit for bit.
#![cfg(feature = "cuda")]

use std::ops::Range;

use cuda_emulator as emulator;
use eagle_verify::backend::cuda::{ChooseRow, Chooser, ChooserConfig, Cuda, Logit};
use eagle_verify::sampling::{ChoiceKey, Sampler, SamplingContext, SamplingParams};
use eagle_verify::{Element, ErrorKind, TokenId};
use half::{bf16, f16};

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

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
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

fn device() -> Cuda {
    emulator::install();
    Cuda::with_kernels(0, &[("emulated", emulator::IMAGE)]).unwrap()
}

/// The keys of `columns`, and the thresholds.
fn choose<T: Dtype>(
    cuda: &Cuda,
    rows: &[Row],
    columns: Range<usize>,
    max_warps: usize,
    thresholds: Option<&[f32]>,
) -> (Vec<ChoiceKey>, Vec<f32>) {
    let vocab = rows[0].logits.len();
    let config =
        ChooserConfig { columns: columns.clone(), max_warps, ..ChooserConfig::new(rows.len(), vocab) };
    let mut chooser = Chooser::<T>::new(cuda, config).unwrap();
    let logits: Vec<T> =
        rows.iter().flat_map(|row| row.rounded::<T>().skip(columns.start).take(columns.len())).collect();
    let logits = cuda.upload(&logits).unwrap();
    let mut call: Vec<_> = rows.iter().map(|row| ChooseRow::new(&row.sampler, row.context())).collect();
    for (row, threshold) in call.iter_mut().zip(thresholds.unwrap_or_default()) {
        row.threshold = Some(*threshold);
    }
    let keys = chooser.choose(logits.slice(), &call).unwrap().to_vec();
    (keys, chooser.thresholds().to_vec())
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
    let (keys, thresholds) = choose::<T>(cuda, rows, 0..vocab, max_warps, None);
    differences::<T>(rows, &keys, "whole")?;
    for &num in shards.iter().filter(|num| **num <= vocab) {
        let mut combined = vec![ChoiceKey::default(); rows.len()];
        for shard in 0..num {
            let columns = vocab * shard / num..vocab * (shard + 1) / num;
            let (keys, _) = choose::<T>(cuda, rows, columns, max_warps, Some(&thresholds));
            combined.iter_mut().zip(keys).for_each(|(all, key)| *all = key.max(*all));
        }
        differences::<T>(rows, &combined, &format!("{num} shards"))?;
    }
    Ok(())
}

/// Rows of every kind in calls of several rows, for vocabularies of which none is a multiple of another.
fn random_rows<T: Dtype>(seed: u64, calls: usize, vocabs: &[usize]) -> Result<usize, String> {
    let (cuda, mut random, mut num_rows) = (device(), Random(seed), 0);
    for call in 0..calls {
        let vocab = vocabs[call % vocabs.len()];
        let rows: Vec<Row> = (0..1 + random.below(9)).map(|_| random_row(&mut random, vocab)).collect();
        compare::<T>(&cuda, &rows, 1 + random.below(3), &[1, 2, 4, 8][random.below(4)..][..1])?;
        num_rows += rows.len();
    }
    Ok(num_rows)
}

#[test]
fn random_rows_equal_the_specification() {
    let _machine = emulator::exclusive();
    emulator::configure(&emulator::Config::fast());
    let vocabs = [1, 2, 7, 8, 31, 33, 64, 255, 300, 1000];
    let num_rows = random_rows::<bf16>(1, 300, &vocabs).unwrap()
        + random_rows::<f16>(2, 300, &vocabs).unwrap()
        + random_rows::<f32>(3, 300, &vocabs).unwrap();
    assert!(num_rows > 3000);
    assert_eq!(emulator::report().complaint(), None);
}
