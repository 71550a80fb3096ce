"""Heads that guess one token each from one hidden row: Medusa as a chain.

Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads". A chain of such
heads is blockwise parallel decoding (Stern et al. 2018, "Blockwise parallel decoding for deep autoregressive models"):
head i says which token comes i + 1 places after the one that the model itself says, and the model's draws verify it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass

import numpy as np

from quire.core.errors import ModelError
from quire.core.exclusions.features import HEADS_WITHOUT_OUTPUT, TENSOR
from quire.core.exclusions.table import row_of
from quire.core.plan import LogitRow
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.build import Model
from quire.model.mixers.mixer import WIDE
from quire.model.net.decoder import Decoder, ToLogits
from quire.model.net.hidden_taps import Taps
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, concat
from quire.ops.backend import Ops
from quire.run.step import ModelStep
from quire.sample.sampler import Sampler
from quire.speculate.head_file import HeadFile, spread
from quire.speculate.last_row_drafter import LastRowDrafter
from quire.speculate.tree import Candidates, grow_trees


@dataclass(frozen=True)
class Head:
    """Residual blocks x + silu(linear(x)), and a matrix to logits."""

    blocks: tuple[Linear, ...]
    out: ToLogits

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [n, hidden] f32, past the target's last norm -> logits f32 [n, tokens that the head knows]."""
        for block in self.blocks:
            x = ops.take_rows(x, ops.activation(block(ops, x), "silu"), None)
        return self.out(ops, x)


@dataclass(frozen=True)
class Medusa:
    """The heads. `ids` [tokens that they know] int64: the target's id of each, or None: the same."""

    heads: tuple[Head, ...]
    ids: Array | None
    weight_bytes: int

    @property
    def taps(self) -> Taps:
        """What the target's own head reads, of rows that want logits."""
        return Taps()

    def proposer(
        self, target: ModelStep, step: ModelStep | None, form: TreeForm | None, features: ImageFeatures | None = None
    ) -> MedusaDrafter:
        """The proposer that drafts with them for `target`."""
        return MedusaDrafter(self, target, form)


def load_medusa(folder: str, target: Model, ops: Ops) -> Medusa:
    """Heads as their authors publish them ("0.0.linear.weight", "0.1.weight"), or as vLLM keeps them:
    "blocks.0.layers.0.weight", "lm_heads.0.weight" (or one "lm_head.weight"), "token_map" of the tokens they know.

    `ModelError` naming what does not fit `target`.
    """
    assert isinstance(target.decoder, Decoder)
    file = HeadFile(folder, ops, WIDE[target.dtype], lambda name: name.removeprefix("medusa_heads."))
    hidden, vocab = target.spec.hidden, target.spec.vocab_size
    said = file.config.integer("hidden_size", hidden)
    if said != hidden:
        raise file.config.fail("hidden_size", f"is {said}, that of {target.name} is {hidden}")
    if file.find(r"blocks\..*"):
        heads, ids = _of_vllm(file, hidden, vocab, target.decoder.head)
    else:
        heads, ids = _of_authors(file, hidden, vocab), None
    file.finish()
    if not heads:
        raise ModelError(f"{file.folder}: there is no head: neither 0.0.linear.weight nor blocks.0.layers.0.weight")
    return Medusa(heads, None if ids is None else ops.put(ids), file.nbytes)


def _count(file: HeadFile, pattern: str) -> int:
    """How many tensors are named so."""
    return len(file.find(pattern))


def _of_authors(file: HeadFile, hidden: int, vocab: int) -> tuple[Head, ...]:
    heads = []
    for i in range(_count(file, r"\d+\.0\.linear\.weight")):
        depth = _count(file, rf"{i}\.\d+\.linear\.weight")
        blocks = tuple(file.linear({f"{i}.{j}.linear": hidden}, hidden) for j in range(depth))
        heads.append(Head(blocks, file.linear({f"{i}.{depth}": vocab}, hidden)))
    return tuple(heads)


