// A row with everything it says, and the command that makes it again.

import { byId, copyButton, el } from "./dom.js";
import { shown, word } from "./words.js";

export class Details {
  constructor(store, state) {
    this.store = store;
    this.state = state;
    this.dialog = byId("details");
    this.dialog.addEventListener("close", () => this.state.set({ row: null }));
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  open(row) {
    this.state.set({ row: row.id });
    this.show(row);
  }

  /** Of the address: the row that it names, or none. */
  follow() {
    const row = this.store.byId.get(this.state.get("row"));
    if (row) this.show(row);
    else if (this.dialog.open) this.dialog.close();
  }

  show(row) {
    const close = el("button", { type: "button", class: "close", "aria-label": "Close", click: () => this.dialog.close() }, "✕");
    const title = el("h2", { id: "details-title" }, `${row.engine.name} · ${row.model.name} ${row.model.format} · ${row.benchmark}`);
    this.dialog.replaceChildren(
      el("header", {}, title, close),
      row.command ? command(row) : el("p", { class: "soft" }, "No command is known that makes this row again."),
      ...row.notes.map((note) => el("p", { class: "soft" }, note)),
      this.metrics(row),
      el("h3", {}, "What it is"),
      table(this.facts(row)),
      el(
        "p",
        {},
        copyButton(() => location.href, "Copy link to this row"),
        " ",
        copyButton(() => JSON.stringify(plain(row), null, 2), "Copy as JSON"),
      ),
    );
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  metrics(row) {
    const names = Object.keys(row.metrics);
    if (!names.length) return el("p", { class: "soft" }, "It has no metrics.");
    const lines = names.map((name) => {
      const [low, high] = row.intervals[name] ?? [];
      const meaning = row.dialect[name] ?? this.store.meaning(name);
      const rounds = row.samples[name] ?? [];
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, name, el("small", {}, row.dialect[name] ? `${meaning} (its dialect)` : meaning)),
        el("td", {}, shown(row.metrics[name], this.store.unit(name))),
        el("td", {}, low === undefined ? "" : `${shown(low)} to ${shown(high)}`),
        el(
          "td",
          { class: "soft" },
          rounds.length
            ? `${rounds.length}: ${rounds
                .slice(0, 12)
                .map((value) => shown(value))
                .join(", ")}${rounds.length > 12 ? " …" : ""}`
            : "",
        ),
      );
    });
    const head = ["Metric", "Median", "95 % interval", "Rounds"].map((text) => el("th", { scope: "col" }, text));
    return el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Metrics" },
      el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...lines)),
    );
  }

  facts(row) {
    const found = [["file", row.file]];
    for (const name of ["kind", "benchmark", "suite", "time", "technique"]) found.push([name, row[name]]);
    if (row.technique) found.push(["on", row.on]);
    for (const part of ["machine", "engine", "model", "load", "options"]) {
      for (const [name, value] of Object.entries(row[part])) {
        if (typeof value !== "object") found.push([`${part}.${name}`, value]);
        else for (const [inner, each] of Object.entries(value)) found.push([`${part}.${name}.${inner}`, each]);
      }
    }
    return found
      .filter(([, value]) => value !== "" && value !== undefined)
      .map(([name, value]) => [name, word(value), this.store.meaning(name)]);
  }
}

function plain({ id, file, ...row }) {
  return { schema: 1, ...row };
}

function command(row) {
  return el(
    "div",
    { class: "command" },
    el("code", {}, row.command),
    copyButton(() => row.command),
  );
}

function table(facts) {
  const lines = facts.map(([name, value, meaning]) =>
    el("tr", {}, el("th", { scope: "row", title: meaning || null }, name), el("td", {}, value)),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Fields" },
    el("table", { class: "facts" }, el("tbody", {}, ...lines)),
  );
}
