//! The conformance suite on whatever GPU this machine has, with all ranks of a group as virtual ranks on it.
//! Without one its parts are skipped, loudly; with `EAGLE_VERIFY_REQUIRE_GPU` set they fail. `tests/gpu.sh` runs all
//! that a card is for.
#![cfg(feature = "cuda")]

use eagle_verify::ErrorKind;
use eagle_verify::backend::cuda::{Cuda, kernel_architectures};

#[path = "common/backends.rs"]
mod backends;
#[path = "common/card.rs"]
mod card;
#[path = "common/collective.rs"]
mod collective;
#[path = "common/draft.rs"]
mod draft;
#[path = "common/toy.rs"]
mod toy;

use card::{Extent, VirtualRanks};

/// The first device, or why there is none to test on.
fn gpu(test: &str) -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) if std::env::var_os("EAGLE_VERIFY_REQUIRE_GPU").is_some() => panic!("{error}"),
        // A machine without a GPU, or a build without kernels for it; a GPU that fails is a failure.
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            eprintln!("SKIPPED: {test} needs a GPU (kernels: {}): {error}", kernel_architectures());
            None
        }
    }
}

/// All, or with `EAGLE_VERIFY_GPU_LITTLE` a little of each part: for tools that make it slow.
fn extent() -> Extent {
    if std::env::var_os("EAGLE_VERIFY_GPU_LITTLE").is_some() { Extent::Rehearsal } else { Extent::Card }
}

#[test]
fn collectives_equal_the_specification() {
    if gpu("collectives").is_some() {
        let num_calls = card::collectives(&VirtualRanks(|| Cuda::new(0).unwrap()), extent());
        eprintln!("{num_calls} calls of groups of up to 8 virtual ranks");
    }
}

#[test]
fn collectives_in_graphs() {
    if gpu("collectives in graphs").is_some() {
        card::group_graphs(&VirtualRanks(|| Cuda::new(0).unwrap()), extent());
    }
}

#[test]
fn linear_layers_are_close_to_those_of_the_cpu() {
    if let Some(cuda) = gpu("linear layers") {
        card::linear_layers(&cuda, extent());
    }
}

#[test]
fn kv_rows_move_as_bytes_do() {
    if let Some(cuda) = gpu("KV moves") {
        card::kv_moves(&cuda, extent());
    }
}

#[test]
fn choices_equal_the_specification() {
    if let Some(cuda) = gpu("choices") {
        card::choices(&cuda, extent());
    }
}

#[test]
fn drafts_equal_those_of_the_cpu() {
    if let Some(cuda) = gpu("drafts") {
        card::drafts(&cuda, extent());
    }
}

/// Kernels that start before the one before them has ended: what they wait for too late would show.
#[test]
fn dependent_launches_change_nothing() {
    let Some(cuda) = gpu("dependent launches") else { return };
    let cuda = cuda.with_dependent_launches().unwrap();
    for (_, part) in card::PARTS {
        part(&cuda, extent());
    }
    let dependent = || Cuda::new(0).and_then(Cuda::with_dependent_launches).unwrap();
    card::group_graphs(&VirtualRanks(dependent), extent());
}
