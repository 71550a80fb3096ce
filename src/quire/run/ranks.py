"""Rank 0's side of a group of ranks: it starts the others, and tells them what it does itself.

The others are processes that end with this one. If one of them ends first, collectives fail here, and with them the
engine: whoever supervises it starts the whole group again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.dtypes import I64
from quire.core.errors import RankFailure
from quire.core.exclusions.of_models import LONE_DRAFTS, STAGED_DRAFTS
from quire.core.machine import cores
from quire.model.batch import Continues
from quire.model.load.roles import Share
from quire.model.net.multimodal import Given
from quire.model.net.pipeline_parallel import PipelineStage
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.parallel.digest import HeardDigests
from quire.parallel.launch import LOST, Launched
from quire.parallel.place import ALONE, Place
from quire.run.block_bytes import BlockBytes
from quire.run.budget import KVPlan
from quire.run.builder import Shape
from quire.run.caches import Caches, Keep
from quire.run.features import told
from quire.run.gpu_ranks import of_a_gpu, on_gpus
from quire.run.meeting import host_is_gone
from quire.run.messages import Adapter, Allocate, Copy, Encode, Forward, Message, Move, Profile, Zero
from quire.run.rank_bytes import Joins, RankBytes
from quire.run.reach import reach
from quire.run.replies import Form, Replies
from quire.run.step import Step

SAID = 12
"""Steps whose digests may be on their way; ranks have room for a few more."""


WORD_SECONDS = 0.5
"""Until it is known how a rank of another host has ended, whose sockets are closed at once."""


class Ranks:
    """All ranks but this one. Lives as long as the engine."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: as each rank is to have it, its own number of threads included."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._reach = reach(config)
        self.others, self.place, self.busy = self._reach.others, self._reach.place, self._reach.busy
        self._steps, self._replies = config.parallel.steps_under_way, list[Replies]()
        self._staged = config.parallel.pipeline_parallel_size > 1
        self._digests, self._ending, self._far = HeardDigests(self._reach.world), False, bool(config.hosts)
        for other in self.others:
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()

    def _watch(self, other: Launched) -> None:
        code = other.wait()
        if not self._ending:
            if code == LOST:
                host_is_gone("a host with other ranks is gone")
            self._reach.world.leave()
            for comm in self.place.comms.values():
                comm.leave()

    def tell(self, message: Message) -> None:
        """To all others, which do it in the order in which they are told. `ValueError` when one has ended."""
        self._reach.world.tell(self._encode(message))

    def compare(self, shape: Shape, arrays: bytes) -> None:
        """This step is to be the same on all ranks, as those before it were. `EngineFailure` where one was not."""
        self._digests.settle(min(self._steps, SAID))
        self._digests.step(shape, arrays)

    def allocate(self, kv: KVPlan, limits: SchedulerConfig, alone: bool, windows: Collection[int]) -> None:
        """The cache of the others is as large as this rank's; `alone`: a draft model's part of it is this rank's alone.

        `ConfigError` where `windows` of layers ask for several block tables then: each rank chooses by its own layers.
        """
        if alone and any(0 < window < kv.max_model_len for window in windows):
            raise (STAGED_DRAFTS if self._staged else LONE_DRAFTS).refusal({})
        self.tell(Allocate(kv.blocks, kv.max_model_len, limits, kv.groups.windows, kv.groups.layers))

    def profile(self, length: int, limits: SchedulerConfig) -> None:
        """The others run the largest step too; of them `least` asks."""
        self.tell(Profile(length, limits))

    def least(self, own: int, ops: Ops) -> int:
        """The least of what this rank and the others have left for keys and values."""
        comm, sizes = self.place.comms["tensor"], [own]
        for rank in range(1, comm.world):
            out = ops.zeros((1,), I64)
            sizes.append(int(comm.recv(ops, out, rank)[0]))
        return min(sizes)

    def keep(self, ops: Ops) -> int:
        """Once they were told to allocate: bytes of a block on all others together, which may be saved from now on."""
        comm = self.place.comm("tensor")
        assert comm is not None, "other ways to be parallel are refused"
        self.joins = Joins(self.tell, comm, ops)
        self.kept = self.joins.sizes()
        return sum(self.kept)

    def adapter(self, name: str, folder: str) -> None:
        """Load, replace or (without a folder) unload an adapter, as this rank did."""
        self.tell(Adapter(name, folder))

    def step(self, *args: Any) -> Step:
        """`Step` of the same arguments, whose forward passes all ranks compute together."""
        made = LedStep(*args)
        made.ranks = self
        if self._reach.replying is not None:
            made.replies = Replies(made.ops, self._reach.replying, made.form(), self._steps)
            self._replies.append(made.replies)
        return made

    def drafting_step(self, *args: Any) -> Step:
        """The same of a model that drafts, which every rank has."""
        made = LedStep(*args)
        made.ranks, made.drafts = self, True
        return made

    def caches(self, *args: Any) -> Caches:
        """`Caches` of the same arguments, whose blocks are those of all ranks."""
        made = LedCaches(*args)
        made.ranks = self
        return made

    @property
    def killed(self) -> bool:
        """Whether one of the others was killed from outside (SIGKILL), by somebody or for want of memory."""
        end = time.monotonic() + WORD_SECONDS
        while not any(other.ended() for other in self.others) and time.monotonic() < end:
            time.sleep(0.01)
        return any(other.ended() == -signal.SIGKILL for other in self.others)

    def bubbles(self, seconds: float) -> tuple[float, ...]:
        """Of each rank of a pipeline on one host, the share of the `seconds` of all steps that it waited for others."""
        if self.place.topology.pipeline == 1 or self._far or not seconds:
            return ()
        return tuple(max(0.0, 1.0 - each / seconds) for each in self.busy.tolist())

    def check(self) -> None:
        """`RankFailure` when one of the others has ended."""
        for i, other in enumerate(self.others, 1):
            if (code := other.ended()) is not None:
                raise RankFailure(f"rank {i} has ended (exit code {code})")

    def close(self) -> None:
        """End the others."""
        self._ending = True
        for other in self.others:
            other.end()
        for replies in self._replies:
            replies.close()


