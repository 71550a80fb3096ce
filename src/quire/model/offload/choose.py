"""Who keeps the layers that are loaded, as the options ask."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.model.disk.opened import Opened
from quire.model.load.keeping import InMemory, Keeper
from quire.model.offload.budget import Budget, allowed, folder
from quire.model.offload.disk import DiskKeeper
from quire.model.offload.experts import ExpertKeeper, check_experts
from quire.model.offload.gathered import GatheredKeeper
from quire.model.offload.shards import Shards, SharedKeeper
from quire.ops.backend import Ops


def keeper(config: EngineConfig, opened: Opened, ops: Ops, shards: Shards | None) -> Keeper:
    """That of a decoder. `shards`: the memory that replicas share.

    `ConfigError` where the model or the backend cannot do what is asked.
    """
    asked = config.offload
    if asked.fully_shard:
        if shards is None or ops.cpu is None or ops.refers:
            why = (
                "engines of this process have none to share with; use quire serve"
                if shards is None
                else (f"the memory of backend {ops.name} is no other process's; choose --device cpu, without --ops")
            )
            raise ConfigError(f"--fully-shard: {why}", param="fully_shard")
        return SharedKeeper(shards.file) if len(shards.hosts) == 1 else GatheredKeeper(ops.cpu, shards)
    if asked.from_file:
        _check(asked.weight_offload, opened, ops)
        assert ops.cpu is not None
        if asked.weight_offload == "experts":
            check_experts(opened.spec.moe.sparse)
            return ExpertKeeper(ops.cpu, budget(config, opened), folder(config))
        return DiskKeeper(ops.cpu, budget(config, opened), folder(config))
    if asked.cpu_offload_gb:
        if ops.gpu is None or ops.refers:
            raise ConfigError(
                f"--cpu-offload-gb: backend {ops.name} has no memory of its own beside the host's, or an op that reads "
                "weights runs elsewhere; --weight-offload disk is for models larger than the host's memory",
                param="cpu_offload_gb",
            )
        from quire.model.offload.host import HostKeeper

        return HostKeeper(ops.gpu, int(asked.cpu_offload_gb * 2**30), budget(config, opened).layers)
    return InMemory()


def budget(config: EngineConfig, opened: Opened) -> Budget:
    """What this process may take, and how much there is of each layer on disk."""
    sizes = {place.layer: 0 for _, place in opened.claim.parts}
    for (_, place), parts in opened.claim.parts.items():
        sizes[place.layer] += sum(opened.source.infos[name].nbytes for name in parts.values())
    layers = tuple(sizes.get(i, 0) for i in range(opened.spec.layers))
    return Budget(allowed(config), layers, sizes.get(None, 0))


def _check(offload: str, opened: Opened, ops: Ops) -> None:
    option = f"--weight-offload {offload}"
    if ops.gpu is not None:
        raise _refusal(f"{option} is for the CPU's memory; --cpu-offload-gb is for a GPU's")
    if ops.cpu is None or ops.refers:
        raise _refusal(f"{option}: the torch reference reads weights of its own; choose --device cpu, without --ops")
    if opened.spec.encoder.layers:
        raise _refusal(f"{option}: {opened.spec.family!r} has an encoder, whose layers would all stay in memory")


def _refusal(message: str) -> ConfigError:
    return ConfigError(message, param="weight_offload")
