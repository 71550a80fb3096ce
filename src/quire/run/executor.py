"""What computes steps on one device: a loaded share of a model, the memory of its cache, and the steps over it.
See docs/design/steps.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.speculation import Speculation
from quire.features.kv_store.run_block_bytes import own_bytes, shared_bytes
from quire.model.build import Model
from quire.model.net.hidden_taps import Taps
from quire.ops.backend import Ops
from quire.run.blocks import Blocks, StoredBytes
from quire.run.caches import Caches
from quire.run.cpu_step import CpuStep
from quire.run.kernel_tuning import tune
from quire.run.kv_budget import KVPlan, gpu_cache_bytes
from quire.run.step import LocalStep, ModelStep
from quire.run.step_sizes import LOGITS_AT_ONCE, graph_bytes


class DraftingFacts(Protocol):
    """What drafts: `model`, which may keep keys and values `beside` the target's."""

    @property
    def asked(self) -> Speculation:
        """What was asked for."""
        ...

    @property
    def model(self) -> Model | None:
        """The model, or this rank's share of it; None where none drafts."""
        ...

    @property
    def beside(self) -> tuple[Model, ...]:
        """(`model`,) where it keeps keys and values in the engine's blocks, else ()."""
        ...

    @property
    def taps(self) -> Taps | None:
        """The hidden rows that each step of the target leaves."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether every rank computes it, not the first alone."""
        ...

    @property
    def block_rows(self) -> int:
        """Rows of a sequence in one pass of the model, each of which is a sequence of its own to the step."""
        ...

    @property
    def first_rank_only(self) -> bool:
        """Whether a part of the blocks is the first rank's alone."""
        ...

    def part(self, caches: Caches) -> Caches:
        """What the draft model sees of the blocks."""
        ...


@dataclass(frozen=True)
class Allocated:
    """The memory of a cache and what computes with it, warmed up: steps of the target and of a model that drafts."""

    caches: Caches
    blocks: Blocks
    step: ModelStep
    drafts: ModelStep | None


class Executor(Protocol):
    """Computes on one device, or on those of all ranks.

    `models`: all that keep keys and values in the blocks, `model` first.
    """

    config: EngineConfig
    model: Model
    models: tuple[Model, ...]
    ops: Ops

    def profile(self, shape: KVPlan, limits: SchedulerConfig, kept: int = 0) -> int:
        """Bytes that a GPU has left for keys and values beside the largest step of `limits`, which is run, and beside
        `kept` bytes for what the first rank has alone."""
        ...

    def allocate(self, kv: KVPlan, limits: SchedulerConfig) -> Allocated:
        """Take the memory that `kv` and the bounds of a step say, and do what the first step would wait for."""
        ...

    def change_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        """Load the adapter in `folder`, in the place of that of its name (`replaces`); without a folder unload it.

        `ConfigError` or `ModelError` when that cannot be: nothing has changed then.
        """
        ...

    def check(self) -> None:
        """`RankFailure` when another rank has ended."""
        ...

    @property
    def killed(self) -> bool:
        """Whether another rank was killed from outside, by somebody or for want of memory."""
        ...

    def bubbles(self, seconds: float) -> tuple[float, ...]:
        """Bubbles of each rank of a pipeline on one host, the share of the `seconds` of all steps that it waited for
        others."""
        ...

    def close(self) -> None:
        """End what computes elsewhere."""
        ...


