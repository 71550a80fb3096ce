"""The headers of a model that drafts for another (`families.assistants`): read, checked, and claimed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ModelError
from quire.model.disk.checkpoint import Checkpoint, float_dtype, resolve
from quire.model.disk.claim import claim
from quire.model.disk.gguf_assistant import open_assistant_file
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.hf_config import read_json
from quire.model.disk.renamed_tensors import Rewritten
from quire.model.families.assistants import ORDER, read_assistant
from quire.ops.arrays import to_numpy
from quire.quant.registry import detect
from quire.store.hub import Hub


def open_assistant(model: str, hub: Hub) -> ModelHeaders:
    """Read config and headers of `model`, a folder, a GGUF file or a hub name, and claim every tensor; `ModelError`
    where it drafts for no other model, or where tensors are missing, left over or of other sizes."""
    folder = resolve(model, hub)
    if folder.is_file():
        return open_assistant_file(folder)
    path = folder / "config.json"
    spec, family, config = read_assistant(read_json(path), str(path))
    checkpoint = Checkpoint(folder)
    source = Rewritten(checkpoint, family.rewrites)
    family = family.named_as(source.infos)
    scheme = detect(source.infos, config.child("quantization_config"), source.origins)
    try:
        claimed = claim(source.infos, spec, family, family.required_parts(config), scheme)
    except ModelError as error:
        raise ModelError(f"{folder}: {error.message}") from None
    return ModelHeaders(
        folder.name, folder, config, spec, family, source, scheme, claimed, float_dtype(source.infos),
        (*checkpoint.notes, *scheme.notes),
    )  # fmt: skip


def read_clusters(opened: ModelHeaders) -> NDArray[np.int32]:
    """Tokens of each cluster, [clusters, tokens of one] int32; `ModelError` where one is missing or there twice."""
    spec = opened.spec
    if ORDER not in opened.source.infos:
        raise ModelError(f"{opened.folder}: {ORDER} is missing, and config.json says use_ordered_embeddings")
    tokens = to_numpy(opened.source.tensor(ORDER)).reshape(-1)
    if not np.array_equal(np.sort(tokens), np.arange(spec.vocab_size)):
        raise ModelError(f"{opened.folder}: {ORDER} does not name each of {spec.vocab_size} tokens once")
    return tokens.astype(np.int32).reshape(spec.assistant.clusters, -1)
