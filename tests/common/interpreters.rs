//! Which Pythons the tests run on.
//!
//! `PYHEAP_INTERPRETERS` (paths joined by colons) decides; without it, pyenv's 3.8 to 3.13 and `/usr/bin/python3.X`.
//! A version that is not there is named on stderr; none at all is a failure.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A Python to test on.
#[derive(Debug, Clone)]
pub struct Python {
    /// The program.
    pub path: PathBuf,
    /// As it says itself.
    pub version: (u8, u8, u8),
}

impl Python {
    /// The X of 3.X.
    pub fn minor(&self) -> u8 {
        self.version.1
    }

    /// `3.11.7`.
    pub fn version_text(&self) -> String {
        let (major, minor, micro) = self.version;
        format!("{major}.{minor}.{micro}")
    }

    /// Asks `path` for its version. Some builds can only run a file, so that is what they get.
    pub fn ask(path: &Path) -> Option<Self> {
        let mut script = tempfile::NamedTempFile::with_suffix(".py").ok()?;
        let text = b"import sys\nsys.stdout.write('%d %d %d' % sys.version_info[:3])\n";
        std::io::Write::write_all(&mut script, text).ok()?;
        let out = Command::new(path).arg(script.path()).output().ok()?;
        let text = String::from_utf8(out.stdout).ok()?;
        let numbers: Vec<u8> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        match numbers[..] {
            [major, minor, micro] => Some(Self {
                path: path.to_owned(),
                version: (major, minor, micro),
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

/// Every Python that can be found, supported or not.
pub fn all() -> Vec<Python> {
    let paths: Vec<PathBuf> = match std::env::var_os("PYHEAP_INTERPRETERS") {
        Some(list) => std::env::split_paths(&list)
            .filter(|p| !p.as_os_str().is_empty())
            .collect(),
        None => (8..=14)
            .map(|minor| PathBuf::from(format!("/usr/bin/python3.{minor}")))
            .chain(pyenv_versions())
            .collect(),
    };
    paths.iter().filter_map(|path| Python::ask(path)).collect()
}

/// The Pythons 3.8 to 3.13 that can be found.
pub fn supported() -> Vec<Python> {
    let found: Vec<_> = all()
        .into_iter()
        .filter(|p| p.version.0 == 3 && (8..=13).contains(&p.minor()))
        .collect();
    for minor in 8..=13 {
        if !found.iter().any(|python| python.minor() == minor) {
            eprintln!("skipped: no Python 3.{minor} here");
        }
    }
    assert!(!found.is_empty(), "no Python to test on: set PYHEAP_INTERPRETERS");
    found
}
