// Metrics that follow from others of the same row.

const BITS = [
  [/^(float32|f32|fp32)$/i, 32],
  [/^(bfloat16|bf16|float16|f16|fp16|half)$/i, 16],
  [/^(int8|fp8|q8_0|w8a8|float8\w*)$/i, 8],
  [/^(int4|nf4|mxfp4|nvfp4|fp4|gptq|awq|q4_\w+|iq4_\w+)$/i, 4],
  [/^(q6_k)$/i, 6.5],
  [/^(q5_\w+)$/i, 5.5],
  [/^(q3_\w+|iq3_\w+)$/i, 3.4],
  [/^(q2_\w+|iq2_\w+)$/i, 2.6],
];

/** Bytes of a model's weights: measured, or from parameters and format; null where neither is known. */
function weightBytes(row) {
  if (row.metrics.weight_bytes > 0) return row.metrics.weight_bytes;
  const bits = BITS.find(([name]) => name.test(row.model.format))?.[1];
  return bits && row.model.parameters ? (row.model.parameters * bits) / 8 : null;
}

/** Where a row lies under the roof: [{intensity, rate, phase, estimated}].
 *
 * As it says itself, or estimated as Pope et al. 2023 do, from weights alone: a token takes two operations for each
 * parameter, a step reads all weights once. Attention and the table of tokens are left out, and so are mixtures, of
 * which a step reads what it chooses.
 */
export function underRoof(row) {
  const { flops_per_s: rate, flops_per_byte: intensity, bytes_per_s: bytes } = row.metrics;
  if (rate > 0 && (intensity > 0 || bytes > 0))
    return [{ intensity: intensity ?? rate / bytes, rate, phase: row.benchmark, estimated: false }];
  const weights = weightBytes(row);
  const each = 2 * row.model.parameters;
  if (!weights || !each) return [];
  const found = [];
  const { batch } = row.load; // 0: how many shared a step is not known
  if (!batch) return [];
  const decode = row.metrics.decode_tokens_per_s ?? (row.metrics.tpot_ms_p50 > 0 ? (1000 * batch) / row.metrics.tpot_ms_p50 : 0);
  if (decode > 0) found.push({ intensity: (each * batch) / weights, rate: each * decode, phase: "decode", estimated: true });
  const prefill = row.metrics.prefill_tokens_per_s;
  const tokens = Math.max(1, row.load.input_len) * batch;
  if (prefill > 0) found.push({ intensity: (each * tokens) / weights, rate: each * prefill, phase: "prefill", estimated: true });
  return found;
}

/** Dollars for a million output tokens at the load of the row, at a price for each device and hour. */
export function costOf(row, price) {
  const rate = row.metrics.output_tokens_per_s;
  if (price > 0 && rate > 0) return (1e6 * price * row.machine.devices) / 3600 / rate;
  return row.metrics.cost_per_million_tokens ?? null;
}

/** [row, better] for each: whether a row is better in everything asked for than no other is (Pareto's frontier).
 *
 * `goals`: [value of a row, 1 or -1 as larger or smaller is better].
 */
export function frontier(rows, goals) {
  const points = rows.map((row) => goals.map(([value, sign]) => sign * value(row)));
  const order = points.map((_, i) => i).sort((a, b) => points[b][0] - points[a][0]);
  const best = [];
  const on = new Array(rows.length).fill(false);
  for (const i of order) {
    const beaten = best.some(
      (j) => points[j].every((value, k) => value >= points[i][k]) && points[j].some((value, k) => value > points[i][k]),
    );
    if (beaten) continue;
    on[i] = true;
    best.push(i);
  }
  // Of equals in the first goal, one that came early may be beaten by one that came late.
  for (const i of best) {
    if (
      best.some(
        (j) => j !== i && points[j].every((value, k) => value >= points[i][k]) && points[j].some((value, k) => value > points[i][k]),
      )
    )
      on[i] = false;
  }
  return on;
}
