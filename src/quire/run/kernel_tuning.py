"""Choosing the native kernels' numbers by timing decode steps of the model itself. See docs/design/cpu-kernels.md.

The objective is the step that users wait for, so nothing has to be assumed about shapes, formats or fused ops.
Settings take turns and the median counts: what the machine does beside us hits them alike. Results never depend on
the choice (`tests/ops/test_tune.py`), hence a wrong one costs time only, and users' own steps can be what is timed
(`TimedDecode`): no start waits. With tile registers made-up steps are timed at the first start instead: the choice is
one of batches too, and who knows which will come.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.core.config import EngineConfig
from quire.core.machine import processor
from quire.core.version import VERSION
from quire.model.spec import ModelSpec
from quire.ops.arrays import Array
from quire.ops.backend import Ops, Recording
from quire.ops.tuning import NEVER, Tuning, keep, parse, recall

if TYPE_CHECKING:
    from quire.run.cpu_step import CpuStep

SMALLEST = 64 << 20
"""Bytes of weights below which nothing is measured: they stay in caches, where asking ahead buys nothing."""
BUDGET = 1.5
"""Seconds for each question; every setting is timed at least once. With 0.5 a model of 1 G parameters had one round,
and noise chose settings that cost a batch of 16 a sixth."""
ROUNDS = 5
TURNS = 7
"""Decode steps of one row, of those that users ask for, that each setting gets."""
STREAMING = ((8192, 1), (1024, 1), (2048, 4), (1024, 4))
"""(ahead, row_streams): what was best on one machine and bad on another."""
FEW = 16
"""Rows of a decode batch that, in tile registers, asks for weights as far ahead as a single row does."""
BATCHES = (5, 8, 12, 64)
"""Decode batches that tile registers might take. Where they are slower for the last, they are not used: groups of 16
columns cost a product in tiles as much as groups of 64."""


def tuning_key(config: EngineConfig, spec: ModelSpec, isa: str, threads: int) -> str:
    """What a choice depends on: the machine, the threads, the version and the shapes and format of the weights."""
    weights = f"{spec.hidden}x{spec.intermediate} {config.model.quantization or config.model.dtype}"
    cpu = processor("cpu family", "model", "stepping")
    return f"{cpu}, {isa}, {threads} threads, quire {VERSION}, {weights} g{config.model.group_size}"


def tune(step: CpuStep, config: EngineConfig, weight_bytes: int) -> None:
    """Set the kernels' numbers: those pinned, those kept from an earlier start, or those measured now."""
    ops = step.ops
    if not ops.timed:
        return
    pinned = parse(config.device.tune)
    ops.tune(pinned or Tuning())
    if pinned or not step.record_steps or weight_bytes < SMALLEST:
        return
    key = tuning_key(config, step.model.spec, ops.isa, ops.threads)
    found = recall(key)
    if found is not None:
        ops.tune(found)
    elif ops.isa == "amx":
        found = _measure(step)
        ops.tune(found)
        keep(key, found)
    else:
        step.recorded[1, 1, False] = TimedDecode(step, lambda tuning: keep(key, tuning))


class TimedDecode:
    """Stands where the recording of a decode of one row will be, until every setting had `TURNS` of the real ones."""

    def __init__(self, step: CpuStep, chosen: Callable[[Tuning], None]) -> None:
        """`chosen` is told the outcome."""
        self._step, self._chosen = step, chosen
        self._seconds: dict[Tuning, list[float]] = {
            Tuning(ahead, row_streams=streams): [] for ahead, streams in STREAMING
        }
        self._recording: Recording | None = None
        self.output: Array = None

    def run(self) -> Array:
        """Logits of the step whose arrays are filled, under the setting whose turn it is."""
        if self._recording is None:
            self._recording = self._step.record(1, 1)
            self._step.recorded[1, 1, False] = self
            self.output = self._recording.output
            return self.output
        setting = min(self._seconds, key=lambda setting: len(self._seconds[setting]))
        self._step.ops.tune(setting)
        begin = time.perf_counter()
        self.output = self._recording.run()
        self._seconds[setting].append(time.perf_counter() - begin)
        if min(map(len, self._seconds.values())) == TURNS:
            self._step.recorded[1, 1, False] = self._recording
            best = _best(self._seconds)
            self._step.ops.tune(best)
            self._chosen(best)
        return self.output


def _measure(step: CpuStep) -> Tuning:
    room = min(step.arrays.max_seqs, len(step.arrays.tokens))
    best = measured_tuning(step.ops, step.made_up_decode, room)
    step.forget_made_up()
    return best


def measured_tuning(ops: Ops, decode: Callable[[int], Callable[[], object]], room: int) -> Tuning:
    """What is fastest for decodes: `decode(rows)` runs one of so many rows, of which there are `room` at most."""
    settings = [Tuning(ahead, row_streams=streams) for ahead, streams in STREAMING]
    decodes = [decode(rows) for rows in (1, min(FEW, room))]
    best = _fastest(settings, lambda: [run() for run in decodes], ops.tune)
    for rows in (rows for rows in BATCHES if rows <= room):
        by_vectors, by_tiles = (Tuning(best.ahead, least, best.row_streams) for least in (rows + 1, rows))
        best = _fastest((by_vectors, by_tiles), decode(rows), ops.tune)
        if best == by_tiles:
            break
        if rows == BATCHES[-1]:
            best = Tuning(best.ahead, NEVER, best.row_streams)
    return best


def _fastest(settings: Sequence[Tuning], work: Callable[[], object], use: Callable[[Tuning], None]) -> Tuning:
    seconds: dict[Tuning, list[float]] = {setting: [] for setting in settings}
    work()
    end = time.perf_counter() + BUDGET
    for _ in range(ROUNDS):
        for setting in settings:
            use(setting)
            begin = time.perf_counter()
            work()
            seconds[setting].append(time.perf_counter() - begin)
        if time.perf_counter() > end:
            break
    return _best(seconds)


def _best(seconds: dict[Tuning, list[float]]) -> Tuning:
    """The setting with the least median time; the first one unless another is at least 2 % faster."""
    medians = {setting: statistics.median(times) for setting, times in seconds.items()}
    first, best = next(iter(medians)), min(medians, key=medians.__getitem__)
    return best if medians[best] < 0.98 * medians[first] else first
