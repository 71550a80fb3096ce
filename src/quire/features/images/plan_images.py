"""When images are encoded, and how far chunks go without: rows of an image are given, once its features are there.
See docs/design/images.md.

Encoding has a budget of its own beside that of tokens, and features are kept for prompts that bring the same image
(the encoder cache of vLLM's v1 scheduler). Who has features is known here, the runner has the numbers and does what
plans say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.core.errors import PartFailure, QuireError
from quire.core.images import ImageLimits, PromptImage, pieces
from quire.core.plan import Chunk
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.features.feature import SchedulerFeature
from quire.sched.policy import Rank
from quire.sched.token_budget import decodes


class EncoderLimits(NamedTuple):
    """Rows of features that a step makes, and that are kept, at most. `mutual`: rows of a run of an image see each
    other, so that a chunk has all of them that are left, of `rows` in a step of `seqs` sequences at most.
    """

    encoded: int
    kept: int
    mutual: bool
    rows: int
    seqs: int

    @property
    def per_image(self) -> ImageLimits:
        """Limits of one image."""
        return ImageLimits(self.kept, self.rows - self.seqs + 1 if self.mutual else 0)


@dataclass
class EncoderStep:
    """One step as it is planned, of which `EncoderScheduler` keeps nothing before `takes`. `kept`: rows of features
    that are there; `most`: rows that it may encode, None: one image. `held`: rows of the features that it needs, or
    that sequences `through` a part of an image need later."""

    limits: EncoderLimits
    kept: Mapping[bytes, int]
    most: int | None
    held: dict[bytes, int]
    through: Mapping[Sequence, bytes]
    made: dict[bytes, PromptImage] = field(default_factory=dict)
    used: set[bytes] = field(default_factory=set)
    spent: int = 0
    encodes: list[PromptImage] = field(default_factory=list)

    def cut(self, counts: dict[Sequence, int], rank: Callable[[Sequence], Rank]) -> list[Sequence]:
        """Lower `counts` of rows where those of images cannot be given yet; the features of the most urgent are made
        first. Returns those that get no row for want of an image."""
        seeing = sorted((s for s in counts if s.request.images and _first(s) < s.request.images[-1].end), key=rank)
        asking = [seq for seq in seeing if counts[seq]]
        for seq in seeing:
            counts[seq] = self.reach(seq, counts[seq])
        if self.limits.mutual:
            for seq in seeing:
                if not counts[seq] and (run := _at(seq)) is not None and self._let_in(counts, seq, sum(run), rank):
                    break
        return [seq for seq in asking if not counts[seq]]

    def reach(self, seq: Sequence, count: int) -> int:
        """How many of the next `count` rows of `seq` this step can have."""
        start, end = _first(seq), seq.computed + count
        for image in seq.request.images:
            if image.end <= start:
                continue
            first = next(max(first, start) for first, rows in image.runs if first + rows > start)
            if first >= end:
                break
            if not self._gets(image):
                return max(0, first - seq.computed)
        return self._whole(seq, end) - seq.computed

    def _whole(self, seq: Sequence, end: int) -> int:
        """`end`, or where a run begins that it would divide, where rows see each other."""
        if self.limits.mutual and (run := _divided(seq, end)) is not None:
            return max(seq.computed, run[0])
        return end

    def _gets(self, image: PromptImage) -> bool:
        """Whether its features are there in this step; they are, from now on."""
        key, rows = image.key, image.rows
        if key in self.held:
            return True
        if sum(self.held.values()) + rows > self.limits.kept:
            return False
        if key not in self.kept:
            if self.made and (self.most is None or self.spent + rows > self.most):
                return False
            self.made[key] = image
            self.spent += rows
        self.held[key] = rows
        return True

    def _let_in(self, counts: dict[Sequence, int], seq: Sequence, end: int, rank: Callable[[Sequence], Rank]) -> bool:
        """Have `seq` get its rows up to `end`, if need be in the place of drafts and of less urgent prompts: what is
        left of a step beside these might always be too little. Whether that could be."""
        need = end - seq.computed
        if self.reach(seq, need) < need:
            return False
        free = self.limits.rows - sum(counts.values())
        gives = {
            other: counts[other] - 1 for other in counts if decodes(other) and other.draft.tokens and counts[other] > 1
        }
        prompts = [other for other in counts if not decodes(other) and rank(other) > rank(seq)]
        gives |= {other: counts[other] for other in sorted(prompts, key=rank, reverse=True)}
        if free + sum(gives.values()) < need:
            return False
        for other, rows in gives.items():
            if free >= need:
                break
            free, counts[other] = free + rows, counts[other] - rows
        counts[seq] = need
        return True


class EncoderScheduler(SchedulerFeature):
    """Plans what is encoded, step by step.

    A step encodes images up to `EncoderLimits.encoded` rows, and one in any case. Where others wait for their next
    tokens it encodes one, because they wait for the whole of it. What no running sequence needs makes room, the least
    recently used first.

    `queries`: images that chunks came to, `hits`: those whose features were there.
    """

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits = limits
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._lost: list[bytes] = []
        self._turn = self._begin(())
        self.queries = self.hits = 0

    @property
    def rows(self) -> int:
        """Rows of features that are kept."""
        return sum(self._kept.values())

    def check(self, images: Iterable[PromptImage]) -> None:
        """`BadRequest` where one could never be encoded, or its rows not be computed in one step as they must."""
        for image in images:
            longest = max(count for _, count in image.runs)
            self.limits.per_image.check(image.size, image.rows, longest, "image")

    def concerns(self, request: Request) -> bool:
        """All: whoever comes next has its plan say which features were lost with a request that failed."""
        return True

    def limit(self, counts: dict[Sequence, int], rank: Callable[[Sequence], Rank]) -> Iterable[Sequence]:
        """Rows of images wait for their features."""
        self._turn = self._begin(counts)
        return self._turn.cut(counts, rank)

    def reach(self, seq: Sequence, count: int) -> int:
        """Up to the first row of an image whose features are not there."""
        return self._turn.reach(seq, count)

    def _begin(self, running: Iterable[Sequence]) -> EncoderStep:
        """Another step, of what runs before anybody is admitted."""
        through, waited = dict[Sequence, bytes](), False
        for seq in running:
            waited = waited or decodes(seq)
            for image in seq.request.images:
                if image.start < seq.computed and _first(seq) < image.end:
                    through[seq] = image.key
        held = {key: self._kept[key] for key in through.values() if key in self._kept}
        return EncoderStep(self.limits, self._kept, None if waited else self.limits.encoded, held, through)

    def takes(self, chunk: Chunk) -> None:
        """What `chunk` needs is encoded."""
        turn, start, end = self._turn, chunk.start - chunk.again, chunk.start + chunk.count
        for image in chunk.seq.request.images:
            if image.start >= end:
                break
            if image.end <= start or not any(pieces(image, start, end)):
                continue
            key = image.key
            there = key in self._kept
            if turn.through.get(chunk.seq) != key:
                self.queries += 1
                self.hits += there
            if not there:
                self._kept[key] = image.rows
                turn.encodes.append(image)
            self._kept.move_to_end(key)
            turn.used.add(key)

    def fails(self, seq: Sequence, error: QuireError) -> None:
        """Features that could not be made are made anew for whoever wants them next."""
        if isinstance(error, PartFailure):
            lost = {image.key for image in seq.request.images} & self._kept.keys()
            self._lost += lost
            for key in lost:
                del self._kept[key]

    def planned(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """The images that the step encodes, and the keys of features that make room for theirs."""
        turn = self._turn
        drops, self._lost = self._lost, list[bytes]()
        if turn.encodes:
            more, needed = self.rows - self.limits.kept, turn.used | set(turn.through.values())
            for key in [key for key in self._kept if key not in needed]:
                if more <= 0:
                    break
                more -= self._kept.pop(key)
                drops.append(key)
        return {"encodes": tuple(turn.encodes), "drops": tuple(drops)}


def _first(seq: Sequence) -> int:
    """The first token of the next step of `seq`: those that are run again, because its state stands before them, come
    before the next ones."""
    return seq.computed - seq.again


def _divided(seq: Sequence, end: int) -> tuple[int, int] | None:
    """The run (start, count) of an image that a chunk up to `end` would end within."""
    return next((run for p in seq.request.images for run in p.runs if run[0] < end < sum(run)), None)


def _at(seq: Sequence) -> tuple[int, int] | None:
    """The run that the next row of `seq` is of."""
    at = seq.computed
    return next((run for p in seq.request.images for run in p.runs if run[0] <= at < sum(run)), None)
