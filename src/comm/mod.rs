//! What ranks that share a target tell each other: the all-reduce that runs twice in every layer of a
//! tensor-parallel verify pass, fused with the residual addition, RMSNorm and FP8 quantisation around it ([`Group`]);
//! and after the pass the choices of tokens, where each rank has the logits of a part of the vocabulary
//! ([`VocabShard`]).
//!
//! Each rank has a [`Group`] of its own; all ranks make the same calls in the same order. Ranks are threads of one
//! process, on any backend, or processes of one machine, on GPUs: the engine with a process for each GPU forms its
//! group with [`Rendezvous::over_socket`], and nothing else differs. The bits of a result depend on the values alone: not on the algorithm, the backend, the rank, or the
//! rows beside it. They are those of [`RmsNorm::reduce_add_norm`] and [`sum_ranks`](crate::norm::sum_ranks).
//! Waits for peers end: a lost peer is an [`Error`] that names it.
//!
//! ```
//! use std::time::Duration;
//! use eagle_verify::backend::cpu::Cpu;
//! use eagle_verify::comm::{Group, GroupConfig, NormOutputs, Rank, Rendezvous, WorldSize};
//! use eagle_verify::RmsNorm;
//! use half::bf16;
//!
//! let cpu = Cpu::new()?;
//! let rendezvous = Rendezvous::new(WorldSize::Two, Duration::from_secs(10));
//! let norm = RmsNorm::new(64, 1e-5)?;
//! let life = |rank: Rank| -> eagle_verify::Result<()> {
//!     let mut group = Group::join(&cpu, &rendezvous, rank, GroupConfig::new(64, 8))?;
//!     let partial = vec![bf16::from_f32(rank.index() as f32); 3 * 64]; // three rows
//!     let (mut residual, weight) = (vec![bf16::ONE; 3 * 64], [bf16::ONE; 64]);
//!     let mut output = vec![bf16::ZERO; 3 * 64];
//!     let outputs = NormOutputs { output: Some(&mut output[..]), quantized: None };
//!     group.reduce_add_norm(&norm, &partial[..], &mut residual[..], &weight[..], outputs)?;
//!     assert_eq!(residual[0].to_f32(), 2.0); // 1 + (0 + 1)
//!     Ok(())
//! };
//! let life = &life;
//! std::thread::scope(|scope| {
//!     let ranks: Vec<_> = WorldSize::Two.ranks().map(|rank| scope.spawn(move || life(rank))).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! })?;
//! # Ok::<(), eagle_verify::Error>(())
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod geometry;
pub(crate) mod parcel;
pub(crate) mod plan;
mod rendezvous;
#[cfg(target_os = "linux")]
mod symmetric;
mod vocab_shard;

use std::time::Duration;

use bytemuck::Pod;

use crate::element::Element;
use crate::error::{Error, Result, expect_len};
use crate::norm::{RmsNorm, check_scale};

pub use plan::{Algorithm, Crossovers, Rank, WorldSize};
pub use rendezvous::Rendezvous;
pub use vocab_shard::{VocabShard, VocabShardConfig};

use parcel::{Offer, Parcel, Reader, Writer};
use plan::Shape;
pub(crate) use vocab_shard::check_columns;

/// What the ranks of a group agree on. It must be equal on all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupConfig {
    /// Elements in a row: a multiple of 64 up to 16,384.
    pub hidden: usize,
    /// The most rows of a call, up to 512. Sets the memory that each rank holds.
    pub max_rows: usize,
    /// How long a call waits for peers at most, from 1 ms to an hour. On a GPU a rank may be late by half of it:
    /// later hops get more, so that the rank that is lost is the one that is named.
    pub time_limit: Duration,
    /// Which algorithm is for which payload; `None` for [`Crossovers::predicted`] with one island.
    pub crossovers: Option<Crossovers>,
    /// The most blocks of a launch on a GPU: how many multiprocessors a call may hold.
    pub max_blocks: usize,
    /// The most warps that a launch gives to an eighth of a row, up to 4. Results don't depend on it.
    #[doc(hidden)]
    pub max_warps_per_group: usize,
    /// The number of calls that the group pretends to have made before.
    #[doc(hidden)]
    pub first_epoch: u32,
}

