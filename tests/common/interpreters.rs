//! The interpreters to test on.
//!
//! `PYHEAP_INTERPRETERS` decides: NAME=PATH or PATH, joined by colons (`scripts/test` sets it). Without it: what
//! `scripts/get-interpreters` left in `target/interpreters`, pyenv's, the system's.

use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Interpreter {
    /// As `scripts/get-interpreters` calls it: pyenv-3.12, many-3.14t, musl-3.12, deb-3.11.
    pub name: String,
    pub path: String,
}

impl Interpreter {
    /// "3.12", "3.14t"
    pub fn minor(&self) -> &str {
        self.name.rsplit('-').next().unwrap_or_default()
    }
}

/// The supported minor versions.
const MINORS: [&str; 9] = ["3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"];

/// All supported CPythons by name, in the order given; never empty unless there is none at all.
pub fn named() -> Vec<Interpreter> {
    let mut list = all_listed();
    // The hidden ones cannot load extension modules, which most targets need; the one of another system has a test of its own.
    list.retain(|i| i.name != "pypy3" && !i.name.starts_with("hidden-") && !i.name.starts_with("debsid-"));
    list
}

/// The one with this name, if it is there.
pub fn listed(name: &str) -> Option<Interpreter> {
    all_listed().into_iter().find(|i| i.name == name)
}

/// The root folder of another system, with its C library and a `usr/bin/python3.14`, if there is one.
pub fn other_root() -> Option<PathBuf> {
    let python = listed("debsid-3.14")?;
    let root = Path::new(&python.path)
        .ancestors()
        .find(|folder| folder.join("usr/bin").is_dir())?;
    Some(root.to_owned())
}

/// One for each of the wanted minor versions or names that is there, for tests that need not run on every build.
pub fn some(wanted: &[&str]) -> Vec<Interpreter> {
    let all = named();
    wanted
        .iter()
        .filter_map(|w| all.iter().find(|i| i.name == *w || i.minor() == *w).cloned())
        .collect()
}

/// Any one CPython for tests of what does not depend on the version; a recent one if there is.
pub fn any() -> Option<Interpreter> {
    some(&["3.12", "3.11", "3.13", "3.10", "3.9", "3.8"]).into_iter().next()
}

pub fn pypy() -> Option<Interpreter> {
    listed("pypy3")
}

