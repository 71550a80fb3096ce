"""Vectors: what is asked of an engine, and what becomes of what it gives. For `LLM` and for the server.
See docs/design/embeddings.md."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest, ContextTooLong
from quire.core.params import SamplingParams
from quire.core.pooling import Pooling
from quire.core.request import Output, Request, longest_prompt, random_id
from quire.engine.client import EngineInfo
from quire.engine.requests import listed

if TYPE_CHECKING:
    from quire.engine.local import LocalEngine

Vector = NDArray[np.float32]
_ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a vector is given. `dimensions`: its first so many numbers, None = all. `normalize`: divided by its length;
    None = as the model's files say, and always where it was cut."""

    dimensions: int | None = None
    normalize: bool | None = None

    def validate(self, pooling: Pooling) -> None:
        """`BadRequest` naming the field, for a model that gives `pooling`."""
        if self.dimensions is None:
            return
        if pooling.labels:
            raise BadRequest("dimensions: this model classifies; its numbers are those of classes", param="dimensions")
        if type(self.dimensions) is not int or not 1 <= self.dimensions <= pooling.width:
            raise BadRequest(f"dimensions: must lie in [1, {pooling.width}] for this model", param="dimensions")
        if pooling.dimensions and self.dimensions not in (*pooling.dimensions, pooling.width):
            known = ", ".join(map(str, pooling.dimensions))
            raise BadRequest(f"dimensions: this model was trained to be cut to {known}", param="dimensions")


def pooled_request(info: EngineInfo, prompt: Sequence[int], param: str = "prompt") -> Request:
    """A request for the vector of a prompt, which came as the field `param`; `BadRequest` when it cannot be had."""
    pooling = info.pooling
    if pooling.refused:
        raise BadRequest(f"no vectors can be had of this model here: {pooling.refused}")
    if not prompt:
        raise BadRequest(f"{param}: must have at least one token", param=param)
    if len(prompt) > longest_prompt(info.max_model_len, pooled=True):
        raise ContextTooLong(
            f"{param}: has {len(prompt)} tokens, but this model reads {info.max_model_len}", param=param
        )
    strange = next((t for t in prompt if type(t) is not int or not 0 <= t < info.vocab_size), None)
    if strange is not None:
        raise BadRequest(f"{param}: token id {strange} is not in [0, {info.vocab_size})", param=param)
    return Request(id=random_id(), prompt=tuple(prompt), params=_ONE, seed=0, arrival=time.monotonic(),
                   pooling=pooling.kind)  # fmt: skip


def vector_of(output: Output) -> Vector:
    """What the engine gave: a row of the model, or a logit per class, f32 [width]."""
    return np.frombuffer(output.pooled, np.float32)


def embedding(pooling: Pooling, row: Vector, params: PoolingParams) -> Vector:
    """The vector as it was asked for, f32 [dimensions]. A zero vector stays one."""
    made = row if params.dimensions is None else row[: params.dimensions]
    cut = len(made) < len(row)
    if (pooling.normalize or cut) if params.normalize is None else params.normalize:
        made = unit(made)
    return made


def unit(row: Vector) -> Vector:
    """`row` divided by its length, which is summed in f64."""
    length = float(np.sqrt((row.astype(np.float64) ** 2).sum()))
    return row if length == 0.0 else (row / length).astype(np.float32)


