// A form that sends an operation's request to this server, shows what comes, and says the same as a curl command.

import { getKey } from "./api.js";
import { copyButton, el } from "./dom.js";

const MOST = 200_000; // characters of a reply that are shown

/** The form of an operation; `bodies` are the kinds that its body may be of. */
export function form({ path, verb, facts, bodies }, schemas, models) {
  const values = new Map();
  const inputs = (facts.parameters ?? []).map((one) => {
    const input = el("input", { type: "text", autocomplete: "off", spellcheck: "false", placeholder: one.in === "path" ? "needed" : "" });
    if (one.name === "model" && models[0]) input.value = models[0];
    values.set(one, input);
    return el("label", { class: "control" }, el("span", {}, one.name), input);
  });
  const area = bodies.length ? el("textarea", { spellcheck: "false", "aria-label": "Body of the request" }) : null;
  if (area) {
    area.value = JSON.stringify(schemas.example(bodies[0].schema, models[0]), null, 2);
    area.rows = Math.min(14, area.value.split("\n").length + 1);
  }
  const command = el("pre", { class: "command", tabindex: "0" });
  const status = el("p", { class: "status", role: "status" });
  const shown = el("pre", { class: "reply", tabindex: "0", hidden: true });
  const send = el("button", { type: "submit", class: "main" }, "Send");
  const stop = el("button", { type: "button", hidden: true, click: () => running?.abort() }, "Stop");
  const stream = facts.responses["200"]?.content && Object.keys(facts.responses["200"].content).some((media) => /event-stream|ndjson/.test(media));
  let running = null;

  const address = () => {
    let found = path;
    const query = new URLSearchParams();
    for (const [one, input] of values) {
      if (one.in === "path") found = found.replace(`{${one.name}}`, encodeURIComponent(input.value).replaceAll("%2F", "/"));
      else if (input.value) query.set(one.name, input.value);
    }
    const asked = String(query);
    return new URL(found.slice(1) + (asked ? `?${asked}` : ""), document.baseURI);
  };
  const say = () => {
    command.textContent = asCurl(verb, address(), area?.value ?? null);
  };

  async function submit(event) {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    shown.hidden = false;
    shown.textContent = "";
    status.textContent = "Waiting …";
    try {
      status.textContent = await exchange(verb, address(), area?.value ?? null, shown, running.signal);
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped." : `The server does not answer: ${error.message}`;
    }
    running = null;
    send.disabled = false;
    stop.hidden = true;
  }

  const node = el(
    "form",
    { class: "try", "aria-label": `Try ${verb.toUpperCase()} ${path}`, submit, input: say },
    el("h3", {}, "Try it"),
    ...inputs,
    area,
    el("div", { class: "buttons" }, send, stop, stream && area ? streamSwitch(area, say) : null, copyButton(() => command.textContent, "Copy as curl")),
    command,
    status,
    shown,
  );
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) node.requestSubmit();
  });
  say();
  return node;
}

/** Puts `stream: true` into the body, and takes it out. */
function streamSwitch(area, say) {
  const box = el("input", { type: "checkbox", change: () => change() });
  function change() {
    try {
      const body = JSON.parse(area.value);
      body.stream = box.checked;
      area.value = JSON.stringify(body, null, 2);
      say();
    } catch {
      box.checked = !box.checked; // what is no JSON yet stays as it is
    }
  }
  return el("label", { class: "check" }, box, "as a stream");
}

/** Send it and show the reply as it comes; returns its status and how long it took. */
async function exchange(verb, url, body, shown, signal) {
  const began = performance.now();
  const headers = getKey() ? { authorization: `Bearer ${getKey()}` } : {};
  if (body !== null) headers["content-type"] = "application/json";
  const reply = await fetch(url, { method: verb.toUpperCase(), headers, body: verb === "get" ? null : body, signal });
  let text = "";
  const reader = reply.body?.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = (await reader?.read()) ?? { done: true };
    if (done) break;
    text += value;
    shown.textContent = text.slice(0, MOST);
  }
  shown.textContent = pretty(text).slice(0, MOST);
  shown.hidden = !text;
  const cut = text.length > MOST ? `, of which the first ${MOST.toLocaleString("en")} characters are shown` : "";
  const ignored = reply.headers.get("warning");
  return `${reply.status} ${reply.statusText}, ${Math.round(performance.now() - began)} ms${cut}${ignored ? ` (${ignored})` : ""}`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function asCurl(verb, url, body) {
  const lines = [`curl ${verb === "get" || (verb === "post" && body !== null) ? "" : `-X ${verb.toUpperCase()} `}${quoted(String(url))}`];
  if (getKey()) lines.push('-H "Authorization: Bearer $API_KEY"');
  if (body !== null) lines.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  return lines.join(" \\\n  ");
}
