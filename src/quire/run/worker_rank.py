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
from queue import SimpleQueue

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.cache.groups import LayerGroups
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.files import sampled_digest
from quire.core.machine import end_with_parent, uncollected
from quire.core.plan import BlockWork, Fill, Save
from quire.features.images.run_image_features import heard_rows
from quire.features.kv_store.run_block_bytes import say_sizes
from quire.model.batch import Continues
from quire.model.build import Model, load_model
from quire.ops.backend import Ops, open_backend
from quire.parallel.digest import SentDigests
from quire.parallel.rank_place import BusyTimes, RankPlace
from quire.run.builder import StepSizes
from quire.run.caches import kept_by, state_bytes
from quire.run.executor import Allocated, DraftingFacts, LocalExecutor
from quire.run.kv_budget import plan_kv, shape_kv
from quire.run.messages import Adapter, Allocate, Encode, Forward, Message, Profile, Start
from quire.run.rank_connections import CommandReceiver
from quire.run.rank_startup import joined
from quire.run.replies import give_back

POLL_MS = 1000


LoadDrafting = Callable[[EngineConfig, Model, Ops, RankPlace], DraftingFacts | None]


class Rank:
    """Has its executor do what rank 0 tells, with its own share of the weights and of each block."""

    def __init__(self, executor: LocalExecutor, busy: NDArray[np.float64], said: SentDigests) -> None:
        """`busy`: where ranks say how long they computed; `said`: what they computed on."""
        place = executor.model.place
        self._executor, self._ops, self._busy, self._said = executor, executor.ops, busy, said
        self._rank, self._stages, self._share = place.rank, place.comm("pipeline"), place.comm("tensor")
        self._gives = place.ends("pipeline") and place.along("tensor") == 0
        self._allocated: Allocated | None = None

    def follow(self, message: Message) -> None:
        """Do what it says."""
        if isinstance(message, Allocate):
            self._allocate(message)
        elif isinstance(message, Profile):
            self._profile(message)
        elif isinstance(message, Adapter):
            self._executor.change_adapter(message.name, message.folder, message.replaces)
        else:
            assert self._allocated is not None, "blocks come before what is done with them"
            if isinstance(message, Forward):
                self._forward(message, self._allocated)
            elif isinstance(message, Encode):
                tokens, slots = np.frombuffer(message.tokens, np.int32), np.frombuffer(message.slots, np.int64)
                step = self._allocated.drafts if message.drafts else self._allocated.step
                assert step is not None, "every rank has a share of a model that drafts on all"
                step.encode(tokens.copy(), slots.copy())
            else:
                saves = tuple(Save(block, b"", (), state) for block, state in message.saves)
                fills = tuple(Fill(block, None, state) for block, state in message.fills)
                work = BlockWork(message.moves, saves, message.wipes, fills, message.copies)
                self._allocated.blocks.apply(work)

    def _forward(self, message: Forward, at: Allocated) -> None:
        """Rank 0 has the logits, unless they are made by the last of several stages."""
        shape, step = StepSizes(*message.shape), at.drafts if message.drafts else at.step
        assert step is not None, "every rank has a share of a model that drafts on all"
        begin, waited = time.perf_counter(), 0.0 if self._stages is None else self._stages.waited_s
        step.arrays.begin()
        step.arrays.put(shape, message.arrays)
        self._said.step(shape, step.arrays.written(shape))
        decoder = step.model.decoder
        if isinstance(decoder, Continues):
            given = np.frombuffer(message.given, np.float32).reshape(shape.tokens, -1)
            self._ops.host(decoder.given)[: shape.tokens] = given
        seen = None if message.seen is None else heard_rows(message.seen, step.arrays, shape.seqs)
        pieces = (step.forward(shape, seen),) if message.drafts else step.logits_in_pieces(shape, seen)
        if self._stages is not None and self._gives:
            give_back(self._ops, self._stages, pieces)
        else:
            for _ in pieces:
                pass
        waited -= 0.0 if self._stages is None else self._stages.waited_s
        self._busy[self._rank] += time.perf_counter() - begin + waited

    def _allocate(self, asked: Allocate) -> None:
        executor, replace = self._executor, msgspec.structs.replace
        cache = replace(
            executor.config.cache, num_blocks=asked.blocks, kv_cache_memory_bytes=0, num_state_slots=asked.state_slots
        )
        config = replace(executor.config, cache=cache)
        groups = LayerGroups(asked.windows, asked.layers)
        kept, states = kept_by(executor.models), state_bytes(executor.models)
        kv = plan_kv(config, shape_kv(config, kept, asked.max_model_len, groups, states))
        self._allocated = executor.allocate(kv, asked.limits)
        if self._allocated.blocks.stored is not None and self._share is not None:
            say_sizes(self._allocated.blocks.stored, self._share, self._ops)

    def _profile(self, asked: Profile) -> None:
        executor = self._executor
        kept, states = kept_by(executor.models), state_bytes(executor.models)
        shape = shape_kv(executor.config, kept, asked.max_model_len, state_bytes=states)
        left = executor.profile(shape, asked.limits)
        assert self._share is not None, "GPUs are asked"
        self._share.send(self._ops, self._ops.put(np.array([left])), 0)


GROUP_ENDED = "a rank of the group has ended"
"""What csrc/comm.cpp says to those that wait for one."""


def heard(world: CommandReceiver, ahead: bool) -> Iterator[bytes]:
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
            ops = open_backend(start.config.device)
            model = load_model(start.config, ops, place=place)
            drafting = load_drafting(start.config, model, ops, place)
        if start.weights and sampled_digest(model.folder) != start.weights:
            raise ConfigError(f"{model.folder}: rank 0 has other files; give all hosts the same", param="model")
        busy = BusyTimes(start.busy, place.topology.world).seconds
        rank = Rank(LocalExecutor(start.config, model, ops, drafting), busy, SentDigests(world))
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
