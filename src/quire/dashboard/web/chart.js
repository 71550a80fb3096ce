// A chart of points and lines on uPlot's canvas, with what a canvas lacks: words, a keyboard, and rows that open.

import { el } from "./dom.js";
import { style } from "./points.js";
import { shown } from "./words.js";

const NEAR = 24; // pixels from the mouse to a point that it means
const MARK = 4; // pixels: radius of a mark

const charts = new Set();
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart?.fit();
});

/** Forget the charts of a view that is left. */
export function dropCharts() {
  for (const chart of charts) chart.drop();
  charts.clear();
}

export class Chart {
  /** `series`: [{name, color, points: [{x, y, low, high, row, mark, label}], line, dash}]; `x`, `y`: axes; `open(row)`. */
  constructor({ title, x, y, series, open, height = 380, heading = null }) {
    Object.assign(this, { title, x, y, series, open, height });
    this.points = series.flatMap((each) => each.points.filter((one) => one.row));
    this.order = [...this.points].sort((a, b) => a.x - b.x || a.y - b.y);
    this.at = -1;
    this.said = el("div", { class: "unseen", "aria-live": "polite" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.spot = el("div", { class: "spot", hidden: true });
    this.field = el("div", {
      class: "field",
      tabindex: this.points.length ? "0" : null,
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": this.summary(),
      keydown: (event) => this.key(event),
      blur: () => this.leave(),
    });
    this.root = el("figure", { class: "chart" }, heading && el("figcaption", {}, heading), this.field, this.said);
    this.root.chart = this;
    watcher.observe(this.root);
    charts.add(this);
  }

  summary() {
    const count = this.points.length;
    const keys = count ? " Arrow keys go from point to point, Enter opens one." : "";
    return `${this.title}: ${count} points in ${this.series.length} series; ${this.y.label} over ${this.x.label}.${keys}`;
  }

  /** Drawn once it has a width, and again as that changes. */
  fit() {
    const width = Math.floor(this.root.clientWidth);
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: this.height });
    else this.make(width);
  }

  drop() {
    watcher.unobserve(this.root);
    this.plot?.destroy();
  }

  make(width) {
    const data = [null, ...this.series.map(({ points }) => [points.map((each) => each.x), points.map((each) => each.y)])];
    const facets = [
      { scale: "x", auto: true },
      { scale: "y", auto: true },
    ];
    const series = this.series.map((each) => ({
      label: each.name,
      stroke: each.color,
      facets,
      paths: (plot, i) => this.paint(plot, i, each),
    }));
    this.plot = new uPlot(
      {
        mode: 2,
        width,
        height: this.height,
        legend: { show: false },
        series: [null, ...series],
        cursor: { x: false, y: false, points: { show: false }, drag: { x: true, y: true, uni: 30 } },
        scales: { x: scale(this.x, this.ends("x"), this.ends("x")), y: scale(this.y, this.ends("y"), this.ends("y", true)) },
        axes: [this.axis(this.x, { size: 34 }), this.axis(this.y, { size: this.y.words ? 120 : 64 })],
        hooks: { draw: [() => this.leave()] },
      },
      data,
      this.field,
    );
    this.plot.over.append(this.spot, this.tip);
    this.plot.over.addEventListener("mousemove", (event) => this.hover(event));
    this.plot.over.addEventListener("mouseleave", () => this.leave());
    this.plot.over.addEventListener("click", () => this.openPoint());
  }

  /** The least and the largest value, or ends of intervals where `ranges`. */
  ends(name, ranges = false) {
    let [low, high] = [Infinity, -Infinity];
    for (const { points } of this.series) {
      for (const each of points) {
        low = Math.min(low, each[name], ranges && each.low > 0 ? each.low : Infinity);
        high = Math.max(high, each[name], ranges && each.high > 0 ? each.high : -Infinity);
      }
    }
    return [low, high];
  }

  axis(axis, more) {
    const color = style("--soft");
    const values = axis.words
      ? (_, splits) => splits.map((at) => (Number.isInteger(at) ? cut(axis.words[at] ?? "") : ""))
      : (_, splits) => splits.map((at) => (at === null ? "" : shown(at)));
    // uPlot would begin decades at the end of the scale, and leave most of their ticks without a number.
    const ticks = axis.log ? { splits: (_, __, low, high) => decades(low, high), filter: (_, splits) => splits } : {};
    return {
      stroke: color,
      label: axis.label,
      labelSize: 20,
      labelGap: 0,
      ...ticks,
      labelFont: "12px system-ui",
      font: "12px system-ui",
      values,
      grid: { stroke: style("--grid"), width: 1 },
      ticks: { stroke: style("--grid"), width: 1 },
      ...more,
    };
  }

