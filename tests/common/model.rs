//! The real model, where it is in the cache.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::smollm2::fetch;

/// The model's path, and the right to keep all cores busy with it. Without the model the test is skipped, loudly, or
/// fails if `EAGLE_VERIFY_REQUIRE_MODEL` is set.
pub fn cached() -> Option<(PathBuf, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let Some(path) = fetch::cached().ok().filter(|path| path.is_file()) else {
        let message = "the model is not in the cache; run the example `speedup` once";
        assert!(std::env::var_os("EAGLE_VERIFY_REQUIRE_MODEL").is_none(), "{message}");
        // Straight to the stream: the test runner holds back what `eprintln!` says.
        #[allow(clippy::explicit_write)]
        writeln!(std::io::stderr(), "SKIPPED: {message}").unwrap();
        return None;
    };
    Some((path, TURN.lock().unwrap_or_else(PoisonError::into_inner)))
}
