"""How fast a machine is at what steps are made of: measured here and kept, or a datasheet's peaks by stated shares."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from quire.core.machine import cache_folder, foreign, largest_cache, processor
from quire.core.version import VERSION
from quire.core.windows import most_seen, pairs
from quire.plan.devices import ARITHMETIC, BANDWIDTH, HOST_SECONDS, LINK_SECONDS, DeviceSheet


class PlannedChunk(NamedTuple):
    """`rows` tokens of one sequence that a step computes after `context` tokens whose keys and values are there.

    A decode is one row after all before it.
    """

    rows: int
    context: int


class StepTimes(Protocol):
    """Predicts steps of one engine (all of its ranks) on one machine."""

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds of one step: forward, sampling, and what the host does beside; 0 chunks take 0."""
        ...


log = logging.getLogger(__name__)

FILE = "planner.json"
F32_BYTES, STATE_FLOPS = 4, 8
"""Bytes of a number of a recurrent state, and operations that a row does with it: decay, two products, an update."""
WIDE_SHARE = 1 / 16
"""Of a datasheet's 16-bit rate, what the device does in f32 without matrix units (H100 and A100: a fifteenth and a
sixteenth)."""
NEAR, FAR, FARTHEST = 24 << 20, 256 << 20, 1 << 30
"""Bytes of weights that a calibration runs through: caches keep the first, and not the other (`far_bytes`)."""


class PlannedProduct(NamedTuple):
    """Matrices that one step multiplies with: `numbers` of `kind` that it reads, `nbytes` of them, in `calls` ops, by
    so many `rows` each; `mlp`: in a fused MLP. `footprint`: bytes of all weights of a step.
    """

    kind: str
    numbers: float
    nbytes: float
    rows: float
    calls: float
    mlp: bool
    footprint: float


class Attended(NamedTuple):
    """Attention of one layer: heads, those of keys and values, numbers of a head, bytes of a token, tokens seen."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int
    window: int = 0

    def pairs(self, chunks: Sequence[PlannedChunk]) -> float:
        """Row and key pairs that are multiplied."""
        return sum(pairs(self.window, chunk.context, chunk.rows) for chunk in chunks)

    def keys(self, chunk: PlannedChunk) -> int:
        """Tokens whose keys and values are read."""
        whole = chunk.context + chunk.rows
        return min(whole, most_seen(self.window) + chunk.rows) if self.window else whole


class Rates(Protocol):
    """Seconds of the parts of a step. `kind` says where they come from, as rows of figures do; `note` how."""

    kind: str
    note: str

    def product(self, product: PlannedProduct) -> float:
        """Seconds of the ops of one role over all layers."""
        ...

    def attention(self, one: Attended, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """Seconds of attention of all `layers` that are alike."""
        ...

    def recurrence(self, numbers: int, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """Seconds of the recurrences of all `layers` that are alike: the state of a sequence has so many `numbers`."""
        ...

    def between(self, rows: int, width: int, heads: int, layers: int) -> float:
        """Seconds of what is done between products in all layers: norms of rows of `width`, ropes of `heads` numbers
        of a row's queries, keys and values.
        """
        ...

    def outside(self, rows: int, seqs: int, vocabulary: int, layers: int) -> float:
        """Seconds of a step beside its decoder: scheduling, sampling, what the host does for each of `layers` layers
        whose ops it calls one by one (0: the step is replayed).
        """
        ...

    def exchange(self, nbytes: float, ranks: int) -> float:
        """Seconds of one sum of `nbytes` over `ranks`."""
        ...


class DatasheetRates:
    """A named GPU by its datasheet: rooflines (Williams et al. 2009) at stated shares of the peaks."""

    kind = "datasheet"

    def __init__(self, device: DeviceSheet) -> None:
        self._device = device
        self.note = (
            f"{device.source}; assumed: {BANDWIDTH:.0%} of its bandwidth, {ARITHMETIC:.0%} of its dense rates, "
            f"{HOST_SECONDS * 1e3:g} ms a step beside kernels" + (f"; {device.note}" if device.note else "")
        )

    def product(self, product: PlannedProduct) -> float:
        """The longer of reading and computing. 4-bit codes are multiplied as 16-bit numbers."""
        bits = 8 if product.kind.startswith(("int8", "fp8")) else 16
        compute = 2 * product.numbers * product.rows / (ARITHMETIC * self._device.peak(bits))
        return max(product.nbytes / (BANDWIDTH * self._device.bandwidth), compute)

    def attention(self, one: Attended, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """The longer of reading keys and values and multiplying."""
        read = sum(map(one.keys, chunks)) * one.kv_bytes / (BANDWIDTH * self._device.bandwidth)
        compute = 4 * one.pairs(chunks) * one.heads * one.head_dim / (ARITHMETIC * self._device.peak(16))
        return layers * max(read, compute)

    def recurrence(self, numbers: int, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """The longer of reading and writing each state once and of some products with it in f32 for each row."""
        read = 2 * F32_BYTES * numbers * len(chunks) / (BANDWIDTH * self._device.bandwidth)
        each = STATE_FLOPS * numbers / (ARITHMETIC * WIDE_SHARE * self._device.peak(16))
        return layers * max(read, each * sum(chunk.rows for chunk in chunks))

    def between(self, rows: int, width: int, heads: int, layers: int) -> float:
        """Some passes over the rows in 16 bits."""
        return layers * rows * (16 * width + 4 * heads) / (BANDWIDTH * self._device.bandwidth)

    def outside(self, rows: int, seqs: int, vocabulary: int, layers: int) -> float:
        """What is assumed of the host, and the logits' way."""
        return HOST_SECONDS + 8 * seqs * vocabulary / (BANDWIDTH * self._device.bandwidth)

    def exchange(self, nbytes: float, ranks: int) -> float:
        """A ring: each rank sends and gets 2 (n - 1) / n of the bytes (Thakur et al. 2005)."""
        return LINK_SECONDS + 2 * nbytes * (ranks - 1) / ranks / self._device.link


