"""The tiers of an engine: what its blocks depend on, where they go, and when.

Blocks of a store outlive the engine that wrote them. So the secret of the hash chain lies in the store's folder, and
with it are hashed: the model's files, how it was loaded, how keys and values lie, and this code. Adapters count by what
is in their files, not by name. Whoever differs in any of it finds nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import secrets
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from quire.cache.disk import DiskStore
from quire.cache.host import HostStore
from quire.cache.store_folder import StoreFolder
from quire.cache.tiers import Store, Tiers
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.tiers import FLUSH_SECONDS
from quire.engine.stats import StoreStats
from quire.model.build import Model
from quire.model.load.adapters import parse_modules
from quire.ops.backend import Ops
from quire.run.block_bytes import NOTE_BYTES
from quire.run.budget import KVPlan
from quire.run.caches import Caches
from quire.run.ranks import Ranks
from quire.sched.scheduler import Scheduler
from quire.sched.shares import drew

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Of a file of weights these pieces are hashed, its first among them; with its size and time of change."""
FILES = ("config.json", "*processor_config.json", "quant*.json", "*.safetensors", "*.gguf")
ADAPTER_FILES = ("adapter_config.json", "*.safetensors", "*.bin")
BEHIND_BYTES = 16 << 20
"""Copied at one time when nothing else is to be done; a request that comes waits for it."""
GB = 10**9
LEAST_BLOCKS = 16


