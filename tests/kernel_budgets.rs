//! Budgets of the machine code that is really embedded: no spills, no system-wide fences, wide accesses,
//! registers and instructions below a ceiling. Reads the `sm_120a` images with cuobjdump, so it needs no GPU.
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

/// For its search for nvcc: the tools of another toolkit than the build's would judge another's code.
#[path = "../build.rs"]
#[allow(dead_code)]
mod build_script;

const COLLECTIVE: &str = "ev_all_reduce_norm_";
const CHOOSE: &str = "ev_choose_";
const LINEAR: &str = "ev_linear_";
const ARCH: &str = "sm_120a";
/// In every block, for the system; cuobjdump counts it as the kernel's.
const RESERVED_SHARED: u32 = 1024;
/// The row of the table's wire bytes: hidden 7168 in two bytes each.
const ROW_BYTES: u32 = 7168 * 2;

/// Ceilings of one algorithm and world size, for both element types: about a tenth above what nvcc 13.5 makes.
struct Budget {
    algorithm: &'static str,
    world: u32,
    instructions: u32,
    /// Loads below 128 bits: tags, escapes, fault records. The data itself is loaded by 128.
    narrow_loads: u32,
    narrow_stores: u32,
}

/// What the largest block of a world leaves to each thread: 1024 of them, or 512 for eight ranks.
const fn max_registers(world: u32) -> u32 {
    if world == 8 { 128 } else { 64 }
}

const BUDGETS: [Budget; 8] = [
    Budget::new("one_shot", 1, 1500, 14, 30),
    Budget::new("one_shot", 2, 1700, 15, 32),
    Budget::new("one_shot", 4, 2050, 17, 34),
    Budget::new("one_shot", 8, 2250, 21, 38),
    Budget::new("two_shot", 2, 2050, 19, 42),
    Budget::new("two_shot", 4, 2250, 21, 44),
    Budget::new("two_shot", 8, 2600, 25, 48),
    Budget::new("hierarchical", 8, 2950, 32, 66),
];

/// Ceilings of `choose.cu` for every type of logits. Registers and shared memory leave room for two blocks of 512
/// threads on a multiprocessor.
const CHOOSE_REGISTERS: u32 = 64;
const CHOOSE_SHARED: u32 = 27_000;
const CHOOSE_INSTRUCTIONS: u32 = 4600;
/// One raises a row's key; the others are in shared memory, which is not counted here.
const CHOOSE_ATOMICS: u32 = 1;

/// Ceilings of `linear.cu` for its instances of up to so many rows, of both types: registers, instructions, narrow
/// loads (the list of rows) and narrow stores (of sums, where the number of outputs is no multiple of 4).
/// Two blocks of 128 threads fit on a multiprocessor.
const LINEAR_BUDGETS: [(&str, [u32; 4]); 4] = [
    ("r8", [80, 460, 1, 4]),
    ("r16", [104, 590, 2, 8]),
    ("r32", [152, 810, 4, 16]),
    ("r64", [248, 1300, 8, 32]),
];
/// The small kernels before and after it.
const SPLIT_INSTRUCTIONS: u32 = 125;
const ADD_SLICES_INSTRUCTIONS: u32 = 230;

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

    fn of(kernel: &Kernel) -> &'static Self {
        let (algorithm, world) = kernel.algorithm_and_world();
        let found = BUDGETS.iter().find(|budget| budget.algorithm == algorithm && budget.world == world);
        found.unwrap_or_else(|| panic!("{} has no budget", kernel.name))
    }
}

/// Accesses of one kind to global memory.
#[derive(Debug, Default)]
struct Accesses {
    by_bits: BTreeMap<u32, u32>,
    /// Of 128 bits or more, strong at the scope of the system: what peers may touch at the same time.
    wide_strong_sys: u32,
}

impl Accesses {
    fn add(&mut self, op: &str) {
        let bits = op.split('.').find_map(|part| match part {
            "U8" | "S8" => Some(8),
            "U16" | "S16" => Some(16),
            "64" | "128" | "256" => part.parse().ok(),
            _ => None,
        });
        let bits = bits.unwrap_or(32);
        *self.by_bits.entry(bits).or_default() += 1;
        self.wide_strong_sys += u32::from(bits >= 128 && op.contains(".STRONG.SYS"));
    }

