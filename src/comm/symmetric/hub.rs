//! The one place that decides whether a stage is passed: a thread of rank 0's process.

use std::fs::{self, File, Permissions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, bind, connect, listen, socketpair};

use super::message::{Connection, Hello, Message, Received, wait};
use super::{address, is_own_user, new_socket, socket_error};
use crate::comm::parcel::Parcel;
use crate::comm::plan::{Rank, WorldSize};
use crate::error::{Error, Result};

/// Those who connected and have not said who they are; more are turned away.
const MAX_GUESTS: usize = 32;

/// The hub's thread. It ends when rank 0 closes its connection.
#[derive(Debug)]
pub(super) struct Hub(Option<JoinHandle<()>>);

impl Hub {
    /// Listens at `path` for the ranks that `host`, rank 0, wants. Also rank 0's own connection.
    pub(super) fn start(path: &Path, host: Hello) -> Result<(Self, Connection)> {
        let world = WorldSize::try_from(host.world)?;
        let listener = Listener::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, hosts) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|errno| socket_error("socketpair", errno))?;
        let mut meeting = Meeting {
            world,
            host: host.clone(),
            listener: Some(listener),
            guests: Vec::new(),
            seats: world.ranks().map(|_| None).collect(),
            stage: 0,
            deadline: None,
            broken: None,
        };
        meeting.seat(Connection(own), host);
        let thread = std::thread::Builder::new().name("eagle-verify-hub".into());
        let thread = thread
            .spawn(move || meeting.run())
            .map_err(|error| Error::fault("rendezvous socket", "a thread", error))?;
        Ok((Self(Some(thread)), Connection(hosts)))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.0.take().map(JoinHandle::join);
    }
}

/// A socket at a path, which is removed with it.
#[derive(Debug)]
struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    inode: (u64, u64),
}

impl Listener {
    fn new(path: &Path) -> Result<Self> {
        let address = address(path)?;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Error::fault("rendezvous socket", format!("to {what} {path:?}"), error)
        };
        let socket = new_socket()?;
        // The file gets the mode that the socket has before it is bound: nobody else ever can connect.
        let file = File::from(socket.try_clone().map_err(|error| failed("make", &error))?);
        file.set_permissions(Permissions::from_mode(0o600)).map_err(|error| failed("protect", &error))?;
        let bound = match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                bind(&socket, &address)
            }
            bound => bound,
        };
        bound.map_err(|errno| failed("bind", &errno))?;
        let inode = inode(path).ok_or_else(|| failed("find", &"nothing"))?;
        let listener = Self { socket, path: path.into(), inode };
        listen(&listener.socket, MAX_GUESTS as i32).map_err(|errno| failed("listen at", &errno))?;
        Ok(listener)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if inode(&self.path) == Some(self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Removes what a process left behind that was killed. Nothing else: neither a socket that someone listens at nor
/// a file of another kind.
fn remove_stale(path: &Path) -> Result<()> {
    let in_use = |seen: &str| {
        let wanted = "a path of its own for every group that forms";
        Err(Error::misuse("rendezvous socket", wanted, format!("{seen} at {path:?}")))
    };
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return in_use("another file"),
        Err(_) => return Ok(()), // gone by now
    }
    match connect(new_socket()?, &address(path)?) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => {
            let _ = fs::remove_file(path);
            Ok(())
        }
        _ => in_use("a rank 0 that is waiting"),
    }
}

/// A rank that has come.
#[derive(Debug)]
struct Seat {
    hello: Hello,
    /// `None` once it is gone.
    connection: Option<Connection>,
    offer: Option<Parcel>,
}

/// What the hub knows.
#[derive(Debug)]
struct Meeting {
    world: WorldSize,
    host: Hello,
    /// Until all have come.
    listener: Option<Listener>,
    guests: Vec<Connection>,
    /// By rank.
    seats: Vec<Option<Seat>>,
    /// Of exchanges, the next; when all have come.
    stage: usize,
    /// When those who wait will have waited long enough; `None` while nobody waits.
    deadline: Option<Instant>,
    broken: Option<Error>,
}

