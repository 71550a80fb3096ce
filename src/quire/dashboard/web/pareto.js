// Quality, speed and size: who is not beaten in all of them by another.

import { Chart } from "./chart.js";
import { check, kinds, legend, select } from "./controls.js";
import { frontier } from "./derive.js";
import { el } from "./dom.js";
import { asTable } from "./explore.js";
import { MARKS, coloured } from "./points.js";
import { describe, differing } from "./rows.js";
import { sortable } from "./table.js";
import { plural, shown } from "./words.js";

const QUALITY = ["perplexity", "kl"];
const SPEED = ["output_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s", "total_tokens_per_s", "tpot_ms_p50"];
const SIZE = ["weight_bytes", "peak_bytes", "kv_bytes"];

const have = (store, names) => names.filter((name) => store.metrics.includes(name));
const offered = (store, names) =>
  (have(store, names).length ? have(store, names) : names.slice(0, 1)).map((name) => [name, store.label(name)]);

export const pareto = {
  name: "pareto",
  title: "Quality, speed, size",

  controls({ store, state }) {
    return [
      ["quality", "Quality", QUALITY],
      ["speed", "Speed", SPEED],
      ["size", "Size", SIZE],
    ]
      .map(([name, label, names]) => {
        const choices = offered(store, names);
        return select(state, name, label, choices, choices[0][0]);
      })
      .concat(check(state, "front", "Only the frontier"));
  },

  draw({ store, state, details }, rows) {
    const [quality, speed, size] = [
      ["quality", QUALITY],
      ["speed", SPEED],
      ["size", SIZE],
    ].map(([name, names]) => state.get(name, offered(store, names)[0][0]));
    const found = whole(rows, [quality, speed, size]);
    if (!found.length)
      return [
        el(
          "p",
          { class: "note" },
          `No configuration has ${[quality, speed, size].map((name) => store.label(name)).join(", ")}, be it in rows of several benchmarks.`,
        ),
      ];
    const sign = (name) => (store.better(name) === "higher" ? 1 : -1);
    const on = frontier(
      found,
      [quality, speed, size].map((name) => [(each) => each.metrics[name], sign(name)]),
    );
    found.forEach((each, i) => {
      each.unbeaten = on[i];
    });
    const shownRows = state.get("front") === "1" ? found.filter((each) => each.unbeaten) : found;
    const names = differing(found, store);
    const axes = [speed, quality].map((name) => ({ name, label: store.label(name), unit: store.unit(name), log: false }));
    const series = coloured(shownRows, "model.format").map((each) => ({
      ...each,
      points: each.rows.map((row) => ({
        x: row.metrics[speed],
        y: row.metrics[quality],
        row: row.of,
        mark: row.unbeaten ? MARKS[row.kind] : "ring",
        label: `${describe(row, names)} · ${shown(row.metrics[size], store.unit(size))}${row.unbeaten ? " · unbeaten" : ""}`,
      })),
    }));
    const chart = new Chart({ title: "Quality over speed", x: axes[0], y: axes[1], series, open: (row) => details.open(row) });
    const column = (name) => ({
      title: store.label(name),
      numeric: true,
      value: (each) => each.metrics[name],
      show: (each) => shown(each.metrics[name], store.unit(name)),
    });
    return [
      el(
        "p",
        { class: "soft" },
        `${plural(on.filter(Boolean).length, "configuration")} of ${found.length} (filled) are beaten by no other in quality, speed and size at once. ` +
          "Where no row has all three, those of one model, format and technique are put together, the fastest of each.",
      ),
      legend(series),
      chart.root,
      kinds(found),
      sortable(
        "Configurations",
        [
          { title: "Configuration", value: (each) => describe(each, names), show: (each) => describe(each, names) },
          column(quality),
          column(speed),
          column(size),
          { title: "Unbeaten", value: (each) => Number(each.unbeaten), show: (each) => (each.unbeaten ? "yes" : "no") },
        ],
        [...shownRows].sort((a, b) => b.unbeaten - a.unbeaten || sign(speed) * (b.metrics[speed] - a.metrics[speed])),
        (each) => details.open(each.of),
      ),
      asTable(chart.points, axes, details),
    ];
  },
};

/** Rows that have all of `names`: by themselves, or with what other rows say of the same configuration or model. */
function whole(rows, names) {
  const [quality, speed, size] = names;
  const model = (row) => JSON.stringify([row.model.name, row.model.format, row.model.kv_format]);
  const key = (row) => JSON.stringify([row.kind === "imported", row.engine.name, row.machine.name, model(row), row.technique, row.on]);
  const known = new Map();
  for (const row of rows) {
    for (const name of [quality, size]) {
      if (name in row.metrics)
        for (const at of [key(row), model(row)]) if (!known.has(`${at} ${name}`)) known.set(`${at} ${name}`, row.metrics[name]);
    }
  }
  const found = new Map();
  for (const row of rows.filter((each) => speed in each.metrics)) {
    const more = [quality, size].map((name) => [
      name,
      row.metrics[name] ?? known.get(`${key(row)} ${name}`) ?? known.get(`${model(row)} ${name}`),
    ]);
    if (more.some(([, value]) => value === undefined)) continue;
    const best = found.get(key(row));
    const faster = speed.includes("_ms_") ? -1 : 1;
    if (!best || faster * (row.metrics[speed] - best.metrics[speed]) > 0)
      found.set(key(row), { ...row, of: row, metrics: { ...row.metrics, ...Object.fromEntries(more) } });
  }
  return [...found.values()];
}
