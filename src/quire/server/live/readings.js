// What the server says at one moment, and what follows from two of them: rates, shares and percentiles.

import { histogram, largest, quantile, total } from "./metrics.js";

const KEPT = 1000; // readings: a quarter of an hour
const AROUND = 10; // seconds over which a chart takes percentiles and shares: single requests would leave gaps

const HISTOGRAMS = {
  ttft: "vllm:time_to_first_token_seconds",
  itl: "vllm:inter_token_latency_seconds",
  queue: "vllm:request_queue_time_seconds",
};
const TOTALS = {
  tokens: "vllm:generation_tokens_total",
  prompts: "vllm:prompt_tokens_total",
  done: "vllm:request_success_total",
  drafted: "vllm:spec_decode_num_draft_tokens_total",
  accepted: "vllm:spec_decode_num_accepted_tokens_total",
  looked: "vllm:prefix_cache_queries_total",
  found: "vllm:prefix_cache_hits_total",
  preempted: "vllm:num_preemptions_total",
  restarts: "quire:engine_restarts_total",
  steps: "quire:engine_steps_total",
};
const QUANTILES = [50, 95, 99];

/** Samples of one model, "" for all; those that are of no model stay. */
export function ofModel(metrics, model) {
  if (!model) return metrics;
  const found = new Map();
  for (const [name, samples] of metrics)
    found.set(
      name,
      samples.filter(({ labels }) => (labels.model_name ?? model) === model),
    );
  return found;
}

/** Metrics of a moment of /dashboard/history, as `parse` gives those of now. */
export function momentOf(series, values) {
  const found = new Map();
  series.forEach(({ name, labels }, i) => {
    if (typeof values[i] !== "number") return;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: values[i] });
  });
  return found;
}

export class Readings {
  constructor() {
    this.all = [];
  }

  get last() {
    return this.all.at(-1) ?? null;
  }

  /** Keep what was read at `at` seconds; a server that was started again counts from 0, and nothing is taken across that. */
  add(metrics, at) {
    // Gauges are of the last step: where clients left and none followed, they still count these.
    const idle = total(metrics, "quire:requests_in_flight") === 0;
    const reading = {
      at,
      born: total(metrics, "process_start_time_seconds"),
      running: idle ? 0 : total(metrics, "vllm:num_requests_running"),
      waiting: idle ? 0 : total(metrics, "vllm:num_requests_waiting"),
      kv: largest(metrics, "vllm:kv_cache_usage_perc"),
      waste: largest(metrics, "quire:kv_waste_ratio"),
    };
    for (const [name, metric] of Object.entries(TOTALS)) reading[name] = total(metrics, metric);
    for (const [name, metric] of Object.entries(HISTOGRAMS)) reading[name] = histogram(metrics, metric);
    const before = this.last;
    reading.since = before && before.born === reading.born && reading.tokens >= before.tokens ? before.since : at;
    this.all = [...this.all, reading].slice(-KEPT);
    Object.assign(reading, this.rates(before, reading), this.percentiles(reading, AROUND));
    return reading;
  }

  /** A hole in the charts: nobody answered. */
  miss(at) {
    if (this.last) this.all = [...this.all, { at, since: at, missing: true }].slice(-KEPT);
  }

  rates(before, now) {
    const seconds = before && !before.missing && now.since <= before.at ? now.at - before.at : 0;
    const per = (name) => (seconds > 0 ? (now[name] - before[name]) / seconds : null);
    return {
      tokenRate: per("tokens"),
      promptRate: per("prompts"),
      requestRate: per("done"),
      batch: seconds > 0 && now.steps > before.steps ? (now.tokens - before.tokens) / (now.steps - before.steps) : null,
      acceptance: this.share("accepted", "drafted", AROUND),
      hits: this.share("found", "looked", AROUND),
    };
  }

  /** Of the last `seconds`: ttft50, itl99 and so on, in seconds; null where nothing came. */
  percentiles(now, seconds) {
    const old = this.before(now, seconds);
    const found = {};
    for (const name of Object.keys(HISTOGRAMS)) {
      for (const percent of QUANTILES) found[name + percent] = old ? quantile(old[name], now[name], percent / 100) : null;
    }
    return found;
  }

  /** A share of totals over the last `seconds`. */
  share(part, whole, seconds) {
    const now = this.last;
    const old = now && !now.missing ? this.before(now, seconds) : null;
    return old && now[whole] > old[whole] ? (now[part] - old[part]) / (now[whole] - old[whole]) : null;
  }

  /** The reading from which the last `seconds` count: the oldest within them, of this life of the server. */
  before(now, seconds) {
    return this.all.find((each) => !each.missing && each.at >= now.since && each.at >= now.at - seconds && each !== now) ?? null;
  }
}
