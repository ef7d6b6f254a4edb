//! `pyheap attach`: what grows, live.

use super::choose;
use super::failure::{Failure, code};
use super::recording::{Front, Recording, Why, cost, found, stop_signals, stop_time};
use super::which::Told;
use crate::attach::cgroup::MemoryCgroup;
use crate::attach::process::MemoryUse;
use crate::attach::{Session, Target};
use crate::collect::recorder::{Saved, losses};
use crate::collect::{Stop, resolve};
use crate::report::human::{self, Human};
use crate::report::leaks::memory::Limit;
use crate::report::leaks::render::headline;
use crate::report::leaks::{OwnCode, Report};
use crate::ui::live::lines::{self, Beside};
use crate::ui::live::lock;
use crate::ui::live::screen::{Judge, Screen};
use crate::ui::live::source::Sources;
use crate::ui::live::terminal::Terminal;
use crate::ui::live::view::{Header, margin};
use crate::ui::live::watch::Watch;
use crate::ui::output::{note, to_reader};
use crate::ui::units;
use std::error::Error;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// Time between two updates of lines, and of the full-screen view.
const LINES_INTERVAL: Duration = Duration::from_secs(2);
const SCREEN_INTERVAL: Duration = Duration::from_secs(1);

/// Attach to a running Python process and watch what it allocates and keeps, live.
///
/// At a terminal: full screen, `?` shows the keys. Else, or with --plain: a table at each interval; with --json a line of JSON.
/// Only what is allocated after the attach can be seen. `q` or Ctrl-C quits and leaves the process as it was.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Keys: arrows or j k select, Enter opens the callers, o sorts, t groups, / filters, b sets a baseline, \
s saves from now on into files, p pauses, v shows the verdict, ? all keys, q quits.\n\nColours are off with NO_COLOR. The form of \
--json is in docs/live.md. Exit codes are those of `pyheap record`."
)]
pub struct Args {
    /// The process; without it the only attachable Python process.
    #[arg(value_name = "PID")]
    pub process: Option<i32>,

    /// Time between two updates; without it 1s on the full screen, 2s else.
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    pub interval: Option<Duration>,

    /// What is sampled.
    #[command(flatten)]
    pub sampling: super::sampling::Args,

    /// Quit after this time.
    #[arg(long, short, value_name = "TIME", value_parser = units::parse_duration)]
    pub duration: Option<Duration>,

    /// Print tables, also at a terminal.
    #[arg(long)]
    pub plain: bool,

    /// Print a line of JSON at each interval.
    #[arg(long, conflicts_with = "plain")]
    pub json: bool,

    /// Rows of the printed tables, and sites in JSON.
    #[arg(long, value_name = "N", default_value_t = lines::ROWS)]
    pub rows: usize,

    /// Code below this path is your own, too, for the verdict; see `pyheap leaks --help`. May be given several times.
    #[arg(long, value_name = "PATH")]
    pub own: Vec<String>,

    /// Tell when the process hits this size, for example 2GiB. Without it: the limit of its memory cgroup, if it has one.
    #[arg(long, value_name = "BYTES", value_parser = units::parse_size)]
    pub limit: Option<u64>,

    /// What is said.
    #[command(flatten)]
    pub told: Told,

    /// Say more: what was found and what the attach cost.
    #[arg(long, short)]
    pub verbose: bool,

    /// Print one line at each interval; beside it only what goes wrong, and the lines for the audit.
    #[arg(long, short, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// Runs the command.
///
/// # Errors
/// With the exit codes of `pyheap record`.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    args.told.apply()?;
    args.sampling.check().map_err(|text| Failure::new(code::USAGE, text))?;
    let stop = stop_signals()?;
    let target = choose::target(args.process)?;
    let pid = target.facts.id.pid;
    if args.verbose {
        note(&found(&target.interpreter));
    }
    let watch = Arc::new(Mutex::new(watch(args, &target)));
    let session = Session::attach(target, args.sampling.options()).map_err(Failure::from)?;
    let header = header(&session);
    let tap = {
        let watch = Arc::clone(&watch);
        Box::new(move |events: &[_]| lock(&watch).events(events))
    };
    let mut recording = Recording::start(session, args.sampling.limits(), |_| Ok(None), tap)?;
    if args.verbose {
        note(&cost(&recording.session));
    }
    let terminal = if is_full_screen(args) {
        Terminal::open(&stop).ok()
    } else {
        None
    };
    let (why, report, output_error) = match terminal {
        Some(terminal) => {
            let interval = args.interval.unwrap_or(SCREEN_INTERVAL).max(Duration::from_millis(100));
            let mut screen = Screen::new(terminal, Arc::clone(&watch), header, args.sampling.domains(), interval);
            if let Ok(sources) = Sources::new(pid, begun(pid)) {
                screen.show_sources(sources);
            }
            let why = recording.run(&stop, args.duration, &mut screen);
            // This gives the terminal back.
            (why, screen.report(), None)
        }
        None => {
            if !args.quiet {
                note(&format!("attached to PID {pid} (Ctrl-C quits and detaches)"));
            }
            let mut printed = Printed::new(args, header, Arc::clone(&watch));
            let why = recording.run(&stop, args.duration, &mut printed);
            (why, None, printed.error)
        }
    };
    let last = lock(&watch).picture(recording.recorder.elapsed());
    let (outcome, hooked) = recording.finish(&why.reason());
    let (_, cured) = hooked.leave(&why, args.verbose);
    if !args.quiet {
        if let Some(report) = report.filter(|report| report.is_long_enough) {
            note(&headline(&report));
        }
        note(&match &why {
            Why::Stop(Stop::TargetGone) => "the target has ended".to_owned(),
            Why::Stop(Stop::TargetReplaced) => Stop::TargetReplaced.describe(),
            _ if cured.is_err() => format!("could not detach from PID {pid}"),
            _ => format!(
                "detached from PID {pid} after {}; live since the attach {} ± {}",
                Human(outcome.elapsed),
                human::bytes(last.total.live.bytes),
                human::bytes(margin(&last.total, last.period)),
            ),
        });
    }
    tell_saved(args, &outcome.saved);
    cured?;
    match why {
        Why::Stop(other) if !matches!(other, Stop::TargetGone | Stop::TargetReplaced) => {
            Err(Failure::failed(other.describe()).into())
        }
        _ => output_error.map_or(Ok(()), |error| {
            Err(Failure::failed(format!("cannot write the view: {error}")).into())
        }),
    }
}

