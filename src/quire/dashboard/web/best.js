// The best configurations for given targets, ranked; where none meets them, those that miss by least.

import { amount, select } from "./controls.js";
import { costOf } from "./derive.js";
import { el } from "./dom.js";
import { describe, differing } from "./rows.js";
import { sortable } from "./table.js";
import { plural, shown } from "./words.js";

const TARGETS = [
  ["ttft", "TTFT, at most (ms)", (part) => `ttft_ms_${part}`],
  ["itl", "ITL, at most (ms)", (part) => `itl_ms_${part}`],
  ["tpot", "TPOT, at most (ms)", (part) => `tpot_ms_${part}`],
  ["e2e", "E2E, at most (ms)", (part) => `e2e_ms_${part}`],
  ["throughput", "Output tokens/s, at least", () => "output_tokens_per_s"],
  ["perplexity", "Perplexity, at most", () => "perplexity"],
];
const GOALS = [
  ["output_tokens_per_s", "most output tokens/s"],
  ["requests_per_s", "most requests/s"],
  ["cost", "least cost per million tokens"],
  ["ttft", "least TTFT"],
  ["tpot", "least TPOT"],
  ["e2e", "least E2E"],
  ["joules_per_token", "least energy per token"],
  ["peak_bytes", "least memory"],
];
const HIGHER = new Set(["output_tokens_per_s", "requests_per_s"]);
const MISSES = 10;

export const best = {
  name: "best",
  title: "Best for targets",

  controls({ state }) {
    return [
      ...TARGETS.map(([name, label]) => amount(state, `t.${name}`, label)),
      select(
        state,
        "part",
        "Latencies are",
        ["mean", "p50", "p90", "p95", "p99"].map((part) => [part, part]),
        "p50",
      ),
      select(state, "goal", "Then", GOALS, "output_tokens_per_s"),
      amount(state, "price", "Price of a device ($/h)", "for cost"),
    ];
  },

  draw({ store, state, details }, rows) {
    const part = state.get("part", "p50");
    const goal = state.get("goal", "output_tokens_per_s");
    const targets = TARGETS.filter(([name]) => Number(state.get(`t.${name}`)) > 0).map(([name, , metric]) => ({
      metric: metric(part),
      bound: Number(state.get(`t.${name}`)),
      least: name === "throughput",
    }));
    const worth = (row) =>
      (goal === "cost"
        ? costOf(row, Number(state.get("price")))
        : row.metrics[["ttft", "tpot", "e2e"].includes(goal) ? `${goal}_ms_${part}` : goal]) ?? null;
    const silent = [];
    const known = rows.filter((row) => {
      const lacks = worth(row) === null || targets.some(({ metric }) => !(metric in row.metrics));
      if (lacks) silent.push(row);
      return !lacks;
    });
    const order = (a, b) => (HIGHER.has(goal) ? -1 : 1) * (worth(a) - worth(b));
    const meeting = known.filter((row) => miss(row, targets) <= 1).sort(order);
    const label = GOALS.find(([name]) => name === goal)[1];
    const unsaid = silent.length ? ` ${plural(silent.length, "row")} do not say what is asked for.` : "";
    const list = meeting.length ? meeting : [...known].sort((a, b) => miss(a, targets) - miss(b, targets)).slice(0, MISSES);
    const said = meeting.length
      ? `${plural(meeting.length, "row")} of ${known.length.toLocaleString("en")} meet ${targets.length ? "the targets" : "all targets: there are none"}; ranked by ${label}.`
      : known.length
        ? "None meets the targets. Those that miss them by least:"
        : "No row says what is asked for.";
    return [
      el("p", { role: "status", class: meeting.length ? "answer" : "note" }, said + unsaid),
      ranked(list, { store, targets, worth, goal, label, details }),
    ];
  },
};

/** By how much the worst target is missed: 1 or less where all are met. */
function miss(row, targets) {
  return Math.max(0, ...targets.map(({ metric, bound, least }) => (least ? bound / row.metrics[metric] : row.metrics[metric] / bound)));
}

function ranked(list, { store, targets, worth, goal, label, details }) {
  const names = differing(list, store);
  const places = new Map(list.map((row, i) => [row, i + 1]));
  const metrics = [...new Set([...targets.map(({ metric }) => metric), "output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50"])].filter(
    (name) => name !== goal && list.some((row) => name in row.metrics),
  );
  const columns = [
    { title: "Configuration", value: (row) => places.get(row), show: (row) => `${places.get(row)}. ${describe(row, names)}` },
    { title: label, numeric: true, value: worth, show: (row) => shown(worth(row)) },
    ...metrics.map((name) => ({
      title: store.label(name),
      numeric: true,
      value: (row) => row.metrics[name],
      show: (row) => shown(row.metrics[name]),
    })),
    ...(targets.length
      ? [
          {
            title: "of the tightest target",
            numeric: true,
            value: (row) => miss(row, targets),
            show: (row) => `${shown(100 * miss(row, targets))} %`,
          },
        ]
      : []),
    { title: "Kind", value: (row) => row.kind, show: (row) => row.kind },
  ];
  return list.length ? sortable("Configurations, best first", columns, list, (row) => details.open(row)) : null;
}
