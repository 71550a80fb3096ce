"""Other ranks as rank 0 knows them: it starts them, tells them what to do, and hears when one ends.

The others are processes that end with this one. If one of them ends first, collectives fail here, and with them the
engine: whoever supervises it starts the whole group again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.dtypes import I64
from quire.core.errors import RankFailure
from quire.core.exclusions.of_models import LONE_DRAFTS, STAGED_DRAFTS
from quire.core.machine import cores
from quire.core.windows import most_seen
from quire.ops.backend import Ops
from quire.parallel.digest import ReceivedDigests
from quire.parallel.launch import LOST, Launched
from quire.run.builder import StepSizes
from quire.run.gpu_ranks import of_a_gpu, on_gpus
from quire.run.kv_budget import KVPlan
from quire.run.messages import Allocate, Message, Profile
from quire.run.rank_connections import host_is_gone
from quire.run.rank_startup import reach
from quire.run.replies import Replies, ReplyForm

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
        self._digests, self._ending, self._far = ReceivedDigests(self._reach.world), False, bool(config.hosts)
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
        """Tell all others, which do it in the order in which they are told. `ValueError` when one has ended."""
        self._reach.world.tell(self._encode(message))

    def compare(self, shape: StepSizes, arrays: bytes) -> None:
        """Check that this step is to be the same on all ranks, as those before it were. `EngineFailure` where one was
        not."""
        self._digests.settle(min(self._steps, SAID))
        self._digests.step(shape, arrays)

    def allocate(self, kv: KVPlan, limits: SchedulerConfig, alone: bool, windows: Collection[int]) -> None:
        """The cache of the others is as large as this rank's; `alone`: a draft model's part of it is this rank's alone.

        `ConfigError` where `windows` of layers ask for several block tables then: each rank chooses by its own layers.
        """
        if alone and any(0 < most_seen(window) < kv.max_model_len for window in windows):
            raise (STAGED_DRAFTS if self._staged else LONE_DRAFTS).refusal({})
        self.tell(Allocate(kv.blocks, kv.max_model_len, limits, kv.groups.windows, kv.groups.layers, kv.states.slots))

    def profile(self, length: int, limits: SchedulerConfig) -> None:
        """Have the other ranks run the largest step too; of them `least` asks."""
        self.tell(Profile(length, limits))

    def least(self, own: int, ops: Ops) -> int:
        """The least of what this rank and the others have left for keys and values."""
        comm, sizes = self.place.comms["tensor"], [own]
        for rank in range(1, comm.world):
            out = ops.zeros((1,), I64)
            sizes.append(int(comm.recv(ops, out, rank)[0]))
        return min(sizes)

    def replies(self, ops: Ops, form: Callable[[], ReplyForm]) -> Replies | None:
        """What comes back from the last of several stages, in that form; None where there is one. They end with the
        ranks."""
        if self._reach.replying is None:
            return None
        made = Replies(ops, self._reach.replying, form(), self._steps)
        self._replies.append(made)
        return made

    @property
    def killed(self) -> bool:
        """Whether one of the others was killed from outside (SIGKILL), by somebody or for want of memory."""
        end = time.monotonic() + WORD_SECONDS
        while not any(other.ended() for other in self.others) and time.monotonic() < end:
            time.sleep(0.01)
        return any(other.ended() == -signal.SIGKILL for other in self.others)

    def bubbles(self, seconds: float) -> tuple[float, ...]:
        """Bubbles of each rank of a pipeline on one host, the share of the `seconds` of all steps that it waited for
        others."""
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


def lead(config: EngineConfig) -> Ranks | None:
    """Start the other ranks, where there are any."""
    return Ranks(config) if config.parallel.ranks > 1 else None


@contextmanager
def ended_on_error(ranks: Ranks | None) -> Iterator[None]:
    """End the other ranks when what is done here fails."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


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
