// The page: every operation of /openapi.json in groups, each opened where it is wanted.

import { ask, getKey, setKey } from "./api.js";
import { byId, el } from "./dom.js";
import { operation } from "./operation.js";
import { Schemas } from "./schemas.js";

const page = { shown: [] };

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

/** Operations by their groups, in the document's order: [[group, [{path, verb, facts}]]]. */
function grouped(document) {
  const found = new Map();
  for (const [path, verbs] of Object.entries(document.paths)) {
    for (const [verb, facts] of Object.entries(verbs)) {
      const group = facts.tags?.[0] ?? "Other";
      if (!found.has(group)) found.set(group, []);
      found.get(group).push({ path, verb, facts });
    }
  }
  return [...found];
}

const anchor = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");

function draw(document, models) {
  const schemas = new Schemas(document.components.schemas);
  byId("version").textContent = document.info.version;
  const sections = grouped(document).map(([group, all]) => {
    const made = all.map((one) => ({ ...one, node: operation(one, schemas, models) }));
    page.shown.push(...made.map((one) => ({ ...one, words: schemas.words(one) })));
    return el(
      "section",
      { "aria-labelledby": anchor(group) },
      el("h2", { id: anchor(group), tabindex: "-1" }, group),
      ...made.map(({ node }) => node),
    );
  });
  byId("operations").replaceChildren(...sections);
  byId("contents").replaceChildren(
    el(
      "ul",
      {},
      ...grouped(document).map(([group, all]) => el("li", {}, el("a", { href: `#${anchor(group)}` }, group, el("small", {}, ` ${all.length}`)))),
    ),
  );
}

/** Show the operations whose path, summary or fields have all words that are looked for. */
function find() {
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { node, words: own } of page.shown) {
    node.hidden = !words.every((word) => own.includes(word));
    count += !node.hidden;
  }
  for (const section of byId("operations").querySelectorAll("section")) section.hidden = !section.querySelector("details.operation:not([hidden])");
  byId("count").textContent = words.length ? `${count} operations` : "";
  notice(count || !page.shown.length ? "" : "Nothing has these words.");
}

/** Open what the address names: an operation, or a group. */
function follow() {
  const node = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!node) return;
  if (node.matches("details")) node.open = true;
  node.scrollIntoView({ block: "start" });
  (node.querySelector("summary") ?? node).focus({ preventScroll: true });
}

/** Names of models, for the examples; without a key there are none. */
async function served() {
  try {
    return (await (await ask("v1/models")).json()).data.map(({ id }) => id);
  } catch {
    return [];
  }
}

async function load() {
  try {
    const description = await (await ask("openapi.json")).json();
    page.shown = [];
    draw(description, await served());
    notice("");
    find();
    follow();
  } catch (error) {
    byId("loading")?.remove();
    if (error.status === 401) byId("key-box").open = true;
    notice(error.status === 401 ? (getKey() ? "The server does not know this key." : "This server wants a key.") : error.message);
  }
}

function start() {
  byId("key").value = getKey();
  byId("key").addEventListener("change", () => {
    setKey(byId("key").value.trim());
    load();
  });
  byId("find").addEventListener("input", find);
  addEventListener("hashchange", follow);
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    byId("find").focus();
  });
  load();
}

start();
