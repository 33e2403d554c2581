//! A team of threads for work that comes in pieces of 20 to 500 microseconds, hundreds of times a pass.
//!
//! General thread pools put idle threads to sleep within microseconds, and waking one costs more than many
//! a piece takes: 67 µs for rayon on this code's first machine (a virtual one), where this team needs
//! about 1. So idle members spin for a while before they sleep.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::simd::{Lanes, PANEL};
use crate::error::{Error, Result};

/// Rows of a matrix that [`Team::run_panels`] fills at once.
pub(super) const MAX_ROWS: usize = 64;

/// How long an idle member spins: longer than the gaps inside a forward pass and between two of them,
/// short enough that an idle engine uses no processor.
const SPIN: Duration = Duration::from_millis(1);

/// How long a spinning thread keeps its processor to itself.
const POLITE: Duration = Duration::from_micros(100);

/// The caller and `num_threads - 1` members.
#[derive(Debug)]
pub(super) struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
    /// One piece of work at a time.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Counts pieces of work; a change publishes `work`.
    generation: AtomicU64,
    work: UnsafeCell<Option<Work>>,
    /// The tasks that each thread has left.
    shares: Box<[Share]>,
    /// Members that have not finished the current piece.
    num_busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    num_sleeping: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    action: *const (dyn Fn(usize) + Sync),
}

/// A run of tasks, `first << 32 | end`, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, tasks: Range<usize>) {
        self.0.store((tasks.start as u64) << 32 | tasks.end as u64, Ordering::Relaxed);
    }

    fn take_first(&self) -> Option<usize> {
        self.take(|first, end| (first, first + 1, end))
    }

    fn take_last(&self) -> Option<usize> {
        self.take(|first, end| (end - 1, first, end - 1))
    }

    /// `pick` gives the task, and what is left without it.
    fn take(&self, pick: impl Fn(u64, u64) -> (u64, u64, u64)) -> Option<usize> {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let (first, end) = (seen >> 32, seen & u64::from(u32::MAX));
            if first >= end {
                return None;
            }
            let (task, first, end) = pick(first, end);
            match self.0.compare_exchange_weak(seen, first << 32 | end, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Some(task as usize),
                Err(now) => seen = now,
            }
        }
    }
}

// SAFETY: `work` is written by `Team::run` alone, under `turn` and while no member is busy (`num_busy` is 0,
// read with acquire), and read by members only between the release of a new generation and their own release
// of `num_busy`. The pointer in it is to a `Sync` closure that lives until `run` returns, after that.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

impl Team {
    /// Starts the members.
    pub(super) fn new(num_threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            generation: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            shares: (0..num_threads).map(|_| Share::default()).collect(),
            num_busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            num_sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut team = Self { shared, members: Vec::new(), turn: Mutex::new(()) };
        for i in 1..num_threads {
            let shared = Arc::clone(&team.shared);
            let member = std::thread::Builder::new().name(format!("eagle-verify-{i}"));
            let member = member.spawn(move || shared.serve(i));
            team.members.push(member.map_err(|e| Error::fault("threads", num_threads, e))?);
        }
        Ok(team)
    }

    pub(super) fn num_threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Runs `action(task)` once for each task below `num_tasks` (less than 2^32 - 1), on all threads, and
    /// returns when all are done. Tasks of a thread are neighbours and come in order, but for the last few, which
    /// whoever is idle takes. Must not be called from inside an action.
    ///
    /// # Panics
    /// If an action does.
    pub(super) fn run(&self, num_tasks: usize, action: &(dyn Fn(usize) + Sync)) {
        assert!(num_tasks < u32::MAX as usize, "a share packs task numbers in 32 bits");
        if num_tasks <= 1 || self.members.is_empty() {
            return (0..num_tasks).for_each(action);
        }
        let shared = &*self.shared;
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lifetime is erased, but this function waits below until no member uses the closure,
        // also when its own share of the work panics.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(action)
        };
        // SAFETY: no member is busy (the last `run` waited for that) and the turn is ours, so nobody reads.
        unsafe { *shared.work.get() = Some(Work { action: erased }) };
        let bound = |thread: usize| num_tasks * thread / shared.shares.len();
        for (thread, share) in shared.shares.iter().enumerate() {
            share.set(bound(thread)..bound(thread + 1));
        }
        shared.num_busy.store(self.members.len(), Ordering::Relaxed);
        // Publishes all of the above. Sequentially consistent with the sleepers' count: either a member sees
        // the new generation before it sleeps, or we see that it sleeps.
        shared.generation.fetch_add(1, Ordering::SeqCst);
        if shared.num_sleeping.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            shared.wake.notify_all();
        }
        let own = panic::catch_unwind(AssertUnwindSafe(|| shared.take_tasks(0, action)));
        spin_until(Duration::MAX, POLITE, || shared.num_busy.load(Ordering::Acquire) == 0);
        let theirs = shared.panicked.swap(false, Ordering::Relaxed);
        drop(turn);
        if let Err(payload) = own {
            panic::resume_unwind(payload);
        }
        assert!(!theirs, "a task of the CPU backend panicked; its message is above");
    }
}

/// Memory that tasks write in places of their own.
struct Shareable(*mut f32);

// SAFETY: only `run_parts` and `run_panels` use it, and each says why no two tasks meet.
unsafe impl Sync for Shareable {}

