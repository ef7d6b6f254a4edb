//! When to sample: the marks on the stream of allocated bytes are a Poisson process with mean distance `period`.
//!
//! A stream (one of a thread, or that of all threads under the GIL) keeps the distance to its next mark, in whole bytes.
//! An allocation of `x` bytes takes `x` off, and is sampled when that leaves nothing. With the distance drawn as
//! `ceil(E)`, `E` exponential with mean R, the chance is P(ceil(E) <= x) = P(E <= x) = 1 - e^(-x/R), exactly, for
//! every whole `x`. The process has no memory, so a sampled allocation simply draws anew.

use crate::state::{config, control};
use core::sync::atomic::Ordering;

/// Larger than any distance that is ever drawn, and out of reach of any request.
pub const NEVER: i64 = i64::MAX / 4;

/// A fresh distance to the next mark, at least 1.
pub fn draw() -> i64 {
    gap(config!(period), random())
}

/// The distance to draw while nothing is sampled: an ordinary one, so that sampling goes on by itself when the gate opens
/// again, or, in a forked child (which finds no period), one that never ends.
pub fn draw_idle() -> i64 {
    if config!(period) == 0 { NEVER } else { draw() }
}

/// 64 random bits: splitmix64 over a shared counter, so that no lock is needed.
pub fn random() -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    mix(control!(random)
        .fetch_add(GOLDEN, Ordering::Relaxed)
        .wrapping_add(GOLDEN))
}

pub use pyheap_protocol::thin::mix;

/// `ceil(-ln(u) * period)` for a uniform `u` in (0, 1], made of the upper 53 of `bits`.
pub fn gap(period: u64, bits: u64) -> i64 {
    if period <= 1 {
        return 1;
    }
    let u = ((bits >> 11) + 1) as f64 * (1.0 / 9_007_199_254_740_992.0);
    let distance = -ln(u) * period as f64;
    let whole = distance as i64;
    let whole = if (whole as f64) < distance { whole + 1 } else { whole };
    if whole < 1 { 1 } else { whole }
}

/// Natural logarithm of a normal number in (0, 1]; right to about 1e-15 absolute.
///
/// x = m 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1)/(m + 1), |s| <= 0.1716, by its series up to
/// s^17 (the first term left out is below 4e-16).
fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & MANTISSA | 0x3FF << 52);
    if m > core::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 1.0 / 17.0;
    series = series * z + 1.0 / 15.0;
    series = series * z + 1.0 / 13.0;
    series = series * z + 1.0 / 11.0;
    series = series * z + 1.0 / 9.0;
    series = series * z + 1.0 / 7.0;
    series = series * z + 1.0 / 5.0;
    series = series * z + 1.0 / 3.0;
    series = series * z + 1.0;
    exponent as f64 * core::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_agrees_with_libm() {
        let mut bits = 1_u64;
        for _ in 0..100_000 {
            bits = mix(bits.wrapping_add(0x9E37_79B9_7F4A_7C15));
            let u = ((bits >> 11) + 1) as f64 / 9_007_199_254_740_992.0;
            assert!((ln(u) - u.ln()).abs() <= 4e-15 * u.ln().abs().max(1.0), "{u}");
        }
        assert_eq!(ln(1.0), 0.0);
    }

    /// Share of distances that are at most `x`, against 1 - e^(-x/R). With 400,000 draws and a fixed seed the result is
    /// always the same; the bound is 5 standard deviations.
    #[test]
    fn an_allocation_of_x_bytes_is_sampled_with_the_right_probability() {
        const DRAWS: u32 = 400_000;
        for period in [2_u64, 1000, 131_072, 64 << 20] {
            for factor in [0.01, 0.1, 1.0, 3.0] {
                let x = (period as f64 * factor).ceil() as i64;
                let mut seed = period ^ x as u64;
                let mut hits = 0_u32;
                for _ in 0..DRAWS {
                    seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
                    hits += u32::from(gap(period, mix(seed)) <= x);
                }
                let p = -(-(x as f64) / period as f64).exp_m1();
                let sigma = (p * (1.0 - p) / f64::from(DRAWS)).sqrt();
                let share = f64::from(hits) / f64::from(DRAWS);
                assert!(
                    (share - p).abs() < 5.0 * sigma + 1e-9,
                    "period {period} x {x}: {share} instead of {p}"
                );
            }
        }
    }

    /// Two-sample Kolmogorov-Smirnov against `rand_distr::Exp`, rounded up as ours are. The seeds are fixed, so the result is
    /// too; the bound is the critical value for a false alarm of 1e-6.
    #[test]
    fn distances_have_the_distribution_of_a_reference() {
        use rand::SeedableRng;
        use rand_distr::{Distribution, Exp};
        const DRAWS: usize = 200_000;
        for period in [100_u64, 131_072, 64 << 20] {
            let reference = Exp::new(1.0 / period as f64).unwrap();
            let mut rng = rand::rngs::StdRng::seed_from_u64(period);
            let mut theirs: Vec<i64> = (0..DRAWS).map(|_| reference.sample(&mut rng).ceil() as i64).collect();
            let mut ours: Vec<i64> = (0..DRAWS as u64)
                .map(|n| gap(period, mix(n.wrapping_mul(0x9E37_79B9))))
                .collect();
            theirs.sort_unstable();
            ours.sort_unstable();
            let share = |sorted: &[i64], x: i64| sorted.partition_point(|&v| v <= x) as f64 / DRAWS as f64;
            let distance = ours
                .iter()
                .map(|&x| (share(&ours, x) - share(&theirs, x)).abs())
                .fold(0.0, f64::max);
            // c(1e-6) = sqrt(-ln(5e-7) / 2) = 2.694; two samples of n each: c * sqrt(2 / n).
            let bound = 2.694 * (2.0 / DRAWS as f64).sqrt();
            assert!(distance < bound, "period {period}: {distance} >= {bound}");
        }
    }

    #[test]
    fn period_one_samples_every_byte() {
        assert!((0..1000).all(|bits| gap(1, mix(bits)) == 1));
    }

    #[test]
    fn extreme_bits_stay_in_range() {
        assert_eq!(gap(131_072, u64::MAX), 1);
        let longest = gap(64 << 20, 0);
        assert!(longest > 0 && longest < NEVER / 1000);
    }
}
