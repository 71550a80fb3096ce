"""What answers a conversation: the interface that the model in this process and that of a server share."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from quire.cli.chat.answer import Answer
from quire.cli.chat.conversation import Conversation

Stopped = Callable[[], bool]
"""Whether the answer is to end early."""


class ChatBackend(Protocol):
    """A model that answers conversations, one at a time."""

    name: str

    @property
    def facts(self) -> list[str]:
        """Lines of the banner: memory, backend, context; or the server."""

    @property
    def timings(self) -> str:
        """A line about the speed of the last answer; "" where none is known."""

    def check_image(self) -> None:
        """Raise `BadRequest` where the model is known to take no images."""

    def tools_note(self) -> str:
        """Why tools that are offered may have no effect; "" where nothing is known against them."""

    def answer(self, conversation: Conversation, stopped: Stopped, answer: Answer) -> Generator[str, None, None]:
        """Yield what is shown of the answer to the last message, as it comes, and collect it in `answer`.

        Raises `BadRequest` for what the model cannot do.
        """
