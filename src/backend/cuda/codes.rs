//! What the driver's codes mean. The driver is never asked: one that is missing or broken would not answer.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::{Error, Result};

/// `CUDA_ERROR_OUT_OF_MEMORY (2)`.
pub(super) fn name(code: CUresult) -> String {
    format!("{code:?} ({})", code as u32)
}

/// Names the call and the device in the driver's answer. A `DriverError` must not be formatted: that would call
/// the driver again.
pub(super) fn checked<T>(ordinal: usize, call: &str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|DriverError(code)| fault(ordinal, call, "success", code))
}

/// As [`checked`], for a call that was to give `bytes` bytes.
pub(super) fn checked_memory<T>(
    ordinal: usize,
    call: &str,
    bytes: usize,
    result: Result<T, DriverError>,
) -> Result<T> {
    result.map_err(|DriverError(code)| match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => fault(ordinal, call, &format!("{bytes} bytes"), code),
        _ => fault(ordinal, call, "success", code),
    })
}

fn fault(ordinal: usize, call: &str, wanted: &str, code: CUresult) -> Error {
    let consequence =
        if loses_context(code) { "; the device's context is lost: start a new process" } else { "" };
    Error::fault(format!("{call} on device {ordinal}"), wanted, format!("{}{consequence}", name(code)))
}

/// Those of which cuda.h says that "any further CUDA work will return the same error", and uncorrectable errors of
/// memory and links. By number, since not all are in every version of the bindings.
fn loses_context(code: CUresult) -> bool {
    matches!(code as u32, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721)
}
