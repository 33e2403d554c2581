//! Compiles every `kernels/*.cu` with nvcc into one fatbin and embeds it. Acts only with the feature `cuda`.
//!
//! Without nvcc the crate still builds: the image table is empty and carries the reason. A compiler that is
//! there but wrong, too old, or refuses a kernel is a build error. What steers it:
//!
//! | variable | effect |
//! |---|---|
//! | `NVCC` | the compiler; nothing else is searched |
//! | `CUDA_HOME`, `CUDA_PATH`, `CUDA_ROOT`, `CUDA_TOOLKIT_ROOT_DIR` | toolkits, searched in this order, then `PATH` |
//! | `VIRTUAL_ENV`, `CONDA_PREFIX` | Python environments with NVIDIA's wheels; after them the usual folders |
//! | `NVCC_CCBIN` | host compiler |
//! | `EAGLE_VERIFY_CUDA_ARCHS` | what to compile for, `120a` by default; `120a,90,ptx120` |
//! | `EAGLE_VERIFY_NVCC_FLAGS` | more flags, such as `-lineinfo` |
//! | `EAGLE_VERIFY_REQUIRE_KERNELS` | no kernels is a build error |
//! | `EAGLE_VERIFY_SKIP_NVCC`, `DOCS_RS` | no kernels, on purpose |

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

const KERNELS: &str = "kernels";
const DEFAULT_ARCHS: &str = "120a";
/// The first release that knows `sm_120a`.
const OLDEST_RELEASE: (u32, u32) = (12, 8);
const TOOLKITS: [&str; 4] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];
const PYTHON_ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];
const CURES: &str = "Install the CUDA toolkit, 12.8 or later; or, in an active Python environment,
    pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl
or set NVCC to the compiler.";

