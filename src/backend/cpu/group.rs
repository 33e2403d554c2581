//! Ranks as threads of one process: the collective in shared memory. No locks, no allocation in a call.
//!
//! Each rank has a slab that it alone writes and all read. A call has two phases: every rank posts the partial's
//! columns that others own; then every rank reduces the columns it owns, with the residual, and posts them. A
//! post is a release store of the call's number, so what was written before it is seen by those who acquire it.
//!
//! One slab without slots suffices. A rank overwrites its partial in call n + 1, after it saw the second posts of
//! call n by all ranks, which they made when they were done with the partials of n. It overwrites its results in
//! the second phase of n + 1, after it saw the first posts of n + 1, which all made when they were done with n.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use multiversion::multiversion;

use super::Cpu;
use super::threads::spin_until;
use crate::comm::parcel::{Offer, Parcel};
use crate::comm::plan::{Algorithm, Rank, Shape};
use crate::comm::{Call, Cause, GroupBackend, GroupConfig, Quantized, Rendezvous, Tag, sealed};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::norm::{RmsNorm, quantize, row_scale};

const PHASES: [&str; 2] = ["its partial", "its results"];

/// A wait spins for so long before it lets other threads run; not at all if there are more ranks than cores.
const POLITE: Duration = Duration::from_micros(2);

/// One rank's memory that its peers read.
#[derive(Debug)]
struct Slab<T> {
    partials: Cells<T>,
    results: Cells<T>,
    /// The number of the last call that reached the end of a phase, and the call's tag.
    posts: [Post; 2],
    /// 1 + the rank that the group was given up on; 0 while all is well. Written by anyone.
    abort: Post,
    /// Not 0 once the owner has dropped its handle.
    left: Post,
}

/// Its peers are threads.
impl<T: Element> Offer for Slab<T> {
    const KIND: &'static str = "slab of a CPU";

    fn pack(&self) -> Result<Parcel> {
        let wanted = "a backend whose memory other processes can map, or threads of one process";
        Err(Error::unsupported("ranks as processes", wanted, "the CPU backend"))
    }

    fn unpack(_: Parcel) -> Option<Self> {
        None
    }
}

/// On a cache line pair of its own: its poller shall not be disturbed.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Post(AtomicU64);

/// `[max_rows, hidden]`, written by one thread and read by others.
#[derive(Debug)]
struct Cells<T>(Box<[UnsafeCell<T>]>);

// SAFETY: every access is through `read` and `write`, whose callers keep writers and readers apart by posts.
unsafe impl<T: Send + Sync> Sync for Cells<T> {}

impl<T: Element> Cells<T> {
    fn new(len: usize) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(T::zeroed())).collect())
    }

    /// # Safety
    /// Nobody writes these places while the slice lives.
    unsafe fn read(&self, at: Range<usize>) -> &[T] {
        let cells = &self.0[at];
        // SAFETY: `UnsafeCell<T>` has T's layout; that there is no writer is the caller's obligation.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
    }

    /// # Safety
    /// Nobody else reads or writes these places while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write(&self, at: Range<usize>) -> &mut [T] {
        let cells = &self.0[at];
        // SAFETY: as above; a pointer from `UnsafeCell` may be written through.
        unsafe { std::slice::from_raw_parts_mut(cells.as_ptr().cast_mut().cast(), cells.len()) }
    }
}

/// One rank's part of a group.
#[derive(Debug)]
pub struct Member<T: Element> {
    rank: usize,
    shape: Shape,
    time_limit: Duration,
    polite: Duration,
    slabs: Vec<Arc<Slab<T>>>,
    epoch: u32,
    fault: Option<Error>,
    /// A row in f32.
    row: Vec<f32>,
    /// A row's output, where only its quantisation is wanted.
    output: Vec<T>,
}

impl sealed::Sealed for Cpu {}

impl GroupBackend for Cpu {
    type Slice<'a, T: Pod> = &'a [T];
    type SliceMut<'a, T: Pod> = &'a mut [T];
    type Member<T: Element> = Member<T>;