impl Meeting {
    fn run(mut self) {
        while self.connection(0).is_some() {
            if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.break_off(self.too_late());
            }
            if let Err(errno) = self.listen() {
                self.break_off(socket_error("poll", errno));
                break;
            }
        }
        // Who listens now has to know; who has its group does not look.
        self.break_off(self.gone(0));
        self.accept_all();
        for guest in &self.guests {
            let _ = self.broken.clone().map(|error| guest.send(&Message::Broken(error)));
        }
    }

    fn connection(&self, rank: usize) -> Option<&Connection> {
        self.seats[rank].as_ref()?.connection.as_ref()
    }

    /// Waits for something to happen and sees to it.
    fn listen(&mut self) -> Result<(), Errno> {
        let seated: Vec<usize> =
            (0..self.seats.len()).filter(|rank| self.connection(*rank).is_some()).collect();
        let num_guests = self.guests.len();
        let sockets = seated.iter().filter_map(|rank| self.connection(*rank)).chain(&self.guests);
        let mut sockets: Vec<_> = sockets.map(|connection| connection.0.as_fd()).collect();
        sockets.extend(self.listener.iter().map(|listener| listener.socket.as_fd()));
        let has_news = wait(&sockets, self.deadline)?;
        let (of_seats, rest) = has_news.split_at(seated.len());
        let (of_guests, of_listener) = rest.split_at(num_guests);
        for (&rank, _) in seated.iter().zip(of_seats).filter(|(_, has_news)| **has_news) {
            self.hear(rank);
        }
        let guests = std::mem::take(&mut self.guests);
        for (guest, has_news) in guests.into_iter().zip(of_guests) {
            if *has_news {
                self.welcome(guest);
            } else {
                self.guests.push(guest);
            }
        }
        if of_listener.first() == Some(&true) {
            self.accept_all();
        }
        Ok(())
    }

    /// Lets in all who have connected.
    fn accept_all(&mut self) {
        while let Some(listener) = &self.listener {
            match accept_with(&listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let guest = Connection(socket);
                    if is_own_user(&guest) && self.guests.len() < MAX_GUESTS {
                        self.guests.push(guest);
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    self.listener = None;
                    self.break_off(socket_error("accept", errno));
                }
            }
        }
    }

    /// What a guest says first.
    fn welcome(&mut self, guest: Connection) {
        let refused = match guest.receive() {
            Received::Nothing => return self.guests.push(guest),
            Received::Closed => return, // a look whether someone is here
            Received::Message(Message::Hello(hello)) => match self.refusal(&hello) {
                None => return self.seat(guest, hello),
                Some(error) => error,
            },
            Received::Message(_) => stranger("another message"),
            Received::Garbage(what) => stranger(&what),
        };
        self.break_off(refused);
        if let Some(error) = &self.broken {
            let _ = guest.send(&Message::Broken(error.clone()));
        }
    }

    /// Why a rank cannot be seated.
    fn refusal(&self, hello: &Hello) -> Option<Error> {
        let Hello { version, world, rank, .. } = hello;
        if let Some(error) = &self.broken {
            return Some(error.clone());
        }
        if *version != self.host.version {
            let wanted = format!("{} on all ranks, as rank 0", self.host.version);
            return Some(Error::misuse(
                "version of eagle-verify",
                wanted,
                format!("{version} on rank {rank}"),
            ));
        }
        if *world != self.host.world {
            let wanted = format!("{} on all ranks, as rank 0", self.host.world);
            return Some(Error::misuse("world size", wanted, format!("{world} on rank {rank}")));
        }
        match self.seats.get(*rank) {
            None => Some(Error::misuse("rank", format!("below {world}"), rank)),
            Some(Some(_)) => Some(Error::misuse(
                "rendezvous",
                "every rank once, for one group",
                format!("rank {rank} again"),
            )),
            Some(None) => None,
        }
    }

    fn seat(&mut self, guest: Connection, hello: Hello) {
        let rank = hello.rank;
        self.wait_no_longer(hello.time_left);
        self.seats[rank] = Some(Seat { hello, connection: Some(guest), offer: None });
        if self.seats.iter().all(Option::is_some) {
            self.listener = None;
            self.guests.clear();
            self.deadline = None;
            self.tell_all(&Message::Complete);
        }
    }

    fn wait_no_longer(&mut self, time: Duration) {
        // A limit beyond what the clock has is none.
        if let Some(deadline) = Instant::now().checked_add(time) {
            self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
        }
    }

    /// What a rank that has come says.
    fn hear(&mut self, rank: usize) {
        let Some(connection) = self.connection(rank) else { return };
        match connection.receive() {
            Received::Nothing => {}
            Received::Closed => self.lose(rank),
            Received::Garbage(what) => self.break_off(stranger(&what).elsewhere(format!("rank {rank}"))),
            Received::Message(Message::Broken(error)) => self.break_off(error),
            Received::Message(Message::Offer { stage, parcel }) => self.take(rank, stage, parcel),
            Received::Message(_) => {
                self.break_off(stranger("another message").elsewhere(format!("rank {rank}")));
            }
        }
    }

    fn take(&mut self, rank: usize, stage: usize, parcel: Parcel) {
        let is_next = stage == self.stage && self.listener.is_none();
        let Some(seat) = &mut self.seats[rank] else { return };
        if self.broken.is_some() || !is_next || seat.offer.is_some() {
            let seen = format!("rank {rank} at stage {stage} where the others are at {}", self.stage);
            return self.break_off(Error::misuse("rendezvous", "every rank once, for one group", seen));
        }
        seat.offer = Some(parcel);
        let time_limit = seat.hello.time_limit;
        self.wait_no_longer(time_limit);
        if self.seats.iter().flatten().all(|seat| seat.offer.is_some()) {
            let offers = self.seats.iter_mut().flatten().filter_map(|seat| seat.offer.take());
            let passed = Message::Passed { stage, parcels: offers.collect() };
            self.stage += 1;
            self.deadline = None;
            self.tell_all(&passed);
        }
    }

    fn lose(&mut self, rank: usize) {
        if let Some(seat) = &mut self.seats[rank] {
            seat.connection = None;
        }
        self.break_off(self.gone(rank));
    }

    /// To every rank that is still there. One that does not take it is lost.
    fn tell_all(&mut self, message: &Message) {
        for rank in 0..self.seats.len() {
            if self.connection(rank).is_some_and(|connection| connection.send(message).is_err()) {
                self.lose(rank);
            }
        }
    }

    /// There will be no group, or no further exchange: all who wait or come hear why.
    fn break_off(&mut self, error: Error) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error.clone());
        self.deadline = None;
        self.seats.iter_mut().flatten().for_each(|seat| seat.offer = None);
        self.tell_all(&Message::Broken(error));
    }

    fn too_late(&self) -> Error {
        let is_missing = |rank: &Rank| match &self.seats[rank.index()] {
            None => true,
            Some(seat) => self.listener.is_none() && seat.offer.is_none(),
        };
        let missing = self.world.ranks().filter(is_missing);
        let missing = missing.map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
        let wanted = format!("all {} ranks within {:?}", self.world.get(), self.host.time_limit);
        Error::fault("group", wanted, format!("no sign of {missing}"))
    }

    fn gone(&self, rank: usize) -> Error {
        let wanted = format!("all {} ranks to stay until it has formed", self.world.get());
        Error::fault("group", wanted, format!("the end of rank {rank}"))
    }
}

fn stranger(seen: &str) -> Error {
    Error::misuse("rendezvous socket", "ranks with this version of eagle-verify", seen)
}
