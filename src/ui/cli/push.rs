//! `pyheap push`: profiles to a Pyroscope server.

use super::collectors::{AtEnd, Collectors, How};
use super::failure::{Failure, code};
use super::recording::stop_signals;
use super::which::{Told, Which};
use crate::attach::process::ProcessId;
use crate::report::export::pprof::gzip;
use crate::serve::answer::{Before, Of, profile};
use crate::serve::push::{Parcel, Place, Progress, Pusher, name};
use crate::serve::served::{Served, Set, lock};
use crate::ui::output::note;
use crate::ui::units;
use std::collections::HashMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// How often it is looked whether to stop.
const LOOK: Duration = Duration::from_millis(50);
/// The shortest time between two profiles.
const SHORTEST: Duration = Duration::from_secs(1);

/// Attach to a running Python process and send its heap profile to a Pyroscope server, again and again.
///
/// Each profile says what is alive and what was allocated since the one before. What cannot be sent is kept for a while (32 MiB)
/// and tried again; the process never waits for it. Ctrl-C sends what is left and leaves the process as it was.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "For example: pyheap push 4242 --url http://pyroscope:4040 --name shop --label env=prod\n\nExit codes are those of \
`pyheap record`, and 1 when nothing has arrived."
)]
pub struct Args {
    /// The process; without it the only attachable Python process.
    #[arg(value_name = "PID")]
    pub process: Option<i32>,

    /// Which processes, if it is not a single one.
    #[command(flatten)]
    pub which: Which,

    /// The server: http://HOST:PORT or https://HOST, with the path of its ingest API if that is not /ingest.
    #[arg(long, value_name = "URL", value_parser = Place::parse)]
    pub url: Place,

    /// Name of the application; without it that of the program.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// A label for all profiles, beside `pid` and `host`. May be given several times.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,

    /// Time between two profiles, from 1s.
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = units::parse_duration)]
    pub every: Duration,

    /// Send the token in this file, 8 to 4096 printable characters, with each profile (`Authorization: Bearer TOKEN`).
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// Believe the certificates of the authorities in this file (PEM), too, beside those that the system trusts.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Whose data it is, for a server with several tenants (`X-Scope-OrgID`).
    #[arg(long, value_name = "ID")]
    pub tenant: Option<String>,

    /// What is sampled.
    #[command(flatten)]
    pub sampling: super::sampling::Args,

    /// What is said.
    #[command(flatten)]
    pub told: Told,

    /// Say more: what attaching and detaching cost.
    #[arg(long, short)]
    pub verbose: bool,
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("must be KEY=VALUE".to_owned()),
    }
}

/// Makes profiles and gives them to the pusher.
struct Sender {
    pusher: Pusher,
    app: Option<String>,
    labels: Vec<(String, String)>,
    /// Where the last profile of each process ended.
    before: Mutex<HashMap<ProcessId, Before>>,
}

impl Sender {
    fn send(&self, served: &Arc<Served>) {
        let Some(attached) = served.attached() else { return };
        let mut all = lock(&self.before);
        let mut before = all.remove(&served.id).unwrap_or_default();
        let from = *before.at.get_or_insert(attached.since);
        let made = profile(std::slice::from_ref(served), "inuse_space", false, Of::Pushed(&before));
        let until = made.sums.at.unwrap_or_else(SystemTime::now);
        all.insert(served.id, made.sums);
        drop(all);
        let mut labels = vec![("pid".to_owned(), served.id.pid.to_string())];
        labels.extend(attached.facts.host.clone().map(|host| ("host".to_owned(), host)));
        labels.extend(self.labels.iter().cloned());
        let app = self.app.clone().unwrap_or_else(|| program(&served.command));
        if let Ok(body) = gzip(&made.bytes) {
            self.pusher.send(Parcel {
                name: name(&app, &labels),
                from,
                until,
                body,
            });
        }
    }
}

