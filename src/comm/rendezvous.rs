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
    /// What each rank has brought to each stage.
    stages: Vec<Vec<Option<Arc<dyn Any + Send + Sync>>>>,
    /// Why there will be no group.
    broken: Option<Error>,
}

impl Rendezvous {
    /// A meeting place for `world` ranks that wait for each other for at most `time_limit`.
    pub fn new(world: WorldSize, time_limit: Duration) -> Self {
        Self { world, time_limit, shared: Arc::default() }
    }

    /// How many ranks meet here.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Brings `offer` to a stage and returns what all ranks brought, by rank. An error that one rank brings is
    /// an error for all.
    pub(crate) fn exchange<T: Send + Sync + 'static>(
        &self,
        rank: Rank,
        stage: usize,
        offer: Result<T>,
    ) -> Result<Vec<Arc<T>>> {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        if state.stages.len() <= stage {
            state.stages.resize_with(stage + 1, || vec![None; self.world.get()]);
        }
        if state.stages[stage][rank.index()].is_some() {
            return Err(Error::misuse("rendezvous", "every rank once, for one group", format!("{rank} again")));
        }
        match offer {
            Ok(offer) => state.stages[stage][rank.index()] = Some(Arc::new(offer)),
            Err(error) => {
                let own = error.clone();
                let seen = format!("{rank}: {error}");
                state.broken = Some(Error::fault("group", "every rank to be ready", seen));
                self.shared.changed.notify_all();
                return Err(own);
            }
        }
        self.shared.changed.notify_all();

        let deadline = Instant::now() + self.time_limit;
        loop {
            let all: Option<Vec<_>> = state.stages[stage].iter().cloned().collect();
            if let Some(all) = all {
                return all.into_iter().map(|offer| offer.downcast().map_err(|_| another_type(rank))).collect();
            }
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = self.world.ranks().filter(|rank| state.stages[stage][rank.index()].is_none());
                let missing = missing.map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
                let wanted = format!("all {} ranks within {:?}", self.world.get(), self.time_limit);
                let error = Error::fault("group", wanted, format!("no sign of {missing}"));
                state.broken = Some(error.clone());
                self.shared.changed.notify_all();
                return Err(error);
            }
            let woken = self.shared.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
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
            let offer = if rank.index() == 2 { Err(Error::fault("device", "memory", "none")) } else { Ok(()) };
            place.exchange(rank, 0, Ok(0)).and_then(|_| place.exchange(rank, 1, offer)).unwrap_err().to_string()
        });
        assert!(seen.iter().all(|s| s.contains("device: wanted memory, seen none")), "{seen:?}");
        assert!(seen[0].contains("rank 2"));
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
