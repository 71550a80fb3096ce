"""A conversation with a model that this process loads."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

from quire.cli.chat.backend import Stopped
from quire.cli.chat.conversation import Conversation
from quire.cli.generate import sampling, timings
from quire.core.errors import BadRequest
from quire.engine.llm import LLM
from quire.engine.requests import LLAMA_CPP_SAMPLING, EncodedPrompt, Prompt
from quire.engine.shown_facts import memory_line, slots_line


class LocalChat:
    """Answers by an `LLM` (`backend.ChatBackend`)."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.info.served_name
        self.timings = ""

    @property
    def facts(self) -> list[str]:
        """Memory, backend and context of the model."""
        info = self._llm.info
        return [
            memory_line(info),
            f"{info.backend}/{info.isa}, {info.threads} threads, context of {info.max_model_len:,} tokens",
            slots_line(self._llm.config, info.drafts),
        ]

    def check_image(self) -> None:
        """Refuse images of a model that takes none."""
        if not self._llm.info.takes_images:
            raise BadRequest(f"{self.name} takes no images")

    def answer(self, conversation: Conversation, stopped: Stopped) -> Generator[str, None, None]:
        """Stream the answer; the oldest questions go where the conversation is too long for the context."""
        prompt = self._fitting(conversation)
        settings: dict[str, Any] = {"stop": ()} | conversation.settings
        stop = settings["stop"]
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        self.timings = ""
        with closing(self._llm.stream(prompt, sampling(self._llm, LLAMA_CPP_SAMPLING, **settings))) as deltas:
            for delta in deltas:
                if stopped():
                    return
                if delta.output is not None:
                    self.timings = timings([delta.output])
                yield delta.text

    def _fitting(self, conversation: Conversation) -> Prompt:
        """The prompt, with a quarter of the context left for the answer."""
        room = self._llm.info.max_model_len * 3 // 4
        prompt = self._prompt(conversation)
        while _length(prompt) > room and conversation.drop_oldest():
            print("[the oldest turn was dropped: the context is full]", file=sys.stderr)
            prompt = self._prompt(conversation)
        return prompt

    def _prompt(self, conversation: Conversation) -> Prompt:
        return self._llm.chat_prompt(conversation.messages, conversation.tools or None)


def _length(prompt: Prompt) -> int:
    """Tokens of a prompt that a chat template made."""
    assert isinstance(prompt, dict)
    ids = prompt["prompt_token_ids"]
    return len(ids.ids) if isinstance(ids, EncodedPrompt) else len(ids)
