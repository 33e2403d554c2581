//! Ceilings of all kernels: about a tenth above what nvcc 13.5 makes for `sm_120a`.

use Wanted::{Narrow, StrongWide, Wide};

use crate::sass::{Accesses, Kernel};

/// Of the tensor cores: weights and activations come by copies to shared memory alone.
const LINEAR: &str = "ev_linear_";

/// What a multiprocessor of `sm_120a` has for the blocks on it.
pub const REGISTERS: u32 = 65_536;
pub const SHARED: u32 = 100 << 10;
pub const THREADS: u32 = 1536;

/// What is wanted of a kernel's loads or stores. The number is the ceiling of those below 128 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wanted {
    Narrow(u32),
    /// Some are of 128 bits: the data.
    Wide(u32),
    /// And some of these are strong for the system: what peers may touch at the same time.
    StrongWide(u32),
}

pub struct Budget {
    /// `{a,b}` stands for either.
    pub names: &'static str,
    /// So many threads as its blocks have, so many blocks on a multiprocessor: what the ceilings of registers and
    /// shared memory are for.
    pub residency: (u32, u32),
    /// Of a thread.
    pub registers: u32,
    /// Bytes that the kernel declares; what a launch adds is not in the image.
    pub shared: u32,
    pub instructions: u32,
    /// Global ones. Those in shared memory are not counted here.
    pub atomics: u32,
    pub loads: Wanted,
    pub stores: Wanted,
}

/// In the columns' order: names, residency, registers, shared, instructions, atomics, loads, stores.
const fn row(
    names: &'static str,
    residency: (u32, u32),
    [registers, shared, instructions, atomics]: [u32; 4],
    loads: Wanted,
    stores: Wanted,
) -> Budget {
    Budget { names, residency, registers, shared, instructions, atomics, loads, stores }
}