    fn join<T: Element>(
        &self,
        rendezvous: &Rendezvous,
        rank: Rank,
        shape: Shape,
        config: &GroupConfig,
    ) -> Result<Member<T>> {
        let len = if shape.world.get() == 1 { 0 } else { shape.max_rows * shape.hidden };
        let slab = Slab {
            partials: Cells::new(len),
            results: Cells::new(len),
            posts: [0, 1].map(|_| Post(AtomicU64::new(post(config.first_epoch, Tag(0))))),
            abort: Post::default(),
            left: Post::default(),
        };
        let num_cores = std::thread::available_parallelism().map_or(1, Into::into);
        let slabs = rendezvous.exchange(rank, 1, Ok(slab))?;
        Ok(Member {
            rank: rank.index(),
            shape,
            time_limit: config.time_limit,
            polite: if shape.world.get() > num_cores { Duration::ZERO } else { POLITE },
            slabs,
            epoch: config.first_epoch,
            fault: None,
            row: vec![0.0; shape.hidden],
            output: vec![T::zeroed(); shape.hidden],
        })
    }

    fn len<T: Pod>(slice: &[T]) -> usize {
        slice.len()
    }

    fn len_mut<T: Pod>(slice: &&mut [T]) -> usize {
        slice.len()
    }

    fn reduce<T: Element>(member: &mut Member<T>, mut call: Call<'_, Self, T>) -> Result<()> {
        Self::check(member)?;
        let outcome = member.reduce(&mut call);
        if let Err(error) = &outcome {
            member.fault = Some(error.clone());
            poison(call);
        }
        outcome
    }

    fn check<T: Element>(member: &Member<T>) -> Result<()> {
        member.fault.clone().map_or(Ok(()), Err)?;
        member.is_aborted(PHASES[0])
    }
}

const fn post(epoch: u32, tag: Tag) -> u64 {
    (epoch as u64) << 32 | tag.0 as u64
}

impl<T: Element> Member<T> {
    fn reduce(&mut self, call: &mut Call<'_, Cpu, T>) -> Result<()> {
        let started = Instant::now();
        self.epoch = self.epoch.wrapping_add(1);
        let tag = Tag::new(call.rows, Algorithm::TwoShot, call.norm.as_ref().map(|inputs| &inputs.norm));
        self.send_partial(call);
        self.post(0, tag);
        self.wait_for_all(0, tag, started)?;
        self.reduce_owned_columns(call);
        self.post(1, tag);
        self.wait_for_all(1, tag, started)?;
        self.finish_rows(call);
        Ok(())
    }

    /// The columns that a rank reduces. A row's whole length is split, not the rows: also one row is shared.
    fn owned(&self, rank: usize) -> Range<usize> {
        let width = self.shape.hidden / self.slabs.len();
        rank * width..(rank + 1) * width
    }

    fn place(&self, row: usize, columns: &Range<usize>) -> Range<usize> {
        let start = row * self.shape.hidden;
        start + columns.start..start + columns.end
    }

    fn send_partial(&self, call: &Call<'_, Cpu, T>) {
        if self.slabs.len() == 1 {
            return;
        }
        let own = self.owned(self.rank);
        for (row, partial) in call.partial.chunks_exact(self.shape.hidden).enumerate() {
            for columns in [0..own.start, own.end..self.shape.hidden] {
                // SAFETY: only this rank writes its partials, and its peers are done with those of the last call.
                let to = unsafe { self.slabs[self.rank].partials.write(self.place(row, &columns)) };
                to.copy_from_slice(&partial[columns]);
            }
        }
    }

    fn reduce_owned_columns(&self, call: &mut Call<'_, Cpu, T>) {
        let (hidden, own) = (self.shape.hidden, self.owned(self.rank));
        for row in 0..call.rows {
            let in_row = row * hidden + own.start..row * hidden + own.end;
            let mut partials: [&[T]; 8] = [&[]; 8];
            for (rank, (partial, slab)) in partials.iter_mut().zip(&self.slabs).enumerate() {
                *partial = match rank == self.rank {
                    true => &call.partial[in_row.clone()],
                    // SAFETY: `rank` posted its partial of this call, and will not write it again before this
                    // rank has made its second post.
                    false => unsafe { slab.partials.read(self.place(row, &own)) },
                };
            }
            let partials = &partials[..self.slabs.len()];
            let result = match (&mut call.norm, &mut call.output) {
                (Some(norm), _) => {
                    let residual = &mut norm.residual[in_row];
                    add_ranks(partials, residual);
                    residual
                }
                (None, Some(output)) => {
                    let output = &mut output[in_row];
                    add_ranks_into(partials, output);
                    output
                }
                (None, None) => return,
            };
            if self.slabs.len() > 1 {
                // SAFETY: only this rank writes its results, and its peers are done with those of the last call.
                let to = unsafe { self.slabs[self.rank].results.write(self.place(row, &own)) };
                to.copy_from_slice(result);
            }
        }
    }

