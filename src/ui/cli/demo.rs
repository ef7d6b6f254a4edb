//! `pyheap demo`: a leaking program, an attach from outside, a verdict. The newcomer's first command.

use super::choose::Started;
use super::failure::{Failure, code};
use super::sampling::Period;
use super::select::DomainArgs;
use super::{leaks, record};
use crate::attach::session::DEFAULT_PERIOD;
use crate::profile::reader::Reader;
use crate::report::human::Human;
use crate::report::leaks::Overall;
use crate::report::leaks::render::{Detail, render};
use crate::ui::output::{note, to_stdout};
use crate::ui::units;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The program.
const PROGRAM: &str = include_str!("demo.py");
/// Sites in the verdict.
const SITES: usize = 5;
/// The program runs on for this long after the recording, so that one sees it unharmed.
const AFTER: Duration = Duration::from_secs(2);

/// Start a small Python program that leaks, attach to it from outside, record it for 10 seconds, and say what leaks.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python to run it with; without it the first one in PATH that pyheap can attach to.
    #[arg(long, value_name = "PROGRAM")]
    pub python: Option<PathBuf>,

    /// Record for this time.
    #[arg(long, short, value_name = "TIME", default_value = "10s", value_parser = units::parse_duration)]
    pub duration: Duration,

    /// Keep the program and the recording in this directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub keep: Option<PathBuf>,
}

/// A directory that goes away with us, unless it is to be kept.
struct Place {
    path: PathBuf,
    keep: bool,
}

impl Place {
    fn new(keep: Option<&Path>) -> Result<Self, Failure> {
        let path = match keep {
            Some(path) => path.to_owned(),
            None => std::env::temp_dir().join(format!("pyheap-demo-{}", std::process::id())),
        };
        fs::create_dir_all(&path)
            .map_err(|error| Failure::failed(format!("cannot make the directory {}: {error}", path.display())))?;
        Ok(Self {
            path,
            keep: keep.is_some(),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When there is no Python, or the recording fails.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let python = find_python(args.python.as_deref())?;
    let place = Place::new(args.keep.as_deref())?;
    let program = place.path.join("demo.py");
    fs::write(&program, PROGRAM)?;
    let base = place.path.join("demo");
    let seconds = args.duration.saturating_add(AFTER).as_secs_f64();
    note(&format!(
        "1. starting a small web-like program: {} demo.py",
        python.display()
    ));
    let command = [python.as_os_str(), program.as_os_str()].map(|word| word.to_string_lossy().into_owned());
    let command = [&command[..], &[format!("{seconds}")]].concat();
    let mut started = Started::quiet(&command)?;
    let stop = record::stop_signals()?;
    let target = started.wait_for_python(&stop)?;
    note(&format!(
        "2. attaching to it from outside and recording for {}",
        Human(args.duration)
    ));
    let recording = record::Args {
        children: false,
        which: Default::default(),
        when: Default::default(),
        long: Default::default(),
        process: Some(target.facts.id.pid),
        pid: None,
        duration: Some(args.duration),
        output: base.clone(),
        // Auto might raise it, and the verdict be on a part of the time only.
        sampling: super::sampling::Args {
            period: Period::Fixed(DEFAULT_PERIOD),
            ..Default::default()
        },
        suffix: Default::default(),
        verbose: true,
        quiet: false,
        census: false,
        temporary: args.keep.is_none(),
        command: Vec::new(),
    };
    record::record(&recording, target, None, &stop)?;
    let status = started.wait()?;
    note(&format!(
        "3. the program ran on after we had left, and has ended by itself: {status}"
    ));
    let reader = Reader::open(&base)?;
    let report = leaks::report(&reader, &[], None, &DomainArgs::default())?;
    // Where no leak was found, for example as the machine was too busy, show what was seen.
    let detail = if report.verdict == Overall::Leak {
        Detail::Normal
    } else {
        Detail::Verbose
    };
    to_stdout(&format!(
        "\nVerdict: {}(its churn in render() and its bounded cache in remember() are not blamed)\n",
        render(&report, detail, SITES)
    ))?;
    if place.keep {
        note(&format!("the recording is kept: pyheap top {}", base.display()));
    }
    if status.success() {
        Ok(())
    } else {
        Err(Failure::failed("the program did not end well").into())
    }
}

/// The Python asked for, or the first of the usual names that is a CPython which pyheap supports.
fn find_python(wanted: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(wanted) = wanted {
        return Ok(wanted.to_owned());
    }
    let names = [
        "python3",
        "python3.15",
        "python3.14",
        "python3.13",
        "python3.12",
        "python3.11",
        "python3.10",
        "python3.9",
        "python3.8",
        "python3.7",
        "python",
    ];
    let script = "import sys, platform; v = sys.version_info; \
                  sys.exit(not (platform.python_implementation() == 'CPython' and (3, 7) <= v[:2] <= (3, 15)))";
    names
        .into_iter()
        .find(|name| {
            let quiet = std::process::Stdio::null;
            let status = Command::new(name)
                .args(["-c", script])
                .stdout(quiet())
                .stderr(quiet())
                .status();
            status.is_ok_and(|status| status.success())
        })
        .map(PathBuf::from)
        .ok_or_else(|| {
            Failure::new(
                code::USAGE,
                "no CPython 3.7 to 3.15 was found in PATH; name one with --python",
            )
        })
}
