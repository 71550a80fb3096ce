"""Attention of models whose code is transformers': its attention interface, answered by our op over the paged cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.core.dtypes import F32, Dtype
from quire.core.errors import ModelError
from quire.model.batch import Batch
from quire.model.transformers_backend.detect import padded
from quire.ops.arrays import Array, to_torch
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVCache, KVLayout, LayerCache

INTERFACE = "quire_paged"
LARGEST_HEAD = 512
KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
         "output_attentions", "output_hidden_states", "return_dict", "cache_position", "output_router_logits",
         "position_embeddings", "logits_to_keep"}  # fmt: skip
"""What modules hand to an attention function that it honours, or that does not change a score. Others are refused."""
SPARE_TOKENS = 32
"""Room of a site that is called without caches."""


@dataclass
class AttentionSite:
    """One attention of the model, found when it is first called: its sizes, its facts, its cache in this step."""

    index: int
    heads: int
    layout: KVLayout
    value_dim: int
    attend: AttentionSpec
    called: bool = False


@dataclass
class Bridge:
    """Stands between transformers' attention modules, which know only themselves, and the step that is being run.

    `sites`: by module, in the order of the first calls. `batch`, `caches` are those of the step, None between steps.
    Without caches (the trial) each site has
    `spare` blocks of its own.
    """

    ops: Ops
    block_size: int
    dtype: Dtype
    sites: dict[int, AttentionSite] = field(default_factory=dict)
    spare: dict[int, KVCache] = field(default_factory=dict)
    batch: Batch | None = None
    caches: Sequence[LayerCache] = ()
    views: Sequence[Batch] = ()

    @functools.cached_property
    def table(self) -> Array:
        """Table of a rope that turns nothing, for any position."""
        return self.ops.zeros((1 << 27, 2, 0))

    def begin(self, batch: Batch | None, caches: Sequence[LayerCache] = (), views: Sequence[Batch] = ()) -> None:
        """The step whose rows the next forward pass holds."""
        self.batch, self.caches, self.views = batch, caches, views
        for site in self.sites.values():
            site.called = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        """q [1, heads, T, d], k and v [1, kv_heads, T, d] -> [1, T, heads, d of v]; keys and values are cached.

        Heads are padded with zeros to one size that the kernels read: that changes no score and no value.
        """
        site = self.sites.get(id(module)) or self._new_site(module, q, k, v, given)
        if site.called or self.batch is None:
            raise ModelError(f"{type(module).__name__}: is called more than once in a step, for which no cache is kept")
        site.called = True
        batch = self.views[site.index] if self.views else self.batch
        cache = self.caches[site.index][0] if self.caches else self._spare(site)
        d = site.layout.head_dim
        qkv = torch.cat([F.pad(x[0].float(), (0, d - x.shape[-1])).transpose(0, 1) for x in (q, k, v)], 1)
        rows = self.ops.put(qkv.flatten(1).contiguous())
        self.ops.next_layer()
        self.ops.rope_and_cache(rows, batch.positions, self.table, batch.slots, cache, None, 1.0)
        out = self.ops.attention(rows, cache, batch.cu_q, batch.context, batch.block_tables, site.attend, batch.tree)
        return to_torch(out).view(1, len(qkv), site.heads, d)[..., : site.value_dim].to(q.dtype, copy=True)

    def _new_site(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> AttentionSite:
        """Sizes and score function of an attention from its first call; `ModelError` for one we cannot compute."""
        what = type(module).__name__
        odd = sorted(name for name, value in given.items() if name not in KNOWN and value is not None)
        if odd:
            raise ModelError(f"{what}: attention with {', '.join(odd)} is not supported")
        if not getattr(module, "is_causal", True) or given.get("is_causal") is False:
            raise ModelError(f"{what}: attention that is not causal is not supported")
        if k.shape[2] != q.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
            raise ModelError(f"{what}: queries {list(q.shape)} do not belong to keys {list(k.shape)}")
        d = padded(max(q.shape[-1], v.shape[-1]))
        if d > LARGEST_HEAD:
            raise ModelError(f"{what}: heads of {d} numbers are not supported, at most {LARGEST_HEAD}")
        scale, sinks = given.get("scaling"), given.get("s_aux")
        spec = AttentionSpec(
            q.shape[-1] ** -0.5 if scale is None else float(scale),
            int(given.get("sliding_window") or 0),
            float(given.get("softcap") or 0.0),
            None if sinks is None else self.ops.put(sinks.detach().float().flatten().contiguous()),
        )
        layout = KVLayout(self.block_size, k.shape[1], d, self.dtype)
        site = self.sites[id(module)] = AttentionSite(len(self.sites), q.shape[1], layout, v.shape[-1], spec)
        return site

    def _spare(self, site: AttentionSite) -> KVCache:
        if site.index not in self.spare:
            layout = replace(site.layout, dtype=F32)
            self.spare[site.index] = self.ops.allocate_cache(layout, SPARE_TOKENS)
        return self.spare[site.index]


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call; arguments as its attention interface has them."""
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__}: attention with a mask or bias of its own is not supported")
    bridge: Bridge = module.quire_bridge  # type: ignore[assignment]
    return bridge.attend(module, query, key, value, given), None
