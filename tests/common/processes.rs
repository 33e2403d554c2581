//! Ranks as processes: this test binary, started once for each.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use eagle_verify::comm::{Rank, WorldSize};

/// The variable with a rank's role, and the test that plays it.
const VARIABLE: &str = "EAGLE_VERIFY_TEST_ROLE";
const TEST: &str = "rank_process";
/// What a rank says begins with it: the test harness says something, too.
const SIGN: &str = "@@";

/// What a rank is to do.
pub struct Role {
    pub play: String,
    pub world: WorldSize,
    pub rank: Rank,
    /// The rank that does something else.
    pub odd: usize,
    pub seed: u64,
    /// By rank.
    pub devices: Vec<usize>,
    pub path: PathBuf,
}

impl Role {
    /// `None` in a process that is no rank.
    pub fn of_this_process() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        let parts: Vec<&str> = text.split('|').collect();
        let [play, world, rank, odd, seed, devices, path] = parts[..] else { panic!("{text}") };
        let world = WorldSize::try_from(world.parse::<usize>().unwrap()).unwrap();
        Some(Self {
            play: play.into(),
            world,
            rank: Rank::new(rank.parse().unwrap(), world).unwrap(),
            odd: odd.parse().unwrap(),
            seed: seed.parse().unwrap(),
            devices: devices.split(',').map(|device| device.parse().unwrap()).collect(),
            path: path.into(),
        })
    }
}

/// Tells the test something.
pub fn say(what: &str) {
    println!("{SIGN}{what}");
}

/// Waits for the test's word.
pub fn hear() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// A path that nothing is at.
pub fn new_path() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("eagle-verify-ranks-{}-{number}", std::process::id()))
}

/// The ranks of a group. Those that still run are killed on drop.
pub struct Processes {
    children: Vec<Child>,
    said: Vec<Receiver<String>>,
    path: PathBuf,
}

impl Processes {
    pub fn start(play: &str, world: WorldSize, devices: &[usize], odd: usize, seed: u64) -> Self {
        let path = new_path();
        let devices = devices.iter().map(|device| device.to_string()).collect::<Vec<_>>().join(",");
        let mut processes = Self { children: Vec::new(), said: Vec::new(), path: path.clone() };
        for rank in 0..world.get() {
            let role =
                format!("{play}|{}|{rank}|{odd}|{seed}|{devices}|{}", world.get(), path.to_str().unwrap());
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", TEST, "--nocapture"])
                .env(VARIABLE, role)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let (sender, receiver) = channel();
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    if let Some(at) = line.find(SIGN) {
                        let _ = sender.send(line[at + SIGN.len()..].to_owned());
                    }
                }
            });
            processes.children.push(child);
            processes.said.push(receiver);
        }
        processes
    }

    /// What a rank says next.
    pub fn hear(&self, rank: usize, limit: Duration) -> String {
        self.said[rank]
            .recv_timeout(limit)
            .unwrap_or_else(|error| panic!("rank {rank} says nothing: {error}"))
    }

    /// Gives a rank the word.
    pub fn say(&mut self, rank: usize) {
        writeln!(self.children[rank].stdin.as_mut().unwrap(), "go").unwrap();
    }

    pub fn signal(&self, rank: usize, signal: &str) {
        let process = self.children[rank].id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &process]).status().unwrap().success());
    }

    /// A rank ends by itself and finds nothing amiss.
    pub fn end_one_well(&mut self, rank: usize) {
        let status = self.children[rank].wait().unwrap();
        assert!(status.success(), "rank {rank}: {status}");
    }

    pub fn end_well(mut self) {
        (0..self.children.len()).for_each(|rank| self.end_one_well(rank));
        assert!(!self.path.exists(), "a socket is left");
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.path); // of a rank 0 that was killed
    }
}
