// Named settings: some that come with the page, and those that a person saved in this browser.

import { el } from "../dom.js";

const OWN = "The model's defaults";
const GIVEN = {
  [OWN]: {},
  Exact: { temperature: "0" },
  Balanced: { temperature: "0.7", top_p: "0.95" },
  Creative: { temperature: "1.1", min_p: "0.05" },
};

const written = (values) => JSON.stringify(Object.entries(values).sort());

export class Presets {
  /** `store`: what keeps them. `settings()`: the form that is shown. `told(text)`: called with what went wrong. */
  constructor(store, settings, told) {
    this.store = store;
    this.settings = settings;
    this.told = told;
    this.saved = new Map();
    this.choice = el("select", { id: "preset", change: () => this.apply() });
    this.name = el("input", { id: "preset-name", maxlength: 60, required: true, autocomplete: "off", "aria-label": "Name of the preset", placeholder: "Name" });
    this.form = el("form", { class: "naming", "aria-label": "Save these settings", hidden: true }, this.name,
      el("button", { type: "submit" }, "Save"));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save(this.name.value.trim());
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggleForm(false);
    });
    this.saveButton = el("button", { type: "button", id: "preset-save", "aria-expanded": "false", click: () => this.toggleForm(this.form.hidden) }, "Save as…");
    this.removeButton = el("button", { type: "button", id: "preset-remove", click: () => this.remove() }, "Delete");
    this.root = el("div", { class: "presets" },
      el("label", { class: "field" }, el("span", {}, "Preset"), this.choice),
      el("span", { class: "buttons" }, this.saveButton, this.removeButton), this.form);
    this.list();
  }

  /** Read those that were saved. */
  async read() {
    this.saved = new Map((await this.store.all("presets")).map(({ name, values }) => [name, values]));
    this.list();
  }

  list(chosen = OWN) {
    const options = (names) => names.map((name) => el("option", { value: name }, name));
    const own = [...this.saved.keys()].sort();
    this.choice.replaceChildren(el("option", { value: "", hidden: true }, "Changed by hand"), ...options(Object.keys(GIVEN)),
      ...(own.length ? [el("optgroup", { label: "Yours" }, ...options(own))] : []));
    this.choice.value = chosen;
    this.removeButton.hidden = !this.saved.has(chosen);
  }

  /** Name the preset that the form is like. */
  match() {
    const all = [...this.saved, ...Object.entries(GIVEN)];
    const now = written(this.settings().values);
    this.choice.value = all.find(([, values]) => written(values) === now)?.[0] ?? "";
    this.removeButton.hidden = !this.saved.has(this.choice.value);
  }

  apply() {
    const name = this.choice.value;
    this.settings().fill(this.saved.get(name) ?? GIVEN[name]);
    this.removeButton.hidden = !this.saved.has(name);
  }

  toggleForm(open) {
    this.form.hidden = !open;
    this.saveButton.setAttribute("aria-expanded", String(open));
    (open ? this.name : this.saveButton).focus();
  }

  async save(name) {
    if (!name) return;
    if (name in GIVEN) {
      this.told(`${name} is a preset of the page: choose another name.`);
      return;
    }
    const values = this.settings().values;
    this.saved.set(name, values);
    this.toggleForm(false);
    this.list(name);
    await this.store.put("presets", { name, values }).catch((error) => this.told(`The preset is not kept: ${error.message}`));
  }

  async remove() {
    const name = this.choice.value;
    this.saved.delete(name);
    this.list();
    this.match();
    this.choice.focus();
    await this.store.remove("presets", name).catch((error) => this.told(error.message));
  }
}
