"""`quire eval` on quire's own sets: figures of one model, or of two side by side."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from quire.cli.show import show, show_columns, show_next
from quire.core.progress import stage

if TYPE_CHECKING:
    from quire.bench.evaluating import SetScores
    from quire.core.config import EngineConfig

SHOWN = 60
"""Characters of an answer that is shown."""


def evaluate_sets(
    config: EngineConfig,
    beside: str | None,
    sets: Collection[str],
    limit: int,
    texts: Mapping[str, str] | None,
    chat: bool | None,
) -> dict[str, Any]:
    """Score the model, and `beside` with the same options; print what was found and return it for JSON."""
    from quire.bench.evaluating import differences, summary

    names = [config.model.model or "pydoc", *([beside] if beside is not None else [])]
    scores, facts = list[Any](), list[dict[str, Any]]()
    with stage("eval", len(names)) as at:
        for name in names:
            at.update(note=name)
            found, info = _scores(replace(config, model=replace(config.model, model=name)), sets, limit, texts, chat)
            scores.append(found)
            facts.append(info | summary(found))
            at.advance()
    for name, found, info in zip(names, scores, facts, strict=True):
        _print(name, found, info)
    if beside is None:
        _hint(names[0], facts[0])
        return facts[0]
    changes = differences(scores[0], scores[1])
    rows = [
        (
            each.name, f"{each.first:.4g}{each.unit}", f"{each.second:.4g}{each.unit}",
            f"{each.change:+.3g} +- {each.error:.2g}", "clear" if each.clear else "within the error",
        )
        for each in changes
    ]  # fmt: skip
    print()
    show_columns(("", names[0], names[1], "difference, standard error", ""), rows)
    _hint(names[0], facts[0])
    return facts[0] | {
        "beside": facts[1], "differences": [vars(each) | {"clear": each.clear} for each in changes]
    }  # fmt: skip


def _scores(
    config: EngineConfig, sets: Collection[str], limit: int, texts: Mapping[str, str] | None, chat: bool | None
) -> tuple[SetScores, dict[str, Any]]:
    from quire.bench.evaluating import measure_sets
    from quire.cli.generate import open_llm

    with open_llm(config) as llm:
        info = llm.info
        facts: dict[str, Any] = {
            "model": info.model, "dtype": info.dtype, "quantization": info.quantization,
            "kv_cache_dtype": info.kv_cache_dtype, "backend": info.backend, "weight_bytes": info.weight_bytes,
        }  # fmt: skip
        return measure_sets(llm, sets, limit, texts, chat), msgspec.to_builtins(facts)


def _print(name: str, scores: SetScores, facts: dict[str, Any]) -> None:
    how = "chat template" if scores.chat else "no chat template: questions come after three examples"
    rows = [
        ("served as", f"{facts['dtype']}, quantization {facts['quantization']}, KV cache {facts['kv_cache_dtype']}")
    ]
    if text := facts.get("text"):
        told = f"{text['bits_per_byte']:.4f} bits per byte, perplexity {text['perplexity']:.3f}"
        rows.append(("text", f"{told} ({text['tokens']:,} tokens, {text['pieces']} pieces)"))
        rows += [(f"  {domain}", f"{bits:.4f}") for domain, bits in text["bits_per_byte_by_text"].items()]
    for kind, label in (("choices", "questions with choices"), ("answers", "short answers")):
        if marks := facts.get(kind):
            share = f"{marks['percent']:.1f} % +- {marks['margin']:.1f}"
            rows.append((label, f"{marks['right']} of {marks['total']} right, {share}"))
            rows += [(f"  {subject}", f"{right} of {of}") for subject, (right, of) in marks["by_subject"].items()]
    if "answers" in facts:
        rows.append(("asked", how))
    show(name, rows)


def _hint(name: str, facts: dict[str, Any]) -> None:
    if "choices" in facts:
        print(
            "guessing gives 25 % of the choices; +- is the 95 % interval of a small set: what differs by less is alike"
        )
    model = shlex.quote(name)
    show_next(
        (f"quire eval {model} --beside OTHER", "the same of another model, with the differences"),
        (f"quire compress {model} OUT --quantize gptq --set bits=4", "make it smaller, and measure what that costs"),
        (f"quire serve {model}", "serve it"),
    )