impl GroupConfig {
    /// Rows of `hidden` elements, at most `max_rows` a call, a limit of ten seconds, at most 64 blocks.
    pub const fn new(hidden: usize, max_rows: usize) -> Self {
        Self {
            hidden,
            max_rows,
            time_limit: Duration::from_secs(10),
            crossovers: None,
            max_blocks: 64,
            max_warps_per_group: 4,
            first_epoch: 0,
        }
    }

    pub(crate) fn terms<T: Element>(&self, world: WorldSize) -> Result<Terms> {
        Ok(Terms { shape: self.shape(world)?, config: *self, element: T::NAME.into() })
    }

    fn shape(&self, world: WorldSize) -> Result<Shape> {
        let crossovers = self.crossovers.unwrap_or(Crossovers::predicted(world, false));
        let shape = Shape { world, hidden: self.hidden, max_rows: self.max_rows, crossovers };
        shape.check()?;
        check_time_limit(self.time_limit)?;
        if self.max_blocks == 0 || !(1..=4).contains(&self.max_warps_per_group) {
            let seen = format!("{} and {}", self.max_blocks, self.max_warps_per_group);
            return Err(Error::misuse("blocks and warps per group", "at least 1, and 1..=4", seen));
        }
        Ok(shape)
    }
}

fn check_time_limit(limit: Duration) -> Result<()> {
    if (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&limit) {
        return Ok(());
    }
    Err(Error::misuse("time limit", "from 1 ms to an hour", format!("{limit:?}")))
}

/// What is compared first.
#[derive(Debug, PartialEq)]
pub(crate) struct Terms {
    pub(crate) shape: Shape,
    config: GroupConfig,
    element: String,
}

impl Offer for Terms {
    const KIND: &'static str = "group configuration";

    fn pack(&self) -> Result<Parcel> {
        let Self { shape, config, element } = self;
        let crossovers = |writer: Writer, c: &Crossovers| {
            writer.usize(c.one_shot_max_bytes).usize(c.hierarchical_min_bytes)
        };
        let writer = Writer::default().usize(shape.world.get()).usize(config.hidden).usize(config.max_rows);
        let writer = crossovers(writer, &shape.crossovers).duration(config.time_limit);
        let writer = writer.usize(config.max_blocks).usize(config.max_warps_per_group);
        let writer = writer.u64(config.first_epoch.into()).text(element);
        let writer = writer.u8(config.crossovers.is_some().into());
        let bytes = config.crossovers.iter().fold(writer, crossovers).0;
        Ok(Parcel { bytes, descriptors: Vec::new() })
    }

    fn unpack(parcel: Parcel) -> Option<Self> {
        let mut reader = Reader(&parcel.bytes);
        let r = &mut reader;
        let crossovers = |r: &mut Reader<'_>| {
            Some(Crossovers { one_shot_max_bytes: r.usize()?, hierarchical_min_bytes: r.usize()? })
        };
        let world = WorldSize::try_from(r.usize()?).ok()?;
        let (hidden, max_rows) = (r.usize()?, r.usize()?);
        let shape = Shape { world, hidden, max_rows, crossovers: crossovers(r)? };
        let time_limit = r.duration()?;
        let (max_blocks, max_warps_per_group) = (r.usize()?, r.usize()?);
        let (first_epoch, element) = (r.u64()?.try_into().ok()?, r.text()?);
        let crossovers = if r.u8()? == 0 { None } else { Some(crossovers(r)?) };
        let config = GroupConfig {
            hidden,
            max_rows,
            time_limit,
            crossovers,
            max_blocks,
            max_warps_per_group,
            first_epoch,
        };
        reader.end(Self { shape, config, element })
    }
}

