"""Structured pruning: whole layers, heads and MLP channels taken out of a checkpoint, which stays one of its family.

Tensors come and go by their names on disk, beside the content of config.json. What cannot be written as an ordinary
checkpoint is refused with the reason; the result is read again and claimed before it is handed out.

A family's own code computes some sizes from others, so that no field of config.json can give them another value. A
model whose heads or channels were dropped can only be of its family where these sizes are fields. Which are was tried
with transformers (`tests/compress/prune/test_prune_families.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.compress.prune.kept_layers import kept_fields, kept_spec, kept_tables
from quire.compress.prune.prunable import PrunableCheckpoint, check_kept, refusal
from quire.core.errors import ConfigError
from quire.model.mixers.layer_mixers import own_heads
from quire.model.spec import ModelSpec
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

DERIVED = {
    "head_dim": frozenset(
        {
            "gpt2",
            "gpt_bigcode",
            "gptj",
            "gpt_neo",
            "gpt_neox",
            "opt",
            "bloom",
            "falcon",
            "mpt",
            "stablelm",
            "helium",
            "axk1",
            "biogpt",
            "codegen",
            "ctrl",
            "dbrx",
            "gpt_neox_japanese",
            "modernbert-decoder",
            "openai-gpt",
            "persimmon",
            "xglm",
        }
    ),
    "intermediate_size": frozenset({"bloom", "gpt_neox_japanese", "mpt", "openai-gpt"}),
    "short_factor": frozenset({"phi3"}),
}
"""Field -> the families that have none of it, or no other than the usual one.

