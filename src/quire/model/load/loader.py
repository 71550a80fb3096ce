"""Reads claimed tensors, brings them into canonical form, and packs them into layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.model.disk.opened import Opened
from quire.model.families.rope import Rope
from quire.model.load.packed_cache import PackedCache, find
from quire.model.load.roles import DISK_ROLES, disk_rows, shard
from quire.model.net.decoder import (
    Block,
    Decoder,
    Layer,
    crossed_block,
    own_attention,
    parallel_block,
    parallel_two_norms_block,
    post_norm_block,
    reading_attention,
    sequential_block,
)
from quire.model.net.encoder import backward_bias, load_cross
from quire.model.net.linear import Linear
from quire.model.net.lora import ADAPTED, Adapters
from quire.model.net.mla import load_latent
from quire.model.net.mlp import load_mlp
from quire.model.net.moe import load_moe
from quire.model.net.parts import (
    Clip,
    LayerNorm,
    NoNorm,
    Norm,
    Normed,
    NormSpans,
    Positions,
    Project,
    ProjectedNorm,
    ReplacingNorm,
    RmsNorm,
    Scale,
    SoftCap,
    Step,
)
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.weights import PackedTable, Weight, labelled
from quire.quant.base import Quantizer, QuantScheme, QWeight
from quire.quant.registry import DENSE, matrix_scheme
from quire.quant.registry import load as load_matrix

Progress = Callable[[int, int, str], None]
BLOCKS: dict[str, Block] = {
    "sequential": sequential_block,
    "post_ln": sequential_block,
    "post_norm": post_norm_block,
    "parallel": parallel_block,
    "parallel_two_norms": parallel_two_norms_block,
    "crossed": crossed_block,
}


class Loader:
    """Reads and packs what a checkpoint was found to hold; keeps the account of what became of each role."""

    def __init__(
        self,
        opened: Opened,
        ops: Ops,
        dtype: torch.dtype,
        target: Quantizer | None,
        group: int,
        progress: Progress | None,
        adapters: Adapters | None = None,
        activations: str = "auto",
    ) -> None:
        self.opened, self.ops, self.dtype, self.target, self.group = opened, ops, dtype, target, group
        self.adapters, self.activations = adapters, activations
        self.cache: PackedCache | None = None
        self.report: dict[str, tuple[str, int]] = {}
        self._progress = progress or (lambda done, total, what: None)
        self._done, self._total = 0, sum(i.nbytes for i in opened.source.infos.values())

    def count(self, role: str, kind: str, nbytes: int) -> None:
        """Add `nbytes` of `kind` to the account of `role`."""
        self.report[role] = (kind, nbytes + self.report.get(role, ("", 0))[1])

    def decoder(self, ropes: dict[Rope, Tensor]) -> Decoder:
        """Everything, packed; `ropes` holds the table of each rope of the spec."""
        spec = self.opened.spec
        embed = token_table(self)
        steps = self.embed_steps()
        bias = backward_bias(self)
        layers = tuple(self.layer(i, ropes[spec.rope[i]], bias) for i in range(spec.layers))
        cap = (SoftCap(spec.output_softcap),) if spec.output_softcap else ()
        final = self.final_norm()
        block, narrows = BLOCKS[spec.join], self.adapters is None
        return Decoder(self.ops, embed, steps, layers, final, self.head(embed), cap, block, narrows)

    def embed_steps(self) -> tuple[Step, ...]:
        """What happens between the look-up of the tokens and the first layer."""
        spec, steps = self.opened.spec, list[Step]()
        if spec.embed_scale != 1.0:
            steps.append(Scale(spec.embed_scale))
        if self.opened.claim.get("project_in"):
            steps.append(Project(self.linear(("project_in",), None)))
        if self.opened.claim.get("positions"):
            steps.append(Positions(self.table("positions"), spec.position_offset))
        if self.opened.claim.get("embed_norm"):
            steps.append(Normed(self.norm("embed_norm")))
        return tuple(steps)

    def layer(self, index: int, rope: Tensor, bias: Tensor | None) -> Layer:
        """Layer `index`, packed; `bias` of its scores by distance."""
        spec = self.opened.spec
        q_norm, k_norm = self.vector("q_norm", index), self.vector("k_norm", index)
        alibi = torch.tensor(spec.alibi) if spec.alibi else None
        own = spec.kv_layer(index) == index
        attn_norm, attn_post_norm, mlp_norm, mlp_post_norm = self.block_norms(index)
        qkv, attention = (
            load_latent(self, index)
            if spec.mla.rank
            else (self.linear(("q", "k", "v") if own else ("q",), index), own_attention if own else reading_attention)
        )
        layer = Layer(
            attn_norm=attn_norm,
            qkv=qkv,
            qkv_steps=self.qkv_steps(index),
            qk_norms=None if q_norm is None else (q_norm, q_norm if k_norm is None else k_norm),
            eps=spec.norm_eps,
            rope=rope,
            attend=AttentionSpec(
                spec.attention_scale, spec.windows[index], spec.softcap, self.vector("sinks", index), alibi, bias
            ),
            o=self.linear(("o",), index),
            attn_post_norm=attn_post_norm,
            mlp_norm=mlp_norm,
            mlp=load_moe(self, index) if spec.is_sparse(index) else load_mlp(self, index),
            mlp_post_norm=mlp_post_norm,
            attention=attention,
            cross=load_cross(self, index, rope),
        )
        self._progress(self._done, self._total, f"layer {index}")
        return layer

    def qkv_steps(self, index: int) -> tuple[Step, ...]:
        """What happens to queries, keys and values before rope, per-head norms of one weight aside."""
        spec, steps = self.opened.spec, list[Step]()
        d, keys = spec.head_dim, spec.heads * spec.head_dim
        for role, start, span in (
            ("q_row_norm", 0, keys), ("k_row_norm", keys, spec.kv_heads * d),
            ("q_head_norms", 0, d), ("k_head_norms", keys, d),
        ):  # fmt: skip
            weight = self.vector(role, index)
            if weight is not None:
                if spec.interleaved_rope:
                    rows = disk_rows(role[0], role[0], spec, False, spec.rope[index].dim)
                    weight = weight.flatten()[rows]
                steps.append(NormSpans(weight.flatten(), start, span, spec.norm == "layer", spec.norm_eps))
        if spec.clip_qkv:
            steps.append(Clip(spec.clip_qkv))
        return tuple(steps)

    def head(self, embed: Tensor | PackedTable) -> Linear:
        """The output head; a tied one is the matrix `embed`, or is packed from that table, which stays for look-ups."""
        if isinstance(embed, PackedTable) and not self.opened.claim.get("head"):
            linear = Linear(embed.matrix)
        else:
            linear = self.linear(("head",) if self.opened.claim.get("head") else ("embed",), None)
        self._progress(self._total, self._total, "head")
        return linear

    def block_norms(self, index: int) -> tuple[Norm, Norm, Norm, Norm]:
        """The norms before and after attention, and before and after the MLP, of layer `index`.

        In a post-LN model the norm after an addition is read as the one before what follows, and takes the stream's
        place there.
        """
        if self.opened.spec.join != "post_ln":
            before, after, mlp, after_mlp = (
                self.norm(role, index) for role in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
            )
            return before, after, mlp, after_mlp
        before = ReplacingNorm(self.norm("mlp_post_norm", index - 1)) if index else NoNorm()
        return before, NoNorm(), ReplacingNorm(self.norm("attn_post_norm", index)), NoNorm()

    def final_norm(self) -> Norm:
        """The norm of the rows that want logits, and the projection to the head where there is one."""
        spec = self.opened.spec
        if spec.join == "post_ln":
            norm = self.norm("mlp_post_norm", spec.layers - 1, scale=spec.logit_scale)
        else:
            norm = self.norm("final_norm", scale=spec.logit_scale)
        if not self.opened.claim.get("project_out"):
            return norm
        return ProjectedNorm(norm, self.linear(("project_out",), None))

    def norm(self, role: str, layer: int | None = None, scale: float = 1.0) -> Norm:
        """The norm `role`, its output multiplied by `scale`; x itself where the family has none."""
        spec = self.opened.spec
        if spec.norm == "plain" and DISK_ROLES[role].optional is False:
            return LayerNorm(torch.full((spec.hidden,), scale), None, spec.norm_eps)
        weight = self.vector(role, layer)
        if weight is None:
            return NoNorm()
        if not spec.norm.startswith("layer"):
            return RmsNorm(weight * scale, spec.norm_eps)
        name = self.opened.claim.get(role, layer).get("bias")
        bias = None if name is None else self._read(name).float() * scale
        self.count("norms", "f32", 0 if bias is None else bias.nbytes)
        return LayerNorm(weight * scale, bias, spec.norm_eps)

    def vector(self, role: str, layer: int | None = None) -> Tensor | None:
        """A norm's weight as f32, or None when the checkpoint has none."""
        name = self.opened.claim.get(role, layer).get("weight")
        if name is None:
            return None
        tensor = self._read(name).float() + (1.0 if self.opened.spec.norm.endswith("1p") else 0.0)
        self.count("norms", "f32", tensor.nbytes)
        return tensor

    def table(self, role: str) -> Tensor:
        """A look-up table in the compute dtype, copied out of the mapped file."""
        raw = {s: self._read(name) for s, name in self.opened.claim.get(role).items()}
        tensor = _as_table(raw, matrix_scheme(self.opened.scheme, raw), self.dtype)
        self.count(role, str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        return tensor

    def linear(self, roles: tuple[str, ...], layer: int | None, rows: Tensor | None = None) -> Linear:
        """The matrices of `roles` quantized, fused by rows, put in the order `rows` and packed, with their biases."""
        if rows is None and len(runs := _runs(self.opened, roles, layer)) > 1:
            first, *more = [self.linear(run, layer) for run in runs]
            return replace(first, more=tuple(more))
        kept = find(self.cache, self.opened.spec, roles, layer, rows)
        if kept is not None:
            packed, bias, label = kept.packed, kept.bias, kept.label
        else:
            weight, bias = self.matrix(roles, layer)
            if rows is not None:
                weight, bias = weight.take_rows(rows), None if bias is None else bias[rows]
            packed = weight.pack(self.ops)
            label = labelled(weight.label, packed)
            if self.cache is not None:
                self.cache.put(f"{layer}.{'+'.join(roles)}", packed, bias)
        if bias is not None:
            self.count("biases", "f32", bias.nbytes)
        tied = roles == ("embed",) and not self.opened.claim.get("head")
        self.count("head" if tied else "+".join(roles), label, packed.nbytes)
        if self.adapters is None or layer is None or rows is not None or not ADAPTED.issuperset(roles):
            return Linear(packed, bias)
        return Linear(packed, bias, self.adapters.make_room(roles, layer))

    def matrix(
        self, roles: tuple[str, ...], layer: int | None, expert: int | None = None
    ) -> tuple[QWeight, Tensor | None]:
        """The matrices of `roles` quantized and fused by rows, and their biases (zeros where one has none)."""
        holders = {role: self.opened.claim.holder(role, layer, expert) for role in roles}
        whole = {holder: self._whole(holder, layer, expert) for holder in dict.fromkeys(holders.values())}
        parts = [self._part(role, holder, *whole[holder], layer) for role, holder in holders.items()]
        bias = None
        if any(b is not None for _, b in parts):
            bias = torch.cat([torch.zeros(w.shape[0]) if b is None else b for w, b in parts])
        return QWeight.cat_rows([w for w, _ in parts]), bias

    def dense(self, role: str, layer: int) -> Linear:
        """A matrix that stays f32: what a router sees must not be rounded, for its choice is all or nothing."""
        names = self.opened.claim.get(role, layer)
        packed = QWeight(Weight("f32", self._read(names["weight"]).float())).pack(self.ops)
        bias = self._read(names["bias"]).float().clone() if "bias" in names else None
        self.count(role, "f32", packed.nbytes + (0 if bias is None else bias.nbytes))
        return Linear(packed, bias)

    def _part(
        self, role: str, holder: str, weight: QWeight, bias: Tensor | None, layer: int | None
    ) -> tuple[QWeight, Tensor | None]:
        """The rows of one role, in our order, and of those this rank's."""
        spec = self.opened.spec
        rotated = spec.rope[layer].dim if spec.interleaved_rope and layer is not None else 0
        if layer is not None:
            rows = disk_rows(role, holder, spec, self.opened.family.grouped_qkv and holder == "qkv", rotated)
            if rows is not None:
                weight, bias = weight.take_rows(rows), None if bias is None else bias[rows]
        return shard(weight, bias, role, spec, rank=0, world=1)

    def _whole(self, holder: str, layer: int | None, expert: int | None) -> tuple[QWeight, Tensor | None]:
        """A matrix as it lies on disk, [n, k] in its final format, and its bias as f32."""
        names = self.opened.claim.get(holder, layer, expert)
        raw = {s: self._read(name) for s, name in names.items() if s != "bias"}
        scheme = matrix_scheme(self.opened.scheme, names)
        if self.opened.family.transposed and layer is not None and scheme is DENSE:
            raw = {s: t.t().contiguous() for s, t in raw.items()}
        if holder == "head" and self.opened.spec.unit_head:
            raw["weight"] = torch.nn.functional.normalize(raw["weight"].float())
        try:
            if self.target is None or DISK_ROLES[holder].wide:
                weight = load_matrix(scheme, raw, self.dtype, self.ops.float8_activations(self.dtype))
            else:
                target = self.target.head if holder in ("head", "embed") else self.target
                weight = target.quantize(raw["weight"], self.group)
            weight = _fitted(weight, DISK_ROLES[holder].shape(self.opened.spec), self.activations)
        except ModelError as error:
            raise ModelError(f"{self.opened.folder}: {next(iter(names.values()))}: {error.message}") from None
        bias = self._read(names["bias"]).float().clone() if "bias" in names else None
        return weight, bias

    def _read(self, name: str) -> Tensor:
        self._done += self.opened.source.infos[name].nbytes
        return self.opened.source.tensor(name)


def token_table(loader: Loader) -> Tensor | PackedTable:
    """The table of tokens: packed where the file has it quantized, or where it is the head with the same bits."""
    claim, tied = loader.opened.claim, not loader.opened.claim.get("head")
    quantized = matrix_scheme(loader.opened.scheme, claim.get("embed")) is not DENSE
    if not loader.ops.reads_packed_tables or not (quantized or (tied and loader.target is None)):
        return loader.table("embed")
    return PackedTable(loader.linear(("embed",), None).weight, rounded=loader.dtype is torch.bfloat16)


def _fitted(weight: QWeight, shape: tuple[int, ...], activations: str) -> QWeight:
    """The weight with the activations `--activations` asks for; `ModelError` when it is not of `shape`."""
    if weight.shape != shape:
        raise ModelError(f"is {list(weight.shape)}, the config asks for {list(shape)}")
    return weight if activations == "auto" else weight.with_activations(int(activations.removeprefix("int")))


def _runs(opened: Opened, roles: tuple[str, ...], layer: int | None) -> list[tuple[str, ...]]:
    """`roles` cut where the format on disk changes, so that each run can be one matrix."""

    def form(role: str) -> str:
        names = opened.claim.get(opened.claim.holder(role, layer), layer)
        return matrix_scheme(opened.scheme, names).name

    return [tuple(run) for _, run in groupby(roles, key=form)]


def _as_table(raw: Mapping[str, Tensor], scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """The numbers of a look-up table, which are copied or taken out of their format."""
    return raw["weight"].to(dtype, copy=True) if "weight" in raw else scheme.load(raw, dtype).dequantize().to(dtype)
