//! The verdict on simulated programs, of which the truth is known: how often is one that does not leak called a leak, are leaks
//! found, and do the intervals hold what they promise?
//!
//! A program is a number of sites. What is simulated is what a sampler of period R sees of them, which for blocks much
//! smaller than R is a Poisson process. Seeds are fixed, so the results are always the same.

use std::time::Duration;

use super::own::OwnCode;
use super::{Facts, Overall, Report, Tracker, Verdict, judge};
use crate::profile::facts::MemorySample;
use crate::profile::model::StackFrame;
use crate::profile::sampling::Weights;

const PERIOD: u64 = 131_072;
/// Blocks of this size: a sample stands for R bytes.
const SIZE: u64 = 64;

/// Repeatable random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// Between, evenly on a logarithmic scale.
    fn scale(&mut self, low: f64, high: f64) -> f64 {
        self.between(low.ln(), high.ln()).exp()
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.uniform().ln()
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Sampled blocks of one site: when each was allocated and freed, in seconds.
type Lives = Vec<(f64, f64)>;

/// Times of a Poisson process of `rate` a second.
fn arrivals(random: &mut Random, rate: f64, from: f64, to: f64) -> Vec<f64> {
    let mut times = Vec::new();
    let mut at = from + random.exponential(1.0 / rate);
    while at < to {
        times.push(at);
        at += random.exponential(1.0 / rate);
    }
    times
}

/// A site that does not leak, in a recording of `end` seconds. `rate` is in samples a second.
fn harmless(random: &mut Random, kind: u64, rate: f64, end: f64) -> Lives {
    match kind {
        // A cache with a limit that forgets the oldest: filled within the first third at the latest.
        0 => {
            let slots = (rate * random.scale(0.002, 0.33) * end) as usize;
            let times = arrivals(random, rate, 0.0, end);
            let forgotten = |place: usize| times.get(place + slots.max(1)).copied().unwrap_or(f64::MAX);
            times
                .iter()
                .enumerate()
                .map(|(place, at)| (*at, forgotten(place)))
                .collect()
        }
        // A cache that is pruned by a third whenever it is full.
        1 => {
            let slots = (rate * random.scale(0.02, 0.2) * end).max(3.0) as usize;
            let mut lives: Lives = Vec::new();
            let mut first = 0;
            for at in arrivals(random, rate, 0.0, end) {
                lives.push((at, f64::MAX));
                if lives.len() - first > slots {
                    let pruned = first + slots / 3 + 1;
                    lives[first..pruned].iter_mut().for_each(|life| life.1 = at);
                    first = pruned;
                }
            }
            lives
        }
        // A cache of everything there is: what is new gets rare.
        2 => {
            let pace = end * random.scale(0.01, 0.15);
            let total = rate * end * random.scale(0.05, 0.5);
            (0..total as usize)
                .map(|_| (random.exponential(pace), f64::MAX))
                .filter(|life| life.0 < end)
                .collect()
        }
        // Requests that come in bursts, and are served.
        3 => {
            let (gap, length) = (end * random.scale(0.003, 0.1), end * random.scale(0.001, 0.05));
            let mut lives: Lives = Vec::new();
            let mut at = random.exponential(gap);
            while at < end {
                let burst = rate * random.between(0.3, 3.0);
                for start in arrivals(random, burst, at, at + length) {
                    lives.push((start, start + random.exponential(length)));
                }
                at += length + random.exponential(gap);
            }
            lives
        }
        // Garbage in cycles, until it is collected.
        4 => {
            let every = end * random.scale(0.005, 0.24);
            let shift = random.uniform();
            let collected = |at: f64| ((at / every + shift).floor() + 1.0 - shift) * every;
            arrivals(random, rate, 0.0, end)
                .into_iter()
                .map(|at| (at, collected(at)))
                .collect()
        }
        // Objects that live short or long, by a log-normal law.
        5 => {
            let (median, sigma) = (end * random.scale(1e-4, 0.01), random.between(0.5, 1.6));
            let times = arrivals(random, rate, 0.0, end);
            times
                .into_iter()
                .map(|at| (at, at + median * (sigma * random.normal()).exp()))
                .collect()
        }
        // Start-up: modules, tables, connections.
        6 => {
            let until = end * random.scale(0.01, 0.25);
            arrivals(random, 3.0 * rate, 0.0, until)
                .into_iter()
                .map(|at| (at, f64::MAX))
                .collect()
        }
        // Workers that keep what they get and are replaced after a while.
        7 => {
            let workers = 1 + random.bits() % 4;
            let every = end * random.scale(0.03, 0.22);
            let mut lives: Lives = Vec::new();
            for _ in 0..workers {
                let mut begun = -every * random.uniform();
                while begun < end {
                    let ends = begun + every * random.between(0.9, 1.1);
                    let share = rate / workers as f64;
                    lives.extend(
                        arrivals(random, share, begun.max(0.0), ends.min(end))
                            .iter()
                            .map(|at| (*at, ends)),
                    );
                    begun = ends;
                }
            }
            lives
        }
        // Sessions that run out, with a load that goes up and down.
        8 => {
            let (lifetime, wave) = (end * random.scale(0.01, 0.15), end * random.scale(0.05, 0.3));
            let depth = random.between(0.0, 0.8);
            let times = arrivals(random, rate * (1.0 + depth), 0.0, end);
            let mut lives: Lives = Vec::new();
            for at in times {
                let load = 1.0 + depth * (std::f64::consts::TAU * at / wave).sin();
                if random.uniform() * (1.0 + depth) < load {
                    lives.push((at, at + lifetime));
                }
            }
            lives
        }
        // A queue that fills when its consumer pauses.
        _ => {
            let mut lives: Lives = Vec::new();
            let mut free_at = 0.0;
            for at in arrivals(random, rate, 0.0, end) {
                let pause = if random.uniform() < 0.01 {
                    end * random.scale(0.005, 0.05)
                } else {
                    0.0
                };
                free_at = f64::max(free_at, at) + random.exponential(0.8 / rate) + pause;
                lives.push((at, free_at));
            }
            lives
        }
    }
}

fn leaking(random: &mut Random, rate: f64, end: f64) -> Lives {
    arrivals(random, rate, 0.0, end)
        .into_iter()
        .map(|at| (at, f64::MAX))
        .collect()
}

struct NoFacts(Vec<(u64, MemorySample)>);

fn frames(site: u32) -> Vec<StackFrame<'static>> {
    let frame = |file: &'static str, line| StackFrame {
        file: file.into(),
        line,
        function: None,
    };
    // Every third site allocates in a library that it shares with others.
    let mut stack = vec![frame("app.py", 1), frame("app.py", 10 + site)];
    if site.is_multiple_of(3) {
        stack.push(frame("/usr/lib/python3.12/json/decoder.py", site % 2 + 1));
    }
    stack
}

