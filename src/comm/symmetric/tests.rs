use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::*;
use crate::error::ErrorKind;

const LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);

/// A path of its own, and nothing left at it in the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("eagle-verify-seat-{}-{number}", std::process::id())))
    }

    fn take(&self, world: WorldSize, rank: usize, limit: Duration) -> Result<Seat> {
        Seat::take(&self.0, world, Rank::new(rank, world)?, limit)
    }

    /// A connection with a rank 0 that waits.
    fn stranger(&self) -> Connection {
        find_hub(&self.0, WorldSize::Two, Instant::now() + LIMIT, LIMIT).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        assert!(!self.0.exists() || thread::panicking(), "a socket is left");
    }
}

/// Rank 0 of two, with somebody else beside it. What rank 0 says, and what the other heard.
fn beside(limit: Duration, other: impl FnOnce(&Place) -> Option<Error> + Send) -> (Error, Option<Error>) {
    let place = Place::new();
    let started = Instant::now();
    let outcome = thread::scope(|scope| {
        let place = &place;
        let other = scope.spawn(move || other(place));
        let error = place.take(WorldSize::Two, 0, limit).map(drop).unwrap_err();
        (error, other.join().unwrap())
    });
    assert!(started.elapsed() < limit + Duration::from_secs(5));
    outcome
}

/// What a connection hears, or none if it is closed without a word.
fn last_word(connection: &Connection) -> Option<Error> {
    loop {
        wait(&[connection.0.as_fd()], Some(Instant::now() + LIMIT)).unwrap();
        match connection.receive() {
            Received::Message(Message::Broken(error)) => return Some(error),
            Received::Message(_) => {}
            Received::Closed => return None,
            other => panic!("{other:?}"),
        }
    }
}

fn hello(rank: usize) -> Hello {
    let version = env!("CARGO_PKG_VERSION").into();
    Hello { version, world: 2, rank, time_limit: LIMIT, time_left: LIMIT }
}

#[test]
fn strangers_and_other_versions_are_refused() {
    let says = |message: Message| {
        beside(LIMIT, move |place| {
            let connection = place.stranger();
            connection.send(&message).unwrap();
            last_word(&connection)
        })
    };
    for (message, wanted) in [
        (Message::Hello(Hello { version: "0.0.9".into(), ..hello(1) }), "seen 0.0.9 on rank 1"),
        (
            Message::Hello(Hello { world: 4, ..hello(1) }),
            "world size: wanted 2 on all ranks, as rank 0, seen 4",
        ),
        (Message::Hello(hello(2)), "rank: wanted below 2, seen 2"),
        (Message::Hello(hello(0)), "rank 0 again"),
        (Message::Complete, "another message"),
    ] {
        let (error, other) = says(message);
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains(wanted), "{error}");
        assert_eq!(other.unwrap().to_string(), error.to_string(), "both hear why");
    }
    // Bytes that no rank sends, an empty packet, and someone who only looks: that one is no reason to give up.
    let (error, _) = beside(LIMIT, |place| {
        rustix::net::send(&place.stranger().0, b"GET /", rustix::net::SendFlags::empty()).unwrap();
        None
    });
    assert!(error.to_string().contains("5 other bytes"), "{error}");
    let (error, _) = beside(SHORT, |place| {
        let (silent, looking) = (place.stranger(), place.stranger());
        rustix::net::send(&looking.0, b"", rustix::net::SendFlags::empty()).unwrap();
        drop(looking);
        last_word(&silent)
    });
    assert!(error.to_string().contains("no sign of rank 1"), "{error}");
}

#[test]
fn a_rank_that_is_there_twice_is_refused() {
    let place = Place::new();
    let outcomes = thread::scope(|scope| {
        let place = &place;
        let ranks =
            [0, 1, 1].map(|rank| scope.spawn(move || place.take(WorldSize::Four, rank, LIMIT).map(drop)));
        ranks.map(|rank| rank.join().unwrap().unwrap_err().to_string())
    });
    assert!(outcomes.iter().any(|error| error.contains("seen rank 1 again")), "{outcomes:?}");
    assert!(
        outcomes.iter().all(|error| error.contains("rank 1 again") || error.contains("rank 0")),
        "{outcomes:?}"
    );
}

