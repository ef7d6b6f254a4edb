//! What the kernel says of the process: how fast it grows, and when it hits its limit.

use std::time::Duration;

use serde::Serialize;

use super::stats::student_tail;
use super::trend::spread;
use crate::profile::facts::MemorySample;

/// The time is cut into this many parts, and of each the least is taken: what comes and goes is no growth.
const PARTS: usize = 20;
/// Growth is measured after this part of the time.
const WARM_UP: usize = 10;
/// Every third of the rest must have this part of the rate, for growth to count as steady.
const EVEN: f64 = 0.4;
/// Slower growth than this, in bytes a second, is not worth a word: 512 KiB a minute.
const LEAST_RATE: f64 = 524_288.0 / 60.0;
/// … nor is what takes longer than this to grow by the size of the process: 500 minutes.
const LEAST_SHARE: f64 = 1.0 / 30_000.0;
/// The two-sided 95 % point of Student's t with 17 degrees of freedom, which is what [`PARTS`] leaves.
const T_975: f64 = 2.110;

/// Growth of a process, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessTrend {
    /// The rate.
    pub rate: f64,
    /// Its 95 % interval.
    pub interval: (f64, f64),
    /// Whether it is growth beyond chance, steady, and enough to be worth a word.
    pub is_growth: bool,
}

/// What a process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// Whether it was read from the memory cgroup (else the user gave it).
    pub is_cgroup: bool,
}

/// When a limit is hit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Forecast {
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// `cgroup` or `given`.
    pub source: &'static str,
    /// What counts against it at the end of the recording, in bytes.
    pub used_bytes: u64,
    /// Seconds from the end of the recording until it is hit; `None` if nothing grows.
    pub seconds: Option<f64>,
    /// 95 % interval of that; the upper end is `None` if it may never be.
    pub ci95: Option<(f64, Option<f64>)>,
}

/// The memory that is the process's own: anonymous and shared pages, in memory or swapped out, without those of files and of
/// pyheap's shim.
pub fn own_bytes(sample: &MemorySample) -> f64 {
    let without_files = sample.file.map(|file| sample.rss.saturating_sub(file));
    let resident = without_files.or(sample.anon).unwrap_or(sample.rss);
    resident
        .saturating_add(sample.swap.unwrap_or(0))
        .saturating_sub(sample.pyheap.unwrap_or(0)) as f64
}

/// Resident set, without the pages of pyheap's shim.
pub fn resident_bytes(sample: &MemorySample) -> f64 {
    sample.rss.saturating_sub(sample.pyheap.unwrap_or(0)) as f64
}

/// How `value` of the samples (microseconds since the start first) grows. `None` if there are too few.
pub fn process_trend(
    samples: &[(u64, MemorySample)],
    elapsed: Duration,
    value: impl Fn(&MemorySample) -> f64,
) -> Option<ProcessTrend> {
    let end = elapsed.as_micros().max(1);
    let mut floors: Vec<Option<f64>> = vec![None; PARTS];
    for (at, sample) in samples {
        let part = (u128::from(*at) * PARTS as u128 / end).min(PARTS as u128 - 1) as usize;
        let value = value(sample);
        floors[part] = Some(floors[part].map_or(value, |least| least.min(value)));
    }
    let seen = floors.iter().flatten().count();
    if seen < 8 {
        return None;
    }
    // A part without a sample is as the one before.
    let mut last = floors.iter().flatten().next().copied()?;
    let floors: Vec<f64> = floors
        .into_iter()
        .map(|floor| {
            last = floor.unwrap_or(last);
            last
        })
        .collect();
    // Two parts together, so that what comes and goes is not there in one of them at least.
    let floors: Vec<f64> = (0..PARTS)
        .map(|part| floors[part].min(floors[part.saturating_sub(1)]))
        .collect();
    let start = PARTS / WARM_UP;
    let steps: Vec<f64> = (start..PARTS).map(|part| floors[part] - floors[part - 1]).collect();
    let seconds = elapsed.as_secs_f64() * steps.len() as f64 / PARTS as f64;
    let net: f64 = steps.iter().sum();
    let (rate, margin) = (net / seconds, T_975 * spread(&steps).sqrt() / seconds);
    let third = steps.len() / 3;
    let is_even = steps
        .chunks(third)
        .all(|steps| steps.iter().sum::<f64>() >= EVEN * net / 3.0);
    let p = student_tail(rate / (margin / T_975), steps.len() as f64 - 1.0);
    let is_growth = net > 0.0 && p < 0.025 && is_even && rate >= LEAST_RATE && rate >= LEAST_SHARE * last;
    Some(ProcessTrend {
        rate,
        interval: (rate - margin, rate + margin),
        is_growth,
    })
}