class LedStep(Step):
    """A step that other ranks compute their shares of."""

    ranks: Ranks
    drafts = False
    replies: Replies | None = None

    def begins(self, shape: Shape, given: Given | None = None) -> None:
        """What is in the arrays goes to all ranks first."""
        decoder, left = self.model.decoder, b""
        if isinstance(decoder, Continues):
            left = self.ops.host(decoder.given)[: shape.tokens].tobytes()
        arrays = self.arrays.written(shape)
        self.ranks.tell(Forward((*shape,), arrays, self.drafts, left, None if given is None else told(given, self.ops)))
        self.ranks.compare(shape, arrays)

    def encode(self, tokens: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """As `Step`'s."""
        self.ranks.tell(Encode(tokens.tobytes(), slots.tobytes()))
        super().encode(tokens, slots)

    def pieces(self, shape: Shape, given: Given | None = None) -> Iterable[Array]:
        """As `Step`'s. Of stages, the first is done on return."""
        begin = time.perf_counter()
        own = super().pieces(shape, given)
        self.ranks.busy[0] += time.perf_counter() - begin
        return own if self.replies is None else self.replies.expect(shape.logits)

    def form(self) -> Form:
        """Of what comes back from the last stage."""
        stage, spec = self.model.decoder, self.model.spec
        assert isinstance(stage, PipelineStage), "steps of several stages are of one"
        if not stage.shared:
            return Form(spec.vocab_size, self.most_logits)
        batch = self.arrays.batches(1, 1, 1)[0]

        def part(h: Array) -> Array:
            begin = time.perf_counter()
            made = self.ops.compute(lambda: stage.part(h, batch), together=self.capture)
            self.ranks.busy[0] += time.perf_counter() - begin
            return made

        return Form(spec.vocab_size, self.most_logits, spec.embed_width, Share(1, 2).role("head", spec)[0], part)


class LedCaches(Caches):
    """Blocks that other ranks have their heads of."""

    ranks: Ranks

    def save_to(self, keep: Keep) -> int:
        """As `Caches`'; `Ranks.keep` was called before."""
        super().save_to(keep)
        assert isinstance(self.bytes, BlockBytes), "ranks are on the host"
        self.bytes = RankBytes(self.bytes, self.ranks.kept, self.ranks.joins)
        return self.bytes.nbytes

    def move(self, moves: tuple[tuple[int, int, int], ...]) -> None:
        """As `Caches`'."""
        self.ranks.tell(Move(moves))
        super().move(moves)

    def zero(self, blocks: tuple[int, ...]) -> None:
        """As `Caches`'."""
        self.ranks.tell(Zero(blocks))
        super().zero(blocks)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """As `Caches`'."""
        self.ranks.tell(Copy(pairs))
        super().copy(pairs)


def lead(config: EngineConfig) -> Ranks | None:
    """The other ranks, started, where there are any."""
    return Ranks(config) if config.parallel.ranks > 1 else None


@contextmanager
def ended_on_error(ranks: Ranks | None) -> Iterator[None]:
    """The other ranks end when what is done here fails."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def first_place(ranks: Ranks | None) -> Place:
    """This process's."""
    return ALONE if ranks is None else ranks.place


def of_a_rank(config: EngineConfig) -> EngineConfig:
    """`config` with each rank's part of the threads. `ConfigError` for what ranks cannot do, with the reason."""
    if config.parallel.processes == 1:
        return config
    if on_gpus(config):
        config = of_a_gpu(config)
    threads = config.device.threads or max(1, cores().threads // config.processes)
    eager = config.device.enforce_eager or len(set(config.hosts_of_ranks)) > 1  # what goes to a host is not recorded
    device = msgspec.structs.replace(config.device, threads=threads, enforce_eager=eager)
    return msgspec.structs.replace(config, device=device)
