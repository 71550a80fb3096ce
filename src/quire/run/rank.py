"""A rank that is not the first: `python -m quire.run.rank`, started by `Ranks`.

What it is comes as one JSON line on standard input, which afterwards serves as a death pipe.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.files import sampled_digest
from quire.core.machine import uncollected
from quire.model.build import Model, load_model
from quire.ops.backend import Ops, select
from quire.parallel.busy import Busy
from quire.parallel.place import Place
from quire.run.budget import plan_kv, shape_kv
from quire.run.builder import Shape
from quire.run.caches import Caches, kept_layers
from quire.run.messages import Adapter, Allocate, Copy, Forward, Message, Start, Zero
from quire.run.reach import Hearer, joined
from quire.run.replies import give_back
from quire.run.step import Step
from quire.run.tune import tune
from quire.run.warm import warm_up

POLL_MS = 1000


class Rank:
    """Does what rank 0 tells, with its own share of the weights and of each block."""

    def __init__(self, config: EngineConfig, model: Model, ops: Ops, place: Place, busy: NDArray[np.float64]) -> None:
        self._config, self._model, self._ops = config, model, ops
        self._busy, self._rank = busy, place.rank
        self._stages = place.comm("pipeline")
        self._gives = place.ends("pipeline") and place.along("tensor") == 0
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
            self._forward(self._step, Shape(*message.shape), message.arrays)
        elif isinstance(message, Zero):
            self._caches.zero(message.blocks)
        elif isinstance(message, Copy):
            self._caches.copy(message.pairs)
        else:
            self._caches.move(message.pairs)

    def _forward(self, step: Step, shape: Shape, arrays: bytes) -> None:
        """Rank 0 has the logits, unless they are made by the last of several stages."""
        begin, waited = time.perf_counter(), 0.0 if self._stages is None else self._stages.waited_s
        step.arrays.begin()
        step.arrays.put(shape, arrays)
        pieces = step.pieces(shape)
        if self._stages is not None and self._gives:
            give_back(self._stages, pieces)
        else:
            for _ in pieces:
                pass
        waited -= 0.0 if self._stages is None else self._stages.waited_s
        self._busy[self._rank] += time.perf_counter() - begin + waited

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


def heard(world: Hearer, ahead: bool) -> Iterator[bytes]:
    """What rank 0 says. `ahead`: it is listened to meanwhile, so that rank 0 may say more than this rank has done."""

    def listen() -> Iterator[bytes]:
        while True:
            said = world.hear(POLL_MS)
            if said is not None:
                yield said

    if not ahead:
        yield from listen()
        return
    waiting = SimpleQueue[bytes | Exception]()

    def take() -> None:
        try:
            for said in listen():
                waiting.put(said)
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=take, daemon=True).start()
    while True:
        said = waiting.get()
        if isinstance(said, Exception):
            raise said
        yield said


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
    decode = msgspec.msgpack.Decoder(Message).decode
    try:
        world, place = joined(start)
        with uncollected(forever=True):
            ops = select(start.config.device)
            model = load_model(start.config, ops, place=place)
        if start.weights and sampled_digest(model.folder) != start.weights:
            raise ConfigError(f"{model.folder}: rank 0 has other files; give all hosts the same", param="model")
        rank = Rank(start.config, model, ops, place, Busy(start.busy, place.topology.world).seconds)
        for said in heard(world, ahead=place.topology.pipeline > 1):
            rank.follow(decode(said))
        return 0
    except QuireError as error:
        print(f"rank {start.rank}: {error.message}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
