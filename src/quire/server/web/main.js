// The page: two lanes, the composer below them, the settings and figures beside.

import { ask, getKey, setKey } from "./api.js";
import { byId } from "./dom.js";
import { Figures } from "./figures.js";
import { Lane } from "./lane.js";
import { Images } from "./images.js";
import { Mistake } from "./settings.js";

const NARROW = matchMedia("(max-width: 60rem)");

const view = { probabilities: false, compare: false, regenerate, refused };
const lanes = ["A", "B"].map((name) => new Lane(name, view, changed));
const figures = new Figures(byId("figures"));
const images = new Images(byId("images"), notice);
const shown = () => (view.compare ? lanes : lanes.slice(0, 1));

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function pressed(id, on) {
  byId(id).setAttribute("aria-pressed", String(on));
}

function panel(name, open) {
  byId(name).hidden = !open;
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(open));
  if (open && NARROW.matches) panel(name === "figures" ? "settings" : "figures", false);
  if (name === "figures") figures.show(open);
}

function compare(on) {
  view.compare = on;
  pressed("toggle-compare", on);
  byId("lanes").classList.toggle("two", on);
  lanes[1].root.hidden = !on;
  byId("which").hidden = !on;
  if (!on) lanes[1].stop();
  choose(0);
}

function choose(index) {
  lanes.forEach((lane, i) => { lane.settings.root.hidden = i !== index; });
  pressed("which-a", index === 0);
  pressed("which-b", index === 1);
}

function changed() {
  const busy = lanes.some((lane) => lane.busy);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function refused() {
  panel("settings", true);
  byId("key").focus();
}

/** Do what reads the forms; a mistake in one is shown there. */
function checked(doing) {
  notice("");
  try {
    return doing();
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    const wrong = lanes.findIndex((lane) => lane.settings.root.contains(error.input));
    choose(wrong);
    panel("settings", true);
    error.input.focus();
    notice(view.compare ? `Answer ${"AB"[wrong]}: ${error.message}` : error.message);
    return null;
  }
}

function regenerate(lane) {
  checked(() => lane.regenerate());
}

function send() {
  const text = byId("message").value.trim();
  if (!(text || images.urls.length) || lanes.some((lane) => lane.busy)) return;
  checked(() => {
    const fields = shown().map((lane) => lane.settings.fields());
    byId("message").value = "";
    resize();
    const urls = images.take();
    shown().forEach((lane, i) => lane.send(text, urls, fields[i]));
  });
}

function stop() {
  for (const lane of lanes) lane.stop();
}

function resize() {
  const area = byId("message");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 3)}px`;
}

async function loadModels() {
  notice("");
  try {
    const { data } = await (await ask("v1/models")).json();
    for (const lane of lanes) lane.offer(data);
    images.able = data.some((model) => model.input_modalities?.includes("image"));
    byId("attach").hidden = !images.able;
  } catch (error) {
    if (error.status === 401) {
      notice(getKey() ? "The server does not know this key." : "This server wants a key: enter it in the settings.");
      refused();
    } else {
      notice(`No models: ${error.message}`);
    }
  }
}

function keys(event) {
  if (event.key === "Escape") {
    if (lanes.some((lane) => lane.busy)) stop();
    else if (NARROW.matches) ["settings", "figures"].forEach((name) => panel(name, false));
  }
}

/** Images come by the button, by pasting and by dropping. */
function attach() {
  const files = byId("files");
  byId("attach").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    images.add(files.files);
    files.value = "";
  });
  byId("message").addEventListener("paste", (event) => {
    if (images.add(event.clipboardData.files)) event.preventDefault();
  });
  byId("chat").addEventListener("dragover", (event) => {
    if (images.able) event.preventDefault();
  });
  byId("chat").addEventListener("drop", (event) => {
    if (images.add(event.dataTransfer.files)) event.preventDefault();
  });
}

function start() {
  byId("lanes").append(...lanes.map((lane) => lane.root));
  byId("forms").append(...lanes.map((lane) => lane.settings.root));
  for (const name of ["settings", "figures"]) {
    byId(`toggle-${name}`).addEventListener("click", () => panel(name, byId(name).hidden));
  }
  byId("toggle-compare").addEventListener("click", () => compare(!view.compare));
  byId("toggle-probabilities").addEventListener("click", () => {
    view.probabilities = !view.probabilities;
    pressed("toggle-probabilities", view.probabilities);
    for (const lane of lanes) lane.showTokens(view.probabilities);
  });
  byId("new-chat").addEventListener("click", () => {
    for (const lane of lanes) lane.clear();
    byId("message").focus();
  });
  byId("which-a").addEventListener("click", () => choose(0));
  byId("which-b").addEventListener("click", () => choose(1));
  byId("stop").addEventListener("click", stop);
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("message").addEventListener("input", resize);
  byId("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  attach();
  document.addEventListener("keydown", keys);
  byId("key").value = getKey();
  byId("key").addEventListener("change", () => {
    setKey(byId("key").value.trim());
    loadModels();
    figures.show(figures.shown);
  });
  compare(false);
  panel("settings", !NARROW.matches);
  panel("figures", !NARROW.matches);
  loadModels();
  byId("message").focus();
}

start();
