//! 95 % intervals of estimated bytes.
//!
//! From [`MANY`] samples on the estimate is normal enough: ± 1.96 standard deviations. Below that the distribution is lopsided,
//! and the interval is the exact one of the Poisson distribution, which weighted samples are fitted to by their first two
//! moments (Fay and Feuer 1997): of an estimate `y` with variance `v` the lower limit is that of the gamma distribution
//! with this mean and variance, the upper one that of the estimate with one more sample of weight R, which covers what may
//! be there unseen. With one weight this is Garwood's exact interval; with no sample at all it is an upper bound of
//! 3.69 R, whatever the sizes, since no mark falls on B bytes with probability e^(-B/R). `docs/sampling.md` has the maths.

use std::collections::HashMap;

/// Samples from which on the normal approximation is used.
pub const MANY: u64 = 100;
/// Standard deviations of a two-sided 95 % interval.
const Z: f64 = 1.959_963_984_540_054;
/// Probability in each tail.
const TAIL: f64 = 0.025;

/// The limits of a 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The lower limit.
    pub low: f64,
    /// The upper limit.
    pub high: f64,
}

/// The interval of a total that is estimated as `bytes` with this variance from so many samples, at this period. Period 1
/// records everything: there is no error.
pub fn of_bytes(bytes: f64, variance: f64, samples: u64, period_bytes: u64) -> Interval {
    if period_bytes <= 1 {
        return Interval {
            low: bytes,
            high: bytes,
        };
    }
    if samples >= MANY {
        let margin = Z * variance.max(0.0).sqrt();
        return Interval {
            low: (bytes - margin).max(0.0),
            high: bytes + margin,
        };
    }
    let unseen = period_bytes as f64;
    Interval {
        low: gamma_limit(bytes, variance, TAIL),
        high: gamma_limit(bytes + unseen, variance + unseen * unseen, 1.0 - TAIL),
    }
}

/// The quantile of the gamma distribution with this mean and variance.
fn gamma_limit(mean: f64, variance: f64, probability: f64) -> f64 {
    if mean <= 0.0 {
        return 0.0;
    }
    // Of blocks that are certain to be seen nothing varies.
    let scale = variance / mean;
    let shape = mean / scale;
    if !shape.is_finite() || shape > 1e7 {
        return mean;
    }
    scale * quantile(shape, probability)
}

/// Limits for many rows: equal shapes are computed once.
#[derive(Debug, Default)]
pub struct Cache(HashMap<(u64, u64, u64), Interval>);

impl Cache {
    /// As [`of_bytes`].
    pub fn of_bytes(&mut self, bytes: f64, variance: f64, samples: u64, period_bytes: u64) -> Interval {
        let key = (bytes.to_bits(), variance.to_bits(), samples);
        *self
            .0
            .entry(key)
            .or_insert_with(|| of_bytes(bytes, variance, samples, period_bytes))
    }
}