/// A backend whose ranks can form a group. Sealed: users name a backend, they don't call this.
pub trait GroupBackend: sealed::Sealed + Sized {
    /// Elements in this backend's memory: `&[T]` on a CPU.
    type Slice<'a, T: Pod>: Copy;
    /// Elements in this backend's memory to write to: `&mut [T]` on a CPU.
    type SliceMut<'a, T: Pod>;
    /// One rank's part of a group.
    #[doc(hidden)]
    type Member<T: Element>;

    /// Meets the other ranks from exchange 1 on; exchange 0 has compared the configurations.
    #[doc(hidden)]
    fn join<T: Element>(
        &self,
        rendezvous: &Rendezvous,
        rank: Rank,
        shape: Shape,
        config: &GroupConfig,
    ) -> Result<Self::Member<T>>;

    #[doc(hidden)]
    fn len<T: Pod>(slice: Self::Slice<'_, T>) -> usize;

    #[doc(hidden)]
    fn len_mut<T: Pod>(slice: &Self::SliceMut<'_, T>) -> usize;

    /// Makes a call whose lengths have been checked.
    #[doc(hidden)]
    fn reduce<T: Element>(member: &mut Self::Member<T>, call: Call<'_, Self, T>) -> Result<()>;

    /// The fault of a call that was queued, if it is known by now.
    #[doc(hidden)]
    fn check<T: Element>(member: &Self::Member<T>) -> Result<()>;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// One call of one rank.
#[doc(hidden)]
pub struct Call<'a, B: GroupBackend, T: Element> {
    pub(crate) rows: usize,
    pub(crate) partial: B::Slice<'a, T>,
    pub(crate) norm: Option<NormInputs<'a, B, T>>,
    pub(crate) output: Option<B::SliceMut<'a, T>>,
    pub(crate) quantized: Option<Quantized<'a, B>>,
}

pub(crate) struct NormInputs<'a, B: GroupBackend, T: Element> {
    pub(crate) norm: RmsNorm,
    pub(crate) residual: B::SliceMut<'a, T>,
    pub(crate) weight: B::Slice<'a, T>,
}

/// Where the normalised rows go: in the activations' format, as FP8, or both. At least one.
pub struct NormOutputs<'a, B: GroupBackend, T: Element> {
    /// `[rows, hidden]`.
    pub output: Option<B::SliceMut<'a, T>>,
    /// The same rows after their rounding to `T`, quantised.
    pub quantized: Option<Quantized<'a, B>>,
}

/// FP8 E4M3 rows, as in [`quantize_static`](crate::norm::quantize_static) and
/// [`quantize_rows`](crate::norm::quantize_rows).
pub enum Quantized<'a, B: GroupBackend> {
    /// All rows divided by one scale.
    Static {
        /// `[rows, hidden]`.
        values: B::SliceMut<'a, u8>,
        /// What a value of 1 stands for.
        scale: f32,
    },
    /// Each row divided by a scale of its own.
    PerRow {
        /// `[rows, hidden]`.
        values: B::SliceMut<'a, u8>,
        /// `[rows]`, written.
        scales: B::SliceMut<'a, f32>,
    },
}

/// One rank's handle on its group. All ranks make the same calls in the same order.
///
/// Dropping it frees what the rank holds; the memory that peers may still write into is freed with the last of
/// the ranks' handles.
///
/// On a GPU, allocate before the first call: allocating and freeing device memory (of this crate or others) may
/// wait for kernels, and a peer's kernel may be waiting for this rank's next call.
pub struct Group<B: GroupBackend, T: Element> {
    rank: Rank,
    shape: Shape,
    member: B::Member<T>,
}

