// The text that Prometheus scrapes, and what can be read from two of them.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:\\.|[^"\\])*)"/g;

const number = (text) => (text === "+Inf" ? Infinity : Number(text));

/** Samples by name: Map of name -> [{labels, value}]. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: number(match[3]) });
  }
  return found;
}

const values = (metrics, name) => (metrics.get(name) ?? []).map((sample) => sample.value);

/** The sum over all labels: models, engines. */
export const total = (metrics, name) => values(metrics, name).reduce((sum, value) => sum + value, 0);

/** The largest over all labels: of shares, the fullest engine's. */
export const largest = (metrics, name) => Math.max(0, ...values(metrics, name));

/** A histogram's cumulative counts, summed over labels: [[upper bound, count], ...] in ascending order. */
export function histogram(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

/** The quantile `q` of what a histogram counted between two moments, as Prometheus interpolates it; null: nothing. */
export function quantile(before, after, q) {
  const old = new Map(before);
  const counts = after.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return null;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= q * all) {
      return bound === Infinity ? lower : lower + (bound - lower) * ((q * all - below) / (count - below));
    }
    lower = bound;
    below = count;
  }
  return lower;
}