def _of_vllm(file: HeadFile, hidden: int, vocab: int, own: ToLogits) -> tuple[tuple[Head, ...], Array | None]:
    """`own`: the target's matrix to logits, for heads that bring none."""
    ids = file.tensor("token_map", file.config.integer("truncated_vocab_size", vocab)) if "token_map" in file else None
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ModelError(f"{file.folder}: token_map names tokens that the target does not have")
    ids = None if ids is None else np.asarray(ids).astype(np.int64)
    known = vocab if ids is None else len(ids)
    shared = "lm_head" if "lm_head.weight" in file else "lm_heads.0"
    one = file.config.flag("original_lm_head", False) or "lm_head.weight" in file

    def out(name: str) -> ToLogits:
        whole = file.rows(f"{name}.weight") != known  # rows of all tokens, of which those in token_map are taken
        return file.linear({name: vocab if whole else known}, hidden, ids if whole else None)

    if one:
        if f"{shared}.weight" not in file and not isinstance(own, Linear):
            raise ModelError(row_of(HEADS_WITHOUT_OUTPUT, TENSOR).message({}, str(file.folder)))
        common = out(shared) if f"{shared}.weight" in file else own
        ids = ids if f"{shared}.weight" in file else None
    heads = []
    for i in range(_count(file, r"blocks\.\d+\.layers\.0\.weight")):
        depth = _count(file, rf"blocks\.{i}\.layers\.\d+\.weight")
        blocks = tuple(file.linear({f"blocks.{i}.layers.{j}": hidden}, hidden) for j in range(depth))
        heads.append(Head(blocks, common if one else out(f"lm_heads.{i}")))
    return tuple(heads), ids


class MedusaDrafter(LastRowDrafter):
    """Drafts from the hidden row of the last step that gave a sequence its last token; a head is a pass."""

    passes = True
    at_once = False
    seconds = 0.0
    longest = sys.maxsize

    def __init__(self, medusa: Medusa, target: ModelStep, form: TreeForm | None) -> None:
        super().__init__(target)
        self._form, self._level = form, 0
        self.weight_bytes = medusa.weight_bytes
        self._medusa, self._ops = medusa, target.ops
        self._vocab_size = target.model.spec.vocab_size
        self._sampler = Sampler(target.ops, self._vocab_size)

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """One token a head; each is drawn like that of a row of the target's."""
        wanting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        rows = [self.row_of(seq) for seq, _ in wanting]
        begin = time.perf_counter()
        if self._form is not None:
            self._level = 0
            grow_trees(self._form, wanting, self._candidates)
            wanting = []
        for i, head in enumerate(self._medusa.heads):
            going = [k for k, (seq, limit) in enumerate(wanting) if limit > i == len(seq.draft.tokens)]
            if not going:
                break
            logits = self._logits(head, concat([rows[k] for k in going]))
            drawn = [wanting[k][0] for k in going]
            tokens = self._sampler.tokens(logits, [LogitRow(seq, len(seq.tokens) + i, None, i - 1) for seq in drawn])
            for seq, token in zip(drawn, tokens, strict=True):
                if token >= 0:
                    seq.draft.tokens.append(token)
        self.seconds = time.perf_counter() - begin

    def _candidates(self, seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        """What the next head says, whatever tokens were tried before."""
        assert self._form is not None
        rows = [LogitRow(seq, len(seq.tokens) + self._level, None, len(seq.draft.tokens) - 1) for seq in seqs]
        logits = self._logits(self._medusa.heads[self._level], concat([self.row_of(seq) for seq in seqs]))
        self._level += 1
        best = zip(counts, *self._sampler.best(logits, rows, self._form.topk), strict=True)
        return [Candidates(np.tile(tokens, (n, 1)), np.tile(chances, (n, 1))) for n, tokens, chances in best]

    def _logits(self, head: Head, x: Array) -> Array:
        """Logits of all tokens of the target, [n, V]."""
        logits = self._ops.compute(lambda: head(self._ops, x), together=False)
        return spread(self._ops, logits, self._medusa.ids, self._vocab_size)
