//! A machine without an NVIDIA driver: an error, at once, never a panic. In a process of its own, since other
//! tests install the emulated driver.
#![cfg(feature = "cuda")]

use std::time::{Duration, Instant};

use eagle_verify::ErrorKind;
use eagle_verify::backend::cuda::Cuda;

#[test]
fn a_missing_driver_is_an_error_at_once() {
    let started = Instant::now();
    let devices = Cuda::num_devices();
    let waited = started.elapsed();
    if let Ok(devices) = devices {
        eprintln!("SKIPPED: this machine has a driver and {devices} devices");
        return;
    }
    let error = devices.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.subject() == "CUDA driver", "{error}");
    assert!(waited < Duration::from_millis(10), "{waited:?}");
    for attempt in [Cuda::new(0), Cuda::with_kernels(0, &[("any", b"bytes")])] {
        assert_eq!(attempt.unwrap_err().kind(), ErrorKind::Unsupported);
    }
    eprintln!("{error} ({waited:?})");
}
