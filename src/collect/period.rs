//! When to sample less: the cost of samples against the budget, the number of live ones against the table's room.
//!
//! The period only ever grows. Survivors of a coarse period cannot be made finer, so going back would mix samples of
//! several weights in one file, which neither format nor original reader knows.

use super::live::Live;
use std::time::Duration;

/// What a sample costs the target, its free and what it does to the caches included, and how much of that is each frame of its stack;
/// measured in real programs on the slowest machine, see docs/performance.md.
const SAMPLE_COST: Duration = Duration::from_nanos(3000);
const FRAME_COST: Duration = Duration::from_nanos(30);
/// Frames of a stack where that is not known.
const USUAL_DEPTH: f64 = 20.0;
/// What a piece of a stack costs it besides: 330 ns to copy 16 KiB, and caches that are as cold as the ring is long.
const PIECE_COST: Duration = Duration::from_nanos(1000);
/// The cost is judged over this time at least.
const WINDOW: Duration = Duration::from_secs(2);
/// A target that is mostly idle counts as using this share of a core: a burst after a pause is no overhead that one sees.
const LEAST_LOAD: f64 = 0.1;
/// The longest period.
pub const LONGEST: u64 = 64 << 20;
/// The period is raised when this share of the table is in use, so that half of it is.
const FULL: f64 = 0.75;

/// What may be changed, and why.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest share of the target's CPU time that samples may take; `None` = the period is fixed.
    pub max_overhead: Option<f64>,
    /// Most live samples.
    pub max_live: u64,
    /// Bit per allocator domain that is recorded.
    pub domains: u8,
    /// How many recordings share what pyheap itself may use: with many, each looks at its target less often.
    pub company: u32,
}

impl Limits {
    /// Longest pause between two looks at the ring, with this period: 100 ms, in company up to 200, which a ring of the usual size
    /// bridges at 4 GiB of allocations a second; with short periods down to 10 ms, which it bridges at a million samples a second and more.
    #[must_use]
    pub fn calm_pause(&self, period: u64) -> Duration {
        const SHORTEST: Duration = Duration::from_millis(10);
        const EACH: Duration = Duration::from_millis(20);
        const ALONE: Duration = Duration::from_millis(100);
        const LONGEST: Duration = Duration::from_millis(200);
        const FROM: u64 = 128 << 10;
        let share = (period as f64 / FROM as f64).min(1.0);
        let longest = EACH.saturating_mul(self.company).clamp(ALONE, LONGEST);
        longest.mul_f64(share).max(SHORTEST)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_overhead: None,
            max_live: pyheap_injector::region::Sizes::default().live_samples,
            domains: 7,
            company: 1,
        }
    }
}

/// Watches the cost.
#[derive(Debug)]
pub struct Watch {
    limits: Limits,
    since: Option<Seen>,
}

/// A moment.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Since the start of the recording.
    pub at: Duration,
    /// Samples so far, as the shim counts them.
    pub samples: u64,
    /// Those that have come here, and the frames of their stacks.
    pub walked: (u64, u64),
    /// Pieces of native stacks so far.
    pub pieces: u64,
    /// CPU time that the target has used so far.
    pub cpu: Duration,
}

impl Watch {
    /// Nothing seen yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, since: None }
    }

    /// The longer period that the cost since the last look asks for, if it does.
    pub fn by_cost(&mut self, now: Seen, period: u64) -> Option<(u64, String)> {
        let budget = self.limits.max_overhead?;
        let then = *self.since.get_or_insert(now);
        let wall = now.at.saturating_sub(then.at);
        if wall < WINDOW {
            return None;
        }
        self.since = Some(now);
        let samples = now.samples.saturating_sub(then.samples) as f64;
        let pieces = now.pieces.saturating_sub(then.pieces) as f64;
        let load = now.cpu.saturating_sub(then.cpu).as_secs_f64();
        let each = cost(depth(then.walked, now.walked)).as_secs_f64();
        let cost = samples * each + pieces * PIECE_COST.as_secs_f64();
        let share = cost / load.max(LEAST_LOAD * wall.as_secs_f64());
        let longer = at_least(period, |longer| share * period as f64 <= budget * longer as f64)?;
        let rate = samples / wall.as_secs_f64();
        let why = format!(
            "{rate:.0} samples a second would take up to {:.1} % of the target's time",
            100.0 * share
        );
        Some((longer, why))
    }

    /// The longer period that a table with `used` entries asks for, if it does.
    #[must_use]
    pub fn by_room(&self, used: u64, live: &Live) -> Option<(u64, String)> {
        if (used as f64) < FULL * self.limits.max_live as f64 {
            return None;
        }
        let room = self.limits.max_live as f64 / 2.0;
        // Each may be ahead of the other: the table has seen deaths that `live` has not, `live` was thinned before the table.
        let ahead = (used as f64 / live.len().max(1) as f64).min(1.0);
        let longer = at_least(live.period(), |period| live.survivors(period) * ahead <= room)?;
        Some((
            longer,
            format!(
                "{used} samples are alive, and there is room for {}",
                self.limits.max_live
            ),
        ))
    }
}

/// Frames of a stack, in the mean of the samples that have come between two moments.
fn depth(then: (u64, u64), now: (u64, u64)) -> f64 {
    match now.0.saturating_sub(then.0) {
        0 => USUAL_DEPTH,
        came => now.1.saturating_sub(then.1) as f64 / came as f64,
    }
}

/// What a sample of a stack of so many frames costs the target.
fn cost(depth: f64) -> Duration {
    SAMPLE_COST + FRAME_COST.mul_f64(depth)
}

