//! How fast a group of traces grows, how sure that is, and whether it goes on. `docs/leaks.md` has the reasons.

use super::series::{Floors, Level};
use super::stats::{Z_975, normal_tail, poisson_factors, student_tail};

/// Fewer bins than these say nothing.
pub const MIN_BINS: usize = 24;
/// Floors are taken over this part of a recording: what lives shorter is not growth.
const LAG: usize = 8;
/// Growth is measured after this part: what fills up at first is not growth.
const WARM_UP: usize = 4;
/// Lengths of the blocks, in bins, whose scatter tells how much the program itself fluctuates.
const BLOCKS: [usize; 3] = [1, 2, 4];
/// Growth counts as going on if the last third has at least this part of the rate before.
const STILL: f64 = 0.5;
/// … and if of what is allocated at least this part of what was retained before is still retained.
const RETAINED: f64 = 0.75;
/// The most samples that can have been missed when none came, with 97.5 % confidence: -ln 0.025.
const UNSEEN: f64 = 3.69;

/// Growth of one group.
#[derive(Debug, Clone, PartialEq)]
pub struct Trend {
    /// Bytes a second.
    pub rate: f64,
    /// Its 95 % interval.
    pub interval: (f64, f64),
    /// The probability of such growth where nothing grows.
    pub p: f64,
    /// The smallest that `p` could have been, whatever the signs of the steps.
    pub least_p: f64,
    /// Bytes a second in the last third of the recording.
    pub last_third: f64,
    /// Whether growth goes on in the last third.
    pub goes_on: bool,
    /// Whether what is live was there early, or came at once, and stayed.
    pub came_at_once: bool,
    /// Whether most of what is live came in the first two thirds, and nearly nothing since.
    pub came_early: bool,
}

/// The growth of `floors`, bins of `width` seconds; `live` is what is live at the end, and `traffic` what the whole program had
/// allocated up to the end of each bin: a program that is held up grows unevenly in time, but not by its work. `None` if there
/// are too few bins.
pub fn trend(floors: &Floors, width: f64, live: &Level, traffic: &[f64]) -> Option<Trend> {
    let bins = floors.bytes.len();
    if bins < MIN_BINS || traffic.len() < bins {
        return None;
    }
    let lag = bins / LAG;
    let (level, variance) = lagged(floors, lag);
    let start = bins / WARM_UP;
    let last = bins - bins / 3;
    let steps: Vec<f64> = (start..bins).map(|bin| level[bin] - level[bin - 1]).collect();
    let (net, seconds) = (level[bins - 1] - level[start - 1], steps.len() as f64 * width);
    let sampling = (variance[bins - 1] - variance[start - 1]).abs();
    let total = spread(&steps).max(sampling);
    let squares: f64 = steps.iter().map(|step| step * step).sum();
    let absolute: f64 = steps.iter().map(|step| step.abs()).sum();
    let rate = net / seconds;
    let (late, early) = (level[bins - 1] - level[last - 1], level[last - 1] - level[start - 1]);
    let (late_steps, early_steps) = (&steps[last - start..], &steps[..last - start]);
    let least_p = if squares > 0.0 {
        (-absolute * absolute / squares).exp2()
    } else {
        1.0
    };
    // A step of the floor is what was added so much earlier.
    let work: Vec<f64> = (start..bins)
        .map(|bin| traffic[bin - lag] - traffic[bin - lag - 1])
        .collect();
    let p = probability(net, &steps, &work, sampling);
    let least_p = least_p.min(p);
    let early_rate = early / (early_steps.len() as f64 * width);
    let last_third = late / (late_steps.len() as f64 * width);
    let allocated = |from: usize, to: usize| floors.allocated[to - lag] - floors.allocated[from - lag];
    let worked = |from: usize, to: usize| work[from..to].iter().sum::<f64>();
    let all_work = worked(0, work.len());
    let part = Part {
        net: late,
        work: worked(last - start, work.len()),
        squares: late_steps.iter().map(|step| step * step).sum(),
        allocated: allocated(last - 1, bins - 1),
    };
    let before = Part {
        net: early,
        work: worked(0, last - start),
        squares: early_steps.iter().map(|step| step * step).sum(),
        allocated: allocated(start - 1, last - 1),
    };
    let tail = bins / 6;
    let tail_share = worked(work.len() - tail, work.len()) / all_work;
    let expected = STILL * net * tail_share.min(tail as f64 / steps.len() as f64);
    let tail_net = level[bins - 1] - level[bins - 1 - tail];
    let has_stopped = absolute > 0.0 && expected * absolute / squares >= 3.0 && tail_net <= 0.0;
    let goes_on = (last_third >= STILL * early_rate || part.net * before.work >= STILL * before.net * part.work)
        && part.is_growth()
        && !part.retains_less_than(&before)
        && !has_stopped;
    let end = level[bins - 1];
    let is_kept = end >= 0.5 * live.bytes && end > 0.0;
    let turned_over = floors.allocated[bins - 1];
    let largest = (1..bins)
        .map(|bin| level[bin] - level[bin - 1])
        .fold(level[0], f64::max);
    Some(Trend {
        rate,
        interval: interval(net, total, live).map(|bytes| bytes / seconds).into(),
        p,
        least_p,
        last_third,
        goes_on,
        came_at_once: is_kept && turned_over <= 2.0 * end && (level[start] >= 0.8 * end || largest >= 0.7 * end),
        came_early: is_kept && before.is_more_than(&part, early_steps.len() as f64 / late_steps.len() as f64),
    })
}

