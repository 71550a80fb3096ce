// What tokens cost at a price that the viewer names, and what power they take.

import { Chart } from "./chart.js";
import { amount, kinds, legend, select } from "./controls.js";
import { costOf } from "./derive.js";
import { el } from "./dom.js";
import { asTable } from "./explore.js";
import { MARKS, coloured } from "./points.js";
import { describe, differing } from "./rows.js";
import { sortable } from "./table.js";
import { shown } from "./words.js";

const BY = [
  ["machine.name", "machine.name"],
  ["engine.name", "engine.name"],
  ["model.name", "model.name"],
  ["model.format", "model.format"],
  ["technique", "technique"],
];
const YS = [
  ["cost", "Cost per million tokens ($)"],
  ["joules_per_token", "Energy per token (J)"],
  ["watts", "Power (W)"],
];

const machines = (store) => [...new Set(store.all.map((row) => row.machine.name))];

export const cost = {
  name: "cost",
  title: "Cost and power",

  controls({ store, state }) {
    const prices = machines(store)
      .slice(0, 8)
      .map((name) => amount(state, `price.${name}`, `${name} ($/h)`, state.get("price") || "price of a device"));
    return [
      select(state, "costy", "Show", YS, "cost"),
      select(state, "costby", "Colour", BY, "model.format"),
      amount(state, "price", "Any device ($/h)"),
      ...(prices.length > 1 ? prices : []),
    ];
  },

  draw({ store, state, details }, rows) {
    const y = state.get("costy", "cost");
    const value = (row) =>
      (y === "cost" ? costOf(row, Number(state.get(`price.${row.machine.name}`) || state.get("price"))) : row.metrics[y]) ?? null;
    const found = rows.filter((row) => value(row) !== null && row.metrics.output_tokens_per_s > 0);
    const power = ["joules_per_token", "watts"].some((name) => store.metrics.includes(name));
    if (!found.length) {
      const why =
        y !== "cost"
          ? `No row says ${YS.find(([name]) => name === y)[1]}: this machine may not tell (RAPL, NVML).`
          : "Name a price per hour of a device: cost is that over the output tokens that each row gave in an hour.";
      return [el("p", { class: "note" }, why)];
    }
    const names = differing(found, store);
    const axes = [
      { name: "output_tokens_per_s", label: store.label("output_tokens_per_s"), unit: "tokens/s", log: false },
      { name: y, label: YS.find(([name]) => name === y)[1], unit: y === "cost" ? "$" : store.unit(y), log: false },
    ];
    const series = coloured(found, state.get("costby", "model.format")).map((each) => ({
      ...each,
      points: each.rows.map((row) => ({
        x: row.metrics.output_tokens_per_s,
        y: value(row),
        row,
        mark: MARKS[row.kind],
        label: describe(row, names),
      })),
    }));
    const chart = new Chart({ title: axes[1].label, x: axes[0], y: axes[1], series, open: (row) => details.open(row) });
    const metrics = ["joules_per_token", "watts", "output_tokens_per_s", "cost_per_million_tokens"].filter((name) =>
      found.some((row) => name in row.metrics),
    );
    return [
      el(
        "p",
        { class: "soft" },
        "Cost is at the load of each row: a machine that waits costs as much as one that works." +
          (power ? "" : " No row says energy or power: this machine may not tell (RAPL, NVML)."),
      ),
      legend(series),
      chart.root,
      kinds(found),
      sortable(
        "Cost and power",
        [
          { title: "Configuration", value: (row) => describe(row, names), show: (row) => describe(row, names) },
          { title: axes[1].label, numeric: true, value, show: (row) => shown(value(row)) },
          ...metrics
            .filter((name) => name !== y)
            .map((name) => ({
              title: store.label(name),
              numeric: true,
              value: (row) => row.metrics[name],
              show: (row) => shown(row.metrics[name]),
            })),
        ],
        [...found].sort((a, b) => value(a) - value(b)),
        (row) => details.open(row),
      ),
      asTable(chart.points, axes, details),
    ];
  },
};