    fn wide(&self) -> u32 {
        self.by_bits.range(128..).map(|(_, count)| count).sum()
    }

    fn narrow(&self) -> u32 {
        self.by_bits.range(..128).map(|(_, count)| count).sum()
    }
}

/// What cuobjdump says of one kernel.
#[derive(Debug, Default)]
struct Kernel {
    name: String,
    registers: u32,
    stack: u32,
    local: u32,
    shared: u32,
    /// Without padding.
    instructions: u32,
    /// Accesses to local memory: spills, and arrays with an index that the compiler did not see through.
    spills: u32,
    loads: Accesses,
    stores: Accesses,
    /// From global to shared memory.
    async_copies: Accesses,
    matrix_loads: u32,
    multiplications: u32,
    sys_fences: u32,
    gpu_fences: u32,
    atomics: u32,
    sys_atomics: u32,
    /// A fence whose error barrier is still to come.
    waits_for_errbar: bool,
}

impl Kernel {
    fn from_resources(name: &str, line: &str) -> Result<Self, String> {
        let field = |key: &str| -> Result<u32, String> {
            let words = line.split_whitespace().filter_map(|word| word.split_once(':'));
            let value = words.filter(|(name, _)| *name == key).map(|(_, value)| value).next();
            value.and_then(|value| value.parse().ok()).ok_or_else(|| format!("{name}: no {key} in {line:?}"))
        };
        Ok(Self {
            name: name.to_owned(),
            registers: field("REG")?,
            stack: field("STACK")?,
            local: field("LOCAL")?,
            shared: field("SHARED")?.saturating_sub(RESERVED_SHARED),
            ..Self::default()
        })
    }

    fn add_instruction(&mut self, op: &str) {
        // The whole word up to the dot: LDGSTS is no LDG.
        let head = op.split('.').next().unwrap_or(op);
        if head == "NOP" {
            return;
        }
        self.instructions += 1;
        match head {
            "LDL" | "STL" => self.spills += 1,
            // LD and ST are generic: the compiler lost the address space. Global is the worst case.
            "LDG" | "LD" => self.loads.add(op),
            "STG" | "ST" => self.stores.add(op),
            "LDGSTS" => self.async_copies.add(op),
            "LDSM" => self.matrix_loads += 1,
            "HMMA" => self.multiplications += 1,
            "ATOM" | "ATOMG" | "RED" | "REDG" => {
                self.atomics += 1;
                self.sys_atomics += u32::from(op.ends_with(".SYS"));
            }
            "MEMBAR" => self.add_fence(op),
            // Each fence has one. One without a fence belongs to something this parser does not know.
            "ERRBAR" if !std::mem::take(&mut self.waits_for_errbar) => self.sys_fences += 1,
            _ => {}
        }
    }

    fn add_fence(&mut self, op: &str) {
        self.waits_for_errbar = true;
        match op.rsplit('.').next() {
            Some("GPU") => self.gpu_fences += 1,
            Some("CTA") => {}
            // SYS, and whatever a later compiler may call as wide a scope.
            _ => self.sys_fences += 1,
        }
    }

    /// `one_shot` and 8 of `ev_all_reduce_norm_one_shot_bf16_w8`.
    fn algorithm_and_world(&self) -> (&str, u32) {
        let parse = || -> Option<(&str, u32)> {
            let (algorithm_and_type, world) = self.name.strip_prefix(COLLECTIVE)?.rsplit_once("_w")?;
            let (algorithm, _) = algorithm_and_type.rsplit_once('_')?;
            Some((algorithm, world.parse().ok()?))
        };
        parse().unwrap_or_else(|| panic!("{} names no algorithm or world size", self.name))
    }

