// One operation: its fields, its replies, and a form that tries it.

import { el } from "./dom.js";
import { form } from "./try.js";

const DEEP = 3; // levels of fields within fields

/** The details of an operation; what is in them is made when they are opened. */
export function operation({ path, verb, facts }, schemas, models) {
  const id = `${verb}${path}`;
  const node = el(
    "details",
    { class: "operation", id },
    el(
      "summary",
      {},
      el("span", { class: `verb ${verb}` }, verb.toUpperCase()),
      el("code", {}, path),
      el("span", { class: "soft summary" }, facts.summary.split(". ")[0].replace(/\.$/, "")),
    ),
  );
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) node.append(inside({ path, verb, facts }, schemas, models));
    if (node.open) history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  });
  return node;
}

function inside({ path, verb, facts }, schemas, models) {
  const bodies = schemas.kinds(facts.requestBody?.content["application/json"]?.schema);
  return el(
    "div",
    { class: "inside" },
    el("p", {}, facts.summary),
    parameters(facts.parameters ?? []),
    form({ path, verb, facts, bodies }, schemas, models),
    ...bodies.map(({ name, schema }) => fieldsOf(bodies.length > 1 ? `Body: ${name}` : "Body", schema, schemas)),
    replies(facts.responses, schemas),
  );
}

function parameters(all) {
  if (!all.length) return null;
  const lines = all.map((one) => [el("code", {}, one.name), one.in, one.schema?.type ?? ""]);
  return el("section", {}, el("h3", {}, "Parameters"), table(["Name", "In", "Type"], lines));
}

/** The fields of a schema: those that count, then those that are refused or ignored. */
function fieldsOf(title, schema, schemas, depth = 0) {
  const all = schemas.fields(schema);
  const used = all.filter(({ state }) => !state);
  const unused = all.filter(({ state }) => state);
  return el(
    "section",
    {},
    el(depth ? "h4" : "h3", {}, title),
    used.length ? rows(used, schemas, depth) : el("p", { class: "soft" }, all.length ? "" : "No fields are described."),
    unused.length
      ? el("details", { class: "unused" }, el("summary", {}, `${unused.length} fields that are refused or ignored`), rows(unused, schemas, depth))
      : null,
  );
}

function rows(fields, schemas, depth) {
  return el(
    "ul",
    { class: "fields" },
    ...fields.map((field) =>
      el(
        "li",
        {},
        el("code", { class: "name" }, field.name),
        field.required ? el("b", { class: "required" }, "required") : null,
        el("span", { class: "type" }, field.type + (field.initial === null ? "" : `, default ${field.initial}`)),
        el("p", {}, (field.state ? `${field.state}: ` : "") + field.text),
        ...(depth < DEEP ? field.inner : []).map((name) => nested(name, schemas, depth)),
      ),
    ),
  );
}

/** A schema within a field, made when it is opened. */
function nested(name, schemas, depth) {
  const node = el("details", { class: "nested" }, el("summary", {}, name));
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) node.append(fieldsOf(name, schemas.known[name] ?? {}, schemas, depth + 1));
  });
  return node;
}

function replies(responses, schemas) {
  const lines = Object.entries(responses).map(([status, { description, content }]) => {
    const kinds = Object.entries(content ?? {}).map(([media, { schema }]) => (media === "application/json" ? schemas.type(schema) : media));
    return [el("code", { class: status < 400 ? "good" : "bad" }, status), description, kinds.join(", ") || "nothing"];
  });
  const good = schemas.kinds(responses["200"]?.content?.["application/json"]?.schema);
  return el(
    "section",
    {},
    el("h3", {}, "Replies"),
    table(["Status", "Meaning", "Body"], lines),
    ...good.filter(({ name }) => name).map(({ name }) => nested(name, schemas, 0)),
  );
}

function table(heads, lines) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, ...lines.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell))))),
    ),
  );
}
