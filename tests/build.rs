//! The build script, compiled by itself and run in made-up packages with made-up compilers.
#![cfg(unix)]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

const TARGET_TMP: &str = env!("CARGO_TARGET_TMPDIR");

/// A compiler that notes how it was called, then does as its file `behave` says. It may use nothing but what
/// the shell itself has: its `PATH` is empty.
const FAKE_NVCC: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then
    echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release RELEASE, V1.2.3"
    exit 0
fi
echo "$0 $*" >> "$OUT_DIR/calls"
while [ $# -gt 0 ]; do
    case "$1" in
        -o) image=$2 ;;
        *.cu) kernel=$1 ;;
    esac
    shift
done
echo "image of $kernel" > "$image"
BEHAVE
"#;

/// What the generated table is included into.
const TABLE_USER: &str = r#"
mod images {
    #[repr(C, align(64))]
    #[allow(dead_code)]
    struct Aligned<T: ?Sized>(T);
    include!("out/kernels.rs");
    pub fn show() {
        for (name, image) in IMAGES {
            println!("{name} {} {:?}", image.as_ptr() as usize % 64, std::str::from_utf8(image).unwrap());
        }
        println!("archs {ARCHS:?} why_none {WHY_NONE:?}");
    }
}
fn main() { images::show() }
"#;

fn rustc() -> Command {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition", "2024"]);
    rustc
}

