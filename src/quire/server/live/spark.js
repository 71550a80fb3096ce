// Small bars over the last quarter of an hour, for a cell of a table.

import { el, svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 24;

/** `rates`: values of equal parts of the time, oldest first; null: unknown. `name` says what of. */
export function spark(rates, name) {
  const most = Math.max(0, ...rates.map((value) => value ?? 0));
  const wide = WIDTH / rates.length;
  const bars = rates.map((value, i) => {
    const tall = value > 0 ? Math.max(1, (value / most) * (HEIGHT - 1)) : 0;
    return tall ? svg("rect", { x: i * wide, y: HEIGHT - 1 - tall, width: wide - 1, height: tall, class: "spark" }) : null;
  });
  const base = svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, class: "base" });
  const label = `${name}, tokens per second over the last 15 minutes: ${most ? `up to ${rate(most)}` : "none"}`;
  const facts = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": label };
  return el("span", { class: "trend" }, svg("svg", facts, base, ...bars), el("small", {}, most ? `up to ${rate(most)}/s` : "none"));
}

const rate = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
