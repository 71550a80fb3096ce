"""Guides of sequences whose requests have a grammar, made off the loop of steps."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from weakref import WeakValueDictionary

from quire.core.config import ModelConfig
from quire.core.errors import PartFailure
from quire.core.machine import trim_heap
from quire.core.sequence import Guide as AnyGuide
from quire.core.sequence import Sequence
from quire.model.disk.tokenizer import tokenizer_folder
from quire.text.structured.guide import Grammar, GrammarGuide
from quire.text.structured.vocabulary import Vocabulary, vocabulary_of
from quire.text.tokenizer import Tokenizer

KEPT = 32
"""Grammars that are kept for the next request that has them: those that came twice. What copies have made of one as
they read it stays with it, up to 6 MiB."""
SEEN = 1024
"""Grammars of which it is known that they came before."""
RETURN_EVERY = 16
"""Grammars that are made between two times that the memory of those that are gone is given back to the system."""


class GrammarCompiler:
    """One thread that compiles grammars; the model's tokenizer is read with the first."""

    def __init__(self, config: ModelConfig, folder: str, vocab_size: int) -> None:
        self._config, self._folder, self._vocab_size = config, folder, vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._alive: WeakValueDictionary[str, Grammar] = WeakValueDictionary()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._made = 0

    def begin(self, seq: Sequence) -> Future[AnyGuide]:
        """The guide of `seq`, once it is made. Whatever fails here is the future's error: it is of `seq` alone."""
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
        guide = GrammarGuide(self._grammar(request.grammar), params.max_tokens, ends, request.completion)
        if not guide.follow(seq.tokens, seq.prompt_len):
            raise PartFailure("grammar: what was said of this sequence does not follow its grammar")
        return guide

    def _grammar(self, text: str) -> Grammar:
        """Grammar of `text`, made anew where nobody has it who may be joined."""
        found = self._kept.pop(text, None) or self._alive.get(text)
        if found is None or found.spent:
            found = self._alive[text] = Grammar(text, self._vocabulary)
            self._made += 1
            if self._made % RETURN_EVERY == 0:
                trim_heap()
        if self._came_before(text):
            self._kept[text] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _came_before(self, text: str) -> bool:
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return known

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(Tokenizer.from_folder(tokenizer_folder(self._config, self._folder)), self._vocab_size)