impl Facts for NoFacts {
    fn frames(&self, trace: u32) -> Vec<StackFrame<'_>> {
        frames(trace)
    }

    fn origin(&self, _: u32) -> (Option<String>, Option<String>) {
        (None, None)
    }

    fn births(&self, _: u32) -> Option<&[(u64, u64)]> {
        None
    }

    fn memory(&self) -> &[(u64, MemorySample)] {
        &self.0
    }
}

/// Records these sites for `end` seconds and judges.
fn record(sites: &[Lives], end: f64) -> Report {
    let mut events: Vec<(f64, u32, bool)> = Vec::new();
    for (site, lives) in sites.iter().enumerate() {
        for (born, dead) in lives {
            events.push((*born, site as u32 + 1, false));
            if *dead < end {
                events.push((*dead, site as u32 + 1, true));
            }
        }
    }
    events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
    let mut tracker = Tracker::new(Weights::Period(PERIOD), sites.len() as u32, OwnCode::default());
    for site in 1..=sites.len() as u32 {
        tracker.know(site, &frames(site));
    }
    for (at, site, is_free) in events {
        tracker.event(Duration::from_secs_f64(at), site, SIZE, is_free, false);
    }
    judge(&mut tracker, Duration::from_secs_f64(end), &NoFacts(Vec::new()), None)
}

