"""Seconds of a step from what it reads and computes: `StepTimes` of one engine by the rates of its machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.core.config import EngineConfig
from quire.core.dtypes import Dtype
from quire.model.load.roles import local_spec
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.mixers.mixer import LayerCacheSpec
from quire.model.spec import ModelSpec
from quire.plan.memory import RankNeeds
from quire.plan.rates import F32_BYTES, Attended, PlannedChunk, PlannedProduct, Rates
from quire.plan.weights import WeightPart
from quire.run.step_sizes import MAX_REPLAYED_ROWS

FULL = 256
"""Rows of a step whose arithmetic hides the reading of weights."""
MLP = ("gate", "up", "down", "expert_gate", "expert_up", "expert_down")
FUSED_WITH = ("k", "v", "conv_read", "conv_x", "up", "down", "expert_up", "expert_down")
"""Roles whose matrices are multiplied in the call of another."""


class Roofline:
    """Implements `quire.plan.rates.StepTimes`. A step waits for its slowest rank and for what ranks exchange."""

    def __init__(self, config: EngineConfig, ranks: Sequence[RankNeeds], kept: Dtype, rates: Rates) -> None:
        """`ranks`: one for each stage; `kept`: the format of keys and values."""
        self._config, self.rates = config, rates
        self._stages = [RooflineStage(rank, kept, rates) for rank in ranks]
        self._spec = ranks[0].facts.spec
        self.stages = len(ranks)

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds of one step through all ranks; 0 chunks take 0."""
        if not chunks:
            return 0.0
        rows, parallel = sum(chunk.rows for chunk in chunks), self._config.parallel
        chunks = self._shared(chunks)
        inside = sum(stage.seconds(chunks, rows) for stage in self._stages)
        stream = 4 * rows * self._spec.hidden
        joins = self.rates.exchange(stream, parallel.tensor_parallel_size) if parallel.tensor_parallel_size > 1 else 0
        joins *= 2 * self._spec.layers
        if parallel.expert_parallel_size > 1:
            sent = stream * self._spec.moe.routing.top_k / parallel.expert_parallel_size
            joins += 2 * sum(self._spec.moe.sparse) * self.rates.exchange(sent, parallel.expert_parallel_size)
        handed = (self.stages - 1) * self.rates.exchange(stream, 2)
        replayed = not self._config.device.enforce_eager and rows == len(chunks) <= MAX_REPLAYED_ROWS
        called = 0 if replayed else self._spec.layers
        return inside + joins + handed + self.rates.outside(rows, len(chunks), self._spec.vocab_size, called)

    def steady(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds between the ends of steps where as many are under way as there are stages."""
        return self.seconds(chunks) / self.stages

    def _shared(self, chunks: Sequence[PlannedChunk]) -> Sequence[PlannedChunk]:
        """Keys of long sequences are spread over the ranks of --context-parallel-size."""
        among = self._config.parallel.context_parallel_size
        return chunks if among == 1 else [PlannedChunk(chunk.rows, chunk.context // among) for chunk in chunks]


class RooflineStage:
    """The layers of one rank: how many numbers its rows meet, and how they attend."""

    def __init__(self, rank: RankNeeds, kept: Dtype, rates: Rates) -> None:
        self._rates, self._rank = rates, rank
        self._spec = local_spec(rank.facts.spec, rank.share)
        self._layers = rank.share.span(rank.facts.spec)
        self._products = [part for part in rank.parts if part.product]
        self._read = sum(part.nbytes * max(1.0, part.read) for part in self._products)
        self._projected = max((mixer_of(self._spec, i).projected for i in self._layers), default=0)
        self._attended = Counter(_attended(self._spec, i, kept) for i in self._layers)
        states = (mixer_of(self._spec, i).state for i in self._layers)
        self._states = Counter(state.nbytes // F32_BYTES for state in states if state is not None)

    def seconds(self, chunks: Sequence[PlannedChunk], rows: int) -> float:
        """Seconds of a step's rows through these layers, and of the head where it is here."""
        seconds = sum(self._product(part, rows, len(chunks)) for part in self._products)
        seconds += sum(self._rates.attention(one, chunks, layers) for one, layers in self._attended.items())
        seconds += sum(self._rates.recurrence(numbers, chunks, layers) for numbers, layers in self._states.items())
        return seconds + self._rates.between(rows, self._spec.hidden, self._projected, len(self._layers))

    def _product(self, part: WeightPart, rows: int, seqs: int) -> float:
        head = part.role in ("head", "embed", "project_out", "head_dense")
        met, of = float(seqs if head else rows), 1.0
        if part.read < 1:  # which experts rows meet: as if each chose at random
            of = 1 - (1 - part.read) ** rows
            met = rows * part.read / of
        runs = max(1.0, part.read)
        calls = 0.0 if part.role in FUSED_WITH else runs * max(1, part.layers)
        mlp = part.role in MLP
        work = PlannedProduct(part.kind, runs * part.numbers * of, runs * part.nbytes * of, met, calls, mlp, self._read)
        return self._rates.product(work)


def _attended(spec: ModelSpec, layer: int, kept: Dtype) -> Attended:
    mixer = mixer_of(spec, layer)
    return Attended(*mixer.read, LayerCacheSpec(mixer.parts(1, kept)).bytes_per_token, spec.windows[layer])


def critical_batch(times: Roofline) -> float:
    """Rows whose arithmetic takes as long as reading the weights does: a step of one row beside what a row costs in one
    of `FULL` rows (Pope et al. 2022). Below it further sequences are nearly free, above it each takes its time.
    """
    return times.seconds([PlannedChunk(1, 0)]) / (times.seconds([PlannedChunk(FULL, 0)]) / FULL)
