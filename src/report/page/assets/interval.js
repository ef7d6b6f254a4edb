  // 95 % intervals, as pyheap's own (src/profile/interval.rs): exact where there are few samples.
  const MANY = 100, Z = 1.96;
  const margin = (variance) => Z * Math.sqrt(Math.max(0, variance));
  function lnGamma(x) {
    let below = 0;
    while (x < 10) below += Math.log(x++);
    const y = 1 / (x * x);
    const series = (1 / 12 - y * (1 / 360 - y * (1 / 1260 - y * (1 / 1680 - y / 1188)))) / x;
    return (x - 0.5) * Math.log(x) - x + 0.5 * Math.log(2 * Math.PI) + series - below;
  }
  function cumulative(shape, x) {
    if (x <= 0) return 0;
    const front = Math.exp(shape * Math.log(x) - x - lnGamma(shape));
    if (x < shape + 1) {
      let term = 1 / shape, sum = term;
      for (let n = shape + 1, i = 0; i < 1e5 && term >= sum * 1e-13; i++, n++) {
        term *= x / n;
        sum += term;
      }
      return Math.min(1, front * sum);
    }
    let b = x + 1 - shape, c = b + 1e300, d = 1 / b, fraction = d;
    for (let i = 1; i < 1e5; i++) {
      const a = -i * (i - shape);
      b += 2;
      d = 1 / (Math.abs(a * d + b) < 1e-300 ? 1e-300 : a * d + b);
      c = Math.abs(b + a / c) < 1e-300 ? 1e-300 : b + a / c;
      fraction *= c * d;
      if (Math.abs(c * d - 1) < 1e-13) break;
    }
    return Math.max(0, 1 - front * fraction);
  }
  function quantile(shape, probability) {
    let low = 0, high = shape + 10 * Math.sqrt(shape) + 20;
    for (let i = 0; i < 100 && high - low > 1e-9 * high; i++) {
      const middle = (low + high) / 2;
      if (cumulative(shape, middle) < probability) low = middle; else high = middle;
    }
    return (low + high) / 2;
  }
  function gammaLimit(mean, variance, probability) {
    if (!(mean > 0)) return 0;
    const scale = variance / mean, shape = mean / scale;
    return !Number.isFinite(shape) || shape > 1e7 ? mean : scale * quantile(shape, probability);
  }
  // The two limits of an estimate of bytes.
  function limits(bytes, variance, samples) {
    if (data.period !== null && data.period <= 1) return [bytes, bytes];
    if (data.period === null || samples >= MANY) return [Math.max(0, bytes - margin(variance)), bytes + margin(variance)];
    return [gammaLimit(bytes, variance, 0.025), gammaLimit(bytes + data.period, variance + data.period ** 2, 0.975)];
  }