/// What a program is called: its script or module, without folder and extension.
fn program(command: &[String]) -> String {
    let mut words = command.iter().skip(1);
    let word = loop {
        match words.next().map(String::as_str) {
            Some("-m") => break words.next().map(String::as_str),
            Some("-c") | None => break None,
            Some("-W" | "-X") => drop(words.next()),
            Some(option) if option.starts_with('-') => {}
            word => break word,
        }
    };
    let name = word.and_then(|word| std::path::Path::new(word).file_stem()?.to_str());
    name.filter(|name| !name.is_empty()).unwrap_or("python").to_owned()
}

/// Runs the command.
///
/// # Errors
/// With the exit codes of `pyheap record`.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    args.told.apply()?;
    let stop = stop_signals()?;
    let mut place = args.url.clone();
    if let Some(path) = &args.token_file {
        place.authorization = Some(format!("Bearer {}", super::serve::token(path)?));
    }
    place.tenant.clone_from(&args.tenant);
    if place.is_secure {
        place
            .trust(args.ca_file.as_deref())
            .map_err(|why| Failure::new(code::USAGE, why))?;
    } else if args.ca_file.is_some() {
        return Err(Failure::new(code::USAGE, "--ca-file is for a URL with https").into());
    }
    if args.every < SHORTEST {
        return Err(Failure::new(code::USAGE, "--every must be at least 1s").into());
    }
    let sender = Arc::new(Sender {
        pusher: Pusher::start(place).map_err(Failure::failed)?,
        app: args.name.clone(),
        labels: args.labels.clone(),
        before: Mutex::new(HashMap::new()),
    });
    let how = How {
        sampling: args.sampling.clone(),
        idle: None,
        output: None,
        verbose: args.verbose,
    };
    let set = Arc::new(Set::default());
    let at_end: AtEnd = {
        let sender = Arc::clone(&sender);
        Arc::new(move |served| {
            sender.send(served);
            lock(&sender.before).remove(&served.id);
        })
    };
    let mut collectors = Collectors::start(args.process, &args.which, how, Arc::clone(&set), at_end, &stop)?;
    if !collectors.look() {
        note("pushing (Ctrl-C ends it)");
    }
    let mut next = Instant::now() + args.every;
    let (mut shown, mut told) = (Progress::default(), false);
    while !stop.load(Ordering::Acquire) && !collectors.look() {
        if Instant::now() >= next {
            next += args.every;
            set.all().iter().for_each(|served| sender.send(served));
        }
        tell(&mut shown, &mut told, sender.pusher.progress());
        std::thread::sleep(LOOK);
    }
    let done = collectors.finish();
    // The recordings, which knew it, too, are over.
    let Ok(sender) = Arc::try_unwrap(sender).map_err(|_| ()) else {
        return Ok(done?);
    };
    let progress = sender.pusher.finish();
    note(&format!(
        "{} profiles have arrived, {} have not",
        progress.sent, progress.dropped
    ));
    done?;
    if progress.sent == 0 && progress.failed > 0 {
        return Err(Failure::failed(format!("nothing could be pushed: {}", progress.why)).into());
    }
    Ok(())
}

/// Says when something goes wrong and when it is well again, once each, however short that was.
fn tell(shown: &mut Progress, told: &mut bool, now: Progress) {
    if !*told && now.failed > shown.failed {
        *told = true;
        note(&format!(
            "cannot push: {}; profiles are kept and tried again, the oldest go first when there are too many",
            now.why
        ));
    }
    if *told && !now.in_trouble {
        *told = false;
        note("pushing again");
    }
    *shown = now;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_called_after_what_it_runs() {
        let name = |words: &str| program(&words.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(name("python3 -X dev -u /srv/shop/app.py --port 1"), "app");
        assert_eq!(name("/usr/bin/python3 /usr/bin/gunicorn app:app"), "gunicorn");
        assert_eq!(name("python -m http.server 80"), "http");
        assert_eq!(name("python -c pass"), "python");
        assert_eq!(name("uwsgi"), "python");
    }
}
