// Pieces of Markdown within a line, to nodes: code, emphasis, links, formulas, line breaks.
// Every search that failed is not tried again, and depth is bounded, so the time grows with the length of the text.

import { el } from "../dom.js";
import { formula } from "./math.js";

/** How deep one piece may lie in another. */
export const DEPTH = 8;
const SPECIAL = /[`*_~[!\\h\n$]/g;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Nodes of a piece of text. */
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
  if (mark === "$") return dollars(text, at, missing);
  if (mark === "\\") {
    if (text[at + 1] === "(") return between(text, at, "\\)", missing);
    if (text[at + 1] === "[") return between(text, at, "\\]", missing);
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

const MOST_FORMULA = 1000;

function between(text, at, close, missing) {
  const end = find(text, close, at + 2, missing);
  if (end < 0 || end - at > MOST_FORMULA) return { nodes: [text[at + 1]], end: at + 2 };
  return { nodes: [formula(text.slice(at + 2, end), close === "\\]")], end: end + 2 };
}

/** A formula between dollars. Those of prices are none: a blank stands within the first or the last, or a digit behind. */
function dollars(text, at, missing) {
  const mark = text[at + 1] === "$" ? "$$" : "$";
  const from = at + mark.length;
  const end = find(text, mark, from, missing);
  const source = end < 0 || end - at > MOST_FORMULA ? "" : text.slice(from, end);
  const price = mark === "$" && (/^\s|[\s\\]$|\n/.test(source) || /\d/.test(text[end + 1] ?? ""));
  if (!source.trim() || price) return { nodes: [mark], end: from };
  return { nodes: [formula(source, mark === "$$")], end: end + mark.length };
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
