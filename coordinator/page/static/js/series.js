// Columns before they are drawn: where a line breaks, which values are beyond the scale, smoothing. Pure functions.
// In a column, null is a gap in the line; undefined is no value of this series there, and the line goes on.

const NEAR = 8, LONG = 6, AROUND = 3;

const isNumber = (v) => v !== null && v !== undefined;

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(share * (sorted.length - 1))];
}

// Indices before which a line breaks: nothing came for much longer than is usual around there, or a time in `stops` is between.
export function breaks(xs, stops = []) {
  const steps = xs.slice(1).map((x, i) => x - xs[i]), found = [];
  steps.forEach((step, i) => {
    const around = [...steps.slice(Math.max(0, i - NEAR), i), ...steps.slice(i + 1, i + 1 + NEAR)];
    const isLong = around.length > 1 && step > LONG * quantile(around, 0.5);
    if (isLong || stops.some((t) => xs[i] <= t && t < xs[i + 1])) found.push(i + 1);
  });
  return found;
}

// The columns with a row of nulls at each break, half way.
export function withGaps([xs, ...columns], at) {
  const before = new Set(at), made = [[], ...columns.map(() => [])];
  xs.forEach((x, i) => {
    if (before.has(i)) {
      made[0].push((xs[i - 1] + x) / 2);
      for (const column of made.slice(1)) column.push(null);
    }
    made[0].push(x);
    columns.forEach((column, c) => made[c + 1].push(column[i]));
  });
  return made;
}

// One x axis for a line and for dots that lie elsewhere.
export function merge([xs, ys], dots) {
  const at = new Map(xs.map((x, i) => [x, [ys[i], undefined]]));
  for (const [x, y] of dots) at.set(x, [at.has(x) ? at.get(x)[0] : undefined, y]);
  const all = [...at.keys()].sort((a, b) => a - b);
  return [all, all.map((x) => at.get(x)[0]), all.map((x) => at.get(x)[1])];
}

// Indices of values that are far from their neighbours: further than a few times what most values differ, and than half of
// themselves. One such value must not set the scale. `falls`: the first values may be far above what follows, as a loss is.
export function freaks(values, falls = false) {
  const known = values.map((v, i) => [v, i]).filter(([v]) => isNumber(v));
  const all = known.map(([v]) => v), wide = all.length ? quantile(all, 0.8) - quantile(all, 0.2) : 0;
  return known.filter(([v], k) => {
    const near = [...all.slice(Math.max(0, k - AROUND), k), ...all.slice(k + 1, k + 1 + AROUND)];
    if (near.length < AROUND || (falls && k < AROUND)) return false;
    const middle = quantile(near, 0.5);
    return Math.abs(v - middle) > Math.max(3 * wide, 0.5 * Math.abs(middle));
  }).map(([, i]) => i);
}

// [lowest, highest] of the columns without the indices in `without` (a set for each column); null without any value.
export function extent(columns, without, from = 0, to = Infinity) {
  let low = Infinity, high = -Infinity;
  columns.forEach((column, c) => column.forEach((v, i) => {
    if (!isNumber(v) || i < from || i > to || without[c].has(i)) return;
    low = Math.min(low, v);
    high = Math.max(high, v);
  }));
  return low > high ? null : [low, high];
}

// The exponential mean, unbiased at its beginning; it begins again after a gap. Values in `without` do not count.
export function smoothed(values, weight, without = new Set()) {
  let mean = 0, mass = 0;
  return values.map((v, i) => {
    if (v === null) mean = mass = 0;
    if (!isNumber(v)) return v;
    if (!without.has(i)) {
      mean = weight * mean + (1 - weight) * v;
      mass = weight * mass + 1 - weight;
    }
    return mass ? mean / mass : v;
  });
}

// Ticks of a logarithmic axis.
export function logTicks(low, high) {
  const decades = Math.log10(high / low), steps = decades > 2.5 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const s of steps) {
      const tick = Number((s * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) found.push(tick);
    }
  }
  if (found.length > 2) return found;
  const about = (high - low) / 4, size = 10 ** Math.floor(Math.log10(about)), step = Math.ceil(about / size - 1e-9) * size;
  return Array.from({ length: 6 }, (_, i) => Number(((Math.ceil(low / step) + i) * step).toPrecision(6))).filter((t) => t <= high);
}

// The decimals that tell ticks apart: 2 for a step of 0.25.
export function digits(step) {
  let n = 0;
  while (n < 6 && Math.abs(step * 10 ** n - Math.round(step * 10 ** n)) > 1e-6) n++;
  return n;
}
