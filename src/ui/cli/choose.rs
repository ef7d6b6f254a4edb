//! Which process is meant.

use super::failure::{Failure, code};
use crate::attach::candidates::{self, Candidate};
use crate::attach::{FindError, Refusal, Target, preflight, process};
use crate::report::human;
use crate::ui::output::note;
use std::io::{IsTerminal, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause between two looks at a program that has just been started. After [`EAGER`] it grows by a tenth each time.
const LOOK: Duration = Duration::from_millis(1);
/// As long as this, what the program does first is worth some processor time of ours.
const EAGER: Duration = Duration::from_secs(2);
/// Longest pause.
const LONGEST_LOOK: Duration = Duration::from_millis(50);
/// A Python that cannot be attached to for this long after it was seen will not change: a launcher would have become
/// another program by then.
const HOPE: Duration = Duration::from_secs(1);
/// After this time without an interpreter we say what we are waiting for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks at `pid`, or chooses among the Python processes that are there.
///
/// # Errors
/// When the process cannot be attached to, or there is none or more than one to choose from.
pub fn target(pid: Option<i32>) -> Result<Target, Failure> {
    if let Some(pid) = pid {
        return Ok(preflight::check(pid)?);
    }
    let all = candidates::list();
    let attachable: Vec<&Candidate> = all.iter().filter(|c| c.attachable.is_ok()).collect();
    match attachable.as_slice() {
        [] => {
            let mut text = "no Python process was found that can be attached to".to_owned();
            for other in &all {
                if let Err(why) = &other.attachable {
                    text += &format!("\n  {} ({}): {why}", other.pid, human::clean(&other.command));
                }
            }
            // If all are refused for one kind of reason, that is the reason.
            let mut codes = all.iter().map(|other| other.refusal_code);
            let first = codes.next().flatten();
            let common = first.filter(|_| codes.all(|code| code == first));
            Err(Failure::new(common.unwrap_or(code::USAGE), text))
        }
        [only] => {
            note(&format!(
                "taking the only attachable Python process: {}",
                describe(only)
            ));
            Ok(preflight::check(only.pid)?)
        }
        several if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() => ask(several),
        several => {
            let list: String = several.iter().map(|c| format!("\n  {}", describe(c))).collect();
            let text = format!(
                "there are {} attachable Python processes; name one by its pid:{list}",
                several.len()
            );
            Err(Failure::new(code::USAGE, text))
        }
    }
}

fn describe(candidate: &Candidate) -> String {
    let version = candidate
        .version
        .map_or_else(|| "?".to_owned(), |version| version.to_string());
    let rss = human::bytes(candidate.rss_bytes as f64);
    format!(
        "{}  Python {version}  {rss}  {}",
        candidate.pid,
        human::clean(&candidate.command)
    )
}

fn ask(candidates: &[&Candidate]) -> Result<Target, Failure> {
    note("several Python processes can be attached to:");
    for (number, candidate) in candidates.iter().enumerate() {
        note(&format!("{:>3})  {}", number + 1, describe(candidate)));
    }
    let _ = write!(std::io::stderr(), "number (nothing to quit): ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(Failure::failed)?;
    let chosen = answer
        .trim()
        .parse::<usize>()
        .ok()
        .and_then(|n| candidates.get(n.checked_sub(1)?));
    match chosen {
        Some(candidate) => Ok(preflight::check(candidate.pid)?),
        None => Err(Failure::new(code::USAGE, "no process was chosen")),
    }
}

/// The exit code of refusals of a kind of program.
const UNSUPPORTED: u8 = 5;

/// True for a refusal that has recognised another Python, and not merely found none.
fn is_named(refusal: &Refusal) -> bool {
    !matches!(
        refusal,
        Refusal::Python(FindError::NotPython { .. }) | Refusal::KernelThread { .. }
    )
}

/// A program that we have started.
#[derive(Debug)]
pub struct Started {
    child: Child,
    /// Its command line, for messages.
    pub name: String,
}

impl Started {
    /// Starts `command` with our standard streams.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn new(command: &[String]) -> Result<Self, Failure> {
        let [program, arguments @ ..] = command else {
            return Err(Failure::new(code::USAGE, "no command was given after --"));
        };
        Self::spawn(program, Command::new(program).args(arguments))
    }

    /// Starts `command` without input and output.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn quiet(command: &[String]) -> Result<Self, Failure> {
        let [program, arguments @ ..] = command else {
            return Err(Failure::new(code::USAGE, "no command was given"));
        };
        Self::spawn(
            program,
            Command::new(program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null()),
        )
    }

    fn spawn(program: &str, command: &mut Command) -> Result<Self, Failure> {
        let child = command
            .spawn()
            .map_err(|error| Failure::new(code::USAGE, format!("cannot run {program}: {error}")))?;
        Ok(Self {
            child,
            name: program.to_owned(),
        })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When that cannot be learned.
    pub fn wait(&mut self) -> Result<ExitStatus, Failure> {
        self.child.wait().map_err(Failure::failed)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    /// Waits until an interpreter is up in it, or in a process that it has started (a shell, `uv run`).
    ///
    /// # Errors
    /// When it ends before, or its Python is one that cannot be attached to, or `stop` is set.
    pub fn wait_for_python(&mut self, stop: &AtomicBool) -> Result<Target, Failure> {
        let started = Instant::now();
        let (mut said, mut seen_unsupported, mut pause) = (false, None, LOOK);
        loop {
            if let Some(status) = self.ended() {
                return Err(Failure::failed(format!(
                    "{} ended before its interpreter was up long enough to attach to: {status}",
                    self.name
                )));
            }
            if stop.load(Ordering::Acquire) {
                let pid = self.pid();
                return Err(Failure::failed(format!(
                    "interrupted while waiting for a Python interpreter; {} goes on as process {pid}",
                    self.name
                )));
            }
            let mut refusal = None;
            for pid in std::iter::once(self.pid()).chain(process::descendants(self.pid())) {
                match preflight::check(pid) {
                    Ok(target) => return Ok(target),
                    Err(error)
                        if candidates::looks_like_python(pid)
                            || error.exit_code() == UNSUPPORTED && is_named(&error) =>
                    {
                        refusal = Some(error);
                    }
                    Err(_) => {}
                }
            }
            if started.elapsed() > PATIENCE && !said {
                said = true;
                let why = refusal
                    .as_ref()
                    .map_or_else(String::new, |refusal| format!(" ({refusal})"));
                note(&format!("waiting for a Python interpreter in {}{why}", self.name));
            }
            match &refusal {
                Some(error) if error.exit_code() == UNSUPPORTED => {
                    if seen_unsupported.get_or_insert_with(Instant::now).elapsed() > HOPE
                        && let Some(refusal) = refusal
                    {
                        note(&format!("{} goes on as process {}", self.name, self.pid()));
                        return Err(refusal.into());
                    }
                }
                _ => seen_unsupported = None,
            }
            std::thread::sleep(pause);
            if started.elapsed() > EAGER {
                pause = (pause + pause / 10).min(LONGEST_LOOK);
            }
        }
    }

    /// How it ended, after it has been seen to be ending: a process with much memory takes a while for it.
    pub fn wait_for_end(&mut self) -> Option<ExitStatus> {
        const LONGEST: Duration = Duration::from_secs(5);
        let started = Instant::now();
        loop {
            match self.ended() {
                Some(status) => return Some(status),
                None if started.elapsed() > LONGEST => return None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}
