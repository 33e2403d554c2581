//! Compiles the emulator, its test kernels and the crate's kernels, and links all of it once into a shared
//! object that is both the emulator and a `libcuda.so`. The kernels with the mutants go into a second one.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

include!("mutants.rs");

const CRATE_KERNELS: &str = "../../kernels";
const OWN_KERNELS: &str = "kernels";

fn main() {
    for input in ["build.rs", "mutants.rs", "include", "src", OWN_KERNELS, CRATE_KERNELS] {
        println!("cargo:rerun-if-changed={input}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Cargo puts OUT_DIR itself on the library path of tests, where a libcuda.so would hide a real driver.
    let libraries = out.join("fake-driver");
    fs::create_dir_all(&libraries).expect("OUT_DIR is writable");

    let runtime = compile(compiler(&["include"]).files(files_in("src", "cpp")), "runtime");
    let mut objects = runtime;
    for (kernels, name) in [(OWN_KERNELS, "own"), (CRATE_KERNELS, "crate")] {
        objects.extend(compile_kernels(kernels.as_ref(), CRATE_KERNELS.as_ref(), name, false));
    }
    let driver = libraries.join("libcuda.so");
    let undefined = ["-Wl,-soname,libcuda.so", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-ldl", "-lpthread"];
    link(&driver, &objects, &undefined);
    // The same library under the name that a driver's users should ask for.
    let versioned = libraries.join("libcuda.so.1");
    let needs = ["-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed"];
    link(&versioned, std::slice::from_ref(&driver), &needs);

    let mut mutated = Vec::new();
    let copies = out.join("mutated");
    write_mutated(OWN_KERNELS.as_ref(), &copies.join("own"));
    write_mutated(CRATE_KERNELS.as_ref(), &copies.join("crate"));
    for name in ["own", "crate"] {
        let copy = copies.join(name);
        mutated.extend(compile_kernels(&copy, &copies.join("crate"), &format!("mutated-{name}"), true));
    }
    for mutant in MUTANTS {
        let is_found =
            [OWN_KERNELS, CRATE_KERNELS].iter().any(|dir| Path::new(dir).join(mutant.file).is_file());
        assert!(is_found, "mutant `{}`: there is no kernel source {}", mutant.name, mutant.file);
    }
    let mutants = libraries.join("mutated-kernels.so");
    link(&mutants, &mutated, &[]);

    println!("cargo:rustc-env=EMULATOR_LIBCUDA={}", driver.display());
    println!("cargo:rustc-env=EMULATOR_LIBCUDA_1={}", versioned.display());
    println!("cargo:rustc-env=EMULATOR_MUTATED={}", mutants.display());
}

fn compiler(includes: &[&str]) -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).debug(false).pic(true).includes(includes);
    build.warnings(true).extra_warnings(true);
    for flag in ["-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-g1"] {
        build.flag_if_supported(flag);
    }
    build
}

fn compile(build: &mut cc::Build, name: &str) -> Vec<PathBuf> {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
    fs::create_dir_all(&out).expect("OUT_DIR is writable");
    build.out_dir(&out).try_compile_intermediates().unwrap_or_else(|error| {
        panic!(
            "the CUDA emulator needs a C++17 compiler (g++ or clang++, or CXX in the environment): {error}"
        )
    })
}

/// The emulator's own kernels may include headers of the crate's.
fn compile_kernels(dir: &Path, headers: &Path, name: &str, is_mutated: bool) -> Vec<PathBuf> {
    let sources = files_in(dir, "cu");
    if sources.is_empty() {
        return Vec::new();
    }
    let mut build = compiler(&["include"]);
    build.include(dir).include(headers).files(sources).flag("-x").flag("c++");
    // For the instrumentation only: the hooks are the emulator's, and the sanitizer's runtime is not linked.
    build.flag("-fsanitize=thread").flag_if_supported("-Wno-tsan").flag("-Wno-unknown-pragmas");
    if is_mutated {
        // Hidden, so that the kernels do not resolve to those of the same name in the first library.
        build.flag("-fvisibility=hidden").define("EMULATOR_MUTATED", None);
    }
    compile(&mut build, name)
}

fn link(output: &Path, inputs: &[PathBuf], flags: &[&str]) {
    let compiler = compiler(&[]).get_compiler();
    let mut command = Command::new(compiler.path());
    command.arg("-shared").args(flags.iter().filter(|flag| !flag.starts_with("-l"))).args(inputs);
    command.args(flags.iter().filter(|flag| flag.starts_with("-l"))).arg("-o").arg(output);
    let status = command.status().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(status.success(), "linking {} failed: {command:?}", output.display());
}

fn files_in(dir: impl AsRef<Path>, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(&dir) else { return Vec::new() };
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("the directory is readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

/// Copies a folder of kernels with the mutants put in.
fn write_mutated(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to).expect("OUT_DIR is writable");
    for source in fs::read_dir(from).expect("the folder of kernels is readable") {
        let path = source.expect("the folder of kernels is readable").path();
        if !path.is_file() {
            continue;
        }
        let name = path.file_name().expect("a file has a name").to_owned();
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mutated = mutate(&text, &name.to_string_lossy());
        fs::write(to.join(name), mutated).expect("OUT_DIR is writable");
    }
}

fn mutate(text: &str, file: &str) -> String {
    let mut at_position: BTreeMap<usize, Vec<(usize, &Mutant)>> = BTreeMap::new();
    for (index, mutant) in MUTANTS.iter().enumerate().filter(|(_, mutant)| mutant.file == file) {
        let count = text.matches(mutant.original).count();
        assert!(
            count == 1,
            "mutant `{}`: its original text occurs {count} times in {file}, and must occur once:\n{}",
            mutant.name,
            mutant.original
        );
        let position = text.find(mutant.original).expect("it occurs once");
        at_position.entry(position).or_default().push((index + 1, mutant));
    }
    let (mut mutated, mut done) = (String::new(), 0);
    for (position, mutants) in at_position {
        let first = mutants[0].1;
        assert!(position >= done, "mutant `{}`: its text overlaps another mutant's in {file}", first.name);
        for (_, mutant) in &mutants {
            assert!(
                mutant.original == first.original && mutant.kind == first.kind,
                "mutants `{}` and `{}` overlap in {file}, but differ in text or kind",
                mutant.name,
                first.name
            );
        }
        mutated += &text[done..position];
        match first.kind {
            Kind::Statement => {
                for (number, mutant) in &mutants {
                    mutated += &format!("if (::emu::mutant() == {number}) {{ {}\n}} else ", mutant.broken);
                }
                mutated += &format!("{{ {}\n}}", first.original);
            }
            Kind::Expression => {
                mutated += "(";
                for (number, mutant) in &mutants {
                    mutated += &format!("::emu::mutant() == {number} ? ({}) : ", mutant.broken);
                }
                mutated += &format!("({}))", first.original);
            }
        }
        done = position + first.original.len();
    }
    mutated + &text[done..]
}
