"""What GGUF's keys say of a model: the inverse of how `quire.model.disk.gguf_model` reads them, by the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import (
    CAUSAL,
    FIELDS,
    GATING,
    INNER,
    KEY_LENGTHS,
    KV_HEADS,
    LATENT_LENGTHS,
    LOG_MULTIPLIER,
    NEXTN,
    NORMED,
    REALS,
    RECURRENT,
    ROPE_FIELDS,
    SCORES,
    TURNED,
    VALUE_LENGTHS,
    WIDTH,
    WINDOW,
)
from quire.model.disk.headers import ModelHeaders
from quire.model.families.rope import LinearScaling, LongRope, Rope, Yarn
from quire.model.spec import ModelSpec

SHARED_WIDTH = "expert_shared_feed_forward_length"
"""The key of experts that files of models without experts may have, for the MLP in their place."""
SAID = ("attention_factor", "stretch")
"""What a context extension says beside its frequencies."""


def facts_of(opened: ModelHeaders, architecture: Architecture, drafts: ModelHeaders | None) -> dict[str, Any]:
    """Return values by keys below the architecture's name. `drafts`: the layer that drafts, where the file has it."""
    spec, raw = opened.spec, opened.config.raw
    told = {} if architecture.tell is None else architecture.tell(raw)
    raw = {**raw, **told}
    rope, extended = _ropes(spec)
    attends = [spec.attends(layer) for layer in range(spec.layers)]
    own = {
        "head_dim": spec.head_dim if any(attends) else None,
        "rope_theta": float(rope.theta) if any(attends) and rope.dim else None,
        "num_attention_heads": spec.heads,
        WIDTH: told.get(WIDTH, _widths(spec, architecture)),
        KV_HEADS: spec.kv_heads * np.array(attends, np.int32) if architecture.kinds else _of_layers(spec, "kv_heads"),
    }
    if True in spec.moe.sparse[1:] and not spec.moe.sparse[0]:
        own["num_dense_layers"] = spec.moe.sparse.index(True)
    if any(spec.moe.sparse):
        own |= {"moe_intermediate_size": spec.moe.intermediate, "norm_topk_prob": spec.moe.routing.renormalize}
    if spec.moe.shared:
        own["shared_expert_intermediate_size"] = spec.moe.shared
    if spec.norm not in ("rms", "rms1p", "unit"):  # of layernorms, whose epsilon has a key of its own
        own["layer_norm_eps"] = raw["rms_norm_eps"]
    if absorbed := LATENT_LENGTHS[0] in architecture.known:
        own["head_dim"] = spec.mla.row
        own[KV_HEADS] = np.array(attends, np.int32) if architecture.kinds else 1
    own |= {name: value for name, value in told.items() if name in own}
    found: dict[str, Any] = {}
    spelled = dict(architecture.spelling)
    for name, key in (*FIELDS.items(), *architecture.fields.items()):
        value = own[name] if name in own else _field(raw, name, raw.get(spelled.get(name, "")))
        if name == "rms_norm_eps" and "layer_norm_eps" in own and name not in architecture.fields:
            continue
        asked = name in told or key == SHARED_WIDTH or not key.startswith("expert_")
        if value is not None and (any(spec.moe.sparse) or asked):
            found[key] = value
    found |= {key: np.array(raw[name]) for name, key in architecture.lists.items() if raw.get(name) is not None}
    if any(attends):
        turned = rope.dim if architecture.turns else spec.head_dim
        found |= {"attention.value_length": spec.kept_value_dim if absorbed else spec.value_dim}
        found |= {TURNED[0]: turned} if turned else {}
    if KEY_LENGTHS[1] in architecture.known and not absorbed:
        found |= _head_sizes(spec)
    found |= {"vocab_size": spec.vocab_size, **({CAUSAL: False} if spec.bidirectional else {})}
    found |= _windows(spec, rope, attends)
    further = int(drafts is not None)
    if further:
        found |= {NEXTN: further, FIELDS["num_hidden_layers"]: spec.layers + further}
    recurrent = _recurrent_sizes(spec)
    if not all(attends):
        recurrent[RECURRENT] = ~np.array([*attends, *[True] * further])
    found |= {key: value for key, value in recurrent.items() if key in architecture.known}
    if architecture.normed:
        found[NORMED] = spec.family == architecture.normed
    if absorbed:
        found |= _latents(opened, architecture)
    found |= {**_scaling(extended), **architecture.fixed, **architecture.written}
    if drafts is not None and WINDOW[1] in architecture.known:
        found = {key: with_draft(value, spec, drafts.spec) for key, value in found.items()}
    return {key: float(value) if key in REALS else value for key, value in found.items()}


def with_draft(value: Any, spec: ModelSpec, draft: ModelSpec) -> Any:
    """Return a list with a number for each layer with that of the layer that drafts behind them, which is the number of
    layers like it; other values as they are."""
    if not isinstance(value, np.ndarray) or len(value) != spec.layers:
        return value
    like = max(i for i, window in enumerate(spec.windows) if (window > 0) == (draft.windows[0] > 0))
    return np.append(value, value[like])


