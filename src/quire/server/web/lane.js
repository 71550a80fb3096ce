// A conversation with one model: its messages, its settings, and the request that runs.

import { Answer } from "./answer.js";
import { ask, events } from "./api.js";
import { el } from "./dom.js";
import { contentOf, thumbnail } from "./images.js";
import { Settings } from "./settings.js";

const ALTERNATIVES = 5;

export class Lane {
  /** `view.probabilities`: whether they are asked for. `changed()` is called when a request begins or ends. */
  constructor(name, view, changed) {
    this.view = view;
    this.changed = changed;
    this.settings = new Settings(name);
    this.turns = [];
    this.model = el("select", { class: "model", "aria-label": `Model of answer ${name}` });
    this.log = el("div", { class: "log", role: "log", tabindex: "0", "aria-label": `Conversation ${name}` });
    this.root = el("section", { class: "lane", "aria-label": `Answer ${name}` },
      el("header", {}, el("span", { class: "letter" }, name), this.model), this.log);
  }

  get busy() {
    return Boolean(this.control);
  }

  /** Offer these models; the one that was chosen stays. */
  offer(models) {
    const chosen = this.model.value;
    this.model.replaceChildren(...models.map((model) => el("option", { value: model.id }, model.id)));
    if (models.some((model) => model.id === chosen)) this.model.value = chosen;
  }

  /** Ask. `urls`: of images; `fields`: those of the settings, checked. */
  send(text, urls, fields) {
    const question = el("article", { class: "question", "aria-label": "You" }, ...urls.map(thumbnail), text);
    this.log.append(question);
    return this.answer({ content: contentOf(text, urls), question }, fields);
  }

  /** Ask the last question again. */
  regenerate() {
    const last = this.turns.at(-1);
    if (!last || this.busy) return null;
    const fields = this.settings.fields();
    this.turns.pop();
    last.answer.root.remove();
    return this.answer(last, fields);
  }

  stop() {
    this.control?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
  }

  showTokens(tokens) {
    for (const turn of this.turns) turn.answer.showTokens(tokens);
  }

  messages(content) {
    // What failed before it said anything is no part of the conversation.
    const said = this.turns.filter((turn) => turn.answer.text).flatMap((turn) => [
      { role: "user", content: turn.content }, { role: "assistant", content: turn.answer.text }]);
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return [...system, ...said, { role: "user", content }];
  }

  async answer(turn, fields) {
    const { probabilities } = this.view;
    const body = { model: this.model.value || null, messages: this.messages(turn.content), ...fields };
    Object.assign(body, { stream: true, stream_options: { include_usage: true }, quire: { timings: true } });
    if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    const answer = new Answer({ json: this.settings.json, tokens: probabilities, again: () => this.view.regenerate(this) });
    this.turns.push({ ...turn, answer });
    this.log.append(answer.root);
    this.log.scrollTop = this.log.scrollHeight;
    const control = this.control = new AbortController();
    this.changed();
    try {
      for await (const chunk of events(await ask("v1/chat/completions", body, control.signal))) answer.take(chunk);
      answer.end("stop");
    } catch (error) {
      if (control.signal.aborted) answer.end("cancelled");
      else answer.end("failed", error);
      if (error.status === 401) this.view.refused();
    } finally {
      if (this.control === control) this.control = null;
      this.changed();
    }
  }
}
