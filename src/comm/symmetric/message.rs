//! What a rank and the hub say to each other: one packet each, so that none is ever seen in part.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::comm::parcel::{Parcel, Reader, Writer};
use crate::error::{Error, ErrorKind};

/// Every packet begins with it. Another format has another.
const MAGIC: u64 = u64::from_le_bytes(*b"EVmeet01");
/// No packet is longer: eight offers, or an error with its texts.
const MAX_BYTES: usize = 16 << 10;
/// No packet has more: a descriptor of each rank.
const MAX_DESCRIPTORS: usize = 8;

#[derive(Debug)]
pub(super) enum Message {
    /// A rank has come.
    Hello(Hello),
    /// To every rank: all have come.
    Complete,
    /// A rank is at a stage.
    Offer { stage: usize, parcel: Parcel },
    /// To every rank: all are at the stage, with these offers, by rank.
    Passed { stage: usize, parcels: Vec<Parcel> },
    /// From a rank, or to every rank: there will be no group.
    Broken(Error),
}

/// Who a rank is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Hello {
    /// This crate's.
    pub(super) version: String,
    pub(super) world: usize,
    pub(super) rank: usize,
    /// How long it waits for others at each stage.
    pub(super) time_limit: Duration,
    /// How long it goes on waiting until all have come.
    pub(super) time_left: Duration,
}

#[derive(Debug)]
pub(super) enum Received {
    Message(Message),
    /// Nothing, for now.
    Nothing,
    /// The other side has closed its socket, or its process ended.
    Closed,
    /// What no rank sends.
    Garbage(String),
}

impl Message {
    fn write(&self) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let writer = Writer::default().u64(MAGIC);
        let mut descriptors = Vec::new();
        let mut parcel =
            |writer: Writer, parcel: &'_ Parcel| writer.bytes(&parcel.bytes).usize(parcel.descriptors.len());
        let writer = match self {
            Self::Hello(hello) => writer
                .u8(0)
                .text(&hello.version)
                .usize(hello.world)
                .usize(hello.rank)
                .duration(hello.time_limit)
                .duration(hello.time_left),
            Self::Complete => writer.u8(1),
            Self::Offer { stage, parcel: offer } => {
                descriptors.extend(offer.descriptors.iter().map(OwnedFd::as_fd));
                parcel(writer.u8(2).usize(*stage), offer)
            }
            Self::Passed { stage, parcels } => {
                descriptors.extend(parcels.iter().flat_map(|p| p.descriptors.iter().map(OwnedFd::as_fd)));
                parcels.iter().fold(writer.u8(3).usize(*stage).usize(parcels.len()), &mut parcel)
            }
            Self::Broken(error) => {
                let kind = match error.kind() {
                    ErrorKind::Misuse => 0,
                    ErrorKind::Unsupported => 1,
                    ErrorKind::Fault => 2,
                };
                writer.u8(4).u8(kind).text(error.subject()).text(error.wanted()).text(error.seen())
            }
        };
        (writer.0, descriptors)
    }

    fn read(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<Self> {
        let (mut reader, mut descriptors) = (Reader(bytes), descriptors.into_iter());
        let mut parcel = |reader: &mut Reader<'_>| {
            let bytes = reader.bytes()?.to_vec();
            let count = reader.usize()?;
            let descriptors: Vec<_> = descriptors.by_ref().take(count).collect();
            (descriptors.len() == count).then_some(Parcel { bytes, descriptors })
        };
        if reader.u64()? != MAGIC {
            return None;
        }
        let message = match reader.u8()? {
            0 => Self::Hello(Hello {
                version: reader.text()?,
                world: reader.usize()?,
                rank: reader.usize()?,
                time_limit: reader.duration()?,
                time_left: reader.duration()?,
            }),
            1 => Self::Complete,
            2 => Self::Offer { stage: reader.usize()?, parcel: parcel(&mut reader)? },
            3 => {
                let (stage, count) = (reader.usize()?, reader.usize()?);
                let parcels =
                    (0..count.min(MAX_DESCRIPTORS)).map(|_| parcel(&mut reader)).collect::<Option<_>>()?;
                Self::Passed { stage, parcels }
            }
            4 => {
                let kind = reader.u8()?;
                let (subject, wanted, seen) = (reader.text()?, reader.text()?, reader.text()?);
                Self::Broken(match kind {
                    0 => Error::misuse(subject, wanted, seen),
                    1 => Error::unsupported(subject, wanted, seen),
                    2 => Error::fault(subject, wanted, seen),
                    _ => return None,
                })
            }
            _ => return None,
        };
        reader.end(message)
    }
}

/// One end of a connected socket, which keeps packets apart.
#[derive(Debug)]
pub(super) struct Connection(pub(super) OwnedFd);