fn tell_saved(args: &Args, saved: &Saved) {
    match saved {
        Saved::Nothing => {}
        Saved::Now(names) | Saved::Done(names) => {
            if !args.quiet {
                let base = names.base().display();
                note(&format!(
                    "saved {base}; look at it with: pyheap leaks {base}, pyheap top {base}"
                ));
            }
        }
        Saved::Failed(why) => note(&format!("warning: not saved: {why}")),
    }
}

fn watch(args: &Args, target: &Target) -> Watch {
    let given = args.limit.map(|bytes| Limit {
        bytes,
        is_cgroup: false,
    });
    let cgroup = || {
        MemoryCgroup::of(target.facts.id.pid).map(|group| Limit {
            bytes: group.limit_bytes,
            is_cgroup: true,
        })
    };
    let own = OwnCode::new(&args.own, target.interpreter.path.to_str());
    let options = args.sampling.options();
    Watch::new(options.period, own, given.or_else(cgroup)).with_native(options.native.is_some())
}

fn header(session: &Session) -> Header {
    let facts = &session.target.facts;
    let rss = MemoryUse::of(facts.id.pid).map_or(0, |memory| memory.rss_bytes);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let second = now.as_secs() % 86_400;
    Header {
        pid: facts.id.pid,
        command: facts.short_command(200),
        python: session.target.interpreter.version.to_string(),
        attached_at: format!("{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60),
        rss_first: rss,
        rss,
        stop_time: stop_time(session),
        losses: String::new(),
        saving: String::new(),
    }
}

/// When a process began, since the epoch.
fn begun(pid: i32) -> Option<Duration> {
    let stat = procfs::process::Process::new(pid)
        .and_then(|process| process.stat())
        .ok()?;
    let boot = procfs::boot_time_secs().ok()?;
    let since = stat.starttime.checked_div(procfs::ticks_per_second())?;
    Some(Duration::from_secs(boot.checked_add(since)?))
}

/// Keys come from standard input and pictures go to standard output: both must be a terminal, and one that can move its cursor.
fn is_full_screen(args: &Args) -> bool {
    let is_able = std::env::var("TERM").is_ok_and(|name| !name.is_empty() && name != "dumb");
    let is_wanted = !args.plain && !args.json && !args.quiet;
    is_wanted && is_able && std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Prints at each interval.
struct Printed<'a> {
    args: &'a Args,
    header: Header,
    watch: Arc<Mutex<Watch>>,
    judge: Judge,
    interval: Duration,
    next: Duration,
    error: Option<std::io::Error>,
}

impl<'a> Printed<'a> {
    fn new(args: &'a Args, header: Header, watch: Arc<Mutex<Watch>>) -> Self {
        let interval = args.interval.unwrap_or(LINES_INTERVAL);
        Self {
            args,
            header,
            watch,
            judge: Judge::default(),
            interval,
            next: interval,
            error: None,
        }
    }

    fn text(&self, recording: &Recording, report: &Report) -> String {
        let recorder = &recording.recorder;
        let losses = losses(&recorder.counters(), &resolve::lock(&recorder.live));
        let watch = lock(&self.watch);
        let picture = watch.picture(recorder.elapsed());
        let beside = Beside {
            pid: self.header.pid,
            python: &self.header.python,
            command: &self.header.command,
            rss_first: self.header.rss_first,
            rss: recorder.memory().map_or(self.header.rss, |memory| memory.rss),
            losses: &losses,
            report,
        };
        match () {
            () if self.args.json => lines::json(&picture, &beside, &watch, self.args.rows),
            () if self.args.quiet => lines::first_line(&picture, &beside) + "\n",
            () => lines::text(&picture, &beside, &watch, self.args.rows),
        }
    }
}

impl Front for Printed<'_> {
    fn note(&mut self, text: &str) {
        if !self.args.quiet {
            note(text);
        }
    }

    fn second(&mut self, recording: &mut Recording) {
        let at = recording.recorder.elapsed();
        lock(&self.watch).tick(at, recording.recorder.memory());
        self.judge.look(&self.watch, &recording.recorder.live, at);
    }

    fn turn(&mut self, recording: &mut Recording) -> bool {
        let at = recording.recorder.elapsed();
        let Some(report) = self.judge.report.as_ref().filter(|_| at >= self.next) else {
            return false;
        };
        self.next = at + self.interval;
        match to_reader(&self.text(recording, report)) {
            Ok(is_read) => !is_read,
            Err(error) => {
                self.error = Some(error);
                true
            }
        }
    }
}
