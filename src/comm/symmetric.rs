//! Ranks as processes of one machine. They meet at a Unix socket, which also takes what one process lets another
//! map: memory that all ranks of a group reach is made by `backend/cuda/symmetric.rs` and passed on here.
//!
//! In rank 0's process a thread, the [hub](hub), listens. Every rank has a connection with it, rank 0 too, and brings
//! it one offer for each stage. The hub alone decides whether a stage is passed: once all offers are there, it sends
//! all of them to everybody; once a rank says that it failed, is late or gone, it sends that. So ranks cannot come
//! to different answers, unless the hub's process or a rank itself dies before it has heard: then the next stage, or
//! the first call, fails.

mod hub;
mod message;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use super::parcel::{Offer, Parcel, Reader, Writer};
use super::plan::{Rank, WorldSize};
use crate::error::{Error, Result};
use hub::Hub;
use message::{Connection, Hello, Message, Received, wait};

/// A rank waits so much longer than the time limit, which the hub keeps, before it takes the hub itself for lost.
const GRACE: Duration = Duration::from_secs(1);
/// A rank that is there before rank 0 looks again after this.
const RETRY: Duration = Duration::from_millis(5);

/// A rank's connection with the hub.
#[derive(Debug)]
pub(super) struct Seat {
    world: WorldSize,
    rank: Rank,
    time_limit: Duration,
    next_stage: usize,
    /// Why there will be no group.
    broken: Option<Error>,
    connection: Connection,
    /// Rank 0 has it. After the connection: the hub ends when that is closed.
    _hub: Option<Hub>,
}

impl Seat {
    /// Meets the other ranks at `path`. Returns when all have come.
    pub(super) fn take(path: &Path, world: WorldSize, rank: Rank, time_limit: Duration) -> Result<Self> {
        let deadline = Instant::now() + time_limit;
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            world: world.get(),
            rank: rank.index(),
            time_limit,
            time_left: time_limit,
        };
        let (connection, hub) = if rank.index() == 0 {
            let (hub, connection) = Hub::start(path, hello)?;
            (connection, Some(hub))
        } else {
            let connection = find_hub(path, world, deadline, time_limit)?;
            let time_left = deadline.saturating_duration_since(Instant::now());
            // A hub that is gone is seen below.
            let _ = connection.send(&Message::Hello(Hello { time_left, ..hello }));
            (connection, None)
        };
        let seat = Self { world, rank, time_limit, next_stage: 0, broken: None, connection, _hub: hub };
        match seat.hear(deadline)? {
            Message::Complete => Ok(seat),
            other => Err(confused(&other)),
        }
    }

    /// Says that there will be no group.
    pub(super) fn break_off(&mut self, error: Error) {
        // If it cannot be sent the hub is gone, and all hear of that.
        let _ = self.connection.send(&Message::Broken(error.clone()));
        self.broken.get_or_insert(error);
    }

    /// Brings `offer` to a stage and returns what all ranks brought, by rank.
    pub(super) fn exchange<T: Offer>(&mut self, rank: Rank, stage: usize, offer: T) -> Result<Vec<Arc<T>>> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if rank != self.rank || stage != self.next_stage {
            let seen = format!("{rank} at stage {stage} where {} is at {}", self.rank, self.next_stage);
            return Err(Error::misuse("rendezvous", "every rank once, for one group", seen));
        }
        let Parcel { bytes, descriptors } = offer.pack()?;
        let bytes = Writer::default().text(T::KIND).bytes(&bytes).0;
        let parcels = self.pass(stage, Parcel { bytes, descriptors })?;
        self.next_stage += 1;
        let mut own = Some(offer);
        let offers = self.world.ranks().zip(parcels).map(|(other, parcel)| {
            let offer = if other == rank { own.take() } else { unpack(parcel) };
            offer.map(Arc::new).ok_or_else(|| {
                let wanted = format!("its {}", T::KIND);
                Error::misuse(format!("offer of {other}"), wanted, "something else")
            })
        });
        offers.collect()
    }

    fn pass(&self, stage: usize, parcel: Parcel) -> Result<Vec<Parcel>> {
        let sent = self.connection.send(&Message::Offer { stage, parcel });
        // Where nobody has heard there may still be word of why.
        let time_limit = if sent.is_ok() { self.time_limit } else { Duration::ZERO };
        match self.hear(Instant::now() + time_limit)? {
            Message::Passed { stage: passed, parcels }
                if passed == stage && parcels.len() == self.world.get() =>
            {
                Ok(parcels)
            }
            other => Err(confused(&other)),
        }
    }

    /// What the hub says. `Broken` is an error.
    fn hear(&self, deadline: Instant) -> Result<Message> {
        let lost = |what: &str| {
            let wanted = format!("all {} ranks within {:?}", self.world.get(), self.time_limit);
            Err(Error::fault("group", wanted, format!("{what} rank 0, where the ranks meet")))
        };
        loop {
            match self.connection.receive() {
                Received::Message(Message::Broken(error)) => return Err(error),
                Received::Message(message) => return Ok(message),
                Received::Closed => return lost("the end of"),
                Received::Garbage(what) => return lost(&format!("{what} from")),
                Received::Nothing => {}
            }
            let is_there = wait(&[self.connection.0.as_fd()], Some(deadline + GRACE))
                .map_err(|errno| socket_error("poll", errno))?;
            if !is_there[0] {
                return lost("no sign of");
            }
        }
    }
}

fn unpack<T: Offer>(Parcel { bytes, descriptors }: Parcel) -> Option<T> {
    let mut reader = Reader(&bytes);
    let (kind, bytes) = (reader.text()?, reader.bytes()?.to_vec());
    let parcel = reader.end(Parcel { bytes, descriptors })?;
    if kind == T::KIND { T::unpack(parcel) } else { None }
}

fn confused(message: &Message) -> Error {
    Error::fault("rendezvous socket", "what the next stage needs", format!("{message:?}"))
}

fn socket_error(call: &str, errno: Errno) -> Error {
    Error::fault(format!("{call} on the rendezvous socket"), "success", errno)
}

fn address(path: &Path) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|errno| {
        Error::misuse("rendezvous socket", "a path that a Unix socket can have", format!("{path:?}: {errno}"))
    })
}

fn new_socket() -> Result<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|errno| socket_error("socket", errno))
}

/// Whether the other side of a connection is a process of this one's user.
fn is_own_user(connection: &Connection) -> bool {
    socket_peercred(&connection.0).is_ok_and(|peer| peer.uid == geteuid())
}

/// Connects with rank 0, once it is there.
fn find_hub(path: &Path, world: WorldSize, deadline: Instant, time_limit: Duration) -> Result<Connection> {
    let address = address(path)?;
    loop {
        let connection = Connection(new_socket()?);
        match connect(&connection.0, &address) {
            Ok(()) if is_own_user(&connection) => return Ok(connection),
            Ok(()) => {
                let seen = format!("another user's at {path:?}");
                return Err(Error::fault("rendezvous socket", "one of this user", seen));
            }
            // Not there, not any more, or busy.
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::PROTOTYPE) => {
                let seen = format!("a socket of another kind at {path:?}");
                return Err(Error::misuse("rendezvous socket", "one of this crate", seen));
            }
            Err(errno) => return Err(socket_error("connect", errno)),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let wanted = format!("all {} ranks within {time_limit:?}", world.get());
            return Err(Error::fault("group", wanted, format!("no sign of rank 0 at {path:?}")));
        }
        std::thread::sleep(left.min(RETRY));
    }
}

#[cfg(test)]
mod tests;
