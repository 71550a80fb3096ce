// Where a message is written: its text, its images, and the keys that send it.

import { byId } from "../dom.js";
import { Images } from "./images.js";

export class Composer {
  /** `acts`: `send()`, `stop()`, `editLast()` and `told(text)`. */
  constructor(acts) {
    this.acts = acts;
    this.area = byId("message");
    this.images = new Images(byId("images"), acts.told);
    byId("stop").addEventListener("click", acts.stop);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      acts.send();
    });
    this.area.addEventListener("input", () => this.resize());
    this.area.addEventListener("keydown", (event) => this.pressed(event));
    this.attach();
  }

  get text() {
    return this.area.value.trim();
  }

  get empty() {
    return !this.text && !this.images.urls.length;
  }

  pressed(event) {
    if (event.isComposing || event.shiftKey) return;
    if (event.key === "Enter") {
      event.preventDefault();
      this.acts.send();
    } else if (event.key === "ArrowUp" && !this.area.value && this.acts.editLast()) {
      event.preventDefault();
    }
  }

  /** The text and the images, which then are there no more. */
  take() {
    const found = { text: this.text, images: this.images.take() };
    this.write("");
    return found;
  }

  write(text) {
    this.area.value = text;
    this.resize();
  }

  focus() {
    this.area.focus();
  }

  /** Whether a request runs: it can be stopped then, and nothing sent. */
  busy(on) {
    const held = document.activeElement === byId(on ? "send" : "stop");
    byId("send").hidden = on;
    byId("stop").hidden = !on;
    if (held) byId(on ? "stop" : "send").focus();
  }

  /** Whether some model reads images. */
  allowImages(able) {
    this.images.able = able;
    byId("attach").hidden = !able;
  }

  resize() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, innerHeight / 3)}px`;
  }

  /** Images come by the button, by pasting and by dropping. */
  attach() {
    const { images } = this;
    const files = byId("files");
    const chat = byId("chat");
    byId("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      images.add(files.files);
      files.value = "";
    });
    this.area.addEventListener("paste", (event) => {
      if (images.add(event.clipboardData.files)) event.preventDefault();
    });
    chat.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // or the browser would leave the page for the file
      chat.classList.add("dropping");
    });
    chat.addEventListener("dragleave", (event) => {
      if (!chat.contains(event.relatedTarget)) chat.classList.remove("dropping");
    });
    chat.addEventListener("drop", (event) => {
      chat.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      if (!images.add(event.dataTransfer.files)) this.acts.told(images.able ? "Only images can be added." : "This model reads no images.");
    });
  }
}
