"""What one load found, as metrics: by the names and formulas of `quire.figures.metric_definitions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.records import Record, milliseconds
from quire.bench.suite.suite_file import LoadCase
from quire.bench.suite.suite_models import SuiteModel
from quire.figures.metric_definitions import PERCENTILES
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.spec import ModelSpec
from quire.plan.rates import F32_BYTES, STATE_FLOPS


def records_of(found: dict[str, Any], inputs: list[int]) -> list[Record]:
    """The requests that were answered, with the lengths of their prompts."""
    records = []
    for (due, sent, times, tokens), length in zip(found["records"], inputs, strict=True):
        if times:
            records.append(Record(due, sent, times, length, sum(tokens)))
    return records


def metrics_of(found: dict[str, Any], inputs: list[int], load: LoadCase) -> dict[str, float]:
    """Metrics of what an engine answered to `load`; empty where it answered no request."""
    records, seconds = records_of(found, inputs), float(found["seconds"])
    metrics = {"failed": float(len(inputs) - len(records))}
    if not records:
        return metrics
    timed = [r for r in records if r.tpot is not None]
    parts = {
        "ttft": [r.ttft for r in records],
        "e2e": [r.e2e for r in records],
        "tpot": [r.tpot for r in timed if r.tpot is not None],
        "tpot_guidellm": [r.e2e / r.output_tokens for r in records],
        "itl": [gap for r in records for gap in r.gaps],
    }
    if load.pattern.numbers or load.pattern.kind == "closed":
        parts |= {"ttft_due": [r.ttft + r.late for r in records], "e2e_due": [r.e2e + r.late for r in records]}
    for name, values in parts.items():
        if (spread := milliseconds(values)) is not None:
            metrics |= {f"{name}_ms_{part}": spread[part] for part in PERCENTILES}
    read, written = sum(r.input_tokens for r in records), sum(r.output_tokens for r in records)
    metrics |= {
        "duration_s": seconds,
        "requests_per_s": len(records) / seconds,
        "output_tokens_per_s": written / seconds,
        "total_tokens_per_s": (read + written) / seconds,
    }
    if load.arrivals == "at-once" and load.requests <= load.batch:
        metrics["prefill_tokens_per_s"] = read / max(r.chunks[0] for r in records)
    tokens, decoding = found["decode"]
    if decoding:
        metrics["decode_tokens_per_s"] = tokens / decoding
    return metrics | {name: float(value) for name, value in found.get("extra", {}).items()}


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a step of quire moves: of `weights`; of a sequence's recurrent `states`; and of `layers`, for each
    that keeps tokens, bytes of one and how many tokens back it is read, 0 = all."""

    weights: float
    states: float
    layers: Sequence[tuple[int, int]]

    @staticmethod
    def told(weights: float, facts: Mapping[str, Any]) -> StepTraffic:
        """Read a worker's facts; one of an older checkout has no layers that keep less than all tokens."""
        kept = facts.get("layers", [(facts["kv_bytes_per_token"], 0)])
        return StepTraffic(weights, facts.get("state_bytes", 0), kept)

    def of_sequence(self, context: float) -> float:
        """Bytes of one sequence of `context` tokens: what its layers keep is read, its states are read and written."""
        kept = sum(each * min(context, window or context) for each, window in self.layers)
        return kept + 2 * self.states


def mixer_flops(spec: ModelSpec, context: float) -> float:
    """Multiplications and additions with which one more token reads `context` tokens, or the state of them."""
    flops = 0.0
    for layer in range(spec.layers):
        mixer, window = mixer_of(spec, layer), spec.windows[layer]
        heads, _, numbers = mixer.read
        flops += 4 * heads * numbers * min(context, window or context)
        if mixer.state is not None:
            flops += STATE_FLOPS * mixer.state.nbytes / F32_BYTES
    return flops


def roofline(metrics: dict[str, float], load: LoadCase, source: SuiteModel, told: StepTraffic) -> dict[str, float]:
    """Roofline of steps that decode `load.batch` sequences of the load's mean length: what they multiply and move a
    second. Nothing where steps are not all alike: requests wait, or drafts are verified."""
    rate = metrics.get("decode_tokens_per_s")
    if not rate or source.facts is None or load.requests > load.batch or "acceptance" in metrics:
        return {}
    spec = source.facts.spec
    context = load.shared_prefix + (load.inputs.low + load.inputs.high) / 2 + (load.outputs.low + load.outputs.high) / 4
    table = 0 if spec.tied_head else spec.vocab_size * spec.hidden
    table += spec.inputs.vocab_size * spec.inputs.width * spec.layers
    flops = 2 * (source.facts.active_parameters - table) + mixer_flops(spec, context)
    moved = told.weights / load.batch + told.of_sequence(context)
    return {"flops_per_s": flops * rate, "bytes_per_s": moved * rate, "flops_per_byte": flops / moved}
