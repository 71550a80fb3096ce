// What machines can do at most, and where rows lie below that (Williams et al. 2009).

import { Chart } from "./chart.js";
import { kinds, legend, select } from "./controls.js";
import { underRoof } from "./derive.js";
import { el } from "./dom.js";
import { asTable } from "./explore.js";
import { MARKS, coloured, style } from "./points.js";
import { describe, differing, groups } from "./rows.js";
import { largestOf } from "./statistics.js";
import { plural, shown, word } from "./words.js";

const PEAKS = [
  ["bf16_flops_per_s", "bf16 products"],
  ["int8_ops_per_s", "int8 products"],
];
const BY = [
  ["phase", "phase"],
  ["model.format", "model.format"],
  ["engine.name", "engine.name"],
  ["technique", "technique"],
  ["load.batch", "load.batch"],
  ["file", "file"],
];

export const roofline = {
  name: "roofline",
  title: "Roofline",

  controls({ state }) {
    return [select(state, "roofby", "Colour", BY, "phase")];
  },

  draw({ store, state, details }, rows) {
    const names = differing(rows, store);
    const found = rows.flatMap((row) =>
      underRoof(row).map((place) => ({
        ...row,
        ...place,
        of: row,
        label: `${describe(row, names)} · ${place.phase}${place.estimated ? " (estimated from weights)" : ""}`,
      })),
    );
    const limited = groups(
      rows.filter((row) => row.machine.limits.read_bytes_per_s > 0),
      "machine.name",
    );
    if (!found.length && !limited.length) {
      return [
        el(
          "p",
          { class: "note" },
          "No row says flops_per_s and bytes_per_s, or the rate and the parameters from which they follow, and no machine its limits.",
        ),
      ];
    }
    const machines = new Set([...limited.map(([name]) => name), ...found.map((each) => each.machine.name)]);
    const by = state.get("roofby", "phase");
    const series = coloured(found, by);
    return [
      legend(series),
      ...[...machines].flatMap((name) => this.machine(name, limited, series, details)),
      kinds(found),
      found.some((each) => each.estimated)
        ? el(
            "p",
            { class: "soft" },
            "Estimated: two operations for each parameter and token, all weights read once in a step; attention and keys and values are left out, and mixtures of experts read less.",
          )
        : null,
    ];
  },

  machine(name, limited, series, details) {
    const limits = latest(limited.find(([machine]) => machine === name)?.[1] ?? []);
    const own = series.map((each) => ({
      ...each,
      points: each.rows
        .filter((row) => row.machine.name === name)
        .map((row) => ({ x: row.intensity, y: row.rate, row: row.of, label: row.label, mark: row.estimated ? "ring" : MARKS[row.kind] })),
    }));
    const axes = [
      { name: "flops_per_byte", label: "Operations for each byte read (FLOP/B)", log: true, unit: "FLOP/B" },
      { name: "flops_per_s", label: "Operations per second (FLOP/s)", log: true, unit: "FLOP/s" },
    ];
    const places = own.flatMap((each) => each.points);
    const roofs = limits ? lines(limits, places) : [];
    const chart = new Chart({
      title: `Roofline of ${name}`,
      x: axes[0],
      y: axes[1],
      series: [...roofs, ...own],
      open: (row) => details.open(row),
      height: 420,
      heading: name,
    });
    const said = limits
      ? [["read_bytes_per_s", "reading"], ...PEAKS]
          .filter(([limit]) => limits[limit] > 0)
          .map(
            ([limit, text]) =>
              `${text} ${shown(limits[limit], limit.includes("bytes") ? "B/s" : limit.includes("int8") ? "op/s" : "FLOP/s")}`,
          )
          .join(", ")
      : "its limits are not known";
    return [
      chart.root,
      el("p", { class: "soft" }, `${word(name)}: ${said}; ${plural(places.length, "point")}.`),
      places.length ? asTable(chart.points, axes, details) : null,
    ];
  },
};

/** The limits of the row that was measured last. */
function latest(rows) {
  return rows.reduce((found, row) => (!found || row.time >= found.time ? row : found), null)?.machine.limits ?? null;
}

/** The slope of memory, and a flat roof for each kind of arithmetic. */
function lines(limits, places) {
  const read = limits.read_bytes_per_s;
  const peaks = PEAKS.filter(([name]) => limits[name] > 0);
  const ridges = peaks.map(([name]) => limits[name] / read);
  const xs = places.map((each) => each.x);
  const all = [1, 10, ...ridges.map((each) => each / 30), ...ridges.map((each) => 10 * each), ...xs];
  const [low, high] = [all.reduce((a, b) => Math.min(a, b)), largestOf(all)];
  const top = Math.max(0, ...ridges) || high;
  const slope = {
    name: "memory",
    color: style("--soft"),
    line: true,
    points: [
      { x: low, y: read * low },
      { x: top, y: read * top },
    ],
  };
  return [
    slope,
    ...peaks.map(([name, text], i) => ({
      name: text,
      color: style("--soft"),
      line: true,
      dash: i ? [6, 4] : null,
      points: [
        { x: limits[name] / read, y: limits[name] },
        { x: high, y: limits[name] },
      ],
    })),
  ];
}
