"""How long steps take, as a table that was measured or made from a prediction; no tensors, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from quire.core.errors import ConfigError
from quire.plan.rates import PlannedChunk, StepTimes


@runtime_checkable
class DecodeTimes(Protocol):
    """`StepTimes` that say at once how long steps take in which every sequence decodes one token."""

    def decodes(self, sequences: int, keys: int, steps: int) -> list[float]:
        """Seconds of each of the next `steps`; `keys`: context of all `sequences` together before the first.

        Equal, to the last bit, to what `seconds` says of each.
        """
        ...


class StepTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: by its rows, between `points` in straight lines, and more for what it attends to.

    `points`: (rows, seconds), rows ascending; beyond the last the line of the last two goes on. `per_key`: seconds for
    each token of a sequence whose keys and values are read, `per_pair`: for each row and token that it attends to.
    `per_sequence`: seconds for each sequence of a step, `per_step` for all of them.
    """

    points: tuple[tuple[int, float], ...]
    per_key: float = 0.0
    per_pair: float = 0.0
    per_sequence: float = 0.0
    per_step: float = 0.0

    def validate(self, where: str) -> None:
        """`ConfigError` for what is no table: `where` names it."""
        ascending = all(low[0] < high[0] for low, high in pairwise(self.points))
        numbers = [seconds for _, seconds in self.points] + [
            self.per_key,
            self.per_pair,
            self.per_sequence,
            self.per_step,
        ]
        if not self.points or not ascending or self.points[0][0] < 1 or not all(0 <= n < 1e6 for n in numbers):
            raise ConfigError(f"{where}: points are to be (rows, seconds) by ascending rows, and no time negative")
        if self._of_rows(1) + self.per_step + self.per_sequence <= 0:
            raise ConfigError(f"{where}: a step of one row takes no time")

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds of one step; 0 chunks take 0."""
        if not chunks:
            return 0.0
        keys = sum(rows + context for rows, context in chunks)
        pairs = sum(rows * context + rows * (rows + 1) // 2 for rows, context in chunks)
        base = self._of(sum(rows for rows, _ in chunks), len(chunks))
        return base + (self.per_key * keys + self.per_pair * pairs)

    def decodes(self, sequences: int, keys: int, steps: int) -> list[float]:
        """Seconds of each of the next `steps`, in which all sequences decode."""
        base, first = self._of(sequences, sequences), keys + sequences
        all_keys = (first + sequences * step for step in range(steps))
        return [base + (self.per_key * keys + self.per_pair * keys) for keys in all_keys]

    def _of(self, rows: int, sequences: int) -> float:
        return self.per_step + self._of_rows(rows) + self.per_sequence * sequences

    def _of_rows(self, rows: int) -> float:
        at = bisect_left(self.points, rows, key=lambda point: point[0])
        if len(self.points) == 1 or (at == 0 and rows <= self.points[0][0]):
            return self.points[0][1]
        at = min(max(at, 1), len(self.points) - 1)
        (low, less), (high, more) = self.points[at - 1], self.points[at]
        return less + (more - less) * (rows - low) / (high - low)


class InterpolatedTimes:
    """Other times, of which decodes are asked for twice for each number of sequences: between is a straight line.

    So it is where keys are read, or multiplied, at a rate. A prediction of 100 us would be most of a simulation.
    """

    NEAR, FAR = 64, 4096
    """Contexts that are asked for."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._known: dict[int, tuple[float, float]] = {}

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds of one step."""
        if all(chunk.rows == 1 for chunk in chunks):
            return self.decodes(len(chunks), sum(chunk.context for chunk in chunks), 1)[0] if chunks else 0.0
        return self._times.seconds(chunks)

    def decodes(self, sequences: int, keys: int, steps: int) -> list[float]:
        """Seconds of each of the next `steps`."""
        base, per_key = self._known.get(sequences) or self._line(sequences)
        return [base + per_key * (keys + sequences * step) for step in range(steps)]

    def _line(self, sequences: int) -> tuple[float, float]:
        near, far = (self._times.seconds([PlannedChunk(1, context)] * sequences) for context in (self.NEAR, self.FAR))
        per_key = (far - near) / (sequences * (self.FAR - self.NEAR))
        self._known[sequences] = line = near - per_key * sequences * self.NEAR, per_key
        return line


def read_table(path: Path) -> StepTable:
    """Read a table from a JSON file with the fields of `StepTable`; `ConfigError` where it is none."""
    try:
        if path.stat().st_size > 1 << 20:
            raise ConfigError(f"{path} is larger than a MiB; is it a table of step times?")
        table = msgspec.json.decode(path.read_bytes(), type=StepTable)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no table of step times: {error}") from None
    table.validate(str(path))
    return table


def decode_times(times: StepTimes) -> Callable[[Sequence[int], int], list[float]]:
    """Gives seconds of each of the next steps, so many, in which sequences of these contexts decode one token each."""
    if isinstance(times, DecodeTimes):
        decodes = times.decodes
        return lambda contexts, steps: decodes(len(contexts), sum(contexts), steps)
    return lambda contexts, steps: [
        times.seconds([PlannedChunk(1, context + step) for context in contexts]) for step in range(steps)
    ]
