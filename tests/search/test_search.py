"""quire.search: the best of several answers, votes, and steps that a verifier guides, with counted savings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import quire
from quire.core.errors import BadRequest
from quire.search import ScoreBy, StepSearch, best_of_n, self_consistency, step_search

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    "
DRAW = quire.SamplingParams(max_tokens=12, temperature=1.2, seed=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[quire.LLM]:
    with quire.LLM(device="cpu", num_blocks=256) as made:
        yield made


def test_the_likeliest_of_n(llm: quire.LLM) -> None:
    [found] = best_of_n(llm, PROMPT, 6, DRAW)
    scores = [each.score for each in found.candidates]
    assert scores == sorted(scores, reverse=True)
    assert (found.text, found.score) == (found.candidates[0].text, scores[0])
    length = len(llm.get_tokenizer().encode(PROMPT))
    assert found.saved.asked == 6 * length
    assert found.saved.found >= 5 * (length - 1)  # the prompt is computed once; each row computes its last token
    plain = llm.generate(PROMPT, quire.SamplingParams(max_tokens=12, temperature=1.2, seed=5, n=6), use_tqdm=False)[0]
    assert sorted(each.text for each in plain.outputs) == sorted(each.text for each in found.candidates)


def test_a_verifier_chooses(llm: quire.LLM) -> None:
    [found] = best_of_n(llm, PROMPT, 6, DRAW, lambda prompt, texts: [float(len(text)) for text in texts])
    assert len(found.text) == max(len(each.text) for each in found.candidates)
    [scored] = best_of_n(llm, PROMPT, 3, DRAW, ScoreBy(llm))
    want = llm.score(PROMPT, scored.text, use_tqdm=False)[0].outputs.score
    assert scored.score == pytest.approx(want, abs=1e-6)
    with pytest.raises(BadRequest, match="verifier"):
        best_of_n(llm, PROMPT, 3, DRAW, lambda prompt, texts: [float("nan")] * len(texts))


def test_answers_vote(llm: quire.LLM) -> None:
    [found] = self_consistency(llm, PROMPT, 8, lambda text: text.strip()[:1] or None, DRAW)
    votes = [each.answer for each in found.candidates]
    assert found.answer is not None
    assert votes.count(found.answer) == max(votes.count(answer) for answer in set(votes) if answer is not None)
    assert found.score == votes.count(found.answer) / 8
    [none] = self_consistency(llm, PROMPT, 2, r"no such text (\d+)", DRAW)
    assert none.answer is None
    assert none.score == 0.0
    with pytest.raises(BadRequest, match="extract"):
        self_consistency(llm, PROMPT, 2, "(", DRAW)


def test_steps_are_guided_and_share_their_beginnings(llm: quire.LLM) -> None:
    seen: list[str] = []

    def verifier(prompt: str, texts: list[str]) -> list[float]:
        assert prompt == PROMPT
        seen.extend(texts)
        return [float(text.count("a")) for text in texts]

    how = StepSearch(width=2, expand=3, max_steps=4, step_tokens=6)
    params = quire.SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    [found] = step_search(llm, PROMPT, verifier, how, params)
    assert found.text in seen
    assert len(found.candidates) <= 2
    assert all(len(each.token_ids) <= 20 for each in found.candidates)
    assert found.score == float(found.text.count("a"))
    length = len(llm.get_tokenizer().encode(PROMPT))
    assert found.saved.asked >= 3 * length
    assert found.saved.share > 0.5
    assert step_search(llm, PROMPT, verifier, how, params)[0].text == found.text


@pytest.mark.parametrize("wrong", [{"width": 0}, {"expand": 65}, {"max_steps": 0}, {"delimiter": ""}])
def test_bounds_are_named(llm: quire.LLM, wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        step_search(llm, PROMPT, lambda p, t: [0.0] * len(t), StepSearch(**wrong), DRAW)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="n:"):
        best_of_n(llm, PROMPT, 0, DRAW)