/// The files of `kernels/` and what is in them. The folder is flat.
type Sources = BTreeMap<PathBuf, Vec<u8>>;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(message) = build() {
        eprintln!("eagle-verify: {message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    println!("cargo:rerun-if-changed={KERNELS}");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or("OUT_DIR is not set")?;
    let archs = Archs::parse(&variable("EAGLE_VERIFY_CUDA_ARCHS").unwrap_or_else(|| DEFAULT_ARCHS.into()))?;
    let required = is_on("EAGLE_VERIFY_REQUIRE_KERNELS");
    if let Some(skip) = ["DOCS_RS", "EAGLE_VERIFY_SKIP_NVCC"].into_iter().find(|name| is_on(name)) {
        if required {
            return Err(format!("{skip} and EAGLE_VERIFY_REQUIRE_KERNELS are both set: unset one"));
        }
        return write_table(&out, &[], &archs, &format!("the build skipped nvcc, because {skip} was set"));
    }
    let sources = read_sources()?;
    let kernels: Vec<&Path> = sources.keys().map(PathBuf::as_path).filter(|path| is_kernel(path)).collect();
    let (why_none, cures) = match find_nvcc()? {
        _ if kernels.is_empty() => (format!("{KERNELS}/ has no .cu file"), ""),
        Some(nvcc) => {
            Compiler::new(nvcc, &archs)?.compile_all(&kernels, &sources, &out)?;
            return write_table(&out, &kernels, &archs, "");
        }
        None => (nvcc_was_not_found(), CURES),
    };
    if required {
        return Err(format!("{why_none}. EAGLE_VERIFY_REQUIRE_KERNELS is set.\n{cures}"));
    }
    println!("cargo:warning=building without CUDA kernels: {why_none}");
    write_table(&out, &[], &archs, &why_none)
}

fn nvcc_was_not_found() -> String {
    // Cargo cannot see a file appear anywhere on a path, hence the last words.
    format!(
        "nvcc was not found: not in NVCC, {}, PATH, a Python environment or the usual folders \
         (once it is there, run `cargo clean -p eagle-verify`)",
        TOOLKITS.join(", ")
    )
}

/// Reads a variable and has cargo run this again when it changes. An empty one counts as unset.
fn variable(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a switch is set, to anything but 0.
pub fn is_on(name: &str) -> bool {
    variable(name).is_some_and(|value| value != "0")
}

fn read_sources() -> Result<Sources, String> {
    let explain = |path: &Path, error| format!("{}: {error}", path.display());
    let folder = Path::new(KERNELS);
    let entries = fs::read_dir(folder).map_err(|error| explain(folder, error))?;
    let read = |path: PathBuf| match fs::read(&path) {
        Ok(text) => Ok((path, text)),
        Err(error) => Err(explain(&path, error)),
    };
    entries.map(|entry| read(entry.map_err(|error| explain(folder, error))?.path())).collect()
}

fn is_kernel(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "cu")
}

/// The first nvcc of the search order; an error when `NVCC` names none.
pub fn find_nvcc() -> Result<Option<PathBuf>, String> {
    let found = match variable("NVCC").map(PathBuf::from) {
        Some(nvcc) if !nvcc.is_file() => return Err(format!("NVCC={} is not a file", nvcc.display())),
        None => search(),
        given => given,
    };
    match &found {
        // A compiler that was replaced or removed is noticed.
        Some(nvcc) => println!("cargo:rerun-if-changed={}", nvcc.display()),
        // `PATH` is another one in every shell and editor. Only while there is no compiler is it watched:
        // otherwise the kernels would be built again and again for nothing.
        None => println!("cargo:rerun-if-env-changed=PATH"),
    }
    Ok(found)
}

fn search() -> Option<PathBuf> {
    // Lazy, so that cargo watches no variable behind the one that decided.
    let toolkits = TOOLKITS.into_iter().filter_map(variable).map(|root| Path::new(&root).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).filter(|folder| folder.is_absolute());
    let environments = PYTHON_ENVIRONMENTS.into_iter().filter_map(variable);
    let wheels = environments.flat_map(|root| wheel_folders(Path::new(&root)));
    let usual = std::iter::once_with(usual_folders).flatten();
    let name = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let mut candidates = toolkits.chain(on_path).chain(wheels).chain(usual).map(|folder| folder.join(&name));
    candidates.find(|candidate| candidate.is_file())
}

fn wheel_folders(root: &Path) -> Vec<PathBuf> {
    let mut pythons = newest_first(&root.join("lib"), "python");
    pythons.push(root.join("Lib")); // Windows
    let wheels = ["cu13", "cuda_nvcc", "cu12"];
    let folders =
        |python: &PathBuf| wheels.map(|wheel| python.join("site-packages/nvidia").join(wheel).join("bin"));
    pythons.iter().flat_map(folders).collect()
}

fn usual_folders() -> Vec<PathBuf> {
    let mut roots = vec![PathBuf::from("/usr/local/cuda"), PathBuf::from("/opt/cuda")];
    roots.extend(newest_first(Path::new("/usr/local"), "cuda-"));
    roots.iter().map(|root| root.join("bin")).collect()
}

/// What in `folder` is called `prefix` and a version, `python3.13` before `python3.9`.
fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let version = |name: &str| -> Option<Vec<u32>> {
        let digits = |part: &str| part.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok();
        name.strip_prefix(prefix)?.split('.').map(digits).collect()
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, PathBuf)> =
        entries.filter_map(|entry| Some((version(entry.file_name().to_str()?)?, entry.path()))).collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// What to compile for, machine code before PTX.
struct Archs(Vec<String>);

impl Archs {
    fn parse(list: &str) -> Result<Self, String> {
        let mut archs = Vec::new();
        for arch in list.split(',').map(str::trim) {
            if !is_arch(arch.strip_prefix("ptx").unwrap_or(arch)) {
                return Err(format!(
                    "EAGLE_VERIFY_CUDA_ARCHS={list}: {arch:?} is no architecture. Wanted is a list such as \
                     120a,90,ptx120: two or three digits with an optional a or f, ptx before them for PTX"
                ));
            }
            if !archs.iter().any(|known| known == arch) {
                archs.push(arch.to_owned());
            }
        }
        archs.sort_by_key(|arch| arch.starts_with("ptx"));
        Ok(Self(archs))
    }

    fn flags(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|arch| match arch.strip_prefix("ptx") {
            Some(version) => format!("-gencode=arch=compute_{version},code=compute_{version}"),
            None => format!("-gencode=arch=compute_{arch},code=sm_{arch}"),
        })
    }
}