    /// What is wrong with a kernel.
    fn violations(&self) -> Vec<String> {
        let mut found = self.above(&[
            ("bytes of stack", self.stack, 0),
            ("bytes of local memory", self.local, 0),
            ("local loads and stores (spills)", self.spills, 0),
            ("system fences", self.sys_fences, 0),
        ]);
        if self.name.starts_with(CHOOSE) {
            found.extend(self.above(&[
                ("registers", self.registers, CHOOSE_REGISTERS),
                ("bytes of shared memory", self.shared, CHOOSE_SHARED),
                ("instructions", self.instructions, CHOOSE_INSTRUCTIONS),
                ("global atomics", self.atomics, CHOOSE_ATOMICS),
            ]));
            if self.loads.wide() == 0 {
                found.push(format!("{}: no 128-bit loads", self.name));
            }
            return found;
        }
        if self.name.starts_with(LINEAR) {
            found.extend(self.violations_of_linear());
            return found;
        }
        if self.name.starts_with("ev_split_") {
            found.extend(self.above(&[
                ("instructions", self.instructions, SPLIT_INSTRUCTIONS),
                ("narrow loads", self.loads.narrow(), 0),
                ("narrow stores", self.stores.narrow(), 0),
            ]));
            return found;
        }
        if self.name == "ev_add_slices_f32" {
            found.extend(self.above(&[("instructions", self.instructions, ADD_SLICES_INSTRUCTIONS)]));
            return found;
        }
        let budget = Budget::of(self);
        let (_, world) = self.algorithm_and_world();
        found.extend(self.above(&[
            ("registers", self.registers, max_registers(budget.world)),
            ("instructions", self.instructions, budget.instructions),
            ("narrow loads", self.loads.narrow(), budget.narrow_loads),
            ("narrow stores", self.stores.narrow(), budget.narrow_stores),
        ]));
        for (what, accesses) in [("loads", &self.loads), ("stores", &self.stores)] {
            if accesses.wide() == 0 {
                found.push(format!("{}: no 128-bit {what}", self.name));
            }
            if world > 1 && accesses.wide_strong_sys == 0 {
                found.push(format!("{}: no 128-bit {what} that are strong for the system", self.name));
            }
        }
        found
    }

    fn violations_of_linear(&self) -> Vec<String> {
        let budget = LINEAR_BUDGETS.iter().find(|(rows, _)| self.name.ends_with(&format!("_{rows}")));
        let (_, [registers, instructions, narrow_loads, narrow_stores]) =
            budget.unwrap_or_else(|| panic!("{} has no budget", self.name));
        let mut found = self.above(&[
            ("registers", self.registers, *registers),
            ("instructions", self.instructions, *instructions),
            ("narrow loads", self.loads.narrow(), *narrow_loads),
            ("narrow stores", self.stores.narrow(), *narrow_stores),
            // Weights and activations come by copies alone.
            ("wide loads", self.loads.wide(), 0),
            ("narrow copies", self.async_copies.narrow(), 0),
        ]);
        for (what, count) in [
            ("128-bit copies", self.async_copies.wide()),
            ("128-bit stores", self.stores.wide()),
            ("loads of matrices", self.matrix_loads),
            ("multiplications of matrices", self.multiplications),
        ] {
            if count == 0 {
                found.push(format!("{}: no {what}", self.name));
            }
        }
        found
    }

    /// What is above its ceiling: (what, seen, ceiling).
    fn above(&self, figures: &[(&str, u32, u32)]) -> Vec<String> {
        let above = figures.iter().filter(|(_, seen, ceiling)| seen > ceiling);
        let text = |(what, seen, ceiling)| format!("{}: {seen} {what}, at most {ceiling} wanted", self.name);
        above.copied().map(text).collect()
    }

    /// Bytes that one rank sends for one row.
    fn wire_bytes(&self) -> u32 {
        match self.algorithm_and_world() {
            ("one_shot", world) => (world - 1) * ROW_BYTES,
            ("two_shot", world) => bound_bytes(world),
            // Two islands of four. Three quarters are scattered in the island, a quarter crosses in fp32, and
            // three quarters are gathered.
            ("hierarchical", 8) => ROW_BYTES * 3 / 4 + ROW_BYTES / 4 * 2 + ROW_BYTES * 3 / 4,
            _ => panic!("{}: unknown algorithm", self.name),
        }
    }

