// Two runs side by side: files, suites, versions or anything else in which rows differ, told apart where rounds allow it.

import { metricChoices, select } from "./controls.js";
import { el } from "./dom.js";
import { describe, differing, get, groups } from "./rows.js";
import { compareRows, geometricMean } from "./statistics.js";
import { sortable } from "./table.js";
import { plural, shown, word } from "./words.js";

const SIDES = [
  "file",
  "suite",
  "engine.version",
  "engine.commit",
  "engine.name",
  "machine.name",
  "model.format",
  "kind",
  "model.kv_format",
  "time",
];
const NAMED = ["kind", "benchmark", "suite", "machine.name", "engine.name"];
const WHOLE = ["model", "load", "technique", "on", "options"];

function chosen({ store, state }) {
  const offered = [...SIDES.filter((name) => store.varying.includes(name)), ...store.varying.filter((name) => !SIDES.includes(name))];
  const side = state.get("side", offered[0] ?? "file");
  const values = groups(store.all, side).map(([value]) => String(value));
  return { offered, side, values, a: state.get("a", values[0]), b: state.get("b", values[1] ?? values[0]), metric: state.get("of") };
}

export const comparison = {
  name: "compare",
  title: "Side by side",

  controls(context) {
    const { store, state } = context;
    const { offered, side, values, a, b } = chosen(context);
    const choices = values.map((value) => [value, value || "none"]);
    const node = select(
      state,
      "side",
      "Compare",
      offered.map((name) => [name, name]),
      side,
    );
    // The choices of A and B are those of what is compared.
    node.addEventListener("change", () => state.set({ a: null, b: null, view: "compare" }));
    return [
      node,
      select(state, "a", "A", choices, a),
      select(state, "b", "B", choices, b),
      select(state, "of", "Metric", [["", "those that matter most"], ...metricChoices(store)], ""),
    ];
  },

  again: ["side"],

  draw(context, rows) {
    const { store, details } = context;
    const { side, a, b, metric } = chosen(context);
    const matched = pairs(rows, side, a, b);
    if (!matched.length) return [el("p", { class: "note" }, `No row of A has one of B that is alike but for ${side}.`)];
    const metrics = metric ? [metric] : telling(store, matched);
    const lines = matched
      .flatMap(([x, y]) => metrics.map((name) => ({ x, y, name, found: compareRows(y, x, name) })))
      .filter((each) => each.found);
    const names = differing(
      matched.map(([x]) => x),
      store,
    ).filter((name) => name !== side);
    return [
      el(
        "p",
        { class: "soft" },
        `A is ${word(a) || "none"}, B is ${word(b) || "none"}; ${plural(matched.length, "pair")} of rows that are alike but for ${side}. ` +
          "A difference counts where the 95 % interval of B / A leaves 1 out and both have 6 rounds or more.",
      ),
      summary(store, metrics, lines),
      sortable("Side by side", columns(store, names, details), lines, (each) => details.open(each.y)),
    ];
  },
};

/** [row of a, row of b] of all that are alike but for the field `side`, of which `a` and `b` are values as texts. */
export function pairs(rows, side, a, b) {
  // The side's own field, and what it entails, is no part of what must be alike.
  const key = (row) =>
    JSON.stringify([
      ...NAMED.filter((name) => name !== side && !(side === "file" && name === "suite")).map((name) => get(row, name)),
      ...WHOLE.map((name) => without(row, name, side)),
    ]);
  const of = (value) => rows.filter((row) => String(get(row, side) ?? "") === value);
  const others = new Map(of(b).map((row) => [key(row), row]));
  return of(a)
    .map((row) => [row, others.get(key(row))])
    .filter(([row, other]) => other && other !== row);
}

function without(row, part, side) {
  const value = row[part];
  if (part === side) return null;
  if (typeof value !== "object") return value;
  return Object.entries(value)
    .filter(([name]) => `${part}.${name}` !== side)
    .sort(([x], [y]) => (x < y ? -1 : 1));
}

const FIRST = [
  "output_tokens_per_s",
  "ttft_ms_p50",
  "tpot_ms_p50",
  "itl_ms_p99",
  "e2e_ms_p50",
  "requests_per_s",
  "perplexity",
  "peak_bytes",
  "joules_per_token",
];

function telling(store, matched) {
  const have = (name) => matched.some(([x, y]) => name in x.metrics && name in y.metrics);
  const found = FIRST.filter(have);
  return found.length ? found : store.metrics.filter(have).slice(0, 6);
}

function summary(store, metrics, lines) {
  const items = metrics.map((name) => {
    const own = lines.filter((each) => each.name === name);
    const better = store.better(name);
    const good = own.filter(({ found }) => found.significant && found.ratio > 1 === (better === "higher")).length;
    const bad = own.filter(({ found }) => found.significant).length - good;
    const judged = better === "neither" ? plural(good + bad, "difference") : `B better ${good}, worse ${bad}`;
    return own.length
      ? el(
          "li",
          {},
          el("b", {}, `${shown(geometricMean(own.map(({ found }) => found.ratio)))}×`),
          ` ${store.label(name)}`,
          el("small", {}, `${judged} of ${own.length}`),
        )
      : null;
  });
  return el("ul", { class: "tiles", "aria-label": "Geometric means of B / A" }, ...items);
}

function columns(store, names, details) {
  const side = (each, row) =>
    el("button", { type: "button", class: "link", click: () => details.open(row) }, shown(row.metrics[each.name], store.unit(each.name)));
  return [
    { title: "Row", value: ({ x }) => describe(x, names), show: ({ x }) => describe(x, names) },
    { title: "Metric", value: ({ name }) => name, show: ({ name }) => store.label(name) },
    { title: "A", numeric: true, value: (each) => each.x.metrics[each.name], show: (each) => side(each, each.x) },
    { title: "B", numeric: true, value: (each) => each.y.metrics[each.name], show: (each) => side(each, each.y) },
    { title: "B / A", numeric: true, value: ({ found }) => found.ratio, show: ({ found }) => `${shown(found.ratio)}×` },
    {
      title: "95 % interval",
      value: ({ found }) => found.low,
      show: ({ found }) => (Number.isNaN(found.low) ? "one round" : `${shown(found.low)} to ${shown(found.high)}`),
    },
    { title: "Told apart", value: ({ found }) => Number(found.significant), show: (each) => verdict(store, each) },
  ];
}

function verdict(store, { name, found }) {
  if (!found.significant) return found.rounds < 6 ? "too few rounds" : "no";
  const better = store.better(name);
  if (better === "neither") return "differs";
  return found.ratio > 1 === (better === "higher") ? el("b", { class: "good" }, "B is better") : el("b", { class: "bad" }, "B is worse");
}
