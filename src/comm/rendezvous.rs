//! Where the ranks of a process meet to form a group: staged exchanges that all ranks pass or none.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::plan::{Rank, WorldSize};
use crate::error::{Error, Result};

/// The place where the ranks of one group meet, one thread each. Clones are the same place; it forms one group.
///
/// Once a rank failed or was missing, all others fail too, with an error that names it.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    world: WorldSize,
    time_limit: Duration,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stages: Vec<Stage>,
    /// Why there will be no group.
    broken: Option<Error>,
}

/// What each rank has brought to a stage; dropped when all have taken it, since it may be memory.
#[derive(Debug)]
struct Stage {
    has_come: Vec<bool>,
    offers: Vec<Option<Offer>>,
    num_taken: usize,
}

type Offer = Arc<dyn Any + Send + Sync>;

/// Longer limits are this.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Rendezvous {
    /// A meeting place for `world` ranks that wait for each other for at most `time_limit`.
    pub fn new(world: WorldSize, time_limit: Duration) -> Self {
        Self { world, time_limit, shared: Arc::default() }
    }

    /// How many ranks meet here.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Says that `rank` will not come, because of `error`: for a rank that fails before it can join. The others
    /// need not wait for it.
    pub fn abandon(&self, rank: Rank, error: &Error) {
        self.break_off(error.elsewhere(rank));
    }

    /// Brings `offer` to a stage and returns what all ranks brought, by rank. An error that one rank brings is
    /// an error of the same kind for all.
    pub(crate) fn exchange<T: Send + Sync + 'static>(
        &self,
        rank: Rank,
        stage: usize,
        offer: Result<T>,
    ) -> Result<Vec<Arc<T>>> {
        self.exchange_and_keep(rank, stage, offer.map(|offer| (offer, ()))).map(|(all, ())| all)
    }

    /// As [`exchange`](Self::exchange), for a rank that keeps something beside what it offers.
    pub(crate) fn exchange_and_keep<T: Send + Sync + 'static, K>(
        &self,
        rank: Rank,
        stage: usize,
        prepared: Result<(T, K)>,
    ) -> Result<(Vec<Arc<T>>, K)> {
        let (offer, kept) = prepared.inspect_err(|error| self.abandon(rank, error))?;
        let outcome =
            self.pass(rank, stage, Arc::new(offer)).inspect_err(|error| self.break_off(error.clone()));
        let downcast = |offer: Offer| offer.downcast().map_err(|_| another_type(rank));
        Ok((outcome?.into_iter().map(downcast).collect::<Result<_>>()?, kept))
    }

    fn pass(&self, rank: Rank, stage: usize, offer: Offer) -> Result<Vec<Offer>> {
        let world = self.world.get();
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        while state.stages.len() <= stage {
            state.stages.push(Stage {
                has_come: vec![false; world],
                offers: vec![None; world],
                num_taken: 0,
            });
        }
        if std::mem::replace(&mut state.stages[stage].has_come[rank.index()], true) {
            return Err(Error::misuse(
                "rendezvous",
                "every rank once, for one group",
                format!("{rank} again"),
            ));
        }
        state.stages[stage].offers[rank.index()] = Some(offer);
        self.shared.changed.notify_all();

        let deadline = Instant::now() + self.time_limit.min(LONGEST);
        loop {
            let place = &mut state.stages[stage];
            if let Some(all) = place.offers.iter().cloned().collect::<Option<Vec<_>>>() {
                place.num_taken += 1;
                if place.num_taken == world {
                    place.offers.fill(None); // `all` is not the last: nothing is freed under the lock
                }
                return Ok(all);
            }
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = self.world.ranks().filter(|rank| !state.stages[stage].has_come[rank.index()]);
                let missing = missing.map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
                let wanted = format!("all {world} ranks within {:?}", self.time_limit);
                return Err(Error::fault("group", wanted, format!("no sign of {missing}")));
            }
            let woken = self.shared.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// There will be no group: all ranks that wait or come hear why.
    fn break_off(&self, error: Error) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.broken.get_or_insert(error);
        // A stage where all have come is passed by all: its last taker empties it.
        let incomplete = state.stages.iter_mut().filter(|stage| stage.has_come.contains(&false));
        let offers: Vec<Offer> =
            incomplete.flat_map(|stage| stage.offers.iter_mut().filter_map(Option::take)).collect();
        drop(state);
        self.shared.changed.notify_all();
        drop(offers); // not under the lock: it may be memory of a device
    }
}

