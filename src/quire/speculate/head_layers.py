"""Layers of heads that draft from hidden rows: read from their folder, and made a model beside the target."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, replace

from quire.core.config import EngineConfig
from quire.core.dtypes import F32
from quire.model.batch import Forward
from quire.model.build import Model, kv_layouts
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Layer, own_attention
from quire.model.net.parts import Embed, Embedding, FusedGatedMlp, GatedMlp, NoNorm, Norm, RmsNorm
from quire.model.spec import ModelSpec
from quire.ops.arrays import Array, dtype_of
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.weights import PackedTable, PieceTable, StoredTable
from quire.speculate.head_file import HeadFile


def row_buffers(config: EngineConfig, target: Model, embed: Embed, ops: Ops) -> tuple[Array, Array]:
    """What the layer reads and what it leaves of each row of a step, [rows, hidden] both."""
    limits = config.scheduler
    rows = max(limits.rows(target.max_model_len), limits.max_num_seqs)
    # Where rows are kept in 16 bits (GPUs), those of both kinds are joined as they are.
    table = embed.table if isinstance(embed, Embedding) else None
    packed = (PackedTable, StoredTable, PieceTable)
    dtype = F32 if table is None or isinstance(table, packed) else ops.row_dtype(dtype_of(table))
    return ops.zeros((rows, target.spec.hidden), dtype), ops.zeros((rows, target.spec.hidden), dtype)


def beside(config: EngineConfig, target: Model, spec: ModelSpec, decoder: Forward) -> Model:
    """The layer of `spec` as a model beside `target`, whose files and weights are yet the target's."""
    layouts = kv_layouts(config.cache, spec, WIDE[target.dtype], decoder.ops)
    return replace(target, spec=spec, decoder=decoder, layouts=layouts, states=(), adapters=None, report={}, notes=(),
                   writing=None)  # fmt: skip


@dataclass(frozen=True)
class HeadLayers:
    """Parts of layers from the tensors of `file`, each of the sizes of `spec`."""

    file: HeadFile
    spec: ModelSpec
    target: Model
    ops: Ops

    def norm(self, name: str) -> Norm:
        """The norm whose weight is called `name`."""
        return RmsNorm(self.file.vector(f"{name}.weight", self.spec.hidden), self.spec.norm_eps)

    def layer(self, base: str, width: int, rope: Array) -> Layer:
        """The layer `base` without a norm before attention; `width`: what its queries, keys and values read."""
        spec, at = self.spec, f"{base}.self_attn"
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return Layer(
            attn_norm=NoNorm(),
            qkv=self.file.linear({f"{at}.q_proj": q, f"{at}.k_proj": kv, f"{at}.v_proj": kv}, width),
            qkv_changes=(),
            qk_norms=None,
            eps=spec.norm_eps,
            rope=rope,
            attend=AttentionSpec(spec.attention_scale),
            o=self.file.linear({f"{at}.o_proj": spec.hidden}, q),
            attn_post_norm=NoNorm(),
            mlp_norm=self.norm(f"{base}.post_attention_layernorm"),
            mlp=self._mlp(f"{base}.mlp"),
            mlp_post_norm=NoNorm(),
            attention=own_attention,
        )

    def _mlp(self, at: str) -> GatedMlp | FusedGatedMlp:
        spec = self.spec
        names: GenericSequence[str] = (f"{at}.gate_proj", f"{at}.up_proj")
        gate_up = self.file.linear(dict.fromkeys(names, spec.intermediate), spec.hidden)
        down = self.file.linear({f"{at}.down_proj": spec.hidden}, spec.intermediate)
        fused = self.ops.fuses_mlp(gate_up.weight, down.weight)
        return (FusedGatedMlp if fused else GatedMlp)(gate_up, down, spec.activation)
