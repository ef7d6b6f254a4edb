//! Exact acceptance regions for what a Poisson sampler of bytes reports.
//!
//! An object of x bytes is sampled with p = 1 - e^(-x/R), independently of all others, so of n objects of one size a
//! Binomial(n, p) number is. A test accepts the numbers that are not in either tail of [`TAIL`]; no normal approximation.
//! The whole suite makes far fewer than [`COMPARISONS`] comparisons, so that a correct profiler fails it by chance less
//! than once in a million runs.

/// The odds of one false alarm in one run of the whole suite.
pub const FALSE_ALARM: f64 = 1e-6;
/// More than all comparisons of the suite together (interpreters × sites × reports).
pub const COMPARISONS: f64 = 2000.0;
/// The probability of each tail that one comparison rejects.
pub const TAIL: f64 = FALSE_ALARM / COMPARISONS / 2.0;

pub const DEFAULT_PERIOD: f64 = 131_072.0;

/// The probability that an object of this size is sampled.
pub fn sampled(size: f64, period: f64) -> f64 {
    -(-size / period).exp_m1()
}

/// ln Γ(x) for x ≥ 1 (Lanczos, g = 7, 9 terms; relative error below 1e-13).
fn ln_gamma(x: f64) -> f64 {
    const C: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let t = x + 7.5;
    let sum = C
        .iter()
        .enumerate()
        .skip(1)
        .fold(C[0], |sum, (i, c)| sum + c / (x + i as f64));
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

/// P(X = k) for X ~ Binomial(n, p), 0 < p ≤ 1 (for large objects 1 - e^(-x/R) is 1 in an f64).
pub fn probability(n: u64, p: f64, k: u64) -> f64 {
    if p >= 1.0 {
        return if k == n { 1.0 } else { 0.0 };
    }
    let (nf, kf) = (n as f64, k as f64);
    (ln_gamma(nf + 1.0) - ln_gamma(kf + 1.0) - ln_gamma(nf - kf + 1.0) + kf * p.ln() + (nf - kf) * (-p).ln_1p()).exp()
}

/// The smallest and the largest number that is not in a tail of this probability.
pub fn acceptance(n: u64, p: f64, tail: f64) -> (u64, u64) {
    let (mut low, mut high) = (0, n);
    let mut sum = probability(n, p, low);
    while sum <= tail && low < n {
        low += 1;
        sum += probability(n, p, low);
    }
    sum = probability(n, p, high);
    while sum <= tail && high > low {
        high -= 1;
        sum += probability(n, p, high);
    }
    (low, high)
}

/// The acceptance region, in bytes, of the estimate Σ K_s · s / p_s for a site with several sizes: (size, count) each.
pub fn acceptance_bytes(sizes: &[(u64, u64)], period: f64, tail: f64) -> (f64, f64) {
    let mut values = vec![(0.0, 1.0)];
    for &(size, count) in sizes.iter().filter(|&&(_, count)| count > 0) {
        let p = sampled(size as f64, period);
        // What this leaves out is far below the tails that are cut off at the end.
        let (low, high) = acceptance(count, p, tail * 1e-3);
        let mut next = Vec::with_capacity(values.len() * (high - low + 1) as usize);
        for &(value, weight) in &values {
            for k in low..=high {
                next.push((value + k as f64 * size as f64 / p, weight * probability(count, p, k)));
            }
        }
        values = next;
    }
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    (beyond_tail(values.iter(), tail), beyond_tail(values.iter().rev(), tail))
}

/// The first value after a tail of this probability.
fn beyond_tail<'a>(values: impl Iterator<Item = &'a (f64, f64)>, tail: f64) -> f64 {
    let mut sum = 0.0;
    for &(value, weight) in values {
        sum += weight;
        if sum > tail {
            return value;
        }
    }
    0.0
}
