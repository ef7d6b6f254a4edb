//! When to attach: as soon as a process has so much memory, or has grown by so much in so long.

use crate::report::human::{Human, bytes};
use std::collections::VecDeque;
use std::time::Duration;

/// A window is kept in so many steps.
const STEPS: u32 = 600;
/// Looks are at least so far apart.
const LEAST_STEP: Duration = Duration::from_millis(250);

/// What is waited for. Either is enough.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Condition {
    /// Resident memory, in bytes.
    pub rss: Option<u64>,
    /// Growth of it in bytes, within a time.
    pub growth: Option<(u64, Duration)>,
}

impl Condition {
    /// True if there is nothing to wait for.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.rss.is_none() && self.growth.is_none()
    }

    /// How far apart looks should be.
    #[must_use]
    pub fn step(&self) -> Duration {
        let step = self.growth.map_or(Duration::from_secs(1), |(_, window)| window / STEPS);
        step.clamp(LEAST_STEP, Duration::from_secs(10))
    }
}

/// Watches one process.
#[derive(Debug, Clone)]
pub struct Watch {
    condition: Condition,
    /// Memory at moments within the window, the oldest first; only such as are smaller than all that came later.
    least: VecDeque<(Duration, u64)>,
}

impl Watch {
    /// Nothing seen yet.
    #[must_use]
    pub fn new(condition: Condition) -> Self {
        Self {
            condition,
            least: VecDeque::new(),
        }
    }

    /// At time `at` it had `rss` bytes: why it is time, if it is.
    pub fn see(&mut self, at: Duration, rss: u64) -> Option<String> {
        if let Some(limit) = self.condition.rss
            && rss >= limit
        {
            return Some(format!("it has {}", bytes(rss as f64)));
        }
        let (growth, window) = self.condition.growth?;
        while self.least.back().is_some_and(|(_, then)| *then >= rss) {
            self.least.pop_back();
        }
        self.least.push_back((at, rss));
        while self
            .least
            .front()
            .is_some_and(|(then, _)| at.saturating_sub(*then) > window)
        {
            self.least.pop_front();
        }
        let &(then, least) = self.least.front()?;
        let grown = rss.saturating_sub(least);
        (grown >= growth).then(|| {
            let time = at.saturating_sub(then);
            // Fractions only of the first second.
            let fraction = if time.as_secs() == 0 { time.subsec_millis() } else { 0 };
            let time = Human(Duration::new(time.as_secs(), fraction * 1_000_000));
            format!("it has grown by {} in {time}", bytes(grown as f64))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn growth_counts_from_the_least_of_the_window() {
        let growth = Some((100 * MIB, Duration::from_secs(600)));
        let mut watch = Watch::new(Condition { rss: None, growth });
        let mut see = |at: u64, mib: u64| watch.see(Duration::from_secs(at), mib * MIB).is_some();
        assert!(!see(0, 500));
        // It has shrunk meanwhile: growth counts from there.
        assert!(!see(10, 450));
        assert!(!see(20, 549));
        assert!(see(30, 550));
        // What was ten minutes ago counts no more.
        assert!(!see(700, 600));
        assert!(!see(1400, 690));
        assert!(see(1500, 790));
    }

    #[test]
    fn a_quick_growth_has_its_milliseconds() {
        let growth = Some((MIB, Duration::from_secs(1)));
        let mut watch = Watch::new(Condition { rss: None, growth });
        assert_eq!(watch.see(Duration::ZERO, MIB), None);
        let why = watch.see(Duration::from_micros(200_900), 3 * MIB);
        assert_eq!(why.as_deref(), Some("it has grown by 2.0 MiB in 200ms"));
    }

    #[test]
    fn size_is_enough_by_itself() {
        let rss = Some(3 << 30);
        let mut watch = Watch::new(Condition { rss, growth: None });
        assert_eq!(watch.see(Duration::ZERO, (3 << 30) - 1), None);
        assert_eq!(watch.see(Duration::ZERO, 3 << 30).as_deref(), Some("it has 3.0 GiB"));
    }
}