/// The kinds of sites and a recording of them.
fn program(seed: u64) -> (Vec<u64>, Vec<Lives>, f64) {
    let mut random = Random(seed);
    let end = random.scale(20.0, 600.0);
    let count = 3 + random.bits() % 20;
    let kinds: Vec<u64> = (0..count).map(|_| random.bits() % 10).collect();
    let sites = kinds
        .iter()
        .map(|kind| {
            let rate = random.scale(5.0, 800.0) / end;
            harmless(&mut random, *kind, rate, end)
        })
        .collect();
    (kinds, sites, end)
}

#[test]
fn at_most_two_of_a_hundred_programs_that_do_not_leak_are_called_leaking() {
    let mut blamed = Vec::new();
    for seed in 0..1000 {
        let (kinds, sites, end) = program(seed);
        let report = record(&sites, end);
        assert!(report.is_long_enough, "seed {seed}");
        for site in report.leaks.iter().filter(|site| site.verdict == Verdict::Leak) {
            let place = site.own.as_ref().map_or(0, |frame| frame.line - 11);
            blamed.push((seed, kinds[place as usize], site.growth_bytes_per_min));
        }
        assert_eq!(
            report.verdict == Overall::Leak,
            blamed.last().is_some_and(|(of, ..)| *of == seed)
        );
    }
    let mut programs: Vec<u64> = blamed.iter().map(|(seed, ..)| *seed).collect();
    programs.dedup();
    println!("{} of 1000: seed, kind, bytes a minute: {blamed:?}", programs.len());
    assert!(programs.len() <= 20, "{} of 1000: {blamed:?}", programs.len());
}

/// Leaks of some tens of samples among harmless sites are found, are all that is found, and are the first by growth.
#[test]
fn leaks_among_other_sites_are_found() {
    let (mut found, mut first, mut large, mut large_found) = (0, 0, 0, 0);
    for seed in 0..400 {
        let (_, mut sites, end) = program(seed + 10_000);
        let mut random = Random(seed);
        let samples = random.scale(20.0, 500.0);
        sites.push(leaking(&mut random, samples / end, end));
        let line = 10 + sites.len() as u32;
        let report = record(&sites, end);
        let is_it =
            |site: &super::Site| site.verdict == Verdict::Leak && site.own.as_ref().is_some_and(|own| own.line == line);
        let is_found = report.leaks.iter().any(is_it);
        found += usize::from(is_found);
        first += usize::from(report.leaks.first().is_some_and(is_it));
        if samples > 60.0 {
            large += 1;
            large_found += usize::from(is_found);
        }
    }
    println!("found {found} of 400, first {first}; of those above 60 samples {large_found} of {large}");
    assert!(found >= 320, "found {found} of 400");
    assert!(100 * large_found >= 97 * large, "{large_found} of {large}");
}

#[test]
fn intervals_hold_the_truth() {
    let (mut held, mut all) = (0, 0);
    for seed in 0..600 {
        let mut random = Random(seed + 77);
        let end = 60.0;
        let rate = random.scale(8.0, 600.0) / end;
        let report = record(&[leaking(&mut random, rate, end)], end);
        let truth = rate * PERIOD as f64 * 60.0;
        let (low, high) = report.leaks[0].ci95;
        all += 1;
        held += usize::from(low <= truth && truth <= high);
    }
    println!("{held} of {all}");
    assert!(100 * held >= 93 * all, "{held} of {all}");
}

