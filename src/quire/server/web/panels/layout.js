// Which panels are open, and what is said beside the chat.

import { byId, el } from "../dom.js";

const NARROW = matchMedia("(max-width: 60rem)");
const ROOMY = matchMedia("(min-width: 75rem)");
const VAST = matchMedia("(min-width: 100rem)");
const PANELS = ["history", "settings", "figures"];
const TOLD_MS = 8000;

/** Set a button that stays pressed. */
export function press(id, on) {
  byId(id).setAttribute("aria-pressed", String(on));
}

export class Panels {
  /** `opened(name, open)`: called when one is opened or closed. */
  constructor(opened) {
    this.opened = opened;
    for (const name of PANELS) {
      byId(`toggle-${name}`).addEventListener("click", () => this.toggle(name));
      byId(name).querySelector(".close").addEventListener("click", () => {
        this.set(name, false);
        byId(`toggle-${name}`).focus();
      });
    }
    this.set("history", !NARROW.matches);
    this.set("settings", ROOMY.matches);
    this.set("figures", false);
  }

  toggle(name) {
    this.set(name, byId(name).hidden);
  }

  /** On a phone a panel covers the chat; elsewhere two fit on the right only where there is much room. */
  set(name, open) {
    byId(name).hidden = !open;
    byId(`toggle-${name}`).setAttribute("aria-expanded", String(open));
    const others = NARROW.matches ? PANELS : VAST.matches || name === "history" ? [] : ["settings", "figures"];
    if (open) for (const other of others) if (other !== name && !byId(other).hidden) this.set(other, false);
    this.opened(name, open);
  }

  /** Close what covers the chat; whether anything did. */
  uncover() {
    if (!NARROW.matches) return false;
    const open = PANELS.filter((name) => !byId(name).hidden);
    open.forEach((name) => this.set(name, false));
    return open.length > 0;
  }
}

/** Say what is wrong, until it is not. */
export function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

let timer = null;

/** Say what was done, for some seconds; `undo` has it undone. */
export function toast(text, undo = null) {
  const root = byId("toast");
  const hide = () => { root.hidden = true; };
  root.replaceChildren(el("span", {}, text));
  if (undo) root.append(el("button", { type: "button", class: "small", click: () => { hide(); undo(); } }, "Undo"));
  root.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, TOLD_MS);
}

/** Have a screen reader say a text; nobody sees it. */
export function announce(text) {
  byId("status").textContent = text;
}
