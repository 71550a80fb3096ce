// One answer: what came of it so far, and how that is shown.

import { copyButton, el } from "../dom.js";
import { MarkdownView, codeBlock } from "../text/markdown.js";
import { BranchArrows } from "./branches.js";
import { TokenView } from "./tokens.js";

export class Answer {
  /**
   * `node`: the message that the answer is, of a conversation. `tokens`: its tokens are shown while it has their
   * probabilities. `acts`: `again(node)`, `turn(node, step)`, and `results(node, texts)` for calls of tools.
   */
  constructor(node, { tokens, acts }) {
    this.node = node;
    this.acts = acts;
    this.added = 0;
    this.tokens = tokens;
    this.first = null;
    this.usage = null;
    this.timings = null;
    this.live = false;
    this.thought = el("p", { class: "thought" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.body = el("div", { class: "markdown" });
    this.scored = el("div", { class: "scored", hidden: true });
    this.calls = el("div", { class: "calls", hidden: true });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.markdown = new MarkdownView(this.body);
    this.tokenView = new TokenView(this.scored);
    this.root = el("article", { class: node.json ? "answer json" : "answer", "aria-label": "Answer", "aria-busy": "false" },
      this.thinking, this.body, this.scored, this.calls, this.error, this.foot());
    this.paint();
  }

  foot() {
    this.stats = el("span", { class: "stats" });
    this.arrows = new BranchArrows((step) => this.acts.turn(this.node, step));
    this.again = el("button", { type: "button", class: "small quiet again", click: () => this.acts.again(this.node) }, "Regenerate");
    this.buttons = el("span", { class: "buttons" }, this.arrows.root, copyButton(() => this.node.text), this.again);
    return el("footer", {}, this.buttons, this.stats);
  }

  /** A request for this answer has begun. */
  begin() {
    this.live = true;
    this.started = performance.now();
    this.root.setAttribute("aria-busy", "true");
    this.buttons.hidden = true;
    this.paint();
  }

  /** A chunk of the stream. */
  take(chunk) {
    const { node } = this;
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.quire?.timings ?? this.timings;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
    if (this.first === null && (content || reasoning || calls.length)) this.first = performance.now();
    node.text += content ?? "";
    node.reasoning = (node.reasoning ?? "") + (reasoning ?? "");
    for (const call of calls) this.takeCall(call);
    if (!reasoning && choice.logprobs?.content) (node.entries ??= []).push(...choice.logprobs.content);
    node.reason = choice.finish_reason ?? node.reason;
    this.paintSoon();
  }

  takeCall({ index = 0, id, function: part = {} }) {
    this.node.calls ??= [];
    const call = this.node.calls[index] ??= { id: "", name: "", arguments: "" };
    call.id = id ?? call.id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }

  /** The stream has ended: `reason` where the server gave none, `error` where it failed. */
  end(reason, error = null) {
    this.node.reason ??= reason;
    this.live = false;
    if (error) this.node.error = error.message;
    this.node.measured = this.measured();
    this.root.setAttribute("aria-busy", "false");
    this.buttons.hidden = false;
    this.paint();
  }

  paintSoon() {
    this.frame ??= requestAnimationFrame(() => this.paint());
  }

  /** Show what there is; a reader who is at the end stays there. */
  paint() {
    const { node } = this;
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    const log = this.root.parentNode;
    const stays = this.live && log && atEnd(log);
    const scored = this.tokens && Boolean(node.entries?.length);
    this.paintThought();
    this.scored.hidden = !scored;
    this.body.hidden = scored || !node.text;
    if (scored) {
      this.tokenView.add(node.entries.slice(this.added), node.text);
      this.added = node.entries.length;
    } else if (node.json && node.text) {
      this.body.replaceChildren(codeBlock(node.text, "json"));
    } else {
      this.markdown.show(node.text);
    }
    this.paintCalls();
    this.error.textContent = node.error ?? "";
    this.error.hidden = !node.error;
    this.stats.textContent = this.live ? this.measured() : node.measured ?? "";
    this.root.classList.toggle("waiting", this.live && this.first === null);
    if (stays) log.scrollTop = log.scrollHeight;
  }

  paintThought() {
    const { reasoning, text } = this.node;
    this.thinking.hidden = !reasoning;
    this.thinking.firstChild.textContent = this.live && !text ? "Reasoning…" : "Reasoning";
    this.thought.textContent = reasoning ?? "";
  }

  paintCalls() {
    const { calls = [] } = this.node;
    this.calls.hidden = !calls.length;
    const source = JSON.stringify([calls, this.live, this.answered]);
    if (this.called === source) return;
    this.called = source;
    this.calls.replaceChildren(...calls.map((call) => el("div", { class: "call", role: "group", "aria-label": `Call of ${call.name}` },
      el("h3", {}, "Calls ", el("code", {}, call.name)), codeBlock(pretty(call.arguments), "json"))));
    if (calls.length && !this.live && !this.answered) this.calls.append(this.resultForm(calls));
  }

  /** Somebody plays the tool: what each call gives is written here. */
  resultForm(calls) {
    const areas = calls.map((call) => el("textarea", { rows: 2, spellcheck: "false", name: "result", required: true }));
    const fields = calls.map((call, i) => el("label", { class: "field" }, el("span", {}, `Result of ${call.name}`), areas[i]));
    const form = el("form", { class: "results" }, ...fields,
      el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.acts.results(this.node, areas.map((area) => area.value));
    });
    return form;
  }

  /** `place`: which of `count` branches this is; `answered`: whether something stands behind it. */
  situate(place, count, answered) {
    this.arrows.show(place, count);
    this.answered = answered;
    this.paintCalls();
  }

  /** Show tokens, or the text. */
  showTokens(tokens) {
    this.tokens = tokens;
    this.paint();
  }

  measured() {
    const { reason } = this.node;
    if (this.first === null) return this.live ? "waiting" : (reason ?? "");
    const found = [`first after ${Math.round(this.first - this.started)} ms`];
    if (this.usage) found.unshift(`${this.usage.completion_tokens} tokens`);
    // The engine's clock: pieces of a short answer arrive here all at once.
    const { generated_tokens: count, decode_seconds: seconds } = this.timings ?? {};
    if (count > 1 && seconds > 0) found.push(`${((count - 1) / seconds).toFixed(0)} tokens/s`);
    if (!this.live && reason) found.push(reason);
    return found.join(" · ");
  }
}

function pretty(words) {
  try {
    return JSON.stringify(JSON.parse(words), null, 2);
  } catch {
    return words;
  }
}

function atEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}