  paint(plot, index, { points, color, line, dash }) {
    const { ctx } = plot;
    const ratio = devicePixelRatio;
    const at = (value, scaleName) => plot.valToPos(value, scaleName, true);
    const places = points.map((each) => [at(each.x, "x"), at(each.y, "y")]);
    ctx.save();
    ctx.beginPath();
    const edge = (MARK + 2) * ratio; // a mark on the edge is seen whole
    ctx.rect(plot.bbox.left - edge, plot.bbox.top - edge, plot.bbox.width + 2 * edge, plot.bbox.height + 2 * edge);
    ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.lineWidth = 1.5 * ratio;
    if (line) {
      ctx.setLineDash(dash ? dash.map((length) => length * ratio) : []);
      ctx.beginPath();
      places.forEach(([x, y], i) => (i && points[i].line === points[i - 1].line ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
      ctx.stroke();
      ctx.setLineDash([]);
    }
    ctx.beginPath();
    points.forEach((each, i) => {
      if (each.low === undefined || points.length > 2000) return;
      ctx.moveTo(places[i][0], at(each.low, "y"));
      ctx.lineTo(places[i][0], at(each.high, "y"));
    });
    ctx.globalAlpha = 0.55;
    ctx.stroke();
    ctx.globalAlpha = points.length > 2000 ? 0.5 : 0.9;
    marks(ctx, points, places, MARK * ratio);
    ctx.restore();
    return null;
  }

  hover(event) {
    const box = this.plot.over.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, NEAR ** 2];
    for (const each of this.points) {
      const distance = (this.plot.valToPos(each.x, "x") - x) ** 2 + (this.plot.valToPos(each.y, "y") - y) ** 2;
      if (distance < least) [best, least] = [each, distance];
    }
    if (best) this.show(best);
    else this.leave();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const { length } = this.order;
    if (step) this.at = (this.at + step + length + (this.at < 0 && step < 0 ? 1 : 0)) % length;
    else if (event.key === "Home" || event.key === "End") this.at = event.key === "Home" ? 0 : length - 1;
    else if (event.key !== "Enter" || !this.shown) return;
    event.preventDefault(); // else Enter would press the button that has the focus next
    if (event.key === "Enter") {
      this.openPoint();
      return;
    }
    this.show(this.order[this.at]);
    this.said.textContent = this.tip.textContent;
  }

  show(point) {
    this.shown = point;
    const [left, top] = [this.plot.valToPos(point.x, "x"), this.plot.valToPos(point.y, "y")];
    this.spot.style.transform = `translate(${left - 8}px, ${top - 8}px)`;
    const value = (axis, at) => (axis.words ? axis.words[at] : shown(at, axis.unit));
    const range = point.low === undefined ? "" : ` (${shown(point.low)} to ${shown(point.high)})`;
    this.tip.replaceChildren(
      el("b", {}, point.label),
      el("span", {}, ` ${this.y.label}: ${value(this.y, point.y)}${range}`),
      el("span", {}, ` ${this.x.label}: ${value(this.x, point.x)}`),
      el("small", {}, ` ${point.row.kind}`),
    );
    this.spot.hidden = this.tip.hidden = false;
    const room = this.plot.over.clientWidth - this.tip.offsetWidth;
    const above = top - this.tip.offsetHeight - 12;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(left + 12, room))}px, ${above > 0 ? above : top + 14}px)`;
  }

  leave() {
    this.shown = null;
    this.spot.hidden = this.tip.hidden = true;
  }

  openPoint() {
    if (this.shown) this.open(this.shown.row);
  }
}

function marks(ctx, points, places, size) {
  const filled = new Path2D();
  const hollow = new Path2D();
  points.forEach(({ mark }, i) => {
    const [x, y] = places[i];
    if (mark === "dot" || mark === "ring") {
      const path = mark === "dot" ? filled : hollow;
      path.moveTo(x + size, y);
      path.arc(x, y, size, 0, 2 * Math.PI);
    } else if (mark === "square") hollow.rect(x - size, y - size, 2 * size, 2 * size);
    else if (mark === "triangle") {
      hollow.moveTo(x, y - 1.2 * size);
      hollow.lineTo(x + 1.1 * size, y + size);
      hollow.lineTo(x - 1.1 * size, y + size);
      hollow.closePath();
    }
  });
  ctx.fill(filled);
  ctx.stroke(hollow);
}

/** Round numbers from `low` to `high`: 1, 2 and 5 of each decade, of many decades 1 alone. */
function decades(low, high) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const steps = last - first > 4 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = first; power <= last; power += 1) found.push(...steps.map((step) => step * 10 ** power));
  return found.filter((value) => value >= low && value <= high);
}

const cut = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);

/** `data`: the ends of points, with which uPlot asks for the whole; `seen`: those of all that is drawn. */
function scale(axis, data, [low, high]) {
  if (axis.words) return { time: false, range: () => [-0.5, axis.words.length - 0.5] };
  if (!(high >= low)) return { time: false, range: () => [0, 1] };
  const whole = axis.log ? [low / 1.25, high * 1.25] : padded(low, high);
  const range = (_, least, most) => (least === null || (least === data[0] && most === data[1]) || least === most ? whole : [least, most]);
  return { time: false, distr: axis.log ? 3 : 1, range };
}

function padded(low, high) {
  const pad = 0.06 * (high - low || Math.abs(high) || 1);
  return [low >= 0 && low < 0.4 * high ? 0 : low - pad, high + pad];
}
