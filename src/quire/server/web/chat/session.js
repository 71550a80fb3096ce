// The chat that is shown: which record it is, and when it is kept.

import { newId } from "../storage/store.js";
import { Conversation, titleOf } from "./conversation.js";

const EVERY = 1000; // ms between two savings of an answer that still comes
const MARK = "#chat=";

export class Session {
  /** `lanes`: both. `acts`: `compare(on)`, `listed()` (the list of chats changed) and `told(text)`. */
  constructor(lanes, store, acts) {
    this.lanes = lanes;
    this.store = store;
    this.acts = acts;
    this.record = null;
    addEventListener("pagehide", () => this.save());
    addEventListener("hashchange", () => this.follow());
  }

  get id() {
    return this.record?.id ?? null;
  }

  /** Show the chat that the address names, else none. */
  async follow() {
    const id = location.hash.startsWith(MARK) ? location.hash.slice(MARK.length) : null;
    if (id === this.id) return;
    const found = id ? await this.store.get("chats", id) : null;
    if (found) this.show(found);
    else this.clear();
    this.acts.listed();
  }

  async open(id) {
    const found = await this.store.get("chats", id);
    if (found) this.show(found);
    this.acts.listed();
  }

  show(record) {
    this.save();
    this.record = record;
    history.replaceState(null, "", `${location.pathname}${location.search}${MARK}${record.id}`);
    this.acts.compare(Boolean(record.compare));
    this.lanes.forEach((lane, i) => {
      const { tree, model, settings } = record.lanes[i] ?? {};
      lane.load(new Conversation(tree), model);
      if (settings) lane.settings.fill(settings);
    });
  }

  /** Show an empty chat. It is no record before something is said. */
  clear() {
    this.save();
    this.record = null;
    history.replaceState(null, "", `${location.pathname}${location.search}`);
    for (const lane of this.lanes) lane.load(new Conversation(), lane.model.value);
  }

  /** Something was said: keep it at once where that ended, else soon. */
  said(ended) {
    if (!this.record) {
      const now = Date.now();
      this.record = { id: newId(), title: "", named: false, created: now, updated: now, lanes: [] };
      history.replaceState(null, "", `${location.pathname}${location.search}${MARK}${this.record.id}`);
      ended = true;
    }
    this.record.updated = Date.now();
    this.dirty = true;
    if (ended) this.save();
    else this.timer ??= setTimeout(() => this.save(), EVERY);
  }

  async save() {
    clearTimeout(this.timer);
    this.timer = null;
    const { record } = this;
    if (!record || !this.dirty) return;
    this.dirty = false;
    record.compare = !this.lanes[1].root.hidden;
    record.lanes = this.lanes.filter((lane, i) => i === 0 || !lane.conversation.empty).map((lane) => (
      { model: lane.model.value, settings: lane.settings.values, tree: lane.conversation.state }));
    if (!record.named) record.title = titleOf(this.lanes[0].conversation);
    try {
      await this.store.put("chats", record);
      this.acts.listed();
    } catch (error) {
      this.acts.told(`This chat is not kept: ${error.message}`);
    }
  }

  /** The chat was given a title, or removed, by its entry in the list. */
  renamed(record) {
    if (record.id === this.id) Object.assign(this.record, { title: record.title, named: true });
  }

  removed(id) {
    if (id !== this.id) return;
    this.record = null;
    this.dirty = false;
    this.clear();
  }
}
