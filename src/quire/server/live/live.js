// The page: asks /dashboard/history once, then /metrics and /dashboard/state every second while it is seen, and what is wrong every few.

import { ask, getKey, setKey } from "./api.js";
import { Lines } from "./charts.js";
import { byId, el } from "./dom.js";
import { parse } from "./metrics.js";
import { Readings, momentOf, ofModel } from "./readings.js";
import { incidents, models, ranks, replicas, tenants } from "./tables.js";
import { verdict } from "./verdict.js";

const EVERY = 1000; // ms
const DIAGNOSE_EVERY = 5; // readings: as often as the server keeps a moment
const PATIENCE = 5000; // ms: a server that stalls is one that does not answer

const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value < 10 ? value.toFixed(1) : whole(value));
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const time = (seconds) => (seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);

const TILES = [
  ["running", "Running", whole],
  ["waiting", "Waiting", whole],
  ["kv", "KV cache used", percent],
  ["tokenRate", "Output tokens/s", rate],
  ["promptRate", "Prompt tokens/s", rate],
  ["requestRate", "Finished/s", rate],
  ["ttft50", "TTFT, median", time],
  ["ttft99", "TTFT, p99", time],
  ["itl50", "ITL, median", time],
  ["itl99", "ITL, p99", time],
  ["acceptance", "Drafts accepted", percent],
  ["hits", "Prefix hits", percent],
  ["preempted", "Preemptions", whole],
  ["restarts", "Engine restarts", whole],
];
const CHARTS = [
  [
    "Tokens per second",
    rate,
    [
      ["tokenRate", "output"],
      ["promptRate", "prompt"],
    ],
  ],
  [
    "Sequences",
    rate,
    [
      ["running", "running"],
      ["waiting", "waiting"],
      ["batch", "tokens a step"],
    ],
  ],
  [
    "Time to first token",
    time,
    [
      ["ttft50", "p50"],
      ["ttft95", "p95"],
      ["ttft99", "p99"],
    ],
  ],
  [
    "Time between tokens",
    time,
    [
      ["itl50", "p50"],
      ["itl95", "p95"],
      ["itl99", "p99"],
    ],
  ],
  [
    "KV cache",
    percent,
    [
      ["kv", "used"],
      ["waste", "reserved and empty"],
    ],
  ],
  [
    "Shares",
    percent,
    [
      ["acceptance", "drafts accepted"],
      ["hits", "prompt found in the cache"],
    ],
  ],
];

const page = { readings: new Readings(), model: "", paused: false, state: null, busy: false, turn: 0 };

function tiles() {
  const made = TILES.map(([name, label]) => [name, el("b", {}, "–"), label]);
  byId("tiles").append(...made.map(([, value, label]) => el("li", {}, value, el("span", {}, label))));
  return new Map(made.map(([name, value]) => [name, value]));
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function health(kind, text) {
  byId("health").className = kind;
  byId("health").lastElementChild.textContent = text;
}

const patiently = (path) => ask(path, null, AbortSignal.timeout(PATIENCE));

/** What was before the page was opened; a server without it shows what comes. */
async function recall() {
  const at = performance.now() / 1000;
  const past = await (await patiently("dashboard/history")).json();
  for (const { ago, values } of past.moments) page.readings.add(ofModel(momentOf(past.series, values), page.model), at - ago);
}

async function read() {
  if (page.busy || page.paused || document.hidden) return;
  page.busy = true;
  const at = performance.now() / 1000;
  try {
    const text = await (await patiently("metrics")).text();
    const metrics = parse(text);
    const refused = await state();
    if (!page.readings.all.length) await recall();
    offer(metrics);
    const own = ofModel(metrics, page.model);
    page.readings.add(own, at);
    draw(own);
    notice(refused);
    if (page.turn++ % DIAGNOSE_EVERY === 0) verdict(await (await patiently("dashboard/diagnosis")).json());
    const up = (metrics.get("quire:engine_healthy") ?? []).every(({ value }) => value === 1);
    health(
      up ? (page.state?.draining ? "warn" : "good") : "bad",
      up ? (page.state?.draining ? "draining" : "serving") : "an engine is gone",
    );
  } catch (error) {
    page.readings.miss(at);
    if (error.status === 401) wantKey();
    else notice(`The server does not answer (${error.message}); it is asked again every second.`);
    health("bad", error.status === 401 ? "no key" : "no answer");
    byId("verdict").hidden = true; // what was said last may be true no more
    page.turn = 0;
  } finally {
    page.busy = false;
  }
}

/** What a key may see beside metrics; the reason where it may not. */
async function state() {
  try {
    page.state = await (await patiently("dashboard/state")).json();
    return "";
  } catch (error) {
    page.state = null;
    if (error.status !== 401) throw error;
    return getKey()
      ? "The server does not know this key: tenants and incidents are not shown."
      : "Tenants and incidents are shown to those who have a key.";
  }
}

function wantKey() {
  notice(getKey() ? "The server does not know this key." : "This server wants a key.");
  byId("key-box").open = true;
}

/** The models there are; one that is gone is not chosen any more. */
function offer(metrics) {
  const names = [
    ...new Set(
      ["vllm:num_requests_running", "quire:model_state"].flatMap((name) =>
        (metrics.get(name) ?? []).map(({ labels }) => labels.model_name),
      ),
    ),
  ].sort();
  const select = byId("model");
  if (names.join("\n") === page.names) return;
  page.names = names.join("\n");
  select.replaceChildren(
    el("option", { value: "" }, names.length > 1 ? "all" : (names[0] ?? "all")),
    ...(names.length > 1 ? names.map((name) => el("option", { value: name, selected: name === page.model }, name)) : []),
  );
  page.model = select.value;
}

function draw(metrics) {
  const seconds = Number(byId("window").value);
  const last = page.readings.last;
  const shown = {
    ...last,
    ...page.readings.percentiles(last, seconds),
    acceptance: page.readings.share("accepted", "drafted", seconds),
    hits: page.readings.share("found", "looked", seconds),
  };
  for (const [name, , show] of TILES) {
    const value = shown[name] ?? null;
    page.tiles.get(name).textContent = value === null ? "–" : show(value);
  }
  lines();
  const made = [models(metrics, page.state), tenants(page.state), incidents(page.state), replicas(metrics), ranks(metrics)].filter(Boolean);
  const rates = [...(page.state?.models ?? []), ...(page.state?.tenants ?? [])].map((one) => one.token_rates);
  const text = made.map((node) => node.textContent).join("\n") + JSON.stringify(rates);
  if (text === page.said) return; // a table that is scrolled or read stays as it is
  page.said = text;
  byId("tables").replaceChildren(...made);
}

function lines() {
  for (const chart of page.charts) chart.draw(page.readings.all, Number(byId("span").value));
}

function choose(model) {
  page.model = model;
  page.readings = new Readings();
  read();
}

function pause(on) {
  page.paused = on;
  byId("pause").setAttribute("aria-pressed", String(on));
  byId("pause").textContent = on ? "Go on" : "Pause";
  if (!on) read();
}

function start() {
  page.tiles = tiles();
  page.charts = CHARTS.map((facts) => new Lines(...facts));
  byId("charts").append(...page.charts.map((chart) => chart.root));
  byId("model").addEventListener("change", () => choose(byId("model").value));
  byId("span").addEventListener("change", lines);
  byId("pause").addEventListener("click", () => pause(!page.paused));
  byId("key").value = getKey();
  byId("key").addEventListener("change", () => {
    setKey(byId("key").value.trim());
    read();
  });
  document.addEventListener("visibilitychange", read);
  setInterval(read, EVERY);
  read();
}

start();
