// An answer as its tokens, coloured by probability; hover, focus or a tap shows what else was likely.

import { byId, el } from "../dom.js";

const BOUNDS = [0.9, 0.6, 0.3, 0.1];
const MARKER = /^\s*(<.+>|\[[^\]]+\])\s*$/; // as special tokens are written: <|end|>, </s>, [EOS]

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : "<0.1"} %`;
};

/** A token as it can be read: spaces and line ends shown. */
const visible = (token) => (token ? token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") : "(end)");

const LEVELS = ["over 90 %", "60 to 90 %", "30 to 60 %", "10 to 30 %", "under 10 %"];

/** What the colours mean. */
export const legend = () => [el("span", {}, "Probability of a token:"),
  ...LEVELS.map((name, level) => el("span", { class: `token p${level}` }, name)),
  el("span", { class: "note" }, "Point at a token to see what else was likely.")];

export class TokenView {
  constructor(root) {
    this.root = root;
    this.decoder = new TextDecoder();
    root.classList.add("tokens");
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Tokens; the arrow keys move between them");
    root.addEventListener("mouseover", (event) => show(event.target));
    root.addEventListener("mouseout", hide);
    root.addEventListener("focusin", (event) => show(event.target));
    root.addEventListener("focusout", hide);
    root.addEventListener("click", (event) => event.target.focus());
    root.addEventListener("keydown", (event) => move(event));
  }

  /** Add entries of `logprobs.content`; a token that is nowhere in `answer`, its text, ends it or steers: a dim chip. */
  add(entries, answer) {
    for (const entry of entries) {
      // A character may lie in several tokens: it appears with the last of them.
      const text = entry.bytes ? this.decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
      const level = BOUNDS.findIndex((bound) => Math.exp(entry.logprob) >= bound);
      const facts = { class: `token p${level < 0 ? BOUNDS.length : level}`, tabindex: this.root.firstChild ? "-1" : "0" };
      const hidden = MARKER.test(text) && !answer.includes(text.trim());
      if (hidden) facts.class += " hidden-token";
      const node = el("span", facts, hidden ? "" : text);
      if (hidden) {
        node.setAttribute("role", "img");
        node.setAttribute("aria-label", `special token ${text}`);
      }
      node.entry = entry;
      this.root.append(node);
    }
  }
}

function move(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && event.target[step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function show(node) {
  if (!node.entry) return;
  const { token, logprob, top_logprobs: likely } = node.entry;
  const tip = byId("tooltip");
  const rows = likely.map((other) => row(other, other.token === token));
  if (!likely.some((other) => other.token === token)) rows.push(row({ token, logprob }, true));
  tip.replaceChildren(el("strong", {}, `${visible(token)}  ${percent(logprob)}`), el("table", {}, el("tbody", {}, ...rows)));
  tip.hidden = false;
  node.setAttribute("aria-describedby", "tooltip");
  place(tip, node.getClientRects()[0] ?? node.getBoundingClientRect());
}

function row({ token, logprob }, chosen) {
  const bar = el("span", { class: "bar" });
  bar.style.width = `${Math.max(1, 100 * Math.exp(logprob)).toFixed(1)}%`;
  const name = el("td", {}, el("code", {}, visible(token)));
  return el("tr", { class: chosen ? "chosen" : null }, name, el("td", {}, percent(logprob)), el("td", { class: "bars" }, bar));
}

function place(tip, beside) {
  const edge = 8;
  const left = Math.min(beside.left, innerWidth - tip.offsetWidth - edge);
  const below = beside.bottom + 6;
  const fits = below + tip.offsetHeight + edge <= innerHeight;
  tip.style.left = `${Math.max(edge, left)}px`;
  tip.style.top = `${fits ? below : Math.max(edge, beside.top - tip.offsetHeight - 6)}px`;
}

function hide(event) {
  byId("tooltip").hidden = true;
  event.target.removeAttribute("aria-describedby");
}
