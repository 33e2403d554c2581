//! Is there a driver that this crate can use? cudarc panics when the library or a symbol is missing, so this is
//! asked first, and nothing calls cudarc before.

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use super::codes;
use crate::error::{Error, Result};

/// CUDA 12.8: the first with SM120.
const MIN_VERSION: i32 = 12_080;

/// Every driver function that this crate always calls: cudarc looks a symbol up at its first call, and panics.
const SYMBOLS: &[&str] = &[
    "cuCtxEnablePeerAccess",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncLoad",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// The number of devices of a usable driver. A driver that was not usable is asked again the next time.
pub(super) fn num_devices() -> Result<usize> {
    static ANSWER: OnceCell<usize> = OnceCell::new();
    ANSWER.get_or_try_init(probe).copied()
}

/// Looks for functions that not every use needs; `wanted` is a driver that has them.
pub(super) fn expect_symbols(symbols: &[&str], wanted: &str) -> Result<()> {
    find_symbols(&open()?, symbols, wanted)
}

fn unusable(wanted: &str, seen: String) -> Error {
    Error::unsupported("CUDA driver", wanted, seen)
}

fn open() -> Result<libloading::Library> {
    // The names that cudarc tries, so that both mean the same library.
    let names = if cfg!(windows) { ["nvcuda.dll", "cuda.dll"] } else { ["libcuda.so", "libcuda.so.1"] };
    // SAFETY: loading the driver library runs its initialisers; it is the library that cudarc would load.
    let library = names.into_iter().find_map(|name| unsafe { libloading::Library::new(name).ok() });
    library.ok_or_else(|| unusable("an NVIDIA driver on this machine", format!("no {}", names.join(" or "))))
}

fn find_symbols(library: &libloading::Library, symbols: &[&str], wanted: &str) -> Result<()> {
    for symbol in symbols {
        // SAFETY: the symbol's address is looked up and not used.
        if unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err() {
            return Err(unusable(wanted, format!("a driver without {symbol}")));
        }
    }
    Ok(())
}

fn probe() -> Result<usize> {
    let library = open()?;
    find_symbols(&library, SYMBOLS, "CUDA 12.8 or newer (a newer driver)")?;
    let code = |call: &str, result: sys::CUresult| match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            let seen = format!("{} from {call}", codes::name(result));
            Err(unusable("a CUDA device (CUDA_VISIBLE_DEVICES may hide it)", seen))
        }
        other => {
            let seen = format!("{} from {call}", codes::name(other));
            Err(unusable("a driver that starts (nvidia-smi tells more)", seen))
        }
    };
    let (mut version, mut count) = (0, 0);
    // SAFETY: the library and these symbols are there; both pointers are valid for a write.
    unsafe {
        code("cuInit", sys::cuInit(0))?;
        code("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        code("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
    }
    // For the life of the process: cudarc keeps its own handle, and the driver is not made to be unloaded.
    std::mem::forget(library);
    if version < MIN_VERSION {
        let seen = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(unusable("CUDA 12.8 or newer (a newer driver)", seen));
    }
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(unusable("a CUDA device (CUDA_VISIBLE_DEVICES may hide it)", "none".into())),
    }
}