#[rustfmt::skip]
pub const BUDGETS: &[Budget] = &[
    // A block has its multiprocessor to itself, with as many threads as there are: 1024, or for eight ranks, whose
    // packs lie side by side in registers, 512. Narrow accesses are tags, escapes and fault records; with peers the
    // data is loaded and stored by 128 bits, past what another device might not see.
    row("ev_all_reduce_norm_one_shot_{bf16,f16}_w1", (1024, 1), [64, 850, 1550, 0], Wide(14), Wide(25)),
    row("ev_all_reduce_norm_one_shot_{bf16,f16}_w2", (1024, 1), [64, 850, 1750, 0], StrongWide(15), StrongWide(27)),
    row("ev_all_reduce_norm_one_shot_{bf16,f16}_w4", (1024, 1), [64, 850, 2090, 0], StrongWide(17), StrongWide(29)),
    row("ev_all_reduce_norm_one_shot_{bf16,f16}_w8", (512, 1), [128, 850, 2300, 0], StrongWide(21), StrongWide(33)),
    row("ev_all_reduce_norm_two_shot_{bf16,f16}_w2", (1024, 1), [64, 850, 2070, 0], StrongWide(19), StrongWide(34)),
    row("ev_all_reduce_norm_two_shot_{bf16,f16}_w4", (1024, 1), [64, 850, 2260, 0], StrongWide(21), StrongWide(37)),
    row("ev_all_reduce_norm_two_shot_{bf16,f16}_w8", (512, 1), [128, 850, 2610, 0], StrongWide(26), StrongWide(41)),
    row("ev_all_reduce_norm_hierarchical_{bf16,f16}_w8", (512, 1), [128, 850, 2950, 0], StrongWide(32), StrongWide(54)),
    // Two blocks: one works while the other waits at a barrier. The atomic raises the row's key. Logits come by 128
    // bits; single ones are those of a row's ends, and lists. Stores are of the workspace.
    row("ev_choose_{bf16,f16,f32}", (512, 2), [64, 27_000, 4650, 1], Wide(106), Wide(5)),
    // The same on draft logits, whose sums are taken one by one.
    row("ev_draft_filter", (512, 2), [64, 27_000, 3000, 0], Wide(117), Wide(17)),
    // All bytes are moved by 128 bits where they can be. Eight blocks keep 64 KiB in flight.
    row("ev_kv_commit", (128, 8), [64, 0, 405, 0], Wide(32), Wide(9)),
    // Bound by memory too: as many threads as fit.
    row("ev_gather_features_{bf16,f16,f32}_{bf16,f16}", (128, 12), [32, 0, 200, 0], Wide(4), Wide(3)),
    row("ev_split_{bf16,f16}", (128, 12), [24, 0, 130, 0], Wide(0), Wide(0)),
    row("ev_add_slices_f32", (128, 12), [16, 0, 40, 0], Narrow(3), Narrow(1)),
    // Two blocks, each with up to 48 KiB of stages by its launch: one's copies travel while the other adds its warps'
    // sums. Narrow loads are of the list of rows, narrow stores of sums, where outputs are no multiple of 4.
    row("ev_linear_{bf16,f16}_r8", (128, 2), [80, 0, 455, 0], Narrow(1), Wide(4)),
    row("ev_linear_{bf16,f16}_r16", (128, 2), [104, 0, 590, 0], Narrow(2), Wide(8)),
    row("ev_linear_{bf16,f16}_r32", (128, 2), [152, 0, 810, 0], Narrow(4), Wide(16)),
    row("ev_linear_{bf16,f16}_r64", (128, 2), [248, 0, 1300, 0], Narrow(8), Wide(32)),
    // A row is a block's, and a pass has few: 40 registers let a multiprocessor have all the threads that it can.
    // Rows come and go by 128 bits; narrow loads are of the rows' descriptions.
    row("ev_draft_embed_pairs_{bf16,f16}", (256, 6), [40, 280, 1300, 0], Wide(5), Wide(0)),
    row("ev_draft_embed_{bf16,f16}", (256, 6), [40, 280, 1210, 0], Wide(8), Wide(0)),
    row("ev_draft_add_norm_{bf16,f16}", (256, 6), [40, 280, 995, 0], Wide(3), Wide(0)),
    row("ev_draft_finish_{bf16,f16}", (256, 6), [40, 280, 995, 0], Wide(2), Wide(0)),
    row("ev_draft_activate_{bf16,f16}", (256, 6), [40, 0, 655, 0], Wide(1), Wide(0)),
    row("ev_draft_combine_{bf16,f16}", (256, 6), [40, 0, 550, 0], Wide(7), Wide(0)),
    // A head's two halves are turned together, one number of each at a time.
    row("ev_draft_turn_pairs", (256, 6), [32, 0, 260, 0], Narrow(14), Narrow(9)),
    row("ev_draft_turn", (256, 6), [32, 0, 290, 0], Narrow(14), Narrow(9)),
    // Four warps' tiles of keys, values and queries: shared memory is what limits the blocks, so registers need not.
    // KV rows come by 128 bits; sums are a lane's, one number at a time.
    row("ev_draft_attend_32", (128, 7), [72, 11_800, 2840, 0], Wide(20), Narrow(9)),
    row("ev_draft_attend_64", (128, 4), [88, 23_000, 3030, 0], Wide(20), Narrow(14)),
    row("ev_draft_attend_96", (128, 3), [96, 33_000, 3090, 0], Wide(20), Narrow(18)),
    row("ev_draft_attend_128", (128, 2), [96, 45_000, 3190, 0], Wide(20), Narrow(22)),
    // A lane holds all its columns of a segment in registers; two blocks are there all the same. Its columns are a warp
    // apart, so single loads are of whole lines.
    row("ev_draft_rank", (256, 2), [128, 0, 5500, 0], Narrow(425), Narrow(3)),
    // A block for each request, and few threads with work.
    row("ev_draft_advance", (256, 6), [40, 560, 1560, 0], Narrow(85), Narrow(49)),
    row("ev_draft_noise", (256, 6), [32, 0, 500, 0], Narrow(7), Narrow(1)),
    row("ev_draft_start", (32, 1), [16, 0, 26, 0], Narrow(1), Narrow(6)),
    row("ev_draft_pages", (256, 6), [16, 0, 27, 0], Narrow(3), Narrow(1)),
];