impl<B: GroupBackend, T: Element> Group<B, T> {
    /// Joins the group that forms at `rendezvous` as `rank`. Returns when all ranks have joined.
    ///
    /// # Errors
    /// *Misuse* when the configurations of two ranks differ or a rank comes twice; *unsupported* for a shape
    /// that no kernel has, or devices that don't reach each other's memory; *fault* when a rank is missing or
    /// fails. Then no rank has a group. *Unsupported* also where ranks are processes and the backend has no memory
    /// that several can map: a CPU, or a driver that cannot hand it over.
    pub fn join(backend: &B, rendezvous: &Rendezvous, rank: Rank, config: GroupConfig) -> Result<Self> {
        let world = rendezvous.world();
        let rank = Rank::new(rank.index(), world)?;
        let offers = rendezvous.exchange(rank, 0, config.terms::<T>(world))?;
        let shape = offers[rank.index()].shape;
        for (other, offer) in world.ranks().zip(&offers) {
            if **offer != *offers[0] {
                let wanted = format!("the same on all ranks, as rank 0: {:?}", offers[0]);
                return Err(Error::misuse("group configuration", wanted, format!("{other}: {offer:?}")));
            }
        }
        let member = backend.join(rendezvous, rank, shape, &config)?;
        Ok(Self { rank, shape, member })
    }

    /// This handle's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> WorldSize {
        self.shape.world
    }

    /// The algorithm that a call of `rows` takes on a GPU; `None` where the group takes no such call.
    pub fn algorithm(&self, rows: usize) -> Option<Algorithm> {
        (1..=self.shape.max_rows).contains(&rows).then(|| self.shape.algorithm(rows))
    }

    /// `output = sum of partials`, rounded once: [`sum_ranks`](crate::norm::sum_ranks). Both are
    /// `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`reduce_add_norm`](Self::reduce_add_norm).
    pub fn all_reduce<'a>(&mut self, partial: B::Slice<'a, T>, output: B::SliceMut<'a, T>) -> Result<()> {
        let rows = self.shape.rows(B::len(partial))?;
        expect_len("output", B::len(partial), B::len_mut(&output))?;
        let call = Call { rows, partial, norm: None, output: Some(output), quantized: None };
        B::reduce(&mut self.member, call)
    }

    /// `residual += sum of partials`, then `outputs = norm(residual)`:
    /// [`RmsNorm::reduce_add_norm`]. `partial` and `residual` are `[rows, hidden]`, `weight` is `[hidden]`;
    /// `residual`, `weight` and `norm` are the same on all ranks: another norm is noticed, other contents are not.
    ///
    /// On a CPU it returns with the results, on a GPU the work is queued on the backend's stream, and may be
    /// captured in a graph.
    ///
    /// # Errors
    /// *Misuse* or *unsupported*, before anything happens, when lengths don't fit together, there are no or
    /// too many rows, or buffers overlap. *Fault* when a peer is lost or makes another call, on a GPU from
    /// [`check`](Self::check) or the next call: then the group is of no more use, every later call fails at
    /// once, and residual and outputs of the faulty call are NaN where there is no result.
    pub fn reduce_add_norm<'a>(
        &mut self,
        norm: &RmsNorm,
        partial: B::Slice<'a, T>,
        residual: B::SliceMut<'a, T>,
        weight: B::Slice<'a, T>,
        outputs: NormOutputs<'a, B, T>,
    ) -> Result<()> {
        let NormOutputs { output, quantized } = outputs;
        let len = B::len(partial);
        let rows = self.shape.rows(len)?;
        expect_len("norm's hidden size", self.shape.hidden, norm.hidden())?;
        expect_len("residual", len, B::len_mut(&residual))?;
        expect_len("norm weight", self.shape.hidden, B::len(weight))?;
        if let Some(output) = &output {
            expect_len("output", len, B::len_mut(output))?;
        }
        match &quantized {
            Some(Quantized::Static { values, scale }) => {
                expect_len("quantized output", len, B::len_mut(values))?;
                check_scale(*scale)?;
            }
            Some(Quantized::PerRow { values, scales }) => {
                expect_len("quantized output", len, B::len_mut(values))?;
                expect_len("scales", rows, B::len_mut(scales))?;
            }
            None if output.is_none() => {
                return Err(Error::misuse("norm outputs", "at least one", "none"));
            }
            None => {}
        }
        let norm = Some(NormInputs { norm: *norm, residual, weight });
        B::reduce(&mut self.member, Call { rows, partial, norm, output, quantized })
    }

    /// The fault that ended the group, if any is known. On a GPU: of calls that have been synchronised with.
    ///
    /// # Errors
    /// The *fault*.
    pub fn check(&self) -> Result<()> {
        B::check(&self.member)
    }
}

