"""A rank that is not the first: it is started by `Ranks`.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.cache.groups import LayerGroups
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.files import sampled_digest
from quire.core.machine import end_with_parent, uncollected
from quire.model.batch import Continues
from quire.model.build import Model, load_model
from quire.model.net.tapped import Taps
from quire.ops.backend import Ops
from quire.ops.select import select
from quire.parallel.busy import Busy
from quire.parallel.digest import SaidDigests
from quire.parallel.place import Place
from quire.run.budget import gpu_cache_bytes, plan_kv, shape_kv
from quire.run.builder import Shape
from quire.run.caches import Caches, parts_of
from quire.run.features import heard_rows
from quire.run.meeting import Hearer
from quire.run.messages import (
    Adapter,
    Allocate,
    Copy,
    Encode,
    Forward,
    Message,
    Profile,
    Receive,
    Send,
    Start,
    Zero,
)
from quire.run.rank_bytes import part_of, say_size
from quire.run.reach import joined
from quire.run.replies import give_back
from quire.run.step import Step
from quire.run.tune import tune
from quire.run.warm import warm_up

POLL_MS = 1000


class Drafting(Protocol):
    """What drafts on every rank: `model`, which may keep keys and values `beside` the target's."""

    @property
    def model(self) -> Model | None:
        """A share of it."""
        ...

    @property
    def beside(self) -> tuple[Model, ...]:
        """It, where it needs room in the blocks."""
        ...

    @property
    def taps(self) -> Taps | None:
        """The hidden rows that each step of the target leaves."""
        ...

    def part(self, caches: Caches) -> Caches:
        """What it sees of the blocks."""
        ...


LoadDrafting = Callable[[EngineConfig, Model, Ops, Place], Drafting | None]