fn is_arch(text: &str) -> bool {
    let digits = text.strip_suffix(['a', 'f']).unwrap_or(text);
    matches!(digits.len(), 2 | 3) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

struct Compiler {
    nvcc: PathBuf,
    flags: Vec<String>,
    /// What else decides the image: the compiler's version, and the flags that it takes from the environment.
    surroundings: String,
}

impl Compiler {
    fn new(nvcc: PathBuf, archs: &Archs) -> Result<Self, String> {
        let version = version(&nvcc)?;
        // Without contraction, results equal the CPU's bit for bit.
        let mut flags: Vec<String> = ["-fatbin", "-std=c++17", "-O3", "-fmad=false"].map(String::from).into();
        flags.push(format!("-I{KERNELS}"));
        flags.push("-Xptxas=-warn-spills,-warn-lmem-usage".into());
        flags.extend(archs.flags());
        if let Some(host) = variable("NVCC_CCBIN") {
            flags.extend(["-ccbin".into(), host]);
        }
        let more = variable("EAGLE_VERIFY_NVCC_FLAGS").unwrap_or_default();
        flags.extend(more.split_whitespace().map(String::from));
        let own = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].map(|name| variable(name).unwrap_or_default());
        Ok(Self { nvcc, flags, surroundings: format!("{version}{own:?}") })
    }

    fn compile_all(&self, kernels: &[&Path], sources: &Sources, out: &Path) -> Result<(), String> {
        let results = in_parallel(kernels, |kernel| self.compile(kernel, sources, &image_path(out, kernel)));
        let mut errors = Vec::new();
        for (kernel, result) in kernels.iter().zip(results) {
            match result {
                Ok(warnings) => {
                    for line in warnings.lines().filter(|line| !line.trim().is_empty()) {
                        println!("cargo:warning={}: {line}", kernel.display());
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
    }

    /// Gives what nvcc warned of. An image that nvcc would make again is kept.
    fn compile(&self, kernel: &Path, sources: &Sources, image: &Path) -> Result<String, String> {
        let stamp_path = image.with_extension("stamp");
        let stamp = self.stamp(kernel, sources);
        if image.is_file() && fs::read_to_string(&stamp_path).is_ok_and(|old| old == stamp) {
            return Ok(String::new());
        }
        // The old stamp must not outlive the old image. It may be absent.
        let _ = fs::remove_file(&stamp_path);
        let mut command = Command::new(&self.nvcc);
        let output = command.args(&self.flags).arg("-o").arg(image).arg(kernel).output();
        let output = output.map_err(|error| format!("{} does not run: {error}", self.nvcc.display()))?;
        let warnings = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            let (nvcc, kernel, status) = (self.nvcc.display(), kernel.display(), output.status);
            let stdout = String::from_utf8_lossy(&output.stdout); // where MSVC complains
            return Err(format!("{nvcc} failed on {kernel}, {status}\n{warnings}{stdout}"));
        }
        // Without a stamp the kernel is compiled again next time, so that its warnings don't vanish.
        if warnings.trim().is_empty() {
            fs::write(&stamp_path, stamp).map_err(|error| format!("{}: {error}", stamp_path.display()))?;
        }
        Ok(warnings)
    }

    /// Equal for equal images: any header may be included, another kernel is not.
    fn stamp(&self, kernel: &Path, sources: &Sources) -> String {
        let mut hasher = DefaultHasher::new();
        (&self.nvcc, &self.flags, &self.surroundings).hash(&mut hasher);
        for source in sources.iter().filter(|(path, _)| path.as_path() == kernel || !is_kernel(path)) {
            source.hash(&mut hasher);
        }
        format!("{:016x}", hasher.finish())
    }
}

/// What `nvcc --version` says; an error when it is too old.
fn version(nvcc: &Path) -> Result<String, String> {
    let name = nvcc.display();
    let output = Command::new(nvcc).arg("--version").output();
    let output = output.map_err(|error| format!("{name} does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (major, minor) = release(&text).ok_or_else(|| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        format!("{name} --version names no release ({}):\n{text}{stderr}", output.status)
    })?;
    if (major, minor) < OLDEST_RELEASE {
        let (wanted_major, wanted_minor) = OLDEST_RELEASE;
        return Err(format!(
            "{name} is release {major}.{minor}; sm_120a needs {wanted_major}.{wanted_minor} or later.\n{CURES}"
        ));
    }
    Ok(text)
}

/// `…, release 13.0, V13.0.48` is (13, 0).
fn release(version: &str) -> Option<(u32, u32)> {
    let (_, rest) = version.split_once("release ")?;
    let (major, minor) = rest.split([',', '\n']).next()?.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The results of `work`, in the order of `items`, on as many threads as cargo grants.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    // Set by cargo for every run, so not watched.
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return };
            let result = work(item);
            results.lock().expect("no worker panics").push((index, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..items.len().min(jobs.max(1)) {
            scope.spawn(worker);
        }
    });
    let mut results = results.into_inner().expect("no worker panics");
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

fn image_path(out: &Path, kernel: &Path) -> PathBuf {
    out.join(kernel.file_name().expect("listed from a folder")).with_extension("fatbin")
}

/// Writes the table for `include!`. The module around it defines `Aligned`: the driver reads the images as
/// words, and `include_bytes!` alone aligns to one byte.
fn write_table(out: &Path, kernels: &[&Path], archs: &Archs, why_none: &str) -> Result<(), String> {
    let mut table = String::from("pub(super) static IMAGES: &[(&str, &[u8])] = &[\n");
    for kernel in kernels {
        let stem = kernel.file_stem().and_then(|stem| stem.to_str());
        let stem = stem.ok_or_else(|| format!("{}: the name is not UTF-8", kernel.display()))?;
        let bytes = format!("*include_bytes!({:?})", image_path(out, kernel));
        table += &format!("    ({stem:?}, {{ static A: &Aligned<[u8]> = &Aligned({bytes}); &A.0 }}),\n");
    }
    table += &format!("];\npub(super) const ARCHS: &str = {:?};\n", archs.0.join(","));
    table += &format!("pub(super) const WHY_NONE: &str = {why_none:?};\n");
    let path = out.join("kernels.rs");
    fs::write(&path, table).map_err(|error| format!("{}: {error}", path.display()))
}
