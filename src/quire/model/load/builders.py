"""A decoder from what a checkpoint holds: which parts a layer is made of, and the matrices that each part asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from quire.core.dtypes import F32
from quire.model.families.rope import Rope
from quire.model.load.altup import of_first
from quire.model.load.encoder import backward_bias
from quire.model.load.hierarchical import run_again
from quire.model.load.layer_ending import load_ending, load_inputs
from quire.model.load.layer_mixers import MIXERS
from quire.model.load.moe import load_beside, load_moe
from quire.model.load.parts import (
    in_runs,
    load_block_norms,
    load_final_norm,
    load_mlp,
    load_norm,
    load_o,
    load_table,
)
from quire.model.load.placement import Unplaced, held_bytes
from quire.model.load.reader import WeightReader
from quire.model.load.roles import disk_rows
from quire.model.load.several_streams import load_block, load_entry, load_exit
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.net.decoder import (
    Block,
    Decoder,
    Inputs,
    Layer,
    ToLogits,
    crossed_block,
    ended_block,
    own_block,
    parallel_block,
    parallel_two_norms_block,
    post_norm_block,
    sequential_block,
    single_block,
    twin_block,
)
from quire.model.net.layer_ending import InputsOfTokens, KeysAsValues
from quire.model.net.parts import (
    Clip,
    Embedding,
    Linear,
    Mlp,
    NoNorm,
    Norm,
    Normed,
    NormSpans,
    Positions,
    Product,
    Project,
    RowChange,
    RowNorm,
    Scale,
    ScaledQueries,
    SoftCap,
    absent,
    scaled,
)
from quire.model.net.passing import passing_block
from quire.model.net.pipeline_parallel import NoHead
from quire.model.net.row_changes import HeadLayerNorm, Rotated
from quire.model.net.short_values import LengthenedValues, ShortenedHeads
from quire.ops.arrays import as_f32
from quire.ops.attention_spec import AttentionSpec
from quire.ops.weights import PackedTable

BLOCKS: dict[str, Block] = {
    "sequential": sequential_block,
    "post_ln": sequential_block,
    "normed_stream": sequential_block,
    "post_norm": post_norm_block,
    "ended": ended_block,
    "own": own_block,
    "parallel": parallel_block,
    "parallel_two_norms": parallel_two_norms_block,
    "crossed": crossed_block,
    "single": single_block,
    "twins": twin_block,
    "passing": passing_block,
}


def load_decoder(reader: WeightReader, ropes: Mapping[Rope, Unplaced]) -> Decoder:
    """Everything that the reader's share has, packed and on its device, layer by layer. `ropes` holds the table of each
    rope of the spec, there. A part that is another stage's has no numbers.
    """
    spec, layers, span = reader.opened.spec, list[Layer](), reader.share.span(reader.opened.spec)
    embed: Unplaced | PackedTable = reader.place(np.empty(0, F32))
    changes: tuple[RowChange, ...] = ()
    final: Norm = NoNorm()
    head: ToLogits = NoHead()
    inputs: Inputs | None = None
    with reader.part():
        first = reader.share.role("embed", spec)[0] if reader.share.world > 1 else None
        bias = reader.place(backward_bias(reader))
        if span.start == 0:
            embed, changes = reader.once("table", lambda: load_table(reader)), reader.place(embed_changes(reader))
        if spec.inputs.width:
            inputs = of_first(reader, load_inputs(reader))
            if span.start:
                looked_up = Embedding(reader.once("table", lambda: load_table(reader)), first)
                inputs = InputsOfTokens(looked_up, embed_changes(reader), inputs)
            inputs = reader.place(inputs)
    made = dict[int, Layer]()
    for i in span:
        with reader.part(i):
            layer = load_layer_once(reader, i, ropes[spec.rope[i]], bias, made)
            layers.append(reader.keeper.take(i, layer))
    cap = (SoftCap(spec.output_softcap),) if spec.output_softcap else ()
    with reader.part(span.stop):
        if span.stop == spec.layers:
            final = load_final_norm(reader)
            final = reader.place(load_exit(reader, final) if spec.streams.count else final)
        if span.stop == spec.layers or reader.share.head is not None:
            head = reader.place(load_head(reader, embed))
    reader.tell("head", last=True)
    block, narrows = BLOCKS[spec.join], reader.adapters is None
    kept = reader.keeper.finish(layers, held_bytes((embed, changes, final, head)))
    table = Embedding(embed, first)
    return Decoder(reader.ops, table, changes, kept.layers, final, head, cap, block, narrows, kept.source, inputs)


def embed_changes(reader: WeightReader) -> tuple[RowChange, ...]:
    """What happens between the look-up of the tokens and the first layer."""
    spec, changes = reader.opened.spec, list[RowChange]()
    if spec.embed_scale != 1.0:
        changes.append(Scale(spec.embed_scale))
    if reader.opened.claim.get("project_in"):
        changes.append(Project(reader.linear(("project_in",), None)))
    if reader.opened.claim.get("positions") or reader.opened.claim.get("token_types"):
        changes.append(Positions(load_positions(reader), spec.position_offset))
    if spec.edges.sinusoids:
        table: Unplaced = spec.edges.positions(spec.max_position + spec.position_offset, spec.hidden)
        reader.count("rope", "f32", table.nbytes)
        changes.append(Positions(table, spec.position_offset))
    if reader.opened.claim.get("embed_norm") or spec.edges.normed:
        changes.append(Normed(load_norm(reader, "embed_norm")))
    if spec.join == "normed_stream":
        changes.append(Normed(load_norm(reader, "attn_norm", 0)))
    if spec.streams.count:
        changes.append(load_entry(reader))
    return tuple(changes)


def load_positions(reader: WeightReader) -> Unplaced:
    """Learned positions; with types of tokens, those of the first text, then those of the second ..., [types rows,
    hidden] f32. Without learned positions the types alone, as often."""
    claim, spec = reader.opened.claim, reader.opened.spec
    if not claim.get("token_types"):
        return reader.table("positions")
    table = as_f32(reader.table("positions")) if claim.get("positions") else np.zeros((spec.max_position, 1), F32)
    return np.concatenate([table + one for one in as_f32(reader.table("token_types"))])


def load_layer_once(
    reader: WeightReader, index: int, rope: Unplaced, bias: Unplaced | None, made: dict[int, Layer]
) -> Layer:
    """Layer `index` on the device. `made`: layers whose weights later ones have, too, none in other models."""
    spec, home = reader.opened.spec, reader.opened.spec.weight_layer(index)
    if not spec.streams.turns.stack:
        found: Layer = reader.place(load_layer(reader, index, rope, bias))
        return found
    if home not in made:
        made[home] = reader.place(load_layer(reader, home, rope, bias))
    return (
        made[home] if home == index else replace(made[home], block=reader.place(run_again(reader, index, made[home])))
    )


def load_layer(reader: WeightReader, index: int, rope: Unplaced, bias: Unplaced | None) -> Layer:
    """Layer `index`, packed; `bias` of its scores by distance."""
    spec = reader.local
    norms, rows = head_norms(reader, index), rope
    if spec.late_norms:  # turned before, by `qkv_changes`
        rows = rope[:, :, :0]
    alibi: Unplaced = np.array(spec.alibi, F32) if spec.alibi else None
    attn_norm, attn_post_norm, mlp_norm, mlp_post_norm = load_block_norms(reader, index)
    block: Block | None = None
    if spec.streams.count:
        block, attn_norm = load_block(reader, index, attn_norm), NoNorm()
    mixer = mixer_of(spec, index)
    qkv, attention, cross = MIXERS[type(mixer)](reader, index, rope)
    layer = Layer(
        attn_norm=attn_norm,
        qkv=qkv,
        qkv_changes=qkv_changes(reader, index, rope),
        qk_norms=norms,
        eps=spec.norm_eps,
        rope=rows,
        attend=AttentionSpec(
            spec.at(index).attention_scale,
            spec.windows[index],
            spec.softcap,
            reader.vector("sinks", index),
            alibi,
            bias,
            after=spec.later_seen(index),
            behind=bias.shape[1] // 2 if bias is not None and spec.bidirectional else 0,
        ),
        o=load_result(reader, mixer.out, index) if mixer.out else absent,
        attn_post_norm=attn_post_norm,
        mlp_norm=mlp_norm,
        mlp=load_mlp_or_experts(reader, index) if spec.has_mlp(index) else absent,
        mlp_post_norm=mlp_post_norm,
        attention=attention,
        cross=cross,
        alone=not spec.has_mlp(index),
        ending=load_ending(reader, index) if spec.join == "ended" else None,
        block=block,
    )
    reader.tell(f"layer {index}")
    return layer


def load_result(reader: WeightReader, role: str, index: int) -> Product:
    """The last matrix `role` of a mixer, which reads less of a head than there is where values are short."""
    own, spec = load_o(reader, role, index), reader.local.at(index)
    return ShortenedHeads(own, spec.value_head, spec.head_dim) if spec.value_head and role == "o" else own


def head_norms(reader: WeightReader, index: int) -> tuple[Unplaced, Unplaced] | None:
    """Weights [head_dim] of rmsnorms of each head of queries and of keys of layer `index`, if there are any."""
    spec = reader.local
    if spec.unit_norms and spec.unit_norms[index]:
        ones: Unplaced = np.ones(spec.head_dim, F32)
        return ones, ones
    if spec.norm.startswith("layer"):
        return None
    q_norm, k_norm = reader.vector("q_norm", index), reader.vector("k_norm", index)
    return None if q_norm is None else (q_norm, q_norm if k_norm is None else k_norm)


def load_mlp_or_experts(reader: WeightReader, index: int) -> Mlp:
    """What layer `index` has behind its mixer, in runs where the reader makes any."""
    spec = reader.opened.spec

    def dense() -> Mlp:
        return in_runs(reader, lambda run: scaled(load_mlp(run, index), spec.factors.mlp_out))

    def experts() -> Mlp:
        return in_runs(reader, lambda run: load_moe(run, index), bool(spec.moe.input_scores))

    if not spec.is_sparse(index):
        return dense()
    assert spec.factors.mlp_out == 1.0, "what multiplies all that experts make is a factor of their weights (Routing)"
    return load_beside(reader, index, dense(), experts()) if spec.moe.beside or spec.moe.late else experts()


def qkv_changes(reader: WeightReader, index: int, rope: Unplaced) -> tuple[RowChange, ...]:
    """What happens to queries, keys and values before rope, per-head rmsnorms of one weight aside.

    A norm of whole rows is given this rank's columns, which `parallel_decoder` puts beside those of the others.
    """
    spec, changes = reader.local.at(index), list[RowChange]()
    d, keys = spec.head_dim, spec.heads * spec.head_dim
    own = reader.local.kv_layer(index) == index and reader.local.attends(index)
    if own and not reader.local.has_values(index):
        changes.append(KeysAsValues(keys, spec.kv_heads * d))
    if own and spec.value_head:
        changes.append(LengthenedValues(keys + spec.kv_heads * d, spec.value_head, d))
    for role, start, span in (
        ("q_row_norm", 0, keys), ("k_row_norm", keys, spec.kv_heads * d),
        ("q_head_norms", 0, d), ("k_head_norms", keys, d),
    ):  # fmt: skip
        weight = reader.vector(role, index)
        if weight is not None:
            if spec.interleaved_rope:
                rows = disk_rows(role[0], role[0], spec, False, spec.rope[index].dim)
                weight = weight.flatten()[rows]
            kind = RowNorm if role.endswith("row_norm") else NormSpans
            changes.append(kind(weight.flatten(), start, span, spec.norm == "layer", spec.norm_eps))
    if own and spec.normed_values:
        ones: Unplaced = np.ones(spec.kv_heads * d, F32)
        changes.append(NormSpans(ones, keys + spec.kv_heads * d, d, False, spec.norm_eps))
    if spec.clip_qkv:
        changes.append(Clip(spec.clip_qkv))
    turned = spec.kv_heads * d if spec.kv_layer(index) == index else 0
    for role, start, width in (("q_norm", 0, keys), ("k_norm", keys, turned)) if spec.norm.startswith("layer") else ():
        weight = reader.vector(role, index)
        if weight is not None:
            changes.append(HeadLayerNorm(weight, reader.vector(role, index, "bias"), start, width, spec.norm_eps))
    if spec.late_norms:
        changes.append(Rotated(rope, keys + turned, d))
    scale = spec.query_scale
    if scale.step and scale.layers[index]:
        factors = reader.once("query factors", lambda: scale.factors(spec.max_length))
        changes.append(ScaledQueries(factors, keys, scale.step, scale.ahead))
    return tuple(changes)


def load_head(reader: WeightReader, embed: Unplaced | PackedTable) -> Linear:
    """The output head; a tied one is the matrix `embed`, or is packed from that table, which stays for look-ups."""
    own = reader.share.head is None  # a stage that shares the head has other rows of it than of the table
    bias = reader.vector("head_bias")
    if isinstance(embed, PackedTable) and not reader.opened.claim.get("head") and own:
        return Linear(embed.matrix, bias)
    head = reader.linear(("head",), None)
    return head if bias is None else replace(head, bias=bias)
