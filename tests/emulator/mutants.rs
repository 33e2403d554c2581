// Negative controls: each mutant is one deliberate fault in a kernel source, which the tests must catch.
// Included by build.rs, which compiles the mutated copies, and by the library, which selects one at run time.
// The sources that are shipped carry no trace of them.

/// How a mutant replaces its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One or more whole statements, not a declaration: the replacement is put in a block of its own.
    Statement,
    /// An expression. Both sides must have one type.
    Expression,
}

/// A fault to inject.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// What the tests select it by.
    pub name: &'static str,
    /// The source, relative to the crate's `kernels/` or else to the emulator's.
    pub file: &'static str,
    /// Whether the text is a statement or an expression.
    pub kind: Kind,
    /// The text that is replaced. It must occur exactly once in the file; several mutants may share it.
    pub original: &'static str,
    /// What is executed instead. May be empty for a statement.
    pub broken: &'static str,
}

/// All mutants.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "flags: no barrier before publishing",
        file: "flag_all_reduce.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // before publishing",
        broken: "",
    },
    Mutant {
        name: "flags: published at gpu scope",
        file: "flag_all_reduce.cu",
        kind: Kind::Statement,
        original: "emu::store(flag, value, emu::REL, emu::SYS);",
        broken: "emu::store(flag, value, emu::REL, emu::GPU);",
    },
    Mutant {
        name: "flags: published without release",
        file: "flag_all_reduce.cu",
        kind: Kind::Statement,
        original: "emu::store(flag, value, emu::REL, emu::SYS);",
        broken: "emu::store(flag, value, emu::RLX, emu::SYS);",
    },
    Mutant {
        name: "flags: waited for without acquire",
        file: "flag_all_reduce.cu",
        kind: Kind::Expression,
        original: "emu::load(flag, emu::ACQ, emu::SYS)",
        broken: "emu::load(flag, emu::RLX, emu::SYS)",
    },
    Mutant {
        name: "flags: no barrier after waiting",
        file: "flag_all_reduce.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // after waiting",
        broken: "",
    },
    Mutant {
        name: "flags: one buffer only",
        file: "flag_all_reduce.cu",
        kind: Kind::Expression,
        original: "epoch % 2",
        broken: "0u",
    },
    Mutant {
        name: "flags: readers leave early",
        file: "flag_all_reduce.cu",
        kind: Kind::Statement,
        original: "meet(a, 2 * epoch + 2);",
        broken: "",
    },
    Mutant {
        name: "skipped clear",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "store_relaxed_sys(packs(a.rank) + at, Pack{kEmpty, kEmpty, kEmpty, kEmpty});",
        broken: "",
    },
    Mutant {
        name: "one slot too few",
        file: "sync.cuh",
        kind: Kind::Expression,
        original: "epoch % 2",
        broken: "0u",
    },
    Mutant {
        name: "places shared by blocks",
        file: "all_reduce_norm.cu",
        kind: Kind::Expression,
        original: "blockIdx.x * a.block_packs",
        broken: "blockIdx.x * (a.block_rows * (a.hidden / 4))", // enough for this call, but not apart from others
    },
    Mutant {
        name: "reserved words not escaped",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "store_relaxed_sys(packs(peer) + at, escape(pack));",
        broken: "store_relaxed_sys(packs(peer) + at, pack);",
    },
    Mutant {
        name: "-0.0 is the sentinel",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "if (any_word(pack, kEmpty)) return false;",
        broken: "if (any_word(pack, kEmpty) || any_word(pack, 0x80008000u)) return false;",
    },
    Mutant {
        name: "escape word not waited for",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "if (words == kEmpty) return false;",
        broken: "",
    },
    Mutant {
        name: "first word only",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "if (any_word(pack, kEmpty)) return false;",
        broken: "if (pack.x == kEmpty) return false;",
    },
    Mutant {
        name: "no barrier in the reduction",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "call.failed = __syncthreads_or(call.failed);",
        broken: "",
    },
    Mutant {
        name: "no barrier before the count",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "epoch = reinterpret_cast<const uint32_t*>(a.epochs)[blockIdx.x];",
        broken: "epoch = reinterpret_cast<const uint32_t*>(a.epochs)[blockIdx.x]; if (threadIdx.x == 0) count();",
    },
    Mutant {
        name: "count kept by the host",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "epoch = reinterpret_cast<const uint32_t*>(a.epochs)[blockIdx.x];",
        broken: "epoch = 0;", // what a captured argument is in every replay
    },
    Mutant {
        name: "sum rotated by rank",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "for (uint32_t i = 1; i < Ranks && i < 4; i++) sum = sum + Floats::unpack<Element>(packs[i]);",
        broken: "sum = Floats::unpack<Element>(packs[a.rank % Ranks]); \
                 for (uint32_t i = 1; i < Ranks && i < 4; i++) { \
                     sum = sum + Floats::unpack<Element>(packs[(a.rank + i) % Ranks]); }",
    },
    Mutant {
        name: "mean square of the unrounded residual",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "square_sum = Floats::unpack<Element>(h).square_sum();",
        broken: "square_sum = exact.square_sum();",
    },
    Mutant {
        name: "escapes not undone",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "pack = unescape(pack, words);",
        broken: "",
    },
    Mutant {
        name: "tag not emptied",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "store_relaxed_sys(place, kEmpty);  // the tag",
        broken: "",
    },
    Mutant {
        name: "abort ignored on entry",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "failed = culprit != kEmpty;",
        broken: "failed = false;",
    },
    Mutant {
        name: "sum rounded twice",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "return Floats::unpack<Element>(residual) + sum;",
        broken: "return Floats::unpack<Element>(residual) + Floats::unpack<Element>(sum.template pack<Element>());",
    },
    Mutant {
        name: "eight ranks in one chain",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "sum = sum + upper;",
        broken: "for (uint32_t i = 4; i < 8; i++) sum = sum + Floats::unpack<Element>(packs[i % Ranks]);",
    },
    // From here on not faults of the protocol but of a rank, in its second call: it is silent from some point on.
    Mutant {
        name: "rank 1 stops before its partials",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "store_relaxed_sys(packs(peer) + at, escape(pack));",
        broken: "if (a.rank != 1 || epoch == 0) store_relaxed_sys(packs(peer) + at, escape(pack));",
    },
    Mutant {
        name: "rank 1 stops towards rank 0",
        file: "sync.cuh",
        kind: Kind::Statement,
        original: "store_relaxed_sys(packs(peer) + at, escape(pack));",
        broken: "if (a.rank != 1 || epoch == 0 || peer != 0) store_relaxed_sys(packs(peer) + at, escape(pack));",
    },
    Mutant {
        name: "rank 1 stops before its island's sum",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "call.push((a.rank + Owners) % World, to + half * slice, island.bits(half));",
        broken: "if (a.rank != 1 || call.epoch == 0) \
                 call.push((a.rank + Owners) % World, to + half * slice, island.bits(half));",
    },
    Mutant {
        name: "rank 1 stops within its island's sum",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "call.push((a.rank + Owners) % World, to + half * slice, island.bits(half));",
        broken: "if (a.rank != 1 || call.epoch == 0 || half == 0) \
                 call.push((a.rank + Owners) % World, to + half * slice, island.bits(half));",
    },
    Mutant {
        name: "rank 1 stops before its results",
        file: "all_reduce_norm.cu",
        kind: Kind::Statement,
        original: "each_peer<Owners>([&](uint32_t peer) { call.push(peer, result_place(i, pack), h); });",
        broken: "if (a.rank != 1 || call.epoch == 0) \
                 each_peer<Owners>([&](uint32_t peer) { call.push(peer, result_place(i, pack), h); });",
    },
    Mutant {
        name: "choose: noise by column",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "uniform_bits_of(row.seed, row.position, token, kNoise)",
        broken: "uniform_bits_of(row.seed, row.position, token - a.first_token, kNoise)",
    },
    Mutant {
        name: "choose: the position after",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "uniform_bits_of(row.seed, row.position, token, kNoise)",
        broken: "uniform_bits_of(row.seed, row.position + 1, token, kNoise)",
    },
    Mutant {
        name: "choose: ties to the highest id",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "if (z.v[i] > largest) largest = z.v[i], largest_token = 8 * unit + i;",
        broken: "if (z.v[i] >= largest) largest = z.v[i], largest_token = 8 * unit + i;",
    },
    Mutant {
        name: "choose: top-p before top-k",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "z >= threshold ? weight(z, largest) : 0",
        broken: "weight(z, largest)",
    },
    Mutant {
        name: "choose: above the threshold only",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "own >= threshold && own > -kInfinity",
        broken: "own > threshold && own > -kInfinity",
    },
    Mutant {
        name: "choose: min-p forgotten",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "own >= least ? own : 0",
        broken: "own",
    },
    Mutant {
        name: "choose: no refinement of the tail",
        file: "sampling.cuh",
        kind: Kind::Expression,
        original: "bits < kRefinedBelow",
        broken: "false",
    },
    Mutant {
        name: "choose: sure of too much",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "noise - kNoiseSpan",
        broken: "noise - (kNoiseSpan - 0.693148f)",
    },
    Mutant {
        name: "choose: counts as 1",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "float(entry.count)",
        broken: "float(entry.count != 0)",
    },
    Mutant {
        name: "choose: the path penalised twice",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "if (!is_of_path) penalise(text[i]);",
        broken: "penalise(text[i]);",
    },
    Mutant {
        name: "choose: negative logits divided",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;",
        broken: "logit = logit / row.repetition_penalty;",
    },
    Mutant {
        name: "choose: no carry between halves",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "add_shared(&shared.low[digit], low) + low < low",
        broken: "(add_shared(&shared.low[digit], low), 0u)",
    },
    Mutant {
        name: "choose: mask by column",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "unit / 4 - a.first_token / 32",
        broken: "unit / 4",
    },
    Mutant {
        name: "choose: NaN from penalties passes",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "take_nans(v, unit, kNanAdjusted);",
        broken: "",
    },
    Mutant {
        name: "choose: the last digit off by one",
        file: "choose.cu",
        kind: Kind::Expression,
        original: "sum(i) < rest",
        broken: "sum(i) <= rest",
    },
    Mutant {
        name: "choose: no barrier after storing",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // all is stored",
        broken: "",
    },
    Mutant {
        name: "choose: no barrier between penalties and bias",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // penalties come first",
        broken: "",
    },
    Mutant {
        name: "choose: no barrier after editing",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // all is edited",
        broken: "",
    },
    Mutant {
        name: "choose: no barrier before the digit",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // all have added",
        broken: "",
    },
    Mutant {
        name: "choose: no barrier after listing",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // all candidates are listed",
        broken: "",
    },
    Mutant {
        name: "choose: no barrier between folds",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "__syncthreads();  // the last fold has been read",
        broken: "",
    },
    Mutant {
        name: "choose: near tokens without room are lost",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "each_stored(add_near);",
        broken: "",
    },
    Mutant {
        name: "choose: candidates without room are lost",
        file: "choose.cu",
        kind: Kind::Statement,
        original: "if (!list(token)) take(token, is_stored, sure);",
        broken: "list(token);",
    },
];
