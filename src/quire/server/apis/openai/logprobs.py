"""Log-probabilities (nats) in OpenAI's two shapes and vLLM's one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.request import TokenLogprob
from quire.server.apis.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    TopLogprob,
)
from quire.text.tokenizer import Tokenizer

BYTES = 64
"""Of JSON that one log-probability takes, about."""
FLOOR = -9999.0  # JSON has no infinity; vLLM's value for a token that cannot be chosen


def _nats(value: float) -> float:
    return max(value, FLOOR)


def weight(items: Sequence[TokenLogprob]) -> int:
    """Bytes of JSON that `items` become, about."""
    return BYTES * len(items) * (1 + len(items[0].top)) if items else 0


class LogprobWriter:
    """Names tokens as clients expect them: text, `bytes:\\xe2` for a part of a character, or `token_id:17` if asked."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, str] = {}

    def name(self, token: int) -> str:
        """How a reply writes the token."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._name(token)
        return name

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        data = self._tokenizer.id_to_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def completion(self, items: Sequence[TokenLogprob | int], count: int, offsets: list[int]) -> CompletionLogprobs:
        """The parallel lists of /v1/completions for tokens that begin at the characters `offsets` of the text.

        A bare id is a token without a log-probability: the first of an echoed prompt.
        """
        out = CompletionLogprobs(text_offset=offsets)
        for item in items:
            token = item if isinstance(item, int) else item.token
            name = self.name(token)
            out.tokens.append(name)
            if isinstance(item, int):
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for other, logprob in item.top[:count]:
                top.setdefault(self.name(other), _nats(logprob))
            top.setdefault(name, _nats(item.logprob))
            out.token_logprobs.append(_nats(item.logprob))
            out.top_logprobs.append(top)
        return out

    def chat(self, items: Sequence[TokenLogprob], count: int) -> ChatLogprobs:
        """The list of /v1/chat/completions."""
        content = [
            ChatTokenLogprob(
                token=self.name(item.token),
                logprob=_nats(item.logprob),
                bytes=list(self._tokenizer.id_to_bytes(item.token)),
                top_logprobs=[
                    TopLogprob(token=self.name(t), logprob=_nats(v), bytes=list(self._tokenizer.id_to_bytes(t)))
                    for t, v in item.top[:count]
                ],
            )
            for item in items
        ]
        return ChatLogprobs(content=content)

    def prompt(self, prompt: Sequence[int], found: Sequence[TokenLogprob], count: int) -> PromptLogprobs:
        """vLLM's `prompt_logprobs`: per prompt token a dict keyed by token id; the first has none."""
        yield from [None] * (len(prompt) - len(found))
        for item in found:
            row: dict[str, Any] = {str(item.token): self._row(item.token, item.logprob, item.rank)}
            for rank, (token, logprob) in enumerate(item.top[:count], 1):
                row.setdefault(str(token), self._row(token, logprob, rank))
            yield row

    def _row(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _nats(logprob), "rank": rank, "decoded_token": self.name(token)}
