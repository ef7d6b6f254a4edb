//! What happens to a group of stacks from moment to moment, in few bytes.
//!
//! A group has five running sums of what was added and five of what went: bytes, objects, samples, and the variances of the
//! first two. What is alive is their difference. Only moments at which something has changed are kept.
//!
//! Encoded (all numbers are unsigned LEB128): the exponents of the units of both variances, plus 1024; the number of cells;
//! for each cell 4 × the moments since the cell before (the first: since moment 0), plus 1 if something was added, plus 2 if
//! something went; then five whole numbers for each of these, by which the sums have grown. Bytes are bytes, objects are 256ths, samples are samples,
//! variances are in powers of two. It is the running sums that are rounded, so that no value is off by more than one. Variances are
//! rounded up: an error is never told to be smaller than it is.

use crate::profile::model::Live;

/// Units of an object.
pub const OBJECT_PARTS: f64 = 256.0;
/// A variance is told in parts of the largest that one sample of the group has.
const VARIANCE_PARTS: f64 = 65_536.0;
/// Exponents are written with this added.
const BIAS: i32 = 1024;
/// No sum is above this: a browser's numbers are exact up to there, and a damaged file may say anything.
const LARGEST: f64 = (1u64 << 52) as f64;

type Sums = [f64; 5];

/// The sums at a moment, and up to the next cell.
#[derive(Debug, Clone, Copy)]
struct Cell {
    moment: u32,
    added: Sums,
    gone: Sums,
}

/// One group.
#[derive(Debug, Clone, Default)]
pub struct Series {
    cells: Vec<Cell>,
    added: Sums,
    gone: Sums,
    largest: [f64; 2],
}

impl Series {
    /// A stack of the group was in the first state, and is in the second from this moment on.
    pub fn change(&mut self, moment: u32, before: &Live, after: &Live) {
        let values = |live: &Live| {
            [
                live.bytes,
                live.objects,
                live.sampled as f64,
                live.bytes_variance,
                live.objects_variance,
            ]
        };
        let (before, after) = (values(before), values(after));
        for place in 0..5 {
            let change = after[place] - before[place];
            let sum = if change > 0.0 { &mut self.added } else { &mut self.gone };
            sum[place] += change.abs();
            if place >= 3 {
                self.largest[place - 3] = self.largest[place - 3].max(change.abs());
            }
        }
        let cell = Cell {
            moment,
            added: self.added,
            gone: self.gone,
        };
        match self.cells.last_mut() {
            Some(last) if last.moment == moment => *last = cell,
            _ => self.cells.push(cell),
        }
    }

    /// Moments at which something has changed.
    pub fn cell_count(&self) -> usize {
        self.cells.len()
    }

    /// Bytes that are alive in the end.
    pub fn live_bytes(&self) -> f64 {
        (self.added[0] - self.gone[0]).max(0.0)
    }

    /// Appends it to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let exponents = self.largest.map(exponent);
        for exponent in exponents {
            put(out, (exponent + BIAS).unsigned_abs().into());
        }
        let units = [
            1.0,
            1.0 / OBJECT_PARTS,
            1.0,
            f64::from(exponents[0]).exp2(),
            f64::from(exponents[1]).exp2(),
        ];
        put(out, self.cells.len() as u64);
        let (mut moment, mut added, mut gone) = (0, [0; 5], [0; 5]);
        for cell in &self.cells {
            let (mut plus, mut minus) = ([0; 5], [0; 5]);
            for place in 0..5 {
                let is_variance = place >= 3;
                let round = if is_variance { whole_up } else { whole };
                let has_samples = cell.added[2] > cell.gone[2];
                let left = if is_variance && !has_samples {
                    0
                } else {
                    round((cell.added[place] - cell.gone[place]) / units[place])
                };
                // What is left is exact, and neither sum ever falls.
                let all = round(cell.added[place] / units[place]).max(added[place]);
                let lost = all.saturating_sub(left).max(gone[place]);
                let all = left + lost;
                (plus[place], minus[place]) = (all - added[place], lost - gone[place]);
                (added[place], gone[place]) = (all, lost);
            }
            let is_any = |change: &[u64; 5]| change.iter().any(|value| *value > 0);
            let kinds = u64::from(is_any(&plus)) + 2 * u64::from(is_any(&minus));
            put(out, u64::from(cell.moment - moment) * 4 + kinds);
            for change in [plus, minus].iter().filter(|change| is_any(change)) {
                change.iter().for_each(|value| put(out, *value));
            }
            moment = cell.moment;
        }
    }
}