/// A part of the time.
struct Part {
    net: f64,
    /// What the program allocated.
    work: f64,
    squares: f64,
    /// What the group allocated.
    allocated: f64,
}

impl Part {
    /// Whether it grows by more than chance explains, at 10 %.
    fn is_growth(&self) -> bool {
        self.net > 0.0 && normal_tail(self.net / self.squares.sqrt()) < 0.1
    }

    /// Whether its growth is more than that of `other`, a part that is shorter by `ratio`, by more than chance explains.
    fn is_more_than(&self, other: &Self, ratio: f64) -> bool {
        let more = self.net - ratio * other.net;
        self.net > 0.0 && more > Z_975 * (self.squares + ratio * ratio * other.squares).sqrt()
    }

    /// Whether less of what is allocated stays than did `before`, by more than chance explains.
    fn retains_less_than(&self, before: &Self) -> bool {
        if before.allocated <= 0.0 || self.allocated <= 0.0 || before.net <= 0.0 {
            return false;
        }
        let scale = RETAINED * self.allocated / before.allocated;
        let missing = scale * before.net - self.net;
        missing > Z_975 * (self.squares + scale * scale * before.squares).sqrt()
    }
}

/// The probability of growth by `net` in these steps where nothing grows. Steps are taken as even in time, or as even in the
/// `work` that the program did, whatever fits better, at twice the probability for having had the choice.
fn probability(net: f64, steps: &[f64], work: &[f64], sampling: f64) -> f64 {
    if net <= 0.0 {
        return 1.0;
    }
    let count = steps.len() as f64;
    let one = |residuals: &[f64], evenness: f64| {
        let variance = spread(residuals);
        let squares = residuals.iter().map(|step| step * step).sum::<f64>() + net * net * evenness;
        let by_scatter = match variance.max(sampling) {
            0.0 => 0.0,
            variance => student_tail(net / variance.sqrt(), count - 1.0),
        };
        by_scatter.max((-net * net / squares).exp2())
    };
    let mean = net / count;
    let in_time: Vec<f64> = steps.iter().map(|step| step - mean).collect();
    let in_time = one(&in_time, 1.0 / count);
    let all: f64 = work.iter().sum();
    if all <= 0.0 {
        return in_time;
    }
    let in_work: Vec<f64> = steps
        .iter()
        .zip(work)
        .map(|(step, work)| step - net * work / all)
        .collect();
    let evenness = work.iter().map(|work| work * work).sum::<f64>() / (all * all);
    (2.0 * in_time.min(one(&in_work, evenness))).min(1.0)
}

/// The least of the last `lag` bins, for each bin, and its sampling variance.
fn lagged(floors: &Floors, lag: usize) -> (Vec<f64>, Vec<f64>) {
    let least = |bin: usize| {
        let first = (bin + 1).saturating_sub(lag.max(1));
        (first..=bin).min_by(|a, b| floors.bytes[*a].total_cmp(&floors.bytes[*b]))
    };
    (0..floors.bytes.len())
        .map(|bin| least(bin).map_or((0.0, 0.0), |at| (floors.bytes[at], floors.variance[at])))
        .unzip()
}

/// The variance of the sum of `steps`, each of them a step of the program as it was sampled: what a block bootstrap of them
/// tends to, for the block length at which it is largest.
pub fn spread(steps: &[f64]) -> f64 {
    let of_blocks = |len: usize| {
        let sums: Vec<f64> = steps.rchunks_exact(len).map(|block| block.iter().sum()).collect();
        let count = sums.len() as f64;
        if count < 2.0 {
            return 0.0;
        }
        let mean = sums.iter().sum::<f64>() / count;
        let squares: f64 = sums.iter().map(|sum| (sum - mean).powi(2)).sum();
        squares / (count - 1.0) * steps.len() as f64 / len as f64
    };
    BLOCKS.into_iter().map(of_blocks).fold(0.0, f64::max)
}

