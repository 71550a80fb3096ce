"""SmolLM2-135M-Instruct's real weights (Q4_1) answer questions: `make real`."""

from __future__ import annotations

import pytest

from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from real_weights import real_model

pytestmark = pytest.mark.real
QUESTIONS = {"What is the capital of France?": "is Paris", "Name three fruits.": "1. Bananas\n2. Oranges\n3. Grapes"}
"""What the model gets right in float32."""


def test_greedy_answers_are_right_and_the_same_in_any_batch() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(str(real_model("smollm2")), device="cpu", activations="int16") as llm:
        together = [each.outputs[0].text for each in llm.chat(chats, params)]
        alone = [llm.chat(chat, params)[0].outputs[0].text for chat in chats]
    assert together == alone
    for answer, word in zip(together, QUESTIONS.values(), strict=True):
        assert word in answer
