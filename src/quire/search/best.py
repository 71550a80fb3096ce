"""Several answers to a prompt, of which the best or the most common is taken.

Best-of-N with a verifier: Cobbe et al. 2021. Self-consistency: Wang et al. 2022.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.requests import listed
from quire.search.result import Candidate, SearchResult, TokenMeter, check_count, ids_of, likelihood
from quire.search.verify import Verifier, judged

Extract = Callable[[str], str | None]


def best_of_n(
    llm: LLM,
    prompts: Any,
    n: int,
    sampling_params: SamplingParams | None = None,
    verifier: Verifier | None = None,
) -> list[SearchResult]:
    """Draw `n` answers to each prompt (a text, token ids, or a list of them), and take the best.

    By what `verifier` says, or by the mean log-probability of a token. The prompt is computed once for its `n` answers.
    """
    outputs, meter = _drawn(llm, prompts, n, sampling_params)
    results = []
    for prompt, output in zip(listed(prompts), outputs, strict=True):
        texts = [each.text for each in output.outputs]
        if verifier is None:
            scores = [likelihood(each) for each in output.outputs]
        else:
            scores = judged(verifier, prompt if isinstance(prompt, str) else llm.get_tokenizer().decode(prompt), texts)
        found = [_candidate(each, score) for each, score in zip(output.outputs, scores, strict=True)]
        found.sort(key=lambda each: -each.score)
        results.append(SearchResult(found[0].text, found[0].score, found, meter.saved()))
    return results


def self_consistency(
    llm: LLM,
    prompts: Any,
    n: int,
    extract: Extract | str,
    sampling_params: SamplingParams | None = None,
) -> list[SearchResult]:
    """Draw `n` answers to each prompt, and take the answer that most of them come to.

    `extract`: from a text to its answer, None where it has none; or a regular expression, whose last match counts, its
    first group where it has one. `score`: the share of all `n` texts. Of equally common answers the one that came first
    wins. `answer` is None where no text has one; then the likeliest text is taken.
    """
    take = _by_pattern(extract) if isinstance(extract, str) else extract
    outputs, meter = _drawn(llm, prompts, n, sampling_params)
    results = []
    for output in outputs:
        votes: defaultdict[str, int] = defaultdict(int)
        answers = [take(each.text) for each in output.outputs]
        for answer in answers:
            if answer is not None:
                votes[answer] += 1
        found = [
            _candidate(each, votes[answer] / n if answer is not None else 0.0, answer)
            for each, answer in zip(output.outputs, answers, strict=True)
        ]
        likely = [likelihood(each) for each in output.outputs]
        first = {answer: i for i, answer in reversed(list(enumerate(answers))) if answer is not None}
        order = sorted(range(n), key=lambda i: (-found[i].score, first.get(answers[i] or "", n), -likely[i]))
        found = [found[i] for i in order]
        results.append(SearchResult(found[0].text, found[0].score, found, meter.saved(), found[0].answer))
    return results


def _drawn(llm: LLM, prompts: Any, n: int, params: SamplingParams | None) -> tuple[list[RequestOutput], TokenMeter]:
    """`n` answers of each prompt with their log-probabilities."""
    check_count("n", n)
    asked = params or llm.get_default_sampling_params()
    if asked.n != 1:
        raise BadRequest("sampling_params: n is the search's own; leave it out", param="sampling_params")
    rows = [ids_of(llm, prompt) for prompt in listed(prompts)]
    meter = TokenMeter(llm)
    outputs = llm.generate(rows, replace(asked, n=n, logprobs=asked.logprobs or 0), use_tqdm=False)
    for row in rows:
        meter.add(row, n)
    return outputs, meter


def _candidate(output: CompletionOutput, score: float, answer: str | None = None) -> Candidate:
    return Candidate(output.text, output.token_ids, score, output.finish_reason, answer)


def _by_pattern(pattern: str) -> Extract:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadRequest(f"extract: is no regular expression: {error}", param="extract") from None

    def take(text: str) -> str | None:
        last: Sequence[str] | None = None
        for match in compiled.finditer(text):
            last = (match.group(1) if compiled.groups else match.group(),)
        return None if last is None else last[0]

    return take
