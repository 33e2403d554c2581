//! One suite for both kinds of meeting places: threads that share one, and threads that meet at a socket as
//! processes do.

use super::*;
use crate::comm::parcel::{Parcel, Reader, Writer};
use crate::error::ErrorKind;

/// Numbers and texts as offers.
macro_rules! offers {
    ($($type:ty),*) => {$(
        impl Offer for $type {
            const KIND: &'static str = stringify!($type);

            fn pack(&self) -> Result<Parcel> {
                let bytes = Writer::default().text(&self.to_string()).0;
                Ok(Parcel { bytes, ..Parcel::default() })
            }

            fn unpack(parcel: Parcel) -> Option<Self> {
                Reader(&parcel.bytes).text()?.parse().ok()
            }
        }
    )*};
}
offers!(u8, u16, usize, String);

impl Offer for Arc<()> {
    const KIND: &'static str = "something that stays in its process";

    fn pack(&self) -> Result<Parcel> {
        Err(Error::unsupported("ranks as processes", "threads", "none"))
    }

    fn unpack(_: Parcel) -> Option<Self> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Process,
    #[cfg(target_os = "linux")]
    Socket,
}

#[cfg(target_os = "linux")]
const BOTH: &[At] = &[At::Process, At::Socket];
#[cfg(not(target_os = "linux"))]
const BOTH: &[At] = &[At::Process];

/// A path that nothing is at.
#[cfg(target_os = "linux")]
fn new_path() -> std::path::PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("eagle-verify-{}-{number}", std::process::id()))
}

fn run<T: Send>(
    at: At,
    world: WorldSize,
    limit: Duration,
    body: impl Fn(Rank, &Rendezvous) -> T + Sync,
) -> Vec<T> {
    let place: Box<dyn Fn(Rank) -> Rendezvous + Sync> = match at {
        At::Process => {
            let place = Rendezvous::new(world, limit);
            Box::new(move |_| place.clone())
        }
        #[cfg(target_os = "linux")]
        At::Socket => {
            let path = new_path();
            Box::new(move |rank| Rendezvous::over_socket(&path, world, rank, limit).unwrap())
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (body, place) = (&body, &place);
                scope.spawn(move || body(rank, &place(rank)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_gets_every_offer_in_rank_order() {
    for at in BOTH.iter().cycle().take(50) {
        let seen = run(*at, WorldSize::Four, Duration::from_secs(10), |rank, place| {
            let first = place.exchange(rank, 0, Ok(rank.index() * 10)).unwrap();
            let second = place.exchange(rank, 1, Ok(format!("{rank}"))).unwrap();
            (first.iter().map(|v| **v).collect::<Vec<_>>(), second[3].to_string())
        });
        assert!(seen.iter().all(|s| *s == (vec![0, 10, 20, 30], "rank 3".to_string())));
    }
}

#[test]
fn one_failing_rank_fails_all() {
    for at in BOTH {
        let seen = run(*at, WorldSize::Four, Duration::from_secs(10), |rank, place| {
            let failed = Error::unsupported("device", "memory", "none");
            let offer = if rank.index() == 2 { Err(failed) } else { Ok(()) };
            place
                .exchange(rank, 0, Ok(0u8))
                .and_then(|_| place.exchange(rank, 1, offer))
                .unwrap_err()
                .to_string()
        });
        assert_eq!(seen[2], "unsupported: device: wanted memory, seen none");
        for rank in [0, 1, 3] {
            assert_eq!(seen[rank], "unsupported: device of rank 2: wanted memory, seen none");
        }
    }
}

#[test]
fn a_rank_that_cannot_come_says_so() {
    let started = Instant::now();
    for at in BOTH {
        let seen = run(*at, WorldSize::Two, Duration::from_secs(60), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(())).unwrap_err().to_string(),
            _ => {
                place.abandon(rank, &Error::fault("file", "weights", "none"));
                place.exchange(rank, 0, Ok(())).unwrap_err().to_string()
            }
        });
        assert_eq!(seen, ["fault: file of rank 1: wanted weights, seen none"; 2]);
    }
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
    for at in BOTH {
        let seen = run(*at, WorldSize::Two, Duration::from_millis(200), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(())).unwrap_err().to_string(),
            _ => {
                std::thread::sleep(Duration::from_millis(600));
                place.exchange(rank, 0, Ok(())).unwrap_err().to_string()
            }
        });
        assert!(seen[0].contains("no sign of rank 1"), "{seen:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_comes_twice_and_another_type_are_misuse() {
    for at in BOTH {
        run(*at, WorldSize::One, Duration::from_secs(1), |rank, place| {
            assert!(place.exchange(rank, 0, Ok(1u8)).is_ok());
            assert_eq!(place.exchange(rank, 0, Ok(1u8)).unwrap_err().kind(), ErrorKind::Misuse);
            assert!(place.exchange(rank, 1, Ok(1u8)).is_err(), "nor does it go on");
        });
        let seen = run(*at, WorldSize::Two, Duration::from_secs(10), |rank, place| match rank.index() {
            0 => place.exchange(rank, 0, Ok(1u8)).map(drop),
            _ => place.exchange(rank, 0, Ok(1u16)).map(drop),
        });
        assert!(seen.into_iter().all(|seen| seen.unwrap_err().kind() == ErrorKind::Misuse));
    }
}
