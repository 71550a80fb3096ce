"""Bodies of TEI's routes (text-embeddings-inference, docs/openapi.json), and how texts that are too long are cut."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from quire.core.options.fields import about
from quire.server.apis.fields import DimensionsField
from quire.server.apis.openai.prompts import Prompts, encode_shortened
from quire.server.apis.openai.protocol import Prompt
from quire.server.service import Service

Direction = Literal["Left", "Right", "left", "right"]
Sequence = str | list[str]
"""A text, or a pair of texts."""

TruncateField = Annotated[bool | None, about("Truncate an input that is too long, instead of refusing it.")]
DirectionField = Annotated[Direction | None, about("The side of a text that truncate takes away: Right, or Left.")]
PromptNameField = Annotated[
    str | None, about("Task whose prompt of the model's files stands before texts, as query; none if empty.")
]


class TeiTruncation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of inputs that are too long."""

    truncate: TruncateField = None
    truncation_direction: DirectionField = None

    @property
    def last(self) -> bool:
        """Whether the ends of texts stay."""
        return self.truncation_direction in ("Left", "left")


class TeiEmbedAllRequest(TeiTruncation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /embed_all."""

    inputs: Annotated[Prompt, about("A text, token ids, or a list of either.")]
    prompt_name: PromptNameField = None


class TeiEmbedRequest(TeiEmbedAllRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /embed."""

    normalize: Annotated[
        bool | None, about("Whether a vector is divided by its length. The default is true, as in TEI.")
    ] = None
    dimensions: DimensionsField = None


class TeiEmbedSparseRequest(TeiEmbedAllRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /embed_sparse."""


class TeiSentences(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sentence and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class TeiSimilarityParameters(TeiTruncation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sentences become vectors."""

    prompt_name: PromptNameField = None


class TeiSimilarityRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /similarity."""

    inputs: Annotated[TeiSentences, about("source_sentence, and the sentences that it is compared with.")]
    parameters: Annotated[
        TeiSimilarityParameters | None, about("TEI's: truncate, truncation_direction, prompt_name.")
    ] = None


class TeiPredictRequest(TeiTruncation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /predict."""

    inputs: Annotated[
        str | list[str | list[str]],
        about("A text, a pair of texts, or a list of lists with one text or two; each is classified."),
    ]
    raw_scores: Annotated[bool | None, about("Scores are logits, and no probabilities.")] = None


class TeiRerankRequest(TeiTruncation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank with texts."""

    query: Annotated[str, about("The query to rank texts by.")]
    texts: Annotated[list[str], about("The texts to rank.")]
    raw_scores: Annotated[bool | None, about("Scores are logits, and no probabilities.")] = None
    return_text: Annotated[bool | None, about("Return the texts with their scores.")] = None


async def fitted(service: Service, given: Prompts, how: TeiTruncation) -> Prompts:
    """Prompts as they are, or what the model reads of them."""
    if not how.truncate:
        return given
    return await encode_shortened(service, given, service.engine.info.max_model_len, how.last)