impl Budget {
    pub fn of(kernel: &str) -> &'static Self {
        let found = BUDGETS.iter().find(|budget| budget.kernels().iter().any(|name| name == kernel));
        found.unwrap_or_else(|| panic!("{kernel} has no budget"))
    }

    /// The kernels that it is for.
    pub fn kernels(&self) -> Vec<String> {
        let mut names = vec![self.names.to_owned()];
        while names[0].contains('{') {
            let expanded = names.iter().flat_map(|name| {
                let (head, rest) = name.split_once('{').unwrap();
                let (choices, tail) = rest.split_once('}').unwrap();
                choices.split(',').map(move |choice| format!("{head}{choice}{tail}"))
            });
            names = expanded.collect();
        }
        names
    }
}

/// What is wrong with a kernel, by its budget and by what holds for all.
pub fn violations(kernel: &Kernel) -> Vec<String> {
    let budget = Budget::of(&kernel.name);
    let mut found = above(&[
        ("bytes of stack", kernel.stack, 0),
        ("bytes of local memory", kernel.local, 0),
        ("local loads and stores (spills)", kernel.spills, 0),
        ("system fences", kernel.sys_fences, 0),
        ("system atomics", kernel.sys_atomics, 0),
        ("registers", kernel.registers, budget.registers),
        ("bytes of shared memory", kernel.shared, budget.shared),
        ("instructions", kernel.instructions, budget.instructions),
        ("global atomics", kernel.atomics, budget.atomics),
    ]);
    found.extend(budget.loads.violations("loads", &kernel.loads));
    found.extend(budget.stores.violations("stores", &kernel.stores));
    if kernel.name.starts_with(LINEAR) {
        found.extend(violations_of_linear(kernel));
    }
    if !kernel.waits_first {
        found.push("touches memory before it waits for its predecessors".into());
    }
    found.iter().map(|what| format!("{}: {what}", kernel.name)).collect()
}

fn violations_of_linear(kernel: &Kernel) -> Vec<String> {
    let mut found =
        above(&[("wide loads", kernel.loads.wide(), 0), ("narrow copies", kernel.async_copies.narrow(), 0)]);
    for (what, count) in [
        ("128-bit copies", kernel.async_copies.wide()),
        ("loads of matrices", kernel.matrix_loads),
        ("multiplications of matrices", kernel.multiplications),
    ] {
        if count == 0 {
            found.push(format!("no {what}"));
        }
    }
    found
}

/// What is above its ceiling: (what, seen, ceiling).
fn above(figures: &[(&str, u32, u32)]) -> Vec<String> {
    let above = figures.iter().filter(|(_, seen, ceiling)| seen > ceiling);
    above.map(|(what, seen, ceiling)| format!("{seen} {what}, at most {ceiling} wanted")).collect()
}

impl Wanted {
    pub fn narrow(self) -> u32 {
        match self {
            Narrow(ceiling) | Wide(ceiling) | StrongWide(ceiling) => ceiling,
        }
    }

    fn violations(self, what: &str, seen: &Accesses) -> Vec<String> {
        let mut found = above(&[(&format!("narrow {what}"), seen.narrow(), self.narrow())]);
        if !matches!(self, Narrow(_)) && seen.wide() == 0 {
            found.push(format!("no 128-bit {what}"));
        }
        if matches!(self, StrongWide(_)) && seen.wide_strong_sys == 0 {
            found.push(format!("no 128-bit {what} that are strong for the system"));
        }
        found
    }
}