impl<B: GroupBackend, T: Element> std::fmt::Debug for Group<B, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({} of {}, {})", self.rank, self.shape.world.get(), T::NAME)
    }
}

/// Why a rank gave its group up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The peer did not come in time.
    Timeout,
    /// The peer made another call.
    Mismatch { own: Tag, peer: Tag },
    /// Another rank gave up, because of this peer.
    Aborted,
    /// The peer has dropped its handle.
    Left,
}

/// What a call must have in common on all ranks: the operation with its parameters, the algorithm, the rows.
/// What a weight or a residual holds is not in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(pub(crate) u32);

impl Tag {
    /// The bits of kernels/abi.h, but for the number of blocks, which a kernel adds.
    pub(crate) fn new(rows: usize, algorithm: Algorithm, norm: Option<&RmsNorm>) -> Self {
        let algorithm = match algorithm {
            Algorithm::OneShot => 0,
            Algorithm::TwoShot => 1,
            Algorithm::Hierarchical => 2,
        };
        let norm = norm.map_or(0, |norm| {
            let epsilon = norm.epsilon().to_bits().to_le_bytes().into_iter().fold(0, |a, b| a ^ b);
            1 << 28 | u32::from(norm.weight_is_plus_one()) << 29 | u32::from(epsilon) << 20
        });
        Self(algorithm << 30 | norm | rows as u32)
    }

    fn describe(self) -> String {
        let bits = |shift: u32, count: u32| self.0 >> shift & ((1 << count) - 1);
        let algorithm = ["one-shot", "two-shot", "hierarchical", "?"][bits(30, 2) as usize];
        let what = match bits(28, 2) {
            0 => "all_reduce".to_string(),
            kind => {
                let weight = if kind & 2 == 0 { "weight" } else { "1 + weight" };
                format!("reduce_add_norm ({weight}, epsilon #{:02x})", bits(20, 8))
            }
        };
        let blocks = bits(10, 10);
        let how = if blocks == 0 { String::new() } else { format!(" ({algorithm}, {blocks} blocks)") };
        format!("{what} of {} rows{how}", bits(0, 10))
    }
}

impl Cause {
    /// The error of a rank that gave up in call number `epoch`.
    pub(crate) fn error(self, rank: usize, peer: usize, phase: &str, epoch: u32, limit: Duration) -> Error {
        let subject = format!("collective {epoch} of rank {rank}");
        match self {
            Self::Timeout => {
                let seen = format!("nothing while waiting for {phase}; the group is lost");
                Error::fault(subject, format!("rank {peer} to answer (time limit {limit:?})"), seen)
            }
            Self::Mismatch { own, peer: theirs } => {
                let seen = format!("{} by rank {peer}; the group is lost", theirs.describe());
                Error::fault(subject, format!("{} on all ranks", own.describe()), seen)
            }
            Self::Aborted => {
                let seen = format!("another rank gave up on rank {peer}; the group is lost");
                Error::fault(subject, "all ranks to go on", seen)
            }
            Self::Left => {
                let seen = format!("rank {peer} gone while waiting for {phase}; the group is lost");
                Error::fault(subject, "all ranks to go on", seen)
            }
        }
    }
}
