// Fields that change the view, each bound to one parameter of the address.

import { el } from "./dom.js";
import { get, groups } from "./rows.js";
import { plural, word } from "./words.js";

export function select(state, name, label, choices, otherwise) {
  const current = state.get(name, otherwise);
  const options = choices.map(([value, text]) => el("option", { value, selected: value === current }, text));
  const node = el(
    "select",
    { id: `c-${name}`, change: () => state.set({ [name]: node.value === otherwise ? null : node.value }) },
    ...options,
  );
  return el("label", { class: "control" }, el("span", {}, label), node);
}

export function check(state, name, label, otherwise = false) {
  const on = state.get(name, otherwise ? "1" : "0") === "1";
  const node = el("input", {
    type: "checkbox",
    id: `c-${name}`,
    checked: on,
    change: () => state.set({ [name]: node.checked === otherwise ? null : node.checked ? "1" : "0" }),
  });
  return el("label", { class: "control check" }, node, el("span", {}, label));
}

export function amount(state, name, label, hint = "") {
  const node = el("input", {
    type: "number",
    min: "0",
    step: "any",
    inputmode: "decimal",
    id: `c-${name}`,
    placeholder: hint,
    value: state.get(name),
    change: () => state.set({ [name]: node.value }),
  });
  return el("label", { class: "control" }, el("span", {}, label), node);
}

/** Choices over every metric, and over fields: those in which rows differ first. */
export function metricChoices(store) {
  return store.metrics.map((name) => [name, store.label(name)]);
}

export function fieldChoices(store) {
  const rest = store.fields.filter((name) => !store.varying.includes(name));
  return [...store.varying, ...rest].map((name) => [name, name]);
}

/** The first of `names` that rows have. */
export const firstOf = (store, ...names) => names.find((name) => store.metrics.includes(name)) ?? store.metrics[0] ?? "";

const FILTERS = [
  ["machine.name", "Machine"],
  ["engine.name", "Engine"],
  ["model.name", "Model"],
  ["model.format", "Format"],
  ["technique", "Technique"],
  ["suite", "Suite"],
  ["kind", "Kind"],
  ["benchmark", "Benchmark"],
  ["file", "File"],
];

/** Rows that pass the filters of the address. */
export function passing(store, state) {
  const wanted = FILTERS.map(([name]) => [name, new Set(state.all(`f.${name}`))]).filter(([, set]) => set.size);
  return store.all.filter((row) => wanted.every(([name, set]) => set.has(String(get(row, name) ?? ""))));
}

/** A list of boxes for each filter that has a choice. */
export function filters(store, state) {
  const made = FILTERS.map(([name, label]) => [name, label, groups(store.all, name)]).filter(([, , found]) => found.length > 1);
  const lists = made.map(([name, label, found]) => filter(state, name, label, found));
  const clear = el(
    "button",
    {
      type: "button",
      class: "small",
      id: "clear-filters",
      click: () => state.set(Object.fromEntries(FILTERS.map(([name]) => [`f.${name}`, null]))),
    },
    "Clear",
  );
  clear.addEventListener("click", () => {
    for (const box of document.querySelectorAll("#filters input")) box.checked = false;
  });
  return made.length ? [...lists, clear] : [el("p", { class: "soft" }, "All rows are alike: there is nothing to filter by.")];
}

function filter(state, name, label, found) {
  const chosen = new Set(state.all(`f.${name}`));
  const summary = el("summary", {});
  const tell = () => {
    summary.textContent = chosen.size ? `${label}: ${[...chosen].map((value) => value || "none").join(", ")}` : label;
  };
  const boxes = found.map(([value, rows]) => {
    const text = String(value);
    const box = el("input", { type: "checkbox", checked: chosen.has(text), change: () => change(text, box.checked) });
    return el(
      "label",
      { class: "choice" },
      box,
      el("span", {}, word(value) || "none"),
      el("small", { title: plural(rows.length, "row") }, rows.length.toLocaleString("en")),
    );
  });
  function change(value, on) {
    (on ? chosen.add.bind(chosen) : chosen.delete.bind(chosen))(value);
    state.set({ [`f.${name}`]: [...chosen] });
    tell();
  }
  tell();
  document.getElementById("filters").addEventListener("click", (event) => {
    if (event.target.id !== "clear-filters") return;
    chosen.clear();
    tell();
  });
  return el(
    "details",
    { class: "filter", open: chosen.size > 0 },
    summary,
    el("fieldset", {}, el("legend", { class: "unseen" }, label), ...boxes),
  );
}

/** What the colours mean. */
export function legend(series) {
  if (series.length < 2) return null;
  return el(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    ...series.map(({ name, color, rows }) => {
      const swatch = el("i", { "aria-hidden": "true" });
      swatch.style.background = color;
      return el("li", {}, swatch, name, rows ? el("small", {}, rows.length.toLocaleString("en")) : null);
    }),
  );
}

/** What the marks mean, where there is more than one. */
export function kinds(rows) {
  const found = [...new Set(rows.map((row) => row.kind))].sort();
  const signs = { measured: "●", predicted: "○", simulated: "△", imported: "□" };
  return found.length < 2 ? null : el("p", { class: "soft" }, found.map((kind) => `${signs[kind]} ${kind}`).join("   "));
}
