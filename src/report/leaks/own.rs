//! Which frames are the user's own code.

/// Directories that hold packages, wherever they are.
const PACKAGES: [&str; 2] = ["site-packages", "dist-packages"];

/// What is own code: everything that is not under the interpreter's library or in a directory of packages, and what the
/// user says is.
#[derive(Debug, Clone, Default)]
pub struct OwnCode {
    /// Paths that the user calls own: absolute, or any part of a path in whole names (`myapp`, `src/myapp`).
    own: Vec<String>,
    /// Directories of the interpreter's library beside those that are told by their names.
    library: Vec<String>,
}

impl OwnCode {
    /// `own`: what the user calls own; `interpreter`: path of the interpreter, as far as known, for one that runs from where it
    /// was built and so has its library beside it.
    pub fn new(own: &[String], interpreter: Option<&str>) -> Self {
        let tidy = |path: &String| path.trim_start_matches("./").trim_end_matches('/').to_owned();
        let beside = interpreter.and_then(|path| path.rsplit_once('/'));
        let library = beside.map(|(directory, _)| vec![format!("{directory}/Lib"), format!("{directory}/lib")]);
        Self {
            own: own.iter().map(tidy).filter(|path| !path.is_empty()).collect(),
            library: library.unwrap_or_default(),
        }
    }

    /// Whether code of this file is own. Code without a file (`<string>`, `<template>`, `<frozen …>`) is not: it was
    /// made by somebody, and that one's frame is further out. Nor is native code: its caller's line says more.
    pub fn has(&self, file: &str) -> bool {
        if self.own.iter().any(|own| is_below(file, own)) {
            return true;
        }
        let is_library = |file: &str| {
            self.library.iter().any(|library| is_below(file, library))
                || PACKAGES.iter().any(|packages| is_below(file, packages))
                || below_python_lib(file)
        };
        !file.starts_with('<') && !is_shared_library(file) && !is_library(file)
    }
}

/// Whether `file` is the name of a shared library, as native frames have it.
fn is_shared_library(file: &str) -> bool {
    !file.contains('/') && (file.ends_with(".so") || file.contains(".so."))
}

/// Whether `file` is `path` or below it; if `path` is not absolute, anywhere.
fn is_below(file: &str, path: &str) -> bool {
    let ends = |rest: &str| rest.is_empty() || rest.starts_with('/');
    if path.starts_with('/') {
        return file.strip_prefix(path).is_some_and(ends);
    }
    file.match_indices(path)
        .any(|(at, _)| (at == 0 || file.as_bytes()[at - 1] == b'/') && ends(&file[at + path.len()..]))
}

/// `/usr/lib/python3.11/…`, `…/lib64/python3/…`, `…/lib/python311.zip/…`.
fn below_python_lib(file: &str) -> bool {
    let mut parts = file.split('/').peekable();
    while let Some(part) = parts.next() {
        let is_version = |next: &&str| {
            next.strip_prefix("python")
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        if (part == "lib" || part == "lib64") && parts.peek().is_some_and(is_version) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_by_where_they_are() {
        let own = OwnCode::new(&[], Some("/build/python"));
        for file in [
            "app.py",
            "/srv/app/worker.py",
            "/usr/src/app/lib/util.py",
            "/home/me/python3.11/x.py",
        ] {
            assert!(own.has(file), "{file}");
        }
        for file in [
            "/usr/lib/python3.11/threading.py",
            "/opt/py/lib64/python3.12/json/decoder.py",
            "/v/lib/python3.12/site-packages/jinja2/nodes.py",
            "/usr/lib/python3/dist-packages/yaml.py",
            "C/site-packages/x.py",
            "/usr/lib/python311.zip/os.py",
            "/build/Lib/os.py",
            "<string>",
            "<frozen importlib._bootstrap>",
            "<no Python frame>",
        ] {
            assert!(!own.has(file), "{file}");
        }
    }

    #[test]
    fn the_user_has_the_last_word() {
        let own = OwnCode::new(&["/v/site-packages/mine/".into(), "./ours".into(), String::new()], None);
        for file in [
            "/v/site-packages/mine/a.py",
            "/v/site-packages/ours/b.py",
            "/v/site-packages/mine",
        ] {
            assert!(own.has(file), "{file}");
        }
        for file in ["/v/site-packages/mine2/a.py", "/v/site-packages/yours/ours2.py"] {
            assert!(!own.has(file), "{file}");
        }
    }
}
