//! A quantity over the whole time in a bounded number of values: when there are too many, every second one goes and the
//! steps between them double. All series of a view share one [`Clock`].

use std::time::Duration;

/// Values of a series at most.
pub const MAX: usize = 128;

/// The moments of all series.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    moments: Vec<Duration>,
    /// Time between two of them.
    step: Duration,
    next: Duration,
    pending: Option<Duration>,
}

impl Clock {
    /// Whether a value is due now. If so, push one to every series, and then call [`Clock::pushed`].
    pub fn tick(&mut self, at: Duration) -> bool {
        if self.step.is_zero() {
            self.step = Duration::from_secs(1);
        }
        let is_due = at >= self.next;
        self.pending = is_due.then_some(at);
        is_due
    }

    /// Whether every second value has to go before the next.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.moments.len() >= MAX
    }

    /// All series have the value that was due.
    pub fn pushed(&mut self) {
        let Some(at) = self.pending.take() else { return };
        if self.is_full() {
            halve(&mut self.moments, 0);
            self.step *= 2;
        }
        self.moments.push(at);
        self.next = at + self.step;
    }

    /// Values of a series that has been there from the beginning, up to this time.
    #[must_use]
    pub fn count_until(&self, until: Duration) -> usize {
        self.moments.partition_point(|moment| *moment <= until)
    }
}

/// One quantity.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// The place of its first value among the moments.
    first: usize,
    values: Vec<f32>,
}

impl Series {
    /// One that begins with the next moment.
    #[must_use]
    pub fn new(clock: &Clock) -> Self {
        Self {
            first: clock.moments.len(),
            values: Vec::new(),
        }
    }

    /// Adds the value of the next moment; `is_full` as the clock says.
    pub fn push(&mut self, value: f64, is_full: bool) {
        if is_full {
            halve(&mut self.values, self.first);
            self.first = self.first.div_ceil(2);
        }
        self.values.push(value as f32);
    }

    /// The last value.
    #[must_use]
    pub fn last(&self) -> f64 {
        self.values.last().copied().unwrap_or(0.0).into()
    }

    /// All values, from the first moment on.
    #[must_use]
    pub fn values(&self, clock: &Clock) -> Vec<f64> {
        let mut values = vec![0.0; clock.moments.len()];
        self.add_to(&mut values);
        values
    }

    /// Adds its values to those of others; what is beyond their end is left out.
    pub fn add_to(&self, sum: &mut [f64]) {
        let sums = sum.iter_mut().skip(self.first);
        for (sum, value) in sums.zip(&self.values) {
            *sum += f64::from(*value);
        }
    }
}

/// Of values that begin at place `first`, leaves those at even places.
fn halve<T>(values: &mut Vec<T>, first: usize) {
    let mut place = first;
    values.retain(|_| {
        place += 1;
        place % 2 == 1
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two series of the time itself, one from the beginning and one from second 77 on, for an hour.
    #[test]
    fn series_stay_aligned_and_bounded() {
        let mut clock = Clock::default();
        let (mut whole, mut late) = (Series::default(), None);
        for second in 0..3600_u64 {
            let at = Duration::from_secs(second);
            if second == 77 {
                late = Some(Series::new(&clock));
            }
            if clock.tick(at) {
                let is_full = clock.is_full();
                for series in [Some(&mut whole), late.as_mut()].into_iter().flatten() {
                    series.push(second as f64, is_full);
                }
                clock.pushed();
            }
            let values = whole.values(&clock);
            let moments: Vec<f64> = clock.moments.iter().map(Duration::as_secs_f64).collect();
            assert!(values.len() <= MAX && values == moments, "{second}");
            if let Some(late) = &late {
                let expected: Vec<f64> = moments.iter().map(|&at| if at >= 77.0 { at } else { 0.0 }).collect();
                assert_eq!(late.values(&clock), expected, "{second}");
            }
        }
        assert!(clock.moments.len() > MAX / 2 - 1);
        assert_eq!(clock.count_until(Duration::from_secs(0)), 1);
    }
}
