"""Prompts of a load: random tokens, or pieces of text in order, the same for every engine of a round."""

from __future__ import annotations

import random
from pathlib import Path

from quire.bench.quality import heldout_texts
from quire.bench.suite.foreign.protocol import Item
from quire.bench.suite.suite_file import LoadCase
from quire.bench.suite.suite_models import SuiteModel
from quire.bench.workload import random_items
from quire.core.errors import ConfigError
from quire.text.tokenizer import Tokenizer

USUAL_VOCABULARY = 5000
"""Random ids lie below where nothing is known of the model."""


class Prompts:
    """Makes items; `texts` by name, else those beside a model."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts
        self._tokens: dict[str, list[int]] = {}

    def items(self, source: SuiteModel, load: LoadCase, seed: int) -> list[Item]:
        """Items of one round; another seed gives others, its shared prefix too."""
        most = source.vocab_size or USUAL_VOCABULARY
        drawn = random_items(
            load.requests, load.inputs, load.outputs, vocab_size=most, seed=seed, shared_prefix=load.shared_prefix
        )
        due = load.pattern.due(load.requests, seed)
        prompts = [list(item.prompt) for item in drawn]
        if load.prompts == "text":
            prompts = self._pieces(source, [len(p) - load.shared_prefix for p in prompts], load.shared_prefix, seed)
        return [Item(p, item.output_tokens, at) for p, item, at in zip(prompts, drawn, due, strict=True)]

    def check(self, source: SuiteModel, load: LoadCase) -> None:
        """`ConfigError` where there is no text, or none that is long enough."""
        if load.prompts == "text" and not source.why:
            self.items(source, load, 0)

    def _pieces(self, source: SuiteModel, lengths: list[int], prefix: int, seed: int) -> list[list[int]]:
        tokens, rng = self._of(source), random.Random(seed)
        if len(tokens) < prefix + max(lengths):
            raise ConfigError(f"prompts = text: {len(tokens)} tokens of text are less than a prompt; name more `texts`")
        at = rng.randrange(len(tokens) - prefix + 1)
        shared = tokens[at : at + prefix]
        starts = [rng.randrange(len(tokens) - length + 1) for length in lengths]
        return [shared + tokens[at : at + length] for at, length in zip(starts, lengths, strict=True)]

    def _of(self, source: SuiteModel) -> list[int]:
        if source.name not in self._tokens:
            folder = source.facts.folder if source.facts is not None else Path(source.path)
            texts = self._texts
            if not texts and (folder / "heldout.json").is_file():
                texts = heldout_texts(folder)
            if not texts or source.random:
                raise ConfigError(f"prompts = text: {source.name} has none; name files by `texts`, and a real model")
            tokenizer = Tokenizer.from_folder(folder)
            every = [tokenizer.encode(text, add_special_tokens=False) for text in texts.values()]
            self._tokens[source.name] = [token for tokens in every for token in tokens]
        return self._tokens[source.name]


def read_texts(names: tuple[str, ...], beside: Path) -> dict[str, str]:
    """Files of text by name, relative to the suite's folder."""
    found = {}
    for name in names:
        try:
            found[name] = (beside / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"texts: {name}: cannot be read as UTF-8 text: {error}") from None
    return found
