// Elements made of names and text nodes alone: nothing in this page parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `facts` are attributes, functions among them listeners; null and false leave one out. */
export function el(tag, facts = {}, ...children) {
  return fill(document.createElement(tag), facts, children);
}

/** The same of SVG. */
export function svg(tag, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), facts, children);
}

function fill(node, facts, children) {
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === false || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "small", click: () => copy() }, label);
  async function copy() {
    let said = "Copied";
    try {
      await toClipboard(text());
    } catch {
      said = "Not copied";
    }
    button.textContent = said;
    setTimeout(() => { button.textContent = label; }, 1500);
  }
  return button;
}

async function toClipboard(text) {
  // Browsers have the clipboard only where the page came by https or from this machine.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser refused");
}
