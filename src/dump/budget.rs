//! A limit on the work that a target can make us do, in processor time: on a busy machine the wall clock says nothing.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Ends when this thread has used so much more processor time.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    end: Option<Duration>,
}

fn used() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok().map(Duration::from)
}

impl Budget {
    /// `allowed` from now on.
    #[must_use]
    pub fn of(allowed: Duration) -> Self {
        Self {
            end: used().and_then(|now| now.checked_add(allowed)),
        }
    }

    /// True when it is used up.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.end.is_some_and(|end| used().is_some_and(|now| now > end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_spends_it() {
        let budget = Budget::of(Duration::from_millis(2));
        let mut sum = 0_u64;
        while !budget.is_spent() {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0);
        assert!(!Budget::of(Duration::from_secs(3600)).is_spent());
    }
}