/// Of the unit in which the largest variance of a sample is some thousands.
fn exponent(largest: f64) -> i32 {
    if largest > 0.0 && largest.is_finite() {
        (largest / VARIANCE_PARTS).log2().ceil().clamp(-1000.0, 1000.0) as i32
    } else {
        0
    }
}

/// At least the value, but for what sums of rounded numbers leave over.
fn whole_up(value: f64) -> u64 {
    (value - 1e-6).clamp(0.0, LARGEST).ceil() as u64
}

fn whole(value: f64) -> u64 {
    value.clamp(0.0, LARGEST).round() as u64
}

/// Appends a number of any size: seven bits a byte, the lowest first.
pub fn put(out: &mut Vec<u8>, mut value: u64) {
    while value > 127 {
        out.push(value as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Reads what [`put`] has written.
    pub(crate) fn get(bytes: &mut &[u8]) -> u64 {
        let mut value = 0u64;
        for shift in (0..).step_by(7) {
            let (byte, rest) = bytes.split_first().expect("there is more");
            *bytes = rest;
            value |= u64::from(byte & 127) << shift;
            if *byte < 128 {
                return value;
            }
        }
        value
    }

    /// One group as a browser reads it: for each cell its moment, and what is alive then: bytes, objects, samples and the
    /// two variances.
    pub(crate) fn decode(bytes: &mut &[u8]) -> Vec<(u64, [f64; 5])> {
        let exponents = [get(bytes), get(bytes)].map(|exponent| (exponent as f64 - 1024.0).exp2());
        let units = [1.0, 1.0 / 256.0, 1.0, exponents[0], exponents[1]];
        let (mut moment, mut sums) = (0, [0.0; 5]);
        let count = get(bytes);
        (0..count)
            .map(|_| {
                let head = get(bytes);
                moment += head / 4;
                for (bit, sign) in [(1, 1.0), (2, -1.0)] {
                    if head & bit != 0 {
                        for (sum, unit) in sums.iter_mut().zip(units) {
                            *sum += sign * unit * get(bytes) as f64;
                        }
                    }
                }
                (moment, sums)
            })
            .collect()
    }

    #[test]
    fn what_is_written_is_what_was_counted() {
        let one = Live {
            bytes: 131_104.4,
            objects: 2048.5,
            bytes_variance: 1.7e10,
            objects_variance: 4.2e6,
            sampled: 1,
            ..Live::default()
        };
        let times = |count: f64| Live {
            bytes: count * one.bytes,
            objects: count * one.objects,
            bytes_variance: count * one.bytes_variance,
            objects_variance: count * one.objects_variance,
            sampled: count as u64,
            ..Live::default()
        };
        let mut series = Series::default();
        let mut alive = 0;
        for (moment, count) in [(0, 3), (2, 4), (2, 2), (9, 1000), (10, 0)] {
            while alive != count {
                let next = if alive < count { alive + 1 } else { alive - 1 };
                series.change(moment, &times(f64::from(alive)), &times(f64::from(next)));
                alive = next;
            }
        }
        let mut bytes = Vec::new();
        series.encode(&mut bytes);
        let mut rest = &bytes[..];
        let found = decode(&mut rest);
        assert!(rest.is_empty());
        assert_eq!(found.len(), 4);
        for ((moment, values), (at, count)) in found.iter().zip([(0, 3.0), (2, 2.0), (9, 1000.0), (10, 0.0)]) {
            let live = times(count);
            assert_eq!((*moment, values[2]), (at, count));
            assert!((values[0] - live.bytes).abs() <= 1.0 && (values[1] - live.objects).abs() <= 1.0 / 256.0);
            for (value, true_value) in [(values[3], live.bytes_variance), (values[4], live.objects_variance)] {
                assert!((value - true_value).abs() <= true_value * 1e-3, "{value} {true_value}");
            }
        }
        assert_eq!(found[3].1, [0.0; 5], "nothing left is nothing");
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let huge = Live {
            bytes: 1e300,
            objects: f64::MAX,
            bytes_variance: f64::INFINITY,
            objects_variance: 1e-300,
            sampled: u64::MAX,
            ..Live::default()
        };
        let mut series = Series::default();
        series.change(1, &Live::default(), &huge);
        series.change(2, &huge, &Live::default());
        let mut bytes = Vec::new();
        series.encode(&mut bytes);
        let found = decode(&mut &bytes[..]);
        assert!(
            found
                .iter()
                .all(|(_, values)| values[..3].iter().all(|value| *value <= LARGEST))
        );
        assert_eq!(found[1].1[0], 0.0);
    }
}
