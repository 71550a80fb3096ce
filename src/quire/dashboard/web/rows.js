// The rows of the page: unpacked once, and what there is to choose among them.

import { said } from "./words.js";

const PARTS = ["machine", "engine", "model", "load"];
const MOST_ORDERED = 2000; // groups: more of them nobody reads, and their order takes seconds
const LEFT_OUT = new Set(["limits", "versions"]);

/** The rows that the page carries, and what is said about their fields. */
export async function load(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i); // Uint8Array.from takes ten times as long
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const document = await new Response(plain).json();
  return new Rows(document);
}

export class Rows {
  constructor({ about, files, distinct, values, names, rows }) {
    this.about = about;
    this.files = files;
    this.all = rows.map(([file, number, places, metrics, intervals, samples]) => {
      const row = { file: files[file], id: `${files[file]}.${number}` };
      distinct.forEach((name, i) => {
        row[name] = values[name][places[i]];
      });
      row.metrics = named(names, metrics);
      row.intervals = named(names, intervals);
      row.samples = named(names, samples);
      return row;
    });
    this.byId = new Map(this.all.map((row) => [row.id, row]));
    this.look();
  }

  /** Find out which metrics and fields there are; again once metrics were added to rows. */
  look() {
    const metrics = new Set();
    const options = new Set();
    for (const row of this.all) {
      for (const name of Object.keys(row.metrics)) metrics.add(name);
      for (const name of Object.keys(row.options)) options.add(name);
    }
    this.metrics = [...metrics].sort();
    const fields = ["file", "kind", "benchmark", "suite", "time", "technique", "on"];
    for (const part of PARTS) {
      const inner = new Set(this.all.slice(0, 1).flatMap((row) => Object.keys(row[part])));
      fields.push(...[...inner].filter((name) => !LEFT_OUT.has(name)).map((name) => `${part}.${name}`));
    }
    this.fields = [...fields, ...[...options].sort().map((name) => `options.${name}`)];
    this.varying = this.fields.filter((name) => {
      const first = this.all.length ? get(this.all[0], name) : undefined;
      return this.all.some((row) => get(row, name) !== first);
    });
  }

  unit(name) {
    return this.about.metrics[name]?.[0] ?? (name === "load.rate" ? "1/s" : "");
  }

  /** "lower", "higher" or "neither". */
  better(name) {
    return this.about.metrics[name]?.[1] ?? "neither";
  }

  meaning(name) {
    return this.about.metrics[name]?.[2] ?? this.about.fields[name] ?? "";
  }

  label(name) {
    const unit = this.unit(name);
    return unit ? `${said(unit.endsWith("/s") ? name.replace(/_per_s$/, "") : name)} (${unit})` : said(name);
  }
}

function named(names, [place, ...found]) {
  const entries = names[place].map((name, i) => [name, found[i]]).filter(([, value]) => value !== null);
  return Object.fromEntries(entries);
}

/** A metric of a row, or a field by its path; undefined where it has none. */
export function get(row, name) {
  if (name in row.metrics) return row.metrics[name];
  const dot = name.indexOf(".");
  return dot < 0 ? row[name] : row[name.slice(0, dot)]?.[name.slice(dot + 1)];
}

/** A metric or field as a number; null where it is none. */
export function number(row, name) {
  const value = get(row, name);
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** [value, rows] for each value of a field, in order. */
export function groups(rows, name) {
  const found = new Map();
  for (const row of rows) {
    const value = name ? (get(row, name) ?? "") : "";
    if (!found.has(value)) found.set(value, []);
    found.get(value).push(row);
  }
  return found.size > MOST_ORDERED ? [...found] : [...found].sort(([a], [b]) => inOrder(a, b));
}

const collator = new Intl.Collator("en", { numeric: true }); // one for all: localeCompare would make one for each comparison

/** Numbers by size, before texts by letters, in which numbers count as such. */
export function inOrder(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number" || typeof b === "number") return typeof a === "number" ? -1 : 1;
  return collator.compare(String(a), String(b));
}

const TELLING = [
  "kind",
  "machine.name",
  "engine.name",
  "engine.version",
  "model.name",
  "model.format",
  "model.kv_format",
  "load.batch",
  "load.rate",
  "load.input_len",
  "load.output_len",
  "load.arrivals",
  "load.name",
  "benchmark",
  "suite",
];

/** The fewest fields that tell these rows apart as far as fields do: each says something that those before it do not. */
export function differing(rows, store) {
  const names = [...TELLING, "machine.devices", ...store.fields.filter((name) => name.startsWith("options."))].filter((name) =>
    store.varying.includes(name),
  );
  let [places, count] = parted(
    rows.map(() => 0),
    rows,
    (row) => (row.technique ? `${row.technique} ${row.on}` : ""),
  );
  return names.filter((name) => {
    const [finer, more] = parted(places, rows, (row) => get(row, name));
    if (more === count) return false;
    [places, count] = [finer, more];
    return true;
  });
}

/** Which part each row belongs to, and how many there are, once `places` are parted further by a value. */
function parted(places, rows, value) {
  const seen = new Map();
  const finer = rows.map((row, i) => {
    const key = `${places[i]} ${value(row)}`;
    if (!seen.has(key)) seen.set(key, seen.size);
    return seen.get(key);
  });
  return [finer, seen.size];
}

/** What a row is, in a few words: the fields `names`, and its technique. */
export function describe(row, names) {
  const words = names
    .map((name) => [name, get(row, name)])
    .filter(([, value]) => value !== undefined && value !== "")
    .map(([name, value]) => (typeof value === "string" && !name.startsWith("options.") ? value : `${name.split(".").at(-1)} ${value}`));
  if (row.technique) words.push(`${row.technique} ${row.on ? "on" : "off"}`);
  return words.join(" · ") || `${row.engine.name} ${row.model.name}`;
}
