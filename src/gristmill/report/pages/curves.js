// Arithmetic of curves: smoothing, groups of runs, and what lies where. A curve is
// { x, mean, low, high }, arrays of the same length (low and high may be null); NaN is a gap.

/** An exponential mean whose start is not pulled towards zero; gaps stay gaps. */
export function smoothed(values, weight) {
  const found = new Float64Array(values.length);
  let mean = 0, mass = 0;
  for (let index = 0; index < values.length; index++) {
    const value = values[index];
    if (Number.isNaN(value)) {
      found[index] = NaN;
      continue;
    }
    mean = mean * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    found[index] = mean / mass;
  }
  return found;
}

/** The index whose x is closest to a place; x grows. */
export function nearestIndex(x, place) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < place) low = middle + 1;
    else high = middle;
  }
  return low > 0 && place - x[low - 1] < x[low] - place ? low - 1 : low;
}

/** The value of a curve at a place between its points; NaN before its first and after its last. */
function between(x, y, place, from) {
  let at = from;
  while (at < x.length && x[at] < place) at++;
  if (at >= x.length || (at === 0 && x[0] > place)) return [NaN, at];
  if (x[at] === place || at === 0) return [y[at], at];
  const part = (place - x[at - 1]) / (x[at] - x[at - 1]);
  const value = Number.isNaN(y[at - 1]) ? y[at] : y[at - 1] + part * (y[at] - y[at - 1]);
  return [value, at];
}

/** Several curves as one: their mean, and the smallest and largest of their values, at the places
 * of the curve with the most points, as far as all of them reach: where one ends, the mean of the
 * others would jump. `counts` says how many have a value; there may be gaps. */
export function grouped(curves) {
  const known = curves.filter(({ x }) => x.length);
  if (!known.length) return { x: [], mean: [], low: [], high: [], counts: [] };
  const finest = known.reduce((best, curve) => curve.x.length > best.x.length ? curve : best);
  const end = Math.min(...known.map(({ x }) => x[x.length - 1]));
  const begin = Math.max(...known.map(({ x }) => x[0]));
  const x = [...new Set([...finest.x, end])].filter((place) => place >= begin && place <= end)
    .sort((a, b) => a - b);
  const mean = [], low = [], high = [], counts = [];
  const from = known.map(() => 0);
  for (const place of x) {
    let sum = 0, number = 0, least = Infinity, most = -Infinity;
    known.forEach((curve, index) => {
      const [value, at] = between(curve.x, curve.mean, place, from[index]);
      from[index] = Math.max(0, at - 1);
      if (Number.isNaN(value)) return;
      sum += value;
      number += 1;
      least = Math.min(least, value);
      most = Math.max(most, value);
    });
    mean.push(number ? sum / number : NaN);
    low.push(number ? least : NaN);
    high.push(number ? most : NaN);
    counts.push(number);
  }
  return { x, mean, low, high, counts };
}

export function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** The first and last place of some curves; on a logarithmic axis of those above zero. */
export function stretchOf(series, logarithmic) {
  let low = Infinity, high = -Infinity;
  for (const { x } of series) {
    if (!x.length) continue;
    let first = x[0];
    if (logarithmic && !(first > 0)) first = x.find((place) => place > 0) ?? Infinity;
    low = Math.min(low, first);
    high = Math.max(high, x[x.length - 1]);
  }
  if (!(low <= high)) return logarithmic ? [1, 10] : [0, 1];
  if (low < high) return [low, high];
  return logarithmic ? [low / 2, low * 2] : [low - 0.5, low + 0.5];
}

/** How far up and down a chart reaches, for what it shows between two places.
 * `zero`: from zero on; `robust`: without the rare bursts that would press the rest flat. */
export function extentOf(series, [left, right], { logarithmic, zero, robust }) {
  let values = [];
  let total = 0;
  for (const { x } of series) total += x.length;
  // Of very many points some are enough; smallest and largest are looked up in all.
  const stride = robust ? Math.max(1, Math.floor(total / 20000)) : 1;
  let low = Infinity, high = -Infinity;
  for (const { x, y, raw, low: lows, high: highs, whiskers, group } of series) {
    const wide = whiskers || group;
    for (let index = 0; index < x.length; index++) {
      if (x[index] < left || x[index] > right) continue;
      for (const list of [y, raw, wide ? lows : null, wide ? highs : null]) {
        const value = list ? list[index] : NaN;
        if (Number.isNaN(value) || value === undefined || (logarithmic && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
        if (robust && index % stride === 0) values.push(value);
      }
    }
  }
  if (!(low <= high)) return logarithmic ? [0.5, 2] : [0, 1];
  if (robust && values.length > 50) {
    values = Float64Array.from(values).sort();
    high = Math.min(high, values[Math.floor(values.length * 0.99)] * 1.5);
  }
  if (logarithmic) {
    const pad = low < high ? (high / low) ** 0.04 : 2;
    return [low / pad, high * pad];
  }
  if (zero && low >= 0) return [0, high > 0 ? high * 1.08 : 1];
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - pad, high + pad];
}
