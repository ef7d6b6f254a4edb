//! One step of reading a profile, in a process of its own: `reader STEP BASE [LINE...]` prints the CPU seconds of the whole
//! process, opening included, and its peak memory. `scripts/bench reader` runs the steps beside the original heapprof's.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use procfs::process::Process;
use pyheap::reader::{RawTraceLine, Reader, ReaderError};

/// Where graphs are drawn, in seconds since the start: the same as in `original.py`.
const AT: f64 = 1800.0;
const AT_SECOND: f64 = 2400.0;

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|given| given != "--bench").collect();
    let [step, base, lines @ ..] = &given[..] else {
        eprintln!("usage: reader STEP BASE [LINE...]; see scripts/bench reader");
        std::process::exit(2);
    };
    match run(step, base, lines) {
        Ok(seconds) => println!("{step} {seconds:.3} {}", peak_mib()),
        Err(error) => {
            eprintln!("{step}: {error}");
            std::process::exit(1);
        }
    }
}

/// Does the step and tells its CPU seconds.
fn run(step: &str, base: &str, lines: &[String]) -> Result<f64, ReaderError> {
    let mut reader = Reader::open(base)?;
    let mut before = 0.0;
    let mut out = std::io::sink();
    if let Some(seconds) = step.strip_prefix("digest") {
        let interval = Duration::from_secs(seconds.parse().unwrap_or(60));
        reader.make_digest(interval, 0.0, |_| ControlFlow::Continue(()))?;
        return Ok(cpu_seconds());
    }
    match step {
        "flow" | "flow2" => {
            let mut size = reader.flow_graph_at(AT)?.nodes.len();
            if step == "flow2" {
                before = cpu_seconds();
                size += reader.flow_graph_at(AT_SECOND)?.nodes.len();
            }
            let _ = write!(out, "{size}");
        }
        "flame" => {
            let _ = out.write_all(reader.flame_graph_at(AT)?.as_bytes());
        }
        "plot" => {
            let lines: Result<Vec<(String, RawTraceLine)>, _> = lines
                .iter()
                .map(|line| Ok::<_, ReaderError>((line.clone(), line.parse()?)))
                .collect();
            let _ = write!(out, "{:?}", reader.time_plot(&lines?)?);
        }
        "events" => {
            let sum = reader.hpd()?.fold(0.0, |sum, event| sum + event.scale_factor);
            let _ = write!(out, "{sum}");
        }
        _ => eprintln!("no such step"),
    }
    Ok(cpu_seconds() - before)
}

fn cpu_seconds() -> f64 {
    let spent = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).expect("this clock is always there");
    Duration::from(spent).as_secs_f64()
}

fn peak_mib() -> u64 {
    let status = Process::myself().and_then(|me| me.status());
    status.ok().and_then(|status| status.vmhwm).unwrap_or(0) / 1024
}
