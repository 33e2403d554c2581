use super::*;
use crate::comm::WorldSize;
use crate::error::ErrorKind;
use crate::tree::TokenId;

const LIMIT: Duration = Duration::from_secs(20);

/// Runs a life for each rank, with a shard each, and returns what they made of it.
fn lives<T: Send>(world: WorldSize, limit: Duration, life: impl Fn(usize, VocabShard) -> T + Sync) -> Vec<T> {
    let rendezvous = Rendezvous::new(world, LIMIT);
    std::thread::scope(|scope| {
        let threads: Vec<_> = world
            .ranks()
            .map(|rank| {
                let (rendezvous, life) = (&rendezvous, &life);
                scope.spawn(move || {
                    let config =
                        VocabShardConfig { time_limit: limit, ..VocabShardConfig::even(100, rank, world) };
                    life(rank.index(), VocabShard::join(rendezvous, rank, config).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn keys(rank: usize, call: usize, count: usize) -> Vec<ChoiceKey> {
    let key = |row: usize| ChoiceKey::new(((rank * 7 + row * 3 + call) % 11) as f32, TokenId(rank as u32));
    (0..count).map(key).collect()
}

#[test]
fn every_rank_gets_the_largest_keys() {
    for world in [WorldSize::One, WorldSize::Two, WorldSize::Four, WorldSize::Eight] {
        let seen = lives(world, LIMIT, |rank, mut shard| {
            (0..200).all(|call| {
                let count = call % 9; // also none
                let mut own = keys(rank, call, count);
                shard.combine(&mut own).unwrap();
                let largest = |row: usize| (0..world.get()).map(|rank| keys(rank, call, count)[row]).max();
                let is_right = (0..count).all(|row| Some(own[row]) == largest(row));
                let mut values = [(rank * 100 + call) as u64, 7 + rank as u64];
                shard.broadcast(&mut values).unwrap();
                is_right && values == [call as u64, 7]
            })
        });
        assert_eq!(seen, vec![true; world.get()]);
    }
    // Controls: without one rank, and with a rank's keys one row off, another answer would have shown.
    let largest = |ranks: Range<usize>, row: usize| ranks.map(|rank| keys(rank, 0, 9)[row]).max();
    assert!((0..8).any(|row| largest(0..3, row) != largest(0..4, row)));
    assert!((0..8).any(|row| largest(0..4, row) != largest(0..4, row + 1)));
}

#[test]
fn calls_that_differ_fail_on_all_ranks_and_name_one() {
    type Make = fn(usize, &mut VocabShard) -> Result<()>;
    let differing: [(Make, &str); 3] = [
        (|rank, shard| shard.combine(&mut keys(rank, 0, 4 + rank / 3)), "keys of 5 rows"),
        (|rank, shard| shard.combine_prepared(Ok(()), &mut keys(0, 0, 4), (rank / 3) as u64), "#"),
        (
            |rank, shard| {
                if rank == 3 { shard.broadcast(&mut [0; 4]) } else { shard.combine(&mut keys(0, 0, 4)) }
            },
            "4 values of rank 0",
        ),
    ];
    for (make, part) in differing {
        let seen = lives(WorldSize::Four, LIMIT, |rank, mut shard| {
            let error = make(rank, &mut shard).unwrap_err();
            // The next call is one like any other.
            let mut own = keys(rank, 1, 3);
            shard.combine(&mut own).unwrap();
            (error.kind(), error.to_string())
        });
        for (kind, error) in &seen {
            assert!(*kind == ErrorKind::Misuse && error.contains(part) && error.contains("rank"), "{error}");
        }
    }
}

#[test]
fn what_one_rank_failed_to_prepare_is_the_error_of_all() {
    let seen = lives(WorldSize::Four, LIMIT, |rank, mut shard| {
        let mut errors = Vec::new();
        // Rank 2 fails twice in a row before the others have come, and goes on.
        for call in 0..4 {
            let prepared = match (rank, call) {
                (2, 0 | 1) => Err(Error::fault("device", "an answer", format!("none in call {call}"))),
                _ => Ok(()),
            };
            let mut own = keys(rank, call, 3);
            let before = own.clone();
            if let Err(error) = shard.combine_prepared(prepared, &mut own, 0) {
                assert_eq!(own, before, "the keys are as they were");
                errors.push(error.to_string());
            }
            if rank != 2 && call == 0 {
                std::thread::sleep(Duration::from_millis(10 * rank as u64));
            }
        }
        errors
    });
    for (rank, errors) in seen.iter().enumerate() {
        assert_eq!(errors.len(), 2, "rank {rank}: {errors:?}");
        let place = if rank == 2 { "device:" } else { "device of rank 2:" };
        assert!(errors.iter().all(|error| error.contains(place)), "rank {rank}: {errors:?}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_limit() {
    let limit = Duration::from_millis(150);
    let started = Instant::now();
    let seen = lives(WorldSize::Four, limit, |rank, mut shard| {
        shard.combine(&mut keys(rank, 0, 2)).unwrap();
        if rank == 1 {
            std::thread::sleep(6 * limit); // it is there, but late
        }
        let error = shard.combine(&mut keys(rank, 1, 2)).unwrap_err();
        let again = Instant::now();
        assert!(shard.broadcast(&mut [1]).is_err() && shard.combine(&mut []).is_err());
        assert!(again.elapsed() < limit, "later calls fail at once");
        error.to_string()
    });
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(seen.iter().all(|error| error.contains("no sign of rank 1 in call 2")), "{seen:?}");
}

#[test]
fn a_rank_that_leaves_need_not_be_waited_for() {
    let started = Instant::now();
    for (leave, part) in [
        ((|_, shard| drop(shard)) as fn(&Error, VocabShard), "rank 3 gone"),
        (|error, shard| shard.abandon(error), "file of rank 3"),
        (
            |error, shard| {
                shard.abandon(error);
                std::mem::forget(shard);
            },
            "file of rank 3",
        ),
    ] {
        let seen = lives(WorldSize::Four, LIMIT, |rank, mut shard| {
            shard.combine(&mut keys(rank, 0, 2)).unwrap();
            if rank == 3 {
                leave(&Error::fault("file", "weights", "none"), shard);
                return None;
            }
            Some(shard.combine(&mut keys(rank, 1, 2)).unwrap_err().to_string())
        });
        let errors: Vec<String> = seen.into_iter().flatten().collect();
        // Who comes after another has left because of the error may hear of that one.
        assert_eq!(errors.len(), 3);
        assert!(errors.iter().all(|error| error.contains(part)), "{errors:?}");
    }
    assert!(started.elapsed() < LIMIT);
}

#[test]
fn shards_must_be_the_vocabulary() {
    let join = |columns: [Range<usize>; 2], vocab: [usize; 2], limits: [u64; 2]| {
        let rendezvous = Rendezvous::new(WorldSize::Two, LIMIT);
        let life = |rank: Rank| {
            let i = rank.index();
            let time_limit = Duration::from_millis(limits[i]);
            let config = VocabShardConfig { vocab: vocab[i], columns: columns[i].clone(), time_limit };
            VocabShard::join(&rendezvous, rank, config).map(drop).map_err(|error| error.to_string())
        };
        let life = &life;
        std::thread::scope(|scope| {
            let ranks = WorldSize::Two.ranks().map(|rank| scope.spawn(move || life(rank)));
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    assert_eq!(join([0..30, 30..100], [100; 2], [50; 2]), [Ok(()), Ok(())]);
    assert_eq!(join([30..100, 0..30], [100; 2], [50; 2]), [Ok(()), Ok(())], "in any order");
    for (columns, vocab, limits, part) in [
        ([0..30, 31..100], [100; 2], [50; 2], "each token of 0..100 on one rank"),
        ([0..31, 30..100], [100; 2], [50; 2], "each token of 0..100 on one rank"),
        ([0..30, 30..99], [100; 2], [50; 2], "each token of 0..100 on one rank"),
        ([1..30, 30..100], [100; 2], [50; 2], "each token of 0..100 on one rank"),
        ([0..30, 0..100], [100; 2], [50; 2], "each token of 0..100 on one rank"),
        ([0..30, 30..101], [100; 2], [50; 2], "some of 0..100"),
        ([0..30, 30..30], [30; 2], [50; 2], "some of 0..30"),
        ([0..30, 30..100], [100, 101], [50; 2], "101 tokens"),
        ([0..30, 30..100], [100; 2], [50, 60], "limit of 60ms on rank 1"),
        ([0..30, 30..100], [100; 2], [0, 0], "from 1 ms to an hour"),
    ] {
        for seen in join(columns.clone(), vocab, limits) {
            let error = seen.unwrap_err();
            assert!(error.starts_with("misuse") && error.contains(part), "{columns:?}: {error}");
        }
    }
}

/// Where ranks are processes there is a clear answer, on all of them.
#[cfg(target_os = "linux")]
#[test]
fn ranks_that_met_at_a_socket_hear_that_it_is_unsupported() {
    let path = std::env::temp_dir().join(format!("eagle-verify-shard-{}", std::process::id()));
    let life = |rank: Rank| {
        let rendezvous = Rendezvous::over_socket(&path, WorldSize::Two, rank, LIMIT).unwrap();
        let config = VocabShardConfig::even(10, rank, WorldSize::Two);
        VocabShard::join(&rendezvous, rank, config).map(drop).unwrap_err()
    };
    let life = &life;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = WorldSize::Two.ranks().map(|rank| scope.spawn(move || life(rank))).collect();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("gather whole rows"), "{error}");
        }
    });
}
