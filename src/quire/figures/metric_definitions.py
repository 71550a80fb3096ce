"""What the names of metrics mean: unit, which way is better, and the formula, in the dialect that quire speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", "neither"]


@dataclass(frozen=True)
class Metric:
    """`unit` as shown, `better`, and how it is computed."""

    unit: str
    better: Better
    definition: str


PERCENTILES = ("mean", "p50", "p90", "p95", "p99")
_LATENCIES = {
    "ttft": "first chunk - send",
    "tpot": "(e2e - ttft) / (output tokens - 1), one value per request",
    "tpot_guidellm": "e2e / output tokens, a request counted once for each token: includes the time to the first token",
    "itl": "gaps between consecutive chunks, pooled over all requests",
    "itl_guidellm": "tpot, a request counted once for each token but the first",
    "e2e": "last chunk - send",
    "ttft_due": "first chunk - when the request was due",
    "e2e_due": "last chunk - when the request was due",
    "queue": "admission - receipt, by the server's clock",
    "prefill": "first token - admission, by the server's clock",
    "decode": "last token - first token, by the server's clock",
    "network": "what of ttft the server did not see: ways there and back, and the client",
    "client": "send - when the client was free to send: the request due, and within the bound of concurrency",
}

METRICS: dict[str, Metric] = {
    **{
        f"{name}_ms_{part}": Metric("ms", "lower", f"{part} of: {definition}")
        for name, definition in _LATENCIES.items()
        for part in PERCENTILES
    },
    "output_tokens_per_s": Metric("tokens/s", "higher", "output tokens / duration"),
    "total_tokens_per_s": Metric("tokens/s", "higher", "(input + output tokens) / duration"),
    "prefill_tokens_per_s": Metric("tokens/s", "higher", "input tokens / ttft of requests that start together"),
    "decode_tokens_per_s": Metric("tokens/s", "higher", "tokens of steps that decode only / their time"),
    "requests_per_s": Metric("1/s", "higher", "answered requests / duration"),
    "goodput_per_s": Metric("1/s", "higher", "requests that met every target / duration"),
    "attainment": Metric("", "higher", "requests that met every target / requests"),
    "duration_s": Metric("s", "lower", "first send to last chunk"),
    "cpu_s": Metric("s", "lower", "processor time of the engine's processes during the load, user and system"),
    "load_s": Metric("s", "lower", "start of the process to readiness"),
    "failed": Metric("", "lower", "requests that ended with an error"),
    "weight_bytes": Metric("B", "lower", "weights in memory, of one rank"),
    "kv_bytes": Metric("B", "neither", "KV cache, of one rank"),
    "activation_bytes": Metric("B", "lower", "buffers of the largest step, of one rank"),
    "peak_bytes": Metric("B", "lower", "largest resident memory of the processes"),
    "kv_waste": Metric("", "lower", "share of reserved KV slots that hold no token, mean over steps"),
    "kv_used": Metric("", "neither", "share of KV blocks that have an owner, mean over time"),
    "batch_rows": Metric("", "neither", "rows of a step, mean"),
    "steps": Metric("", "neither", "steps of all replicas"),
    "busy_share": Metric("", "neither", "time in steps / time of all replicas"),
    "replica_seconds": Metric("s", "lower", "time of replicas that started or served, added up"),
    "preemptions": Metric("", "lower", "times that a sequence lost its place in the batch"),
    "deaths": Metric("", "lower", "replicas that were lost"),
    "refused": Metric("", "lower", "requests that found a full queue (429)"),
    "prefix_hit_share": Metric("", "higher", "prompt tokens found in the prefix cache / prompt tokens"),
    "acceptance": Metric("", "higher", "drafted tokens that were accepted / drafted"),
    "tokens_per_step": Metric("", "higher", "tokens of a step that verifies a draft: 1 + accepted tokens / drafts"),
    "perplexity": Metric("", "lower", "exp of the mean negative log-likelihood of a token"),
    "kl": Metric("nat", "lower", "mean KL divergence of next-token distributions from the unchanged model's"),
    "joules_per_token": Metric("J", "lower", "energy of the package or device / output tokens"),
    "watts": Metric("W", "lower", "mean power of the package or device"),
    "cost_per_million_tokens": Metric("$", "lower", "price of the devices' time / output tokens at the offered load"),
    "cost_per_request": Metric("$", "lower", "price of the devices' time / requests at the offered load"),
    "critical_batch": Metric("", "neither", "time of a step of one row / time of a row in a step of 256"),
    "sequences": Metric("", "higher", "sequences of the load's length that the KV cache holds"),
    "flops_per_s": Metric("FLOP/s", "higher", "multiplications and additions of weights and attention / time"),
    "bytes_per_s": Metric("B/s", "higher", "weights, keys, values and recurrent states moved / time"),
    "flops_per_byte": Metric("FLOP/B", "neither", "arithmetic intensity of a step"),
}

LIMITS: dict[str, Metric] = {
    "read_bytes_per_s": Metric("B/s", "higher", "best rate of plain reading loops over memory"),
    "bf16_flops_per_s": Metric("FLOP/s", "higher", "best rate of bf16 products of operands in cache"),
    "int8_ops_per_s": Metric("op/s", "higher", "best rate of int8 products of operands in cache"),
    "link_bytes_per_s": Metric("B/s", "higher", "between two ranks, one way"),
}
"""What a machine can do at most: `Machine.limits`."""
