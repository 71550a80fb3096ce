"""The KV cache in memory: who has which part of it, and the work on whole blocks."""

from __future__ import annotations

from quire.core.plan import StepPlan
from quire.model.build import Model
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.run.budget import KVPlan


class Caches:
    """Keys and values of all layers: `own`, each once, `of_layer`, by layer, and the layers' `group_of` block tables.

    On a GPU a block behind the last one, `pad_block`, takes what rows that pad a step write.
    """

    def __init__(self, model: Model, ops: Ops, kv: KVPlan) -> None:
        self._ops = ops
        self.block_size, self.pad_block = kv.sizes.block_size, kv.blocks
        spare = 0 if ops.gpu is None else 1
        self.own: list[KVCache] = [ops.allocate_cache(model.layouts[i], kv.blocks + spare) for i in kv.groups.widest]
        homes = [kv.groups.home(model.spec.kv_layer(i)) for i in range(model.spec.layers)]
        self.of_layer = [self.own[place] for _, place in homes]
        self.group_of = [group for group, _ in homes]

    @property
    def blocks(self) -> int:
        """How many there are, that of a GPU's padding included."""
        return self.own[0].keys.shape[0]

    def prepare(self, plan: StepPlan) -> None:
        """Wipe and copy what `plan` says, before its rows are computed."""
        if plan.scrub:
            self.zero(plan.scrub)
        if plan.copies:
            self._ops.copy_blocks(self.own, plan.copies)

    def zero(self, blocks: tuple[int, ...]) -> None:
        """Wipe `blocks` in every layer."""
        self._ops.zero_blocks(self.own, blocks)
