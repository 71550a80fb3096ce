"""A conversation with a model that this process loads."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from quire.cli.chat.answer import Answer
from quire.cli.chat.backend import Stopped
from quire.cli.chat.conversation import Conversation
from quire.cli.generate import sampling, timings
from quire.core.errors import BadRequest
from quire.engine.llm import LLM
from quire.engine.requests import LLAMA_CPP_SAMPLING, EncodedPrompt, Prompt
from quire.engine.shown_facts import memory_line, slots_line
from quire.server.server_options import ServerOptions
from quire.server.text_generation.output_parsing import Formats, OutputParsing, formats_of, inside_reasoning
from quire.text.messages.text_source import MessageDelta


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

    def tools_note(self) -> str:
        """Say so where the model is not told of tools, or its calls cannot be read."""
        if not self._llm.chat_template.shows_tools:
            return f"the chat template of {self.name} does not tell the model of tools"
        if self._formats.tools is None:
            return f"it is not known how {self.name} writes calls: they are shown as text"
        return ""

    def answer(self, conversation: Conversation, stopped: Stopped, answer: Answer) -> Generator[str, None, None]:
        """Stream the answer; the oldest questions go where the conversation is too long for the context."""
        prompt = self._fitting(conversation)
        settings: dict[str, Any] = {"stop": ()} | conversation.settings
        stop = settings["stop"]
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        self.timings = ""
        parser = self._parsing(conversation, prompt).parser()
        params = sampling(self._llm, LLAMA_CPP_SAMPLING, **settings)
        with closing(self._llm.stream(prompt, params, special=self._formats.shown)) as deltas:
            for delta in deltas:
                if stopped():
                    break
                if delta.output is not None:
                    self.timings = timings([delta.output])
                yield answer.add_content(delta.text) if parser is None else _shown(answer, parser.push(delta.text))
        if parser is not None:
            yield _shown(answer, parser.end())
        yield answer.end()

    @cached_property
    def _formats(self) -> Formats:
        """How the model writes thoughts and calls, by its chat template."""
        return formats_of(ServerOptions(), self._llm.chat_template, self._llm.get_tokenizer())

    def _parsing(self, conversation: Conversation, prompt: Prompt) -> OutputParsing:
        """How the answer to a conversation is read."""
        functions = [tool["function"] for tool in conversation.tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        inside = inside_reasoning(self._formats, self._llm.get_tokenizer(), _ids(prompt))
        return OutputParsing(self._formats, schemas or None, inside=inside)

    def _fitting(self, conversation: Conversation) -> Prompt:
        """The prompt, with a quarter of the context left for the answer."""
        room = self._llm.info.max_model_len * 3 // 4
        prompt = self._prompt(conversation)
        while len(_ids(prompt)) > room and conversation.drop_oldest():
            print("[the oldest turn was dropped: the context is full]", file=sys.stderr)
            prompt = self._prompt(conversation)
        return prompt

    def _prompt(self, conversation: Conversation) -> Prompt:
        tools = self._formats.tools
        as_text = tools is not None and tools.text_arguments
        return self._llm.chat_prompt(conversation.for_template(as_text), conversation.tools or None)


def _shown(answer: Answer, deltas: list[MessageDelta]) -> str:
    """Collect `deltas`; what is shown of them."""
    shown = ""
    for delta in deltas:
        if delta.kind == "content":
            shown += answer.add_content(delta.text)
        elif delta.kind == "reasoning":
            shown += answer.add_thought(delta.text)
        elif delta.kind == "call":
            answer.add_call(delta.index, delta.id, delta.name, "")
        else:
            answer.add_call(delta.index, "", "", delta.text)
    return shown


def _ids(prompt: Prompt) -> Sequence[int]:
    """The tokens of a prompt that a chat template made."""
    assert isinstance(prompt, dict)
    ids = prompt["prompt_token_ids"]
    return ids.ids if isinstance(ids, EncodedPrompt) else ids
