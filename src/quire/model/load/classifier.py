"""The matrix of a model of classes."""

from __future__ import annotations

from quire.core.dtypes import F32, is_float
from quire.core.errors import ModelError
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.pooling_config import BY_TOKENS, CLASSIFIER
from quire.ops.arrays import Host, to_numpy
from quire.text.tokenizer import Tokenizer


def load_classifier(opened: ModelHeaders) -> Host | None:
    """[labels, hidden] f32 on the host, or None. `ModelError` when it is missing or has another shape."""
    if not opened.pooling.labels:
        return None
    if tokens := opened.config.texts(BY_TOKENS):
        return _by_tokens(opened, *tokens)
    if CLASSIFIER not in opened.source.infos:
        raise ModelError(f"{opened.folder}: {CLASSIFIER} is missing, which makes classes of the last token's row")
    shape, want = opened.source.infos[CLASSIFIER].shape, (opened.pooling.width, opened.spec.hidden)
    if shape != want:
        raise ModelError(f"{opened.folder}: {CLASSIFIER} is {list(shape)}, the config asks for {list(want)}")
    return to_numpy(opened.source.tensor(CLASSIFIER)).astype(F32)


def _by_tokens(opened: ModelHeaders, no: str, yes: str) -> Host:
    """The head's row of `yes` less that of `no`: a sigmoid of its product is the probability of yes beside no."""
    tokenizer = Tokenizer.from_folder(opened.folder)
    parts = opened.claim.get("head") or opened.claim.get("embed")
    name, first, second = parts.get("weight", ""), tokenizer.token_to_id(no), tokenizer.token_to_id(yes)
    if first is None or second is None:
        raise ModelError(f"{opened.folder}: {BY_TOKENS}: {no!r} and {yes!r} are not both tokens of the vocabulary")
    if not name or not is_float(opened.source.infos[name].dtype):
        raise ModelError(f"{opened.folder}: {BY_TOKENS}: the head is quantized, its rows cannot be read")
    matrix = to_numpy(opened.source.tensor(name))
    found: Host = (matrix[second].astype(F32) - matrix[first].astype(F32))[None]
    return found
