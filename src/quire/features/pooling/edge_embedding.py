"""Vectors: what is asked of an engine, and what becomes of what it gives. For `LLM` and for the server.
See docs/design/embeddings.md."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
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
from quire.engine.requests import LoRARequest, listed
from quire.features.pooling.edge_sparse import SparseEmbeddingOutput, check_dense, check_sparse, sparse_of

if TYPE_CHECKING:
    from quire.engine.local import LocalEngine
    from quire.text.tokenizer import Tokenizer

Vector = NDArray[np.float32]
_ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a vector is given. `dimensions`: its first so many numbers, None = all. `normalize`: divided by its length;
    None = as the model's files say, and always where it was cut. `prompt_name`: of what the model's files have stand
    before a text of a task ("query", "document"); None = the usual one, "" = none."""

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None

    def validate(self, pooling: Pooling) -> None:
        """`BadRequest` naming the field, for a model that gives `pooling`."""
        task_prompt(pooling, self.prompt_name)
        if pooling.kind == "splade" and (self.normalize or self.dimensions is not None):
            field = "normalize" if self.normalize else "dimensions"
            raise BadRequest(f"{field}: is not available for SPLADE models", param=field)
        if self.dimensions is None:
            return
        if pooling.labels:
            raise BadRequest("dimensions: this model classifies; its numbers are those of classes", param="dimensions")
        if type(self.dimensions) is not int or not 1 <= self.dimensions <= pooling.width:
            raise BadRequest(f"dimensions: must lie in [1, {pooling.width}] for this model", param="dimensions")
        if pooling.dimensions and self.dimensions not in (*pooling.dimensions, pooling.width):
            known = ", ".join(map(str, pooling.dimensions))
            raise BadRequest(f"dimensions: this model was trained to be cut to {known}", param="dimensions")


def pooled_request(
    info: EngineInfo, prompt: Sequence[int], param: str = "prompt", second: int = 0, adapter: str = ""
) -> Request:
    """A request for the vector of a prompt, which came as the field `param`; `BadRequest` when it cannot be had.

    `second`: where the second text of a pair begins, `adapter`: of LoRA (`Request`).
    """
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
                   pooling=pooling.kind, second=second, adapter=adapter)  # fmt: skip


def task_prompt(pooling: Pooling, name: str | None) -> str:
    """What stands before a text of the task `name`; None = the usual task, "" = no task."""
    named = pooling.prompt if name is None else name
    if named and named not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        raise BadRequest(f"prompt_name: this model has no prompt {named[:40]!r}; it has {known}", param="prompt_name")
    return pooling.prompts[named] if named else ""


def vector_of(output: Output) -> Vector:
    """What the engine gave: a row of the model, or a logit per class, f32 [width]."""
    return np.frombuffer(output.pooled, np.float32)


def usual_vector(pooling: Pooling, output: Output) -> Vector:
    """What the engine gave, as long as the model's files say, f32 [`cut` or `width`]."""
    return vector_of(output)[: pooling.cut or None]


def embedding(pooling: Pooling, row: Vector, params: PoolingParams) -> Vector:
    """The vector as it was asked for, f32 [dimensions]. A zero vector stays one."""
    made = row[: params.dimensions or pooling.cut or None]
    cut = params.dimensions is not None and len(made) < len(row)
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
    """The score of a pair by a model of classes: the probability of its one class, or of the second of two; or the
    logit of its one class, as the model's files may ask."""
    found = logits if pooling.raw and len(pooling.labels) == 1 else probabilities(pooling, logits)
    return float(found[-1])


def raw_relevance(pooling: Pooling, logits: Vector) -> float:
    """The score of a pair before it becomes a probability: the logit of the one class, or of the second of two above
    that of the first."""
    if len(logits) == 1 or pooling.several:
        return float(logits[-1])
    return float(logits[-1].astype(np.float64) - logits[0])


def likely_relevance(pooling: Pooling, logits: Vector) -> float:
    """The score of a pair as a probability, whatever the model's files ask for."""
    return float(probabilities(pooling, logits)[-1])


def check_classifies(pooling: Pooling) -> None:
    """`BadRequest` for a model without classes."""
    if not pooling.labels and not pooling.refused:
        raise BadRequest("this model has no classes: it makes vectors (/v1/embeddings, LLM.embed)")


