//! Where ranks meet to form a group: staged exchanges that all ranks pass or none. Between threads of a process here,
//! between processes in `symmetric.rs`.

use std::any::Any;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::parcel::Offer;
use super::plan::{Rank, WorldSize};
#[cfg(target_os = "linux")]
use super::symmetric::Seat;
use crate::error::{Error, Result};

/// The place where the ranks of one group meet, threads of one process ([`new`](Self::new)) or processes of one
/// machine ([`over_socket`](Self::over_socket)). Clones are the same place; it forms one group.
///
/// Once a rank failed or was missing, all others fail too, with an error that names it.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    world: WorldSize,
    time_limit: Duration,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Process(Arc<Shared>),
    #[cfg(target_os = "linux")]
    Machine(Arc<Mutex<Seat>>),
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
    offers: Vec<Option<AnyOffer>>,
    num_taken: usize,
}

type AnyOffer = Arc<dyn Any + Send + Sync>;

/// Longer limits are this.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Rendezvous {
    /// A meeting place for `world` ranks, each a thread of this process, that wait for each other for at most
    /// `time_limit`.
    pub fn new(world: WorldSize, time_limit: Duration) -> Self {
        Self { world, time_limit: time_limit.min(LONGEST), place: Place::Process(Arc::default()) }
    }

    /// The meeting place of `world` ranks, each a process of this machine and user, at the Unix socket `path`. They
    /// wait for each other for at most `time_limit`, here and at each stage of [`Group::join`](super::Group::join).
    /// Returns when all of them have come.
    ///
    /// Rank 0 makes the socket, with mode 0600, and removes it once all have come; the others may be there before
    /// it. The path is this group's alone: in a directory that only this user can write to, with a name that is new
    /// for each start of the engine, such as its launcher's process ID. What a killed rank 0 left there is replaced.
    /// In containers, the ranks share the directory.
    ///
    /// While a group forms, the end of a rank's process is noticed at once. After that nothing needs this value, and
    /// it may be dropped: a rank that is lost then is noticed by the calls, as [`GroupConfig::time_limit`] says.
    ///
    /// [`GroupConfig::time_limit`]: super::GroupConfig::time_limit
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")]
    /// # fn main() -> eagle_verify::Result<()> {
    /// use std::time::Duration;
    /// use eagle_verify::backend::cuda::Cuda;
    /// use eagle_verify::comm::{Group, GroupConfig, Rank, Rendezvous, WorldSize};
    /// use half::bf16;
    ///
    /// // Of four processes, one for each GPU, this is the one with this rank.
    /// let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    /// let world = WorldSize::Four;
    /// let cuda = Cuda::new(rank)?;
    /// let rendezvous = Rendezvous::over_socket(
    ///     format!("{}/engine-{}", std::env::var("XDG_RUNTIME_DIR").unwrap(), std::env::var("RUN").unwrap()),
    ///     world,
    ///     Rank::new(rank, world)?,
    ///     Duration::from_secs(120), // until the slowest has loaded its weights
    /// )?;
    /// let config = GroupConfig::new(7168, 64);
    /// let group = Group::<Cuda, bf16>::join(&cuda, &rendezvous, Rank::new(rank, world)?, config)?;
    /// # drop(group); Ok(())
    /// # }
    /// # #[cfg(not(feature = "cuda"))] fn main() {}
    /// ```
    ///
    /// # Errors
    /// *Misuse* when the ranks differ in this crate's version or the world's size, one comes twice, something else
    /// than a rank connects, or `path` is not free; *unsupported* on other systems than Linux; *fault* when a rank is
    /// missing or its process ends, or when the socket fails. Then no rank meets the others, and each error names the
    /// rank; but who comes only when rank 0 has given up finds no more than that rank 0 is not there. Should rank 0's
    /// process stand still without having ended, then the others find out a second after the time limit.
    pub fn over_socket(
        path: impl AsRef<Path>,
        world: WorldSize,
        rank: Rank,
        time_limit: Duration,
    ) -> Result<Self> {
        let rank = Rank::new(rank.index(), world)?;
        #[cfg(target_os = "linux")]
        {
            let time_limit = time_limit.min(LONGEST);
            let seat = Seat::take(path.as_ref(), world, rank, time_limit)?;
            Ok(Self { world, time_limit, place: Place::Machine(Arc::new(Mutex::new(seat))) })
        }
        #[cfg(not(target_os = "linux"))]
        {
            let seen = format!("another system, on {rank} at {:?} for {time_limit:?}", path.as_ref());
            Err(Error::unsupported("ranks as processes", "Linux", seen))
        }
    }

    /// How many ranks meet here.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Whether what ranks bring has to be mapped by other processes.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_between_processes(&self) -> bool {
        !matches!(self.place, Place::Process(_))
    }

    /// Says that `rank` will not come, because of `error`: for a rank that fails before it can join. The others
    /// need not wait for it.
    pub fn abandon(&self, rank: Rank, error: &Error) {
        self.break_off(error.elsewhere(rank));
    }

    /// Brings `offer` to a stage and returns what all ranks brought, by rank. An error that one rank brings is
    /// an error of the same kind for all.
    pub(crate) fn exchange<T: Offer>(
        &self,
        rank: Rank,
        stage: usize,
        offer: Result<T>,
    ) -> Result<Vec<Arc<T>>> {
        self.exchange_and_keep(rank, stage, offer.map(|offer| (offer, ()))).map(|(all, ())| all)
    }

    /// As [`exchange`](Self::exchange), for a rank that keeps something beside what it offers.
    pub(crate) fn exchange_and_keep<T: Offer, K>(
        &self,
        rank: Rank,
        stage: usize,
        prepared: Result<(T, K)>,
    ) -> Result<(Vec<Arc<T>>, K)> {
        let (offer, kept) = prepared.inspect_err(|error| self.abandon(rank, error))?;
        let outcome = match &self.place {
            Place::Process(shared) => self.pass(shared, rank, stage, offer),
            #[cfg(target_os = "linux")]
            Place::Machine(seat) => {
                seat.lock().unwrap_or_else(PoisonError::into_inner).exchange(rank, stage, offer)
            }
        };
        Ok((outcome.inspect_err(|error| self.break_off(error.clone()))?, kept))
    }

    /// A stage between threads.
    fn pass<T: Offer>(&self, shared: &Shared, rank: Rank, stage: usize, offer: T) -> Result<Vec<Arc<T>>> {
        let offers = self.pass_any(shared, rank, stage, Arc::new(offer))?;
        offers.into_iter().map(|offer| offer.downcast().map_err(|_| another_type(rank))).collect()
    }

    fn pass_any(&self, shared: &Shared, rank: Rank, stage: usize, offer: AnyOffer) -> Result<Vec<AnyOffer>> {
        let world = self.world.get();
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        shared.changed.notify_all();

        let deadline = Instant::now() + self.time_limit;
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
            let woken = shared.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// There will be no group: all ranks that wait or come hear why.
    fn break_off(&self, error: Error) {
        match &self.place {
            Place::Process(shared) => shared.break_off(error),
            #[cfg(target_os = "linux")]
            Place::Machine(seat) => seat.lock().unwrap_or_else(PoisonError::into_inner).break_off(error),
        }
    }
}

impl Shared {
    fn break_off(&self, error: Error) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.broken.get_or_insert(error);
        // A stage where all have come is passed by all: its last taker empties it.
        let incomplete = state.stages.iter_mut().filter(|stage| stage.has_come.contains(&false));
        let offers: Vec<AnyOffer> =
            incomplete.flat_map(|stage| stage.offers.iter_mut().filter_map(Option::take)).collect();
        drop(state);
        self.changed.notify_all();
        drop(offers); // not under the lock: it may be memory of a device
    }
}

fn another_type(rank: Rank) -> Error {
    Error::misuse("group", "one element type and backend on all ranks", format!("others beside {rank}"))
}

#[cfg(test)]
mod tests;
