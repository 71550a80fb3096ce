// Rows as series of points: who has which colour, which mark, and in which order a line goes through them.

import { describe, get, groups, inOrder, number } from "./rows.js";
import { shown, word } from "./words.js";

const MOST = 10; // colours that are told apart; what is left is one series
const RAMP = 5;

/** Marks by kind: measured points are filled, what nobody measured here is hollow. */
export const MARKS = { measured: "dot", predicted: "ring", simulated: "triangle", imported: "square" };

/** A colour of the page, light or dark. */
export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** [{name, color, rows}]: rows by a field or metric; numbers of many sizes by fifths of them. */
export function coloured(rows, by) {
  const found = by ? groups(rows, by) : [["", rows]];
  const numeric = found.length > MOST && found.every(([value]) => typeof value === "number");
  if (numeric) return fifths(rows, by);
  const many = found.length > MOST;
  const kept = new Set(many ? [...found].sort(([, a], [, b]) => b.length - a.length).slice(0, MOST - 1) : found);
  const first = found
    .filter((each) => kept.has(each))
    .map(([value, each], i) => ({ name: value === "" ? "–" : word(value), color: style(`--c${i}`), rows: each }));
  if (!many) return first;
  const rest = found.filter((each) => !kept.has(each)).flatMap(([, each]) => each);
  return [...first, { name: `${(found.length - first.length).toLocaleString("en")} others`, color: style("--soft"), rows: rest }];
}

function fifths(rows, by) {
  const ordered = rows.filter((row) => number(row, by) !== null).sort((a, b) => get(a, by) - get(b, by));
  const found = [];
  for (let i = 0; i < RAMP; i += 1) {
    const part = ordered.slice(Math.floor((i * ordered.length) / RAMP), Math.floor(((i + 1) * ordered.length) / RAMP));
    if (part.length)
      found.push({ name: `${shown(get(part[0], by))} to ${shown(get(part.at(-1), by))}`, color: style(`--r${i}`), rows: part });
  }
  const none = rows.filter((row) => number(row, by) === null);
  return none.length ? [...found, { name: "–", color: style("--soft"), rows: none }] : found;
}

/** A point of a row, with its name once somebody asks; null where it lacks one of both. Values that are texts are places among `axis.words`. */
export function point(row, x, y, names) {
  const [at, value] = [place(row, x), place(row, y)];
  if (at === null || value === null) return null;
  const [low, high] = row.intervals[y.name] ?? [];
  return {
    x: at,
    y: value,
    low,
    high,
    row,
    mark: MARKS[row.kind],
    get label() {
      return describe(row, names);
    },
  };
}

function place(row, axis) {
  if (axis.words) {
    const found = axis.places.get(get(row, axis.name) ?? "");
    return found === undefined ? null : found;
  }
  const value = number(row, axis.name);
  return value === null || (axis.log && value <= 0) ? null : value;
}

/** An axis over a metric or field: `log` where asked for; of texts, with `words` at its places. */
export function axis(store, rows, name, log) {
  const values = rows.map((row) => get(row, name)).filter((value) => value !== undefined && value !== null && value !== "");
  const label = store.label(name);
  if (values.some((value) => typeof value !== "number")) {
    const words = [...new Set(values)].sort(inOrder);
    return { name, label, words: words.map(word), places: new Map(words.map((value, i) => [value, i])), log: false };
  }
  return { name, label, log, unit: store.unit(name) };
}

/** Rows along a line: those that differ only in how much is asked for, from little to much. */
export function alongLoad(points) {
  return [...points].sort((a, b) => a.row.load.rate - b.row.load.rate || a.row.load.batch - b.row.load.batch || a.x - b.x);
}
