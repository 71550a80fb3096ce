"""Models without a row in the table, run: transformers' modules around our attention, cache and matrices.
See docs/design/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.core.errors import ModelError
from quire.model.batch import Batch
from quire.model.families.rope import NO_ROPE
from quire.model.spec import ModelSpec
from quire.model.transformers_backend.attention_bridge import INTERFACE, Bridge, paged_attention
from quire.model.transformers_backend.detect import TransformersModel
from quire.model.transformers_backend.matrices import Packer, SameInEveryBatch, expert_counts
from quire.model.transformers_backend.trial_run import check_windows, forward, try_out
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import CacheLayout, KVLayout, LayerCache
from quire.ops.lazy import torch_dtype
from quire.quant.base import Quantizer


@dataclass(frozen=True)
class TransformersDecoder:
    """Tokens to logits by transformers' modules. Steps are not recorded: most of one runs in torch."""

    ops: Ops
    model: Any
    bridge: Bridge
    recordable: bool = False

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Logits f32 [R, V] of the rows `batch.logit_rows`; keys and values of all T rows are written to `caches`."""
        self.bridge.begin(batch, caches, views)
        threads = torch.get_num_threads()
        # One thread: where torch cuts work between threads depends on the number of rows, and its threads would fight
        # with those of the ops.
        torch.set_num_threads(1)
        try:
            with torch.no_grad(), SameInEveryBatch():
                return self.ops.put(forward(self.model, batch))
        finally:
            torch.set_num_threads(threads)
            self.bridge.begin(None)

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """One step whose logits nobody wants."""
        self(batch, caches)
        return caches


def load_borrowed(
    found: TransformersModel, ops: Ops, dtype: torch.dtype, target: Quantizer | None, group: int, layout: KVLayout
) -> tuple[TransformersDecoder, ModelSpec, tuple[CacheLayout, ...], dict[str, tuple[str, int]]]:
    """The decoder, the spec with what its attention was found to be, a cache layout per attention, and the account.

    `layout`: block size and dtype of the cache. `ModelError` when tensors do not fit or the trial fails.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, paged_attention)
    model = _read(found)
    bridge = Bridge(ops, layout.block_size, layout.dtype)
    for module in model.modules():
        object.__setattr__(module, "quire_bridge", bridge)
    try_out(found, model, bridge)
    sites = sorted(bridge.sites.values(), key=lambda site: site.index)
    check_windows(found, sites)
    report = Packer(ops, dtype, target, group, expert_counts(found.config)).pack(model)
    spec = replace(
        found.spec,
        layers=len(sites),
        rope=(NO_ROPE,) * len(sites),
        windows=tuple(site.attend.window for site in sites),
        heads=sites[0].heads,
        kv_heads=sites[0].layout.kv_heads,
        head_dim=sites[0].layout.head_dim,
    )
    return TransformersDecoder(ops, model, bridge), spec, tuple((site.layout,) for site in sites), report


def _read(found: TransformersModel) -> Any:
    """transformers' model with the folder's weights, of which none may be missing or left over."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, about = found.code.from_pretrained(
            found.folder, config=found.config, dtype=torch_dtype(found.dtype), attn_implementation="eager",
            use_safetensors=True, experts_implementation="eager", trust_remote_code=False, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:
        raise ModelError(f"{found.folder}: transformers cannot load it: {type(error).__name__}: {error}") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(str(name) for name in about.get(what) or ()):
            raise ModelError(f"{found.folder}: {what.replace('_', ' ')}: {'; '.join(names[:6])}")
    return model.eval()
