"""The tokens by which a text of sound is asked for, from a model's tokenizer and its generation_config.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import BadRequest, ModelError
from quire.core.speech import SpeechRules
from quire.engine.client import EngineInfo
from quire.engine.speech.languages import LANGUAGES, OTHER_NAMES
from quire.model.disk.generation import GENERATION_CONFIG
from quire.model.disk.hf_config import HfConfig, read_json
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
TASKS = ("transcribe", "translate")
_CODE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True)
class SpeechVocabulary:
    """Ids of special tokens. `languages`: code -> id, empty where the model knows English alone; `tasks` likewise.

    `no_speech` and `previous` are -1 where the tokenizer has no such token. `alignment_heads`: (layer, head) of those
    whose attention says when a token was said.
    """

    tokenizer: Tokenizer
    start: int
    end: int
    untimed: int
    no_speech: int
    previous: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppress: tuple[int, ...]
    begin: tuple[int, ...]
    initial: int
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def times(self) -> int:
        """The first token that is a time, 0.00 s; each later one is 0.02 s more."""
        return self.untimed + 1

    @cached_property
    def codes(self) -> dict[int, str]:
        """Id -> code of a language."""
        return {token: code for code, token in self.languages.items()}

    def rules(self, timestamps: bool) -> SpeechRules:
        """What a text may go on with."""
        return SpeechRules(
            suppress=self.suppress,
            begin=self.begin,
            times=self.times if timestamps else 0,
            initial=self.initial,
            end=self.end,
            untimed=self.untimed,
        )

    def language(self, name: str | None) -> str | None:
        """The code of a language, given by that or by an English name; `BadRequest` for one that is not known."""
        if name is None or not name:
            return None
        low = name.strip().lower()
        low = OTHER_NAMES.get(low, low)
        code = next((code for code, called in LANGUAGES.items() if low in (code, called)), low.partition("-")[0])
        known = self.languages or {"en": 0}
        if code not in known:
            raise BadRequest(f"language: {name[:40]!r} is not one of this model's {len(known)}", param="language")
        return code

    def opening(self, language: str, task: str, timestamps: bool) -> tuple[int, ...]:
        """The tokens that the decoder begins with; `BadRequest` for a task that the model does not have."""
        if task not in TASKS:
            raise BadRequest(f"task: must be transcribe or translate, not {task[:40]!r}", param="task")
        if task == "translate" and not self.tasks:
            raise BadRequest("task: this model knows English alone, and translates nothing", param="task")
        named = (self.languages[language], self.tasks[task]) if self.languages and self.tasks else ()
        return (self.start, *named, *(() if timestamps else (self.untimed,)))

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without times and other special ones."""
        return self.tokenizer.decode([token for token in tokens if token < self.end])


def speech_vocabulary(info: EngineInfo, tokenizer: Tokenizer) -> SpeechVocabulary:
    """Read the tokens of a model that hears; `BadRequest` for another, `ModelError` where its tokenizer lacks some."""
    if info.decoder_start is None or not info.decoder_start.takes_audio:
        raise BadRequest("audio: this model takes no audio", param="file")
    path = Path(info.folder) / GENERATION_CONFIG
    config = HfConfig(read_json(path) if path.is_file() else {}, str(path))
    older = HfConfig(read_json(Path(info.folder) / "config.json"), "config.json")
    start, end = (_needed(tokenizer, name) for name in ("<|startoftranscript|>", "<|endoftext|>"))
    untimed = _needed(tokenizer, "<|notimestamps|>")
    ids = {name: token for name, token in tokenizer.special.items() if start < token < untimed}
    languages = {match[1]: token for name, token in ids.items() if (match := _CODE.fullmatch(name))}
    tasks = {task: ids[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in ids}
    several = config.flag("is_multilingual", len(languages) > 1 and info.vocab_size != ENGLISH)
    return SpeechVocabulary(
        tokenizer=tokenizer,
        start=start,
        end=end,
        untimed=untimed,
        no_speech=ids.get("<|nospeech|>", ids.get("<|nocaptions|>", untimed - 1)),
        previous=ids.get("<|startofprev|>", -1),
        languages=languages if several else {},
        tasks=tasks if several else {},
        suppress=_ids(config, older, "suppress_tokens", info.vocab_size),
        begin=_ids(config, older, "begin_suppress_tokens", info.vocab_size),
        initial=config.integer("max_initial_timestamp_index", 50, low=0),
        alignment_heads=_alignment_heads(config, older),
    )


ENGLISH = 51864
"""Tokens of the models that know English alone, whose tokenizers have the names of languages all the same."""


def _alignment_heads(config: HfConfig, older: HfConfig) -> tuple[tuple[int, int], ...]:
    """Heads that generation_config.json names; or all of the upper half of the layers, as openai/whisper has it, where
    it names none, or those of a larger model, as files of distilled ones may."""
    layers, heads = (older.integer(f"decoder_{name}", 4, high=1 << 10) for name in ("layers", "attention_heads"))
    usual = tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    given: Any = config.raw.get("alignment_heads")
    if given is None:
        return usual
    try:
        pairs = msgspec.convert(given, tuple[tuple[int, int], ...])
    except msgspec.ValidationError as error:
        raise config.fail("alignment_heads", f"must be pairs of a layer and a head: {error}") from None
    if pairs and all(0 <= layer < layers and 0 <= head < heads for layer, head in pairs):
        return pairs
    log.info("alignment_heads are not of these %d layers of %d heads; words are timed by the upper half", layers, heads)
    return usual


def _needed(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.token_to_id(name)
    if token is None:
        raise ModelError(f"the tokenizer has no {name}, by which a text of sound is asked for")
    return token


def _ids(config: HfConfig, older: HfConfig, name: str, vocab_size: int) -> tuple[int, ...]:
    """Tokens that may not come, of generation_config.json or, in older folders, config.json."""
    given: Any = config.raw.get(name, older.raw.get(name)) or ()
    if not isinstance(given, (list, tuple)) or not all(type(token) is int for token in given):
        raise config.fail(name, "must be a list of token ids")
    return tuple(token for token in given if 0 <= token < vocab_size)
