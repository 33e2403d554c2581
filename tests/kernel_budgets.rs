//! Budgets of the machine code that is really embedded: no spills, no system-wide fences, wide accesses, registers and
//! instructions below a ceiling; and each kernel waits for its predecessors first. Reads the `sm_120a` images with
//! cuobjdump, so it needs no GPU.
//!
//! Skipped, loudly, where the build has no kernels or there is no cuobjdump; with
//! `EAGLE_VERIFY_REQUIRE_KERNELS` it fails instead. `EAGLE_VERIFY_WRITE_BUDGETS=FILE` writes the figures as a
//! markdown table.
#![cfg(feature = "cuda")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use eagle_verify::backend::cuda::kernel_images;

use budgets::{BUDGETS, Budget, Wanted, violations};
use sass::{Accesses, Kernel, parse};

#[path = "common/budgets.rs"]
mod budgets;
/// For its search for nvcc: the tools of another toolkit than the build's would judge another's code.
#[path = "../build.rs"]
#[allow(dead_code)]
mod build_script;
#[path = "common/sass.rs"]
mod sass;

const COLLECTIVE: &str = "ev_all_reduce_norm_";
const ARCH: &str = "sm_120a";
/// The row of the table's wire bytes: hidden 7168 in two bytes each.
const ROW_BYTES: u32 = 7168 * 2;

/// cuobjdump, and a `PATH` on which it finds nvdisasm.
struct Tools {
    cuobjdump: PathBuf,
    path: OsString,
}

impl Tools {
    fn find() -> Result<Self, String> {
        let nvcc = build_script::find_nvcc()?;
        let mut folders: Vec<PathBuf> =
            nvcc.iter().filter_map(|nvcc| nvcc.parent()).map(Path::to_owned).collect();
        folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        let find = |tool: &str| {
            let name = format!("{tool}{}", std::env::consts::EXE_SUFFIX);
            let found = folders.iter().map(|folder| folder.join(&name)).find(|path| path.is_file());
            found
                .ok_or_else(|| format!("{tool} is neither beside nvcc nor on PATH (pip: nvidia-cuda-{tool})"))
        };
        find("nvdisasm")?;
        let cuobjdump = find("cuobjdump")?;
        Ok(Self { cuobjdump, path: std::env::join_paths(folders).map_err(|error| error.to_string())? })
    }

