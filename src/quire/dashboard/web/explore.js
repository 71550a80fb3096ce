// Any metric or field over any other, by colour and in panels.

import { Chart } from "./chart.js";
import { check, fieldChoices, firstOf, kinds, legend, metricChoices, select } from "./controls.js";
import { el } from "./dom.js";
import { alongLoad, axis, coloured, point } from "./points.js";
import { differing, groups } from "./rows.js";
import { sortable } from "./table.js";
import { plural, shown, word } from "./words.js";

const PANELS = 12;

/** What is chosen, or what shows most where nothing is. */
function chosen({ store, state }) {
  return {
    x: state.get("x", store.varying.includes("load.batch") ? "load.batch" : firstOf(store, "ttft_ms_p50", "tpot_ms_p50")),
    y: state.get("y", firstOf(store, "output_tokens_per_s", "decode_tokens_per_s", "perplexity")),
    by: state.get("color", ["engine.name", "model.format", "technique", "file"].find((name) => store.varying.includes(name)) ?? ""),
    facet: state.get("facet"),
  };
}

export const explore = {
  name: "explore",
  title: "Explore",

  controls(context) {
    const { store, state } = context;
    const { x, y, by } = chosen(context);
    const fields = fieldChoices(store);
    const all = [...metricChoices(store), ...fields];
    const none = [["", "none"]];
    return [
      select(state, "x", "Across (x)", all, x),
      select(state, "y", "Up (y)", all, y),
      select(state, "color", "Colour", [...none, ...fields, ...metricChoices(store)], by),
      select(state, "facet", "Panels", [...none, ...fields], ""),
      check(state, "lines", "Lines along the load"),
      check(state, "logx", "Log x"),
      check(state, "logy", "Log y"),
    ];
  },

  draw(context, rows) {
    const { store, state, details } = context;
    const { x, y, by, facet } = chosen(context);
    const names = differing(rows, store);
    const axes = [axis(store, rows, x, state.get("logx") === "1"), axis(store, rows, y, state.get("logy") === "1")];
    const series = coloured(rows, by);
    const panels = facet ? groups(rows, facet) : [["", rows]];
    const charts = panels.slice(0, PANELS).map(([value, inside]) => {
      const own = new Set(inside);
      const lines = series.map((each) => {
        const points = each.rows
          .filter((row) => own.has(row))
          .map((row) => point(row, ...axes, names))
          .filter(Boolean);
        return { ...each, line: state.get("lines") === "1", points: alongLoad(points) };
      });
      return new Chart({
        title: "Rows",
        x: axes[0],
        y: axes[1],
        series: lines,
        open: (row) => details.open(row),
        height: facet ? 260 : 420,
        heading: facet ? `${facet}: ${word(value) || "none"}` : null,
      });
    });
    const drawn = charts.flatMap((chart) => chart.points);
    const lacking = rows.length - drawn.length;
    return [
      legend(series),
      el("div", { class: facet ? "panels" : "panel" }, ...charts.map((chart) => chart.root)),
      panels.length > PANELS ? el("p", { class: "note" }, `${panels.length - PANELS} more panels are left out: filter.`) : null,
      lacking > 0 && panels.length <= PANELS
        ? el("p", { class: "soft" }, `${plural(lacking, "row")} without ${store.label(x)} or ${store.label(y)}${axes.some((each) => each.log) ? ", or with 0 on a logarithmic axis" : ""}.`)
        : null,
      kinds(rows),
      asTable(drawn, axes, details),
    ];
  },
};

/** The points as a table, made when it is opened. */
export function asTable(points, axes, details) {
  const value = (ax, at) => (ax.words ? ax.words[at] : shown(at, ax.unit));
  const columns = [
    { title: "Row", value: (each) => each.label, show: (each) => each.label },
    ...["x", "y"].map((name, i) => ({
      title: axes[i].label,
      numeric: true,
      value: (each) => each[name],
      show: (each) => value(axes[i], each[name]),
    })),
    {
      title: "95 % interval",
      value: (each) => each.low,
      show: (each) => (each.low === undefined ? "" : `${shown(each.low)} to ${shown(each.high)}`),
    },
  ];
  const box = el("details", { class: "as-table" }, el("summary", {}, "The same as a table"));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(sortable("Points", columns, points, (each) => details.open(each.row)));
  });
  return box;
}