fn all_listed() -> Vec<Interpreter> {
    if let Ok(list) = std::env::var("PYHEAP_INTERPRETERS") {
        return list
            .split(':')
            .filter_map(|entry| entry.split_once('='))
            .map(|(name, path)| Interpreter {
                name: name.to_owned(),
                path: path.to_owned(),
            })
            .collect();
    }
    // A plain `cargo test`: what scripts/get-interpreters left in target/, pyenv's, the system's.
    let mut list = Vec::new();
    let mut add = |name: String, path: PathBuf| {
        if path.exists() {
            list.push(Interpreter {
                name,
                path: path.to_string_lossy().into_owned(),
            });
        }
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pyenv = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv")));
    for minor in MINORS {
        if let Some(pyenv) = &pyenv {
            let versions = std::fs::read_dir(pyenv.join("versions"))
                .into_iter()
                .flatten()
                .flatten();
            let newest = versions
                .filter_map(|v| v.file_name().into_string().ok())
                .filter_map(|v| {
                    v.strip_prefix(&format!("{minor}."))
                        .and_then(|patch| patch.parse::<u32>().ok())
                })
                .max();
            if let Some(patch) = newest {
                let path = pyenv.join(format!("versions/{minor}.{patch}/bin/python{minor}"));
                add(format!("pyenv-{minor}"), path);
            }
        }
        add(
            format!("many-{minor}"),
            root.join(format!("target/interpreters/many-{minor}/python")),
        );
    }
    for name in [
        "many-3.13t",
        "many-3.14t",
        "musl-3.12",
        "musl-3.14t",
        "hidden-3.12",
        "debsid-3.14",
    ] {
        add(name.to_owned(), root.join(format!("target/interpreters/{name}/python")));
    }
    add("deb-3.11".to_owned(), PathBuf::from("/usr/bin/python3.11"));
    if list.is_empty() {
        list.extend(system());
    }
    if let Ok(path) = std::fs::canonicalize("/usr/bin/pypy3") {
        list.push(Interpreter {
            name: "pypy3".to_owned(),
            path: path.to_string_lossy().into_owned(),
        });
    }
    list
}

/// The python3 in PATH, if it is one that we support.
fn system() -> Option<Interpreter> {
    let code = "import os, sys; print('%d.%d' % sys.version_info[:2], os.readlink('/proc/self/exe'))";
    let output = Command::new("python3").args(["-c", code]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (minor, path) = text.trim().split_once(' ')?;
    let known = MINORS.contains(&minor);
    known.then(|| Interpreter {
        name: format!("system-{minor}"),
        path: path.to_owned(),
    })
}

/// A Python to test on.
#[derive(Debug, Clone)]
pub struct Python {
    /// The program.
    pub path: PathBuf,
    /// As it says itself.
    pub version: (u8, u8, u8),
    /// Built without the GIL.
    pub free_threaded: bool,
}

impl Python {
    /// The X of 3.X.
    pub fn minor(&self) -> u8 {
        self.version.1
    }

    /// What decides its layout.
    pub fn build(&self) -> pyheap::frames::Build {
        pyheap::frames::Build {
            minor: self.minor(),
            free_threaded: self.free_threaded,
        }
    }

    /// `3.11.7`.
    pub fn version_text(&self) -> String {
        let (major, minor, micro) = self.version;
        format!("{major}.{minor}.{micro}")
    }

    /// Asks `path` for its version. Some builds can only run a file, so that is what they get.
    pub fn ask(path: &Path) -> Option<Self> {
        let mut script = tempfile::NamedTempFile::with_suffix(".py").ok()?;
        let text = b"import sys\nsys.stdout.write('%d %d %d ' % sys.version_info[:3])\nsys.stdout.write('%d' % ('free-threading' in sys.version))\n";
        std::io::Write::write_all(&mut script, text).ok()?;
        let out = Command::new(path).arg(script.path()).output().ok()?;
        let text = String::from_utf8(out.stdout).ok()?;
        let numbers: Vec<u8> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        match numbers[..] {
            [major, minor, micro, free_threaded] => Some(Self {
                path: path.to_owned(),
                version: (major, minor, micro),
                free_threaded: free_threaded == 1,
            }),
            _ => None,
        }
    }
}

fn pyenv_versions() -> Vec<PathBuf> {
    let root = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv"));
    let Some(root) = root.or_else(home) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(root.join("versions"));
    let mut found: Vec<_> = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin/python"))
        .filter(|python| python.exists())
        .collect();
    found.sort();
    found
}

/// Every CPython that can be found, supported or not.
pub fn all() -> Vec<Python> {
    let mut paths: Vec<PathBuf> = named().into_iter().map(|i| PathBuf::from(i.path)).collect();
    let is_new = |paths: &[PathBuf], path: &Path| {
        let real = std::fs::canonicalize(path).ok();
        !paths.iter().any(|old| std::fs::canonicalize(old).ok() == real)
    };
    for path in pyenv_versions() {
        if is_new(&paths, &path) {
            paths.push(path);
        }
    }
    paths.iter().filter_map(|path| Python::ask(path)).collect()
}

/// The Pythons 3.7 to 3.15 that can be found.
pub fn supported() -> Vec<Python> {
    let found: Vec<_> = all()
        .into_iter()
        .filter(|p| p.version.0 == 3 && pyheap::frames::SUPPORTED_MINORS.contains(&p.minor()))
        .collect();
    for minor in pyheap::frames::SUPPORTED_MINORS {
        if !found.iter().any(|python| python.minor() == minor) {
            eprintln!("skipped: no Python 3.{minor} here");
        }
    }
    assert!(!found.is_empty(), "no Python to test on: set PYHEAP_INTERPRETERS");
    found
}
