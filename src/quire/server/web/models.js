// What the server says of its models: the card of each, and what a loaded one can do.

import { ask } from "./api.js";

/** A model as the page knows it. Facts beyond the card come with `learn`. */
export class Model {
  /** `card`: an entry of /v1/models; `files`: the entry of /api/tags of the same name. */
  constructor(card, files) {
    this.id = card.id;
    this.root = card.root;
    this.parent = card.parent;
    this.status = card.status;
    this.context = card.max_model_len;
    this.images = Boolean(card.input_modalities?.includes("image"));
    this.bytes = files?.size ?? card.needed_bytes;
    this.quantization = quantization(files?.details);
    this.family = files?.details?.family ?? "";
    this.abilities = this.images ? ["vision"] : [];
    this.defaults = {};
  }

  /** Ask what it can do, and for its own sampling defaults. A model that is not loaded is not asked: that would load it. */
  async learn() {
    if (this.status === "loaded") await (this.learning ??= this.ask());
  }

  async ask() {
    try {
      const found = await (await ask("api/show", { model: this.id })).json();
      this.abilities = found.capabilities;
      this.defaults = Object.fromEntries(found.parameters.split("\n").filter(Boolean).map(parameter));
    } catch {
      this.learning = null; // the card alone is shown
    }
  }
}

function parameter(line) {
  const space = line.indexOf(" ");
  return [line.slice(0, space), line.slice(space + 1)];
}

function quantization(details) {
  const level = details?.quantization_level ?? "";
  return level === "none" ? "not quantized" : level;
}

/** Every model that the server names. Throws `Refusal`. */
export async function loadModels() {
  const [{ data }, { models }] = await Promise.all(
    ["v1/models", "api/tags"].map(async (path) => (await ask(path)).json()));
  const files = new Map(models.map((model) => [model.name, model]));
  return data.map((card) => new Model(card, files.get(card.id)));
}

/** A count of bytes as people write it. */
export function bytesText(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  for (let rest = count; rest >= 1000 && power < units.length - 1; rest /= 1000) power += 1;
  const value = count / 1000 ** power;
  return `${value < 10 && power ? value.toFixed(1) : value.toFixed(0)} ${units[power]}`;
}
