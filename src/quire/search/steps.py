"""Search over steps of an answer, guided by a verifier: what scores low is left before tokens are spent on its rest.

Beam search over steps with a process reward: Snell et al. 2024; Yao et al. 2023 (Tree of Thoughts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.engine.outputs import CompletionOutput
from quire.engine.requests import listed
from quire.search.result import Candidate, SearchResult, TokenMeter, check_count, ids_of
from quire.search.verify import Verifier, judged
from quire.text.detokenizer import continuation


@dataclass(frozen=True, kw_only=True)
class StepSearch:
    """`width` texts are kept after each step, and each is continued `expand` times; `max_steps` bounds them.

    A step ends with `delimiter`, or with `step_tokens` tokens.
    """

    width: int = 4
    expand: int = 4
    max_steps: int = 16
    delimiter: str = "\n"
    step_tokens: int = 128

    def validate(self) -> None:
        """`BadRequest` naming the field."""
        for name, most in (("width", 64), ("expand", 64), ("max_steps", 1024), ("step_tokens", 1 << 16)):
            check_count(name, getattr(self, name), most)
        if not self.delimiter:
            raise BadRequest("delimiter: must not be empty", param="delimiter")


@dataclass(frozen=True, slots=True)
class _Path:
    """Tokens behind the prompt and their text; `ended`: why nothing follows, None while something may."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    score: float = 0.0
    ended: str | None = None


@dataclass
class _Tree:
    """The search for one prompt."""

    prompt: list[int]
    text: str
    live: list[_Path] = field(default_factory=lambda: [_Path()])
    done: list[_Path] = field(default_factory=list)


def step_search(
    llm: LLM,
    prompts: Any,
    verifier: Verifier,
    search: StepSearch | None = None,
    sampling_params: SamplingParams | None = None,
) -> list[SearchResult]:
    """The answer to each prompt whose text `verifier` likes best, found step by step.

    `max_tokens` of `sampling_params` bounds an answer in all. Steps of one text share its beginning in the prefix
    cache, and all prompts go on together. `candidates`: the best `width` texts, best first.
    """
    how = search or StepSearch()
    how.validate()
    asked = sampling_params or llm.get_default_sampling_params()
    if asked.n != 1:
        raise BadRequest("sampling_params: n is the search's own; leave it out", param="sampling_params")
    if asked.temperature == 0.0 and how.expand > 1:
        raise BadRequest(
            "sampling_params: at temperature 0 all continuations are one; use expand=1 or draw", param="expand"
        )
    tokenizer, meter = llm.get_tokenizer(), TokenMeter(llm)
    rows = [(prompt, ids_of(llm, prompt)) for prompt in listed(prompts)]
    trees = [_Tree(ids, prompt if isinstance(prompt, str) else tokenizer.decode(ids)) for prompt, ids in rows]
    for step in range(how.max_steps):
        _advance(llm, trees, how, asked, meter, step)
        for tree in trees:
            _keep(tree, verifier, how.width)
        if not any(tree.live for tree in trees):
            break
    return [_result(tree, how.width, meter) for tree in trees]


def _advance(
    llm: LLM, trees: list[_Tree], how: StepSearch, asked: SamplingParams, meter: TokenMeter, step: int
) -> None:
    """Continue every live text by a step; their places are taken by what came of them."""
    limit = asked.max_tokens or llm.info.max_model_len
    jobs = [(tree, path) for tree in trees for path in tree.live]
    prompts, params = [], []
    for place, (tree, path) in enumerate(jobs):
        left = min(how.step_tokens, limit - len(path.tokens))
        seed = None if asked.seed is None else (asked.seed + 0x9E3779B9 * (1 + step) + place) % 2**63
        prompts.append([*tree.prompt, *path.tokens])
        stop = (*asked.stop, how.delimiter)
        params.append(replace(asked, n=how.expand, max_tokens=left, min_tokens=0, seed=seed, stop=stop,
                              include_stop_str_in_output=True))  # fmt: skip
        meter.add(prompts[-1], how.expand)
    outputs = llm.generate(prompts, params, use_tqdm=False) if jobs else []
    for tree in trees:
        tree.live = []
    for (tree, path), output in zip(jobs, outputs, strict=True):
        grown = [_grown(llm, tree, path, each, how, asked) for each in output.outputs]
        tree.live += {each.tokens: each for each in grown}.values()


def _grown(llm: LLM, tree: _Tree, path: _Path, step: CompletionOutput, how: StepSearch, asked: SamplingParams) -> _Path:
    """`path` and one continuation. It goes on where a step ended and nothing else did, and there is room."""
    tokens = (*path.tokens, *step.token_ids)
    room = min(asked.max_tokens or llm.info.max_model_len, llm.info.max_model_len - len(tree.prompt) - 1)
    ended: str | None = "stop"
    if step.finish_reason != "stop" or step.stop_reason == how.delimiter:
        ended = None if len(tokens) < room and step.token_ids else "length"
    if ended == "stop" and isinstance(step.stop_reason, str):  # the caller's own, which is no part of the text
        return _Path(tokens, path.text + step.text.removesuffix(step.stop_reason), 0.0, ended)
    return _Path(tokens, continuation(llm.get_tokenizer(), tree.prompt, tokens), 0.0, ended)


def _keep(tree: _Tree, verifier: Verifier, width: int) -> None:
    """Score what came, set aside what ended, and go on with the best."""
    if not tree.live:
        return
    scores = judged(verifier, tree.text, [path.text for path in tree.live])
    scored = [_Path(p.tokens, p.text, score, p.ended) for p, score in zip(tree.live, scores, strict=True)]
    scored.sort(key=lambda path: -path.score)
    kept = scored[:width]
    tree.done += [path for path in kept if path.ended is not None]
    tree.live = [path for path in kept if path.ended is None]


def _result(tree: _Tree, width: int, meter: TokenMeter) -> SearchResult:
    """Texts that ended come before those that the last step cut off."""
    found = sorted([*tree.done, *tree.live], key=lambda path: (path.ended != "stop", -path.score))[:width]
    candidates = [Candidate(p.text, list(p.tokens), p.score, p.ended or "length") for p in found]
    return SearchResult(candidates[0].text, candidates[0].score, candidates, meter.saved())
