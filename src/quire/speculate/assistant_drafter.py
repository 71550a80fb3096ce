"""Drafts by a model that reads the keys and values of its target; see `assistant_model` for where it comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence as GenericSequence

import numpy as np

from quire.core.plan import Chunk
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.ops.arrays import Array, concat
from quire.run.builder import BatchBuilder, StepSizes
from quire.run.step import ModelStep
from quire.sample.sampler import Sampler
from quire.speculate.assistant_decoder import AssistantDecoder, TokenClusters
from quire.speculate.chains import grow_chains
from quire.speculate.last_row_drafter import LastRowDrafter
from quire.speculate.tree import Candidates, best_after, grow_trees, nodes_of


class AssistantDrafter(LastRowDrafter):
    """All rows of a draft stand where the last token does, whose own keys the target has yet to make.

    So each row is a sequence of its own to the step, and sees all tokens but the last.
    """

    passes = True
    at_once = False
    seconds = 0.0

    def __init__(
        self,
        step: ModelStep,
        decoder: AssistantDecoder,
        target: ModelStep,
        clusters: TokenClusters | None,
        form: TreeForm | None,
    ) -> None:
        """`step` runs `decoder`; `clusters`: of tokens, where not all have logits."""
        super().__init__(target)
        self._step, self._decoder, self._clusters, self._form = step, decoder, clusters, form
        self.weight_bytes, self.longest = step.model.weight_bytes, step.model.max_model_len
        self._sampler = Sampler(step.ops, target.model.spec.vocab_size)
        self._builder = BatchBuilder(step.arrays, step.model, step.caches.block_size)
        self._most = min(step.arrays.max_seqs, len(step.arrays.tokens), len(decoder.given))

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """A pass a token; or a depth of the trees, of the nodes that are gone on from alone."""
        wanting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        begin = time.perf_counter()
        if self._form is None:
            grow_chains(self._sampler, wanting, _Chain(self))
        else:
            grow_trees(self._form, wanting, _Branches(self, self._form))
        self.seconds = time.perf_counter() - begin

    def _pass(self, nodes: list[tuple[Sequence, int]], before: list[Array]) -> tuple[Array, Array]:
        """Logits [n, V] of what follows `nodes` (-1: the last token), and the rows [n, width] that they leave.

        `before`: the hidden row [1, width] before each.
        """
        logits, left = list[Array](), list[Array]()
        for at in range(0, len(nodes), self._most):
            now = nodes[at : at + self._most]
            shape, _ = self._builder.fill(tuple(Chunk(seq, len(seq.tokens) - 1, 1, 0) for seq, _ in now))
            arrays, rows = self._step.arrays, len(now)
            arrays.tokens[:rows] = [seq.draft.tokens[node] if node >= 0 else seq.tokens[-1] for seq, node in now]
            arrays.logit_rows[:rows] = np.arange(rows)
            arrays.context[:rows] -= 1
            self._decoder.given[:rows] = concat(before[at : at + rows])
            found = self._step.forward(StepSizes(rows, rows, rows, shape.blocks))
            left.append(concat([self._decoder.kept[:rows]]))
            if self._clusters is not None:
                found = self._clusters(self._step.ops, found)
            logits.append(found if rows == len(nodes) else self._step.ops.copy_out(found))
        return (logits[0], left[0]) if len(left) == 1 else (concat(logits), concat(left))


class _Chain:
    """What follows drafts that do not branch."""

    def __init__(self, drafter: AssistantDrafter) -> None:
        self._drafter = drafter
        self._left: Array | None = None

    def __call__(self, seqs: list[Sequence], places: list[int]) -> Array:
        """Implement `Advance`."""
        left = self._left
        before = [self._drafter.row_of(seq) for seq in seqs] if left is None else [left[i : i + 1] for i in places]
        logits, self._left = self._drafter._pass([(seq, len(seq.draft.tokens) - 1) for seq in seqs], before)
        return logits


class _Branches:
    """What may follow the nodes of trees: a row before a node is the one that the node it follows left."""

    def __init__(self, drafter: AssistantDrafter, form: TreeForm) -> None:
        self._drafter, self._form = drafter, form
        self._left: dict[tuple[Sequence, int], Array] = {}

    def __call__(self, seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        """Propose candidates as `grow_trees` wants it."""
        nodes, drafter = nodes_of(seqs, counts), self._drafter
        logits, left = drafter._pass(nodes, [self._before(seq, node) for seq, node in nodes])
        self._left |= {at: left[i : i + 1] for i, at in enumerate(nodes)}
        return best_after(drafter._sampler, logits, nodes, counts, self._form.topk)

    def _before(self, seq: Sequence, node: int) -> Array:
        return self._drafter.row_of(seq) if node < 0 else self._left[seq, seq.draft.parents[node]]
