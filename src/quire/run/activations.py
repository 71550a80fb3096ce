"""Memory of a step's intermediate tensors, from the shape of a model: by it the engine reserves, and plans are made."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.config import SchedulerConfig
from quire.model.mixers.layer_mixers import mixers_of
from quire.model.spec import ModelSpec

FLOAT = 4


class Activations(NamedTuple):
    """Bytes: `outer` lives as long as a step, two areas of `layer` are taken in turn (`ops/cpu/state.py`), and the last
    layer's, which has the logits too, takes `last`. `scratch` is what kernels keep of the rows: activations in the form
    that weights are multiplied with.
    """

    outer: int
    layer: int
    last: int
    scratch: int

    @property
    def total(self) -> int:
        """Total of all activations."""
        return self.outer + self.layer + max(self.layer, self.last) + self.scratch


def activations(spec: ModelSpec, rows: int, logits: int, code_bytes: float = 0, fused: bool = True) -> Activations:
    """Activations of the largest step of a rank, `spec` its share: `rows` tokens of which `logits` want logits.

    `code_bytes`: of a number of a row as the matrices read it (1 integers, 2 bf16, 4 f32); `fused`: the wide
    intermediates of an MLP never reach memory. Families whose blocks differ (latents, encoders) are counted as the
    sequential block with their widths: short of what they take by what only they have.
    """
    sized = {spec.at(layer) for layer in range(spec.layers)} or {spec}
    intermediate = max(one.intermediate for one in sized)
    mixed = max(
        *(one.heads * (one.head_dim if one.value_head else one.value_dim) for one in sized),
        spec.conv.width,
        spec.delta.width + spec.delta.values,
        spec.scan.width + spec.scan.inner,
        3 * spec.channels.inner + spec.channels.rank + 2 * spec.channels.state,
    )
    logits, attended = min(rows, logits), _queries(spec) + mixed
    stream = spec.hidden * max(1, spec.streams.count)
    passing = 2 * spec.hidden if spec.moe.late else 0
    joined, mlp = _joined(spec), _mlp(spec, intermediate, fused)
    layer = rows * (joined + passing + attended + mlp)
    behind = joined + mlp + _left(spec) if spec.streams.count else 5 * stream
    last = rows * (stream + attended) + logits * (behind + spec.vocab_size)
    inner = (spec.moe.routing.top_k * spec.moe.intermediate) if any(spec.moe.sparse) else 0
    widest = max(spec.hidden, mixed) + max(intermediate, inner)
    outer = spec.embed_width + _entered(spec) + 2 * spec.layers * spec.inputs.width
    return Activations(FLOAT * rows * outer, FLOAT * layer, FLOAT * last, round(rows * widest * code_bytes))


def _joined(spec: ModelSpec) -> int:
    """Numbers of a row that a block makes to join attention and MLP: norms and what is added to the stream; of several
    streams also their mixtures, and the one that attention or the MLP reads."""
    if not spec.streams.count:
        return 3 * spec.hidden
    return (4 * spec.streams.count + (6 if spec.streams.most else 16)) * spec.hidden


def _left(spec: ModelSpec) -> int:
    """Numbers of a row that the last of several streams' layers makes of them for the head, beside those of a layer."""
    return ((1 if spec.streams.most else 3) * spec.streams.count + 3) * spec.hidden


def _entered(spec: ModelSpec) -> int:
    """Numbers of a row that are made of its embedding before the first layer: streams, and with AltUp their parts."""
    return (1 if spec.streams.most else 2) * spec.streams.count * spec.hidden


def feature_bytes(spec: ModelSpec, limits: SchedulerConfig) -> int:
    """Bytes of features of images: those that are kept at most, and those that one step gives to its rows."""
    return FLOAT * spec.hidden * (1 + spec.sight.deep) * (limits.encoder_rows[1] + limits.max_num_batched_tokens)


def _queries(spec: ModelSpec) -> int:
    """Numbers of a row of queries, keys and values."""
    return max(mixer.projected for mixer in mixers_of(spec))


def _mlp(spec: ModelSpec, intermediate: int, fused: bool) -> int:
    """Numbers of a row from the norm before the MLP, which is counted by the caller, to its output."""
    routing = spec.moe.routing
    if any(spec.moe.sparse):
        shared = 3 * spec.moe.shared + spec.hidden if spec.moe.shared else 0
        made = (2 if spec.moe.idle else 1) * routing.top_k  # by pairs, which are summed apart where some are of none
        return spec.hidden * (1 + made) + 3 * spec.moe.choices + 4 * routing.top_k + shared
    return spec.hidden + (0 if fused else 3 * intermediate)
