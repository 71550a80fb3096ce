// What is shown before the first question: the model's card, questions that it may be asked, and where to go from here.

import { el } from "../dom.js";
import { bytesText } from "../models.js";

/** The root of the model that quire carries with it, which knows Python's standard library and nothing else. */
const EMBEDDED = "pydoc";

const ABILITIES = {
  completion: ["Text", "It goes on with texts and chats"],
  vision: ["Images", "Paste, drop or attach them"],
  tools: ["Tools", "It can call functions that the settings name"],
  thinking: ["Thoughts", "It reasons before it answers"],
  insert: ["Fill in the middle", "It can complete code between two pieces"],
  embedding: ["Embeddings", "It turns texts into vectors: POST /v1/embeddings"],
};

const QUESTIONS = {
  embedded: ["What does json.dumps do?", "Describe os.path.join.", "What does shutil.copytree do?", "What is math.gcd?"],
  images: ["What is in this image?", "Read the text in this image.", "Describe this image for somebody who cannot see it.",
    "Explain how a rainbow forms, in three sentences."],
  code: ["Write a Python function that finds the longest word of a text.", "Explain what a mutex is, with an example in C.",
    "Write a regular expression for dates such as 2024-02-29.", "Write SQL that lists the ten best customers by revenue."],
  general: ["Explain how a rainbow forms, in three sentences.", "Write a Python function that finds the longest word of a text.",
    "Compare tea and coffee in a table.", "What is the derivative of x² · sin x? Show each step."],
};

const LINKS = [
  ["dashboard", "Dashboard", "What the server does now"],
  ["docs", "API", "Every route and its fields, to try from the page"],
  ["metrics", "Metrics", "For Prometheus"],
];

export class Welcome {
  /** `suggest(text, image)`: a question was chosen, which may be about an image. */
  constructor(suggest) {
    this.suggest = suggest;
    this.root = el("div", { class: "welcome" });
  }

  /** Show a model of models.js. */
  show(model) {
    const talks = model.abilities.length === 0 || model.abilities.some((name) => ["completion", "vision"].includes(name));
    const facts = [
      ["Size", model.bytes ? bytesText(model.bytes) : ""],
      ["Weights", model.quantization],
      ["Context", model.context ? `${model.context.toLocaleString("en")} tokens` : ""],
      ["Family", model.family],
      ["Adapter of", model.parent ?? ""],
      ["State", model.status === "loaded" ? "" : model.status],
    ].filter(([, value]) => value);
    this.root.replaceChildren(
      el("section", { class: "card", "aria-label": `The model ${model.id}` },
        el("p", { class: "greeting" }, "You are talking to"),
        el("h2", {}, model.id),
        el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
        abilities(model)),
      talks ? this.questions(model) : el("p", { class: "note" }, "This model writes no texts: it makes vectors or labels of them."),
      el("nav", { class: "links", "aria-label": "More of this server" }, ...LINKS.map(([href, name, title]) => (
        el("a", { href, title, target: "_blank" }, name)))));
  }

  questions(model) {
    const kind = kindOf(model);
    const note = kind === "embedded" ? "This small model is carried with quire. It knows Python's standard library, and nothing else." : null;
    return el("section", { class: "examples", "aria-label": "Examples" },
      note && el("p", { class: "note" }, note),
      ...QUESTIONS[kind].map((text) => el("button", { type: "button", class: "example",
        click: () => this.suggest(text, /image/.test(text)) }, text)));
  }
}

function abilities(model) {
  const known = model.abilities.filter((name) => name in ABILITIES);
  if (!known.length) return null;
  return el("ul", { class: "abilities", "aria-label": "What it can do" }, ...known.map((name) => (
    el("li", { title: ABILITIES[name][1] }, ABILITIES[name][0]))));
}

function kindOf(model) {
  if (model.root === EMBEDDED || model.parent === EMBEDDED) return "embedded";
  if (model.images) return "images";
  return /code/i.test(`${model.id} ${model.root}`) ? "code" : "general";
}