#[test]
fn the_end_of_a_rank_is_noticed_at_once() {
    for (world, gone) in
        [(WorldSize::Two, 0), (WorldSize::Two, 1), (WorldSize::Four, 0), (WorldSize::Four, 2)]
    {
        let place = Place::new();
        let started = Instant::now();
        thread::scope(|scope| {
            for rank in world.ranks() {
                let place = &place;
                scope.spawn(move || {
                    let mut seat = place.take(world, rank.index(), LIMIT).unwrap();
                    seat.exchange(rank, 0, ()).unwrap();
                    if rank.index() != gone {
                        let error = seat.exchange(rank, 1, ()).unwrap_err();
                        assert!(error.to_string().contains(&format!("the end of rank {gone}")), "{error}");
                        assert!(error.kind() == ErrorKind::Fault);
                    }
                });
            }
        });
        assert!(started.elapsed() < LIMIT / 2);
    }
}

#[test]
fn without_rank_0_there_is_an_error_in_time() {
    let place = Place::new();
    let started = Instant::now();
    let error = place.take(WorldSize::Two, 1, SHORT).map(drop).unwrap_err();
    assert!(error.to_string().contains("no sign of rank 0"), "{error}");
    assert!(started.elapsed() >= SHORT && started.elapsed() < LIMIT / 2);
}

/// A hub that does not run: its process is stopped. Its clients do not wait for ever.
#[test]
fn a_silent_hub_is_an_error_in_time() {
    let place = Place::new();
    let listener = new_socket().unwrap();
    rustix::net::bind(&listener, &address(&place.0).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let started = Instant::now();
    let error = place.take(WorldSize::Two, 1, SHORT).map(drop).unwrap_err();
    assert!(error.to_string().contains("no sign of rank 0"), "{error}");
    assert!(started.elapsed() < LIMIT / 2);
    fs::remove_file(&place.0).unwrap();
}

#[test]
fn the_socket_is_the_users_alone_and_is_removed() {
    let place = Place::new();
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| place.take(WorldSize::Two, 0, LIMIT).unwrap());
        let guest = place.stranger();
        assert_eq!(fs::metadata(&place.0).unwrap().permissions().mode() & 0o777, 0o600);
        // Another group cannot form at the same path meanwhile.
        let error = place.take(WorldSize::Two, 0, LIMIT).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("waiting"), "{error}");
        drop(guest);
        let seat = place.take(WorldSize::Two, 1, LIMIT).unwrap();
        assert!(!place.0.exists(), "all have come");
        drop((seat, rank_0.join().unwrap()));
    });
}

#[test]
fn what_is_left_behind_is_replaced_and_nothing_else() {
    let place = Place::new();
    drop(UnixListener::bind(&place.0).unwrap()); // as a killed process leaves it
    drop(place.take(WorldSize::One, 0, LIMIT).unwrap());
    assert!(!place.0.exists());

    fs::write(&place.0, "a file").unwrap();
    let error = place.take(WorldSize::One, 0, LIMIT).map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("another file"), "{error}");
    assert_eq!(fs::read_to_string(&place.0).unwrap(), "a file");
    fs::remove_file(&place.0).unwrap();

    // A server of another kind.
    let server = UnixListener::bind(&place.0).unwrap();
    for rank in [0, 1] {
        let error = place.take(WorldSize::Two, rank, LIMIT).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse, "{error}");
    }
    drop(server);
    fs::remove_file(&place.0).unwrap();

    for path in [PathBuf::from("x".repeat(200)), place.0.join("nowhere")] {
        for rank in [0, 1] {
            let world = WorldSize::Two;
            let error =
                Seat::take(&path, world, Rank::new(rank, world).unwrap(), SHORT).map(drop).unwrap_err();
            assert!(error.to_string().contains("socket") || error.to_string().contains("rank 0"), "{error}");
        }
    }
}

#[test]
fn a_seat_is_one_ranks() {
    let place = Place::new();
    let mut seat = place.take(WorldSize::One, 0, LIMIT).unwrap();
    let error = seat.exchange(Rank::new(1, WorldSize::Two).unwrap(), 0, ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("rank 1 at stage 0"), "{error}");
}

/// A second hello, an offer out of turn, garbage: a rank's own mistake, and all hear of it.
#[test]
fn ranks_that_speak_out_of_turn_end_the_meeting() {
    let offer = |stage| Message::Offer { stage, parcel: Parcel::default() };
    for (message, wanted) in [
        (offer(3), "stage 3"),
        (Message::Hello(hello(1)), "another message"),
        (Message::Complete, "another message"),
    ] {
        let place = Place::new();
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| {
                let mut seat = place.take(WorldSize::Two, 0, LIMIT)?;
                seat.exchange(seat.rank, 0, ())
            });
            let connection = place.stranger();
            connection.send(&Message::Hello(hello(1))).unwrap();
            connection.send(&message).unwrap();
            let heard = last_word(&connection).unwrap().to_string();
            assert!(heard.contains(wanted), "{heard}");
            assert_eq!(rank_0.join().unwrap().unwrap_err().to_string(), heard);
        });
    }
}