/// The value below which a gamma variable of this shape and scale 1 lies with this probability, to about 1e-9 of itself.
fn quantile(shape: f64, probability: f64) -> f64 {
    let (mut low, mut high) = (0.0, shape + 10.0 * shape.sqrt() + 20.0);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if high - low <= 1e-10 * high {
            break;
        }
        if cumulative(shape, middle) < probability {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// P(shape, x), the regularised lower incomplete gamma function: by its series below the mean, else by the continued
/// fraction of its complement (Abramowitz and Stegun 6.5.29 and 6.5.31).
fn cumulative(shape: f64, x: f64) -> f64 {
    const ENOUGH: f64 = 1e-14;
    const MAX_TERMS: u32 = 100_000;
    if x <= 0.0 {
        return 0.0;
    }
    let front = (shape * x.ln() - x - ln_gamma(shape)).exp();
    if x < shape + 1.0 {
        let (mut term, mut sum, mut n) = (1.0 / shape, 1.0 / shape, shape);
        for _ in 0..MAX_TERMS {
            n += 1.0;
            term *= x / n;
            sum += term;
            if term < sum * ENOUGH {
                break;
            }
        }
        return (front * sum).min(1.0);
    }
    // Lentz's method.
    const TINY: f64 = 1e-300;
    let mut b = x + 1.0 - shape;
    let (mut c, mut d) = (1.0 / TINY, 1.0 / b);
    let mut fraction = d;
    for i in 1..MAX_TERMS {
        let a = -f64::from(i) * (f64::from(i) - shape);
        b += 2.0;
        d = a * d + b;
        d = if d.abs() < TINY { TINY } else { d }.recip();
        c = b + a / c;
        if c.abs() < TINY {
            c = TINY;
        }
        let step = d * c;
        fraction *= step;
        if (step - 1.0).abs() < ENOUGH {
            break;
        }
    }
    (1.0 - front * fraction).max(0.0)
}

/// ln Γ(x) for x > 0, by Stirling's series from 10 on and the recurrence below it.
fn ln_gamma(x: f64) -> f64 {
    let mut x = x;
    let mut below = 0.0;
    while x < 10.0 {
        below += x.ln();
        x += 1.0;
    }
    let y = 1.0 / (x * x);
    let series = (1.0 / 12.0 - y * (1.0 / 360.0 - y * (1.0 / 1260.0 - y * (1.0 / 1680.0 - y / 1188.0)))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - below
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::sampling::{probability, weight};

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-6), "{a} instead of {b}");
    }

    /// Garwood's limits as tables have them (half of chi-square quantiles).
    #[test]
    fn equal_weights_give_the_exact_poisson_interval() {
        for (samples, low, high) in [
            (0, 0.0, 3.688_879_5),
            (1, 0.025_317_8, 5.571_643_4),
            (5, 1.623_486_4, 11.668_332_1),
            (10, 4.795_389_0, 18.390_356_0),
            (99, 80.462_671_6, 120.528_784_7),
        ] {
            // At a period of 2^30 a block of 1 byte has weight 2^30 and no more.
            let unit = (1u64 << 30) as f64;
            let found = of_bytes(samples as f64 * unit, samples as f64 * unit * unit, samples, 1 << 30);
            assert!(
                (found.low / unit - low).abs() < 2e-5 * (1.0 + low),
                "{samples}: {}",
                found.low / unit
            );
            assert!(
                (found.high / unit - high).abs() < 2e-5 * high,
                "{samples}: {}",
                found.high / unit
            );
        }
    }

    #[test]
    fn the_gamma_function_is_one() {
        near(ln_gamma(1.0).exp(), 1.0);
        near(ln_gamma(0.5).exp(), std::f64::consts::PI.sqrt());
        near(ln_gamma(11.0).exp(), 3_628_800.0);
        near(cumulative(1.0, 2.0), 1.0 - (-2.0f64).exp());
        near(quantile(1.0, 0.5), std::f64::consts::LN_2);
        near(cumulative(3000.0, quantile(3000.0, 0.3)), 0.3);
    }

    #[test]
    fn certain_blocks_and_period_one_have_no_error_below() {
        let all = of_bytes(5e6, 0.0, 5, 1);
        assert_eq!((all.low, all.high), (5e6, 5e6));
        let large = of_bytes(5e9, 1e-3, 5, 131_072);
        assert!(large.low > 4.999_999e9 && large.high < 5e9 + 6.0 * 131_072.0);
    }

    /// A stream of random numbers with a fixed seed: the results are always the same.
    struct Random(u64);
    impl Random {
        fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            (pyheap_protocol::thin::mix(self.0) >> 11) as f64 / 9_007_199_254_740_992.0
        }
        /// How many of n blocks are sampled: by the distances between the sampled ones.
        fn binomial(&mut self, n: u64, p: f64) -> u64 {
            let (mut at, mut hits) = (0.0, 0);
            loop {
                at += ((1.0 - self.uniform()).ln() / (-p).ln_1p()).floor() + 1.0;
                if at > n as f64 {
                    return hits;
                }
                hits += 1;
            }
        }
    }

    /// Share of `RUNS` simulated recordings of `blocks` (size and number) whose interval has the truth in it.
    fn coverage(blocks: &[(u64, u64)], seed: u64) -> f64 {
        const RUNS: u32 = 4000;
        const PERIOD: u64 = 131_072;
        let truth: f64 = blocks.iter().map(|&(size, n)| size as f64 * n as f64).sum();
        let mut random = Random(seed);
        let mut cache = Cache::default();
        let covered = (0..RUNS).filter(|_| {
            let (mut bytes, mut variance, mut samples) = (0.0, 0.0, 0);
            for &(size, n) in blocks {
                let hits = random.binomial(n, probability(size, PERIOD));
                let one = size as f64 * weight(size, PERIOD);
                bytes += hits as f64 * one;
                variance += hits as f64 * one * one * (1.0 - probability(size, PERIOD));
                samples += hits;
            }
            let found = cache.of_bytes(bytes, variance, samples, PERIOD);
            found.low <= truth * (1.0 + 1e-9) && truth <= found.high
        });
        covered.count() as f64 / f64::from(RUNS)
    }

    #[test]
    fn with_many_samples_19_of_20_intervals_hold_the_truth() {
        for blocks in [
            &[(64, 150 * 2048)][..],
            &[(64, 1000 * 2048)],
            &[(1024, 51_200)],
            &[(65_536, 1600)],
            &[(32, 400_000), (400, 40_000), (20_000, 500), (131_072, 60)],
        ] {
            let share = coverage(blocks, 7);
            assert!((0.94..=0.96).contains(&share), "{blocks:?}: {share}");
        }
    }

    /// 4,000 runs of a true 95 % scatter by 0.34 %: 94 % is three such deviations below, and the seeds are fixed.
    #[test]
    fn with_few_samples_no_fewer_do() {
        for blocks in [
            &[(64, 1000)][..],
            &[(64, 2048)],
            &[(64, 5 * 2048)],
            &[(64, 40 * 2048)],
            &[(65_536, 3)],
            &[(65_536, 20)],
            &[(131_072, 10)],
            &[(300_000, 12)],
            &[(64, 2048), (300_000, 10)],
            &[(64, 4096), (4096, 30), (65_536, 4), (300_000, 2)],
        ] {
            let share = coverage(blocks, 11);
            assert!(share >= 0.945, "{blocks:?}: {share}");
        }
    }
}
