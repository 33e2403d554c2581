//! One suite for collectives, on any backend: cases as data, the specification, and how to run a case.
#![allow(dead_code)] // each test crate uses its part

use std::ops::Range;
use std::time::Duration;

use bytemuck::Pod;
use eagle_verify::comm::{
    Algorithm, Crossovers, Group, GroupBackend, GroupConfig, NormOutputs, Quantized, Rank, Rendezvous,
    WorldSize,
};
use eagle_verify::norm::{quantize_rows, quantize_static, sum_ranks};
use eagle_verify::{Element, RmsNorm};

pub const WORLDS: [WorldSize; 4] = [WorldSize::One, WorldSize::Two, WorldSize::Four, WorldSize::Eight];

/// The algorithms that a world has.
pub fn algorithms(world: WorldSize) -> &'static [Algorithm] {
    match world {
        WorldSize::One => &[Algorithm::OneShot],
        WorldSize::Two | WorldSize::Four => &[Algorithm::OneShot, Algorithm::TwoShot],
        WorldSize::Eight => &[Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Hierarchical],
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp8 {
    No,
    Static,
    PerRow,
}

/// What a call makes of the sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue {
    Sum,
    Norm { output: bool, fp8: Fp8, plus_one: bool },
}

pub const NORM: Epilogue = Epilogue::Norm { output: true, fp8: Fp8::No, plus_one: false };

/// All epilogues: each alone, and with the norm's output; both kinds of weight.
pub const EPILOGUES: [Epilogue; 11] = {
    const fn norm(output: bool, fp8: Fp8, plus_one: bool) -> Epilogue {
        Epilogue::Norm { output, fp8, plus_one }
    }
    [
        Epilogue::Sum,
        norm(true, Fp8::No, false),
        norm(true, Fp8::No, true),
        norm(false, Fp8::Static, false),
        norm(false, Fp8::Static, true),
        norm(true, Fp8::Static, false),
        norm(true, Fp8::Static, true),
        norm(false, Fp8::PerRow, false),
        norm(false, Fp8::PerRow, true),
        norm(true, Fp8::PerRow, false),
        norm(true, Fp8::PerRow, true),
    ]
};

/// Where tests get memory of a backend from.
pub trait Machine: Sync {
    type Backend: GroupBackend + Send;
    type Buffer<T: Pod>;

    /// The backend of a rank.
    fn backend(&self, rank: usize) -> Self::Backend;
    fn upload<T: Pod>(backend: &Self::Backend, data: &[T]) -> Self::Buffer<T>;
    fn slice<T: Pod>(buffer: &Self::Buffer<T>) -> <Self::Backend as GroupBackend>::Slice<'_, T>;
    fn slice_mut<T: Pod>(buffer: &mut Self::Buffer<T>) -> <Self::Backend as GroupBackend>::SliceMut<'_, T>;
    fn download<T: Pod>(backend: &Self::Backend, buffer: &Self::Buffer<T>) -> Vec<T>;
}

/// The payloads of one call.
#[derive(Clone, Debug)]
pub struct Payload<T> {
    pub rows: usize,
    pub partials: Vec<Vec<T>>,
    pub residual: Vec<T>,
    pub weight: Vec<T>,
}

pub struct Lcg(pub u64);

impl Lcg {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    fn float(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

impl<T: Element> Payload<T> {
    /// Values of very different sizes, with zeros of both signs and subnormals among them, so that the order
    /// of a sum shows.
    pub fn random(world: usize, rows: usize, hidden: usize, seed: u64) -> Self {
        let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66);
        let mut value = |scale: f32| match random.below(24) {
            0 => T::from_f32(-0.0),
            1 => T::from_f32(0.0),
            2 => bytemuck::cast::<u16, T>((1 + random.below(0x7F) as u16) | (random.next() << 15) as u16),
            n => T::from_f32(random.float() * scale * if n < 6 { 16.0 } else { 1.0 }),
        };
        let len = rows * hidden;
        let mut payload = Self {
            rows,
            partials: (0..world).map(|_| (0..len).map(|_| value(1.0)).collect()).collect(),
            residual: (0..len).map(|_| value(4.0)).collect(),
            weight: (0..hidden).map(|_| value(1.0)).collect(),
        };
        // Two ranks that cancel, and swallow what is added between them.
        for i in (0..len).filter(|i| world > 1 && i % 3 == 0) {
            let (a, step) = (random.below(world), 1 + random.below(world - 1));
            let large = random.float() * 32768.0;
            payload.partials[a][i] = T::from_f32(large);
            payload.partials[(a + step) % world][i] = T::from_f32(-large);
        }
        payload
    }

    pub fn rows(&self, rows: Range<usize>) -> Self {
        let hidden = self.weight.len();
        let cut = |values: &Vec<T>| values[rows.start * hidden..rows.end * hidden].to_vec();
        Self {
            rows: rows.len(),
            partials: self.partials.iter().map(cut).collect(),
            residual: cut(&self.residual),
            weight: self.weight.clone(),
        }
    }
}

/// All that a call writes, as bits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub residual: Vec<u16>,
    pub output: Vec<u16>,
    pub quantized: Vec<u8>,
    pub scales: Vec<u32>,
}

