"""Answers of every schema of the JSON Schema test suite, which QUIRE_JSON_SUITE names: valid, or said to be not.

A folder with draft7 and draft2020-12; the source distribution of jsonschema has it, as json/tests.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.llm import LLM

SUITE = os.environ.get("QUIRE_JSON_SUITE", "")
UNCHECKED = "optional/float-overflow.json"
"""Integers beyond floats, of which each is a multiple of 0.5: the validator divides them as floats, and fails."""
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SUITE, reason="QUIRE_JSON_SUITE names no folder")
@pytest.mark.parametrize("strict", [False, True], ids=["checked", "strict"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_answer_is_complete_and_valid_or_refused_beforehand(draft: str, strict: bool) -> None:
    draw, wrong, answered, refused, told = random.Random(7), list[Any](), 0, 0, 0
    found = [
        (str(path.relative_to(SUITE)), case["description"], case["schema"])
        for path in sorted((Path(SUITE) / draft).rglob("*.json"))
        if not str(path).endswith(UNCHECKED)
        for case in json.loads(path.read_text())
    ]
    with LLM(max_model_len=512) as llm:
        for at, (file, what, schema) in enumerate(found):
            room = draw.choice((1, 4, 12, 40, 120, 300))
            try:
                shape = StructuredOutputsParams(json=schema, strict=strict)
                asked = SamplingParams(structured_outputs=shape, max_tokens=room, temperature=1.5, seed=at)
                output = llm.generate("Return the list of", asked, use_tqdm=False)[0].outputs[0]
            except BadRequest:
                refused += 1
                continue
            answered += 1
            try:
                value = json.loads(output.text)
                DRAFTS[draft](schema).validate(value)
            except Exception as error:
                if output.schema_errors and not strict:
                    told += 1
                    continue
                wrong.append(
                    (file, what, schema, room, output.text[:120], f"{type(error).__name__}: {str(error)[:120]}")
                )
    counts = f"{answered} answered, {refused} refused, {told} invalid and said so, {len(wrong)} wrong"
    print(f"{draft}, strict {strict}: {len(found)} schemas, {counts}")
    assert not wrong, "\n".join(map(str, wrong[:40]))
    assert answered > 100
