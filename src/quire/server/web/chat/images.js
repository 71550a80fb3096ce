// Images that go with the next message: chosen, pasted or dropped, and shown small until they are sent.

import { el } from "../dom.js";

export class Images {
  /** `root`: where they are shown. `told(text)`: called with what could not be added. */
  constructor(root, told) {
    this.root = root;
    this.told = told;
    this.urls = [];
    this.able = false;
  }

  /** Add those of `files` that are images; whether there were any. */
  add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    if (!this.able || !images.length) return false;
    Promise.all(images.map(read)).then((urls) => this.show([...this.urls, ...urls]), (error) => this.told(error.message));
    return true;
  }

  /** Those that there are, which then are there no more. */
  take() {
    const urls = this.urls;
    this.show([]);
    return urls;
  }

  show(urls) {
    this.urls = urls;
    this.root.hidden = !urls.length;
    this.root.replaceChildren(...urls.map((url, i) => el("span", { class: "held" }, thumbnail(url),
      el("button", { type: "button", class: "small", "aria-label": `Remove image ${i + 1}`, click: () => this.drop(i) }, "×"))));
  }

  drop(index) {
    this.show(this.urls.filter((_, i) => i !== index));
  }
}

/** An image as it stands beside a text. */
export const thumbnail = (url) => el("img", { src: url, alt: "Image", class: "thumbnail" });

/** What a message says: images first. */
export const contentOf = (text, urls) => (urls.length
  ? [...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])]
  : text);

function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