class Tiering:
    """Tiers behind the cache of one engine."""

    def __init__(
        self, config: EngineConfig, models: tuple[Model, ...], ops: Ops, kv: KVPlan, since: float, others: int
    ) -> None:
        """`models`: all that have layers in a block, which were loaded after `since` (seconds of the epoch); `others`:
        bytes of a block that other ranks have.

        `ConfigError` for a folder that cannot be used.
        """
        options, nbytes = config.tiers, kv.block_bytes + NOTE_BYTES + others
        check(config, nbytes)
        self._folder: StoreFolder | None = None
        self._nbytes, store = nbytes, cast("Store | None", None)
        if options.kv_store:
            home = Path(options.kv_store).expanduser()
            self._folder = StoreFolder(home, facts(config, models, ops, kv, since))
            store = DiskStore(self._folder, nbytes, int(options.kv_store_gb * GB))
        if options.kv_offloading_size:
            store = HostStore(max(1, int(options.kv_offloading_size * 2**30) // nbytes), nbytes, store)
        assert store is not None, "one of them was asked for"
        self._behind = max(1, BEHIND_BYTES // nbytes)
        self.tiers = Tiers(store, nbytes, self._behind if config.parallel.prefill_replicas else 0)
        self._digests: dict[str, str] = {}
        self._closed = False
        for name, folder in parse_modules(config.lora.lora_modules).items():
            self.know(name, folder, since)
        _LIVE.add(self)

    def attach(self, scheduler: Scheduler, caches: Caches) -> None:
        """Once both are there."""
        self._scheduler, self._caches = scheduler, caches
        made = caches.save_to(lambda save, data: self.tiers.store.put(save.key, save.tokens, data))
        assert made == self._nbytes, "blocks have the bytes that were planned"

    @property
    def secret(self) -> bytes:
        """Of the hash chain."""
        return secrets.token_bytes(32) if self._folder is None else self._folder.chain

    def identity(self, adapter: str) -> str:
        """What stands for an adapter in the hash chain."""
        return self._digests.get(adapter, adapter)

    def know(self, adapter: str, folder: Path, since: float) -> None:
        """`adapter` was loaded from `folder` after `since` (seconds of the epoch). Files that changed meanwhile may not
        be those that were read: then nothing is found."""
        digest = hashlib.blake2b(digest_size=16)
        for path in _matching(folder, ADAPTER_FILES):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
            if path.stat().st_ctime > since:
                digest.update(secrets.token_bytes(16))
        self._digests[adapter] = f"digest {digest.hexdigest()}"

    def wait(self) -> None:
        """Where nothing else is to be done than to wait for blocks."""
        scheduler = self._scheduler
        if len(scheduler.recall) and not scheduler.running and not len(scheduler.waiting):
            self.tiers.wait(0.02)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step of `plan` took so long: what computing costs."""
        prompts = sum(chunk.count for chunk in plan.chunks if not drew(chunk))
        self.tiers.rates.computed(prompts, plan.num_tokens, seconds)

    def counts(self) -> StoreStats:
        """What the store holds, and what became of blocks since the start."""
        tiers, counts = self.tiers, self.tiers.store.counts
        return StoreStats(
            blocks=counts.blocks, bytes=counts.bytes, written=counts.written, bad=counts.bad,
            dropped=counts.dropped + tiers.dropped, hits=tiers.hits, misses=tiers.misses,
        )  # fmt: skip

    def write_behind(self) -> bool:
        """Keep some more of what can be found, while there is no work; whether there is yet more."""
        saves = self.tiers.behind(self._behind)
        scrub, moves, evicted, fills = self._scheduler.upkeep.take()
        self._caches.prepare(StepPlan((), (), (), scrub, moves, (*evicted, *saves), fills))
        return self.tiers.unsaved > 0

    def forget(self) -> None:
        """Later requests find nothing of what was kept. What is being read comes too late."""
        self._scheduler.room.compute_instead()
        tables = self._scheduler.tables
        tables.pool.forget_all()
        if tables.prefix is not None:
            tables.prefix.rekey(self.secret)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Keep all that can be found, for so long at most. May be called twice."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + seconds
        try:
            while self.write_behind() and time.monotonic() < end:
                if self.tiers.store.full():
                    self.tiers.store.settle()
            self._caches.save(())
        except ValueError as error:  # a rank has ended: nobody has its part of what is left
            log.warning("blocks that no store has are not kept: %s", error)
        self.tiers.close(max(0.1, end - time.monotonic()))


def tiering_of(
    config: EngineConfig, models: tuple[Model, ...], ops: Ops, kv: KVPlan, since: float, ranks: Ranks | None
) -> Tiering | None:
    """The tiers that were asked for; `ranks` have allocated."""
    if not config.tiers.any:
        return None
    return Tiering(config, models, ops, kv, since, 0 if ranks is None else ranks.keep(ops))


def check(config: EngineConfig, nbytes: int) -> None:
    """`ConfigError` where the store is too small for blocks of `nbytes` bytes."""
    options = config.tiers
    if options.kv_store and options.kv_store_gb * GB < LEAST_BLOCKS * nbytes:
        raise ConfigError(
            f"--kv-store-gb {options.kv_store_gb:g}: a block has {nbytes:,} bytes, and fewer than {LEAST_BLOCKS} fit",
            param="kv_store_gb",
        )


_LIVE: weakref.WeakSet[Tiering] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for tiering in list(_LIVE):
        tiering.close()


def facts(config: EngineConfig, models: tuple[Model, ...], ops: Ops, kv: KVPlan, since: float) -> str:
    """All that keys and values depend on beside tokens, adapters and tenants, and how they lie in a block.

    Files that changed after `since` may not be those that were loaded: then nothing is found.
    """
    options = config.model
    return json.dumps(
        {
            "code": _code(),
            "numpy": _version("numpy"),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "files": [_print(path, since) for each in models for path in _matching(each.folder, FILES)],
            "specs": [repr(each.spec) for each in models],
            "lengths": [each.max_model_len for each in models],
            "layouts": [repr(layout) for each in models for layout in each.layouts],
            "numbers": [(each.dtype, each.quantization) for each in models],
            "options": [options.group_size, options.activations, config.device.bf16_bits, config.device.sparse],
            "adapters": [config.lora.enable_lora, config.lora.max_lora_rank],
            "drafts": repr(config.speculation.asked) if len(models) > 1 else "",
            "groups": repr(kv.groups),
            "ranks": [
                config.parallel.tensor_parallel_size,
                config.parallel.rank_invariant,
                config.parallel.expert_axis,
            ],
            "block": [config.cache.block_size, kv.block_bytes],
            "ops": ops.identity,
        }
    )


def _code() -> str:
    """A digest of this package: another version may compute other bits."""
    paths = sorted(Path(__file__).parents[2].rglob("*.py"))
    native = importlib.util.find_spec("quire._native")
    if native is not None and native.origin:
        paths.append(Path(native.origin))
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        found.update(hashlib.blake2b(path.read_bytes()).digest())
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _matching(home: Path, patterns: Iterable[str]) -> list[Path]:
    """Files of a folder, or the one that `home` is."""
    return [home] if home.is_file() else sorted({path for pattern in patterns for path in home.glob(pattern)})


def _print(path: Path, since: float) -> list[str | int]:
    """What tells a file from another of its name."""
    status, found = path.stat(), hashlib.blake2b(digest_size=16)
    if status.st_ctime > since:
        found.update(secrets.token_bytes(16))
    step = max(SAMPLE_BYTES, status.st_size // SAMPLES)
    with path.open("rb") as file:
        for at in range(0, status.st_size, step):
            file.seek(at)
            found.update(file.read(SAMPLE_BYTES))
    return [path.name, status.st_size, status.st_mtime_ns, found.hexdigest()]
