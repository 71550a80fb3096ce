"""Ways to serve requests that must not change a bit of any answer: bounds of steps, drafts, scarce caches."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from attention_variants import GATED_DENSE
from engine_answers import Answer, engine_of, run
from gemma_variants import GEMMAS
from model_variants import MIXTURES
from mtp_models import WITH_MTP
from oracle import write
from paged_model import VARIANTS
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from speculation_methods import TINY, answers, requests_of, write_words
from turns import reports


def asked(name: str, prompt: list[int], **params: Any) -> Request:
    return Request(
        id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=9, logprobs=2, **params), seed=1, arrival=0.0
    )


def differing(got: dict[str, list[Answer]], want: dict[str, list[Answer]]) -> list[tuple[str, int]]:
    return [
        (name, i)
        for name, rows in want.items()
        for i, (one, other) in enumerate(zip(rows, got[name], strict=True))
        if one.bits() != other.bits() or one.reason != other.reason
    ]


WAYS: dict[str, st.SearchStrategy[Any]] = {
    "max_num_batched_tokens": st.sampled_from((1, 2, 3, 7, 16, 64, 512)),
    "max_num_seqs": st.sampled_from((1, 3, 8)),
    "block_size": st.sampled_from((1, 2, 4, 16)),
    "enforce_eager": st.booleans(),
    "threads": st.sampled_from((1, 2)),
    "scarce": st.booleans(),
    "drafts": st.sampled_from((0, 1, 2, 3, 5, 8)),
}
"""How a request may be served: `scarce` cache, drafts of so many tokens."""


STATE_WAYS = WAYS | {
    "method": st.sampled_from(("ngram", "suffix")),
    "max_num_batched_tokens": st.sampled_from((2, 3, 7, 16, 64, 512)),
    "num_state_slots": st.sampled_from((0, 3, 9, 40)),
    "state_interval": st.sampled_from((0, 1, 8, 32)),
}
"""How a request may be served where layers have a recurrent state, with few slots and snapshots of it or many."""
WHOLE_GROUPS = {"hidden_size_per_layer_input": 32}
"""Columns that can be rounded to 4 bits, as drafts of the model itself are."""
MORE = {
    "delta rule beside experts": MIXTURES["qwen3_next"],
    "delta rule beside stacked experts": MIXTURES["qwen3_5_moe"],
    "scans beside an MLP": VARIANTS["granite4_dense"],
    "scans with limits": VARIANTS["bamba"],
    "gated latents": MIXTURES["bailing_hybrid"],
    "fixed decays": MIXTURES["minimax"],
    "channels alone": VARIANTS["mamba"],
    "channels with norms": VARIANTS["falcon_mamba"],
    "several streams": (GEMMAS["gemma3n"][0], GEMMAS["gemma3n"][1] | WHOLE_GROUPS | {"laurel_rank": 32}),
    "stacks in turns": ("hrm_text", GATED_DENSE["hrm_text"][1] | {"intermediate_size": 96}),
    "windows of latents": WITH_MTP["dots3_note"],
    "layers of two sizes": (GEMMAS["gemma4_small"][0], GEMMAS["gemma4_small"][1] | WHOLE_GROUPS),
}
"""Further models, most with a recurrent state, beside those of `TINY`."""


@cache
def tables(folder: Path) -> int:
    """Block tables of a sequence, at least three: each takes blocks of its own."""
    return max(3, len(engine_of(model=str(folder)).engine.kv.groups.windows))


def compared(folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int) -> LocalEngine:
    """Serve some of the requests in `way`; none differs from what it gives alone."""
    options = dict(way)
    scarce, drafts, method = options.pop("scarce"), options.pop("drafts"), options.pop("method")
    options["max_num_seqs"] = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    options["num_blocks"] = (87 * tables(folder) if scarce else 4096) // options["block_size"] + 24
    if drafts:
        spec: dict[str, Any] = {"method": method, "num_speculative_tokens": drafts, "adaptive": False}
        spec |= {"quantization": "int4"} if method == "self" else {"prompt_lookup_min": 1}
        options["speculative_config"] = json.dumps(spec)
    engine = engine_of(model=str(folder), **options)
    some = random.Random(seed).sample(requests_of(99, ""), 7)
    assert not differing(answers(engine, some), {r.id: alone[r.id] for r in some}), way
    return engine


def written(path: Path, kind: str) -> Path:
    """Write a tiny model of `TINY` or `MORE` in bf16, with a tokenizer of 99 words, to `path`."""
    family, facts = (TINY | MORE)[kind]
    write(path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    return write_words(path, 99)


def answers_alone(folder: Path) -> dict[str, list[Answer]]:
    """What each request gives alone, without a prefix cache."""
    engine = engine_of(model=str(folder), enable_prefix_caching=False)
    return {r.id: answers(engine, [r])[r.id] for r in requests_of(99, "")}


def check_hits(folder: Path, block_size: int, **options: Any) -> None:
    """Requests that share their first blocks find all that they share, and give what they give alone."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 99) for _ in range(40)]
    requests = [asked("cold", prompt)]
    for shared in range(0, 41, block_size):
        own = [rng.randrange(3, 99) for _ in range(rng.choice((1, 3, 6)))]
        requests.append(asked(str(shared), prompt[:shared] + own, temperature=0.5 * (shared % 2)))
    plain = engine_of(model=str(folder), enable_prefix_caching=False)
    warm = engine_of(model=str(folder), block_size=block_size, num_blocks=4096, **options)
    for request in requests:
        want = run(plain, [request])[request.id]
        warm.submit(request)
        got, cached = Answer([], []), -1
        for report in reports(warm):
            for out in report.outputs:
                got.tokens += out.tokens
                got.logprobs += out.logprobs
                cached = max(cached, out.cached_tokens)
        assert got.bits() == want.bits(), request.id
        if request.id != "cold":
            assert cached >= int(request.id) // block_size * block_size, request.id
    again = run(warm, [asked("again", prompt)])["again"]
    assert again.bits() == run(plain, [asked("again", prompt)])["again"].bits(), "all of the prompt is found"


def check_ways_back(folder: Path, alone: dict[str, list[Answer]]) -> None:
    """Sequences that give everything back whenever they have computed something, as far as they then come, give what
    they give alone."""
    requests = [r for r in requests_of(99, "") if r.params.n == 1][:6]
    engine = engine_of(model=str(folder), block_size=4, num_blocks=1024, max_num_batched_tokens=16, max_num_seqs=8)
    for request in requests:
        engine.submit(request)
    got = {r.id: [Answer([], [])] for r in requests}
    rng = random.Random(11)
    for report in reports(engine):
        for out in report.outputs:
            answer = got[out.request_id][0]
            answer.tokens += out.tokens
            answer.logprobs += [*(out.prompt_logprobs or ()), *out.logprobs]
            answer.reason = out.finish_reason
        scheduler = engine.engine.scheduler
        for seq in [*scheduler.running]:
            if rng.random() < 0.6:
                scheduler._preempt(seq)
    assert engine.engine.scheduler.preemptions > 20
    assert not differing(got, {r.id: alone[r.id] for r in requests})
