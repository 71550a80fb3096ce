// All rows as a table, and as a file for other tools.

import { el } from "./dom.js";
import { get } from "./rows.js";
import { sortable } from "./table.js";
import { shown, word } from "./words.js";

const METRICS = 8;

export const listing = {
  name: "rows",
  title: "Rows",

  controls: () => [],

  draw({ store, details }, rows) {
    const fields = [
      "engine.name",
      "model.name",
      "model.format",
      "load.batch",
      "load.input_len",
      "load.output_len",
      "technique",
      "on",
      "kind",
      "suite",
      "time",
    ].filter((name) => store.varying.includes(name) || name === "engine.name");
    const counts = store.metrics.map((name) => [name, rows.reduce((sum, row) => sum + (name in row.metrics), 0)]);
    const metrics = counts
      .filter(([, count]) => count)
      .sort((a, b) => b[1] - a[1])
      .slice(0, METRICS)
      .map(([name]) => name);
    const columns = [
      ...fields.map((name) => ({
        title: name,
        value: (row) => get(row, name),
        show: (row) => (name === "on" && !row.technique ? "" : word(get(row, name))),
      })),
      ...metrics.map((name) => ({
        title: store.label(name),
        numeric: true,
        hint: store.meaning(name),
        value: (row) => row.metrics[name],
        show: (row) => shown(row.metrics[name]),
      })),
    ];
    const download = el("button", { type: "button", click: () => save(rows, store) }, "Save these rows as CSV");
    return [el("p", {}, download), sortable("Rows", columns, rows, (row) => details.open(row))];
  },
};

function save(rows, store) {
  const names = [...store.fields, "command", ...store.metrics];
  const cell = (value) => {
    const text = String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [names, ...rows.map((row) => names.map((name) => get(row, name)))].map((line) => line.map(cell).join(","));
  const url = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  const link = el("a", { href: url, download: "rows.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
