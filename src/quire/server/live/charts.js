// Lines over the last minutes, on uPlot's canvas, with their names and values beside.

import { el } from "./dom.js";

const HEIGHT = 150;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Lines {
  /** `series`: [field of a reading, name]; `show` says a value. */
  constructor(title, show, series) {
    Object.assign(this, { title, show, series });
    this.field = el("div", { class: "field", role: "img" });
    this.legend = el("ul", { class: "legend" });
    this.root = el("figure", {}, el("figcaption", {}, title), this.field, this.legend);
    this.values = series.map(([, name], i) => {
      const value = el("b", {}, "–");
      this.legend.append(el("li", { class: `key key${i}` }, `${name} `, value));
      return value;
    });
    new ResizeObserver(() => this.fit()).observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
  }

  fit() {
    const width = Math.floor(this.root.clientWidth);
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this.make(width);
  }

  again() {
    this.plot?.destroy();
    this.plot = null;
    this.fit();
    if (this.drawn) this.draw(...this.drawn);
  }

  make(width) {
    const axis = { stroke: style("--soft"), font: "11px system-ui", grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false } };
    const ago = (at) => (at === 0 ? "now" : at % 60 === 0 ? `${-at / 60} min` : `${Math.round(-at)} s`);
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: false } },
        scales: { x: { time: false, range: () => [-this.span, 0] }, y: { range: (_, __, most) => [0, most > 0 ? 1.1 * most : 1] } },
        axes: [
          { ...axis, size: 24, incrs: [15, 30, 60, 180, 300], values: (_, splits) => splits.map(ago) },
          { ...axis, size: 62, values: (_, splits) => splits.map((value) => this.show(value)) },
        ],
        series: [
          {},
          ...this.series.map(([, name], i) => ({
            label: name,
            stroke: style(`--c${i}`),
            width: 1.5,
            spanGaps: false,
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(plot) => this.say(plot.cursor.idx ?? null)] },
      },
      [[], ...this.series.map(() => [])],
      this.field,
    );
  }

  /** Readings of the last `span` seconds. */
  draw(readings, span) {
    this.drawn = [readings, span];
    this.span = span;
    const now = readings.at(-1)?.at ?? 0;
    this.shown = readings.filter((each) => each.at >= now - span);
    this.plot?.setData([
      this.shown.map((each) => each.at - now),
      ...this.series.map(([field]) => this.shown.map((each) => each[field] ?? null)),
    ]);
    this.say(this.plot?.cursor.left >= 0 ? this.plot.cursor.idx : null);
  }

  /** The values under the mouse, or those of now. */
  say(index) {
    const reading = this.shown?.at(index ?? -1);
    this.series.forEach(([field], i) => {
      const value = reading?.[field] ?? null;
      this.values[i].textContent = value === null ? "–" : this.show(value);
    });
    this.field.setAttribute("aria-label", `${this.title}: ${this.legend.textContent}`);
  }
}