class Rank:
    """Does what rank 0 tells, with its own share of the weights and of each block."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        ops: Ops,
        place: Place,
        busy: NDArray[np.float64],
        drafting: Drafting | None,
        said: SaidDigests,
    ) -> None:
        self._config, self._model, self._ops, self._drafting = config, model, ops, drafting
        self._busy, self._rank, self._said = busy, place.rank, said
        self._stages, self._share = place.comm("pipeline"), place.comm("tensor")
        self._gives = place.ends("pipeline") and place.along("tensor") == 0
        self._caches: Caches | None = None
        self._steps: list[Step] = []

    def follow(self, message: Message) -> None:
        """Do what it says."""
        if isinstance(message, Allocate):
            self._allocate(message)
            return
        if isinstance(message, Profile):
            self._profile(message)
            return
        if isinstance(message, Adapter):
            self._adapter(message.name, message.folder)
            return
        assert self._caches is not None, "blocks come before what is done with them"
        if isinstance(message, Forward):
            self._forward(message)
        elif isinstance(message, Encode):
            tokens, slots = np.frombuffer(message.tokens, np.int32), np.frombuffer(message.slots, np.int64)
            self._steps[0].encode(tokens.copy(), slots.copy())
        elif isinstance(message, Zero):
            self._caches.zero(message.blocks)
        elif isinstance(message, Copy):
            self._caches.copy(message.pairs)
        elif isinstance(message, Send | Receive):
            assert self._share is not None, "blocks of other ways to be parallel are kept in no store"
            part_of(message, self._caches, self._share, self._ops)
        else:
            self._caches.move(message.moves)

    def _forward(self, message: Forward) -> None:
        """Rank 0 has the logits, unless they are made by the last of several stages."""
        shape, step = Shape(*message.shape), self._steps[message.drafts]
        begin, waited = time.perf_counter(), 0.0 if self._stages is None else self._stages.waited_s
        step.arrays.begin()
        step.arrays.put(shape, message.arrays)
        self._said.step(shape, step.arrays.written(shape))
        decoder = step.model.decoder
        if isinstance(decoder, Continues):
            given = np.frombuffer(message.given, np.float32).reshape(shape.tokens, -1)
            self._ops.host(decoder.given)[: shape.tokens] = given
        seen = None if message.seen is None else heard_rows(message.seen, step.arrays, shape.seqs)
        pieces = (step.forward(shape),) if message.drafts else step.pieces(shape, seen)
        if self._stages is not None and self._gives:
            give_back(self._ops, self._stages, pieces)
        else:
            for _ in pieces:
                pass
        waited -= 0.0 if self._stages is None else self._stages.waited_s
        self._busy[self._rank] += time.perf_counter() - begin + waited

    def _allocate(self, asked: Allocate) -> None:
        replace, config, drafting = msgspec.structs.replace, self._config, self._drafting
        cache = replace(config.cache, num_blocks=asked.blocks, kv_cache_memory_bytes=0)
        config = replace(config, cache=cache)
        models = (self._model, *(() if drafting is None else drafting.beside))
        groups = LayerGroups(asked.windows, asked.layers)
        kv = plan_kv(config, shape_kv(config, parts_of(models), asked.max_model_len, groups))
        caches = self._caches = Caches(models, self._ops, kv)
        if config.tiers.any:
            assert self._share is not None, "blocks of other ways to be parallel are kept in no store"
            say_size(caches, self._share, self._ops)
        capture, taps = not config.device.enforce_eager, None if drafting is None else drafting.taps
        self._steps = [Step(self._model, self._ops, kv, asked.limits, caches.part(0), capture, taps)]
        warm_up(self._steps[0])
        tune(self._steps[0], config, weight_bytes=0)
        if drafting is not None and drafting.model is not None:
            self._steps.append(Step(drafting.model, self._ops, kv, asked.limits, drafting.part(caches), capture))
            warm_up(self._steps[1])

    def _profile(self, asked: Profile) -> None:
        shape = shape_kv(self._config, parts_of((self._model,)), asked.max_model_len)
        caches = Caches((self._model,), self._ops, shape)
        step = Step(self._model, self._ops, shape, asked.limits, caches.part(0), False)
        assert self._share is not None, "GPUs are asked"
        left = gpu_cache_bytes(self._ops.runtime, self._config.cache.gpu_memory_utilization, step.profile)
        self._share.send(self._ops, self._ops.put(np.array([left])), 0)

    def _adapter(self, name: str, folder: str) -> None:
        adapters = self._model.adapters
        assert adapters is not None, "rank 0 has the same room for adapters"
        if not folder:
            adapters.unload(name)
        elif name in adapters.names:
            adapters.replace(name, Path(folder))
        else:
            adapters.load(name, Path(folder))


GROUP_ENDED = "a rank of the group has ended"
"""What csrc/comm.cpp says to those that wait for one."""


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


def main(load_drafting: LoadDrafting) -> int:
    """Load a share and follow; the exit code is that of the error."""
    faulthandler.enable()
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(sig, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    start = msgspec.json.decode(line, type=Start)
    threading.Thread(target=die_with_parent, daemon=True).start()
    if start.tied:  # a process that is stopped reads nothing
        end_with_parent(signal.SIGKILL)
    decode = msgspec.msgpack.Decoder(Message).decode
    try:
        world, place = joined(start)
        with uncollected(forever=True):
            ops = select(start.config.device)
            model = load_model(start.config, ops, place=place)
            drafting = load_drafting(start.config, model, ops, place)
        if start.weights and sampled_digest(model.folder) != start.weights:
            raise ConfigError(f"{model.folder}: rank 0 has other files; give all hosts the same", param="model")
        busy = Busy(start.busy, place.topology.world).seconds
        rank = Rank(start.config, model, ops, place, busy, drafting, SaidDigests(world))
        for said in heard(world, ahead=place.topology.pipeline > 1):
            rank.follow(decode(said))
        return 0
    except QuireError as error:
        print(f"rank {start.rank}: {error.message}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if GROUP_ENDED in str(error):  # whoever ended first says why; threads that listen are not waited for
            print(f"rank {start.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        traceback.print_exc()
        return 1
