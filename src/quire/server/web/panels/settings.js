// The form of one answer's settings, and the fields of a request that it stands for. What is empty is not sent.

import { el } from "../dom.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top-k", { min: 0, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }],
];

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string"}
  },
  "required": ["name"],
  "additionalProperties": false
}`;

/** Small models left to it write blanks until their tokens end. OpenAI's field has no word for that, vLLM's has. */
const COMPACT = { disable_any_whitespace: true };

/** Kinds of structured output: name, what is written for it, an example, the fields it becomes. */
const SHAPES = {
  none: { name: "Any text" },
  json_object: {
    name: "A JSON object",
    fields: (_, compact) =>
      compact ? { structured_outputs: { json_object: true, ...COMPACT } } : { response_format: { type: "json_object" } },
  },
  json_schema: {
    name: "JSON of a schema",
    label: "JSON schema",
    example: SCHEMA,
    fields: (text, compact) => {
      const schema = parsed(text);
      if (compact) return { structured_outputs: { json: schema, ...COMPACT } };
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } };
    },
  },
  regex: {
    name: "A regular expression",
    label: "Regular expression",
    example: "\\d{4}-\\d{2}-\\d{2}",
    fields: (regex) => ({ structured_outputs: { regex } }),
  },
  choice: {
    name: "One of several texts",
    label: "Texts, one a line",
    example: "yes\nno",
    fields: (text) => ({ structured_outputs: { choice: lines(text) } }),
  },
  grammar: {
    name: "A grammar",
    label: "Grammar (Lark)",
    example: 'start: "yes" | "no"',
    fields: (grammar) => ({ structured_outputs: { grammar } }),
  },
};

/** What is wrong with the form, and where. */
export class Mistake extends Error {
  constructor(message, input) {
    super(message);
    this.input = input;
  }
}

/** What a field stands at where neither the form nor the model says anything. */
const USUAL = { temperature: "1", top_p: "1", top_k: "off", min_p: "off", max_tokens: "to the end", seed: "random",
  presence_penalty: "0", frequency_penalty: "0", repetition_penalty: "1" };

const TOOLS = `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "The weather of a city.",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}}]`;

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function parsed(text, name = "the schema is") {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} not JSON: ${error.message}`);
  }
}

export class Settings {
  /** `name` tells the forms of two answers apart. */
  constructor(name) {
    this.name = name;
    this.inputs = {};
    this.root = el("form", { class: "settings", "aria-label": `Settings of answer ${name}` },
      this.area("system", "System prompt", 3),
      el("fieldset", {}, el("legend", {}, "Sampling"),
        el("div", { class: "numbers" }, ...NUMBERS.map(([field, label, limits]) => this.number(field, label, limits))),
        this.area("stop", "Stop texts, one a line", 1)),
      el("fieldset", {}, el("legend", {}, "Structured output"), ...this.shapes()),
      el("fieldset", {}, el("legend", {}, "Tools"), ...this.tools()));
    this.root.addEventListener("submit", (event) => event.preventDefault());
  }

  labelled(field, label, input) {
    this.inputs[field] = input;
    input.setAttribute("name", field);
    return el("label", { class: "field" }, el("span", {}, label), input);
  }

  area(field, label, rows) {
    return this.labelled(field, label, el("textarea", { rows, spellcheck: "false" }));
  }

  number(field, label, { min, max, step }) {
    // A step would have the browser refuse 0.15.
    const input = el("input", { type: "number", min, max, step: step < 1 ? "any" : step, placeholder: USUAL[field] });
    return this.labelled(field, label, input);
  }

  shapes() {
    const options = Object.entries(SHAPES).map(([value, { name }]) => el("option", { value }, name));
    const kind = this.labelled("shape", "The answer is", el("select", { change: () => this.reshape() }, ...options));
    this.text = this.area("text", "", 11);
    this.compact = this.labelled("compact", "Without blanks", el("input", { type: "checkbox" }));
    this.compact.classList.add("check");
    this.reshape();
    return [kind, this.text, this.compact];
  }

  tools() {
    const area = this.area("tools", "Functions that it may call, as JSON", 3);
    const example = el("button", { type: "button", class: "small", click: () => {
      this.inputs.tools.value = TOOLS;
      this.inputs.tools.rows = 11;
      this.inputs.tools.focus();
    } }, "Write an example");
    return [area, example];
  }

  reshape() {
    const shape = SHAPES[this.inputs.shape.value];
    const written = this.inputs.text.value;
    const untouched = !written || Object.values(SHAPES).some(({ example }) => example === written);
    this.text.hidden = !shape.label;
    this.compact.hidden = !this.json;
    this.text.firstChild.textContent = shape.label ?? "";
    if (untouched) this.inputs.text.value = shape.example ?? "";
  }

  /** Show the model's own defaults where the form says nothing: field -> text. */
  showDefaults(defaults) {
    for (const [field] of NUMBERS) {
      const own = defaults[field];
      this.inputs[field].placeholder = own === undefined ? USUAL[field] : String(Number(own));
      this.inputs[field].title = own === undefined ? "" : "The model's own default";
    }
  }

  /** What the form holds, of fields that hold anything: to be kept, and given to `fill`. */
  get values() {
    const read = (input) => (input.type === "checkbox" ? input.checked : input.value);
    const found = Object.entries(this.inputs).map(([field, input]) => [field, read(input)]).filter(([, value]) => value);
    return Object.fromEntries(found.filter(([field, value]) => !(field === "shape" && value === "none")));
  }

  /** Fill the form with `values`, and empty what they lack. */
  fill(values = {}) {
    for (const [field, input] of Object.entries(this.inputs)) {
      if (input.type === "checkbox") input.checked = values[field] === true;
      else input.value = values[field] ?? "";
    }
    if (!(this.inputs.shape.value in SHAPES)) this.inputs.shape.value = "none";
    this.reshape();
  }

  /** Whether the answer is to be JSON. */
  get json() {
    return this.inputs.shape.value.startsWith("json");
  }

  get system() {
    return this.inputs.system.value.trim();
  }

  /** The fields of a request. Throws `Mistake`. */
  fields() {
    const found = {};
    for (const [field, label] of NUMBERS) {
      const input = this.inputs[field];
      if (!input.validity.valid) throw new Mistake(`${label}: ${input.validationMessage}`, input);
      if (input.value !== "") found[field] = Number(input.value);
    }
    const stop = lines(this.inputs.stop.value);
    if (stop.length) found.stop = stop;
    try {
      Object.assign(found, SHAPES[this.inputs.shape.value].fields?.(this.inputs.text.value, this.inputs.compact.checked));
    } catch (error) {
      throw new Mistake(error.message, this.inputs.text);
    }
    const tools = this.inputs.tools.value.trim();
    try {
      return tools ? { ...found, tools: parsed(tools, "the tools are") } : found;
    } catch (error) {
      throw new Mistake(error.message, this.inputs.tools);
    }
  }
}
