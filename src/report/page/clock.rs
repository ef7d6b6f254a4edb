//! The moments of a recording between which a reader of the page can choose.

use std::time::Duration;

/// Distances of moments, in milliseconds, that people like to read; above the last, whole days.
const WIDTHS: [u64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, 3_600_000, 7_200_000, 21_600_000, 86_400_000,
];
const DAY: u64 = 86_400_000_000;

/// Moments 0, w, 2w … and the end of the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Distance of moments, in microseconds.
    pub width: u64,
    /// The number of the last moment, which is the end.
    pub last: u32,
    /// The end, in microseconds.
    pub end: u64,
}

impl Clock {
    /// The closest moments of which there are at most `most` after the first.
    pub fn new(elapsed: Duration, most: u32) -> Self {
        let end = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        let fits = |width: &u64| end.div_ceil(*width) <= u64::from(most);
        let width = WIDTHS.iter().map(|millis| millis * 1000).find(fits);
        let width = width.unwrap_or_else(|| end.div_ceil(u64::from(most)).div_ceil(DAY).saturating_mul(DAY));
        let last = u32::try_from(end.div_ceil(width)).unwrap_or(most).max(1);
        Self { width, last, end }
    }

    /// The first moment that has seen what happened at this time.
    pub fn moment(&self, at: Duration) -> u32 {
        let micros = u64::try_from(at.as_micros()).unwrap_or(u64::MAX);
        u32::try_from(micros.div_ceil(self.width)).map_or(self.last, |moment| moment.min(self.last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_round_and_few() {
        let clock = |millis, most| Clock::new(Duration::from_millis(millis), most);
        assert_eq!((clock(60_000, 240).width, clock(60_000, 240).last), (500_000, 120));
        assert_eq!((clock(60_001, 60).width, clock(60_001, 60).last), (2_000_000, 31));
        assert_eq!((clock(0, 60).last, clock(0, 60).end), (1, 0));
        for elapsed in [Duration::from_secs(86_400 * 3650), Duration::MAX] {
            let clock = Clock::new(elapsed, 60);
            assert!(
                clock.last <= 60 && clock.moment(Duration::MAX) == clock.last,
                "{clock:?}"
            );
        }
    }

    /// As `--at` has it: what happens at a moment belongs to it.
    #[test]
    fn a_moment_has_seen_its_own_time() {
        let clock = Clock::new(Duration::from_secs(10), 10);
        let at = |micros| clock.moment(Duration::from_micros(micros));
        assert_eq!(
            [at(0), at(1), at(1_000_000), at(1_000_001), at(10_000_000)],
            [0, 1, 1, 2, 10]
        );
    }
}
