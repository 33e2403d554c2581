//! Ceilings for the machine code of each kernel: about a tenth above what nvcc 13.5 makes.
#![allow(dead_code)] // each test crate uses its part

pub const COLLECTIVE: &str = "ev_all_reduce_norm_";
pub const CHOOSE: &str = "ev_choose_";
pub const KV_COMMIT: &str = "ev_kv_commit";
pub const GATHER: &str = "ev_gather_features_";
pub const LINEAR: &str = "ev_linear_";

/// Ceilings of one algorithm and world size, for both element types: about a tenth above what nvcc 13.5 makes.
pub struct Budget {
    pub algorithm: &'static str,
    pub world: u32,
    pub instructions: u32,
    /// Loads below 128 bits: tags, escapes, fault records. The data itself is loaded by 128.
    pub narrow_loads: u32,
    pub narrow_stores: u32,
}

/// What the largest block of a world leaves to each thread: 1024 of them, or 512 for eight ranks.
pub const fn max_registers(world: u32) -> u32 {
    if world == 8 { 128 } else { 64 }
}

pub const BUDGETS: [Budget; 8] = [
    Budget::new("one_shot", 1, 1500, 14, 30),
    Budget::new("one_shot", 2, 1700, 15, 32),
    Budget::new("one_shot", 4, 2050, 17, 34),
    Budget::new("one_shot", 8, 2250, 21, 38),
    Budget::new("two_shot", 2, 2050, 19, 42),
    Budget::new("two_shot", 4, 2250, 21, 44),
    Budget::new("two_shot", 8, 2600, 25, 48),
    Budget::new("hierarchical", 8, 2950, 32, 66),
];

impl Budget {
    const fn new(
        algorithm: &'static str,
        world: u32,
        instructions: u32,
        narrow_loads: u32,
        narrow_stores: u32,
    ) -> Self {
        Self { algorithm, world, instructions, narrow_loads, narrow_stores }
    }
}

/// Ceilings of the kernels of one device, whose names start so.
pub struct LocalBudget {
    pub prefix: &'static str,
    pub registers: u32,
    pub shared: u32,
    pub instructions: u32,
    /// Global ones. Those in shared memory are not counted here.
    pub atomics: u32,
    /// Whether it must have loads and stores of 128 bits.
    pub wide_loads: bool,
    pub wide_stores: bool,
}

impl LocalBudget {
    const fn new(
        prefix: &'static str,
        [registers, shared, instructions, atomics]: [u32; 4],
        [wide_loads, wide_stores]: [bool; 2],
    ) -> Self {
        Self { prefix, registers, shared, instructions, atomics, wide_loads, wide_stores }
    }
}

/// The first whose prefix a name has counts.
pub const LOCAL_BUDGETS: [LocalBudget; 20] = [
    // Two blocks of 512 threads fit on a multiprocessor. The atomic raises a row's key.
    LocalBudget::new(CHOOSE, [64, 27_000, 4600, 1], [true, false]),
    LocalBudget::new(KV_COMMIT, [64, 0, 405, 0], [true, true]),
    LocalBudget::new(GATHER, [32, 0, 200, 0], [true, true]),
    LocalBudget::new("ev_split_", [64, 0, 125, 0], [true, true]),
    LocalBudget::new("ev_add_slices_f32", [64, 0, 230, 0], [false, false]),
    // Five blocks of 256 threads.
    LocalBudget::new("ev_draft_embed_pairs_", [48, 512, 1310, 0], [true, true]),
    LocalBudget::new("ev_draft_embed_", [48, 512, 1220, 0], [true, true]),
    LocalBudget::new("ev_draft_add_norm_", [48, 512, 1000, 0], [true, true]),
    LocalBudget::new("ev_draft_finish_", [48, 512, 1000, 0], [true, true]),
    LocalBudget::new("ev_draft_activate_", [48, 0, 660, 0], [true, true]),
    LocalBudget::new("ev_draft_combine_", [48, 0, 560, 0], [true, true]),
    LocalBudget::new("ev_draft_turn_pairs", [40, 0, 270, 0], [false, false]),
    LocalBudget::new("ev_draft_turn", [40, 0, 300, 0], [false, false]),
    LocalBudget::new("ev_draft_pages", [32, 0, 40, 0], [false, false]),
    // Shared memory for two blocks with heads of 128; registers for five of 128 threads.
    LocalBudget::new("ev_draft_attend_", [96, 45_000, 3200, 0], [true, false]),
    LocalBudget::new("ev_draft_noise", [40, 0, 500, 0], [false, false]),
    // Two blocks of 256 threads: a lane keeps 32 columns. Lanes have neighbouring columns, four bytes each.
    LocalBudget::new("ev_draft_rank", [128, 0, 5550, 0], [false, false]),
    LocalBudget::new("ev_draft_advance", [64, 600, 1570, 0], [false, false]),
    LocalBudget::new("ev_draft_start", [32, 0, 40, 0], [false, false]),
    // As `choose`: two blocks of 512 threads.
    LocalBudget::new("ev_draft_filter", [64, 27_000, 3050, 0], [true, false]),
];

/// Ceilings of `linear.cu` for its instances of up to so many rows, of both types: registers, instructions, narrow
/// loads (the list of rows) and narrow stores (of sums, where the number of outputs is no multiple of 4).
/// Two blocks of 128 threads fit on a multiprocessor.
pub const LINEAR_BUDGETS: [(&str, [u32; 4]); 4] = [
    ("r8", [80, 460, 1, 4]),
    ("r16", [104, 590, 2, 8]),
    ("r32", [152, 810, 4, 16]),
    ("r64", [248, 1300, 8, 32]),
];
/// The draft head's kernels: those that are made for each type of halves, and the others.
pub const DRAFT_OF_HALVES: [&str; 6] = ["embed_pairs", "embed", "add_norm", "finish", "activate", "combine"];
pub const DRAFT: [&str; 12] = [
    "turn_pairs",
    "turn",
    "pages",
    "noise",
    "rank",
    "advance",
    "start",
    "filter",
    "attend_32",
    "attend_64",
    "attend_96",
    "attend_128",
];
