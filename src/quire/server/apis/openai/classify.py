"""POST /v1/classify: vLLM's shape over the classes of a model that has some."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.core.options.fields import about
from quire.core.request import random_id
from quire.features.pooling.edge_embedding import check_classifies, probabilities, task_prompt, vector_of
from quire.server.apis.fields import AddSpecialTokensField
from quire.server.apis.openai.protocol import Prompt
from quire.server.apis.openai.vectors import (
    NUMBER_BYTES,
    ROW_BYTES,
    Given,
    VectorFields,
    VectorUsage,
    answers,
    prompts_of,
    usage_of,
    vector_routes,
)
from quire.server.http.body import off_loop, read_struct
from quire.server.http.json_response import JsonResponse
from quire.server.service import Service


class ClassifyRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/classify."""

    input: Annotated[Prompt, about("A text, token ids, or a list of either; each is classified.")]
    use_activation: Annotated[
        bool | None, about("Whether probs are probabilities, which is the default, or logits.")
    ] = None
    add_special_tokens: AddSpecialTokensField = None


class ClassifyData(msgspec.Struct, kw_only=True):
    """The likeliest class of a text, and the probability of each in the order of the model's files."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(msgspec.Struct, kw_only=True):
    """The reply of /v1/classify."""

    id: str
    created: int
    model: str
    data: list[ClassifyData]
    usage: VectorUsage
    object: str = "list"


async def create_classification(service: Service, request: HttpRequest) -> Response:
    """Return the likeliest class of one or several texts, and the probability of each class."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: ClassifyRequest)
    pooling = service.engine.info.pooling
    check_classifies(pooling)
    given = await prompts_of(service, body.input, "input", task_prompt(pooling, None))
    special = body.add_special_tokens is not False
    found = await answers(service, request, body, Given(given, arrival, "input", special))

    def written() -> bytes:
        data = []
        for i, (_, output) in enumerate(found):
            logits = vector_of(output)
            shown = logits if body.use_activation is False else probabilities(pooling, logits)
            label = pooling.labels[int(np.argmax(logits))]
            data.append(ClassifyData(index=i, label=label, probs=shown.tolist(), num_classes=len(logits)))
        return msgspec.json.encode(
            Classes(id=f"classify-{random_id()}", created=int(time.time()), model=service.answering(body.model),
                    data=data, usage=usage_of(found))
        )  # fmt: skip

    return JsonResponse(await off_loop((ROW_BYTES + NUMBER_BYTES * pooling.width) * len(found), written))


ROUTES = (*vector_routes(("/v1/classify", "/classify"), create_classification, (ClassifyRequest,), (Classes,), None),)
