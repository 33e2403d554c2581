//! Ranks that each have the logits of some tokens: what makes their choices one.
//!
//! A call is passed by all ranks or by none. The state is under one lock, and whoever completes or ends a call
//! decides for all: it leaves the outcome with every rank that waits. A rank that comes later than that finds the
//! call's number among those that have failed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::parcel::{Offer, Parcel, Reader, Writer};
use super::{Rank, Rendezvous, check_time_limit};
use crate::error::{Error, Result};
use crate::sampling::ChoiceKey;

/// What a rank brings to a [`VocabShard`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabShardConfig {
    /// Tokens of the vocabulary; the same on all ranks.
    pub vocab: usize,
    /// The tokens whose logits this rank has. Those of all ranks together are the vocabulary, each token once.
    pub columns: Range<usize>,
    /// How long a call waits for the other ranks at most, from 1 ms to an hour; the same on all ranks.
    pub time_limit: Duration,
}

impl VocabShardConfig {
    /// These columns of `vocab`, and a limit of ten seconds.
    pub const fn new(vocab: usize, columns: Range<usize>) -> Self {
        Self { vocab, columns, time_limit: Duration::from_secs(10) }
    }

    /// The columns of `rank` where a vocabulary is cut into `world` parts that differ by one token at most.
    pub fn even(vocab: usize, rank: Rank, world: super::WorldSize) -> Self {
        let bound = |rank: usize| vocab * rank / world.get();
        Self::new(vocab, bound(rank.index())..bound(rank.index() + 1))
    }
}

/// One rank's shard of the vocabulary, and what combines its choices with those of the other ranks.
///
/// In a tensor-parallel target each rank computes the logits of its own tokens. The target's token of a row is that of
/// the largest [`ChoiceKey`] of all ranks, so ranks exchange eight bytes for each row instead of its logits.
/// [`Speculator::new_sharded`](crate::Speculator::new_sharded) does that; an engine's own plain decoding can by
/// [`combine`](Self::combine). All ranks make the same calls in the same order.
///
/// A call is passed by all ranks, or fails on all with an error that names the rank it failed for. Where a rank was
/// late or has gone, all later calls fail at once.
///
/// Ranks are threads of one process. Steady calls allocate nothing.
#[derive(Debug)]
pub struct VocabShard {
    rank: Rank,
    config: VocabShardConfig,
    /// The number of calls so far.
    num_calls: u64,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// How often a call has ended, one way or another.
    num_ended: AtomicU64,
    ended: Condvar,
}

/// A rank looks for the others so long before it sleeps: to be woken takes longer than they are mostly apart.
const SPIN: Duration = Duration::from_micros(100);

#[derive(Debug)]
struct State {
    /// By rank.
    seats: Vec<Seat>,
    /// Calls up to this number fail for who has not passed them, and why.
    failed: Option<(u64, Error)>,
    /// Why all calls after those fail.
    lost: Option<Error>,
}

/// What a rank has brought to a call, and later what the call gave it.
#[derive(Debug, Default)]
struct Seat {
    /// The call it waits in.
    call: Option<Call>,
    words: Vec<u64>,
    outcome: Option<Result<()>>,
}

/// What must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    operation: Operation,
    num_words: usize,
    /// What the words are about: two ranks that drafted differently have different ones.
    fingerprint: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Combine,
    Broadcast,
}