`head_dim` is hidden_size / num_attention_heads, `intermediate_size` a multiple of hidden_size, and the length of the
rope's `short_factor` is checked against the former quotient.
"""

AUTO_WIDTH = "block_auto_adjust_ff_dim"
"""Field of LFM2 by which its code computes another width of MLPs than the one that is said."""
EVEN_HEADS = frozenset({"llama", "gemma2", "gemma3_text", "internlm3", "vaultgemma", "arcee", "aria_text", "cwm",
                        "gemma3n_text", "hrm_text", "hyperclovax", "iquestcoder", "jais2",
                        "muse_glimmer_text"})  # fmt: skip
"""Families whose code in transformers refuses a number of heads that does not divide hidden_size, head_dim or not."""


SmallerCheckpoint = tuple[dict[str, "Tensor"], dict[str, Any]]
"""(tensors, config) of the smaller checkpoint; tensors that kept their shape are those that came."""


def drop_layers(tensors: Mapping[str, Tensor], config: Mapping[str, Any], keep: Iterable[int]) -> SmallerCheckpoint:
    """Keep the layers `keep` (ascending, at least one), renumbered (ShortGPT, Men et al. 2024).

    Tensors of layers that the model does not run (predictors of further tokens) go as well. `ConfigError` for a `keep`
    that does not fit, `ModelError` where no config.json of the family says which kinds of layers are left.
    """
    model = PrunableCheckpoint.of(tensors, config)
    kept = check_kept(keep, model.spec.layers, "layers")
    want, tables = kept_spec(model, kept), kept_tables(model, kept)
    prefix = model.family.names["layer"]
    number = re.compile(re.escape(prefix).replace(re.escape("{}"), r"(\d+)"))
    new_number, made = {old: new for new, old in enumerate(kept)}, dict[str, "Tensor"]()
    for name, tensor in tensors.items():
        found = number.match(name)
        if found is None:
            made[name] = tables.get(name, tensor)
        elif int(found[1]) in new_number:
            made[prefix.format(new_number[int(found[1])]) + name[found.end() :]] = tensor
    raw = model.with_fields(num_hidden_layers=len(kept), **kept_fields(model, kept))
    return model.verified(made, raw, want)


def drop_channels(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], keep_by_layer: Sequence[Iterable[int]]
) -> SmallerCheckpoint:
    """Keep the MLP channels `keep_by_layer`: as many in every layer, ascending.

    A channel is a row of up and gate with their biases and a column of down. `ConfigError` for channels that do not
    fit, `ModelError` where there are experts or the family computes the width from others.
    """
    model = PrunableCheckpoint.of(tensors, config)
    if any(model.spec.moe.sparse):
        raise model.refuse("channels of experts cannot be dropped")
    if not all(map(model.spec.has_mlp, range(model.spec.layers))):
        raise model.refuse("some layers have no MLP, and no channels to drop")
    _has_field(model.spec, "intermediate_size", "the width of its MLPs")
    if any(model.spec.streams.sparsity):
        raise model.refuse("which gates pass depends on all channels of a row, and none can be dropped")
    if model.claim.get("down_norm", 0):
        raise model.refuse("a norm spans all channels of an MLP, so those that stay would change")
    widths = {model.spec.at(layer).intermediate for layer in range(model.spec.layers)}
    if len(widths) > 1:
        raise model.refuse("channels of MLPs that differ in their width cannot be dropped")
    kept = _each_layer(model, keep_by_layer, model.spec.at(0).intermediate, "channels")
    made = dict(tensors)
    for layer, channels in enumerate(kept):
        index = torch.tensor(channels)
        for role in ("gate", "up"):
            if not model.name(model.claim.holder(role, layer), layer):
                continue
            holder, rows = model.rows(role, layer)
            if holder == role:
                _take(model, made, holder, layer, rows[index])
        if model.name("gate_up", layer):
            halves = [model.rows(role, layer)[1][index] for role in ("gate", "up")]
            _take(model, made, "gate_up", layer, torch.cat(halves).sort().values)
        _take(model, made, "down", layer, index, inputs=True)
    sizes = tuple(replace(size, intermediate=len(kept[0])) for size in model.spec.sizes)
    want = replace(model.spec, intermediate=len(kept[0]), sizes=sizes)
    as_said = {AUTO_WIDTH: False} if model.spec.family == "lfm2" else {}
    return model.verified(made, model.with_fields(intermediate_size=want.intermediate, **as_said), want)


def drop_heads(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], keep_by_layer: Sequence[Iterable[int]]
) -> SmallerCheckpoint:
    """Keep the query heads `keep_by_layer`: as many in every layer, ascending.

    Key/value heads that no query head reads any more go too; each that stays must keep as many query heads as the
    others. A head is rows of q, k, v and gates with biases, norms and sinks of its own, and columns of o. `head_dim`
    becomes a field of config.json. `ConfigError` for heads that do not fit, `ModelError` where the family computes the
    size of heads from their number, or a norm spans all heads.
    """
    model = PrunableCheckpoint.of(tensors, config)
    spec = model.spec
    check_heads(spec, 1)
    if any(model.config.child(rope).has("short_factor") for rope in ("rope_parameters", "rope_scaling")):
        _has_field(spec, "short_factor", "the factors of its rope")
    if model.claim.get("q_row_norm", 0) or model.claim.get("o_norm", 0):
        raise model.refuse("a norm spans all heads, so those that stay would change")
    if model.family.stacks:
        raise model.refuse("heads whose norms lie one by one cannot be dropped")
    kept = _each_layer(model, keep_by_layer, spec.heads, "heads")
    groups = [_groups(heads, spec.heads // spec.kv_heads, layer) for layer, heads in enumerate(kept)]
    if len({len(g) for g in groups}) > 1:
        raise ConfigError("heads to keep: layers differ in how many key/value heads are left; keep whole groups")
    made = dict(tensors)
    for layer, (heads, pairs) in enumerate(zip(kept, groups, strict=True)):
        _take_heads(model, made, layer, torch.tensor(heads), torch.tensor(pairs))
    check_heads(spec, len(kept[0]))
    want = replace(spec, heads=len(kept[0]), kv_heads=len(groups[0]))
    raw = model.with_fields(num_attention_heads=want.heads, num_key_value_heads=want.kv_heads, head_dim=spec.head_dim)
    return model.verified(made, raw, want)


def check_heads(spec: ModelSpec, count: int) -> None:
    """Raise `ModelError` where no heads of such a model can be dropped, `ConfigError` where `count` cannot be left."""
    _has_field(spec, "head_dim", "the size of its heads")
    if spec.sizes:
        raise refusal(spec, "heads of layers that may differ in how many they have cannot be dropped")
    if spec.kv_source:
        raise refusal(spec, "heads of layers that read another's keys and values cannot be dropped")
    if not own_heads(spec):
        raise refusal(spec, "heads over latents, or of some layers only, cannot be dropped")
    if spec.family in EVEN_HEADS and spec.hidden % count:
        group = spec.heads // spec.kv_heads
        can = [n for n in range(group, spec.heads, group) if spec.hidden % n == 0]
        shares = ", ".join(f"{n} (heads = {1 - n / spec.heads:g})" for n in reversed(can))
        raise ConfigError(
            f"heads: transformers refuses a {spec.family} whose hidden size ({spec.hidden}) is no multiple of its "
            f"heads, of which {count} would be left; {f'leave {shares}' if can else 'leave all of them'}",
            param="heads",
        )


def _take_heads(model: PrunableCheckpoint, made: dict[str, Tensor], layer: int, heads: Tensor, pairs: Tensor) -> None:
    """Leave query heads `heads` and key/value heads `pairs` in the tensors of one layer."""
    spec, fused = model.spec, []
    for role, units in (("q", heads), ("k", pairs), ("v", pairs)):
        holder, rows = model.rows(role, layer)
        rows = rows.view(-1, spec.head_dim)[units].flatten()
        if holder == role:
            _take(model, made, role, layer, rows)
        else:
            fused.append(rows)
    if fused:
        _take(model, made, "qkv", layer, torch.cat(fused).sort().values)
    columns = torch.arange(spec.heads * spec.head_dim).view(-1, spec.head_dim)[heads].flatten()
    _take(model, made, "o", layer, columns, inputs=True)
    for role, width in (("attn_gate", spec.head_dim), ("head_gate", 1)):
        if model.name(role, layer):
            rows = torch.arange(spec.heads * width).view(-1, width)[heads].flatten()
            _take(model, made, role, layer, rows)
    for role, units in (("q_head_norms", heads), ("k_head_norms", pairs), ("sinks", heads)):
        name = model.name(role, layer)
        if name:
            made[name] = made[name].index_select(0, units)


def _take(
    model: PrunableCheckpoint, made: dict[str, Tensor], role: str, layer: int, index: Tensor, inputs: bool = False
) -> None:
    """Leave outputs `index` of a matrix and of its bias, or its `inputs` alone, which no bias has."""
    name, bias = model.name(role, layer), model.name(role, layer, "bias")
    made[name] = made[name].index_select(model.axis(int(inputs)), index)
    if bias and not inputs:
        made[bias] = made[bias].index_select(0, index)


def _has_field(spec: ModelSpec, field: str, what: str) -> None:
    if spec.family in DERIVED[field]:
        raise refusal(spec, f"its code computes {what} from other sizes and takes no other {field}")


def _each_layer(model: PrunableCheckpoint, keep: Sequence[Iterable[int]], count: int, what: str) -> list[list[int]]:
    if model.spec.streams.turns.stack:
        raise model.refuse(f"{what} of layers that run several times cannot be dropped: none is scored for all runs")
    if len(keep) != model.spec.layers:
        raise ConfigError(f"{what} to keep: given for {len(keep)} layers, the model has {model.spec.layers}")
    kept = [check_kept(k, count, f"{what} of layer {layer}") for layer, k in enumerate(keep)]
    if len({len(k) for k in kept}) > 1:
        raise ConfigError(
            f"{what} to keep: {sorted({len(k) for k in kept})} in different layers; an ordinary checkpoint has as many "
            "in each"
        )
    return kept


def _groups(heads: list[int], size: int, layer: int) -> list[int]:
    """The key/value heads that `heads` read, each read by `size` of all heads; `ConfigError` unless by as many."""
    left = [head // size for head in heads]
    counts = {left.count(group) for group in left}
    if len(counts) > 1:
        raise ConfigError(
            f"heads of layer {layer} to keep: {heads!r:.80} leaves key/value heads with {sorted(counts)} query heads; "
            "keep as many of each group"
        )
    return sorted(set(left))
