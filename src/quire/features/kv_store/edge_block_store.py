"""The store behind an engine's cache: what its blocks depend on, and where they go.

Blocks of a store outlive the engine that wrote them. So the secret of the hash chain lies in the store's folder, and
with it are hashed: the model's files, how it was loaded, how keys and values lie, and this code. Adapters count by what
is in their files, not by name. Whoever differs in any of it finds nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from quire.cache.disk import DiskStore
from quire.cache.host import HostStore
from quire.cache.store_folder import StoreFolder
from quire.cache.tiers import Store, StoreSizes, Tiers
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import Save
from quire.engine.stats import StoreStats
from quire.model.build import Model
from quire.model.load.adapters import parse_modules
from quire.run.blocks import Bytes
from quire.run.executor import Executor
from quire.run.kv_budget import KVPlan

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Of a file of weights these pieces are hashed, its first among them; with its size and time of change."""
FILES = ("config.json", "*processor_config.json", "quant*.json", "*.safetensors", "*.gguf")
ADAPTER_FILES = ("adapter_config.json", "*.safetensors", "*.bin")
BEHIND_BYTES = 16 << 20
"""Copied at one time when nothing else is to be done; a request that comes waits for it."""
GB = 10**9
LEAST_BLOCKS = 16


class BlockStore:
    """Tiers of one engine, and whose blocks they are."""

    def __init__(self, executor: Executor, kv: KVPlan, sizes: StoreSizes, since: float) -> None:
        """`sizes`: bytes on all ranks; models were loaded after `since` (seconds of the epoch).

        `ConfigError` for a folder that cannot be used.
        """
        config = executor.config
        options, store = config.tiers, cast("Store | None", None)
        check(config, sizes)
        self._folder: StoreFolder | None = None
        if options.kv_store:
            home = Path(options.kv_store).expanduser()
            self._folder = StoreFolder(home, facts(executor, kv, since))
            store = DiskStore(self._folder, sizes, int(options.kv_store_gb * GB))
        if options.kv_offloading_size:
            store = HostStore(int(options.kv_offloading_size * 2**30), sizes, store)
        assert store is not None, "one of them was asked for"
        self.tiers = Tiers(store, sizes, BEHIND_BYTES if config.parallel.prefill_replicas else 0)
        self._digests: dict[str, str] = {}
        for name, folder in parse_modules(config.lora.lora_modules).items():
            self.know(name, folder, since)

    @property
    def secret(self) -> bytes:
        """Secret of the hash chain."""
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

    def keep(self, save: Save, data: Bytes) -> None:
        """Put a block into the store."""
        self.tiers.store.put(save.key, save.tokens, data)

    def counts(self) -> StoreStats:
        """What the store holds, and what became of blocks since the start."""
        tiers, counts = self.tiers, self.tiers.store.counts
        return StoreStats(
            blocks=counts.blocks, bytes=counts.bytes, written=counts.written, bad=counts.bad,
            dropped=counts.dropped + tiers.dropped, hits=tiers.hits, misses=tiers.misses,
        )  # fmt: skip


def check(config: EngineConfig, sizes: StoreSizes) -> None:
    """`ConfigError` where the store is too small for blocks, or for states, of `sizes`."""
    options, nbytes = config.tiers, max(sizes)
    if options.kv_store and options.kv_store_gb * GB < LEAST_BLOCKS * nbytes:
        what = "a block" if nbytes == sizes.block else "a recurrent state"
        raise ConfigError(
            f"--kv-store-gb {options.kv_store_gb:g}: {what} has {nbytes:,} bytes, and fewer than {LEAST_BLOCKS} fit",
            param="kv_store_gb",
        )


def facts(executor: Executor, kv: KVPlan, since: float) -> str:
    """All that keys and values depend on beside tokens, adapters and tenants, and how they lie in a block.

    Files that changed after `since` may not be those that were loaded: then nothing is found.
    """
    config, models, ops = executor.config, executor.models, executor.ops
    options = config.model
    return json.dumps(
        {
            "code": _code(),
            "numpy": _version("numpy"),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "files": [_print(path, since) for each in models for path in _files(each)],
            "specs": [repr(each.spec) for each in models],
            "lengths": [each.max_model_len for each in models],
            "layouts": [repr(layout) for each in models for parts in each.layouts for layout in parts],
            "states": [repr(state) for each in models for state in each.own_states if state is not None],
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


def _files(model: Model) -> list[Path]:
    """Files on which keys and values of a model depend."""
    return _matching(model.folder, FILES) + ([] if model.mmproj is None else [model.mmproj])


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