impl VocabShard {
    /// Meets the other ranks at `rendezvous`, which is not that of a [`Group`](super::Group). Returns when all have
    /// come.
    ///
    /// # Errors
    /// *Misuse* when the ranks' columns are not the vocabulary or their limits differ, or a rank comes twice;
    /// *unsupported* where ranks are processes; *fault* when a rank is missing or fails. Then no rank has a shard.
    pub fn join(rendezvous: &Rendezvous, rank: Rank, config: VocabShardConfig) -> Result<Self> {
        let world = rendezvous.world();
        let rank = Rank::new(rank.index(), world)?;
        let checked = check_columns(&config.columns, config.vocab)
            .and_then(|()| check_time_limit(config.time_limit))
            .map(|()| config.clone());
        let configs = rendezvous.exchange(rank, 0, checked)?;
        check_cover(&configs)?;
        let seats = world.ranks().map(|_| Seat::default()).collect();
        let state = Mutex::new(State { seats, failed: None, lost: None });
        let shared = Arc::new(Shared { state, num_ended: AtomicU64::new(0), ended: Condvar::new() });
        let meeting = rendezvous.exchange(rank, 1, Ok(Meeting(shared)))?;
        // All take rank 0's.
        Ok(Self { rank, config, num_calls: 0, shared: Arc::clone(&meeting[0].0) })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The tokens whose logits this rank has.
    pub fn columns(&self) -> Range<usize> {
        self.config.columns.clone()
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.config.vocab
    }

    /// Replaces each key by the largest that any rank has at its place: the row's, from all shards. It says by
    /// [`ChoiceKey::checked`] what is wrong with the row.
    ///
    /// # Errors
    /// *Misuse* when the ranks make different calls or have different numbers of keys; *fault* when a rank is late,
    /// has gone or has failed. The keys are as they were then.
    pub fn combine(&mut self, keys: &mut [ChoiceKey]) -> Result<()> {
        self.combine_prepared(Ok(()), keys, 0)
    }

    /// Replaces `values` by those of rank 0: for whatever a rank may not decide alone. What depends on measured time,
    /// such as a draft budget, is decided by rank 0 and shared so, or ranks would go different ways.
    ///
    /// # Errors
    /// As [`combine`](Self::combine).
    pub fn broadcast(&mut self, values: &mut [u64]) -> Result<()> {
        let call = Call { operation: Operation::Broadcast, num_words: values.len(), fingerprint: 0 };
        self.pass(Ok(()), call, values)
    }

    /// Says that this rank will make no more calls, because of `error`. The others need not wait for it.
    pub fn abandon(&self, error: &Error) {
        self.state().lose(error.elsewhere(self.rank));
        self.shared.tell_all();
    }

    /// As [`combine`](Self::combine), for keys that a rank may have failed to prepare: its error is the call's, on
    /// all ranks. Keys of another `fingerprint` are not combined.
    pub(crate) fn combine_prepared(
        &mut self,
        prepared: Result<()>,
        keys: &mut [ChoiceKey],
        fingerprint: u64,
    ) -> Result<()> {
        let call = Call { operation: Operation::Combine, num_words: keys.len(), fingerprint };
        self.pass(prepared, call, bytemuck::cast_slice_mut(keys))
    }

    fn pass(&mut self, prepared: Result<()>, call: Call, words: &mut [u64]) -> Result<()> {
        self.num_calls += 1;
        let (rank, number, shared) = (self.rank.index(), self.num_calls, &*self.shared);
        let mut state = self.state();
        let failed = state.failed.as_ref().filter(|(failed, _)| *failed >= number);
        if let Some(error) = failed.map(|(_, error)| error).or(state.lost.as_ref()) {
            return Err(prepared.err().unwrap_or_else(|| error.clone()));
        }
        let other = state.other_call(rank, call);
        if let Some(error) = prepared.as_ref().err().map(|error| error.elsewhere(self.rank)).or(other) {
            state.failed = Some((number, error.clone()));
            state.end(&error);
            shared.tell_all();
            return Err(prepared.err().unwrap_or(error));
        }
        let seat = &mut state.seats[rank];
        (seat.call, seat.outcome) = (Some(call), None);
        seat.words.clear();
        seat.words.extend_from_slice(words);
        if state.seats.iter().all(|seat| seat.call.is_some()) {
            state.complete(call.operation);
            shared.tell_all();
        }
        self.wait(state)?;
        words.copy_from_slice(&self.state().seats[rank].words);
        Ok(())
    }

    /// Waits for the outcome of this rank's call.
    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<()> {
        let (shared, deadline) = (&*self.shared, Instant::now() + self.config.time_limit);
        let mut may_spin = true;
        loop {
            if let Some(outcome) = state.seats[self.rank.index()].outcome.take() {
                return outcome;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = (0..).zip(&state.seats).filter(|(_, seat)| seat.call.is_none());
                let missing: Vec<String> = missing.map(|(rank, _): (u8, _)| format!("rank {rank}")).collect();
                let wanted = format!("all {} ranks within {:?}", state.seats.len(), self.config.time_limit);
                let seen = format!("no sign of {} in call {}", missing.join(", "), self.num_calls);
                state.lose(Error::fault("vocabulary shards", wanted, seen));
                shared.tell_all();
                continue;
            }
            if may_spin {
                may_spin = false;
                let before = shared.num_ended.load(Ordering::Acquire);
                drop(state);
                let started = Instant::now();
                while shared.num_ended.load(Ordering::Acquire) == before && started.elapsed() < SPIN {
                    std::thread::yield_now();
                }
                state = self.state();
            } else {
                state = shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VocabShard {
    /// Whoever waits for this rank need not wait for the limit.
    fn drop(&mut self) {
        let seen = format!("{} gone", self.rank);
        self.state().lose(Error::fault("vocabulary shards", "all ranks to go on", seen));
        self.shared.tell_all();
    }
}

impl Shared {
    /// Wakes the ranks that wait.
    fn tell_all(&self) {
        self.num_ended.fetch_add(1, Ordering::Release);
        self.ended.notify_all();
    }
}

impl State {
    /// Ends the call that ranks wait in.
    fn end(&mut self, error: &Error) {
        for seat in self.seats.iter_mut().filter(|seat| seat.call.is_some()) {
            (seat.call, seat.outcome) = (None, Some(Err(error.clone())));
        }
    }

    /// Ends all calls. The first reason is kept.
    fn lose(&mut self, error: Error) {
        self.end(&error);
        self.lost.get_or_insert(error);
    }

    /// The error if another rank waits in another call than that of `rank`.
    fn other_call(&self, rank: usize, call: Call) -> Option<Error> {
        let mut waiting = self.seats.iter().enumerate().filter_map(|(rank, seat)| Some((rank, seat.call?)));
        let (other_rank, other) = waiting.find(|(_, other)| *other != call)?;
        let wanted = format!("the same on all ranks, as rank {other_rank}: {other}");
        Some(Error::misuse("call of the vocabulary shards", wanted, format!("{call} on rank {rank}")))
    }

    /// Gives every rank the result: all have come.
    fn complete(&mut self, operation: Operation) {
        let (first, others) = self.seats.split_at_mut(1);
        let result = &mut first[0].words;
        if operation == Operation::Combine {
            for seat in &mut *others {
                for (largest, word) in result.iter_mut().zip(&seat.words) {
                    *largest = (*largest).max(*word);
                }
            }
        }
        others.iter_mut().for_each(|seat| seat.words.copy_from_slice(result));
        for seat in &mut self.seats {
            (seat.call, seat.outcome) = (None, Some(Ok(())));
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { num_words, fingerprint, .. } = self;
        match self.operation {
            Operation::Combine => write!(f, "keys of {num_words} rows (#{fingerprint:016x})"),
            Operation::Broadcast => write!(f, "{num_words} values of rank 0"),
        }
    }
}

/// Misuse unless columns are tokens of a vocabulary.
pub(crate) fn check_columns(columns: &Range<usize>, vocab: usize) -> Result<()> {
    if columns.start < columns.end && columns.end <= vocab {
        return Ok(());
    }
    Err(Error::misuse("columns", format!("some of 0..{vocab}"), format!("{columns:?}")))
}

/// Misuse unless the shards of all ranks are the vocabulary.
fn check_cover(configs: &[Arc<VocabShardConfig>]) -> Result<()> {
    let terms = |config: &VocabShardConfig| (config.vocab, config.time_limit);
    for (rank, config) in configs.iter().enumerate() {
        if terms(config) != terms(&configs[0]) {
            let describe = |(vocab, limit)| format!("{vocab} tokens and a limit of {limit:?}");
            let wanted = format!("the same on all ranks, as rank 0: {}", describe(terms(&configs[0])));
            let seen = format!("{} on rank {rank}", describe(terms(config)));
            return Err(Error::misuse("vocabulary shards", wanted, seen));
        }
    }
    let mut columns: Vec<Range<usize>> = configs.iter().map(|config| config.columns.clone()).collect();
    columns.sort_by_key(|columns| columns.start);
    let ends = std::iter::once(0).chain(columns.iter().map(|columns| columns.end));
    let starts = columns.iter().map(|columns| columns.start).chain([configs[0].vocab]);
    if ends.eq(starts) {
        return Ok(());
    }
    let seen: Vec<String> = configs.iter().map(|config| format!("{:?}", config.columns)).collect();
    let wanted = format!("each token of 0..{} on one rank", configs[0].vocab);
    Err(Error::misuse("vocabulary shards", wanted, seen.join(", ")))
}

impl Offer for VocabShardConfig {
    const KIND: &'static str = "vocabulary shard";

    fn pack(&self) -> Result<Parcel> {
        let Self { vocab, columns, time_limit } = self;
        let writer = Writer::default().usize(*vocab).usize(columns.start).usize(columns.end);
        Ok(Parcel { bytes: writer.duration(*time_limit).0, ..Parcel::default() })
    }

    fn unpack(parcel: Parcel) -> Option<Self> {
        let mut reader = Reader(&parcel.bytes);
        let (vocab, start, end) = (reader.usize()?, reader.usize()?, reader.usize()?);
        let time_limit = reader.duration()?;
        reader.end(Self { vocab, columns: start..end, time_limit })
    }
}

/// Where the ranks' calls meet.
#[derive(Debug)]
struct Meeting(Arc<Shared>);

/// Its ranks are threads.
impl Offer for Meeting {
    const KIND: &'static str = "meeting of vocabulary shards";

    fn pack(&self) -> Result<Parcel> {
        let seen = "processes; gather whole rows of logits there, and let every rank choose";
        Err(Error::unsupported("ranks of vocabulary shards", "threads of one process", seen))
    }

    fn unpack(_: Parcel) -> Option<Self> {
        None
    }
}

#[cfg(test)]
mod tests;
