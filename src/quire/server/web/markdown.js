// Markdown as models write it, to elements and text nodes. Nothing is loaded: an image is shown as its link.
// Every search that failed is not tried again, and depth is bounded, so the time grows with the length of the text.

import { copyButton, el } from "./dom.js";

const DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+/;
const DELIMITERS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Shows a text that grows: blocks that did not change keep their elements. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    const blocks = split(text.split("\n"));
    blocks.forEach((block, i) => {
      const source = `${block.kind}\n${block.lines.join("\n")}`;
      if (this.shown[i] === source) return;
      this.shown[i] = source;
      const node = build(block, 0);
      if (this.root.children[i]) this.root.children[i].replaceWith(node);
      else this.root.append(node);
    });
    this.shown.length = blocks.length;
    while (this.root.children.length > blocks.length) this.root.lastElementChild.remove();
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
  return line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") ? "table" : "text";
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
  table: buildTable,
  text: (lines) => el("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n"))),
};

/** Code with its language and a button that copies it. */
export function codeBlock(text, language = "") {
  const head = el("div", { class: "code-head" }, el("span", {}, language || "code"), copyButton(() => text));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, text)));
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
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell))));
  const body = el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row(lines[0], "th")), body));
}

const SPECIAL = /[`*_~[!\\h\n]/g;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Nodes of a piece of text: code, emphasis, links, line breaks. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();
  let plain = 0;
  let at = 0;
  const flush = (end) => end > plain && nodes.push(text.slice(plain, end));
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text);
    if (!next) break;
    at = next.index;
    const found = span(text, at, depth, missing);
    if (!found) {
      at += 1;
      continue;
    }
    flush(at);
    nodes.push(...found.nodes);
    plain = at = found.end;
  }
  flush(text.length);
  return nodes;
}

function span(text, at, depth, missing) {
  const mark = text[at];
  if (mark === "\n") return { nodes: [el("br")], end: at + 1 };
  if (mark === "\\") {
    return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { nodes: [text[at + 1]], end: at + 2 } : null;
  }
  if (mark === "`") return codeSpan(text, at, missing);
  if (mark === "h") return bareLink(text, at);
  if (mark === "[" || mark === "!") return linkSpan(text, at, depth, missing);
  return depth < DEPTH ? emphasis(text, at, depth, missing) : null;
}

function find(text, what, from, missing) {
  if (missing.has(what)) return -1;
  const found = text.indexOf(what, from);
  if (found < 0) missing.add(what);
  return found;
}

function codeSpan(text, at, missing) {
  let end = at;
  while (text[end] === "`") end += 1;
  const marks = text.slice(at, end);
  const close = find(text, marks, end, missing);
  if (close < 0) return { nodes: [marks], end };
  return { nodes: [el("code", {}, text.slice(end, close).trim())], end: close + marks.length };
}

function emphasis(text, at, depth, missing) {
  const pair = PAIRS.find(([mark]) => text.startsWith(mark, at));
  if (!pair) return null;
  const [mark, tag] = pair;
  const from = at + mark.length;
  const word = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
  if (word || !/\S/.test(text[from] ?? "")) return { nodes: [mark], end: from };
  const close = find(text, mark, from + 1, missing);
  const ends = close > 0 && /\S/.test(text[close - 1]) && !(mark[0] === "_" && /\w/.test(text[close + mark.length] ?? ""));
  // Answers are about code: __next__ is a name there, and stays as it is written.
  const name = mark === "__" && /^\w+$/.test(text.slice(from, close));
  if (!ends || name) return { nodes: [mark], end: from };
  return { nodes: [el(tag, {}, ...inline(text.slice(from, close), depth + 1))], end: close + mark.length };
}

const MOST_LINK = 2000;

function linkSpan(text, at, depth, missing) {
  const from = at + (text[at] === "!" ? 2 : 1);
  if (text[from - 1] !== "[") return null;
  const middle = find(text, "](", from, missing);
  const end = middle < 0 || middle - from > MOST_LINK ? -1 : find(text, ")", middle, missing);
  if (end < 0 || end - middle > MOST_LINK) return null;
  const label = depth < DEPTH ? inline(text.slice(from, middle), depth + 1) : [text.slice(from, middle)];
  const node = anchor(text.slice(middle + 2, end).trim().split(/\s/)[0], label);
  return node && { nodes: [node], end: end + 1 };
}

function bareLink(text, at) {
  if (/\w/.test(text[at - 1] ?? "") || !/^https?:\/\//.test(text.slice(at, at + 8))) return null;
  const url = /^[^\s<>"'`]+/.exec(text.slice(at, at + MOST_LINK))[0].replace(/[.,;:!?)\]]+$/, "");
  const node = anchor(url, [url]);
  return node && { nodes: [node], end: at + url.length };
}

/** A link that leaves nothing behind; null for anything but the web's addresses. */
function anchor(url, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return null;
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
