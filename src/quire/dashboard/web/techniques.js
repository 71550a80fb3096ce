// What each technique buys: a metric with it over the same without it, beside what is claimed for it.

import { metricChoices, select } from "./controls.js";
import { el, svg } from "./dom.js";
import { describe, differing, groups } from "./rows.js";
import { compareRows, largestOf } from "./statistics.js";
import { sortable } from "./table.js";
import { plural, shown } from "./words.js";

const BAR = { width: 140, height: 18 };

const first = (store) =>
  ["output_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s"].find((name) => store.metrics.includes(name)) ??
  store.metrics[0] ??
  "";

export const techniques = {
  name: "techniques",
  title: "What techniques buy",

  controls({ store, state }) {
    return [select(state, "metric", "Metric", [["", "what each is for"], ...metricChoices(store)], "")];
  },

  draw({ store, state, details }, rows) {
    const chosen = state.get("metric");
    const pairs = switched(rows)
      .map(([on, off]) => {
        const metric = chosen || on.improves || off.improves || first(store);
        return { on, off, metric, ...compareRows(on, off, metric) };
      })
      .filter((pair) => pair.ratio > 0);
    if (!pairs.length)
      return [
        el(
          "p",
          { class: "note" },
          `No two rows differ in whether a technique is on and both have ${chosen ? store.label(chosen) : "a metric of it"}.`,
        ),
      ];
    const names = differing(
      pairs.map((pair) => pair.on),
      store,
    ).filter((name) => !name.startsWith("options."));
    const most = largestOf([1.5, ...pairs.flatMap(({ ratio, high, low }) => [ratio, 1 / ratio, high || 0, low > 0 ? 1 / low : 0])]);
    const columns = [
      { title: "Technique", value: ({ on }) => on.technique, show: ({ on }) => on.technique },
      { title: "Metric", value: ({ metric }) => metric, show: ({ metric }) => store.label(metric) },
      { title: "On / off", numeric: true, value: (pair) => pair.ratio, show: (pair) => `${shown(pair.ratio)}×` },
      {
        title: "95 % interval",
        value: (pair) => pair.low,
        show: (pair) => (Number.isNaN(pair.low) ? "one round" : `${shown(pair.low)} to ${shown(pair.high)}`),
      },
      { title: `worse ← 1 → better`, value: (pair) => pair.ratio, show: (pair) => bar(pair, store.better(pair.metric), most) },
      {
        title: "Told apart",
        value: (pair) => Number(pair.significant),
        show: (pair) => (pair.significant ? "yes" : pair.rounds < 6 ? "too few rounds" : "no"),
      },
      { title: "Claimed", wide: true, value: (pair) => claims(pair)[0] ?? "", show: (pair) => claims(pair).join("; ") || "–" },
      { title: "Where", value: ({ on }) => describe(on, names), show: ({ on }) => describe({ ...on, technique: "" }, names) },
      {
        title: "Off",
        value: (pair) => pair.off.metrics[pair.metric],
        show: ({ off, metric }) =>
          el("button", { type: "button", class: "link", click: () => details.open(off) }, shown(off.metrics[metric], store.unit(metric))),
      },
    ];
    return [
      el(
        "p",
        { class: "soft" },
        `${plural(pairs.length, "pair")} of rows, with the technique on and off. The first column opens the one with it on, the last the one without.`,
      ),
      sortable("What techniques buy", columns, pairs, (pair) => details.open(pair.on)),
    ];
  },
};

const claims = ({ on, off }) => [...new Set([on.claim, off.claim].filter(Boolean))];

/** [with, without] of each row that has a technique on: of those that are else alike, the one with most options alike.
 *
 * Without: off, or of no technique at all.
 */
export function switched(rows) {
  for (const row of rows)
    row.alike = JSON.stringify([row.kind, row.benchmark, row.suite, row.machine.name, row.engine.name, row.model.name, row.load]);
  return groups(rows, "alike").flatMap(([, inside]) => {
    const parts = new Map(groups(inside, "technique"));
    return [...parts]
      .filter(([technique]) => technique)
      .flatMap(([, own]) => {
        const off = own.filter((row) => !row.on);
        const others = off.length ? off : (parts.get("") ?? []);
        return others.length ? own.filter((row) => row.on).map((row) => [row, nearest(row, others)]) : [];
      });
  });
}

function nearest(row, others) {
  const same = (other) =>
    Object.entries(row.options).filter(([name, value]) => other.options[name] === value).length +
    (other.model.format === row.model.format) +
    (other.model.kv_format === row.model.kv_format) +
    (other.file === row.file);
  return others.reduce((found, other) => (same(other) > same(found) ? other : found));
}

/** A ratio and its interval on a logarithmic scale, to the right where the technique pays. */
function bar({ ratio, low, high, significant }, better, most) {
  const sign = better === "lower" ? -1 : 1;
  const at = (value) => (BAR.width / 2) * (1 + (sign * Math.log(value)) / Math.log(most));
  const pays = sign * Math.log(ratio) >= 0;
  const ends = low > 0 && high > 0 ? [at(low), at(high)] : [at(ratio), at(ratio)];
  const middle = BAR.height / 2;
  return svg(
    "svg",
    {
      class: `ratio ${better === "neither" ? "even" : pays ? "pays" : "costs"}${significant ? "" : " faint"}`,
      width: BAR.width,
      height: BAR.height,
      role: "img",
      "aria-label": `${shown(ratio)} times`,
    },
    svg("path", { class: "one", d: `M${BAR.width / 2} 0V${BAR.height}` }),
    svg("path", { class: "range", d: `M${ends[0]} ${middle}H${ends[1]}` }),
    svg("circle", { cx: at(ratio), cy: middle, r: 4 }),
  );
}