/// The first of 2, 4, 8 … times `period` that is `enough`; `None` when `period` is enough, or as long as it can be.
fn at_least(period: u64, enough: impl Fn(u64) -> bool) -> Option<u64> {
    if period >= LONGEST || enough(period) {
        return None;
    }
    let mut longer = period.max(1);
    while longer < LONGEST {
        longer = longer.saturating_mul(2).min(LONGEST);
        if enough(longer) {
            break;
        }
    }
    Some(longer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::live::{Kind, Sample};

    fn seen(seconds: u64, samples: u64, cpu: f64) -> Seen {
        Seen {
            at: Duration::from_secs(seconds),
            samples,
            walked: (samples, 20 * samples),
            pieces: 0,
            cpu: Duration::from_secs_f64(cpu),
        }
    }

    #[test]
    fn the_period_grows_until_the_cost_is_within_the_budget() {
        let limits = Limits {
            max_overhead: Some(0.01),
            ..Limits::default()
        };
        let mut watch = Watch::new(limits);
        assert_eq!(watch.by_cost(seen(0, 0, 0.0), 131_072), None);
        // 2,500 samples a second, 20 frames each, are 0.9 % of a busy core.
        assert_eq!(watch.by_cost(seen(2, 5_000, 2.0), 131_072), None);
        // Too short to judge.
        assert_eq!(watch.by_cost(seen(3, 100_000, 3.0), 131_072), None);
        // 50,000 a second are 18 %: 32 times the period makes 0.56 %.
        let (longer, why) = watch.by_cost(seen(4, 105_000, 4.0), 131_072).unwrap();
        assert_eq!(longer, 4 << 20);
        assert_eq!(
            why,
            "50000 samples a second would take up to 18.0 % of the target's time"
        );
        // Never beyond the longest.
        assert_eq!(watch.by_cost(seen(6, 900_000_000, 6.0), 1 << 20).unwrap().0, LONGEST);
        assert_eq!(watch.by_cost(seen(8, 1_800_000_000, 8.0), LONGEST), None);
        // A nearly idle one is judged as one that uses a tenth of a core.
        assert_eq!(watch.by_cost(seen(10, 1_800_000_500, 8.001), 131_072), None);
        assert_eq!(Watch::new(Limits::default()).by_cost(seen(9, 1 << 40, 1.0), 1024), None);
    }

    /// Of 2,500 samples a second those of 100 frames are too much, those of 5 are not; where nothing has come yet the usual depth counts.
    #[test]
    fn a_deep_stack_costs_more() {
        let limits = Limits {
            max_overhead: Some(0.01),
            ..Limits::default()
        };
        let longer = |frames: u64| {
            let mut watch = Watch::new(limits);
            watch.by_cost(seen(0, 0, 0.0), 131_072);
            let now = Seen {
                walked: (1000, 1000 * frames),
                ..seen(2, 5_000, 2.0)
            };
            watch.by_cost(now, 131_072).map(|(period, _)| period)
        };
        assert_eq!((longer(5), longer(100)), (None, Some(262_144)));
        assert_eq!((depth((7, 140), (7, 140)), depth((7, 140), (9, 200))), (20.0, 30.0));
    }

    #[test]
    fn a_table_that_fills_halves() {
        let limits = Limits {
            max_live: 1000,
            ..Limits::default()
        };
        let watch = Watch::new(limits);
        let mut live = Live::new(131_072);
        for id in 1..=800 {
            let period = 131_072;
            let (trace, size) = (0, if id <= 300 { 1 << 20 } else { 100 });
            live.add(
                id,
                Sample {
                    trace,
                    size,
                    period,
                    born: 0,
                    address: 0,
                    kind: Kind::RAW_BUFFER,
                },
            );
        }
        assert_eq!(watch.by_room(700, &live), None);
        // The 300 large ones stay at first: 500 small ones must shrink below 200.
        assert_eq!(watch.by_room(800, &live).unwrap().0, 4 * 131_072);
    }

    #[test]
    fn what_only_one_of_the_two_has_seen_raises_nothing() {
        let watch = Watch::new(Limits {
            max_live: 1000,
            ..Limits::default()
        });
        let known = |period: u64, count: u64| {
            let mut live = Live::new(period);
            let (trace, size, born, address, kind) = (0, 100, 0, 0, Kind::RAW_BUFFER);
            let sample = Sample {
                trace,
                size,
                period,
                born,
                address,
                kind,
            };
            for id in 1..=count {
                live.add(id, sample);
            }
            live
        };
        // Half of 800 have room, however many deaths are still to be told of.
        for count in [800, 1000, 5000] {
            let (longer, _) = watch.by_room(800, &known(131_072, count)).unwrap();
            assert_eq!(longer, 2 * 131_072, "{count}");
        }
        // Births that are still to be told of are waited for.
        assert_eq!(watch.by_room(800, &known(131_072, 300)), None);
        // Already thinned, and the table not yet.
        assert_eq!(watch.by_room(800, &known(2 * 131_072, 400)), None);
    }

    #[test]
    fn short_periods_and_little_company_are_looked_at_more_often() {
        let pause = |company, period| {
            let limits = Limits {
                company,
                ..Limits::default()
            };
            limits.calm_pause(period).as_millis()
        };
        assert_eq!(pause(1, 128 << 10), 100);
        assert_eq!(pause(1, 64 << 20), 100);
        assert_eq!(pause(1, 64 << 10), 50);
        assert_eq!(pause(1, 1), 10);
        assert_eq!(pause(8, 128 << 10), 160);
        assert_eq!(pause(100, 128 << 10), 200);
        assert_eq!(pause(100, 1), 10);
    }
}
