//! Promise: with --native, what extension modules of real packages keep by plain malloc is blamed at the Python line that led there:
//! arrays of numpy, a parser and a tokenizer at versions whose leaks were reported, from PyPI; and so are mappings by ctypes.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{binomial, pyheap, scratch, skipped, target_script};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// As in tests/accuracy.rs: the file's sampling table is that much off at most.
const TABLE_ERROR: f64 = 0.004;
/// Sites are a few thousand samples each.
const PERIOD: f64 = 16_384.0;

/// What is kept, and by what.
struct Case {
    name: &'static str,
    package: &'static str,
    /// Versions of Python that there are wheels for.
    minors: &'static [&'static str],
    /// How many to keep in a round.
    count: u32,
    /// Beginning of the name of the library that allocates.
    library: &'static str,
}

const CASES: [Case; 4] = [
    Case {
        name: "numpy",
        package: "numpy==1.26.4",
        minors: &["3.12", "3.11", "3.10", "3.9"],
        count: 200,
        library: "_multiarray_umath.",
    },
    Case {
        name: "numpy",
        package: "numpy==2.2.6",
        minors: &["3.13", "3.12", "3.11", "3.10"],
        count: 200,
        library: "_multiarray_umath.",
    },
    Case {
        name: "selectolax",
        package: "selectolax==0.3.13",
        minors: &["3.11", "3.10", "3.9", "3.8"],
        count: 30,
        library: "lexbor.",
    },
    Case {
        name: "tokenizers",
        package: "tokenizers==0.19.1",
        minors: &["3.12", "3.11", "3.10", "3.9", "3.8"],
        count: 20,
        library: "tokenizers.",
    },
];

/// How often a target is told to keep more.
const ROUNDS: u32 = 24;

/// What needs no package: `mmap`, looked up by ctypes before pyheap comes.
const CTYPES: Case = Case {
    name: "ctypes",
    package: "",
    minors: &[],
    count: 1,
    library: "_ctypes.",
};

/// A folder with the package for this version of Python; `None` if there is none to be had.
fn install(case: &Case, minor: &str) -> Option<PathBuf> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("target/test")
        .join(format!("{}-{minor}", case.package));
    if place.is_dir() {
        return Some(place);
    }
    // Under another name first, so that what is there is whole.
    let begun = place.with_extension(format!("{}.tmp", std::process::id()));
    let pip = |python: &Interpreter| {
        let mut pip = Command::new(&python.path);
        pip.args(["-m", "pip", "install", "-q", "--no-deps", "--no-compile"]);
        pip.args(["--only-binary", ":all:", "--disable-pip-version-check"]);
        pip.args(["--implementation", "cp", "--python-version", minor, "--target"]);
        let done = pip.arg(&begun).arg(case.package).stdin(Stdio::null()).output();
        done.is_ok_and(|done| done.status.success())
    };
    // Any pip can fetch for any version, and not every Python has one.
    let mut pythons = interpreters::named()
        .into_iter()
        .filter(|python| !python.name.starts_with("many-"));
    let is_there = pythons.any(|python| pip(&python)) && std::fs::rename(&begun, &place).is_ok();
    let _ = std::fs::remove_dir_all(&begun);
    is_there.then_some(place)
}

/// The first interpreter that has wheels and can use them.
fn interpreter(case: &Case) -> Option<(Interpreter, PathBuf)> {
    // Wheels are for the GNU C library and the GIL, and the program must look where PYTHONPATH says, which a frozen one does not.
    let usual = |python: &Interpreter| ["pyenv-", "deb-"].iter().any(|kind| python.name.starts_with(kind));
    case.minors.iter().find_map(|minor| {
        let mut all = interpreters::named().into_iter();
        let python = all.find(|python| usual(python) && python.minor() == *minor)?;
        Some((python, install(case, minor)?))
    })
}

/// What is live, by the Python lines that have led there: bytes, and bytes by this library.
fn live(base: &str, site: &Value, library: &str) -> (f64, f64) {
    let domain = site["domain"].as_str().expect("a domain");
    let out = pyheap::run(["export", base, "--to", "json", "--domain", domain])
        .expect_code(0)
        .stdout;
    let export: Value = serde_json::from_str(&out).expect("JSON");
    let frames = export["frames"].as_array().expect("frames");
    let mut sum = (0.0, 0.0);
    for trace in export["traces"].as_array().expect("traces") {
        let stack = trace["stack"].as_array().expect("a stack");
        let stack: Vec<&Value> = stack
            .iter()
            .map(|at| &frames[at.as_u64().expect("a number") as usize])
            .collect();
        let leads_here = stack
            .iter()
            .any(|frame| frame["file"] == site["file"] && frame["line"] == site["line"]);
        if leads_here {
            let bytes = trace["live_bytes"].as_f64().expect("a number");
            let inner = stack
                .last()
                .and_then(|frame| frame["file"].as_str())
                .unwrap_or_default();
            sum.0 += bytes;
            sum.1 += if inner.starts_with(library) { bytes } else { 0.0 };
        }
    }
    sum
}

