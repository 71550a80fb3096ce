// One answer: what came of it so far, and how that is shown.

import { copyButton, el } from "./dom.js";
import { MarkdownView, codeBlock } from "./markdown.js";
import { TokenView } from "./tokens.js";

export class Answer {
  /** `json`: it is shown as code. `tokens`: its tokens are shown while it has their probabilities. */
  constructor({ json, tokens, again }) {
    this.json = json;
    this.text = "";
    this.reasoning = "";
    this.entries = [];
    this.added = 0;
    this.tokens = tokens;
    this.started = performance.now();
    this.first = null;
    this.usage = null;
    this.timings = null;
    this.reason = null;
    this.thought = el("p", { class: "thought" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.body = el("div", { class: "markdown" });
    this.scored = el("div", { class: "scored", hidden: true });
    this.stats = el("span", { class: "stats" }, "waiting");
    this.again = el("button", { type: "button", class: "small again", click: again }, "Regenerate");
    this.buttons = el("span", { class: "buttons", hidden: true }, copyButton(() => this.text), this.again);
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    const foot = el("footer", {}, this.stats, this.buttons);
    this.root = el("article", { class: json ? "answer json" : "answer", "aria-label": "Answer", "aria-busy": "true" },
      this.thinking, this.body, this.scored, this.error, foot);
    this.markdown = new MarkdownView(this.body);
    this.tokenView = new TokenView(this.scored);
  }

  /** A chunk of the stream. */
  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.quire?.timings ?? this.timings;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (this.first === null && (content || reasoning)) this.first = performance.now();
    this.text += content ?? "";
    this.reasoning += reasoning ?? "";
    if (!reasoning) this.entries.push(...(choice.logprobs?.content ?? []));
    this.reason = choice.finish_reason ?? this.reason;
    this.paintSoon();
  }

  /** The stream has ended: `reason` where the server gave none, `error` where it failed. */
  end(reason, error = null) {
    this.reason ??= reason;
    this.ended = performance.now();
    if (error) {
      this.error.textContent = error.message;
      this.error.hidden = false;
    }
    this.root.setAttribute("aria-busy", "false");
    this.buttons.hidden = false;
    this.paint();
  }

  paintSoon() {
    this.frame ??= requestAnimationFrame(() => this.paint());
  }

  /** Show what there is; a reader who is at the end stays there. */
  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const log = this.root.parentElement; // none once the conversation was cleared
    const stays = log && atEnd(log);
    const scored = this.tokens && this.entries.length > 0;
    this.thinking.hidden = !this.reasoning;
    this.thought.textContent = this.reasoning;
    this.scored.hidden = !scored;
    this.body.hidden = scored;
    if (scored) {
      this.tokenView.add(this.entries.slice(this.added), this.text);
      this.added = this.entries.length;
    } else if (this.json && this.text) {
      this.body.replaceChildren(codeBlock(this.text, "json"));
    } else {
      this.markdown.show(this.text);
    }
    this.stats.textContent = this.measured();
    if (stays) log.scrollTop = log.scrollHeight;
  }

  /** Show tokens, or the text. */
  showTokens(tokens) {
    this.tokens = tokens;
    this.paint();
  }

  measured() {
    if (this.first === null) return this.ended ? (this.reason ?? "") : "waiting";
    const found = [`first after ${Math.round(this.first - this.started)} ms`];
    if (this.usage) found.unshift(`${this.usage.completion_tokens} tokens`);
    // The engine's clock: pieces of a short answer arrive here all at once.
    const { generated_tokens: count, decode_seconds: seconds } = this.timings ?? {};
    if (count > 1 && seconds > 0) found.push(`${((count - 1) / seconds).toFixed(0)} tokens/s`);
    if (this.ended && this.reason) found.push(this.reason);
    return found.join(" · ");
  }
}

function atEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}