    fn finish_rows(&mut self, call: &mut Call<'_, Cpu, T>) {
        let hidden = self.shape.hidden;
        for row in 0..call.rows {
            let in_row = row * hidden..(row + 1) * hidden;
            let sum = match (&mut call.norm, &mut call.output) {
                (Some(norm), _) => &mut norm.residual[in_row.clone()],
                (None, Some(output)) => &mut output[in_row.clone()],
                (None, None) => return,
            };
            for (rank, slab) in self.slabs.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
                let columns = self.owned(rank);
                // SAFETY: `rank` posted its results of this call, and will not write them again before this
                // rank has made its first post of the next.
                let from = unsafe { slab.results.read(self.place(row, &columns)) };
                sum[columns].copy_from_slice(from);
            }
            let Some(inputs) = &call.norm else { continue };
            let output = match &mut call.output {
                Some(output) => &mut output[in_row.clone()],
                None => &mut self.output,
            };
            normalise(&inputs.norm, &inputs.residual[in_row.clone()], inputs.weight, &mut self.row, output);
            match &mut call.quantized {
                Some(Quantized::Static { values, scale }) => {
                    quantize_fast(output, *scale, &mut values[in_row])
                }
                Some(Quantized::PerRow { values, scales }) => {
                    scales[row] = row_scale(output);
                    quantize_fast(output, scales[row], &mut values[in_row]);
                }
                None => {}
            }
        }
    }

    fn post(&self, phase: usize, tag: Tag) {
        self.slabs[self.rank].posts[phase].0.store(post(self.epoch, tag), Ordering::Release);
    }

    fn wait_for_all(&self, phase: usize, tag: Tag, started: Instant) -> Result<()> {
        (0..self.slabs.len()).filter(|rank| *rank != self.rank).try_for_each(|peer| {
            let slab = &self.slabs[peer];
            let seen = || slab.posts[phase].0.load(Ordering::Acquire);
            let has_come = |seen: u64| (seen >> 32) as u32 == self.epoch;
            let is_over = || {
                // Before the post: who has left has made all posts that it ever will.
                let has_left = slab.left.0.load(Ordering::Acquire) != 0;
                has_come(seen()) || has_left || self.slabs[self.rank].abort.0.load(Ordering::Relaxed) != 0
            };
            let limit = self.time_limit.saturating_sub(started.elapsed());
            let in_time = has_come(seen()) || spin_until(limit, self.polite, is_over);
            let seen = seen();
            let cause = match has_come(seen) {
                true if seen == post(self.epoch, tag) => return Ok(()),
                true => Cause::Mismatch { own: tag, peer: Tag(seen as u32) },
                false => {
                    self.is_aborted(PHASES[phase])?;
                    if in_time { Cause::Left } else { Cause::Timeout }
                }
            };
            Err(self.give_up(cause, peer, PHASES[phase]))
        })
    }

    /// Tells all ranks of a lost peer, and makes the error. A mismatch they all see for themselves, and this
    /// rank may be the odd one.
    fn give_up(&self, cause: Cause, peer: usize, phase: &str) -> Error {
        if matches!(cause, Cause::Timeout | Cause::Left) {
            for slab in &self.slabs {
                slab.abort.0.store(1 + peer as u64, Ordering::Relaxed);
            }
        }
        cause.error(self.rank, peer, phase, self.epoch, self.time_limit)
    }

    /// The error if another rank has given up.
    fn is_aborted(&self, phase: &str) -> Result<()> {
        match self.slabs[self.rank].abort.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            peer => {
                Err(Cause::Aborted.error(self.rank, peer as usize - 1, phase, self.epoch, self.time_limit))
            }
        }
    }
}

impl<T: Element> Drop for Member<T> {
    /// Whoever waits for this rank need not wait for the limit.
    fn drop(&mut self) {
        self.slabs[self.rank].left.0.store(1, Ordering::Release);
    }
}

/// NaN wherever a result was promised.
fn poison<T: Element>(call: Call<'_, Cpu, T>) {
    let nan = T::from_f32(f32::NAN);
    if let Some(norm) = call.norm {
        norm.residual.fill(nan);
    }
    if let Some(output) = call.output {
        output.fill(nan);
    }
    match call.quantized {
        Some(Quantized::Static { values, .. }) => values.fill(0x7F),
        Some(Quantized::PerRow { values, scales }) => {
            values.fill(0x7F);
            scales.fill(f32::NAN);
        }
        None => {}
    }
}

