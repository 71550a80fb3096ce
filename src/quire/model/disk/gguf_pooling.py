"""How a GGUF file says that its model makes vectors or classes: by keys, and by tensors behind the pooled row.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.pooling import DenseModule, Pooling, PoolingKind
from quire.gguf.file import GgufFile
from quire.model.disk.gguf_architecture import Architecture, TensorShapes
from quire.model.disk.gguf_names import CAUSAL, POOLED, TYPES_OF_TOKENS
from quire.model.disk.pooling_config import CLASSIFIES
from quire.model.families.row import HeadStep

KINDS: dict[int, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}
"""`pooling_type`, and ours."""
NOTHING, CLASSES = 0, 4
"""Of these numbers: rows stay as they are; they become classes."""
YES_OR_NO = ("yes", "no")
"""Labels of rerankers that answer by the logits of two tokens; they have one score."""
TYPES = "token_types."
NORM = "cls.norm"


def pooled_fields(file: GgufFile, prefix: str, held: TensorShapes, own: Architecture) -> dict[str, Any]:
    """Fields of config.json: whether tokens see later ones, how many types of tokens there are, and the classes."""
    found: dict[str, Any] = {}
    if file.metadata.get(prefix + CAUSAL) is False:
        found["is_causal"] = False
    if (types := file.metadata.get(TYPES_OF_TOKENS)) is not None:
        found["type_vocab_size"] = types if held(TYPES) else 0
    if own.head and any(name.startswith(f"{own.head[-1]}.") for name in held.shapes):
        labels = file.metadata.get(prefix + POOLED[2], ["LABEL_0"])
        labels = YES_OR_NO[:1] if tuple(labels) == YES_OR_NO else labels
        found |= {"architectures": [CLASSIFIES], "id2label": {str(i): label for i, label in enumerate(labels)}}
        kind = file.metadata.get(prefix + POOLED[1])
        found |= {} if kind is None else {"classifier_pooling": KINDS.get(kind, str(kind))}
    return found


def behind_pooled(own: Architecture) -> tuple[str, ...]:
    """What begins the names of tensors behind pooled rows, which no layer has."""
    return tuple(f"{name}." for name in (*own.head, *own.dense))


def steps_in_files(steps: Sequence[HeadStep], names: Sequence[str]) -> tuple[HeadStep, ...]:
    """The matrices behind pooled rows as files call them, the last of `names` that of the classes."""
    called = names[-len(steps) :]
    return tuple(
        step._replace(name=name, norm=NORM if step.norm else "") for step, name in zip(steps, called, strict=True)
    )


def file_pooling(file: GgufFile, prefix: str, own: Architecture, made: Pooling) -> Pooling:
    """`made`, with what the file says; `ModelError` for a number of a pooling that is not known."""
    kind = file.metadata.get(prefix + POOLED[0], NOTHING)
    if kind not in (*KINDS, NOTHING, CLASSES):
        raise file.fail(prefix + POOLED[0], f"is {kind!r:.40}; known are 0 to {CLASSES}")
    if made.labels:
        return msgspec.structs.replace(made, generates=False)  # whose head over the vocabulary may be gone
    if kind == CLASSES:
        return msgspec.structs.replace(made, refused="its file says that it makes classes, and has no matrix of them")
    found = tuple(
        DenseModule(name, width, "")
        for name in own.dense
        if (width := file.metadata.get(f"{prefix}{name}_feat_out")) and f"{name}.weight" in file.tensors
    )
    width = found[-1].width if found else made.width
    return msgspec.structs.replace(made, kind=KINDS.get(kind, made.kind), dense=found, width=width)
