"""What a model's own layer drafts in an engine, against its formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine_answers import engine_of
from head_layers import relative
from mtp_models import MtpLayer
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ops.arrays import Array, to_torch
from quire.speculate.assistant_drafter import AssistantDrafter
from quire.speculate.eagle_drafter import EagleDrafter
from turns import working

PROMPT = (9, 30, 41, 7, 12, 33, 5, 78, 20, 17)
ALWAYS = json.dumps({"method": "mtp", "adaptive": False})
IN_CHUNKS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 4}


def logits_seen(engine: Engine) -> list[torch.Tensor]:
    """What the proposer draws from, each time that it draws."""
    assert engine.speculator is not None
    drafter, seen = engine.speculator.proposer, list[torch.Tensor]()
    assert isinstance(drafter, EagleDrafter | AssistantDrafter)
    draw = drafter._sampler.tokens

    def tokens(logits: Array, asked: list[object]) -> list[int]:
        seen.append(to_torch(logits).clone())
        return draw(logits, asked)  # type: ignore[arg-type]

    drafter._sampler.tokens = tokens  # type: ignore[assignment, method-assign]
    return seen


def check_drafts(layer: MtpLayer, model: Path) -> None:
    """`check_logits` of a model whose own files have the `layer`."""
    engine = engine_of(model=str(model), speculative_config=ALWAYS, **IN_CHUNKS).engine
    check_logits(engine, layer.logits, layer.model)


def check_logits(engine: Engine, logits: Callable[[list[int], int], torch.Tensor], target: PreTrainedModel) -> None:
    """In the middle of an answer, over a prompt that was cut into chunks, after drafts that were kept and lost, the
    logits of each drafted token are those of `logits`, which is given the tokens and how many are drafted."""
    assert engine.speculator is not None
    seen, tried = logits_seen(engine), 0
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="r", prompt=PROMPT * 4, params=params, seed=1, arrival=0.0))
    for _ in working(engine):
        engine.step()
        for seq in engine.scheduler.running:
            if len(seq.tokens) <= seq.prompt_len:
                continue
            seen.clear()
            engine.speculator.draft()
            want = logits(seq.tokens, len(seen))
            assert relative(torch.cat(seen), want) < 1e-5
            assert seq.draft.tokens == want.argmax(-1).tolist()
            tried += len(seen)
            if tried == 6:  # what the target says next takes the place of the draft: kept, as it is right
                made = target.generate(torch.tensor([seq.tokens]), max_new_tokens=3, do_sample=False)
                seq.draft.tokens[:] = made[0, len(seq.tokens) :].tolist()
        if tried > 12:
            return
    assert tried > 9