def _windows(spec: ModelSpec, rope: Rope, attends: Sequence[bool]) -> dict[str, Any]:
    """Return the window of layers that attend, and the base of their rope where it is not that of `rope`."""
    windows = [window if seen else 0 for window, seen in zip(spec.windows, attends, strict=True)]
    if max(windows) <= 0:
        return {}
    if spec.entries.window:  # beside it layers keep rows for entries
        return {WINDOW[0]: spec.entries.window}
    local = next(r for r, window in zip(spec.rope, windows, strict=True) if window)
    base = {WINDOW[2]: float(local.theta)} if local.dim and local.theta != rope.theta else {}
    widest = 2 * (max(windows) - 1) if spec.bidirectional else max(windows)  # on both sides
    return {WINDOW[0]: widest} | base


def _latents(opened: ModelHeaders, architecture: Architecture) -> dict[str, Any]:
    """Return the parts of a head, the function by which experts are scored, and what YaRN multiplies scores with."""
    spec = opened.spec
    found: dict[str, Any] = dict(zip(LATENT_LENGTHS, (spec.head_dim, spec.mla.value), strict=True))
    found["rope.dimension_count"] = spec.mla.rope
    found |= {GATING: SCORES[spec.moe.routing.score]} if architecture.scored else {}
    scaling = opened.config.raw.get("rope_scaling") or opened.config.raw.get("rope_parameters") or {}
    weight = scaling.get("mscale_all_dim")
    return found | ({LOG_MULTIPLIER: weight / 10} if weight else {})


def _field(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field of config.json, one called a.b of the object a."""
    outer, dot, inner = name.partition(".")
    return (raw.get(outer) or {}).get(inner, default) if dot else raw.get(name, default)


def whole_rope(spec: ModelSpec) -> Rope:
    """Return the rope of layers that see everything; where none of these turns, of those with a window."""
    whole = [r for r, window in zip(spec.rope, spec.windows, strict=True) if not window]
    return next((r for r in (*whole, *spec.rope) if r.dim), (*whole, *spec.rope)[0])


def _ropes(spec: ModelSpec) -> tuple[Rope, Rope]:
    """Return the rope whose base has the usual key, and the one whose context extension has keys: beside entries that
    of layers without any, and that of layers with them, whose base has a key of its own."""
    rope = whole_rope(spec)
    each = list(zip(spec.rope, spec.entries.every, strict=False))
    near = next((r for r, every in each if not every), rope)
    return (near, next((r for r, every in each if every), rope)) if each else (rope, rope)


def _widths(spec: ModelSpec, architecture: Architecture) -> Any:
    """Return the width of MLPs; of each layer where these differ, or some have none that nothing else tells."""
    if spec.join != "single" or architecture.kinds is None:
        return _of_layers(spec, "intermediate")
    return spec.intermediate * np.array([spec.has_mlp(layer) for layer in range(spec.layers)], np.int32)


def _of_layers(spec: ModelSpec, name: str) -> Any:
    """Return a size of the model; of each layer where layers differ in it."""
    found = [getattr(spec.at(layer), name) for layer in range(spec.layers)]
    return found[0] if len(set(found)) == 1 else np.array(found, np.int32)


def _head_sizes(spec: ModelSpec) -> dict[str, Any]:
    """Return the numbers of a head and how many of them turn, and those of a head in layers with a window."""
    layers = {window > 0: layer for layer, window in enumerate(spec.windows)}
    found: dict[str, Any] = {}
    for windowed, keys in enumerate(zip(KEY_LENGTHS, VALUE_LENGTHS, TURNED, strict=True)):
        layer = layers.get(windowed > 0, 0)
        size = spec.at(layer).head_dim
        found |= dict(zip(keys, (size, size, spec.rope[layer].dim), strict=True))
    return found


def _recurrent_sizes(spec: ModelSpec) -> dict[str, Any]:
    """Return the numbers of all heads or channels that recur, and of the space of their time steps."""
    inner = spec.delta.values or spec.scan.inner or spec.channels.inner
    rank = {"ssm.time_step_rank": spec.channels.rank} if spec.channels.rank else {}
    return {INNER: inner, **rank} if inner else {}


def _scaling(rope: Rope) -> dict[str, Any]:
    """Return keys of a context extension; none for one that has no name in GGUF, which the comparison then finds.

    YaRN's factor of cosines is left out: llama.cpp multiplies its own by what the key says, others take it for all.
    """
    scaling = rope.scaling
    if not isinstance(scaling, (LinearScaling, Yarn, LongRope)):
        return {}
    values = asdict(scaling)
    values["original_max_position_embeddings"] = values.pop("original", None)
    if not isinstance(scaling, LongRope):
        values.pop("attention_factor")
    found = {key: values[name] for name, key in ROPE_FIELDS.items() if values.get(name) is not None}
    return {"rope.scaling.type": type(scaling).__name__.lower().removesuffix("scaling")} | found


def same(a: Any, b: Any) -> bool:
    """Tell whether facts are the same but for the rounding of numbers to 32 bits."""
    if is_dataclass(a) and is_dataclass(b):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return bool(np.isclose(a, b, rtol=1e-6, atol=0))
    return bool(a == b)


def same_turns(a: Rope, b: Rope, longest: int) -> bool:
    """Tell whether two ropes turn by the same angles in the model's own context and in that which it extends."""
    if a.dim != b.dim or not all(same(getattr(a.scaling, n), getattr(b.scaling, n)) for n in SAID):
        return False
    lengths = (longest, getattr(a.scaling, "original", longest))
    pairs = [[r.scaling.inverse_frequencies(r.theta, r.dim, length) for r in (a, b)] for length in lengths]
    return all(np.allclose(one, other, rtol=1e-5, atol=0) for one, other in pairs)
