"""The head of a model that makes vectors or classes of pooled rows, from its folder."""

from __future__ import annotations

from quire.core.dtypes import F32, is_float
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import Checkpoint
from quire.model.disk.gguf_pooling import YES_OR_NO
from quire.model.disk.headers import ModelHeaders
from quire.model.disk.pooling_config import BY_TOKENS
from quire.model.families.row import HeadStep
from quire.model.pooled_head import ACTIVATIONS, HeadLayer, HeadNorm, PooledHead
from quire.ops.arrays import Host, to_numpy
from quire.quant.registry import load, matrix_scheme
from quire.text.tokenizer import Tokenizer


def load_classifier(opened: ModelHeaders) -> PooledHead:
    """Read the layers behind pooled rows, f32 on the host; () where the pooled row is the answer.

    `ModelError` when a matrix is missing or has another shape.
    """
    if opened.pooling.labels and (tokens := opened.config.texts(BY_TOKENS)):
        return (HeadLayer(_by_tokens(opened, *tokens)),)
    if not opened.pooling.labels:
        return tuple(_dense(opened, each.folder, each.activation) for each in opened.pooling.dense)
    layers, width = list[HeadLayer](), opened.spec.hidden
    for step in opened.family.classifier:
        layer = _layer(opened, step)
        if layer.weight.shape[1] != width:
            raise ModelError(f"{opened.folder}: {step.name} reads {layer.weight.shape[1]} numbers, there are {width}")
        layers.append(layer)
        width = len(layer.weight)
    if width != opened.pooling.width:
        raise ModelError(f"{opened.folder}: {step.name} makes {width} classes, the config has {opened.pooling.width}")
    return tuple(layers)


def _layer(opened: ModelHeaders, step: HeadStep) -> HeadLayer:
    activation = opened.config.text(step.spelled, step.activation) if step.spelled else step.activation
    if activation not in ACTIVATIONS:
        raise opened.config.fail(step.spelled, f"{activation!r} is not known; known: {', '.join(ACTIVATIONS)}")
    name = step.name
    weight = _matrix(opened, name)
    if weight is None:
        why = "; llama.cpp's converter leaves out that of BERT: give the original folder"
        told = why if opened.folder.is_file() else ""
        raise ModelError(f"{opened.folder}: {name}.weight is missing, which makes classes of the pooled row{told}")
    norm = _tensor(opened, f"{step.norm}.weight") if step.norm else None
    if opened.folder.is_file() and opened.pooling.labels == YES_OR_NO[:1] and len(weight) == len(YES_OR_NO):
        return HeadLayer(weight[:1] - weight[1:])  # whose sigmoid is the probability of the first beside the second
    normed = None if norm is None else HeadNorm(norm, _tensor(opened, f"{step.norm}.bias"), opened.spec.norm_eps)
    return HeadLayer(weight, _tensor(opened, f"{name}.bias"), activation, normed)


def _tensor(opened: ModelHeaders, name: str) -> Host | None:
    if name not in opened.source.infos:
        return None
    return to_numpy(opened.source.tensor(name)).astype(F32)


def _matrix(opened: ModelHeaders, name: str) -> Host | None:
    """The matrix `name` [n, k] f32, of codes in a file of codes."""
    found = {part: f"{name}.{part}" for part in opened.scheme.parts if f"{name}.{part}" in opened.source.infos}
    if not opened.folder.is_file() or "weight" in found or not found:
        return _tensor(opened, f"{name}.weight")
    raw = {part: opened.source.tensor(tensor) for part, tensor in found.items()}
    return to_numpy(load(matrix_scheme(opened.scheme, found), raw, F32, 0).dequantize()).astype(F32)


def _dense(opened: ModelHeaders, below: str, activation: str) -> HeadLayer:
    """A dense layer of sentence-transformers."""
    if opened.folder.is_file():
        return _layer(opened, HeadStep(below, activation))
    source = Checkpoint(opened.folder / below)
    weight = to_numpy(source.tensor("linear.weight")).astype(F32)
    bias = to_numpy(source.tensor("linear.bias")).astype(F32) if "linear.bias" in source.infos else None
    return HeadLayer(weight, bias, activation)


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