def probabilities(pooling: Pooling, logits: Vector) -> NDArray[np.float64]:
    """Probabilities of each class, f64 [labels]: a sigmoid each where several may hold, else a softmax."""
    values = logits.astype(np.float64)
    if pooling.several:
        return np.asarray(np.exp(-np.logaddexp(0.0, -values)))
    return np.asarray(np.exp(values - np.logaddexp.reduce(values)))


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors."""
    return float((unit(one).astype(np.float64) * unit(other).astype(np.float64)).sum())


def relevance(pooling: Pooling, logits: Vector) -> float:
    """The score of a pair by a model of classes: the probability of its one class, or of the second of two."""
    found = probabilities(pooling, logits)
    return float(found[-1])


def check_scores(pooling: Pooling) -> None:
    """`BadRequest` for a model whose classes say nothing of how well two texts fit."""
    if len(pooling.labels) > 2:
        raise BadRequest(
            f"this model tells {len(pooling.labels)} classes apart, none of which scores a pair; use encode"
        )


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The numbers of a prompt: f32 [dimensions], or the probabilities of classes, f32 [labels]."""

    data: Vector


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts fit: a cosine, or a probability."""

    score: float


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The answer to one prompt, or to a pair of texts: `outputs` is one of the three above.

    `num_cached_tokens` of the prompt were found and not computed.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class PoolingCalls:
    """What `LLM` can do beside text: vectors, and scores of pairs."""

    info: EngineInfo

    @property
    def engine(self) -> LocalEngine:
        """The engine."""
        raise NotImplementedError

    def _tokens(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        raise NotImplementedError

    def encode(
        self, prompts: Any, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[PooledOutput]:
        """The numbers of each prompt (as of `generate`), f32: a vector, or for a model of classes their probabilities.

        All run at one time. Raises `BadRequest` before anything runs if one prompt cannot.
        """
        params = pooling_params or PoolingParams()
        params.validate(self.info.pooling)
        requests = [pooled_request(self.info, self._tokens(prompt)[1]) for prompt in listed(prompts)]
        return [
            _answer(r, o, PoolingOutput(self._shown(vector_of(o), params))) for r, o in self._pool(requests, use_tqdm)
        ]

    def embed(
        self, prompts: Any, pooling_params: PoolingParams | None = None, use_tqdm: bool = True
    ) -> list[PooledOutput]:
        """The vector of each prompt. `BadRequest` for a model of classes."""
        if self.info.pooling.labels:
            raise BadRequest("embed: this model classifies; use encode or score")
        found = self.encode(prompts, pooling_params, use_tqdm)
        return [_with(each, EmbeddingOutput(each.outputs.data.tolist())) for each in found]

    def score(self, text_1: Any, text_2: Any, use_tqdm: bool = True) -> list[PooledOutput]:
        """How well text i of `text_1` and of `text_2` fit, or one `text_1` and each of `text_2`.

        The cosine of their vectors; a model with one class or two reads both behind each other, the second class's
        probability is the score.
        """
        left, right = listed(text_1), listed(text_2)
        check_scores(self.info.pooling)
        if len(left) not in (1, len(right)) or not right:
            raise BadRequest(
                f"text_1: has {len(left)} texts for {len(right)} of text_2; give one, or one each", param="text_1"
            )
        pairs = list(zip(left * (len(right) if len(left) == 1 else 1), right, strict=True))
        if self.info.pooling.labels:
            both = [[*self._tokens(one)[1], *self._tokens(other)[1]] for one, other in pairs]
            requests = [pooled_request(self.info, ids) for ids in both]
            return [_answer(r, o, ScoringOutput(relevance(self.info.pooling, vector_of(o))))
                    for r, o in self._pool(requests, use_tqdm)]  # fmt: skip
        requests = [pooled_request(self.info, self._tokens(text)[1]) for text in (*left, *right)]
        found = self._pool(requests, use_tqdm)
        ones, others = found[: len(left)] * (len(right) if len(left) == 1 else 1), found[len(left) :]
        return [_answer(r, o, ScoringOutput(cosine(vector_of(one), vector_of(o))), asked.prompt)
                for (asked, one), (r, o) in zip(ones, others, strict=True)]  # fmt: skip

    def _shown(self, row: Vector, params: PoolingParams) -> Vector:
        pooling = self.info.pooling
        if pooling.labels:
            return probabilities(pooling, row).astype(np.float32)
        return embedding(pooling, row, params)

    def _pool(self, requests: list[Request], use_tqdm: bool) -> list[tuple[Request, Output]]:
        from quire.core.progress import counting_bar

        live, found = {request.id: request for request in requests}, dict[int, Output]()
        with counting_bar(len(requests), "prompts", use_tqdm) as count, closing(self.engine.run(live)) as outputs:
            for number, output in outputs:
                found[number] = output
                del live[output.request_id]
                count()
        return [(request, found[number]) for number, request in enumerate(requests)]


def _answer(request: Request, output: Output, made: Any, before: Sequence[int] = ()) -> PooledOutput:
    return PooledOutput(request.id, made, [*before, *request.prompt], output.cached_tokens)


def _with(found: PooledOutput, made: Any) -> PooledOutput:
    return PooledOutput(found.request_id, made, found.prompt_token_ids, found.num_cached_tokens)
