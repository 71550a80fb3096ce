"""Who keeps the layers that are loaded, as the options ask. See docs/design/offload.md."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.model.disk.headers import ModelHeaders
from quire.model.load.placement import InMemory, LayerKeeper
from quire.model.offload.budget import Budget, allowed, folder
from quire.model.offload.disk import DiskKeeper
from quire.model.offload.expert_offload import ExpertKeeper
from quire.model.offload.shared_host import GatheredKeeper, Shards, SharedKeeper
from quire.ops.backend import Ops


def keeper(config: EngineConfig, opened: ModelHeaders, ops: Ops, shards: Shards | None) -> LayerKeeper:
    """Keeper of a decoder, for options that model and backend allow (`quire.core.exclusions`).

    `shards`: the memory that replicas share.
    """
    asked = config.offload
    if asked.fully_shard:
        assert shards is not None, "the table of exclusions says so"
        return SharedKeeper(ops, shards.file) if len(shards.hosts) == 1 else GatheredKeeper(ops, shards)
    if asked.from_file:
        kept = ExpertKeeper if asked.weight_offload == "experts" else DiskKeeper
        return kept(ops, budget(config, opened), folder(config))
    if asked.cpu_offload_gb:
        from quire.model.offload.host import HostKeeper

        return HostKeeper(ops, int(asked.cpu_offload_gb * 2**30), budget(config, opened).layers)
    return InMemory()


def budget(config: EngineConfig, opened: ModelHeaders) -> Budget:
    """What this process may take, and how much there is of each layer on disk."""
    sizes = {place.layer: 0 for _, place in opened.claim.parts}
    for (_, place), parts in opened.claim.parts.items():
        sizes[place.layer] += sum(opened.source.infos[name].nbytes for name in parts.values())
    layers = tuple(sizes.get(i, 0) for i in range(opened.spec.layers))
    return Budget(allowed(config), layers, sizes.get(None, 0))
