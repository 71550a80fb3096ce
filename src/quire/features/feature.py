"""What features plan: the hooks that a scheduler calls, of those features alone that any of its requests uses.
See docs/design/scheduler.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from quire.core.errors import QuireError
from quire.core.plan import Chunk
from quire.core.request import Request
from quire.core.sequence import Sequence, Status
from quire.sched.policy import Rank


class SchedulerFeature(Protocol):
    """A feature's part in the planning of steps. A feature has the hooks that it needs; here each changes nothing.

    In the order in which a step calls them: `limit`, `reach` and `takes` as chunks are made, `planned`. What `limit`
    says may be asked without a step that follows.
    """

    def concerns(self, request: Request) -> bool:
        """Whether its hooks are called as long as `request` is not finished."""
        ...

    def limit(self, counts: dict[Sequence, int], rank: Callable[[Sequence], Rank]) -> Iterable[Sequence]:
        """Lower `counts` of rows of the next step; those that get none as they wait for what the feature makes."""
        return ()

    def reach(self, seq: Sequence, count: int) -> int:
        """How many of the next `count` rows of `seq`, which is just admitted, the step can have."""
        return count

    def logits(self, seq: Sequence, count: int) -> int:
        """How many of the last of the next `count` rows of `seq` are to give logits."""
        return 0

    def takes(self, chunk: Chunk) -> None:
        """`chunk` is a part of the step."""
        return

    def planned(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """A step of these is planned: fields of its plan."""
        return {}

    def fails(self, seq: Sequence, error: QuireError) -> None:
        """`seq` ends with `error`."""
        return


class FeatureHooks:
    """The hooks of a scheduler's features: of those that concern a request that is not finished, a tuple for each."""

    def __init__(self, *features: SchedulerFeature | None) -> None:
        self._all, self._users = tuple(each for each in features if each is not None), Counter[SchedulerFeature]()
        self._find_hooks()

    def add(self, feature: SchedulerFeature) -> None:
        """One more, before any request comes."""
        self._all += (feature,)

    def joins(self, request: Request) -> None:
        """A request comes."""
        self._count(request, 1)

    def leaves(self, request: Request) -> None:
        """A request has ended."""
        self._count(request, -1)

    def _count(self, request: Request, more: int) -> None:
        changed = False
        for each in self._all:
            if each.concerns(request):
                before, self._users[each] = self._users[each], self._users[each] + more
                changed = changed or not (before and self._users[each])
        if changed:
            self._find_hooks()

    def _find_hooks(self) -> None:
        on = tuple(each for each in self._all if self._users[each])
        self.limit: tuple[Callable[..., Iterable[Sequence]], ...] = _hooks(on, "limit")
        self.reach: tuple[Callable[[Sequence, int], int], ...] = _hooks(on, "reach")
        self.logits: tuple[Callable[[Sequence, int], int], ...] = _hooks(on, "logits")
        self.takes: tuple[Callable[[Chunk], None], ...] = _hooks(on, "takes")
        self.planned: tuple[Callable[[Iterable[Chunk]], dict[str, Any]], ...] = _hooks(on, "planned")
        self.fails: tuple[Callable[[Sequence, QuireError], None], ...] = _hooks(on, "fails")


def _hooks(features: Iterable[SchedulerFeature], name: str) -> tuple[Any, ...]:
    return tuple(
        getattr(each, name) for each in features if getattr(type(each), name) is not getattr(SchedulerFeature, name)
    )


class SideQueue(Protocol):
    """Where sequences wait beside the queue for what a feature makes elsewhere: they hold up nobody."""

    status: ClassVar[Status]
    """Of those that wait here."""

    def begin(self, seq: Sequence, siblings: Iterable[Sequence]) -> bool:
        """Whether `seq` is to wait here; `siblings`: of its request."""
        ...

    def returned(self) -> tuple[list[Sequence], list[tuple[Sequence, QuireError]]]:
        """Sequences that have what they waited for, and the others that wait no more, each with what is wrong."""
        ...

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that waits."""
        ...

    def __len__(self) -> int: ...
