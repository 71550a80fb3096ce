"""What /info says of a model that writes no text, in TEI's format."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.pooling import Pooling
from quire.server.service import VERSION, Service

KINDS = {"mean": "mean", "cls": "cls", "last": "last_token", "splade": "splade"}
"""Kinds of pooling by TEI's names."""


class TeiInfo(msgspec.Struct, kw_only=True):
    """Response of /info in TEI's format."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None = None
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None


def tei_info(service: Service) -> TeiInfo:
    """The server's properties."""
    facts, limits = service.engine.info, service.config.scheduler
    return TeiInfo(
        model_id=service.names[0],
        model_dtype=facts.dtype,
        served_model_name=service.names[0],
        model_type=model_type(facts.pooling),
        max_concurrent_requests=facts.max_num_queued_reqs,
        max_input_length=facts.max_model_len,
        max_batch_tokens=limits.max_num_batched_tokens,
        max_batch_requests=limits.max_num_seqs,
        max_client_batch_size=facts.max_num_queued_reqs,
        tokenization_workers=facts.threads,
        version=VERSION,
    )


def model_type(pooling: Pooling) -> dict[str, Any]:
    """What the model makes: vectors, classes, or with one class scores of pairs."""
    if not pooling.labels:
        return {"embedding": {"pooling": KINDS[pooling.kind]}}
    labels = {
        "id2label": {str(i): label for i, label in enumerate(pooling.labels)},
        "label2id": {label: i for i, label in enumerate(pooling.labels)},
    }
    return {"reranker" if len(pooling.labels) == 1 else "classifier": labels}