fn check(case: &Case, python: &Interpreter, package: Option<&Path>) {
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut command = Command::new(&python.path);
    command
        .args([&target_script("extensions.py"), case.name])
        .envs(package.map(|package| ("PYTHONPATH", package)))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let what = format!("{} with {}", python.name, case.package);
    let mut target = Target::start_command(command, &what);
    let period = format!("{PERIOD}");
    let recording = pyheap::record(target.pid, &base, &["--native", "--period", &period]);
    let mut given_out = Some(0.0);
    let mut truth = Value::Null;
    for _ in 0..ROUNDS {
        truth = target.ask(&format!("GO {}", case.count), "TRUTH");
        given_out = given_out.and_then(|sum| Some(sum + truth["malloc"].as_f64()?));
        // Not all at one moment, for the verdict.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    recording.interrupt();
    target.exit_cleanly();
    let mut all = 0.0;
    for (name, site) in truth["sites"].as_object().expect("sites") {
        let (bytes, of_library) = live(&base, site, case.library);
        all += bytes;
        assert!(
            of_library > 0.99 * bytes,
            "{what}: {name}: of {bytes} B {of_library} by {}",
            case.library
        );
        let Some(sizes) = site["sizes"].as_object() else {
            continue;
        };
        let sizes: Vec<(u64, u64)> = sizes
            .iter()
            .map(|(size, count)| {
                (
                    size.parse().expect("a size"),
                    count.as_u64().expect("a count") * u64::from(ROUNDS),
                )
            })
            .collect();
        let (low, high) = binomial::acceptance_bytes(&sizes, PERIOD, binomial::TAIL);
        assert!(
            bytes >= low * (1.0 - TABLE_ERROR) && bytes <= high * (1.0 + TABLE_ERROR),
            "{what}: {name}: {bytes} B, not in [{low}, {high}]"
        );
    }
    // What malloc says itself has the heads of its chunks in it, and whatever else went on; a thousand samples are good for 3 %.
    if let Some(given_out) = given_out.filter(|_| package.is_some()) {
        assert!(
            all > 0.8 * given_out && all < 1.2 * given_out,
            "{what}: {all} B of {given_out}"
        );
    }
    blamed(case, &base, &truth, &what);
}

/// `leaks` and `top` name the line.
fn blamed(case: &Case, base: &str, truth: &Value, what: &str) {
    let json =
        |args: &[&str]| -> Value { serde_json::from_str(&pyheap::run(args).expect_code(0).stdout).expect("JSON") };
    let is_site = |frame: &Value| {
        let mut sites = truth["sites"].as_object().expect("sites").values();
        sites.any(|site| frame["file"] == site["file"] && frame["line"] == site["line"])
    };
    let mut sites = truth["sites"].as_object().expect("sites").values();
    let domain = &sites.next().expect("a site")["domain"];
    let leaks = json(&["leaks", base, "--json", "--domain", "malloc,mmap"]);
    let first = &leaks["leaks"][0];
    assert!(is_site(&first["own"]), "{what}: {leaks:#}");
    assert_eq!(&first["domain"], domain, "{what}: {leaks:#}");
    assert!(
        first["stack"][0]["file"]
            .as_str()
            .is_some_and(|file| file.starts_with(case.library)),
        "{what}: {leaks:#}"
    );
    let top = pyheap::run(["top", base, "--by", "trace", "--limit", "1"])
        .expect_code(0)
        .stdout;
    let named = truth["sites"]
        .as_object()
        .expect("sites")
        .values()
        .any(|site| top.contains(&format!("{}:{} ", site["file"].as_str().expect("a file"), site["line"])));
    assert!(named && top.contains(case.library), "{what}: {top}");
}

/// The test of one package, which may not be there.
fn on(name: &str, package: &str) {
    let case = CASES
        .iter()
        .find(|case| case.package == package)
        .expect("it is in the list");
    match interpreter(case) {
        Some((python, package)) => check(case, &python, Some(&package)),
        None => skipped(
            name,
            &format!("no {package}: no pip, no PyPI, or no CPython that has wheels of it"),
        ),
    }
}

#[test]
fn arrays_of_numpy_1_are_blamed() {
    on("arrays_of_numpy_1_are_blamed", "numpy==1.26.4");
}

#[test]
fn arrays_of_numpy_2_are_blamed() {
    on("arrays_of_numpy_2_are_blamed", "numpy==2.2.6");
}

#[test]
fn a_parser_that_leaks_is_blamed() {
    on("a_parser_that_leaks_is_blamed", "selectolax==0.3.13");
}

/// Its thread has released the GIL when it allocates.
#[test]
fn a_tokenizer_that_leaks_is_blamed() {
    on("a_tokenizer_that_leaks_is_blamed", "tokenizers==0.19.1");
}

/// Nothing but libffi has the address that it calls.
#[test]
fn a_loop_of_ctypes_is_blamed() {
    match interpreters::some(&["pyenv-3.12"]).pop() {
        Some(python) => check(&CTYPES, &python, None),
        None => skipped(
            "a_loop_of_ctypes_is_blamed",
            "no CPython whose libffi is known to be a library",
        ),
    }
}
