//! What the hooks cost a target, by switching them on and off within it: see toggled.py.
//!
//!     cargo bench --bench toggled -- [--pairs N] [--period BYTES] [--settle SECONDS] [--cost BYTES] [--native] PYTHON [WORKLOAD...]
//!
//! For each workload: starts it, attaches as `pyheap record` does (without `--period`: auto), lets the target switch between
//! its own allocators and the wrappers some hundred times, and prints the ratio of the CPU times: of the sums without the
//! slowest tenth, and its range over ten parts of the run.
//!
//! `--cost BYTES` measures each workload twice, with hardly any samples (64 MiB) and with this short period, by the same wrappers, and
//! prints what the difference is for each sample: its own processor time, that of its free, and what it does to the caches.
//!
//! `--native` records native memory, too, and switches its slots as well.

use pyheap::attach::session::{DEFAULT_PERIOD, Options};
use pyheap::attach::{Session, preflight};
use pyheap::collect::{Limits, Recorder};
use pyheap::profile::facts::EndReason;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use pyheap_protocol::control::{Config, Control};
use std::io::{BufRead, BufReader, Write};
use std::mem::offset_of;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const MICRO: [&str; 10] = [
    "small_objects",
    "floats",
    "list_of_tuples",
    "dict_churn",
    "str_concat",
    "list_append",
    "bytes_600",
    "bytes_64k",
    "raw_threads",
    "threads_8",
];

/// The shortest period at which sampled small blocks are routed to the raw domain.
const SHORTEST_ROUTED: u64 = 32 << 10;
/// The longest period.
const LONGEST: u64 = 64 << 20;

#[derive(Clone, Copy)]
struct Settings {
    pairs: u64,
    /// 0 = auto.
    period: u64,
    settle: u64,
    /// 0 = not asked for.
    cost: u64,
    is_native: bool,
}

/// What was measured of a workload.
struct Measured {
    /// Added CPU time, as a share.
    added: f64,
    /// CPU time of a block without hooks, in nanoseconds.
    block: f64,
    /// Samples in a block with hooks.
    samples: f64,
}

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let is_native = args.iter().any(|arg| arg == "--native");
    args.retain(|arg| arg != "--native");
    let mut option = |name: &str, default: u64| {
        let Some(at) = args.iter().position(|arg| arg == name) else {
            return default;
        };
        let value = args[at + 1].parse().expect("a number");
        args.drain(at..at + 2);
        value
    };
    let settings = Settings {
        pairs: option("--pairs", 500),
        period: option("--period", 0),
        settle: option("--settle", 5),
        cost: option("--cost", 0),
        is_native,
    };
    let Some((python, workloads)) = args.split_first() else {
        println!("toggled: no PYTHON given, nothing measured");
        return;
    };
    println!(
        "{:16} {:>9} {:>8} {:>18} {:>10} {:>8}",
        "workload", "off", "added", "(range of 10)", "samples/s", "period"
    );
    let micro = MICRO.map(str::to_owned);
    for workload in if workloads.is_empty() { &micro[..] } else { workloads } {
        if settings.cost == 0 {
            measure(python, workload, settings);
            continue;
        }
        let [few, many] =
            [LONGEST, settings.cost].map(|period| measure(python, workload, Settings { period, ..settings }));
        if let (Some(few), Some(many)) = (few, many) {
            let cost = (many.added - few.added) * many.block / (many.samples - few.samples);
            println!(
                "{workload:16} a sample and its free: {cost:.0} ns, {:.0} samples in a block",
                many.samples
            );
        }
    }
}

