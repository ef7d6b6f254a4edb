//! `pyheap serve`: profiles by HTTP.

use super::collectors::{Collectors, How};
use super::failure::{Failure, code};
use super::recording::stop_signals;
use super::which::{Told, Which};
use crate::serve::http::{Rules, Server, Token};
use crate::serve::served::Set;
use crate::ui::output::note;
use crate::ui::units;
use std::error::Error;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often it is looked whether to stop.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of a token.
const SHORTEST_TOKEN: usize = 8;
const LONGEST_TOKEN: usize = 4096;

/// Attach to a running Python process and serve its heap profile by HTTP, as Go services do.
///
/// /debug/pprof/heap is a pprof profile of what is alive (and of what was allocated), ?seconds=30 one of what changes in that time,
/// ?debug=1 text; /metrics is for Prometheus. It stays attached, since only what is allocated after the attach can be seen; every
/// answer says since when that is. Ctrl-C ends it and leaves the process as it was.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Look at it with: go tool pprof -top http://127.0.0.1:6060/debug/pprof/heap\n\nPaths, parameters and numbers: \
docs/serve.md. Exit codes are those of `pyheap record`."
)]
pub struct Args {
    /// The process; without it the only attachable Python process.
    #[arg(value_name = "PID")]
    pub process: Option<i32>,

    /// Which processes, if it is not a single one.
    #[command(flatten)]
    pub which: Which,

    /// Where to listen. Port 0 takes any that is free.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6060")]
    pub listen: SocketAddr,

    /// Listen on an address that others can reach. Profiles name files, functions and command lines: add --token-file, or see to it that
    /// nobody else can connect.
    #[arg(long)]
    pub allow_remote: bool,

    /// Answer only who sends the token in this file, 8 to 4096 printable characters (`Authorization: Bearer TOKEN`, or as password of user `pyheap`).
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// Detach from a process when nobody has asked for its profile for this time; the next request attaches again, and sees what is
    /// allocated from then on. /metrics does not count as asking.
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub idle_detach: Option<Duration>,

    /// Allocating lines of each process in /metrics, the largest ones.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=100))]
    pub metrics_sites: u64,

    /// What is sampled.
    #[command(flatten)]
    pub sampling: super::sampling::Args,

    /// Also record into files BASE._hpm, BASE._hpd, BASE._hpx, as `pyheap record` does. Of one process only.
    #[arg(long, short, value_name = "BASE", conflicts_with_all = ["tree", "all", "cgroup", "pattern", "idle_detach"])]
    pub output: Option<PathBuf>,

    /// What is said.
    #[command(flatten)]
    pub told: Told,

    /// Say more: what attaching and detaching cost.
    #[arg(long, short)]
    pub verbose: bool,
}

/// Runs the command.
///
/// # Errors
/// With the exit codes of `pyheap record`.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    args.told.apply()?;
    args.sampling.check().map_err(|text| Failure::new(code::USAGE, text))?;
    let stop = stop_signals()?;
    let rules = rules(args)?;
    let set = Arc::new(Set::default());
    let server = Server::start(args.listen, Arc::clone(&set), rules)
        .map_err(|error| Failure::failed(format!("cannot listen at {}: {error}", args.listen)))?;
    let how = How {
        sampling: args.sampling.clone(),
        idle: args.idle_detach,
        output: args.output.clone(),
        verbose: args.verbose,
    };
    let mut collectors = Collectors::start(args.process, &args.which, how, set, Arc::new(|_| {}), &stop)?;
    if !collectors.look() {
        let one = || args.process.map_or_else(|| "it".to_owned(), |pid| pid.to_string());
        let whom = args.which.describe().unwrap_or_else(one);
        note(&format!(
            "serving {whom} at http://{}/ (Ctrl-C ends it)",
            server.address
        ));
    }
    while !stop.load(Ordering::Acquire) && !collectors.look() {
        std::thread::sleep(LOOK);
    }
    drop(server);
    Ok(collectors.finish()?)
}

fn rules(args: &Args) -> Result<Rules, Failure> {
    let is_local = args.listen.ip().is_loopback();
    if !is_local && !args.allow_remote {
        let text = format!(
            "{} can be reached by others: say --allow-remote if that is wanted, best with --token-file",
            args.listen
        );
        return Err(Failure::new(code::USAGE, text));
    }
    let token = args.token_file.as_deref().map(token).transpose()?;
    Ok(Rules {
        only_local_names: token.is_none() && is_local,
        token: token.as_deref().map(Token::new),
        sites: usize::try_from(args.metrics_sites).unwrap_or(0),
    })
}

/// The token in a file: its first line.
///
/// # Errors
/// When there is none, or it is too short to be a secret.
pub fn token(path: &Path) -> Result<String, Failure> {
    let wrong = |why: String| Failure::new(code::USAGE, format!("no token in {}: {why}", path.display()));
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
    file.take(LONGEST_TOKEN as u64 + 1)
        .read_to_string(&mut text)
        .map_err(|error| wrong(error.to_string()))?;
    let token = text.lines().next().unwrap_or_default().trim().to_owned();
    if !(SHORTEST_TOKEN..=LONGEST_TOKEN).contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let why =
            format!("its first line must be {SHORTEST_TOKEN} to {LONGEST_TOKEN} printable characters without spaces");
        return Err(wrong(why));
    }
    Ok(token)
}
