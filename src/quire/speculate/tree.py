"""Drafts that branch: trees of guesses, of which one pass of the target verifies all (SpecInfer, Miao et al. 2023).
See docs/design/speculation.md.

A tree is one of a given form (Medusa, Cai et al. 2024), or grows where the drafting model is sure: after each of the
likeliest tokens of a depth its likeliest continuations are tried, and of all that were tried the likeliest are
verified, a token being as likely as all before it together (EAGLE-2, Li et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import LogitRow
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.ops.arrays import Array
from quire.sample.sampler import Sampler


class Candidates(NamedTuple):
    """Tokens that may follow some nodes [nodes, k] int32, the likeliest first, -1 for none, and how likely they are."""

    tokens: NDArray[np.int32]
    chances: NDArray[np.float64]


class Node(NamedTuple):
    """A guess: the token, the node it follows (-1: the last token), how likely it is, and its rank at each depth."""

    token: int
    parent: int
    chance: float
    path: tuple[int, ...]


class Tree:
    """The draft of one sequence while it grows, of at most `most` tokens."""

    def __init__(self, form: TreeForm, most: int) -> None:
        self._form, self._most = form, most
        self._nodes: list[Node] = []
        self._tried: list[int] = []
        self.frontier = [-1]

    def grow(self, found: Candidates) -> None:
        """Take what may follow the nodes of `frontier`, in its order, and choose those to go on from."""
        begin = len(self._nodes)
        for at, tokens, chances in zip(self.frontier, found.tokens.tolist(), found.chances.tolist(), strict=True):
            before = self._nodes[at] if at >= 0 else Node(-1, -1, 1.0, ())
            for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
                node = Node(token, at, before.chance * chance, (*before.path, rank))
                if token >= 0 and (self._form.paths is None or node.path in self._form.paths):
                    self._nodes.append(node)
        ahead = [i for i in range(begin, len(self._nodes)) if self._leads(self._nodes[i])]
        ahead.sort(key=lambda i: -self._nodes[i].chance)
        width = self._form.topk if self._form.paths is None else self._most
        self.frontier = ahead[: min(width, self._most - len(self._tried))]
        self._tried += self.frontier

    def _leads(self, node: Node) -> bool:
        """Whether anything may follow it."""
        paths = self._form.paths
        if paths is None:
            return len(node.path) < self._form.depth
        return any((*node.path, rank) in paths for rank in range(self._form.topk))

    def write(self, seq: Sequence, final: bool) -> None:
        """Make it the draft of `seq`: the nodes that anything was tried after, depth by depth, or the likeliest of all.

        A node is never likelier than the one it follows, and comes later.
        """
        chosen = self._tried
        if final:
            order = sorted(range(len(self._nodes)), key=lambda i: -self._nodes[i].chance)
            chosen = order[: self._most]
        places = {-1: -1} | {node: place for place, node in enumerate(chosen)}
        seq.draft.tokens = [self._nodes[node].token for node in chosen]
        seq.draft.parents = [places[self._nodes[node].parent] for node in chosen]


def grow_trees(
    form: TreeForm,
    wanting: GenericSequence[tuple[Sequence, int]],
    candidates: Callable[[list[Sequence], list[int]], list[Candidates]],
) -> None:
    """Draft a tree of at most so many tokens for each sequence.

    `candidates` of sequences and how many nodes end their drafts: what may follow these, or the last token where there
    is no draft.
    """
    trees = {seq: Tree(form, most) for seq, most in wanting if most > 0}
    for _ in range(form.depth):
        going = [seq for seq, tree in trees.items() if tree.frontier]
        if not going:
            break
        counts = [len(trees[seq].frontier) for seq in going]
        for seq, found in zip(going, candidates(going, counts), strict=True):
            trees[seq].grow(found)
            trees[seq].write(seq, final=False)
    for seq, tree in trees.items():
        tree.write(seq, final=True)


def nodes_of(seqs: list[Sequence], counts: list[int]) -> list[tuple[Sequence, int]]:
    """The nodes that end the drafts of `seqs`, so many of each as `counts` says; -1 for the last token."""
    return [
        (seq, node)
        for seq, count in zip(seqs, counts, strict=True)
        for node in range(len(seq.draft.tokens) - count, len(seq.draft.tokens))
    ]


def best_after(
    sampler: Sampler, logits: Array, nodes: list[tuple[Sequence, int]], counts: list[int], most: int
) -> list[Candidates]:
    """What is likeliest after `nodes`, of which `counts` are of each sequence, by their logits [nodes, V]."""
    asked = [LogitRow(seq, len(seq.tokens) + len(seq.draft.branch(node)), None, node) for seq, node in nodes]
    tokens, chances = sampler.best(logits, asked, most)
    ends = np.cumsum(counts)[:-1]
    return [Candidates(*found) for found in zip(np.split(tokens, ends), np.split(chances, ends), strict=True)]
