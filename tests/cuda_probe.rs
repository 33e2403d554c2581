//! Drivers that the crate cannot use. In a process of its own: a driver that was found usable is not asked again.
#![cfg(feature = "cuda")]

use cuda_emulator as emulator;
use eagle_verify::ErrorKind;
use eagle_verify::backend::cuda::Cuda;

const IMAGES: &[(&str, &[u8])] = &[("emulated", emulator::IMAGE)];

#[test]
fn unusable_drivers_are_unsupported_until_they_are_usable() {
    emulator::install();
    let starts = "a driver that starts (nvidia-smi tells more)";
    for (function, code, wanted, seen) in [
        (
            "cuInit",
            100,
            "a CUDA device (CUDA_VISIBLE_DEVICES may hide it)",
            "CUDA_ERROR_NO_DEVICE (100) from cuInit",
        ),
        ("cuInit", 803, starts, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) from cuInit"),
        ("cuInit", 34, starts, "CUDA_ERROR_STUB_LIBRARY (34) from cuInit"),
        ("cuDriverGetVersion", 304, starts, "CUDA_ERROR_OPERATING_SYSTEM (304) from cuDriverGetVersion"),
        ("cuDeviceGetCount", 304, starts, "CUDA_ERROR_OPERATING_SYSTEM (304) from cuDeviceGetCount"),
    ] {
        emulator::fail(Some(function), 1, code);
        let error = Cuda::with_kernels(0, IMAGES).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.to_string(), format!("unsupported: CUDA driver: wanted {wanted}, seen {seen}"));
    }
    emulator::set_driver_version((12, 4));
    let error = Cuda::num_devices().unwrap_err();
    let wanted = "unsupported: CUDA driver: wanted CUDA 12.8 or newer (a newer driver), seen 12.4";
    assert_eq!(error.to_string(), wanted);
    emulator::set_driver_version((12, 8));
    assert_eq!(Cuda::num_devices().unwrap(), 8);
    Cuda::with_kernels(0, IMAGES).unwrap();
    emulator::set_driver_version((12, 4));
    assert_eq!(Cuda::num_devices().unwrap(), 8, "a usable driver stays usable");
}
