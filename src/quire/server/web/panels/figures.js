// Live figures from /metrics, read while they are shown: gauges as they are, rates and quantiles between two readings.

import { ask } from "../api.js";
import { el, svg } from "../dom.js";
import { histogram, largest, parse, quantile, total } from "../metrics.js";

const EVERY = 2000; // ms
const KEPT = 60; // readings: two minutes
const WINDOW = 10; // readings that a quantile is taken over: single requests would leave gaps
const WIDTH = 280;
const HEIGHT = 70;

const TTFT = "vllm:time_to_first_token_seconds";
const ITL = "vllm:inter_token_latency_seconds";

const whole = (value) => value.toFixed(0);
const rate = (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0));
const time = (seconds) => (seconds < 1 ? `${(1000 * seconds).toPrecision(3).replace(/\.?0+$/, "")} ms` : `${seconds.toFixed(2)} s`);

const TILES = [
  ["running", "Running", whole],
  ["waiting", "Waiting", whole],
  ["kv", "KV cache used", (value) => `${(100 * value).toFixed(1)} %`],
  ["rate", "Tokens/s", rate],
];

const CHARTS = [
  ["Tokens/s", rate, [["rate", "now"]]],
  ["Sequences", whole, [["running", "running"], ["waiting", "waiting"]]],
  ["KV cache used", (value) => `${(100 * value).toFixed(1)} %`, [["kv", "now"]]],
  ["Time to first token", time, [["ttft50", "median"], ["ttft95", "p95"]]],
  ["Between tokens", time, [["itl50", "median"], ["itl95", "p95"]]],
];

export class Figures {
  constructor(root) {
    this.readings = [];
    this.tiles = TILES.map(([, label]) => el("div", { class: "tile" }, el("b", {}, "–"), el("span", {}, label)));
    this.charts = CHARTS.map(([title, show, series]) => new Chart(title, show, series));
    this.note = el("p", { class: "note" }, "Read every 2 s while shown; times are of the last 20 s.");
    root.append(el("div", { class: "tiles" }, ...this.tiles),
      ...this.charts.map((chart) => chart.root), this.note);
    document.addEventListener("visibilitychange", () => this.show(this.shown));
  }

  /** Read while shown, on a page that is seen. */
  show(shown) {
    this.shown = shown;
    clearTimeout(this.timer);
    if (shown && !document.hidden) this.read();
  }

  async read() {
    clearTimeout(this.timer);
    const turn = this.turn = Symbol("turn");
    try {
      const text = await (await ask("metrics")).text();
      this.readings = [...this.readings, this.reading(parse(text))].slice(-KEPT);
      this.note.classList.remove("error");
      this.note.textContent = "Read every 2 s while shown; times are of the last 20 s.";
      this.draw();
    } catch (error) {
      this.note.classList.add("error");
      this.note.textContent = `No figures: ${error.message}`;
    }
    if (this.shown && !document.hidden && this.turn === turn) this.timer = setTimeout(() => this.read(), EVERY);
  }

  reading(metrics) {
    const last = this.readings.at(-1);
    const old = this.readings.at(-WINDOW) ?? this.readings[0];
    const found = {
      at: performance.now() / 1000,
      running: total(metrics, "vllm:num_requests_running"),
      waiting: total(metrics, "vllm:num_requests_waiting"),
      kv: largest(metrics, "vllm:kv_cache_usage_perc"),
      tokens: total(metrics, "vllm:generation_tokens_total"),
      ttft: histogram(metrics, TTFT),
      itl: histogram(metrics, ITL),
    };
    // An engine that was started again counts from 0.
    const more = last ? found.tokens - last.tokens : -1;
    found.rate = more < 0 ? null : more / (found.at - last.at);
    for (const name of ["ttft", "itl"]) {
      for (const percent of [50, 95]) {
        found[name + percent] = old ? quantile(old[name], found[name], percent / 100) : null;
      }
    }
    return found;
  }

  draw() {
    const last = this.readings.at(-1);
    TILES.forEach(([name, , show], i) => {
      this.tiles[i].firstChild.textContent = last[name] === null ? "–" : show(last[name]);
    });
    for (const chart of this.charts) chart.draw(this.readings);
  }
}

class Chart {
  /** `series`: [field of a reading, name], the first one drawn strongest. */
  constructor(title, show, series) {
    this.title = title;
    this.format = show;
    this.series = series;
    this.lines = series.map((_, i) => svg("path", { class: `line line${i}` }));
    this.most = el("span", { class: "most" });
    this.legend = el("div", { class: "legend" });
    this.graph = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("path", { class: "axis", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 0.5H${WIDTH}` }), ...this.lines);
    this.root = el("figure", {}, el("figcaption", {}, el("span", {}, title), this.most), this.graph, this.legend);
    this.draw([]);
  }

  draw(readings) {
    const known = readings.flatMap((reading) => this.series.map(([field]) => reading[field])).filter((value) => value !== null);
    const top = Math.max(...known, 0);
    this.most.textContent = top > 0 ? `top ${this.format(top)}` : "";
    this.series.forEach(([field], i) => this.lines[i].setAttribute("d", path(readings, field, top || 1)));
    const now = this.series.map(([field, name], i) => {
      const value = readings.at(-1)?.[field] ?? null;
      return el("span", { class: `key key${i}` }, `${name} ${value === null ? "–" : this.format(value)}`);
    });
    this.legend.replaceChildren(...now);
    this.graph.setAttribute("aria-label", `${this.title}: ${now.map((node) => node.textContent).join(", ")}`);
  }
}

function path(readings, field, top) {
  let pen = "M";
  return readings.map((reading, i) => {
    if (reading[field] === null) {
      pen = "M";
      return "";
    }
    const x = WIDTH * (1 - (readings.length - 1 - i) / (KEPT - 1));
    const y = HEIGHT - 3 - (HEIGHT - 8) * (reading[field] / top);
    const point = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    // A value alone would be a line of no length.
    const alone = pen === "M" ? "h1" : "";
    pen = "L";
    return point + alone;
  }).join("");
}
