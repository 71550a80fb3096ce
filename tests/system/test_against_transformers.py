"""The embedded model in float32: greedy generations equal to those of transformers' generate, token for token."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import quire.model.disk.checkpoint as checkpoint
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.text.tokenizer import Tokenizer
from turns import reports

FOLDER = Path(checkpoint.EMBEDDED)
LENGTHS = (3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
PER_LENGTH = 20
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    """200 windows of real text: Python code and the questions the model was trained for."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    code = tokenizer.encode(
        Path(json.__file__).with_name("decoder.py").read_text() + Path(checkpoint.__file__).read_text()
    )
    questions = (FOLDER / "questions.jsonl").read_text().splitlines()[:400]
    asked = tokenizer.encode("\n".join(json.loads(line)["question"] for line in questions))
    rows = []
    for length in LENGTHS:
        for i in range(PER_LENGTH):
            text = code if i % 2 else asked
            at = i * (len(text) - 240) // PER_LENGTH
            rows.append(text[at : at + length])
    return rows


@pytest.mark.slow
def test_greedy_generations_equal_transformers() -> None:
    rows = prompts()
    assert len(rows) == 200
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    want: list[list[int]] = []
    with torch.inference_mode():
        for at in range(0, len(rows), PER_LENGTH):
            ids = torch.tensor(rows[at : at + PER_LENGTH])
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                                 min_new_tokens=NEW_TOKENS, do_sample=False)  # fmt: skip
            want += out[:, ids.shape[1] :].tolist()
    engine = LocalEngine(flat_config(dtype="float32", num_blocks=2048))
    eos = engine.info.eos_token_ids
    params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
    for i, row in enumerate(rows):
        engine.submit(
            Request(id=str(i), prompt=tuple(row), params=params, seed=0, arrival=time.monotonic(), eos_token_ids=eos)
        )
    got: list[list[int]] = [[] for _ in rows]
    for report in reports(engine):
        for output in report.outputs:
            got[int(output.request_id)] += output.tokens
    differing = [i for i in range(len(rows)) if got[i] != want[i]]
    assert not differing, f"{len(differing)} of {len(rows)} prompts differ, first {differing[0]}"