fn measure(python: &str, workload: &str, settings: Settings) -> Option<Measured> {
    let mut child = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/toggled.py"))
        .args([
            settings.pairs.to_string(),
            settings.settle.to_string(),
            workload.to_owned(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("PYTHON can be started");
    let mut input = child.stdin.take().expect("piped");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let (send, lines) = channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
    if lines.iter().find(|line| line.starts_with("READY")).is_none() {
        println!("{workload:16} could not be started");
        let _ = child.wait();
        return None;
    }
    let target = preflight::check(child.id() as i32).expect("it can be attached to");
    let auto = settings.period == 0;
    let options = Options {
        period: if auto {
            DEFAULT_PERIOD
        } else {
            settings
                .period
                .max(if settings.cost == 0 { 1 } else { SHORTEST_ROUTED })
        },
        native: settings.is_native.then_some(1 << 20),
        ..Options::default()
    };
    let limits = Limits {
        max_overhead: auto.then_some(0.01),
        ..Limits::default()
    };
    let session = Session::attach(target, options).expect("attached");
    if settings.cost != 0 {
        // A period that is shorter than it can be asked for: pyheap does not believe such samples, but the target takes them.
        let period = session.control(offset_of!(Control, config) + offset_of!(Config, period));
        session
            .memory()
            .write(period, &settings.period.to_le_bytes())
            .expect("the target is there");
    }
    let mut recorder = Recorder::start(&session, None, limits, Instant::now()).expect("threads");
    writeln!(input).expect("the target reads");
    wait_for(&lines, "SETTLED", &mut recorder, &session);
    recorder.every_second(&session);
    let before = (Instant::now(), recorder.counters().samples);
    let slots: Vec<(u64, u64)> = session.native_slots().into_iter().collect();
    if settings.is_native {
        // A jump from one block of 128 GiB to another costs 1 ns and more (docs/performance.md, "Where the shim lies").
        let block = |address: u64| address >> 37;
        let memory = session.memory();
        let is_near = |&&(at, before): &&(u64, u64)| {
            let wrapper = memory.read_u64(RemoteAddr(at));
            wrapper.is_ok_and(|wrapper| block(wrapper) == block(before))
        };
        let (near, all) = (slots.iter().filter(is_near).count(), slots.len());
        println!("{workload:16} {near} of {all} wrappers are in the block of the function");
    }
    writeln!(input, "{}", serde_json::to_string(&slots).expect("numbers")).expect("the target reads");
    let line = if settings.is_native {
        // A look at the slots would take those that are off for another library's.
        let mut rest = lines.iter().skip_while(|line| !line.starts_with('{'));
        rest.next().expect("the target has ended")
    } else {
        wait_for(&lines, "{", &mut recorder, &session)
    };
    let found: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    let times = |key: &str| -> Vec<f64> {
        let values = found[key].as_array().into_iter().flatten();
        values.filter_map(serde_json::Value::as_f64).collect()
    };
    let (off, on) = (times("off"), times("on"));
    let part = off.len().div_ceil(10).max(1);
    let parts = off.chunks(part).zip(on.chunks(part));
    let parts: Vec<f64> = parts.map(|(off, on)| 100.0 * (ratio(off, on) - 1.0)).collect();
    recorder.every_second(&session);
    let samples = (recorder.counters().samples - before.1) as f64;
    // Half of the time is without hooks.
    let rate = 2.0 * samples / before.0.elapsed().as_secs_f64();
    println!(
        "{workload:16} {:7.2}ms {:+7.2}% {:>18} {rate:10.0} {:>8}",
        trimmed(&off) / off.len() as f64 / 1e6,
        100.0 * (ratio(&off, &on) - 1.0),
        format!(
            "({:+.1} … {:+.1})",
            parts.iter().copied().fold(f64::MAX, f64::min),
            parts.iter().copied().fold(f64::MIN, f64::max)
        ),
        pyheap::report::human::exact_bytes(pyheap::collect::resolve::lock(&recorder.live).period()),
    );
    recorder.finish(&session, &EndReason::Stopped);
    session.detach().expect("detached");
    writeln!(input).expect("the target reads");
    let restored = lines.iter().find(|line| line.starts_with("RESTORED"));
    assert_eq!(
        restored.as_deref(),
        Some("RESTORED True"),
        "the allocators are not what they were"
    );
    child.wait().expect("it ends");
    Some(Measured {
        added: ratio(&off, &on) - 1.0,
        block: trimmed(&off) / off.len() as f64,
        samples: samples / on.len() as f64,
    })
}

/// The next line that starts like this; meanwhile the recorder does what is due.
fn wait_for(lines: &Receiver<String>, start: &str, recorder: &mut Recorder, session: &Session) -> String {
    let mut second = Instant::now();
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) if line.starts_with(start) => return line,
            Err(RecvTimeoutError::Disconnected) => panic!("the target has ended"),
            _ => {}
        }
        if second.elapsed() >= Duration::from_secs(1) {
            second = Instant::now();
            // It may find that the hooks are out: the target switches them.
            recorder.every_second(session);
        }
    }
}

/// Sum without the slowest tenth, which other load has made slow, scaled to all.
fn trimmed(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let kept = (sorted.len() * 9).div_ceil(10).max(1).min(sorted.len());
    sorted[..kept].iter().sum::<f64>() * times.len() as f64 / kept as f64
}

fn ratio(off: &[f64], on: &[f64]) -> f64 {
    trimmed(on) / trimmed(off)
}