/// When `limit` is hit at a rate of growth (bytes a second) with its interval.
pub fn forecast(limit: Limit, last: &MemorySample, growth: Option<(f64, (f64, f64))>) -> Forecast {
    let used = if limit.is_cgroup {
        last.cgroup.unwrap_or(last.rss)
    } else {
        last.rss
    };
    let room = limit.bytes.saturating_sub(used) as f64;
    let growth = growth.filter(|(rate, _)| *rate > 0.0);
    Forecast {
        limit_bytes: limit.bytes,
        source: if limit.is_cgroup { "cgroup" } else { "given" },
        used_bytes: used,
        seconds: growth.map(|(rate, _)| room / rate),
        ci95: growth.map(|(_, (low, high))| (room / high, (low > 0.0).then(|| room / low))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(rss: impl Fn(u64) -> f64) -> Vec<(u64, MemorySample)> {
        let sample = |second: u64| MemorySample {
            rss: rss(second) as u64,
            ..MemorySample::default()
        };
        (0..=60).map(|second| (second * 1_000_000, sample(second))).collect()
    }

    fn of(rss: impl Fn(u64) -> f64) -> ProcessTrend {
        process_trend(&samples(rss), Duration::from_secs(60), own_bytes).unwrap()
    }

    const MIB: f64 = 1_048_576.0;

    #[test]
    fn steps_of_eight_megabytes_between_buffers_that_come_and_go() {
        let found = of(|second| (100.0 + 8.0 * (second / 10) as f64 + 8.0 * (second % 3) as f64) * MIB);
        assert!(found.is_growth, "{found:?}");
        assert!((found.rate * 60.0 / MIB - 48.0).abs() < 12.0, "{found:?}");
        assert!(found.interval.0 > 0.0 && found.interval.0 < found.rate && found.rate < found.interval.1);
    }

    #[test]
    fn what_has_stopped_or_sways_is_no_growth() {
        assert!(!of(|second| (100.0 + second.min(35) as f64) * MIB).is_growth);
        assert!(!of(|second| (100.0 + (second % 7) as f64) * MIB).is_growth);
        assert!(!of(|second| if second < 30 { 100.0 } else { 160.0 } * MIB).is_growth);
        assert!(!of(|_| 100.0 * MIB).is_growth);
        assert_eq!(process_trend(&[], Duration::from_secs(60), own_bytes), None);
        assert_eq!(
            process_trend(&samples(|_| 1.0)[..5], Duration::from_secs(60), own_bytes),
            None
        );
    }

    #[test]
    fn forecasts() {
        let last = MemorySample {
            rss: 100,
            cgroup: Some(400),
            ..MemorySample::default()
        };
        let limit = |is_cgroup| Limit { bytes: 1000, is_cgroup };
        let given = forecast(limit(false), &last, Some((9.0, (5.0, 10.0))));
        assert_eq!((given.seconds, given.ci95), (Some(100.0), Some((90.0, Some(180.0)))));
        let cgroup = forecast(limit(true), &last, Some((6.0, (-1.0, 12.0))));
        assert_eq!((cgroup.seconds, cgroup.ci95), (Some(100.0), Some((50.0, None))));
        assert_eq!(forecast(limit(true), &last, Some((-6.0, (-7.0, -5.0)))).seconds, None);
    }
}