    fn table_row(&self) -> String {
        let wire = if self.name.starts_with(COLLECTIVE) {
            let (_, world) = self.algorithm_and_world();
            let (wire, bound) = (self.wire_bytes(), bound_bytes(world));
            let ratio =
                if bound == 0 { "-".into() } else { format!("{:.2}", f64::from(wire) / f64::from(bound)) };
            format!("{wire} | {bound} | {ratio}")
        } else {
            "- | - | -".to_owned()
        };
        format!(
            "| {} | {} | {} | {} | {}/{} | {}/{} | {wire} |\n",
            self.name,
            self.registers,
            self.shared,
            self.instructions,
            self.loads.wide(),
            self.stores.wide(),
            self.loads.narrow(),
            self.stores.narrow(),
        )
    }
}

/// No all-reduce sends less: 2 (N - 1) / N of the row.
fn bound_bytes(world: u32) -> u32 {
    2 * (world - 1) * ROW_BYTES / world
}

/// The kernels in the two outputs of cuobjdump. A kernel that is in one of them only is an error: a parser
/// that sees nothing finds nothing wrong.
fn parse(resources: &str, sass: &str) -> Result<Vec<Kernel>, String> {
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut name = "";
    for line in resources.lines().map(str::trim) {
        if let Some(function) = line.strip_prefix("Function ") {
            name = function.trim_end_matches(':');
        } else if line.starts_with("REG:")
            && kernels.insert(name.to_owned(), Kernel::from_resources(name, line)?).is_some()
        {
            return Err(format!("{name} is there twice"));
        }
    }
    let mut current = None;
    for line in sass.lines().map(str::trim) {
        if let Some(function) = line.strip_prefix("Function : ") {
            current = Some(kernels.get_mut(function).ok_or_else(|| format!("{function} has no resources"))?);
        } else if let Some(op) = opcode(line) {
            current.as_mut().ok_or_else(|| format!("{line:?} is in no function"))?.add_instruction(op);
        }
    }
    let kernels: Vec<Kernel> = kernels.into_values().collect();
    match kernels.iter().find(|kernel| kernel.instructions == 0) {
        Some(empty) => Err(format!("{} has no instructions", empty.name)),
        None => Ok(kernels),
    }
}

/// `/*0040*/ @P0 LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x… */` has `LDG.E.128`.
fn opcode(line: &str) -> Option<&str> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    u32::from_str_radix(address, 16).ok()?;
    let (instruction, _) = rest.split_once(';')?;
    instruction.split_whitespace().find(|word| !word.starts_with('@'))
}

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
    let violations: Vec<String> = kernels.iter().flat_map(Kernel::violations).collect();
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

#[test]
fn exactly_the_kernels_that_rust_asks_for_are_there() {
    let Some(kernels) = kernels() else { return };
    let mut wanted = BTreeSet::from(["bf16", "f16", "f32"].map(|dtype| format!("{CHOOSE}{dtype}")));
    for (algorithm, worlds) in
        [("one_shot", &[1, 2, 4, 8][..]), ("two_shot", &[2, 4, 8]), ("hierarchical", &[8])]
    {
        for world in worlds {
            wanted.extend(["bf16", "f16"].map(|dtype| format!("{COLLECTIVE}{algorithm}_{dtype}_w{world}")));
        }
    }
    for dtype in ["bf16", "f16"] {
        wanted.extend(LINEAR_BUDGETS.map(|(rows, _)| format!("{LINEAR}{dtype}_{rows}")));
        wanted.insert(format!("ev_split_{dtype}"));
    }
    wanted.insert("ev_add_slices_f32".into());
    assert_eq!(wanted.len(), 16 + 3 + 8 + 2 + 1);
    let seen: BTreeSet<String> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
    assert_eq!(seen, wanted);
}

#[test]
fn the_table_is_written_on_request() {
    let Some(path) = std::env::var_os("EAGLE_VERIFY_WRITE_BUDGETS") else { return };
    let Some(kernels) = kernels() else { return };
    let mut table = String::from(
        "| kernel | registers | shared | SASS instructions | LDG.128/STG.128 | narrow | wire bytes per row \
         | bound | ratio |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    table.extend(kernels.iter().map(Kernel::table_row));
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
        /*00b0*/                   ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR10][R2.64], R5 ; /* 0x000000050202 */
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
    let violations = kernel.violations();
    assert!(violations.len() == 1 && violations[0].contains(wanted), "{wanted:?}: {violations:?}");
}