/// The 95 % interval of growth by `net` bytes with this variance. Growth that consists of a few samples is a Poisson
/// variable, whose interval is lopsided.
fn interval(net: f64, variance: f64, live: &Level) -> [f64; 2] {
    // What may have grown without a single sample having been taken of it.
    let unseen = if live.bytes > 0.0 {
        UNSEEN * live.variance / live.bytes
    } else {
        0.0
    };
    let margin = Z_975 * variance.sqrt();
    let count = net * net / variance;
    // Growth by less than four samples may as well be none.
    if net > 0.0 && count > Z_975 * Z_975 && count.is_finite() {
        let (low, high) = poisson_factors(count);
        return [net * low, (net * high).max(unseen)];
    }
    [(net - margin).min(net - unseen), (net + margin).max(net + unseen)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floors(levels: impl Iterator<Item = f64>) -> Floors {
        let bytes: Vec<f64> = levels.collect();
        Floors {
            variance: bytes.iter().map(|bytes| bytes * 100.0).collect(),
            allocated: (0..bytes.len()).map(|bin| 2000.0 * (bin + 1) as f64).collect(),
            bytes,
        }
    }

    fn of(levels: impl Iterator<Item = f64>) -> Trend {
        let floors = floors(levels);
        let bytes = *floors.bytes.last().unwrap();
        let live = Level {
            bytes,
            variance: bytes * 100.0,
            objects: 1.0,
            samples: 100,
        };
        trend(&floors, 2.0, &live, &floors.allocated).unwrap()
    }

    #[test]
    fn a_line_grows() {
        let line = of((0..60).map(|bin| 1000.0 * f64::from(bin)));
        assert!(
            (line.rate - 500.0).abs() < 1e-9 && line.goes_on && line.p < 1e-6,
            "{line:?}"
        );
        assert!(
            line.interval.0 < 500.0 && line.interval.1 > 500.0 && line.interval.0 > 300.0,
            "{line:?}"
        );
    }

    #[test]
    fn what_stops_does_not_go_on() {
        let filled = of((0..60).map(|bin| 1000.0 * f64::from(bin.min(24))));
        assert!(
            !filled.goes_on && filled.came_early && !filled.came_at_once,
            "{filled:?}"
        );
        let slower = of((0..60).map(|bin| 60_000.0 * (1.0 - (-f64::from(bin) / 15.0).exp())));
        assert!(!slower.goes_on, "{slower:?}");
    }

    #[test]
    fn what_comes_at_once_is_no_growth() {
        for jump in [0, 5, 30, 55] {
            let mut floors = floors((0..60).map(|bin| if bin >= jump { 1e6 } else { 0.0 }));
            floors.allocated = floors.bytes.clone();
            let live = Level {
                bytes: 1e6,
                ..Level::default()
            };
            let work: Vec<f64> = (0..60).map(f64::from).collect();
            let found = trend(&floors, 1.0, &live, &work).unwrap();
            assert!(found.p > 0.1, "{jump}: {found:?}");
            assert!(found.came_at_once || jump == 55, "{jump}: {found:?}");
        }
    }

    #[test]
    fn a_saw_is_no_growth() {
        for period in [9, 13, 20, 29] {
            let saw = of((0..60).map(|bin| 5000.0 + 1000.0 * f64::from(bin % period)));
            assert!(saw.p > 1e-3, "{period}: {saw:?}");
        }
    }

    #[test]
    fn too_short_says_nothing() {
        let short = floors((0..23).map(f64::from));
        assert_eq!(trend(&short, 1.0, &Level::default(), &short.allocated), None);
    }

    /// A program that stands still for a sixth of the time and then makes up for it at once.
    #[test]
    fn a_stall_is_no_reason_to_miss_a_leak() {
        let done = |bin: usize| if (30..40).contains(&bin) { 30 } else { bin } as f64;
        let mut floors = floors((0..60).map(|bin| 1000.0 * done(bin)));
        let work: Vec<f64> = (0..60).map(|bin| 1e6 * done(bin + 1)).collect();
        floors.allocated = work.iter().map(|work| work / 1000.0).collect();
        let live = Level {
            bytes: 60_000.0,
            ..Level::default()
        };
        let found = trend(&floors, 1.0, &live, &work).unwrap();
        assert!(found.goes_on && found.p < 1e-3, "{found:?}");
        let evenly: Vec<f64> = (0..60).map(f64::from).collect();
        assert!(trend(&floors, 1.0, &live, &evenly).unwrap().p >= found.p);
    }
}
