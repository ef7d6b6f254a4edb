//! The few distributions that the verdict needs.
//!
//! Closed approximations, each with its error: the verdict compares tails with limits from 0.1 to 1e-6, where a percent
//! of a percent decides nothing.

/// The point that 97.5 % of a normal variable lie below.
pub const Z_975: f64 = 1.959_964;

/// The probability that a standard normal variable is above `z`. Relative error below 2e-7 (Chebyshev fit of erfc).
pub fn normal_tail(z: f64) -> f64 {
    let x = z.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * x);
    let coefficients = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ];
    let polynomial = coefficients.iter().fold(0.0, |sum, c| sum * t + c);
    let upper = 0.5 * t * (-x * x + polynomial).exp();
    if z >= 0.0 { upper } else { 1.0 - upper }
}

/// The probability that Student's t with `freedom` degrees of freedom is above `t` (Wallace 1959: the equivalent normal
/// deviate is right within 0.2 % from 7 degrees of freedom on).
pub fn student_tail(t: f64, freedom: f64) -> f64 {
    if !t.is_finite() || freedom < 1.0 {
        return if t > 0.0 && freedom >= 1.0 { 0.0 } else { 1.0 };
    }
    let z = (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0) * (freedom * (t * t / freedom).ln_1p()).sqrt();
    normal_tail(z.copysign(t))
}

/// The quantile of χ² at the normal deviate `z` (Wilson and Hilferty 1931: within 1 % from 3 degrees of freedom on).
pub fn chi_square(freedom: f64, z: f64) -> f64 {
    if freedom <= 0.0 {
        return 0.0;
    }
    let a = 2.0 / (9.0 * freedom);
    freedom * (1.0 - a + z * a.sqrt()).max(0.0).powi(3)
}

/// The 95 % interval of the mean of a Poisson variable that came out as `count`, as factors of `count` (Garwood 1936).
pub fn poisson_factors(count: f64) -> (f64, f64) {
    let low = chi_square(2.0 * count, -Z_975) / 2.0;
    let high = chi_square(2.0 * count + 2.0, Z_975) / 2.0;
    (low / count, high / count)
}

/// What of a family of hypotheses is rejected when the chance of any false rejection is to be at most `alpha`: Holm's step-down
/// among those that can be rejected at all (Tarone 1990: one whose smallest possible p-value is too large for
/// its share does not count). `family` has the p-value and the smallest possible one of each.
pub fn holm(family: &[(f64, f64)], alpha: f64) -> Vec<bool> {
    let mut smallest: Vec<f64> = family.iter().map(|(_, least)| *least).collect();
    smallest.sort_by(f64::total_cmp);
    // The smallest size K such that at most K of them can get below alpha / K.
    let size = (1..=family.len().max(1))
        .find(|&k| smallest.partition_point(|least| *least <= alpha / k as f64) <= k)
        .unwrap_or(1);
    let mut order: Vec<usize> = (0..family.len())
        .filter(|&at| family[at].1 <= alpha / size as f64)
        .collect();
    order.sort_by(|&a, &b| family[a].0.total_cmp(&family[b].0));
    let mut rejected = vec![false; family.len()];
    for (rank, at) in order.into_iter().enumerate() {
        if family[at].0 > alpha / (size - rank.min(size - 1)) as f64 {
            break;
        }
        rejected[at] = true;
    }
    rejected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, relative: f64) {
        assert!((a / b - 1.0).abs() < relative, "{a} is not {b}");
    }

    /// Reference values from R: pnorm, pt, qchisq.
    #[test]
    fn tails_and_quantiles() {
        close(normal_tail(1.959_964), 0.025, 1e-6);
        close(normal_tail(6.0), 9.865_876e-10, 1e-5);
        close(normal_tail(-1.0), 0.841_344_7, 1e-6);
        close(student_tail(2.030_108, 35.0), 0.025, 1e-3);
        close(student_tail(4.0, 35.0), 1.554_8e-4, 0.02);
        close(student_tail(-2.030_108, 35.0), 0.975, 1e-3);
        close(chi_square(10.0, Z_975), 20.483, 0.002);
        close(chi_square(10.0, -Z_975), 3.247, 0.01);
        let (low, high) = poisson_factors(10.0);
        close(10.0 * low, 4.795, 0.01);
        close(10.0 * high, 18.39, 0.01);
        assert_eq!(student_tail(f64::INFINITY, 10.0), 0.0);
    }

    #[test]
    fn holm_steps_down_and_ignores_what_cannot_matter() {
        let plain = |p: &[f64]| p.iter().map(|p| (*p, 0.0)).collect::<Vec<_>>();
        assert_eq!(
            holm(&plain(&[0.004, 0.03, 0.0001, 0.006]), 0.01),
            [false, false, true, false]
        );
        assert_eq!(holm(&plain(&[0.004, 0.009, 0.0001]), 0.01), [true, true, true]);
        // A thousand sites of one sample each do not make a site of fifty less significant.
        let mut family = vec![(0.9, 0.5); 1000];
        family.push((0.008, 1e-9));
        assert!(holm(&family, 0.01)[1000]);
        family.resize(3000, (0.9, 1e-9));
        assert!(!holm(&family, 0.01)[1000]);
        assert!(holm(&[], 0.01).is_empty());
    }
}
