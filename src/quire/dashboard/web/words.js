// How names and numbers are said.

const PREFIXES = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
];
const LATENCY = /^(.+)_ms_(mean|p\d+)$/;
const SAID = { ttft: "TTFT", tpot: "TPOT", itl: "ITL", e2e: "E2E", kv: "KV", p: "p", kl: "KL" };

/** A metric or field as a label: "ttft_ms_p50" is "TTFT p50", "model.format" stays. */
export function said(name) {
  if (name.includes(".")) return name;
  const [, what, part] = LATENCY.exec(name) ?? [null, name, ""];
  const words = what
    .replace(/_per_s$/, " per s")
    .replaceAll("_", " ")
    .split(" ")
    .map((word) => SAID[word] ?? word);
  return `${words.join(" ")} ${part}`.trim();
}

/** Four digits, with a prefix for large ones. */
export function shown(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const [scale, prefix] = PREFIXES.find(([least]) => size >= least) ?? [1, ""];
  const scaled = value / scale;
  const text =
    size !== 0 && size < 1e-3
      ? scaled.toExponential(2)
      : Number(scaled.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: Math.abs(scaled) >= 1e4 ? 7 : 4 });
  return `${text}${prefix || unit ? " " : ""}${prefix}${unit}`.trim();
}

/** What a cell says: numbers as numbers are said, switches as on and off. */
export const word = (value) =>
  typeof value === "number" ? shown(value) : value === true ? "on" : value === false ? "off" : String(value ?? "");

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