#[test]
fn a_good_sample_is_read_right_and_passes() {
    let kernel = sample(RESOURCES, SASS);
    assert_eq!((kernel.name.as_str(), kernel.registers, kernel.stack, kernel.shared), (NAME, 40, 0, 128));
    assert_eq!((kernel.instructions, kernel.spills, kernel.atomics, kernel.sys_atomics), (14, 0, 1, 0));
    assert_eq!(kernel.loads.by_bits, BTreeMap::from([(32, 1), (128, 2)]));
    assert_eq!(kernel.stores.by_bits, BTreeMap::from([(16, 1), (64, 1), (128, 1)]));
    assert_eq!((kernel.loads.wide_strong_sys, kernel.stores.wide_strong_sys), (1, 1));
    assert_eq!((kernel.gpu_fences, kernel.sys_fences), (1, 0));
    assert_eq!(kernel.violations(), [""; 0]);
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
    ] {
        assert_flagged(&with_instruction(instruction, 1), wanted);
    }
    let budget = Budget::of(&sample(RESOURCES, SASS));
    for (instruction, ceiling, wanted) in [
        ("LDG.E.64.STRONG.SYS R2, desc[UR4][R2.64]", budget.narrow_loads, "narrow loads"),
        ("LD.E R2, desc[UR4][R2.64]", budget.narrow_loads, "narrow loads"),
        ("@!P0 STG.E.U8 desc[UR4][R2.64], R5", budget.narrow_stores, "narrow stores"),
        ("ST.E desc[UR4][R2.64], R5", budget.narrow_stores, "narrow stores"),
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
    let narrow = sample(RESOURCES, &SASS.replace("LDG.E.128", "LDG.E"));
    assert!(narrow.violations().iter().any(|text| text.ends_with("no 128-bit loads")));
}

/// The same for the other kind of kernel.
#[test]
fn samples_of_choose_are_judged_by_its_own_budget() {
    let resources = RESOURCES.replace(NAME, "ev_choose_bf16");
    let sass = SASS.replace(NAME, "ev_choose_bf16");
    assert_eq!(sample(&resources, &sass).violations(), [""; 0]);
    for (good, bad, wanted) in [
        ("REG:40", "REG:65", "registers"),
        ("SHARED:1152", "SHARED:30000", "shared"),
        ("STACK:0", "STACK:8", "stack"),
    ] {
        assert_flagged(&sample(&resources.replace(good, bad), &sass), wanted);
    }
    assert_flagged(&sample(&resources, &sass.replace("STG.E.64", "ATOMG.E.MAX.64")), "atomics");
    assert_flagged(&sample(&resources, &sass.replace(".128", ".64")), "no 128-bit loads");
}

#[test]
fn samples_of_linear_are_judged_by_its_own_budget() {
    let resources = RESOURCES.replace(NAME, "ev_linear_bf16_r16");
    let sass = SASS
        .replace(NAME, "ev_linear_bf16_r16")
        .replace("LDG.E.128 R8", "LDSM.16.M88.4 R8")
        .replace("LDG.E.128.STRONG.SYS R4", "HMMA.16816.F32.BF16 R4");
    assert_eq!(sample(&resources, &sass).violations(), [""; 0]);
    assert_flagged(&sample(&resources.replace("REG:40", "REG:105"), &sass), "registers");
    assert_flagged(&sample(&resources.replace("LOCAL:0", "LOCAL:8"), &sass), "local");
    for (good, bad, wanted) in [
        ("LDSM.16.M88.4", "MOV", "no loads of matrices"),
        ("HMMA.16816.F32.BF16", "FFMA", "no multiplications"),
        ("STG.E.128.STRONG.SYS", "MOV", "no 128-bit stores"),
        ("LDGSTS.E.BYPASS.128", "MOV", "no 128-bit copies"),
        ("MEMBAR.ALL.GPU", "LDGSTS.E.64 [R3], desc[UR4][R4.64]", "narrow copies"),
        ("LDC R1", "LDG.E.128 R1", "wide loads"),
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
        let kernel = Kernel { name: format!("{COLLECTIVE}{kernel}"), ..Kernel::default() };
        let (_, world) = kernel.algorithm_and_world();
        assert_eq!((kernel.wire_bytes(), bound_bytes(world)), (wire, bound), "{}", kernel.name);
    }
}
