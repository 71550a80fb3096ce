"""A model that is served: its engine, its tokenizer and chat template, its names and its defaults."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import quire
from quire.core.config import EngineConfig
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.requests import Seeds, sampling_defaults
from quire.engine.speech.vocabulary import SpeechVocabulary, speech_vocabulary
from quire.server.http.errors import ModelNotFound
from quire.server.http.metrics import HttpMetrics
from quire.server.server_options import ServerOptions
from quire.server.text_generation.media import Media
from quire.server.text_generation.output_parsing import Formats, formats_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.server")
VERSION = quire.__version__


def untagged(name: str) -> str:
    """A model's name without the tag that Ollama's clients write behind every name."""
    return name.removesuffix(":latest")


@dataclass
class Service:
    """One model that is loaded, for the routes that are about a model.

    `options`: the server's, with those that this model has otherwise. `config`: what its engine was told. `http`: the
    metrics of the server. `created`: seconds since 1970.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    options: ServerOptions
    config: EngineConfig
    http: HttpMetrics = field(default_factory=HttpMetrics)
    created: int = field(default_factory=lambda: int(time.time()))
    audio_seconds: float = 0.0
    """Of sound that is held for requests in flight."""
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Files of sound that are decoded at a time, each of which may become large."""

    def __post_init__(self) -> None:
        self.options = self.options.sized(self.engine.info.takes_images or self.hears)
        self.formats: Formats = formats_of(self.options, self.template, self.tokenizer)
        if self.options.enable_auto_tool_choice and self.template is not None and not self.template.shows_tools:
            logger.warning(
                "--enable-auto-tool-choice: the chat template of %s does not tell the model of tools, so that it will "
                "call none by itself; give --chat-template FILE, or force calls by tool_choice",
                self.names[0],
            )
        self.media = Media(self.engine, self.config, self.options, self.tokenizer)

    @property
    def hears(self) -> bool:
        """Whether the model reads audio, and no text."""
        start = self.engine.info.decoder_start
        return start is not None and start.takes_audio

    @cached_property
    def speech(self) -> SpeechVocabulary:
        """Tokens by which texts of audio are asked for; `BadRequest` where the model takes none."""
        return speech_vocabulary(self.engine.info, self.tokenizer)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names clients may call the model by; the first is the one in replies."""
        return self.config.model.served_model_name or (self.engine.info.served_name,)

    def answering(self, name: str | None) -> str:
        """The name in a reply to a request that names `name`: an adapter's own, else the model's first."""
        return self.adapter(name) or self.names[0]

    def known(self, name: str) -> str:
        """The name of the model or of an adapter that `name` is, as it stands or without Ollama's tag behind it; any
        other name stays."""
        return next(
            (each for each in (name, untagged(name)) if each in (*self.names, *self.engine.info.adapters)), name
        )

    def adapter(self, name: str | None) -> str:
        """The adapter that a request for `name` asks for; "" = the model alone."""
        found = "" if name is None else self.known(name)
        return found if found in self.engine.info.adapters else ""

    @cached_property
    def fingerprint(self) -> str:
        """Changes when answers to the same seed may: another version, backend or number format."""
        info = self.engine.info
        return f"quire-{VERSION}-{info.backend}-{info.dtype}-{info.quantization.replace(' ', '')}-{info.kv_cache_dtype}"

    @cached_property
    def draw_seed(self) -> Callable[[], int]:
        """Seeds of 63 bits for requests that bring none."""
        seed = self.config.model.seed
        return Seeds(seed).next if seed else partial(random.getrandbits, 63)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults of requests that give none."""
        return sampling_defaults(self.config, self.engine.info)

    def defaults_or(self, fallback: Mapping[str, float]) -> dict[str, Any]:
        """`defaults`, or where the model has none of sampling those of an API, `fallback`."""
        return sampling_defaults(self.config, self.engine.info, fallback)

    def check_model(self, name: str | None) -> None:
        """A request must name the served model or one of its adapters, or none."""
        if name is not None and self.known(name) not in (*self.names, *self.engine.info.adapters):
            raise self.not_found(name)

    def not_found(self, name: str) -> ModelNotFound:
        """The error of a request that names another model."""
        return ModelNotFound(f"model: {name[:200]!r} is not served here; this is {self.names[0]!r}", param="model")
