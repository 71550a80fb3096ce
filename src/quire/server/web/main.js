// The page: two lanes, the composer below them, chats, settings and figures beside.

import { getKey, setKey } from "./api.js";
import { Composer } from "./chat/composer.js";
import { Conversation } from "./chat/conversation.js";
import { Lane } from "./chat/lane.js";
import { Session } from "./chat/session.js";
import { legend } from "./chat/tokens.js";
import { byId } from "./dom.js";
import { loadModels } from "./models.js";
import { CodeDialog } from "./panels/code.js";
import { Figures } from "./panels/figures.js";
import { History } from "./panels/history.js";
import { Panels, announce, notice, press, toast } from "./panels/layout.js";
import { Presets } from "./panels/presets.js";
import { Mistake } from "./panels/settings.js";
import { Shortcuts } from "./panels/shortcuts.js";
import { Store } from "./storage/store.js";
import { themeButton } from "./theme.js";

const view = { probabilities: false, compare: false, checked, refused, changed, said, suggest };
const lanes = ["A", "B"].map((name) => new Lane(name, view));
const store = new Store();
const session = new Session(lanes, store, { compare, listed, told: toast });
const chats = new History(store, {
  open: (id) => session.open(id).then(written),
  renamed: (record) => session.renamed(record),
  removed: (id) => session.removed(id),
  restored: (record) => session.open(record.id),
}, toast);
const figures = new Figures(byId("figures"));
const panels = new Panels((name, open) => name === "figures" && figures.show(open));
const presets = new Presets(store, () => lanes[chosen].settings, toast);
const composer = new Composer({ send, stop, editLast, told: notice });
const code = new CodeDialog(bodies);
let chosen = 0;

function listed() {
  presets.match();
  return chats.refresh(session.id);
}

const shown = () => (view.compare ? lanes : lanes.slice(0, 1));
const busy = () => lanes.some((lane) => lane.busy);

function compare(on) {
  view.compare = on;
  press("toggle-compare", on);
  byId("lanes").classList.toggle("two", on);
  lanes[1].root.hidden = !on;
  byId("which").hidden = !on;
  if (!on) lanes[1].stop();
  choose(0);
}

/** Have the second answer go on from where the first is. */
function toggleCompare() {
  compare(!view.compare);
  if (view.compare && lanes[1].conversation.empty) {
    lanes[1].load(new Conversation(structuredClone(lanes[0].conversation.state)), lanes[1].model.value);
  }
  if (session.record) session.said(true);
}

function choose(index) {
  chosen = index;
  lanes.forEach((lane, i) => { lane.settings.root.hidden = i !== index; });
  press("which-a", index === 0);
  press("which-b", index === 1);
  presets.match();
}

function changed() {
  composer.busy(busy());
}

/** Messages came; `answer`: the one that has ended, or nothing while it comes. */
function said(lane, answer = null) {
  session.said(Boolean(answer));
  if (answer) announce(`Answer${view.compare ? ` ${lane.name}` : ""} ended: ${answer.node.measured}`);
}

function refused() {
  notice(getKey() ? "The server does not know this key." : "This server wants a key.");
  byId("unlock").hidden = false;
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
    panels.set("settings", true);
    error.input.focus();
    notice(view.compare ? `Answer ${"AB"[wrong]}: ${error.message}` : error.message);
    return null;
  }
}

function send() {
  if (composer.empty || busy()) return;
  checked(() => {
    const fields = shown().map((lane) => lane.settings.fields());
    const { text, images } = composer.take();
    shown().forEach((lane, i) => lane.send(text, images, fields[i]));
  });
}

/** An example was chosen. What is about an image waits for one. */
function suggest(text, image) {
  composer.write(text);
  composer.focus();
  if (image && !composer.images.urls.length) byId("files").click();
  else send();
}

function stop() {
  for (const lane of lanes) lane.stop();
}

/** Edit the last question; whether there is one. */
function editLast() {
  const edits = lanes[0].log.querySelectorAll(".edit");
  edits[edits.length - 1]?.click();
  return edits.length > 0;
}

/** The requests that would be sent now. */
function bodies() {
  return checked(() => shown().map((lane) => {
    const draft = { role: "user", text: composer.text || "Hello!", images: composer.images.urls };
    return { name: `Answer ${lane.name}`, body: lane.body([...lane.conversation.path, draft], lane.settings.fields()) };
  }));
}

function fresh() {
  session.clear();
  panels.uncover();
  chats.refresh(null);
  composer.focus();
}

function written() {
  panels.uncover();
  composer.focus();
}

async function readModels() {
  notice("");
  try {
    const models = await loadModels();
    for (const lane of lanes) lane.offer(models);
    composer.allowImages(models.some((model) => model.images));
    byId("unlock").hidden = true;
    byId("key-used").hidden = !getKey();
  } catch (error) {
    if (error.status === 401) refused();
    else notice(`No models: ${error.message}`);
  }
}

function useKey(key) {
  if (key === getKey()) return;
  setKey(key);
  readModels();
  figures.show(figures.shown);
}

function escape() {
  if (busy()) stop();
  else panels.uncover();
}

function search() {
  panels.set("history", true);
  byId("search").focus();
}

const clicks = {
  "toggle-compare": toggleCompare,
  "toggle-probabilities": () => {
    view.probabilities = !view.probabilities;
    press("toggle-probabilities", view.probabilities);
    byId("probability-legend").hidden = !view.probabilities;
    for (const lane of lanes) lane.showTokens(view.probabilities);
  },
  "show-code": () => code.open(),
  "show-shortcuts": () => shortcuts.acts.list(),
  "new-chat": fresh,
  "which-a": () => choose(0),
  "which-b": () => choose(1),
  forget: () => {
    byId("key").value = "";
    useKey("");
    byId("key-used").hidden = true;
  },
};

const shortcuts = new Shortcuts({
  escape, fresh, search,
  history: () => panels.toggle("history"),
  settings: () => panels.toggle("settings"),
  write: () => composer.focus(),
});

async function start() {
  byId("lanes").append(...lanes.map((lane) => lane.root));
  byId("forms").append(presets.root, ...lanes.map((lane) => lane.settings.root));
  byId("probability-legend").append(...legend());
  for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);
  themeButton(byId("theme"));
  for (const kind of ["input", "change"]) {
    byId("forms").addEventListener(kind, ({ target }) => presets.root.contains(target) || presets.match());
  }
  byId("key").value = getKey();
  byId("key").addEventListener("change", () => useKey(byId("key").value.trim()));
  byId("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(byId("key").value.trim());
  });
  compare(false);
  composer.focus();
  await Promise.all([readModels(), session.follow(), presets.read()]);
  chats.refresh(session.id);
}

start();
