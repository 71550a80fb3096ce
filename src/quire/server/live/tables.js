// What is better said in lines: models, replicas, ranks, tenants, and what went wrong.

import { el } from "./dom.js";
import { spark } from "./spark.js";

const count = (value) => Number(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const bytes = (value) => `${(value / 1e9).toFixed(2)} GB`;

/** A table; null where there is nothing to say. */
function table(title, heads, lines, note = null, kind = null) {
  if (!lines.length) return null;
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  const body = lines.map((cells) => el("tr", {}, ...cells.map((cell, i) => el(i ? "td" : "th", { scope: i ? null : "row" }, cell))));
  return el(
    "section",
    { class: kind },
    el("h2", {}, title),
    note && el("p", { class: "soft" }, note),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)),
    ),
  );
}

/** Samples of metrics as lines: [labels, {metric: value}] by the values of `names`. */
function lines(metrics, names, wanted) {
  const found = new Map();
  for (const [short, metric] of Object.entries(wanted)) {
    for (const { labels, value } of metrics.get(metric) ?? []) {
      const key = names.map((name) => labels[name] ?? "").join("\n");
      if (!found.has(key)) found.set(key, [labels, {}]);
      found.get(key)[1][short] = value;
    }
  }
  return [...found.values()];
}

/** What a gauge says of a model; null: nothing. */
const value = (metrics, metric, name) => (metrics.get(metric) ?? []).find(({ labels }) => labels.model_name === name)?.value ?? null;

export function models(metrics, state) {
  const known = new Map((state?.models ?? []).map((model) => [model.name, model]));
  const states = (metrics.get("quire:model_state") ?? []).filter(({ value }) => value === 1);
  const names = states.length
    ? states.map(({ labels }) => [labels.model_name, labels.state])
    : [...known.keys()].map((name) => [name, "loaded"]);
  const needed = new Map(
    (metrics.get("quire:model_needed_bytes") ?? metrics.get("quire:model_weight_bytes") ?? []).map(({ labels, value }) => [
      labels.model_name,
      value,
    ]),
  );
  const idle = (name) => value(metrics, "quire:requests_in_flight", name) === 0; // gauges are of the last step
  const now = (metric, name, show) => {
    const found = idle(name) ? 0 : value(metrics, metric, name);
    return known.has(name) && found !== null ? show(found) : "–";
  };
  return table(
    "Models",
    ["Model", "State", "Output, 15 min", "Running", "Waiting", "KV used", "Memory", "Weights", "KV cache", "Context", "Runs on"],
    names.map(([name, said]) => {
      const model = known.get(name);
      return [
        name,
        said,
        model ? spark(model.token_rates, name) : "–",
        now("vllm:num_requests_running", name, count),
        now("vllm:num_requests_waiting", name, count),
        now("vllm:kv_cache_usage_perc", name, percent),
        needed.has(name) ? bytes(needed.get(name)) : "–",
        model?.quantization ?? "–",
        model ? `${model.kv_cache_dtype}, ${count(model.num_blocks)} × ${model.block_size}` : "–",
        model ? count(model.max_model_len) : "–",
        model ? `${model.backend} ${model.isa}, ${model.threads} threads` : "–",
      ];
    }),
    null,
    "wide",
  );
}

export function replicas(metrics) {
  const wanted = {
    up: "quire:replica_up",
    running: "quire:replica_running",
    waiting: "quire:replica_waiting",
    kv: "quire:replica_kv_usage",
    tokens: "quire:replica_generation_tokens_total",
    restarts: "quire:replica_restarts_total",
  };
  return table(
    "Replicas",
    ["Replica", "State", "Running", "Waiting", "KV used", "Tokens", "Restarts"],
    lines(metrics, ["model_name", "replica"], wanted).map(([labels, one]) => [
      `${labels.model_name} ${labels.replica}`,
      one.up ? "up" : "down",
      count(one.running),
      count(one.waiting),
      percent(one.kv),
      count(one.tokens),
      count(one.restarts),
    ]),
  );
}

export function ranks(metrics) {
  const found = lines(metrics, ["model_name", "rank"], { bubble: "quire:pipeline_bubble_ratio", pairs: "quire:expert_pairs_total" });
  return table(
    "Ranks",
    ["Rank", "Waited for others", "Pairs of token and expert"],
    found.map(([labels, one]) => [
      `${labels.model_name} ${labels.rank}`,
      one.bubble === undefined ? "–" : percent(one.bubble),
      one.pairs === undefined ? "–" : count(one.pairs),
    ]),
    "Shares are of the time of steps since the start.",
  );
}

export function tenants(state) {
  const note = state?.whole === false ? "Your key shows its own tenant alone." : null;
  return table(
    "Tenants",
    ["Tenant", "Tokens, 15 min", "In flight", "Requests", "Refused", "Failed", "Prompt tokens", "Output tokens"],
    (state?.tenants ?? []).map((one) => [
      one.name || "everybody",
      spark(one.token_rates, one.name || "everybody"),
      ...[one.in_flight, one.requests, one.refused, one.failed, one.prompt_tokens, one.output_tokens].map(count),
    ]),
    note,
  );
}

export function incidents(state) {
  if (!state) return null;
  const time = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
  const found = table(
    "Last incidents",
    ["When", "What", "Message"],
    state.incidents.map((one) => [
      time(one.last),
      el("span", { class: `level ${one.level}` }, one.level),
      one.count > 1 ? `${one.message} (${count(one.count)} times since ${time(one.first)})` : one.message,
    ]),
  );
  return found ?? el("section", {}, el("h2", {}, "Last incidents"), el("p", { class: "soft" }, "None since the server was started."));
}
