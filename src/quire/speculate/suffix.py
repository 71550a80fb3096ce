"""Suffix decoding: what followed the last tokens in the prompt, or in earlier outputs of the same tenant, is guessed.

Oliaro et al. 2024, "SuffixDecoding". Of all places where the longest run came before, the token that followed most
often is taken, and again for the one after it, as long as that is likely enough; a long run lets more be guessed than
a short one. Who asks often for similar things (agents, edits, extraction) gets long drafts that cost nothing.

Tenants are told apart by the salt of the prefix cache: an answer's speed says nothing of another's answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as GenericSequence

from quire.core.blame import of_request
from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence, Status
from quire.core.speculation import Speculation
from quire.speculate.ngram import OwnNGrams, graft
from quire.speculate.ngram_index import NGramIndex, NGramMatch, TokenRow

MOST_HELD = 1 << 19
"""Tokens of outputs that are remembered in all."""


class RecentOutputs:
    """The latest outputs of all tenants, of at most `requests` sequences and MOST_HELD tokens; the oldest go first."""

    def __init__(self, least: int, most: int, requests: int) -> None:
        self._least, self._most, self._requests = least, most, requests
        self._tenants: dict[str, NGramIndex] = {}
        self._rows: dict[TokenRow, str] = {}
        self._live: dict[Sequence, TokenRow] = {}
        self.held = 0

    def follow(self, seq: Sequence) -> None:
        """Remember what `seq` puts out from now on."""
        if self._requests and seq not in self._live:
            row, tenant = TokenRow([]), seq.request.cache_salt
            self._live[seq], self._rows[row] = row, tenant
            self._tenants.setdefault(tenant, NGramIndex(self._least, self._most)).read(row)
            self.settle()

    def settle(self) -> None:
        """Take the last tokens of sequences that ended, and forget what is too much."""
        for seq in [seq for seq in self._live if seq.status is Status.FINISHED]:
            try:
                self._read(seq)
            finally:  # it is asked once
                del self._live[seq]
        while self._rows and (len(self._rows) > self._requests or self.held > MOST_HELD):
            row = next(iter(self._rows))
            self.held -= len(row.tokens)
            tenant = self._rows.pop(row)
            runs = self._tenants[tenant]
            runs.forget(row)
            if not len(runs):
                del self._tenants[tenant]

    def matches(self, seq: Sequence) -> list[NGramMatch]:
        """Where what `seq` ends with was before, in outputs of its tenant."""
        self.follow(seq)
        row = self._read(seq)
        return [] if row is None else self._tenants[seq.request.cache_salt].matches(row, within=False)

    def _read(self, seq: Sequence) -> TokenRow | None:
        """Row of a sequence with all of its tokens, beginning with the end of the prompt; None if it was forgotten."""
        row = self._live.get(seq)
        if row is None or row not in self._rows:
            return None
        begin = max(0, seq.prompt_len - self._most)
        new = seq.tokens[begin + len(row.tokens) :]
        row.tokens += new
        self.held += len(new)
        self._tenants[seq.request.cache_salt].read(row)
        return row


def likeliest(matches: list[NGramMatch], limit: int, least: float) -> tuple[list[int], float]:
    """(Up to `limit` tokens, how many of them are expected to be right): those that followed most often.

    Only the longest of `matches` count. It ends where a token is less likely than `least`.
    """
    going = [(row.tokens, end) for length, row, end in matches if length == matches[0].length]
    tokens: list[int] = []
    chance, expected = 1.0, 0.0
    while len(tokens) < limit:
        if len(going) == 1:
            row, end = going[0]
            rest = row[end : end + limit - len(tokens)]
            return tokens + rest, expected + chance * len(rest)
        counts: dict[int, int] = {}
        for row, end in going:
            if end < len(row):
                counts[row[end]] = counts.get(row[end], 0) + 1
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        chance *= counts[token] / len(going)
        if chance < least:
            break
        tokens.append(token)
        expected += chance
        going = [(row, end + 1) for row, end in going if end < len(row) and row[end] == token]
    return tokens, expected


class SuffixDecoding:
    """Drafts from the sequence's own tokens and from earlier outputs, whichever promises more."""

    passes = False
    at_once = False
    longest = sys.maxsize
    weight_bytes = 0
    seconds = 0.0

    def __init__(self, asked: Speculation) -> None:
        self._asked, self._form = asked, asked.tree
        self._deep = min(asked.prompt_lookup_max, asked.suffix_decoding_max_tree_depth)
        least = min(asked.prompt_lookup_min, self._deep)
        self._least = least
        self.outputs = RecentOutputs(least, self._deep, asked.suffix_decoding_max_cached_requests)

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """What followed most often. Where drafts branch, what followed in the prompt and in outputs share a tree."""
        self.outputs.settle()
        for seq, limit in zip(seqs, limits, strict=True):
            own = seq.draft.lookup
            if not isinstance(own, OwnNGrams):
                own = seq.draft.lookup = OwnNGrams(seq, self._least, self._deep)
            both = [self._draft(found, limit) for found in (own.matches(), self.outputs.matches(seq))]
            both.sort(key=lambda draft: -draft[1])
            if self._form is None:
                seq.draft.tokens = both[0][0]
                continue
            for tokens, _ in both[: self._form.topk]:
                graft(seq, tokens[: self._form.depth], limit)

    def _draft(self, matches: list[NGramMatch], limit: int) -> tuple[list[int], float]:
        if not matches:
            return [], 0.0
        longest = int(self._asked.suffix_decoding_max_spec_factor * matches[0].length)
        return likeliest(matches, min(limit, longest), self._asked.suffix_decoding_min_token_prob)

    def ready(self, seq: Sequence) -> bool:
        """Always: it needs the tokens alone."""
        return True

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """Outputs are remembered whether or not there are drafts at the moment."""
        for place, chunk in enumerate(plan.chunks):
            try:
                self.outputs.follow(chunk.seq)
            except BaseException as error:
                failure = of_request(error, "drafting")
                if results:
                    results[place].error = failure
