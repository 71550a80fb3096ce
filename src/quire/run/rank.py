"""A rank that is not the first: `python -m quire.run.rank`, started by `Ranks`.

What it is comes as one JSON line on standard input, which afterwards serves as a death pipe.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.machine import uncollected
from quire.model.build import Model, load_model
from quire.ops.backend import Ops, select
from quire.parallel.place import place_of
from quire.parallel.shared import SharedComm
from quire.parallel.topology import topology_of
from quire.run.budget import plan_kv, shape_kv
from quire.run.builder import Shape
from quire.run.caches import Caches, kept_layers
from quire.run.messages import Adapter, Allocate, Copy, Forward, Message, Start, Zero
from quire.run.step import Step
from quire.run.tune import tune
from quire.run.warm import warm_up

POLL_MS = 1000


class Rank:
    """Does what rank 0 tells, with its own share of the weights and of each block."""

    def __init__(self, config: EngineConfig, model: Model, ops: Ops) -> None:
        self._config, self._model, self._ops = config, model, ops
        self._caches: Caches | None = None
        self._step: Step | None = None

    def follow(self, message: Message) -> None:
        """Do what it says."""
        if isinstance(message, Allocate):
            self._allocate(message)
            return
        if isinstance(message, Adapter):
            self._adapter(message.name, message.folder)
            return
        assert self._step is not None and self._caches is not None, "blocks come before what is done with them"
        if isinstance(message, Forward):
            shape = Shape(*message.shape)
            self._step.arrays.begin()
            self._step.arrays.put(shape, message.arrays)
            for _ in self._step.pieces(shape):
                pass  # rank 0 has them
        elif isinstance(message, Zero):
            self._caches.zero(message.blocks)
        elif isinstance(message, Copy):
            self._caches.copy(message.pairs)
        else:
            self._caches.move(message.pairs)

    def _allocate(self, asked: Allocate) -> None:
        replace, config = msgspec.structs.replace, self._config
        cache = replace(config.cache, num_blocks=asked.blocks, kv_cache_memory_bytes=0)
        config = replace(config, cache=cache)
        windows, layouts = kept_layers((self._model,))
        kv = plan_kv(config, shape_kv(config, windows, layouts, asked.max_model_len))
        limits = replace(config.scheduler, max_num_batched_tokens=config.scheduler.rows(kv.max_model_len))
        self._caches = Caches((self._model,), self._ops, kv)
        capture = not config.device.enforce_eager
        self._step = Step(self._model, self._ops, kv, limits, self._caches.part(0), capture)
        warm_up(self._step)
        tune(self._step, config, weight_bytes=0)

    def _adapter(self, name: str, folder: str) -> None:
        adapters = self._model.adapters
        assert adapters is not None, "rank 0 has the same room for adapters"
        if not folder:
            adapters.unload(name)
        elif name in adapters.names:
            adapters.replace(name, Path(folder))
        else:
            adapters.load(name, Path(folder))


def die_with_parent() -> None:
    """Leave at once when standard input closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> int:
    """Load a share and follow; the exit code is that of the error."""
    faulthandler.enable()
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(sig, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    start = msgspec.json.decode(line, type=Start)
    threading.Thread(target=die_with_parent, daemon=True).start()
    topology = topology_of(start.config.parallel)
    world = SharedComm(start.world, start.rank, topology.world, start.crowded)
    place = place_of(topology, start.rank, start.groups, start.crowded, start.experts)
    decode = msgspec.msgpack.Decoder(Message).decode
    try:
        with uncollected(forever=True):
            ops = select(start.config.device)
            model = load_model(start.config, ops, place=place)
        rank = Rank(start.config, model, ops)
        while True:
            said = world.hear(POLL_MS)
            if said is not None:
                rank.follow(decode(said))
    except QuireError as error:
        print(f"rank {start.rank}: {error.message}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
