// The page: views over the rows that pass the filters.

import { best } from "./best.js";
import { dropCharts } from "./chart.js";
import { comparison } from "./compare.js";
import { filters, passing } from "./controls.js";
import { cost } from "./cost.js";
import { curves } from "./curves.js";
import { Details } from "./details.js";
import { byId, el } from "./dom.js";
import { explore } from "./explore.js";
import { listing } from "./listing.js";
import { pareto } from "./pareto.js";
import { roofline } from "./roofline.js";
import { load } from "./rows.js";
import { State } from "./state.js";
import { summary } from "./summary.js";
import { techniques } from "./techniques.js";
import { plural } from "./words.js";

const VIEWS = [summary, explore, curves, best, techniques, comparison, roofline, pareto, cost, listing];
const NARROW = matchMedia("(max-width: 50rem)");
const WATCH = 1000; // ms

class Page {
  constructor(store) {
    this.state = new State();
    this.details = new Details(store, this.state);
    this.context = { store, state: this.state, details: this.details };
    byId("views").append(
      ...VIEWS.map(({ name, title }) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": "view",
            click: () => this.state.set({ view: name, row: null }, true),
            keydown: (event) => this.arrow(event, name),
          },
          title,
        ),
      ),
    );
    byId("filters").append(...filters(store, this.state));
    byId("filter-box").open = !NARROW.matches;
    this.state.watch((whole) => this.follow(whole));
    addEventListener("popstate", () => {
      this.state.read();
      this.follow(true);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.follow(true);
  }

  get view() {
    return VIEWS.find(({ name }) => name === this.state.get("view")) ?? VIEWS[0];
  }

  follow(whole) {
    if (whole && this.drawn !== undefined) byId("filters").replaceChildren(...filters(this.context.store, this.state));
    const again = (this.view.again ?? []).map((name) => this.state.get(name)).join("\n");
    if (whole || this.shown !== this.view || this.again !== again) this.open();
    this.again = again;
    // Opening a row changes the address and nothing that is drawn.
    const about = [...this.state.parameters].filter(([name]) => name !== "row").join("\n");
    if (whole || this.drawn !== about) this.draw();
    this.drawn = about;
    if (whole) this.details.follow();
  }

  open() {
    this.shown = this.view;
    for (const { name } of VIEWS) {
      const on = name === this.view.name;
      byId(`tab-${name}`).setAttribute("aria-selected", String(on));
      byId(`tab-${name}`).tabIndex = on ? 0 : -1;
    }
    byId("view").setAttribute("aria-labelledby", `tab-${this.view.name}`);
    byId(`tab-${this.view.name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
    byId("controls").replaceChildren(...this.view.controls(this.context));
  }

  draw() {
    const rows = passing(this.context.store, this.state);
    byId("count").textContent =
      rows.length === this.context.store.all.length
        ? plural(rows.length, "row")
        : `${rows.length.toLocaleString("en")} of ${plural(this.context.store.all.length, "row")}`;
    dropCharts();
    const nothing = el("p", { class: "note" }, "No row passes the filters.");
    byId("result").replaceChildren(...(rows.length ? this.view.draw(this.context, rows) : [nothing]).filter(Boolean));
  }

  arrow(event, name) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = VIEWS[(VIEWS.findIndex((view) => view.name === name) + step + VIEWS.length) % VIEWS.length];
    this.state.set({ view: next.name }, true);
    byId(`tab-${next.name}`).focus();
  }
}

/** Load the page anew once the files behind it have changed; the view is in the address. */
function watchFiles(stamp) {
  const say = (text) => {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  };
  const look = async () => {
    try {
      const found = await (await fetch("state")).json();
      const changed = found.stamp && found.stamp !== stamp;
      const reading = byId("details").open;
      if (changed && !reading) location.reload();
      say(changed && reading ? "The files have changed: the page follows once this row is closed." : found.error);
    } catch {
      say("The server that made this page does not answer; what is shown may be old.");
    }
  };
  setInterval(() => {
    if (!document.hidden) look();
  }, WATCH);
}

async function start() {
  const data = byId("data");
  const store = await load(data.textContent);
  const { stamp } = data.dataset;
  data.remove();
  new Page(store);
  byId("loading").hidden = true;
  if (stamp) watchFiles(stamp);
}

start().catch((error) => {
  byId("loading").textContent = `The rows could not be shown: ${error.message}`;
  throw error;
});
