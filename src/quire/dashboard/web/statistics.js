// Medians, their intervals and comparisons, as quire/figures/statistics.py has them.

const LEVEL = 0.95;
const ENOUGH = 6; // rounds: fewer cannot give 95 %

export function median(values) {
  const ordered = [...values].sort((a, b) => a - b);
  const half = Math.floor(ordered.length / 2);
  return ordered.length % 2 ? ordered[half] : (ordered[half - 1] + ordered[half]) / 2;
}

/** [low, high]: the narrowest symmetric pair of order statistics that holds the median with 95 %; the ends where none does. */
export function interval(values) {
  const ordered = [...values].sort((a, b) => a - b);
  const n = ordered.length;
  let term = 0.5 ** n;
  let below = term;
  let k = 0;
  for (;;) {
    term *= (n - k) / (k + 1);
    if (1 - 2 * (below + term) < LEVEL) break;
    below += term;
    k += 1;
  }
  return [ordered[k], ordered[n - 1 - k]];
}

/** Of A to B: {ratio, low, high, significant}. Equally many rounds are taken as interleaved, else all pairs. */
export function compare(a, b) {
  const paired = a.length === b.length;
  const pairs = paired ? a.map((x, i) => [x, b[i]]) : a.flatMap((x) => b.map((y) => [x, y]));
  const ratios = pairs.filter(([, y]) => y).map(([x, y]) => x / y);
  if (!ratios.length) return { ratio: NaN, low: NaN, high: NaN, significant: false };
  const [[low, high], [least, most]] = [interval(a), interval(b)];
  const ends = paired ? interval(ratios) : [most ? low / most : NaN, least ? high / least : NaN];
  const significant = Math.min(a.length, b.length) >= ENOUGH && !(ends[0] <= 1 && 1 <= ends[1]);
  return { ratio: median(ratios), low: ends[0], high: ends[1], significant };
}

/** Of a metric of two rows, by their rounds or, where there are none, by their medians; null where one lacks it. */
export function compareRows(a, b, name) {
  if (!(name in a.metrics) || !(name in b.metrics)) return null;
  const [x, y] = [a.samples[name] ?? [], b.samples[name] ?? []];
  if (x.length > 1 && y.length > 1) return { ...compare(x, y), rounds: Math.min(x.length, y.length) };
  const ratio = b.metrics[name] ? a.metrics[name] / b.metrics[name] : NaN;
  return { ratio, low: NaN, high: NaN, significant: false, rounds: 1 };
}

/** Of any number of values: a call takes some ten thousand arguments at most, which Math.max would have to be given. */
export const largestOf = (values) => values.reduce((a, b) => Math.max(a, b));

export function geometricMean(values) {
  const logs = values.filter((value) => value > 0).map(Math.log);
  return logs.length ? Math.exp(logs.reduce((sum, value) => sum + value, 0) / logs.length) : NaN;
}
