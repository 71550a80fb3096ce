"""Guides of sequences whose requests have a grammar, made off the loop of steps."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from quire.core.config import ModelConfig
from quire.core.errors import PartFailure
from quire.core.sequence import Guide as AnyGuide
from quire.core.sequence import Sequence
from quire.model.disk.checkpoint import resolve
from quire.model.disk.hub import hub_beside
from quire.sched.scheduler import Scheduler
from quire.text.structured.guide import Grammar, Guide
from quire.text.structured.vocabulary import Vocabulary, vocabulary_of
from quire.text.tokenizer import Tokenizer

KEPT = 64
"""Grammars that are kept for the next request that has them."""


class Guiding:
    """One thread that compiles grammars; the model's tokenizer is read with the first."""

    def __init__(self, config: ModelConfig, folder: str, vocab_size: int, scheduler: Scheduler) -> None:
        self._config, self._folder, self._vocab_size = config, folder, vocab_size
        self._readying = scheduler.readying
        self._scheduler = scheduler
        self._thread: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._readying.make = self._begin

    def wait(self) -> None:
        """Where nothing else is to be done than to wait for a grammar."""
        scheduler = self._scheduler
        if len(self._readying) and not scheduler.running and not len(scheduler.waiting) and not len(scheduler.recall):
            self._readying.wait(0.02)

    def _begin(self, seq: Sequence) -> Future[AnyGuide]:
        """Whatever fails here is the future's error: it is of `seq` alone."""
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "grammars")
            return self._thread.submit(self._make, seq)
        except BaseException as error:  # a thread that cannot be started, say
            failed = Future[AnyGuide]()
            failed.set_exception(error)
            return failed

    def _make(self, seq: Sequence) -> AnyGuide:
        """The guide of `seq`, which has read what was said of it already (by an engine that died)."""
        request = seq.request
        params = request.params
        assert params.max_tokens is not None, "the edge says how many"
        ends = {*request.eos_token_ids, *params.stop_token_ids}
        guide = Guide(self._grammar(request.grammar), params.max_tokens, ends, request.completion)
        if not guide.follow(seq.tokens, seq.prompt_len):
            raise PartFailure("grammar: what was said of this sequence does not follow its grammar")
        return guide

    def _grammar(self, text: str) -> Grammar:
        found = self._kept.pop(text, None)
        if found is None or found.spent:
            found = Grammar(text, self._vocabulary)
        self._kept[text] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        other = self._config.tokenizer
        folder = Path(self._folder) if other is None else resolve(other, hub_beside(self._config))
        return vocabulary_of(Tokenizer.from_folder(folder), self._vocab_size)
