"""Grammars that no matcher follows to the end: they end their request alone, always alike, and no engine."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from engine_answers import Answer, engine_of, run
from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.core.errors import BadRequest, GrammarTooComplex
from quire.core.plan import LogitRow
from quire.core.request import Output, Request
from quire.features.structured_output.run_grammar_masks import MaskBuilder
from quire.text.structured import guide
from quire.text.structured.grammar_source import grammar_of
from quire.text.structured.refused_grammars import FAILURES
from quire.text.structured.vocabulary import vocabulary_of
from shaped import VOCAB, shaped, tokenizer
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
BOMB, SMALLER = "((a{1,100}){1,100}){1,100}", "((a{1,20}){1,20}){1,20}"
LETTER = {tokenizer().encode("a", add_special_tokens=False)[-1]: 100.0}
BOMBS: dict[str, dict[str, Any]] = {
    "regex": {"regex": BOMB},
    "a smaller one": {"regex": SMALLER},
    "letters": {"regex": "(((a|b|ab){1,30}){1,30}){1,30}"},
    "Lark": {"grammar": f"start: WORD\nWORD: /{SMALLER}/"},
    "a pattern": {"json": {"type": "string", "pattern": f"^{SMALLER}$"}},
    "spaces": {"json": {"type": "array", "items": {"const": 1}, "minItems": 9}, "whitespace_pattern": SMALLER},
}


def asked(name: str, shape: dict[str, Any] | None, **more: Any) -> Request:
    """A request that says "a" wherever it may."""
    own = {"structured_outputs": shape, "logit_bias": LETTER} if shape else {"ignore_eos": True, "logprobs": 2}
    params = SamplingParams(**({"max_tokens": 60, "temperature": 1.0} | own | more))
    made = Request(id=name, prompt=(5, 6, 7), params=params, seed=1, arrival=0.0, eos_token_ids=(4,))
    return shaped(made) if shape else made


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of()


@pytest.fixture(scope="module")
def alone(engine: Any) -> dict[str, bytes]:
    """What the others give when they run alone."""
    return {each.id: run(engine, [each])[each.id].bits() for each in PLAIN}


PLAIN = [asked(f"plain{i}", None, max_tokens=20 + i) for i in range(4)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_grammar_beyond_the_matchers_limits_ends_its_request_alone(
    engine: Any, alone: dict[str, bytes], kind: str
) -> None:
    answers, ended = {name: Answer([], []) for name in (*alone, "bomb")}, dict[str, Output]()
    for each in (PLAIN[0], asked("bomb", BOMBS[kind]), *PLAIN[1:]):
        engine.submit(each)
    for _ in turns(lambda: engine.engine.has_work):
        for output in (engine.poll(0) or engine).outputs:
            answers[output.request_id].tokens += output.tokens
            answers[output.request_id].logprobs += output.logprobs
            if output.finish_reason is not None:
                ended[output.request_id] = output
    assert {name: answers[name].bits() for name in alone} == alone
    text = tokenizer().decode([token for token in answers["bomb"].tokens if token != 4])
    assert ended["bomb"].finish_reason == "stop" and len(text) > 9, ended["bomb"]
    if kind != "spaces":
        assert re.fullmatch('"?[ab]+"?', text)
    again = run(engine, [asked("again", BOMBS[kind])])["again"]
    assert again.tokens == answers["bomb"].tokens, "what one made of the grammar is no matter to the next"
    engine.engine.check()


def test_what_fails_again_and_again_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "FAILURES", 0)
    params = SamplingParams(structured_outputs={"regex": BOMB}, max_tokens=60, logit_bias=LETTER)  # type: ignore[arg-type]
    with LLM() as llm:
        told, steps = list[tuple[str, str | None]](), set[int]()
        for _ in range(FAILURES + 2):
            with pytest.raises(BadRequest, match="too complex") as caught:
                llm.generate("x", params, use_tqdm=False)
            told.append((caught.value.message.removeprefix("prompt 0: "), caught.value.param))
            steps.add(llm.engine.engine.steps)
        assert len(steps) == FAILURES, "from then on it is refused at the edge"
        assert len(set(told)) == 1 and told[0][1] == "structured_outputs"
        other = SamplingParams(structured_outputs={"regex": "[a-z]{3}"}, max_tokens=60)  # type: ignore[arg-type]
        assert len(llm.generate("x", other, use_tqdm=False)[0].outputs[0].text) == 3


def test_a_guide_does_not_notice_what_others_made_of_its_grammar() -> None:
    text, letter = grammar_of("regex", BOMB, {}, []), next(iter(LETTER))
    vocabulary = vocabulary_of(tokenizer(), VOCAB)

    def said(one: guide.GrammarGuide) -> list[bytes]:
        """Masks, while "a" is taken whether or not they have it."""
        masks, bits = list[bytes](), np.zeros((vocabulary.tokenizer.vocab_size + 31) // 32, np.int32)
        with pytest.raises(GrammarTooComplex):
            for _ in range(50):
                one.mask(bits)
                masks.append(bits.tobytes())
                assert one.takes(letter)
        return masks

    alone = said(guide.GrammarGuide(guide.Grammar(text, vocabulary), 60, (4,), (letter,)))
    shared = guide.Grammar(text, vocabulary)
    guides = [guide.GrammarGuide(shared, 60, (4,), (letter,)) for _ in range(3)]
    assert [said(each) for each in guides] == [alone] * 3
    assert len(alone) > 9 and shared.spent


def test_each_step_under_way_has_masks_of_its_own(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    make = MaskBuilder._make

    def counted(self: MaskBuilder, rows: Any) -> Any:
        calls.append(rows)
        return make(self, rows)

    monkeypatch.setattr(MaskBuilder, "_make", counted)
    steps = []
    for name in ("one", "two"):
        engine.submit(asked(name, {"regex": "[a-z]{3,9}"}))
        for _ in turns(lambda: not engine.engine.scheduler.running):
            engine.poll(0)
        (seq,) = engine.engine.scheduler.running
        steps.append([LogitRow(seq, len(seq.tokens))])
        engine.engine.scheduler.running.remove(seq)
    masks = MaskBuilder(VOCAB)
    calls.clear()
    for rows in steps:
        masks.begin(rows)
    for rows in steps:
        masks.of(rows)
    assert calls == steps, "a step's masks are made once"
    engine.engine.scheduler.running.extend(rows[0].seq for rows in steps)
    for name in ("one", "two"):
        engine.abort(name)
    engine.engine.check()
