// What a person said, or a tool gave: the text, its images, and a form to write it anew.

import { copyButton, el } from "../dom.js";
import { BranchArrows } from "./branches.js";
import { thumbnail } from "./images.js";

export class Question {
  /** `node`: the message, of a conversation. `acts`: `edit(node, text)` and `turn(node, step)`. */
  constructor(node, acts) {
    this.node = node;
    this.acts = acts;
    const tool = node.role === "tool";
    this.bubble = el("div", { class: "question" }, ...(node.images ?? []).map(thumbnail), node.text);
    this.arrows = new BranchArrows((step) => acts.turn(node, step));
    this.pencil = tool ? null : el("button", { type: "button", class: "small quiet edit", click: () => this.edit() }, "Edit");
    this.foot = el("footer", {}, el("span", { class: "buttons" }, this.arrows.root, copyButton(() => node.text), this.pencil));
    this.root = el("article", { class: tool ? "turn given" : "turn mine", "aria-label": tool ? `Result of ${node.name}` : "You" },
      tool ? el("h3", {}, "Result of ", el("code", {}, node.name)) : null, this.bubble, this.foot);
  }

  situate(place, count) {
    this.arrows.show(place, count);
  }

  /** Have the text written anew; what is sent becomes a branch beside it. */
  edit() {
    const area = el("textarea", { class: "anew", "aria-label": "Edit your message" });
    area.value = this.node.text;
    const cancel = el("button", { type: "button", click: () => this.close() }, "Cancel");
    const form = el("form", { class: "editing" }, area,
      el("span", { class: "buttons" }, cancel, el("button", { type: "submit", class: "main" }, "Send")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!area.value.trim() && !this.node.images?.length) return;
      if (this.acts.edit(this.node, area.value.trim())) this.close();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.root.classList.add("wide");
    this.bubble.hidden = this.foot.hidden = true;
    this.root.append(form);
    this.form = form;
    area.style.height = `${Math.min(area.scrollHeight + 4, innerHeight / 2)}px`;
    area.focus();
  }

  close() {
    this.form?.remove();
    this.form = null;
    this.root.classList.remove("wide");
    this.bubble.hidden = this.foot.hidden = false;
    this.pencil?.focus();
  }
}