impl Connection {
    /// Never waits: what the other side does not take in time is an error, too.
    pub(super) fn send(&self, message: &Message) -> Result<(), Errno> {
        let (bytes, descriptors) = message.write();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(Errno::TOOBIG);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// What has come. Never waits.
    pub(super) fn receive(&self) -> Received {
        let mut was_reset = false;
        loop {
            let mut bytes = vec![0; MAX_BYTES];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Received::Nothing,
                // The other side closed before it had read everything; its own last words are still to be read.
                Err(Errno::CONNRESET) if !was_reset => {
                    was_reset = true;
                    continue;
                }
                Err(_) => return Received::Closed,
                Ok(received) => received,
            };
            let mut descriptors = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            if received.bytes == 0 {
                return Received::Closed;
            }
            if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
                return Received::Garbage(format!(
                    "more than {MAX_BYTES} bytes or {MAX_DESCRIPTORS} descriptors"
                ));
            }
            bytes.truncate(received.bytes);
            return match Message::read(&bytes, descriptors) {
                Some(message) => Received::Message(message),
                None => Received::Garbage(format!("{} other bytes", bytes.len())),
            };
        }
    }
}

/// Waits until one of the sockets has something to say, or `deadline`. Says for each whether it has.
pub(super) fn wait(sockets: &[BorrowedFd<'_>], deadline: Option<Instant>) -> Result<Vec<bool>, Errno> {
    let mut polled: Vec<_> =
        sockets.iter().map(|socket| PollFd::from_borrowed_fd(*socket, PollFlags::IN)).collect();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut polled, left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok(_) => return Ok(polled.iter().map(|polled| !polled.revents().is_empty()).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (Connection, Connection) {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Connection(a), Connection(b))
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (a, b) = pair();
        let parcel = |bytes: &[u8], count| Parcel {
            bytes: bytes.to_vec(),
            descriptors: (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect(),
        };
        let hello = Hello {
            version: "1.2.3".into(),
            world: 8,
            rank: 7,
            time_limit: Duration::new(3, 5),
            time_left: Duration::MAX,
        };
        for message in [
            Message::Hello(hello),
            Message::Complete,
            Message::Offer { stage: 2, parcel: parcel(b"abc", 1) },
            Message::Passed { stage: 3, parcels: vec![parcel(b"", 0), parcel(b"x", 2), parcel(b"yz", 1)] },
            Message::Broken(Error::unsupported("a", "b", "ä".repeat(2000))),
        ] {
            a.send(&message).unwrap();
            let Received::Message(received) = b.receive() else { panic!("{message:?}") };
            let (want, got) = (message.write(), received.write());
            assert_eq!((want.0, want.1.len()), (got.0, got.1.len()));
        }
        assert!(matches!(b.receive(), Received::Nothing));
        // Last words are heard, also when the one who spoke did not listen.
        b.send(&Message::Complete).unwrap();
        a.send(&Message::Complete).unwrap();
        drop(a);
        assert!(matches!(b.receive(), Received::Message(Message::Complete)));
        assert!(matches!(b.receive(), Received::Closed));
        assert!(b.send(&Message::Complete).is_err());
    }

    /// Every packet that is cut short, or has a byte too many or another one, is garbage or a message: no panic,
    /// and no descriptor stays open.
    #[test]
    fn garbage_is_told_apart() {
        let (lent, other_end) = pair();
        let parcel = || Parcel { bytes: vec![7; 9], descriptors: vec![lent.0.try_clone().unwrap()] };
        let messages = [
            Message::Passed { stage: 1, parcels: vec![parcel(), parcel()] },
            Message::Broken(Error::fault("subject", "wanted", "seen")),
        ];
        for message in &messages {
            let (bytes, borrowed) = message.write();
            let own = || borrowed.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect::<Vec<_>>();
            assert!(Message::read(&bytes, own()).is_some());
            for len in 0..bytes.len() {
                assert!(Message::read(&bytes[..len], own()).is_none(), "{len}");
            }
            assert!(Message::read(&[&bytes[..], &[0]].concat(), own()).is_none());
            if !borrowed.is_empty() {
                assert!(Message::read(&bytes, Vec::new()).is_none(), "descriptors are missing");
            }
            for at in 0..bytes.len() {
                for flip in [1, 0x80, 0xFF] {
                    let mut other = bytes.clone();
                    other[at] ^= flip;
                    let _ = Message::read(&other, own());
                }
            }
        }
        drop((messages, lent));
        assert!(matches!(other_end.receive(), Received::Closed), "no copy of its other end is left");
        let (a, b) = pair();
        for bytes in [&b"GET / HTTP/1.1"[..], &[0; MAX_BYTES + 1]] {
            rustix::net::send(&a.0, bytes, SendFlags::empty()).unwrap();
            assert!(matches!(b.receive(), Received::Garbage(_)));
        }
    }
}
