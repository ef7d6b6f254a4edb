//! Which samples survive when the period is raised.
//!
//! A block of x bytes was sampled with probability p1(x) = 1 - e^(-x/R1). At a longer period R2 it would have been with
//! p2(x) < p1(x), so each sample is kept with probability p2/p1: the survivors are what a recording at R2 would have
//! sampled. The decision must be the same wherever it is made (shim and host decide for themselves, and may decide
//! again after a loss), and a second raise must refine the first. So it is no coin but a fixed number in [0, 1) that each
//! sample's id is hashed to, and the arithmetic is this function's own: no library's `exp`, the same result everywhere.

/// The finaliser of splitmix64: 64 bits that look random.
#[must_use]
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// 1 - e^(-size/period), to about 1e-15 of itself; 1 at period 1 and below, where everything is recorded.
#[must_use]
pub fn probability(size: u64, period: u64) -> f64 {
    if period <= 1 {
        return 1.0;
    }
    let mut z = size as f64 / period as f64;
    if z > 40.0 {
        return 1.0;
    }
    // Halve until a short series is exact, then double back: 1 - e^(-2a) = q (2 - q) with q = 1 - e^(-a).
    let mut halvings = 0;
    while z > 0.125 {
        z *= 0.5;
        halvings += 1;
    }
    let mut term = z;
    let mut q = 0.0;
    let mut n = 1.0;
    while n < 13.0 {
        q += term;
        n += 1.0;
        term *= -z / n;
    }
    while halvings > 0 {
        q *= 2.0 - q;
        halvings -= 1;
    }
    q
}

/// Whether the sample `id` of `size` bytes, picked under period `from`, is still one under period `to`.
#[must_use]
pub fn keeps(id: u64, size: u64, from: u64, to: u64) -> bool {
    if to <= from {
        return true;
    }
    let u = (mix(id ^ 0x5EED_0F7A_11E5_7A1E) >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0);
    u * probability(size, from) < probability(size, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probability_agrees_with_libm() {
        for period in [2_u64, 1000, 131_072, 64 << 20] {
            for size in [1_u64, 7, 64, 513, 4096, 100_000, 1 << 20, 1 << 26, 1 << 32] {
                let exact = -(-(size as f64) / period as f64).exp_m1();
                assert!(
                    (probability(size, period) / exact - 1.0).abs() < 4e-15,
                    "{size} {period}"
                );
            }
        }
        assert_eq!(
            (probability(0, 1000), probability(5, 1), probability(0, 1)),
            (0.0, 1.0, 1.0)
        );
    }

    /// Ids as the shim gives them; the expectation of each share is p2/p1, and the bound five standard deviations.
    #[test]
    fn the_share_of_survivors_is_the_ratio_of_the_probabilities() {
        const IDS: u64 = 200_000;
        for (size, from, to) in [(64, 131_072, 262_144), (100_000, 131_072, 1 << 20), (4096, 1, 131_072)] {
            let kept = (1..=IDS).filter(|&id| keeps(id, size, from, to)).count() as f64;
            let p = probability(size, to) / probability(size, from);
            let sigma = (p * (1.0 - p) * IDS as f64).sqrt();
            assert!((kept - p * IDS as f64).abs() < 5.0 * sigma, "{size}: {kept}");
        }
    }

    #[test]
    fn who_survives_a_long_step_survives_each_shorter_one() {
        for id in 1..20_000 {
            if keeps(id, 500, 131_072, 1 << 20) {
                assert!(keeps(id, 500, 131_072, 1 << 18));
            }
            assert!(keeps(id, 500, 1 << 20, 1 << 18) && keeps(id, 1 << 30, 131_072, 1 << 20));
        }
    }
}
