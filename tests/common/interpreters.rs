//! The interpreters to test on.

use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Clone, Debug)]
pub struct Interpreter {
    /// As `scripts/get-interpreters` calls it: pyenv-3.12, many-3.8, deb-3.11.
    pub name: String,
    pub path: String,
}

impl Interpreter {
    /// "3.12"
    pub fn minor(&self) -> &str {
        self.name.rsplit('-').next().unwrap_or_default()
    }
}

/// All CPythons, in the order given; never empty unless there is none at all.
pub fn all() -> Vec<Interpreter> {
    let mut list = listed();
    list.retain(|i| i.name != "pypy3");
    list
}

/// One for each of the wanted minor versions or names that is there, for tests that need not run on every build.
pub fn some(wanted: &[&str]) -> Vec<Interpreter> {
    let all = all();
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
    listed().into_iter().find(|i| i.name == "pypy3")
}

fn listed() -> Vec<Interpreter> {
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
    for minor in ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"] {
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
    let known = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"].contains(&minor);
    known.then(|| Interpreter {
        name: format!("system-{minor}"),
        path: path.to_owned(),
    })
}