impl Outcome {
    /// Where the two differ first, for people.
    pub fn difference(&self, want: &Self, hidden: usize) -> Option<String> {
        fn first<V: PartialEq + std::fmt::LowerHex>(
            what: &str,
            width: usize,
            a: &[V],
            b: &[V],
        ) -> Option<String> {
            if a.len() != b.len() {
                return Some(format!("{what}: {} values, wanted {}", a.len(), b.len()));
            }
            let at = a.iter().zip(b).position(|(a, b)| a != b)?;
            let (row, column) = (at / width, at % width);
            Some(format!("{what} row {row} column {column}: {:04x}, wanted {:04x}", a[at], b[at]))
        }
        first("residual", hidden, &self.residual, &want.residual)
            .or_else(|| first("output", hidden, &self.output, &want.output))
            .or_else(|| first("quantized", hidden, &self.quantized, &want.quantized))
            .or_else(|| first("scale", 1, &self.scales, &want.scales))
    }
}

pub const STATIC_SCALE: f32 = 0.037;
pub const EPSILON: f32 = 1e-5;

pub fn norm(hidden: usize, epilogue: Epilogue) -> RmsNorm {
    let norm = RmsNorm::new(hidden, EPSILON).unwrap();
    match epilogue {
        Epilogue::Norm { plus_one: true, .. } => norm.with_weight_plus_one(),
        _ => norm,
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u16> {
    bytemuck::cast_slice(values).to_vec()
}

/// The specification.
pub fn specified<T: Element>(payload: &Payload<T>, epilogue: Epilogue) -> Outcome {
    let hidden = payload.weight.len();
    let partials: Vec<&[T]> = payload.partials.iter().map(Vec::as_slice).collect();
    let (mut residual, mut output) = (payload.residual.clone(), payload.residual.clone());
    let Epilogue::Norm { output: wants_output, fp8, .. } = epilogue else {
        sum_ranks(&partials, &mut output).unwrap();
        return Outcome { output: bits(&output), ..Outcome::default() };
    };
    let norm = norm(hidden, epilogue);
    norm.reduce_add_norm(&partials, &mut residual, &payload.weight, &mut output).unwrap();
    let mut quantized = vec![0; if fp8 == Fp8::No { 0 } else { output.len() }];
    let mut scales = vec![0.0; if fp8 == Fp8::PerRow { payload.rows } else { 0 }];
    match fp8 {
        Fp8::No => {}
        Fp8::Static => quantize_static(&output, STATIC_SCALE, &mut quantized).unwrap(),
        Fp8::PerRow => quantize_rows(&output, hidden, &mut quantized, &mut scales).unwrap(),
    }
    Outcome {
        residual: bits(&residual),
        output: if wants_output { bits(&output) } else { Vec::new() },
        quantized,
        scales: scales.iter().map(|scale| scale.to_bits()).collect(),
    }
}

/// One rank's memory of one call.
pub struct Buffers<M: Machine, T: Element> {
    epilogue: Epilogue,
    hidden: usize,
    pub partial: M::Buffer<T>,
    pub residual: M::Buffer<T>,
    weight: M::Buffer<T>,
    output: M::Buffer<T>,
    quantized: M::Buffer<u8>,
    scales: M::Buffer<f32>,
}

impl<M: Machine, T: Element> Buffers<M, T> {
    pub fn new(backend: &M::Backend, payload: &Payload<T>, rank: usize, epilogue: Epilogue) -> Self {
        // Outputs begin with a pattern that no result has: what a kernel does not write is seen.
        let stale = vec![bytemuck::cast::<u16, T>(0x7E57); payload.residual.len()];
        Self {
            epilogue,
            hidden: payload.weight.len(),
            partial: M::upload(backend, &payload.partials[rank]),
            residual: M::upload(backend, &payload.residual),
            weight: M::upload(backend, &payload.weight),
            output: M::upload(backend, &stale),
            quantized: M::upload(backend, &vec![0x55; stale.len()]),
            scales: M::upload(backend, &vec![-1.0; payload.rows]),
        }
    }

    pub fn call(&mut self, group: &mut Group<M::Backend, T>) -> eagle_verify::Result<()> {
        let Epilogue::Norm { output, fp8, .. } = self.epilogue else {
            return group.all_reduce(M::slice(&self.partial), M::slice_mut(&mut self.output));
        };
        let quantized = match fp8 {
            Fp8::No => None,
            Fp8::Static => {
                Some(Quantized::Static { values: M::slice_mut(&mut self.quantized), scale: STATIC_SCALE })
            }
            Fp8::PerRow => Some(Quantized::PerRow {
                values: M::slice_mut(&mut self.quantized),
                scales: M::slice_mut(&mut self.scales),
            }),
        };
        let output = output.then(|| M::slice_mut(&mut self.output));
        group.reduce_add_norm(
            &norm(self.hidden, self.epilogue),
            M::slice(&self.partial),
            M::slice_mut(&mut self.residual),
            M::slice(&self.weight),
            NormOutputs { output, quantized },
        )
    }

    /// What the call has written.
    pub fn outcome(&self, backend: &M::Backend) -> Outcome {
        let read = |buffer: &M::Buffer<T>| bits(&M::download(backend, buffer));
        let Epilogue::Norm { output, fp8, .. } = self.epilogue else {
            return Outcome { output: read(&self.output), ..Outcome::default() };
        };
        Outcome {
            residual: read(&self.residual),
            output: if output { read(&self.output) } else { Vec::new() },
            quantized: if fp8 == Fp8::No { Vec::new() } else { M::download(backend, &self.quantized) },
            scales: match fp8 {
                Fp8::PerRow => M::download(backend, &self.scales).iter().map(|s| s.to_bits()).collect(),
                _ => Vec::new(),
            },
        }
    }
}

pub fn config(hidden: usize, max_rows: usize, algorithm: Option<Algorithm>) -> GroupConfig {
    GroupConfig {
        time_limit: Duration::from_secs(20),
        crossovers: algorithm.map(Crossovers::always),
        ..GroupConfig::new(hidden, max_rows)
    }
}

/// Runs `body` as every rank of a group, each in a thread of its own, and returns what they return.
pub fn on_all_ranks<M: Machine, T: Element, R: Send>(
    machine: &M,
    world: WorldSize,
    config: GroupConfig,
    body: impl Fn(Rank, &M::Backend, &mut Group<M::Backend, T>) -> R + Sync,
) -> Vec<R> {
    let rendezvous = Rendezvous::new(world, Duration::from_secs(30));
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (rendezvous, body) = (&rendezvous, &body);
                scope.spawn(move || {
                    let backend = machine.backend(rank.index());
                    let mut group = Group::join(&backend, rendezvous, rank, config).unwrap();
                    body(rank, &backend, &mut group)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Makes the calls on every rank, and compares all that was written with the specification.
pub fn check_calls<M: Machine, T: Element>(
    machine: &M,
    world: WorldSize,
    config: GroupConfig,
    calls: &[(Payload<T>, Epilogue)],
) {
    let outcomes = on_all_ranks::<M, T, _>(machine, world, config, |rank, backend, group| {
        let mut buffers: Vec<Buffers<M, T>> = calls
            .iter()
            .map(|(payload, epilogue)| Buffers::new(backend, payload, rank.index(), *epilogue))
            .collect();
        for buffers in &mut buffers {
            buffers.call(group).unwrap();
        }
        let outcomes: Vec<Outcome> = buffers.iter().map(|buffers| buffers.outcome(backend)).collect();
        group.check().unwrap();
        outcomes
    });
    for (i, (payload, epilogue)) in calls.iter().enumerate() {
        let want = specified(payload, *epilogue);
        for (rank, outcomes) in outcomes.iter().enumerate() {
            if let Some(difference) = outcomes[i].difference(&want, payload.weight.len()) {
                panic!(
                    "{world:?} {} {config:?}\ncall {i}, {} rows, {epilogue:?}, rank {rank}: {difference}",
                    T::NAME,
                    payload.rows
                );
            }
        }
    }
}
