// Markdown as models write it, to elements and text nodes. Nothing is loaded: an image is shown as its link.
// Every search that failed is not tried again, and depth is bounded, so the time grows with the length of the text.

import { copyButton, el } from "../dom.js";
import { highlighted } from "./highlight.js";
import { DEPTH, inline } from "./inline.js";
import { formula } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const MOST_FORMULA = 60; // lines
const DELIMITERS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Shows a text that grows: blocks that did not change keep their elements. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = [];
    this.nodes = [...root.children];
  }

  show(text) {
    const blocks = split(text.split("\n"));
    blocks.forEach((block, i) => {
      const source = `${block.kind}\n${block.lines.join("\n")}`;
      if (this.shown[i] === source) return;
      this.shown[i] = source;
      const node = build(block, 0);
      if (i < this.nodes.length) this.nodes[i].replaceWith(node);
      else this.root.append(node);
      this.nodes[i] = node;
    });
    this.shown.length = Math.min(this.shown.length, blocks.length);
    for (const node of this.nodes.splice(blocks.length)) node.remove();
  }
}

/** Lines of text as blocks: {kind, lines}. */
export function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = ENDS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (FORMULA.test(line) && formulaEnd(lines, at) > at) return "formula";
  return line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") ? "table" : "text";
}

/** The line behind a formula that begins at `at` and ends with its line; 0 where none does. */
function formulaEnd(lines, at) {
  const close = FORMULA.exec(lines[at])[1] === "$$" ? "$$" : "\\]";
  const most = Math.min(lines.length, at + MOST_FORMULA);
  for (let i = at; i < most; i += 1) {
    const line = lines[i].trim();
    const own = i === at ? line.slice(2) : line;
    if (own.endsWith(close)) return i + 1;
    if (own.includes(close)) return 0;
  }
  return 0;
}

function afterWhile(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at], at)) at += 1;
  return at;
}

const ENDS = {
  code(lines, at) {
    const fence = FENCE.exec(lines[at])[1];
    const end = afterWhile(lines, at + 1, (line) => !(line.trim().startsWith(fence) && !line.replaceAll(fence[0], "").trim()));
    return Math.min(end + 1, lines.length);
  },
  heading: (_, at) => at + 1,
  rule: (_, at) => at + 1,
  quote: (lines, at) => afterWhile(lines, at, (line) => QUOTE.test(line)),
  list(lines, at) {
    const belongs = (line) => ITEM.test(line) || /^\s+\S/.test(line);
    const end = afterWhile(lines, at, (line, i) => belongs(line) || (!line.trim() && belongs(lines[i + 1] ?? "")));
    return Math.max(end, at + 1);
  },
  formula: formulaEnd,
  table: (lines, at) => afterWhile(lines, at + 2, (line) => line.includes("|")),
  text: (lines, at) => afterWhile(lines, at + 1, (line, i) => line.trim() && kindOf(lines, i) === "text"),
};

const build = ({ kind, lines }, depth) => BUILDERS[kind](lines, depth);

const within = (lines, depth) =>
  depth < DEPTH ? split(lines).map((block) => build(block, depth + 1)) : [el("p", {}, lines.join("\n"))];

const BUILDERS = {
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
  },
  heading(lines) {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The page has an h1, and an answer is below it.
    return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
  },
  rule: () => el("hr"),
  quote: (lines, depth) => el("blockquote", {}, ...within(lines.map((line) => line.replace(QUOTE, "")), depth)),
  list: buildList,
  formula: (lines) => el("p", {}, formula(lines.join("\n").trim().slice(2, -2), true)),
  table: buildTable,
  text: (lines) => el("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n"))),
};

/** Code with its language and a button that copies it. */
export function codeBlock(text, language = "") {
  const head = el("div", { class: "code-head" }, el("span", {}, language || "code"), copyButton(() => text));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, ...highlighted(text, language))));
}

function buildList(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line.replace(/^ {1,4}|^\t/, ""));
  }
  const numbered = /\d/.test(mark);
  const start = numbered ? String(parseInt(mark, 10)) : null;
  return el(numbered ? "ol" : "ul", { start }, ...items.map((item) => el("li", {}, ...itemNodes(item, depth))));
}

function itemNodes(item, depth) {
  const nodes = within(item, depth);
  // A line alone stands in the item as it is, without a paragraph's distance.
  return nodes.length && nodes[0].tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function buildTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : null));
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell, i) => el(tag, { class: sides[i] }, ...inline(cell))));
  const body = el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row(lines[0], "th")), body));
}