/// A list that grows by realloc has blocks that never get old.
#[test]
fn one_list_that_grows() {
    let mut tracker = Tracker::new(Weights::Period(PERIOD), 1, OwnCode::default());
    tracker.know(1, &frames(1));
    let mut sizes = vec![0; 40];
    // Forty lists of a few MiB each, every one made larger by an eighth when it is full.
    for tick in 1..=6000_u64 {
        let at = Duration::from_millis(10 * tick);
        for (place, size) in sizes.iter_mut().enumerate() {
            let needed = (tick + place as u64 * 7) * 1000;
            if needed > *size {
                if *size > 0 {
                    tracker.event(at, 1, *size, true, false);
                }
                *size = needed + needed / 8;
                tracker.event(at, 1, *size, false, false);
            }
        }
    }
    let report = judge(&mut tracker, Duration::from_secs(60), &NoFacts(Vec::new()), None);
    let site = &report.leaks[0];
    let truth = 40.0 * 6_000_000.0;
    assert_eq!(site.verdict, Verdict::Leak, "{site:?}");
    assert!((site.growth_bytes_per_min / truth - 1.0).abs() < 0.25, "{site:?}");
}

/// A leak that is spread over many stacks and allocating lines, none of which would be believed alone, is found by the line of own code.
#[test]
fn a_leak_in_many_stacks_is_one() {
    let mut random = Random(5);
    let end = 60.0;
    let mut tracker = Tracker::new(Weights::Period(PERIOD), 50, OwnCode::default());
    let library = |line| StackFrame {
        file: "/usr/lib/python3.12/traceback.py".into(),
        line,
        function: None,
    };
    for trace in 1..=30 {
        let mut stack = frames(1);
        stack.push(library(trace));
        tracker.know(trace, &stack);
    }
    for at in arrivals(&mut random, 1.0, 0.0, end) {
        let trace = 1 + (random.bits() % 30) as u32;
        tracker.event(Duration::from_secs_f64(at), trace, SIZE, false, false);
    }
    let report = judge(&mut tracker, Duration::from_secs(60), &NoFacts(Vec::new()), None);
    let leaks: Vec<_> = report
        .leaks
        .iter()
        .filter(|site| site.verdict == Verdict::Leak)
        .collect();
    assert_eq!(leaks.len(), 1);
    assert!(
        leaks[0].stacks > 20 && leaks[0].growth_bytes_per_min > 40.0 * PERIOD as f64,
        "{leaks:?}"
    );
    assert_eq!(report.verdict, Overall::Leak);
}

/// The process must grow as well, if its memory was recorded: what replaces older memory is no leak.
#[test]
fn a_process_that_does_not_grow_does_not_leak() {
    let mut random = Random(6);
    let lives = leaking(&mut random, 4.0, 60.0);
    let memory = |rate: f64| {
        let sample = |second: u64| MemorySample {
            rss: (1e8 + rate * second as f64) as u64,
            ..MemorySample::default()
        };
        (0..=60)
            .map(|second| (second * 1_000_000, sample(second)))
            .collect::<Vec<_>>()
    };
    let judged = |memory| {
        let mut tracker = Tracker::new(Weights::Period(PERIOD), 1, OwnCode::default());
        tracker.know(1, &frames(1));
        for (at, _) in &lives {
            tracker.event(Duration::from_secs_f64(*at), 1, SIZE, false, false);
        }
        judge(&mut tracker, Duration::from_secs(60), &NoFacts(memory), None)
    };
    let grows = judged(memory(500_000.0));
    assert_eq!((grows.verdict, grows.leaks[0].verdict), (Overall::Leak, Verdict::Leak));
    assert!((grows.rss_growth_bytes.unwrap() / 30e6 - 1.0).abs() < 0.01);
    let flat = judged(memory(0.0));
    assert_eq!(flat.verdict, Overall::NoLeak);
    assert!(
        flat.leaks[0].verdict != Verdict::Leak && flat.notes[0].contains("replaces"),
        "{flat:?}"
    );
    assert_eq!(judged(memory(50_000_000.0)).verdict, Overall::Native);
}
