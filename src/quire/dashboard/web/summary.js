// What the rows say: the best and the worst change in a sentence, and all of them as bars.

import { pairs } from "./compare.js";
import { el, svg } from "./dom.js";
import { describe, differing, get, groups } from "./rows.js";
import { compareRows, geometricMean } from "./statistics.js";
import { switched } from "./techniques.js";
import { plural, shown, word } from "./words.js";

const SIDES = ["engine.name", "model.format", "model.kv_format", "file"];
const FIRST = ["output_tokens_per_s", "decode_tokens_per_s", "requests_per_s", "prefill_tokens_per_s"];
const MOST_BARS = 16;
const MOST_ROWS = 20_000; // of which rows are compared by what they differ in: more take seconds
const SAME = 1.02; // a ratio that is no change

export const summary = {
  name: "summary",
  title: "Summary",

  controls() {
    return [];
  },

  draw({ store, details }, rows) {
    const measured = rows.filter((row) => row.kind === "measured" && row.benchmark !== "quality");
    const used = measured.length ? measured : rows;
    const found = changes(used, store);
    if (found.length) return [sentence(found, used, store), bars(found, store, details)];
    const metric = FIRST.find((name) => used.some((row) => name in row.metrics));
    return metric ? fastest(used, metric, store, details) : [el("p", {}, `${plural(rows.length, "row")}, and none has a speed to compare.`)];
  },
};

/** Changes and what each gives, best first: [{name, gain, ratio, metric, row, base, significant}]. `gain` > 1: better. */
function changes(rows, store) {
  const byTechnique = switched(rows).flatMap(([on, off]) => {
    const metric = [on.improves, off.improves, ...FIRST].find((name) => name && name in on.metrics && name in off.metrics);
    return metric ? [change(on.technique, on, off, metric, store)] : [];
  });
  const bySide = rows.length > MOST_ROWS ? [] : SIDES.flatMap((side) => ofSide(rows, side, store));
  const known = [...byTechnique, ...bySide].filter((each) => each.gain > 0 && Number.isFinite(each.gain));
  return known.sort((a, b) => b.gain - a.gain);
}

function change(name, row, base, metric, store) {
  const { ratio, significant } = compareRows(row, base, metric);
  return { name, row, base, metric, ratio, gain: store.better(metric) === "lower" ? 1 / ratio : ratio, significant };
}

/** Each value of a field against the one that most rows have: the geometric mean over rows that are else alike. */
function ofSide(rows, side, store) {
  const values = groups(rows, side).map(([value, own]) => [String(value), own.length]);
  if (values.length < 2 || values.length > 8) return [];
  const [usual] = values.reduce((a, b) => (b[1] > a[1] ? b : a));
  return values.flatMap(([value]) => {
    if (value === usual) return [];
    const runs = side === "file" ? [rows] : groups(rows, "file").map(([, own]) => own); // one run is not compared with another
    const matched = runs.flatMap((own) => pairs(own, side, usual, value));
    const metric = FIRST.find((name) => matched.some(([x, y]) => name in x.metrics && name in y.metrics));
    const both = matched.filter(([x, y]) => metric in x.metrics && metric in y.metrics);
    if (!metric || !both.length) return [];
    const each = both.map(([base, row]) => change("", row, base, metric, store));
    const gain = geometricMean(each.map((one) => one.gain));
    const [{ row, base }] = each;
    const name = `${word(value) || "none"} instead of ${word(usual) || "none"}`;
    return [{ name, row, base, metric, ratio: gain, gain, significant: each.every((one) => one.significant), count: both.length }];
  });
}

/** "2 times the output tokens (tokens/s)", "18 % less TTFT p50 (ms)". */
function effect({ ratio, metric }, store) {
  const label = store.label(metric);
  if (ratio >= 2) return `${shown(Number(ratio.toPrecision(3)))} times the ${label}`;
  const percent = Number((100 * Math.abs(ratio - 1)).toPrecision(2));
  return `${percent} % ${ratio >= 1 ? "more" : "less"} ${label}`;
}