/// `residual = round(residual + sum of ranks)`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn add_ranks<T: Element>(partials: &[&[T]], residual: &mut [T]) {
    each_sum(partials, residual, |residual, sum| T::from_f32(residual.to_f32() + sum));
}

/// `output = round(sum of ranks)`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn add_ranks_into<T: Element>(partials: &[&[T]], output: &mut [T]) {
    each_sum(partials, output, |_, sum| T::from_f32(sum));
}

/// Replaces each value by `combine(value, sum of ranks)`, the sums in the canonical order. One loop for each
/// number of ranks, so that all of it stays in registers.
#[inline(always)]
fn each_sum<T: Element>(partials: &[&[T]], values: &mut [T], combine: impl Fn(T, f32) -> T) {
    match *partials {
        [a] => each_sum_of([a], values, combine),
        [a, b] => each_sum_of([a, b], values, combine),
        [a, b, c, d] => each_sum_of([a, b, c, d], values, combine),
        [a, b, c, d, e, f, g, h] => each_sum_of([a, b, c, d, e, f, g, h], values, combine),
        _ => {} // no such world
    }
}

#[inline(always)]
fn each_sum_of<T: Element, const N: usize>(
    partials: [&[T]; N],
    values: &mut [T],
    combine: impl Fn(T, f32) -> T,
) {
    let partials = partials.map(|partial| &partial[..values.len()]);
    for (i, value) in values.iter_mut().enumerate() {
        let chain = |ranks: std::ops::Range<usize>| {
            let first = partials[ranks.start][i].to_f32();
            partials[ranks.start + 1..ranks.end].iter().fold(first, |sum, partial| sum + partial[i].to_f32())
        };
        let sum = if N <= 4 { chain(0..N) } else { chain(0..4) + chain(4..N) };
        *value = combine(*value, sum);
    }
}

/// One row of `output = norm(h) * weight`; `row` is scratch.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn normalise<T: Element>(norm: &RmsNorm, h: &[T], weight: &[T], row: &mut [f32], output: &mut [T]) {
    for (row, h) in row.iter_mut().zip(h) {
        *row = h.to_f32();
    }
    let scale = norm.scale(row);
    for ((output, row), weight) in output.iter_mut().zip(row.iter()).zip(weight) {
        *output = T::from_f32(row * scale * norm.factor(weight.to_f32()));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2+fma"))]
fn quantize_fast<T: Element>(values: &[T], scale: f32, quantized: &mut [u8]) {
    quantize(values, scale, quantized);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Group, WorldSize};

    /// A rank that says what it sends and then is silent: the others name it, all within the limit.
    #[test]
    fn a_rank_that_stops_in_the_middle_is_named() {
        let cpu = Cpu::with_threads(1).unwrap();
        let limit = Duration::from_millis(200);
        let rendezvous = Rendezvous::new(WorldSize::Four, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for rank in WorldSize::Four.ranks() {
                let (cpu, rendezvous) = (&cpu, &rendezvous);
                scope.spawn(move || {
                    let config = GroupConfig { time_limit: limit, ..GroupConfig::new(64, 4) };
                    let partial = [half::bf16::ONE; 128];
                    let mut output = [half::bf16::ZERO; 128];
                    if rank.index() == 2 {
                        let terms = config.terms::<half::bf16>(WorldSize::Four);
                        let shape = rendezvous.exchange(rank, 0, terms).unwrap()[2].shape;
                        let mut member: Member<half::bf16> =
                            cpu.join(rendezvous, rank, shape, &config).unwrap();
                        let (norm, output) = (None, Some(&mut output[..]));
                        let call = Call { rows: 2, partial: &partial[..], norm, output, quantized: None };
                        member.epoch += 1;
                        member.send_partial(&call);
                        member.post(0, Tag::new(2, Algorithm::TwoShot, None));
                        std::mem::forget(member); // it does not even leave
                        return;
                    }
                    let mut group = Group::<Cpu, half::bf16>::join(cpu, rendezvous, rank, config).unwrap();
                    let error = group.all_reduce(&partial[..], &mut output[..]).unwrap_err().to_string();
                    assert!(error.contains("rank 2"), "{error}");
                    assert!(output.iter().all(|value| value.is_nan()));
                    assert!(group.all_reduce(&partial[..], &mut output[..]).is_err());
                });
            }
        });
    }
}