fn another_type(rank: Rank) -> Error {
    Error::misuse("group", "one element type and backend on all ranks", format!("others beside {rank}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Send>(
        world: WorldSize,
        limit: Duration,
        body: impl Fn(Rank, &Rendezvous) -> T + Sync,
    ) -> Vec<T> {
        let place = Rendezvous::new(world, limit);
        std::thread::scope(|scope| {
            let threads: Vec<_> = world
                .ranks()
                .map(|rank| {
                    let (body, place) = (&body, &place);
                    scope.spawn(move || body(rank, place))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_every_offer_in_rank_order() {
        for _ in 0..50 {
            let seen = run(WorldSize::Four, Duration::from_secs(10), |rank, place| {
                let first = place.exchange(rank, 0, Ok(rank.index() * 10)).unwrap();
                let second = place.exchange(rank, 1, Ok(format!("{rank}"))).unwrap();
                (first.iter().map(|v| **v).collect::<Vec<_>>(), second[3].to_string())
            });
            assert!(seen.iter().all(|s| *s == (vec![0, 10, 20, 30], "rank 3".to_string())));
        }
    }

    #[test]
    fn one_failing_rank_fails_all() {
        let seen = run(WorldSize::Four, Duration::from_secs(10), |rank, place| {
            let failed = Error::unsupported("device", "memory", "none");
            let offer = if rank.index() == 2 { Err(failed) } else { Ok(()) };
            place
                .exchange(rank, 0, Ok(0))
                .and_then(|_| place.exchange(rank, 1, offer))
                .unwrap_err()
                .to_string()
        });
        assert_eq!(seen[2], "unsupported: device: wanted memory, seen none");
        for rank in [0, 1, 3] {
            assert_eq!(seen[rank], "unsupported: device of rank 2: wanted memory, seen none");
        }
    }

    #[test]
    fn a_rank_that_cannot_come_says_so() {
        let started = Instant::now();
        let seen = run(WorldSize::Two, Duration::from_secs(60), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(())).unwrap_err().to_string(),
            _ => {
                place.abandon(rank, &Error::fault("file", "weights", "none"));
                String::new()
            }
        });
        assert_eq!(seen[0], "fault: file of rank 1: wanted weights, seen none");
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    /// What ranks exchange may be device memory: the meeting place does not keep it.
    #[test]
    fn offers_are_dropped_once_all_have_them() {
        let place = Rendezvous::new(WorldSize::Two, Duration::MAX);
        let offer = Arc::new(());
        std::thread::scope(|scope| {
            for rank in WorldSize::Two.ranks() {
                let (place, offer) = (&place, Arc::clone(&offer));
                scope.spawn(move || place.exchange(rank, 0, Ok(offer)).unwrap());
            }
        });
        assert_eq!(Arc::strong_count(&offer), 1);
        let rank = Rank::new(0, WorldSize::Two).unwrap();
        place.abandon(rank, &Error::fault("a", "b", "c"));
        assert!(place.exchange(rank, 1, Ok(Arc::clone(&offer))).is_err());
        assert_eq!(Arc::strong_count(&offer), 1);
    }

    #[test]
    fn a_missing_rank_is_named_in_time() {
        let started = Instant::now();
        let seen = run(WorldSize::Two, Duration::from_millis(50), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(())).unwrap_err().to_string(),
            _ => String::new(),
        });
        assert!(seen[0].contains("no sign of rank 1"), "{seen:?}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_rank_that_comes_twice_and_another_type_are_misuse() {
        let place = Rendezvous::new(WorldSize::One, Duration::from_secs(1));
        let rank = Rank::new(0, WorldSize::One).unwrap();
        assert!(place.exchange(rank, 0, Ok(1u8)).is_ok());
        assert!(place.exchange(rank, 0, Ok(1u8)).is_err());
        let seen = run(WorldSize::Two, Duration::from_secs(10), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(1u8)).is_err(),
            _ => place.exchange(rank, 0, Ok(1u16)).is_err(),
        });
        assert_eq!(seen, [true, true]);
    }
}
