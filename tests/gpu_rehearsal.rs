//! The suite for a card, a little of each part, over the emulated driver: so it works when there is a card. And it
//! fails when a kernel is broken.
#![cfg(feature = "cuda")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use cuda_emulator as emulator;

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

use backends::emulated;
use card::{Extent, PARTS, VirtualRanks};

/// Blocks don't wait for each other: few at a time are faster.
fn fast() -> emulator::Config {
    emulator::Config { max_resident_blocks: 4, ..emulator::Config::fast() }
}

/// Blocks wait for each other, and ranks have threads of their own.
fn fast_groups() -> emulator::Config {
    emulator::Config { patience: Duration::from_secs(5), ..emulator::Config::fast() }
}

fn rehearse_groups() {
    let ranks = VirtualRanks(emulated);
    assert!(card::collectives(&ranks, Extent::Rehearsal) > 10);
    card::group_graphs(&ranks, Extent::Rehearsal);
}

#[test]
fn every_part_passes() {
    let _machine = emulator::exclusive();
    for is_dependent in [false, true] {
        emulator::configure(&fast());
        let mut cuda = emulated();
        if is_dependent {
            cuda = cuda.with_dependent_launches().unwrap();
        }
        for (_, part) in PARTS {
            part(&cuda, Extent::Rehearsal);
        }
        let driver = emulator::report().driver;
        assert!(driver.num_launches > 20 && driver.num_graph_kernels > 20, "{driver:?}");
        assert_eq!(driver.num_dependent_launches > 0, is_dependent);
    }
    emulator::configure(&fast_groups());
    rehearse_groups();
}

#[test]
fn every_part_can_fail() {
    let _machine = emulator::exclusive();
    let mutants = [
        "linear: low skipped",
        "kv: the last column is left out",
        "choose: the position after",
        "draft: keys are not turned",
    ];
    for ((name, part), mutant) in PARTS.into_iter().zip(mutants) {
        emulator::configure(&emulator::Config { mutant: Some(mutant), ..fast() });
        let rehearsed = catch_unwind(|| part(&emulated(), Extent::Rehearsal));
        assert!(rehearsed.is_err(), "{name} passes with `{mutant}`");
    }
    emulator::configure(&emulator::Config { mutant: Some("sum rotated by rank"), ..fast_groups() });
    assert!(catch_unwind(AssertUnwindSafe(rehearse_groups)).is_err(), "groups");
    emulator::configure(&fast());
}