class KindRates(msgspec.Struct, frozen=True):
    """Seconds of a number of one kind of matrix by rows, in linears and in fused MLPs, of weights near and far, which
    are `far` bytes.
    """

    rows: list[int]
    linear_near: list[float]
    linear_far: list[float]
    mlp_near: list[float]
    mlp_far: list[float]
    far: int = FAR


class AttentionRates(msgspec.Struct, frozen=True):
    """Seconds of a layer's attention: a call; bytes of keys and values that decodes read; for decodes and for prompts,
    a score (of one row, key and head) and a multiply-add of one; a number of a row of a prompt.
    """

    call: float
    read: float
    decode_score: float
    decode: float
    prompt_score: float
    prompt: float
    row: float


class RecurrenceRates(msgspec.Struct, frozen=True):
    """Seconds of a layer's recurrence: a call; a number of the state of a sequence in a step, which is read and
    written; a number for each row."""

    call: float
    state: float
    row: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on this machine (`quire.plan.calibrate`, `quire.bench.calibration`).

    `norms`, `ropes`: by rows, seconds of a layer's per number of width. `call`: of one op. `host`: of a step, a
    sequence in it, a row of it, a layer of one that is not replayed. `sample`: of a logit. `process`: bytes of a
    process that holds no model.
    """

    machine: str
    read_bytes_per_s: float
    call: float
    kinds: dict[str, KindRates]
    attention: dict[str, AttentionRates]
    recurrence: RecurrenceRates
    norms: dict[int, float]
    ropes: dict[int, float]
    sample: float
    host: tuple[float, float, float, float]
    process: int
    measured: str = ""


class MeasuredRates:
    """Rates of this machine by its `Calibration`. `kv`: the format of keys and values.

    A kind that was not measured counts as the one of as many bits.
    """

    kind = "measured"

    def __init__(self, found: Calibration, kv: str) -> None:
        self._found, self._kv = found, kv
        self.note = f"calibrated on this machine, {found.machine}, {found.measured}"

    def product(self, product: PlannedProduct) -> float:
        """Seconds by the number, interpolated over rows and over how far the weights lie."""
        rates = self._found.kinds[stand_in(product.kind, self._found.kinds)]
        near, far = (rates.mlp_near, rates.mlp_far) if product.mlp else (rates.linear_near, rates.linear_far)
        share = min(1.0, max(0.0, math.log(max(1.0, product.footprint) / NEAR) / math.log(rates.far / NEAR)))
        rows = max(1.0, product.rows)
        each = (1 - share) * interpolated(rates.rows, near, rows) + share * interpolated(rates.rows, far, rows)
        return product.numbers * each + product.calls * self._found.call

    def attention(self, one: Attended, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """Decodes read and multiply, rows of prompts multiply."""
        rates = self._found.attention.get(self._kv) or next(iter(self._found.attention.values()))
        decodes = [chunk for chunk in chunks if chunk.rows == 1]
        prompts = [chunk for chunk in chunks if chunk.rows > 1]
        wide, seconds = one.heads * one.head_dim, rates.call
        seconds += rates.read * sum(map(one.keys, decodes)) * one.kv_bytes
        seconds += one.pairs(decodes) * (one.heads * rates.decode_score + wide * rates.decode)
        seconds += one.pairs(prompts) * (one.heads * rates.prompt_score + wide * rates.prompt)
        return layers * (seconds + rates.row * wide * sum(chunk.rows for chunk in prompts))

    def recurrence(self, numbers: int, chunks: Sequence[PlannedChunk], layers: int) -> float:
        """States of sequences and rows of theirs."""
        rates, rows = self._found.recurrence, sum(chunk.rows for chunk in chunks)
        return layers * (rates.call + numbers * (rates.state * len(chunks) + rates.row * rows))

    def between(self, rows: int, width: int, heads: int, layers: int) -> float:
        """Interpolated over rows."""
        norms, ropes = (_at(part, rows) for part in (self._found.norms, self._found.ropes))
        return layers * (width * norms + heads * ropes)

    def outside(self, rows: int, seqs: int, vocabulary: int, layers: int) -> float:
        """Seconds by what a step of a model that computes nothing takes."""
        step, of_seq, of_row, of_layer = self._found.host
        return step + of_seq * seqs + of_row * rows + of_layer * layers + self._found.sample * seqs * vocabulary

    def exchange(self, nbytes: float, ranks: int) -> float:
        """Through memory that processes share: each rank writes its part and reads all."""
        return 20 * self._found.call + nbytes * (ranks + 1) / self._found.read_bytes_per_s


def far_bytes() -> int:
    """Bytes beyond this machine's caches: twice its largest cache. By 256 MiB on a host whose cache has 480, decodes
    of 1.3 and 2.5 GB of weights of one sequence were predicted 13 to 23 % too fast.
    """
    return min(FARTHEST, max(FAR, 2 * largest_cache()))


def stand_in(kind: str, known: dict[str, KindRates]) -> str:
    """The kind that was measured, of those with as many bits, for one that was not."""
    if kind in known:
        return kind
    bits = 8 if kind.startswith(("int8", "fp8")) else 16 if kind.startswith(("bf", "f")) else 4
    alike = {8: "int8", 4: "int4"}.get(bits, "bf16")
    return next((name for name in known if name.startswith(alike)), next(iter(known)))


def interpolated(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """Seconds at x: power laws between the points, and beyond the last one in proportion to x."""
    if x <= at[0]:
        return values[0]
    if x >= at[-1]:
        return values[-1] * x / at[-1]
    i = bisect_left(at, x)
    (x0, x1), (y0, y1) = list(pairwise(at))[i - 1], list(pairwise(values))[i - 1]
    return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))


def _at(points: dict[int, float], rows: int) -> float:
    at = sorted(points)
    return interpolated(at, [points[i] for i in at], rows)


def machine_key(isa: str, threads: int) -> str:
    """What a calibration depends on."""
    return f"{processor('cpu family', 'model', 'stepping')}, {isa}, {threads} threads, quire {VERSION}"


def recall(key: str, folder: Path | None = None) -> Calibration | None:
    """What is kept under `key`; None where there is none that can be read."""
    return _kept(folder or cache_folder()).get(key)


def keep(found: Calibration, folder: Path | None = None) -> None:
    """Keep it for the next plan; a place that cannot be written costs a measurement then, and nothing else."""
    folder = folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{FILE}.{os.getpid()}"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode({**_kept(folder), found.machine: found})))
        fresh.chmod(0o600)
        fresh.replace(folder / FILE)
    except OSError:
        return


def _kept(folder: Path) -> dict[str, Calibration]:
    try:
        if reason := foreign(folder / FILE):
            log.warning("%s is not used: %s", folder / FILE, reason)
            return {}
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, Calibration])
    except (OSError, msgspec.DecodeError):
        return {}
