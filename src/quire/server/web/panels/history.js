// The chats that this browser keeps: a list to search, with what can be done to each.

import { byId, el } from "../dom.js";
import { asJson, asMarkdown, fileName, fromJson, save } from "../storage/exchange.js";

const DAY = 86_400_000;

export class History {
  /**
   * `store`: what keeps chats. `acts`: `open(id)`, `renamed(record)`, `removed(id)` and `restored(record)` for the chat that
   * may be shown. `told(text, undo)`: says something, with a way back.
   */
  constructor(store, acts, told) {
    this.store = store;
    this.acts = acts;
    this.told = told;
    this.records = [];
    this.current = null;
    this.search = el("input", { type: "search", id: "search", placeholder: "Search chats", "aria-label": "Search chats", autocomplete: "off", input: () => this.draw() });
    this.list = el("ul", { class: "chats" });
    this.note = el("p", { class: "note" });
    this.file = el("input", { type: "file", id: "import-file", accept: ".json,application/json", hidden: true, "aria-label": "File of chats", change: () => this.read() });
    this.menu = el("div", { id: "chat-menu", class: "menu", popover: "auto", role: "group", "aria-label": "What to do with the chat" });
    byId("history").append(this.search, this.list, this.note, el("div", { class: "foot buttons" },
      el("button", { type: "button", id: "import", class: "small", click: () => this.file.click() }, "Import"),
      el("button", { type: "button", id: "export-all", class: "small", click: () => this.exportAll() }, "Export all")), this.file);
    document.body.append(this.menu);
  }

  /** Read the list anew. `current`: the id of the chat that is shown. */
  async refresh(current = this.current) {
    this.current = current;
    this.records = (await this.store.all("chats")).sort((a, b) => b.updated - a.updated);
    this.draw();
  }

  draw() {
    if (this.list.querySelector(".renaming")) return; // a title is being written there
    const words = this.search.value.trim().toLowerCase();
    const found = words ? this.records.filter((record) => contentOf(record).includes(words)) : this.records;
    let group = "";
    this.list.replaceChildren(...found.flatMap((record) => {
      const name = when(record.updated);
      const head = name === group ? [] : [el("li", { class: "when" }, name)];
      group = name;
      return [...head, this.item(record)];
    }));
    this.note.textContent = said(found.length, words, this.store.kept);
    byId("export-all").disabled = !this.records.length;
  }

  item(record) {
    const current = record.id === this.current;
    const title = el("button", { type: "button", class: "title", "aria-current": current ? "true" : null, title: record.title,
      click: () => this.acts.open(record.id) }, record.title);
    const more = el("button", { type: "button", class: "more quiet", "aria-label": `More of ${record.title}`, "aria-haspopup": "true",
      click: () => this.showMenu(record, more) }, "⋯");
    return el("li", { class: current ? "chat current" : "chat", "data-id": record.id }, title, more);
  }

  showMenu(record, beside) {
    const entry = (name, act) => el("button", { type: "button", click: () => {
      this.menu.hidePopover();
      act();
    } }, name);
    this.menu.replaceChildren(
      entry("Rename", () => this.rename(record)),
      entry("Export as Markdown", () => save(`${fileName(record.title)}.md`, asMarkdown(record), "text/markdown")),
      entry("Export as JSON", () => save(`${fileName(record.title)}.json`, asJson([record]), "application/json")),
      entry("Delete", () => this.remove(record)));
    this.menu.showPopover();
    const box = beside.getBoundingClientRect();
    const below = box.bottom + this.menu.offsetHeight + 8 < innerHeight;
    this.menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - this.menu.offsetWidth - 8))}px`;
    this.menu.style.top = `${below ? box.bottom + 4 : box.top - this.menu.offsetHeight - 4}px`;
    this.menu.firstChild.focus();
  }

  rename(record) {
    const item = this.list.querySelector(`[data-id="${record.id}"]`);
    const input = el("input", { class: "renaming", maxlength: 200, "aria-label": "New title" });
    input.value = record.title;
    let done = false;
    const finish = async (keep) => {
      if (done) return;
      done = true;
      input.classList.remove("renaming");
      const title = input.value.trim();
      if (keep && title && title !== record.title) await this.keep({ ...record, title, named: true });
      await this.refresh();
      this.list.querySelector(`[data-id="${record.id}"] .title`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      finish(event.key === "Enter");
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.select();
  }

  async keep(record) {
    await this.store.put("chats", record).catch((error) => this.told(`The chat is not kept: ${error.message}`));
    this.acts.renamed(record);
  }

  async remove(record) {
    await this.store.remove("chats", record.id);
    this.acts.removed(record.id);
    await this.refresh();
    this.search.focus();
    this.told(`Deleted “${record.title}”.`, async () => {
      await this.store.put("chats", record);
      await this.refresh();
      this.acts.restored(record);
    });
  }

  exportAll() {
    save("chats.json", asJson(this.records), "application/json");
  }

  async read() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      const records = fromJson(await file.text());
      for (const record of records) await this.store.put("chats", record);
      await this.refresh();
      this.told(records.length === 1 ? "1 chat was imported." : `${records.length} chats were imported.`);
    } catch (error) {
      this.told(`${file.name}: ${error.message}.`);
    }
  }
}

const contentOf = (record) => [record.title, ...record.lanes.flatMap(({ tree }) => tree.nodes.map((node) => node.text))]
  .join("\n").toLowerCase();

function said(count, words, kept) {
  if (!kept) return "This browser keeps nothing for this page: chats are lost when it is closed.";
  if (count) return "";
  return words ? "No chat has these words." : "Chats that you have are kept in this browser, and nowhere else.";
}

function when(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last seven days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