class LocalExecutor:
    """The `Executor` of this process, which every rank has.

    `config`: this rank's; `drafting`: None where nothing drafts, or the first rank alone.
    """

    def __init__(self, config: EngineConfig, model: Model, ops: Ops, drafting: DraftingFacts | None) -> None:
        self.config, self.model, self.ops, self.drafting = config, model, ops, drafting
        self.models = (model, *(() if drafting is None else drafting.beside))

    def profile(self, shape: KVPlan, limits: SchedulerConfig, kept: int = 0) -> int:
        """Implement `Executor`."""
        from quire.run.gpu_step import GpuStep

        runtime, model, caches = self.ops.runtime, self.model, Caches(self.models, self.ops, shape)
        taps = None if self.drafting is None else self.drafting.taps
        step = GpuStep(model, self.ops, shape, limits, caches.part(0), self._record_steps, taps)
        kept += graph_bytes(step.graph_sizes, model.spec.vocab_size)
        if step.graph_sizes:  # their memory is a pool of its own, beside that of the largest step
            kept += runtime.peak(lambda: step.profile(step.graph_sizes[-1]))
        if model.adapters is not None:
            kept += model.adapters.extensions.left  # adapters may come while the engine runs
        return gpu_cache_bytes(runtime, self.config.cache.gpu_memory_utilization, step.profile) - kept

    def allocate(self, kv: KVPlan, limits: SchedulerConfig) -> Allocated:
        """Implement `Executor`: what any rank takes of it."""
        model, drafting = self.model, self.drafting
        caches = Caches(self.models, self.ops, kv)
        blocks = Blocks(caches, self.ops, self._stored(caches))
        trees = drafting is not None and drafting.asked.tree is not None
        taps = None if drafting is None else drafting.taps
        step = self._step(model, kv, limits, caches.part(0), taps)
        step.warm_up(trees)
        if isinstance(step, CpuStep):
            tune(step, self.config, model.weight_bytes if self._timed_by_weights else 0)
        drafts = None
        if drafting is not None and drafting.model is not None:
            # Every row of a block has logits, whose memory is kept for the largest pass: more blocks, more passes.
            rows = min(limits.max_num_seqs * drafting.block_rows, limits.max_num_batched_tokens, LOGITS_AT_ONCE)
            passes = replace(limits, max_num_seqs=max(rows, limits.max_num_seqs))
            drafts = self._step(drafting.model, kv, passes, drafting.part(caches))
            drafts.warm_up(trees)
        return Allocated(caches, blocks, step, drafts)

    @property
    def _record_steps(self) -> bool:
        return not self.config.device.enforce_eager

    @property
    def _timed_by_weights(self) -> bool:
        """Whether reading weights is what steps take their time for."""
        return self.config.parallel.ranks == 1 and not self.config.offload.from_file

    def _step(
        self, model: Model, kv: KVPlan, limits: SchedulerConfig, caches: Caches, taps: Taps | None = None
    ) -> LocalStep:
        return local_step(self.ops)(model, self.ops, kv, limits, caches, self._record_steps, taps)

    def _stored(self, caches: Caches) -> StoredBytes | None:
        """The bytes of blocks, where a store keeps them; other ranks' go to the first."""
        if not self.config.tiers.any:
            return None
        own, place = own_bytes(caches, self.ops), self.model.place
        if place.rank == 0:
            return own
        comm = place.comm("tensor")
        assert comm is not None, "blocks of other ways to be parallel are kept in no store"
        return shared_bytes(own, comm, self.ops)

    def change_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        """Implement `Executor`."""
        room, path = self.model.adapters, Path(folder).expanduser()
        assert room is not None, "whoever has no room for adapters is not asked"
        if not folder:
            room.unload(name)
        elif replaces:
            room.replace(name, path)
        else:
            room.load(name, path)

    def check(self) -> None:
        """Nothing is elsewhere."""

    @property
    def killed(self) -> bool:
        """Never: nothing is elsewhere."""
        return False

    def bubbles(self, seconds: float) -> tuple[float, ...]:
        """None: nothing is elsewhere."""
        return ()

    def close(self) -> None:
        """Nothing is elsewhere."""


def local_step(ops: Ops) -> type[LocalStep]:
    """The kind of steps of a backend."""
    if not ops.pads:
        return CpuStep
    from quire.run.gpu_step import GpuStep

    return GpuStep
