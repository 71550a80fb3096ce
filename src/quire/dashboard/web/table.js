// Tables that sort by a click on a heading, and show a part at a time.

import { el } from "./dom.js";
import { inOrder } from "./rows.js";
import { plural } from "./words.js";

const PART = 50;

/** `columns`: [{title, value(item), show(item), numeric, hint}]; `open(item)` where lines lead somewhere. */
export function sortable(label, columns, items, open = null, part = PART) {
  const sorted = { by: -1, sign: 1, shown: part };
  const body = el("tbody");
  const more = el("button", {
    type: "button",
    click: () => {
      sorted.shown += 4 * part;
      draw();
    },
  });
  const heads = columns.map((column, i) =>
    el(
      "th",
      { scope: "col", title: column.hint || null },
      el("button", { type: "button", class: "sort", click: () => sort(i) }, column.title),
    ),
  );
  const root = el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body),
  );

  function sort(i) {
    sorted.sign = sorted.by === i ? -sorted.sign : 1;
    sorted.by = i;
    draw();
  }

  function draw() {
    const column = columns[sorted.by];
    const ordered = column ? [...items].sort((a, b) => sorted.sign * last(column.value(a), column.value(b), sorted.sign)) : items;
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== sorted.by ? "none" : sorted.sign > 0 ? "ascending" : "descending"));
    body.replaceChildren(...ordered.slice(0, sorted.shown).map((item) => line(columns, item, open)));
    more.hidden = sorted.shown >= items.length;
    more.textContent = `Show more of ${plural(items.length, "line")}`;
  }

  draw();
  return el("div", { class: "sortable" }, root, more);
}

/** Lines that lack a value come last whichever way. */
function last(a, b, sign) {
  const [lacksA, lacksB] = [a, b].map((value) => value === null || value === undefined || value === "" || Number.isNaN(value));
  if (lacksA || lacksB) return sign * (lacksA - lacksB);
  return inOrder(a, b);
}

function line(columns, item, open) {
  const cells = columns.map((column, i) => {
    const said = column.show(item);
    const first = i === 0 && open ? el("button", { type: "button", class: "link", click: () => open(item) }, said) : said;
    return el(
      i === 0 ? "th" : "td",
      { class: column.numeric ? "number" : column.wide ? "wide" : column.title.includes("interval") ? "even-line" : null, scope: i === 0 ? "row" : null },
      first,
    );
  });
  return el("tr", {}, ...cells);
}