def check_scores(pooling: Pooling) -> None:
    """`BadRequest` for a model of sparse vectors, or whose classes say nothing of how well two texts fit."""
    check_dense(pooling)
    if len(pooling.labels) > 2:
        raise BadRequest(
            f"this model tells {len(pooling.labels)} classes apart, none of which scores a pair; use classify"
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
class ClassificationOutput:
    """The probability of each class, in the order of the model's files."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts fit: a cosine, or a probability."""

    score: float


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The answer to one prompt, or to a pair of texts: `outputs` is one of the four above,
    or a `SparseEmbeddingOutput`.

    `num_cached_tokens` of the prompt were found and not computed.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class PoolingCalls(ABC):
    """What `LLM` can do beside text: vectors, and scores of pairs."""

    info: EngineInfo

    @property
    @abstractmethod
    def engine(self) -> LocalEngine:
        """The engine."""

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    @abstractmethod
    def _tokens(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        """The text of a prompt, where it has one, and its tokens."""

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """The numbers of each prompt (as of `generate`), f32: a vector, or for a model of classes their probabilities.

        All run at one time, with the adapter of `lora_request`, which encoders take. Raises `BadRequest` before
        anything runs if one prompt cannot.
        """
        check_dense(self.info.pooling)
        params = pooling_params or PoolingParams()
        found = self._pool(self._requests(prompts, params, lora_request), use_tqdm)
        return [_answer(r, o, PoolingOutput(self._shown(vector_of(o), params))) for r, o in found]

    def embed_sparse(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """The weights that a SPLADE model gives to tokens of its vocabulary for each prompt.

        `BadRequest` for other models, and for params with `dimensions` or `normalize`.
        """
        check_sparse(self.info.pooling)
        found = self._pool(self._requests(prompts, pooling_params or PoolingParams(), lora_request), use_tqdm)
        sparse = ((request, output, sparse_of(output)) for request, output in found)
        return [_answer(r, o, SparseEmbeddingOutput(i.tolist(), v.tolist())) for r, o, (i, v) in sparse]

    def embed(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """The vector of each prompt. `BadRequest` for a model of classes."""
        if self.info.pooling.labels:
            raise BadRequest("embed: this model classifies; use classify or score")
        found = self.encode(prompts, pooling_params, use_tqdm, lora_request)
        return [_with(each, EmbeddingOutput(each.outputs.data.tolist())) for each in found]

    def classify(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PooledOutput]:
        """The probabilities of the classes of each prompt. `BadRequest` for a model without classes."""
        check_classifies(self.info.pooling)
        found = self.encode(prompts, pooling_params, use_tqdm, lora_request)
        return [_with(each, ClassificationOutput(each.outputs.data.tolist())) for each in found]

    def score(
        self, text_1: Any, text_2: Any, use_tqdm: bool = True, lora_request: LoRARequest | None = None
    ) -> list[PooledOutput]:
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
            adapter = self._adapter(lora_request)
            requests = [self._pair(one, other, adapter) for one, other in pairs]
            return [_answer(r, o, ScoringOutput(relevance(self.info.pooling, vector_of(o))))
                    for r, o in self._pool(requests, use_tqdm)]  # fmt: skip
        requests = self._requests([*left, *right], PoolingParams(), lora_request)
        found = self._pool(requests, use_tqdm)
        ones, others = found[: len(left)] * (len(right) if len(left) == 1 else 1), found[len(left) :]
        pooling = self.info.pooling
        return [_answer(r, o, ScoringOutput(cosine(*(usual_vector(pooling, each) for each in (one, o)))), asked.prompt)
                for (asked, one), (r, o) in zip(ones, others, strict=True)]  # fmt: skip

    def _requests(self, prompts: Any, params: PoolingParams, lora: LoRARequest | None) -> list[Request]:
        """Requests for the vectors of prompts, with the text of their task before those that are text."""
        params.validate(self.info.pooling)
        task = task_prompt(self.info.pooling, params.prompt_name)
        given = (task + each if isinstance(each, str) else each for each in listed(prompts))
        adapter = self._adapter(lora)
        return [pooled_request(self.info, self._tokens(prompt)[1], adapter=adapter) for prompt in given]

    def _adapter(self, lora: LoRARequest | None) -> str:
        return "" if lora is None else self.engine.with_adapter(lora.lora_name, lora.lora_path)

    def _pair(self, one: Any, other: Any, adapter: str) -> Request:
        """The request for a pair: as the tokenizer joins two texts, or the one's tokens behind the other's."""
        if self.info.pooling.pairs and isinstance(one, str) and isinstance(other, str):
            ids, second = self.get_tokenizer().encode_pair(one, other)
            return pooled_request(self.info, ids, second=second, adapter=adapter)
        return pooled_request(self.info, [*self._tokens(one)[1], *self._tokens(other)[1]], adapter=adapter)

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
