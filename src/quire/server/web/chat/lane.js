// A conversation with one model as it is shown: its messages, its settings, and the request that runs.

import { ask, events } from "../api.js";
import { el } from "../dom.js";
import { Settings } from "../panels/settings.js";
import { Answer } from "./answer.js";
import { Conversation, requestMessages, silent } from "./conversation.js";
import { Question } from "./question.js";
import { Welcome } from "./welcome.js";

const ALTERNATIVES = 5;

export class Lane {
  /**
   * `view`: what all lanes share: `probabilities` (whether they are asked for), `checked(doing)` (runs what reads the
   * forms), `refused()` (the server wants a key), `changed()` (a request begins or ends), `said(lane)` (messages came),
   * `suggest(text, image)` (an example was chosen).
   */
  constructor(name, view) {
    this.name = name;
    this.view = view;
    this.settings = new Settings(name);
    this.conversation = new Conversation();
    this.views = new Map();
    this.model = el("select", { class: "model", "aria-label": `Model of answer ${name}`, change: () => this.modelChosen() });
    this.log = el("div", { class: "log", role: "log", tabindex: "0", "aria-live": "polite", "aria-label": `Conversation ${name}` });
    this.welcome = new Welcome(view.suggest);
    this.root = el("section", { class: "lane", "aria-label": `Answer ${name}` },
      el("header", {}, el("h2", { class: "unseen" }, `Conversation ${name}`), el("span", { class: "letter", "aria-hidden": "true" }, name), this.model), this.welcome.root, this.log);
    this.acts = {
      again: (node) => view.checked(() => this.regenerate(node)),
      edit: (node, text) => view.checked(() => this.edit(node, text)),
      results: (node, texts) => view.checked(() => this.giveResults(node, texts)),
      turn: (node, step) => this.turn(node, step),
    };
    this.show();
  }

  get busy() {
    return Boolean(this.control);
  }

  /** Offer these models (of models.js); the one that was chosen stays. */
  offer(models) {
    const chosen = this.wanted ?? this.model.value;
    this.models = models;
    this.model.replaceChildren(...models.map((model) => el("option", { value: model.id }, model.id)));
    if (models.some((model) => model.id === chosen)) this.model.value = chosen;
    this.modelChosen();
  }

  async modelChosen() {
    const model = this.models.find(({ id }) => id === this.model.value);
    if (!model) return;
    this.welcome.show(model);
    await model.learn();
    if (this.model.value !== model.id) return;
    this.welcome.show(model);
    this.settings.showDefaults(model.defaults);
  }

  /** Show another conversation. `model`: the one that it was with. */
  load(conversation, model = "") {
    this.stop();
    this.conversation = conversation;
    this.views.clear();
    this.wanted = model || null;
    if (this.models) this.offer(this.models);
    this.show();
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Show the messages of the branch that is chosen; those that stay keep their elements. */
  show() {
    const path = this.conversation.path;
    const found = path.map((node, i) => {
      const view = this.viewOf(node);
      const all = this.conversation.branches(node);
      view.situate(all.indexOf(node), all.length, i < path.length - 1);
      return view.root;
    });
    const last = found.findIndex((root, i) => this.log.children[i] !== root);
    if (last >= 0) this.log.append(...found.slice(last));
    while (this.log.children.length > found.length) this.log.children[last < 0 ? found.length : last].remove();
    this.welcome.root.hidden = !this.conversation.empty;
    this.log.hidden = this.conversation.empty;
  }

  viewOf(node) {
    if (!this.views.has(node.id)) {
      const view = node.role === "assistant"
        ? new Answer(node, { tokens: this.view.probabilities, acts: this.acts })
        : new Question(node, this.acts);
      this.views.set(node.id, view);
    }
    return this.views.get(node.id);
  }

  /** Ask. `images`: addresses of images; `fields`: those of the settings, checked. */
  send(text, images, fields) {
    const last = this.conversation.path.at(-1) ?? null;
    const question = { role: "user", text, ...(images.length ? { images } : {}) };
    return this.answer(this.conversation.add(last, question), fields);
  }

  /** Ask for `node` again: what came before stays as a branch, unless that was nothing. */
  regenerate(node) {
    if (this.busy) return;
    const fields = this.settings.fields();
    const before = this.conversation.nodes.get(node.parent);
    if (silent(node)) this.conversation.drop(node);
    this.answer(before, fields);
  }

  /** Ask anew from a question on; whether that began. */
  edit(node, text) {
    if (this.busy) return false;
    const fields = this.settings.fields();
    const { role, images } = node;
    this.answer(this.conversation.add(this.conversation.nodes.get(node.parent), { role, text, ...(images ? { images } : {}) }), fields);
    return true;
  }

  giveResults(node, texts) {
    if (this.busy) return;
    const fields = this.settings.fields();
    let last = node;
    node.calls.forEach((call, i) => {
      last = this.conversation.add(last, { role: "tool", call: call.id, name: call.name, text: texts[i] });
    });
    this.answer(last, fields);
  }

  turn(node, step) {
    if (this.busy) return;
    this.conversation.turn(node, step);
    this.show();
    this.view.said(this);
    const shown = this.conversation.path.find(({ parent }) => parent === node.parent);
    const arrows = this.viewOf(shown).root.querySelectorAll(".branches button:not(:disabled)");
    (arrows[step > 0 ? arrows.length - 1 : 0])?.focus();
  }

  stop() {
    this.control?.abort();
  }

  showTokens(tokens) {
    for (const node of this.conversation.path) this.viewOf(node).showTokens?.(tokens);
  }

  /** The body of a request behind the messages of `path`, without what only this page wants. */
  body(path, fields) {
    return { model: this.model.value || null, messages: requestMessages(path, this.settings.system), ...fields };
  }

  /** Stream an answer behind `before`. */
  async answer(before, fields) {
    const { conversation } = this;
    const { probabilities } = this.view;
    const body = this.body(conversation.until(before), fields);
    Object.assign(body, { stream: true, stream_options: { include_usage: true }, quire: { timings: true } });
    if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    const node = conversation.add(before, { role: "assistant", text: "", model: body.model ?? "", json: this.settings.json });
    const answer = this.viewOf(node);
    const control = this.control = new AbortController();
    answer.begin();
    this.show();
    this.log.scrollTop = this.log.scrollHeight;
    this.view.changed();
    this.view.said(this);
    try {
      for await (const chunk of events(await ask("v1/chat/completions", body, control.signal))) {
        answer.take(chunk);
        this.view.said(this);
      }
      answer.end("stop");
    } catch (error) {
      if (control.signal.aborted) answer.end("cancelled");
      else answer.end("failed", error);
      if (error.status === 401) this.view.refused();
    } finally {
      if (this.control === control) this.control = null;
      if (this.conversation === conversation) this.view.said(this, answer);
      this.view.changed();
    }
  }
}