function where(each, used, store) {
  if (each.count) return each.count > 1 ? ` (mean of ${plural(each.count, "load")})` : "";
  const names = differing(used, store).filter((name) => !name.startsWith("options.") && get(each.row, name) !== undefined);
  const text = describe({ ...each.row, technique: "" }, names);
  return text ? ` (${text})` : "";
}

function sentence(found, used, store) {
  const best = found[0];
  const worst = found.at(-1);
  const parts = [];
  if (best.gain >= SAME) parts.push(el("b", { class: "good" }, `${best.name} gives most: ${effect(best, store)}`), `${where(best, used, store)}. `);
  else parts.push("No change makes anything better. ");
  if (worst !== best && worst.gain < 1 / SAME)
    parts.push(el("b", { class: "bad" }, `${worst.name} costs: ${effect(worst, store)}`), `${where(worst, used, store)}.`);
  else if (worst !== best) parts.push(`Least: ${worst.name}, ${effect(worst, store)}${where(worst, used, store)}.`);
  return el("p", { class: "lead" }, ...parts);
}

/** A bar for each change, to the right of the line at 1 where it is better, on a logarithmic scale. */
function bars(found, store, details) {
  const half = Math.ceil(MOST_BARS / 2);
  const shownOnes = found.length > MOST_BARS ? [...found.slice(0, half), ...found.slice(-half)] : found;
  const most = Math.max(1.25, ...shownOnes.map(({ gain }) => Math.max(gain, 1 / gain)));
  const at = (gain) => 50 + (50 * Math.log(gain)) / Math.log(most);
  const items = shownOnes.map((each) => {
    const [from, to] = [50, at(each.gain)].sort((a, b) => a - b);
    const kind = each.gain >= 1 ? "pays" : "costs";
    return el(
      "li",
      {},
      el("button", { type: "button", class: "link", click: () => details.open(each.row) }, each.name),
      svg(
        "svg",
        { class: `bar ${kind}${each.significant ? "" : " faint"}`, viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { x: from, y: 1, width: Math.max(0.4, to - from), height: 8 }),
        svg("path", { class: "one", d: "M50 0V10" }),
      ),
      el("span", { class: "number" }, `${shown(Number(each.gain.toPrecision(3)))}×`),
      el("small", {}, store.label(each.metric)),
    );
  });
  const cut = found.length > MOST_BARS ? ` The ${half} best and worst of ${found.length} are shown.` : "";
  return el(
    "figure",
    {},
    el("figcaption", {}, "What each change gives: worse ← 1 → better"),
    el("ol", { class: "bars" }, ...items),
    el("p", { class: "soft" }, `Faint: too few rounds, or not told apart from no change. A name opens its row.${cut}`),
  );
}

/** Where rows differ in nothing that can be compared: the fastest and the slowest, and bars of their speeds. */
function fastest(rows, metric, store, details) {
  const order = rows.filter((row) => row.metrics[metric] > 0).sort((a, b) => b.metrics[metric] - a.metrics[metric]);
  const names = differing(order.slice(0, MOST_BARS), store);
  const said = (row) => `${shown(row.metrics[metric], store.unit(metric))} (${describe(row, names)})`;
  const most = order[0].metrics[metric];
  const slowest = order.length > 1 ? ` Slowest: ${said(order.at(-1))}.` : "";
  return [
    el("p", { class: "lead" }, el("b", {}, `Fastest of ${plural(order.length, "row")}: ${said(order[0])}.`), slowest),
    el(
      "figure",
      {},
      el("figcaption", {}, store.label(metric)),
      el(
        "ol",
        { class: "bars" },
        ...order.slice(0, MOST_BARS).map((row) =>
          el(
            "li",
            {},
            el("button", { type: "button", class: "link", click: () => details.open(row) }, describe(row, names)),
            svg(
              "svg",
              { class: "bar even", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
              svg("rect", { x: 0, y: 1, width: (100 * row.metrics[metric]) / most, height: 8 }),
            ),
            el("span", { class: "number" }, shown(row.metrics[metric])),
          ),
        ),
      ),
    ),
  ];
}
