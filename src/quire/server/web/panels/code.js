// The request that the settings stand for, as a command and as a program.

import { getKey } from "../api.js";
import { byId, el } from "../dom.js";
import { codeBlock } from "../text/markdown.js";

/** Fields that OpenAI's client takes by name; others go by `extra_body`. */
const OPENAI = ["model", "messages", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop",
  "response_format", "tools", "logprobs", "top_logprobs"];
const INDENT = "    ";

const address = (path) => new URL(path, document.baseURI).href;

/** `body` as a command. A quote within it ends the quoted text, stands escaped, and begins the next. */
export function asCurl(body) {
  const words = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = getKey() ? " \\\n  -H \"Authorization: Bearer $QUIRE_API_KEY\"" : "";
  return `curl ${address("v1/chat/completions")} \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${words}'`;
}

/** `body` as a program with the package openai. */
export function asPython(body) {
  const entries = Object.entries(body);
  const own = entries.filter(([name]) => OPENAI.includes(name));
  const more = entries.filter(([name]) => !OPENAI.includes(name));
  const fields = own.map(([name, value]) => `${INDENT}${name}=${python(value, INDENT)},`);
  if (more.length) fields.push(`${INDENT}extra_body=${python(Object.fromEntries(more), INDENT)},`);
  const key = getKey() ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(getKey() ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${key})`,
    "reply = client.chat.completions.create(", ...fields, ")",
    "print(reply.choices[0].message.content)",
  ].join("\n");
}

/** A JSON value as Python writes it. */
function python(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const within = indent + INDENT;
  const parts = Array.isArray(value)
    ? value.map((each) => python(each, within))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, within)}`);
  const short = `${open}${parts.join(", ")}${close}`;
  if (!short.includes("\n") && short.length < 80) return short;
  return `${open}\n${parts.map((part) => `${within}${part},\n`).join("")}${indent}${close}`;
}

/** Images are long: their beginning stands for them, and the dialog says so. */
function shortened(body) {
  return JSON.parse(JSON.stringify(body, (name, value) => (
    name === "url" && typeof value === "string" && value.startsWith("data:") ? `${value.slice(0, 40)}…` : value)));
}

const FORMS = { curl: ["curl", "bash", asCurl], python: ["Python", "python", asPython] };

export class CodeDialog {
  /** `bodies()`: a name and the body of each request that the page would send now. */
  constructor(bodies) {
    this.bodies = bodies;
    this.form = "curl";
    this.tabs = Object.entries(FORMS).map(([form, [name]]) => el("button", { type: "button", "aria-pressed": String(form === this.form), click: () => this.choose(form) }, name));
    this.content = el("div", { class: "codes" });
    this.note = el("p", { class: "note" });
    this.root = el("dialog", { id: "code", "aria-labelledby": "code-title" },
      el("header", {}, el("h2", { id: "code-title" }, "This chat as code"),
        el("button", { type: "button", class: "quiet", "aria-label": "Close", click: () => this.root.close() }, "×")),
      el("div", { class: "tabs", role: "group", "aria-label": "Written as" }, ...this.tabs), this.note, this.content);
    document.body.append(this.root);
  }

  /** Show what the page would send now. */
  open() {
    this.shown = this.bodies();
    if (!this.shown) return;
    this.draw();
    this.root.showModal();
    byId("code").scrollTop = 0;
  }

  choose(form) {
    this.form = form;
    Object.keys(FORMS).forEach((name, i) => this.tabs[i].setAttribute("aria-pressed", String(name === form)));
    this.draw();
  }

  draw() {
    const [, language, write] = FORMS[this.form];
    const images = JSON.stringify(this.shown.map(({ body }) => body)).includes('"data:image/');
    const notes = [
      this.form === "python" ? "Install the client: pip install openai." : "",
      getKey() ? "Your key is read from the variable QUIRE_API_KEY." : "",
      images ? "Of images only the beginning is shown." : "",
    ].filter(Boolean);
    this.note.textContent = notes.join(" ");
    this.note.hidden = !notes.length;
    this.content.replaceChildren(...this.shown.flatMap(({ name, body }) => [
      ...(this.shown.length > 1 ? [el("h3", {}, name)] : []), codeBlock(write(shortened(body)), language)]));
  }
}
