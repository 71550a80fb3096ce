"""Where each sequence of a scheduler stands, and the one way from each place to the next.
See docs/design/scheduler.md."""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.tables import BlockTables
from quire.core.errors import QuireError
from quire.core.request import FinishReason
from quire.core.sequence import Sequence, Status
from quire.features.adapters.plan_adapters import QueuedAdapters
from quire.features.feature import SideQueue
from quire.features.kv_store.plan_kv_store import StoreQueue
from quire.features.structured_output.plan_structured_output import GrammarQueue, Make
from quire.sched.growth import begun, orphans
from quire.sched.policy import Policy

MOVES: dict[Status, tuple[Status, ...]] = {
    Status.PENDING: (Status.WAITING, Status.WAITING_FOR_GRAMMAR, Status.FINISHED),
    Status.WAITING: (Status.RUNNING, Status.WAITING_FOR_STORE, Status.FINISHED),
    Status.WAITING_FOR_GRAMMAR: (Status.WAITING, Status.FINISHED),
    Status.WAITING_FOR_STORE: (Status.WAITING, Status.FINISHED),
    Status.RUNNING: (Status.WAITING, Status.WAITING_FOR_IMAGE, Status.FINISHED),
    Status.WAITING_FOR_IMAGE: (Status.WAITING, Status.RUNNING, Status.FINISHED),
    Status.FINISHED: (),
}
"""Where a sequence may go from where it stands."""


class SequenceQueues:
    """The queue, those that wait beside it, and the batch: the one writer of `Sequence.status`.

    `queued` wait in the queue, `away` beside it, for what one of `beside` has made for them. `holders`: who waits in
    the queue and has blocks (forks, prefix hits). `adapters`: who in the queue uses which.
    """

    def __init__(self, policy: Policy, tables: BlockTables, most: int, make_guide: Make | None = None) -> None:
        """`most` sequences may wait for a store at one time; `make_guide`: of sequences that have a grammar."""
        self.queue, self.running = policy.queue(), list[Sequence]()
        self.queued = self.away = 0
        self.readying, self.recall = GrammarQueue(make_guide), StoreQueue(tables, most)
        self.beside: dict[Status, SideQueue] = {each.status: each for each in (self.recall, self.readying)}
        self.adapters = QueuedAdapters()
        self._tables = tables
        self._holders: dict[Sequence, None] = {}

    @property
    def occupied(self) -> bool:
        """Whether anybody runs, or waits for anything."""
        return bool(self.running or self.queued or self.away)

    @property
    def in_flight(self) -> bool:
        """Whether a step is under way that any of those that run has a part of."""
        return any(seq.steps_in_flight for seq in self.running)

    # --------------------------------------------------------------------------------------------------- into the queue

    def begin(self, siblings: list[Sequence]) -> None:
        """A request comes."""
        first = begun(siblings)
        for seq in siblings:
            if seq.request.emitted and seq not in first:
                self._move(seq, Status.FINISHED)
        for seq in first:
            self.enter(seq, siblings)

    def begin_again(self, siblings: list[Sequence]) -> None:
        """Begin again when one of a request has ended: if none is left of which the others would fork, the first of
        these begins."""
        for seq in orphans(siblings):
            self.enter(seq, siblings)

    def enter(self, seq: Sequence, siblings: Iterable[Sequence]) -> None:
        """A pending sequence begins: in the queue, or beside it until its grammar is ready."""
        if self.readying.begin(seq, siblings):
            self._move(seq, self.readying.status)
        else:
            self._queue(seq)

    def fork(self, parent: Sequence, children: Iterable[Sequence]) -> None:
        """Pending `children` begin with the blocks of `parent`, whose prompt is computed."""
        for child in children:
            self._tables.fork(parent, child)
            self.enter(child, (parent,))

    def take_back(self, planning: bool) -> list[tuple[Sequence, QuireError]]:
        """Queue those that have what they waited for; returns the others that wait no more, each with what is wrong.

        Nobody comes back into a plan (`planning`) that is made beside steps under way: who is preempted depends on who
        waits and on which blocks are free, and that nobody has to be was found without them. They come back between
        steps then, before that is asked again; where nothing is under way, with the plan.
        """
        if not self.away or planning == self.in_flight:
            return []
        wrong = list[tuple[Sequence, QuireError]]()
        for place in self.beside.values():
            ready, failed = place.returned()
            wrong += failed
            for seq in ready:
                self._queue(seq)
        return wrong

    def compute_instead(self) -> None:
        """Queue those that wait for a store, whose blocks come too late."""
        for seq in self.recall.drop_all():
            self._queue(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence out of the batch; it gives up its blocks and waits again."""
        assert not seq.steps_in_flight, f"{seq} is preempted while a step under way computes a part of it"
        self.leave(seq)
        seq.times.preemptions += 1
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        assert not seq.steps_in_flight, f"{seq} waits while a step under way computes a part of it"
        self._move(seq, Status.WAITING)
        self.queue.push(seq)
        self.holds(seq)
        self.adapters.joins(seq)

    # ------------------------------------------------------------------------------------------------- out of the queue

    def recall_head(self) -> bool:
        """Whether the first of the queue is to wait for blocks of a store; it does, then."""
        head = self.queue.head()
        if self._tables.tiers is None or not self.recall.begin(head, ()):
            return False
        self._unqueue(head)
        self._move(head, self.recall.status)
        return True

    def admit(self) -> Sequence:
        """The first of the queue joins the batch."""
        head = self.queue.head()
        self._unqueue(head)
        self._move(head, Status.RUNNING)
        self.running.append(head)
        return head

    def leave(self, seq: Sequence) -> None:
        """Take a sequence from wherever it stands, and its blocks. What steps under way still write for one that ended
        is written before whoever gets its blocks writes there."""
        match seq.status:
            case Status.RUNNING | Status.WAITING_FOR_IMAGE:
                self.running.remove(seq)
            case Status.WAITING:
                self._unqueue(seq)
            case status if status in self.beside:
                self.beside[status].drop(seq)
        self._tables.release(seq)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence leaves for good."""
        self.leave(seq)
        self._move(seq, Status.FINISHED)
        seq.finish_reason = reason

    def _unqueue(self, seq: Sequence) -> None:
        self.queue.remove(seq)
        self._holders.pop(seq, None)
        self.adapters.leaves(seq)

    # --------------------------------------------------------------------------------------------- blocks, and images

    def holds(self, seq: Sequence) -> None:
        """One in the queue may have blocks now."""
        if seq.kv.blocks:
            self._holders[seq] = None

    def reclaim(self, keep: Sequence) -> bool:
        """Take back what others than `keep` hold in the queue; they find or compute it again. Whether any did."""
        holders = self.queue.in_order(seq for seq in self._holders if seq is not keep)
        for seq in holders:
            self._tables.release(seq)
            del self._holders[seq]
        return bool(holders)

    def sees(self, seq: Sequence, image: bool) -> None:
        """Whether one of the batch has the rows of the `image` that it comes to."""
        to = Status.RUNNING if image else Status.WAITING_FOR_IMAGE
        if seq.status is not to:
            self._move(seq, to)

    def _move(self, seq: Sequence, to: Status) -> None:
        assert to in MOVES[seq.status], f"{seq} cannot become {to.name}"
        self.queued += (to is Status.WAITING) - (seq.status is Status.WAITING)
        self.away += (to in self.beside) - (seq.status in self.beside)
        seq.status = to
