"""What heads learn from: hidden rows and logits of the target, computed as a step of the engine computes them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import log_softmax

from quire.core.config import EngineConfig
from quire.core.dtypes import F32
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.plan import Chunk
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.model.build import load_model
from quire.model.describe import open_model
from quire.model.load.reader import MatrixForm, WeightReader
from quire.model.load.roles import Share
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import Taps
from quire.model.spec import ModelSpec
from quire.ops.arrays import to_torch
from quire.ops.backend import open_backend
from quire.run.builder import BatchBuilder
from quire.run.caches import Caches, kept_by
from quire.run.executor import local_step
from quire.run.kv_budget import plan_kv, shape_kv
from quire.store.hub import hub_of


def divergence(said: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy of logits `said` [n, V] and probabilities `wanted` [n, V], the mean over rows.

    The target's distributions carry more than the text's tokens (Hinton et al. 2015).
    """
    return -(wanted * log_softmax(said, -1)).sum(-1).mean()


class Target:
    """The frozen model, at most `length` tokens at a time. `taps`: the hidden rows that are kept, by its spec."""

    def __init__(self, config: EngineConfig, length: int, taps: Callable[[ModelSpec], Taps]) -> None:
        """`ConfigError` where the model has no such rows, or not as many positions."""
        limits = replace(config.scheduler, max_num_batched_tokens=length, max_num_seqs=1)
        ops = open_backend(config.device)
        self.model = load_model(replace(config, scheduler=limits), ops)
        if not isinstance(self.model.decoder, Decoder) or self.model.encoder is not None:
            raise ConfigError(f"{self.model.name}: rows and logits are read of decoders of the table of families only")
        if length > self.model.max_model_len:
            raise ConfigError(f"--length {length}: {self.model.name} has {self.model.max_model_len} positions")
        self.spec = self.model.spec
        shape = shape_kv(config, kept_by((self.model,)), self.model.max_model_len)
        blocks = -(-length // config.cache.block_size)
        groups = len(shape.sizes.windows)
        kv = plan_kv(replace(config, cache=replace(config.cache, num_blocks=2 + blocks * groups)), shape)
        caches = Caches((self.model,), ops, kv)
        self._step = local_step(ops)(self.model, ops, kv, limits, caches.part(0), False, taps(self.spec))
        self._builder = BatchBuilder(self._step.arrays, self.model, caches.block_size)
        self._blocks = [list(range(g * blocks, (g + 1) * blocks)) for g in range(groups)]
        self._config = config

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden rows [n, width] and logits [n, V], f32 on the host, of `tokens` [n]."""
        params = SamplingParams(prompt_logprobs=1, max_tokens=1)
        seq = Sequence(Request(id="row", prompt=tuple(tokens), params=params, seed=0, arrival=0.0))
        seq.kv.blocks, seq.kv.slid = [list(table) for table in self._blocks], [0] * len(self._blocks)
        shape, _ = self._builder.fill((Chunk(seq, 0, len(tokens), len(tokens)),))
        host = self._step.ops.host
        logits = to_torch(host(self._step.forward(shape))).float().clone()
        return to_torch(host(self._step.hidden[: len(tokens)])).float().clone(), logits

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The table of tokens and the output head as numbers, [V, hidden] f32 each."""
        options = self._config.model
        opened = open_model(options.model, options.load_format, options.seed, hub_of(options))
        reader = WeightReader(opened, self._step.ops, MatrixForm(F32), Share(), None)
        return to_torch(reader.table("embed")), to_torch(reader.matrix(("head",), None)[0].dequantize())
