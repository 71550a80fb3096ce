// Keys that do something anywhere on the page, and the list of them.

import { el } from "../dom.js";

/** Whether a key that writes a character would write one here. */
const writes = (node) => node.matches?.("input, textarea, select, [contenteditable]") ?? false;

const held = (event) => event.ctrlKey || event.metaKey;

/** Keys as they are shown, what they do, and which events they are; `act`: a member of what `Shortcuts` is given. */
const KEYS = [
  { shown: ["Enter"], does: "Send the message" },
  { shown: ["Shift", "Enter"], does: "Begin a new line" },
  { shown: ["↑"], does: "In an empty message: edit the last one" },
  { shown: ["Esc"], does: "Stop the answer; close what is open", act: "escape", is: (event) => event.key === "Escape" },
  { shown: ["Ctrl", "Shift", "O"], does: "New chat", act: "fresh", is: (event) => held(event) && event.shiftKey && event.code === "KeyO" },
  { shown: ["Ctrl", "K"], does: "Search the chats", act: "search", is: (event) => held(event) && !event.shiftKey && event.code === "KeyK" },
  { shown: ["Ctrl", "Shift", "S"], does: "Show or hide the chats", act: "history", is: (event) => held(event) && event.shiftKey && event.code === "KeyS" },
  { shown: ["Ctrl", ","], does: "Show or hide the settings", act: "settings", is: (event) => held(event) && event.key === "," },
  { shown: ["/"], does: "Write a message", act: "write", is: (event) => event.key === "/" && !held(event) && !writes(event.target) },
  { shown: ["?"], does: "Show this list", act: "list", is: (event) => event.key === "?" && !writes(event.target) },
];

export class Shortcuts {
  /** `acts`: a function for each `act` of the table but `list`. */
  constructor(acts) {
    this.acts = { ...acts, list: () => this.root.showModal() };
    this.root = el("dialog", { id: "shortcuts", "aria-labelledby": "shortcuts-title" },
      el("header", {}, el("h2", { id: "shortcuts-title" }, "Keyboard"),
        el("button", { type: "button", class: "quiet", "aria-label": "Close", click: () => this.root.close() }, "×")),
      el("table", {}, el("tbody", {}, ...KEYS.map(({ shown, does }) => el("tr", {},
        el("th", { scope: "row" }, does), el("td", {}, ...shown.map((key) => el("kbd", {}, key))))))),
      el("p", { class: "note" }, "On a Mac, Cmd stands for Ctrl. Tab goes to every button; the arrow keys move between tokens."));
    document.body.append(this.root);
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
    const found = KEYS.find(({ is }) => is?.(event));
    if (!found) return;
    if (found.act !== "escape") event.preventDefault();
    this.acts[found.act]();
  }
}