fn must(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The script, looking for the usual folders below its working folder: a toolkit of this machine must not
/// take part.
fn compile_script(path: &Path) {
    let text = include_str!("../build.rs");
    let moved = text.replace("\"/usr/local", "\"usr/local").replace("\"/opt/", "\"opt/");
    assert_eq!(text.len() - moved.len(), 3, "the usual folders have moved in build.rs");
    let source = path.with_extension("rs");
    fs::write(&source, moved).unwrap();
    must(rustc().arg(&source).arg("-o").arg(path));
}

/// One package. Only one exists at a time: while a fake compiler is being written, no other thread may fork,
/// or the system calls it busy.
struct Package {
    root: PathBuf,
    script: PathBuf,
    variables: Vec<(String, String)>,
    _turn: MutexGuard<'static, ()>,
}

struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Package {
    /// With two kernels, a header and the feature on.
    fn new(name: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static SCRIPT: Mutex<bool> = Mutex::new(false);
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let script = Path::new(TARGET_TMP).join("build-script");
        let mut compiled = SCRIPT.lock().unwrap();
        if !*compiled {
            compile_script(&script);
            *compiled = true;
        }
        let root = Path::new(TARGET_TMP).join("build").join(name);
        let _ = fs::remove_dir_all(&root); // of an earlier run
        for folder in ["kernels", "out", "empty"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let mut package = Self { root, script, variables: Vec::new(), _turn: turn };
        for file in ["kernels/b.cu", "kernels/a.cu", "kernels/device.cuh"] {
            package.write(file, file);
        }
        package.set("CARGO_FEATURE_CUDA", "1");
        package.set("NUM_JOBS", "2");
        package.set("OUT_DIR", package.path("out"));
        package.set("PATH", package.path("empty"));
        package
    }

    fn path(&self, file: &str) -> String {
        self.root.join(file).to_str().unwrap().to_owned()
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_default()
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.variables.push((name.to_owned(), value.into()));
    }

    /// Puts a compiler into the folder `bin` and gives its path.
    fn add_nvcc(&self, bin: &str, release: &str, behave: &str) -> String {
        let file = format!("{bin}/nvcc");
        self.write(&file, &FAKE_NVCC.replace("RELEASE", release).replace("BEHAVE", behave));
        fs::set_permissions(self.root.join(&file), Permissions::from_mode(0o755)).unwrap();
        self.path(&file)
    }

    fn run(&self) -> Outcome {
        let mut command = Command::new(&self.script);
        command.current_dir(&self.root).env_clear().envs(self.variables.iter().cloned());
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    fn passes(&self) -> Outcome {
        let outcome = self.run();
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        outcome
    }

    /// It must fail in words, not in a panic, and say all of `wanted`.
    fn fails(&self, wanted: &[&str]) {
        let outcome = self.run();
        assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
        assert!(outcome.stderr.starts_with("eagle-verify: "), "{}", outcome.stderr);
        for part in wanted {
            assert!(outcome.stderr.contains(part), "{part:?} is missing in: {}", outcome.stderr);
        }
    }

    /// The command lines of the fake compiler so far, sorted: the kernels run side by side.
    fn calls(&self) -> Vec<String> {
        let mut calls: Vec<String> = self.read("out/calls").lines().map(String::from).collect();
        calls.sort_by_key(|call| call.rsplit(' ').next().unwrap().to_owned());
        calls
    }

    /// Which of several compilers was used.
    fn used(&self) -> String {
        let calls = self.calls();
        let program = calls.first().expect("no compiler ran").split(' ').next().unwrap();
        program.strip_prefix(&self.path("")).unwrap_or(program).to_owned()
    }

    fn has_no_table_but(&self, reason: &str) {
        let table = self.read("out/kernels.rs");
        assert!(table.contains("IMAGES: &[(&str, &[u8])] = &[\n];"), "{table}");
        assert!(table.contains("WHY_NONE") && table.contains(reason), "{table}");
    }
}

impl Outcome {
    fn warnings(&self) -> Vec<&str> {
        self.stdout.lines().filter_map(|line| line.strip_prefix("cargo:warning=")).collect()
    }

    fn watches(&self, name: &str) -> bool {
        self.stdout.lines().any(|line| line == format!("cargo:rerun-if-env-changed={name}"))
    }
}

#[test]
fn without_the_feature_nothing_happens() {
    let mut package = Package::new("feature");
    package.set("NVCC", "/no/such/nvcc");
    package.variables.retain(|(name, _)| name != "CARGO_FEATURE_CUDA");
    assert_eq!(package.passes().stdout, "cargo:rerun-if-changed=build.rs\n");
    assert!(!package.root.join("out/kernels.rs").exists());
}

#[test]
fn without_nvcc_there_is_a_warning_and_a_reason() {
    let mut package = Package::new("absent");
    let outcome = package.passes();
    let warnings = outcome.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("nvcc was not found"), "{warnings:?}");
    package.has_no_table_but("nvcc was not found");
    for name in ["NVCC", "CUDA_HOME", "VIRTUAL_ENV", "PATH", "EAGLE_VERIFY_REQUIRE_KERNELS"] {
        assert!(outcome.watches(name), "{name}");
    }
    package.set("EAGLE_VERIFY_REQUIRE_KERNELS", "1");
    package.fails(&["nvcc was not found", "CUDA toolkit", "pip install nvidia-cuda-nvcc", "set NVCC"]);
}

#[test]
fn the_table_holds_every_kernel_and_compiles() {
    let package = Package::new("table");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    let outcome = package.passes();
    assert!(outcome.warnings().is_empty());
    assert!(!outcome.watches("PATH"), "every shell has another PATH");
    let (a, b) = (&package.calls()[0], &package.calls()[1]);
    for flag in
        ["-fatbin", "-std=c++17", "-O3", "-fmad=false", "-Ikernels", "-Xptxas=-warn-spills,-warn-lmem-usage"]
    {
        assert!(a.contains(&format!(" {flag} ")), "{flag} is missing in {a}");
    }
    assert!(a.ends_with(" kernels/a.cu") && b.ends_with(" kernels/b.cu"), "{a}\n{b}");
    package.write("main.rs", TABLE_USER);
    must(rustc().current_dir(&package.root).args(["-Dwarnings", "main.rs", "-o", "main"]));
    let shown = must(&mut Command::new(package.path("main")));
    let wanted =
        "a 0 \"image of kernels/a.cu\\n\"\nb 0 \"image of kernels/b.cu\\n\"\narchs \"120a\" why_none \"\"\n";
    assert_eq!(shown, wanted);
}

#[test]
fn machine_code_comes_before_ptx_and_nothing_twice() {
    let mut package = Package::new("archs");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    package.set("EAGLE_VERIFY_CUDA_ARCHS", "ptx120, 120a,90,120a,ptx120");
    package.set("EAGLE_VERIFY_NVCC_FLAGS", "-lineinfo  -DX=1");
    package.set("NVCC_CCBIN", "/a host/g++");
    package.passes();
    let calls = package.calls();
    let archs: Vec<&str> = calls[0].split(' ').filter(|word| word.starts_with("-gencode")).collect();
    let sass = |arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}");
    assert_eq!(archs, [sass("120a"), sass("90"), "-gencode=arch=compute_120,code=compute_120".into()]);
    assert!(
        calls[0].contains(" -lineinfo -DX=1 ") && calls[0].contains(" -ccbin /a host/g++ "),
        "{}",
        calls[0]
    );
    assert!(package.read("out/kernels.rs").contains("ARCHS: &str = \"120a,90,ptx120\""));
}

#[test]
fn a_malformed_architecture_is_shown_the_form() {
    for list in ["sm_120a", "120a,", "120a;90", "ptx", "1200a", "12 0", "120b"] {
        let mut package = Package::new("malformed");
        package.set("EAGLE_VERIFY_CUDA_ARCHS", list);
        package.fails(&[list, "120a,90,ptx120"]);
    }
}

#[test]
fn a_wrong_nvcc_is_an_error() {
    let mut package = Package::new("wrong");
    package.add_nvcc("opt/cuda/bin", "13.0", ""); // must not step in
    package.set("NVCC", "/no/such/nvcc");
    package.fails(&["NVCC=/no/such/nvcc"]);
    package.set("NVCC", package.path("kernels/a.cu"));
    package.fails(&["kernels/a.cu does not run"]);
    assert!(package.calls().is_empty());
}

#[test]
fn an_old_or_nameless_nvcc_is_an_error() {
    for (release, wanted) in
        [("12.4", "release 12.4"), ("11.8", "12.8 or later"), ("unknown", "names no release")]
    {
        let package = Package::new("old");
        let nvcc = package.add_nvcc("opt/cuda/bin", release, "");
        package.fails(&[&nvcc.replace(&package.path(""), ""), wanted]);
        assert!(package.calls().is_empty());
    }
    let package = Package::new("just-new-enough");
    package.add_nvcc("opt/cuda/bin", "12.8", "");
    package.passes();
}

#[test]
fn a_kernel_that_fails_is_an_error_with_the_words_of_nvcc() {
    let package = Package::new("failing");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    package.passes();
    package.write("kernels/b.cu", "changed");
    let behave = r#"case $kernel in *b.cu) echo "b.cu(7): error: no semicolon" >&2; exit 2 ;; esac"#;
    package.add_nvcc("opt/cuda/bin", "13.0", behave);
    package.fails(&["b.cu(7): error: no semicolon", "kernels/b.cu", "opt/cuda/bin/nvcc"]);
    // The image that it left behind is not taken for a good one, not even for the old source.
    package.write("kernels/b.cu", "kernels/b.cu");
    package.fails(&["no semicolon"]);
}

#[test]
fn warnings_are_shown_each_time() {
    let package = Package::new("warnings");
    let behave = r#"case $kernel in *a.cu) echo "ptxas warning : 8 bytes spilled" >&2 ;; esac"#;
    package.add_nvcc("opt/cuda/bin", "13.0", behave);
    for _ in 0..2 {
        assert_eq!(package.passes().warnings(), ["kernels/a.cu: ptxas warning : 8 bytes spilled"]);
    }
}

#[test]
fn only_what_changed_is_compiled_again() {
    let mut package = Package::new("again");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    let new_calls = |package: &Package| {
        let _ = fs::remove_file(package.root.join("out/calls"));
        package.passes();
        package.calls().iter().map(|call| call.rsplit('/').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(new_calls(&package), ["a.cu", "b.cu"]);
    assert_eq!(new_calls(&package), [""; 0]);
    package.write("kernels/b.cu", "changed");
    assert_eq!(new_calls(&package), ["b.cu"]);
    package.write("kernels/device.cuh", "changed");
    assert_eq!(new_calls(&package), ["a.cu", "b.cu"]);
    package.add_nvcc("opt/cuda/bin", "13.1", "");
    assert_eq!(new_calls(&package), ["a.cu", "b.cu"]);
    fs::remove_file(package.root.join("out/a.fatbin")).unwrap();
    assert_eq!(new_calls(&package), ["a.cu"]);
    package.set("EAGLE_VERIFY_NVCC_FLAGS", "-lineinfo");
    assert_eq!(new_calls(&package), ["a.cu", "b.cu"]);
    package.set("NVCC_APPEND_FLAGS", "-g");
    assert_eq!(new_calls(&package), ["a.cu", "b.cu"]);
}

/// Each place is dropped in turn, and the next one must take over.
#[test]
fn nvcc_is_searched_in_the_documented_order() {
    let mut package = Package::new("order");
    let wheels = "lib/python3.13/site-packages/nvidia";
    let mut places = vec!["mine".to_owned()];
    places.extend(["home/bin", "path/bin", "root/bin", "toolkit/bin", "on-path"].map(String::from));
    places.extend(["cu13", "cuda_nvcc", "cu12"].map(|wheel| format!("venv/{wheels}/{wheel}/bin")));
    places.push("venv/lib/python3.9/site-packages/nvidia/cu13/bin".into());
    places.push(format!("conda/{wheels}/cu13/bin"));
    let usual =
        ["usr/local/cuda", "opt/cuda", "usr/local/cuda-13.10", "usr/local/cuda-13.9", "usr/local/cuda-12.8"];
    places.extend(usual.map(|root| format!("{root}/bin")));
    for place in &places {
        package.add_nvcc(place, "13.0", "");
    }
    let path = format!("{}:{}", package.path("empty"), package.path("on-path"));
    package.variables.retain(|(name, _)| name != "PATH");
    package.set("PATH", path);
    for (name, folder) in [
        ("CUDA_HOME", "home"),
        ("CUDA_PATH", "path"),
        ("CUDA_ROOT", "root"),
        ("CUDA_TOOLKIT_ROOT_DIR", "toolkit"),
        ("VIRTUAL_ENV", "venv"),
        ("CONDA_PREFIX", "conda"),
    ] {
        package.set(name, package.path(folder));
    }
    package.set("NVCC", package.path("mine/nvcc"));
    for place in &places {
        let _ = fs::remove_file(package.root.join("out/calls"));
        package.passes();
        assert_eq!(package.used(), format!("{place}/nvcc"));
        fs::remove_file(package.root.join(place).join("nvcc")).unwrap();
        package.variables.retain(|(name, _)| name != "NVCC");
    }
    package.passes();
    package.has_no_table_but("nvcc was not found");
}

#[test]
fn a_skip_is_silent_and_contradicts_a_requirement() {
    for name in ["EAGLE_VERIFY_SKIP_NVCC", "DOCS_RS"] {
        let mut package = Package::new("skip");
        package.add_nvcc("opt/cuda/bin", "13.0", "");
        package.set(name, "1");
        assert!(package.passes().warnings().is_empty());
        package.has_no_table_but(name);
        assert!(package.calls().is_empty());
        package.set("EAGLE_VERIFY_REQUIRE_KERNELS", "1");
        package.fails(&[name, "EAGLE_VERIFY_REQUIRE_KERNELS"]);
    }
    let mut package = Package::new("skip-off");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    package.set("EAGLE_VERIFY_SKIP_NVCC", "0");
    package.passes();
    assert_eq!(package.calls().len(), 2);
}

#[test]
fn a_package_without_kernels_says_so() {
    let mut package = Package::new("no-kernels");
    package.add_nvcc("opt/cuda/bin", "13.0", "");
    for file in ["a.cu", "b.cu"] {
        fs::remove_file(package.root.join("kernels").join(file)).unwrap();
    }
    package.passes();
    package.has_no_table_but("kernels/ has no .cu file");
    package.set("EAGLE_VERIFY_REQUIRE_KERNELS", "1");
    package.fails(&["kernels/ has no .cu file"]);
}
