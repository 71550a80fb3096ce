"""Sizes of single layers, in models whose layers are not all alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.model.latent_sizes import MLA


@dataclass(frozen=True)
class LayerSizes:
    """What is counted of one layer: `heads` of queries, `kv_heads` of keys and values, each of `head_dim` numbers, and
    `intermediate` numbers of its MLP. Names are those of `ModelSpec`, whose numbers these take the place of.

    `keys_as_values`: the layer has no matrix of values; its values are what the matrix of keys makes, before keys are
    normed and turned. `latents`: sizes of its latent attention, None = those of the model; scores are then divided by
    the root of `head_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    keys_as_values: bool = False
    latents: MLA | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Fields of a `ModelSpec`, and what the layer has there."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim", "intermediate")}
        return own if self.latents is None else own | {"mla": self.latents, "attention_scale": self.head_dim**-0.5}


@dataclass(frozen=True)
class LayerInputs:
    """Per-layer embeddings (Gemma 3n, Gemma Team 2025): each layer is given `width` numbers of each token, 0 = none,
    from a table of `vocab_size` tokens and from the token's embedding."""

    width: int = 0
    vocab_size: int = 0


NO_INPUTS = LayerInputs()


@dataclass(frozen=True)
class Turns:
    """Two stacks of `stack` layers each that run in turns (HRM, Wang et al. 2025): the first `low` times, then the
    second once, and all of that `high` times; each time on the sum of what both made last. 0: there are none.

    Each run has layers of its own here, with keys and values of their own and the weights of the first run.
    """

    stack: int = 0
    low: int = 0
    high: int = 0

    @property
    def layers(self) -> int:
        """Layers of all runs."""
        return self.stack * self.high * (self.low + 1)

    @property
    def first(self) -> tuple[int, ...]:
        """The layers of the first run of each stack."""
        return *range(self.stack), *range(self.low * self.stack, (self.low + 1) * self.stack)

    def home(self, layer: int) -> int:
        """The layer of the first run that has the weights of `layer`."""
        run, at = divmod(layer, self.stack)
        return at + (self.low * self.stack if self._of_second(run) else 0)

    @property
    def files(self) -> tuple[int, ...]:
        """The layer of the files whose weights each layer has: there the second stack follows the first."""
        return tuple(self.first.index(self.home(layer)) for layer in range(self.layers))

    def begins(self, layer: int) -> bool:
        """Whether the layer is the first of a run that another is before."""
        return layer > 0 and layer % self.stack == 0

    def repeats(self, layer: int) -> bool:
        """Whether the run before that of `layer` was of the same stack."""
        run = layer // self.stack
        return self._of_second(run) == self._of_second(run - 1)

    def _of_second(self, run: int) -> bool:
        return run % (self.low + 1) == self.low


NO_TURNS = Turns()


@dataclass(frozen=True)
class Streams:
    """Several streams side by side: `count`, 0 = there is one as usual.

    AltUp (Baykal et al. 2023): beside attention a layer adds what goes through `rank` numbers. `sparsity`: of each
    layer, the share of gates of its MLP that are 0. Hyper-connections (Zhu et al. 2024), where `most` is not 0: gates
    of reading are `least` + a sigmoid, those of writing `least` + `most` sigmoids. Gated residuals (Qwen4-Exp), where
    `gate_rank` is not 0: gates of each number that is read go through so many numbers. `turns`: the
    streams are what the running stack makes and what the other one made. `rounds`: in which a matrix that mixes the
    streams is brought to sums of 1 (mHC, Xie et al. 2026), 0 = streams are not mixed.
    """

    count: int = 0
    rank: int = 0
    sparsity: tuple[float, ...] = ()
    most: float = 0.0
    least: float = 0.0
    gate_rank: int = 0
    turns: Turns = NO_TURNS
    rounds: int = 0


ONE_STREAM = Streams()


@dataclass(frozen=True)
class Ngrams:
    """Embeddings of n-grams (Qwen4-Exp): one `layer` is given rows of a table by the last tokens; none where `tokens`
    is 0.

    It has `heads` rows of `width` numbers in all for n-grams of up to `tokens` tokens, and convolves what is made of
    them over `taps` rows, `tokens` apart. `factors` and `sizes` are as of `quire.ops.ngrams.NgramHash`, `rows` those of
    the table, of which there may be more. `end`: the token that n-grams do not reach beyond.
    """

    layer: int = 0
    tokens: int = 0
    heads: int = 0
    width: int = 0
    taps: int = 0
    factors: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: int = field(default=0, compare=False)
    end: int = 0

    def at(self, layer: int) -> bool:
        """Whether `layer` is given any."""
        return self.tokens > 0 and layer == self.layer

    @property
    def reach(self) -> int:
        """Rows that the convolution depends on, from its first one on."""
        return (self.taps - 1) * self.tokens + 1


NO_NGRAMS = Ngrams()