impl Shareable {
    /// The address; by a method, so that closures capture the whole.
    fn start(&self) -> *mut f32 {
        self.0
    }
}

impl Team {
    /// Runs `action(i, part)` for each part of `part_len` elements of a slice; what is left over is not used.
    pub(super) fn run_parts(
        &self,
        slice: &mut [f32],
        part_len: usize,
        action: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let num_parts = slice.len() / part_len;
        let memory = Shareable(slice.as_mut_ptr());
        self.run(num_parts, &|part| {
            // SAFETY: part `part` lies inside the borrowed slice, parts don't overlap, and `run` gives each
            // task number out once.
            let part_slice =
                unsafe { std::slice::from_raw_parts_mut(memory.start().add(part * part_len), part_len) };
            action(part, part_slice);
        });
    }

    /// Fills a `[rows, width]` matrix panel by panel of columns: `action(panel, lanes)` adds to the `[rows]`
    /// lanes of a panel, which start at zero. Each thread has one run of panels, in order, since it prefetches
    /// from one to the next.
    pub(super) fn run_panels(
        &self,
        matrix: &mut [f32],
        width: usize,
        action: &(dyn Fn(usize, &mut [Lanes]) + Sync),
    ) {
        let num_rows = matrix.len() / width;
        assert!(num_rows <= MAX_ROWS);
        let num_panels = width.div_ceil(PANEL);
        let num_runs = self.num_threads().min(num_panels);
        let bound = |run: usize| num_panels * run / num_runs;
        let memory = Shareable(matrix.as_mut_ptr());
        self.run(num_runs, &|run| {
            let mut lanes = [[0.0; PANEL]; MAX_ROWS];
            let lanes = &mut lanes[..num_rows];
            for panel in bound(run)..bound(run + 1) {
                lanes.fill([0.0; PANEL]);
                action(panel, lanes);
                let first = panel * PANEL;
                let count = PANEL.min(width - first);
                for (row, lanes) in lanes.iter().enumerate() {
                    // SAFETY: `row` and `first..first + count` are inside the borrowed matrix; panels don't
                    // share columns, runs don't share panels, and `run` gives each run out once.
                    unsafe {
                        let to = memory.start().add(row * width + first);
                        match count {
                            PANEL => *to.cast::<Lanes>() = *lanes, // two stores instead of a call
                            _ => std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count),
                        }
                    }
                }
            }
        });
    }
}

impl Shared {
    /// A thread works through its own share in order, then takes from the ends of the others'.
    fn take_tasks(&self, thread: usize, action: &(dyn Fn(usize) + Sync)) {
        while let Some(task) = self.shares[thread].take_first() {
            action(task);
        }
        for other in (thread + 1..self.shares.len()).chain(0..thread) {
            while let Some(task) = self.shares[other].take_last() {
                action(task);
            }
        }
    }

    /// A member's life.
    fn serve(&self, thread: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_change(seen);
            seen = self.generation.load(Ordering::Acquire);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: `run` wrote it before the generation we just acquired, and waits for `num_busy` before
            // it writes again. Each generation is served by every member, so none is skipped.
            let work = unsafe { *self.work.get() };
            if let Some(Work { action }) = work {
                // SAFETY: the closure lives until `run` returns, which is after our `num_busy` below.
                let action = unsafe { &*action };
                let tasks = panic::catch_unwind(AssertUnwindSafe(|| self.take_tasks(thread, action)));
                if tasks.is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            self.num_busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn wait_for_change(&self, seen: u64) {
        if spin_until(SPIN, POLITE, || self.generation.load(Ordering::Relaxed) != seen) {
            return;
        }
        self.num_sleeping.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        while self.generation.load(Ordering::SeqCst) == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.num_sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits without sleeping until `is_over`, for `limit` at most; after `polite` other threads may go first. Says
/// whether it is over.
pub(super) fn spin_until(limit: Duration, polite: Duration, is_over: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    loop {
        for _ in 0..32 {
            if is_over() {
                return true;
            }
            if polite.is_zero() {
                break;
            }
            std::hint::spin_loop();
        }
        let waited = started.elapsed();
        if waited > limit {
            return false;
        }
        // Perhaps somebody whom we wait for waits for this very processor.
        if waited >= polite {
            std::thread::yield_now();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Relaxed);
        shared.generation.fetch_add(1, Ordering::SeqCst);
        drop(shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        shared.wake.notify_all();
        for member in self.members.drain(..) {
            let _ = member.join(); // a member catches every panic
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_also_after_sleeping() {
        let team = Team::new(3).unwrap();
        for round in 0..3000usize {
            let num_tasks = round % 7;
            let counts: [AtomicUsize; 7] = Default::default();
            team.run(num_tasks, &|task| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            for (task, count) in counts.iter().enumerate() {
                assert_eq!(count.load(Ordering::Relaxed), usize::from(task < num_tasks));
            }
            if round % 500 == 0 {
                std::thread::sleep(SPIN * 3);
            }
        }
    }

    #[test]
    fn callers_take_turns() {
        let team = Team::new(2).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(5, &|task| {
                            total.fetch_add(task, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 200 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2).unwrap();
        for bad in 0..8 {
            let run = || team.run(8, &|task| assert_ne!(task, bad, "on purpose"));
            assert!(panic::catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let done = AtomicUsize::new(0);
        team.run(8, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 8);
    }
}
