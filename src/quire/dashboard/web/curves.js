// Throughput over latency: a line for each configuration, along its batch or rate.

import { Chart } from "./chart.js";
import { check, kinds, legend, metricChoices, select } from "./controls.js";
import { el } from "./dom.js";
import { asTable } from "./explore.js";
import { alongLoad, axis, coloured, point } from "./points.js";
import { describe, differing, groups, number } from "./rows.js";

const LATENCIES = ["tpot_ms_p50", "itl_ms_p50", "ttft_ms_p50", "e2e_ms_p50"];
const RATES = ["output_tokens_per_s", "total_tokens_per_s", "decode_tokens_per_s", "requests_per_s", "goodput_per_s"];
const ASKED = new Set(["load.batch", "load.rate", "load.requests"]);

const have = (rows, names) => names.find((name) => rows.some((row) => name in row.metrics)) ?? names[0];

export const curves = {
  name: "curves",
  title: "Throughput and latency",

  controls({ store, state }) {
    const is = (test) => metricChoices(store).filter(([name]) => test.test(name));
    return [
      select(state, "latency", "Latency (x)", is(/_ms_/), have(store.all, LATENCIES)),
      select(state, "rate", "Throughput (y)", is(/_per_s$/), have(store.all, RATES)),
      check(state, "logx", "Log x"),
      check(state, "logy", "Log y"),
    ];
  },

  draw({ store, state, details }, rows) {
    const axes = [
      axis(store, rows, state.get("latency", have(store.all, LATENCIES)), state.get("logx") === "1"),
      axis(store, rows, state.get("rate", have(store.all, RATES)), state.get("logy") === "1"),
    ];
    const drawn = rows.filter((row) => axes.every((each) => number(row, each.name) !== null));
    if (!drawn.length) return [el("p", { class: "note" }, `No row has both ${axes[0].label} and ${axes[1].label}.`)];
    const names = differing(drawn, store);
    const telling = [...names.filter((name) => !ASKED.has(name)), ...(drawn.some((row) => row.file !== drawn[0].file) ? ["file"] : [])];
    // A configuration's name is made once for its rows: they differ in load alone.
    for (const row of drawn) row.curve = describe(row, telling);
    const series = coloured(drawn, "curve").map((each) => ({
      ...each,
      line: true,
      points: groups(each.rows, "curve").flatMap(([curve, inside]) =>
        alongLoad(inside.map((row) => point(row, ...axes, names)).filter(Boolean)).map((one) => Object.assign(one, { line: curve })),
      ),
    }));
    const chart = new Chart({
      title: "Throughput over latency",
      x: axes[0],
      y: axes[1],
      series,
      open: (row) => details.open(row),
      height: 440,
    });
    return [
      el("p", { class: "soft" }, "Better is up and to the left. A line goes from little load to much."),
      legend(series),
      chart.root,
      kinds(drawn),
      asTable(chart.points, axes, details),
    ];
  },
};