    fn dump(&self, what: &str, image: &Path) -> String {
        let mut command = Command::new(&self.cuobjdump);
        let output = command.env("PATH", &self.path).args([what, "-arch", ARCH]).arg(image).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The kernels of all images, or why there are none to look at.
fn measure() -> Result<Vec<Kernel>, String> {
    if kernel_images().is_empty() {
        return Err("this build has no kernels; cargo said why".into());
    }
    let tools = Tools::find()?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_budgets");
    fs::create_dir_all(&folder).unwrap();
    let mut kernels = Vec::new();
    for (name, bytes) in kernel_images() {
        let image = folder.join(name).with_extension("fatbin");
        fs::write(&image, bytes).unwrap();
        let (resources, sass) = (tools.dump("--dump-resource-usage", &image), tools.dump("-sass", &image));
        let found = parse(&resources, &sass).unwrap_or_else(|error| panic!("{name}: {error}"));
        for kernel in found {
            let other = kernels.iter().find(|other: &&Kernel| other.name == kernel.name);
            assert!(other.is_none(), "{} is in two images", kernel.name);
            kernels.push(kernel);
        }
    }
    if kernels.is_empty() { Err(format!("no image has code for {ARCH}")) } else { Ok(kernels) }
}

/// `None` after saying that the test is skipped.
fn kernels() -> Option<&'static [Kernel]> {
    static KERNELS: LazyLock<Result<Vec<Kernel>, String>> = LazyLock::new(measure);
    match &*KERNELS {
        Ok(kernels) => Some(kernels),
        Err(reason) => {
            assert!(!build_script::is_on("EAGLE_VERIFY_REQUIRE_KERNELS"), "{reason}");
            // Straight to the stream: the test runner holds back what `eprintln!` says.
            #[allow(clippy::explicit_write)]
            writeln!(std::io::stderr(), "SKIPPED: {reason}").unwrap();
            None
        }
    }
}

#[test]
fn kernels_keep_their_budgets() {
    let Some(kernels) = kernels() else { return };
    kernels.iter().for_each(|kernel| println!("{kernel:?}"));
    let violations: Vec<String> = kernels.iter().flat_map(violations).collect();
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

/// All kernels that have a budget.
fn budgeted() -> BTreeSet<String> {
    let names: Vec<String> = BUDGETS.iter().flat_map(Budget::kernels).collect();
    let unique: BTreeSet<String> = names.iter().cloned().collect();
    assert_eq!(unique.len(), names.len(), "a kernel has two budgets");
    unique
}

#[test]
fn exactly_the_kernels_with_a_budget_are_there() {
    assert_eq!(budgeted().len(), 16 + 3 + 1 + 1 + 6 + 2 + 1 + 8 + 12 + 2 + 4 + 5);
    let Some(kernels) = kernels() else { return };
    let seen: BTreeSet<String> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
    assert_eq!(seen, budgeted());
}

/// The names of kernels in a source file of the backend, as its format strings have them.
fn names_asked_for(source: &str) -> BTreeSet<String> {
    let literals = |before: &str| -> Vec<&str> {
        let after = source.match_indices(before).map(|(at, _)| &source[at + before.len()..]);
        after.filter_map(|rest| rest.split_once('"')).map(|(literal, _)| literal).collect()
    };
    // A name that is all placeholder says nothing.
    let literal_names = literals("\"ev_").into_iter().filter(|rest| !rest.starts_with('{'));
    let mut names: BTreeSet<String> = literal_names.map(|rest| format!("ev_{rest}")).collect();
    // The draft head's are put together from parts.
    if names.remove("ev_draft_{name}") {
        let parts = [literals(" kernel(\""), literals(" kernel(&format!(\"")].concat();
        names.extend(
            parts.iter().filter(|part| !part.starts_with('{')).map(|part| format!("ev_draft_{part}")),
        );
        names.extend(literals("of_half(\"").iter().map(|part| format!("ev_draft_{part}_{{}}")));
    }
    names
}

/// Whether `pattern` may be formatted so.
fn can_be(pattern: &str, name: &str) -> bool {
    // Types, algorithms, and numbers of ranks, rows and head dimensions.
    const VALUES: &str = "bf16 f16 f32 one_shot two_shot hierarchical 1 2 4 8 16 32 64 96 128";
    let Some((head, rest)) = pattern.split_once('{') else { return pattern == name };
    let (Some((_, tail)), Some(name)) = (rest.split_once('}'), name.strip_prefix(head)) else { return false };
    VALUES.split(' ').any(|value| name.strip_prefix(value).is_some_and(|name| can_be(tail, name)))
}

#[test]
fn rust_asks_for_each_kernel_and_for_no_other() {
    let backend = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda");
    let mut asked_for = BTreeSet::new();
    for file in rust_files(&backend) {
        asked_for.extend(names_asked_for(&fs::read_to_string(file).unwrap()));
    }
    let budgeted = budgeted();
    for name in &budgeted {
        assert!(asked_for.iter().any(|pattern| can_be(pattern, name)), "{name} is in none of {asked_for:?}");
    }
    for pattern in &asked_for {
        assert!(budgeted.iter().any(|name| can_be(pattern, name)), "no kernel is a {pattern}");
    }

    let sample = r#"cuda.kernel("ev_a")?; format!("ev_draft_{name}"); b: of_half("b")?, c: kernel("c")?,
        d: kernel(&format!("d_{n}"))?, kernel(&format!("{name}_{}", half))"#;
    let names = ["ev_a", "ev_draft_b_{}", "ev_draft_c", "ev_draft_d_{n}"];
    assert_eq!(names_asked_for(sample), BTreeSet::from(names.map(String::from)));
    assert!(can_be("ev_a_{}_w{world}", "ev_a_one_shot_w8") && can_be("ev_{}_{}", "ev_f16_bf16"));
    for name in ["ev_a_shot_w8", "ev_a_one_shot_w", "ev_a_one_shot_w81", "ev_b_one_shot_w8"] {
        assert!(!can_be("ev_a_{}_w{world}", name), "{name}");
    }
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// `one_shot` and 8 of `ev_all_reduce_norm_one_shot_bf16_w8`; nothing of another kernel.
fn algorithm_and_world(kernel: &str) -> Option<(&str, u32)> {
    let (algorithm_and_type, world) = kernel.strip_prefix(COLLECTIVE)?.rsplit_once("_w")?;
    let (algorithm, _) = algorithm_and_type.rsplit_once('_')?;
    Some((algorithm, world.parse().ok()?))
}

/// Bytes that one rank sends for one row.
fn wire_bytes(algorithm: &str, world: u32) -> u32 {
    match (algorithm, world) {
        ("one_shot", world) => (world - 1) * ROW_BYTES,
        ("two_shot", world) => bound_bytes(world),
        // Two islands of four. Three quarters are scattered in the island, a quarter crosses in fp32, and three
        // quarters are gathered.
        ("hierarchical", 8) => ROW_BYTES * 3 / 4 + ROW_BYTES / 4 * 2 + ROW_BYTES * 3 / 4,
        _ => panic!("{algorithm} of {world}: unknown"),
    }
}

/// No all-reduce sends less: 2 (N - 1) / N of the row.
fn bound_bytes(world: u32) -> u32 {
    2 * (world - 1) * ROW_BYTES / world
}

fn table_row(kernel: &Kernel) -> String {
    let wire = match algorithm_and_world(&kernel.name) {
        Some((algorithm, world)) => {
            let (wire, bound) = (wire_bytes(algorithm, world), bound_bytes(world));
            let ratio =
                if bound == 0 { "-".into() } else { format!("{:.2}", f64::from(wire) / f64::from(bound)) };
            format!("{wire} | {bound} | {ratio}")
        }
        None => "- | - | -".to_owned(),
    };
    format!(
        "| {} | {} | {} | {} | {}/{} | {}/{} | {wire} |\n",
        kernel.name,
        kernel.registers,
        kernel.shared,
        kernel.instructions,
        kernel.loads.wide(),
        kernel.stores.wide(),
        kernel.loads.narrow(),
        kernel.stores.narrow(),
    )
}

#[test]
fn the_table_is_written_on_request() {
    let Some(path) = std::env::var_os("EAGLE_VERIFY_WRITE_BUDGETS") else { return };
    let Some(kernels) = kernels() else { return };
    let mut table = String::from(
        "| kernel | registers | shared | SASS instructions | LDG.128/STG.128 | narrow | wire bytes per row \
         | bound | ratio |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    table.extend(kernels.iter().map(table_row));
    fs::write(&path, table).unwrap();
}

/// Files with inline assembly, `asm` as a word of its own.
fn with_assembly(folder: &Path) -> Vec<String> {
    let is_word_part = |c: char| c.is_alphanumeric() || c == '_';
    let is_asm = |word: &str| word.trim_matches('_') == "asm";
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        if text.split(|c| !is_word_part(c)).any(is_asm) {
            found.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    found.sort();
    found
}

#[test]
fn assembly_is_in_the_device_header_only() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    assert_eq!(with_assembly(&kernels), ["device.cuh"]);
    let sample = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_budgets_assembly");
    fs::create_dir_all(&sample).unwrap();
    for (file, text) in
        [("a.cu", "asm volatile(\"\");"), ("b.cu", "plasma asmx"), ("c.cu", "{__asm__(\"\");}")]
    {
        fs::write(sample.join(file), text).unwrap();
    }
    assert_eq!(with_assembly(&sample), ["a.cu", "c.cu"]);
}

/// What makes the ceilings of registers and shared memory more than figures.
#[test]
fn ceilings_leave_room_for_the_blocks_that_are_wanted() {
    for budget in BUDGETS {
        let (threads, blocks) = budget.residency;
        // Registers are given out by eight, and every block has its reserved kilobyte.
        let registers = budget.registers.next_multiple_of(8) * threads * blocks;
        let shared = (budget.shared + sass::RESERVED_SHARED) * blocks;
        assert!(registers <= budgets::REGISTERS, "{}: {registers} registers", budget.names);
        assert!(shared <= budgets::SHARED, "{}: {shared} bytes", budget.names);
        assert!(threads * blocks <= budgets::THREADS, "{}: {threads} threads", budget.names);
    }
}

/// A kernel of a budget, with all that it may have and no more than it must.
fn at_ceilings(budget: &Budget, name: &str) -> Kernel {
    let accesses = |wanted: Wanted| Accesses {
        by_bits: BTreeMap::from([
            (32, wanted.narrow()),
            (128, u32::from(!matches!(wanted, Wanted::Narrow(_)))),
        ]),
        wide_strong_sys: u32::from(matches!(wanted, Wanted::StrongWide(_))),
    };
    Kernel {
        name: name.to_owned(),
        registers: budget.registers,
        shared: budget.shared,
        instructions: budget.instructions,
        atomics: budget.atomics,
        loads: accesses(budget.loads),
        stores: accesses(budget.stores),
        async_copies: Accesses { by_bits: BTreeMap::from([(128, 1)]), ..Accesses::default() },
        matrix_loads: 1,
        multiplications: 1,
        waits_first: true,
        ..Kernel::default()
    }
}

type Change = fn(&mut Kernel);
type AccessesOf = fn(&mut Kernel) -> &mut Accesses;

#[test]
fn every_ceiling_of_every_kernel_is_kept() {
    let too_much: [(&str, Change); 12] = [
        ("bytes of stack", |kernel| kernel.stack += 8),
        ("local memory", |kernel| kernel.local += 8),
        ("spills", |kernel| kernel.spills += 1),
        ("system fences", |kernel| kernel.sys_fences += 1),
        ("system atomics", |kernel| kernel.sys_atomics += 1),
        ("registers", |kernel| kernel.registers += 1),
        ("shared memory", |kernel| kernel.shared += 1),
        ("instructions", |kernel| kernel.instructions += 1),
        ("global atomics", |kernel| kernel.atomics += 1),
        ("narrow loads", |kernel| *kernel.loads.by_bits.entry(64).or_default() += 1),
        ("narrow stores", |kernel| *kernel.stores.by_bits.entry(8).or_default() += 1),
        ("predecessors", |kernel| kernel.waits_first = false),
    ];
    for budget in BUDGETS {
        for name in budget.kernels() {
            let kernel = || at_ceilings(budget, &name);
            assert_eq!(violations(&kernel()), [""; 0]);
            for (wanted, change) in too_much {
                let mut kernel = kernel();
                change(&mut kernel);
                assert_flagged(&kernel, wanted);
            }
            let too_few: [(&str, Wanted, AccessesOf); 2] = [
                ("loads", budget.loads, |kernel| &mut kernel.loads),
                ("stores", budget.stores, |kernel| &mut kernel.stores),
            ];
            for (what, wanted, accesses) in too_few {
                if let Wanted::StrongWide(_) = wanted {
                    let mut kernel = kernel();
                    accesses(&mut kernel).wide_strong_sys = 0;
                    assert_flagged(&kernel, &format!("no 128-bit {what} that are strong"));
                }
                if let Wanted::Wide(_) = wanted {
                    let mut kernel = kernel();
                    accesses(&mut kernel).by_bits.remove(&128);
                    assert_flagged(&kernel, &format!("no 128-bit {what}"));
                }
            }
        }
    }
}

// The parser on samples: one kernel that keeps the rules, and the same with one thing wrong.

const NAME: &str = "ev_all_reduce_norm_one_shot_bf16_w2";

const RESOURCES: &str = "
Fatbin elf code:
================
arch = sm_120a
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function ev_all_reduce_norm_one_shot_bf16_w2:
  REG:40 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:1024 TEXTURE:0 SURFACE:0 SAMPLER:0
";

const SASS: &str = r#"
	code for sm_120a
	.target	sm_120a

		Function : ev_all_reduce_norm_one_shot_bf16_w2
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM120 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM120)"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                             /* 0x0000df00ff017b82 */
                                                                                       /* 0x000fe20000000800 */
        /*0008*/                   ACQBULK ;                                           /* 0x000000000000782e */
        /*0010*/                   LDG.E R4, desc[UR10][R4.64] ;                       /* 0x0000000a04047981 */
                                                                                       /* 0x001f2e000c1e1900 */
        /*0020*/               @P0 LDG.E.128 R8, desc[UR10][R8.64] ;                   /* 0x0000000a04047981 */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ;        /* 0x0000000a04047981 */
        /*0040*/                   LDG.E.128.STRONG.SYS R4, desc[UR8][R12.64] ;        /* 0x0000000a04047981 */
        /*0050*/              @!P1 STG.E.128.STRONG.SYS desc[UR8][R20.64], R8 ;        /* 0x0000000a04047981 */
        /*0060*/                   STG.E.U16 desc[UR8][R2.64], R27 ;                   /* 0x0000000a04047981 */
        /*0070*/                   STG.E.64 desc[UR8][R2.64], R26 ;                    /* 0x0000000a04047981 */
        /*0080*/                   MEMBAR.ALL.GPU ;                                    /* 0x0000000000007992 */
        /*0090*/                   ERRBAR;                                             /* 0x00000000000079ab */
        /*00a0*/                   CGAERRBAR ;                                         /* 0x00000000000075ab */
        /*00b0*/                   ATOMS.MAX RZ, [R2], R5 ;                            /* 0x000000050202 */
        /*00c0*/                   EXIT ;                                              /* 0x000000000000794d */
        /*00d0*/                   BRA 0xd0;                                           /* 0xfffffffc00fc7947 */
        /*00e0*/                   NOP;                                                /* 0x0000000000007918 */
"#;

fn sample(resources: &str, sass: &str) -> Kernel {
    let mut kernels = parse(resources, sass).unwrap();
    assert_eq!(kernels.len(), 1);
    kernels.remove(0)
}

/// The sample with one more instruction, some number of times, before its end.
fn with_instruction(instruction: &str, times: u32) -> Kernel {
    let line =
        format!("        /*00c0*/                   {instruction} ;          /* 0x0000000000007992 */\n");
    let end = SASS.find("        /*00c0*/").unwrap();
    sample(RESOURCES, &format!("{}{}{}", &SASS[..end], line.repeat(times as usize), &SASS[end..]))
}

fn assert_flagged(kernel: &Kernel, wanted: &str) {
    let found = violations(kernel);
    assert!(found.len() == 1 && found[0].contains(wanted), "{wanted:?}: {found:?}");
}

#[test]
fn a_good_sample_is_read_right_and_passes() {
    let kernel = sample(RESOURCES, SASS);
    assert_eq!((kernel.name.as_str(), kernel.registers, kernel.stack, kernel.shared), (NAME, 40, 0, 128));
    assert_eq!((kernel.instructions, kernel.spills, kernel.atomics, kernel.sys_atomics), (15, 0, 0, 0));
    assert_eq!(kernel.loads.by_bits, BTreeMap::from([(32, 1), (128, 2)]));
    assert_eq!(kernel.stores.by_bits, BTreeMap::from([(16, 1), (64, 1), (128, 1)]));
    assert_eq!((kernel.loads.wide_strong_sys, kernel.stores.wide_strong_sys), (1, 1));
    assert_eq!((kernel.gpu_fences, kernel.sys_fences), (1, 0));
    assert_eq!(violations(&kernel), [""; 0]);
}

#[test]
fn bad_samples_are_flagged() {
    for (instruction, wanted) in [
        ("STL [R1+0x8], R2", "spills"),
        ("@P2 LDL.64 R2, [R1]", "spills"),
        ("MEMBAR.SC.SYS", "system fences"),
        ("@P0 MEMBAR.ALL.SYS", "system fences"),
        ("MEMBAR.SC.VC", "system fences"),
        ("ERRBAR", "system fences"),
        ("ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR10][R2.64], R5", "global atomics"),
        ("@P1 REDG.E.MAX.64.STRONG.GPU desc[UR10][R2.64], R4", "global atomics"),
    ] {
        assert_flagged(&with_instruction(instruction, 1), wanted);
    }
    let budget = Budget::of(NAME);
    for (instruction, ceiling, wanted) in [
        ("LDG.E.64.STRONG.SYS R2, desc[UR4][R2.64]", budget.loads.narrow(), "narrow loads"),
        ("LD.E R2, desc[UR4][R2.64]", budget.loads.narrow(), "narrow loads"),
        ("@!P0 STG.E.U8 desc[UR4][R2.64], R5", budget.stores.narrow(), "narrow stores"),
        ("ST.E desc[UR4][R2.64], R5", budget.stores.narrow(), "narrow stores"),
        ("FADD R0, R0, R1", budget.instructions, "instructions"),
    ] {
        // The sample has a few of each already.
        assert_flagged(&with_instruction(instruction, ceiling), wanted);
    }
    for (good, bad, wanted) in [
        ("REG:40", "REG:65", "registers"),
        ("STACK:0", "STACK:16", "stack"),
        ("LOCAL:0", "LOCAL:8", "local memory"),
    ] {
        assert_flagged(&sample(&RESOURCES.replace(good, bad), SASS), wanted);
    }
    assert_flagged(
        &sample(RESOURCES, &SASS.replace("STG.E.128.STRONG.SYS", "STG.E.128")),
        "no 128-bit stores that",
    );
    let wait = "ACQBULK ;";
    assert_flagged(&sample(RESOURCES, &SASS.replace(wait, "LDC R1, c[0x0][0x37c] ;")), "predecessors");
    let late = SASS.replace(wait, "LDC R1, c[0x0][0x37c] ;").replace("ERRBAR;", wait);
    assert!(violations(&sample(RESOURCES, &late)).iter().any(|text| text.ends_with("predecessors")));
    let narrow = sample(RESOURCES, &SASS.replace("LDG.E.128", "LDG.E"));
    assert!(violations(&narrow).iter().any(|text| text.ends_with("no 128-bit loads")));
}

#[test]
fn samples_of_linear_are_judged_by_its_own_budget() {
    let resources = RESOURCES.replace(NAME, "ev_linear_bf16_r16").replace("SHARED:1152", "SHARED:1024");
    let sass = SASS
        .replace(NAME, "ev_linear_bf16_r16")
        .replace("LDG.E.128 R8", "LDSM.16.M88.4 R8")
        .replace("LDG.E.128.STRONG.SYS R4", "HMMA.16816.F32.BF16 R4");
    assert_eq!(violations(&sample(&resources, &sass)), [""; 0]);
    assert_flagged(&sample(&resources.replace("REG:40", "REG:105"), &sass), "registers");
    assert_flagged(&sample(&resources.replace("LOCAL:0", "LOCAL:8"), &sass), "local");
    for (good, bad, wanted) in [
        ("LDSM.16.M88.4", "MOV", "no loads of matrices"),
        ("HMMA.16816.F32.BF16", "FFMA", "no multiplications"),
        ("STG.E.128.STRONG.SYS", "MOV", "no 128-bit stores"),
        ("LDGSTS.E.BYPASS.128", "MOV", "no 128-bit copies"),
        ("MEMBAR.ALL.GPU", "LDGSTS.E.64 [R3], desc[UR4][R4.64]", "narrow copies"),
        ("STG.E.U16 desc", "LDG.E.128 R1, desc", "wide loads"),
    ] {
        assert_flagged(&sample(&resources, &sass.replace(good, bad).replace("ERRBAR;", "NOP;")), wanted);
    }
}

#[test]
fn an_output_that_is_not_understood_is_an_error() {
    assert!(parse(RESOURCES, "").unwrap_err().contains("no instructions"));
    assert!(parse("", SASS).unwrap_err().contains("no resources"));
    assert!(parse(&RESOURCES.replace("STACK:0", "STACK:UNKNOWN"), SASS).unwrap_err().contains("no STACK"));
    assert!(parse(&RESOURCES.repeat(2), SASS).unwrap_err().contains("is there twice"));
    assert!(parse("", "").unwrap().is_empty());
}

#[test]
fn wire_bytes_are_those_of_the_algorithms() {
    for (kernel, wire, bound) in [
        ("one_shot_bf16_w1", 0, 0),
        ("one_shot_f16_w2", 14_336, 14_336),
        ("one_shot_bf16_w8", 100_352, 25_088),
        ("two_shot_f16_w4", 21_504, 21_504),
        ("two_shot_bf16_w8", 25_088, 25_088),
        ("hierarchical_bf16_w8", 28_672, 25_088),
    ] {
        let name = format!("{COLLECTIVE}{kernel}");
        let (algorithm, world) = algorithm_and_world(&name).unwrap();
        assert_eq!((wire_bytes(algorithm, world), bound_bytes(world)), (wire, bound), "{name}");
    }
}
