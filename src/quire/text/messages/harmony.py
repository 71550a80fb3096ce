"""gpt-oss's harmony format: channels of reasoning, content and calls
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re

from quire.text.messages.json_calls import arguments
from quire.text.messages.text_source import Malformed, Sink, Steps, TextSource

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS, WORD, FINAL = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final"))
"""What reasoning, a word ahead of a call, and content begin with."""
CALL = f"{CHANNEL}commentary to=functions."
MAX_HEADER = 512
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")


def harmony(source: TextSource) -> Steps[None]:
    """Messages one after the other, the first without <|start|>assistant where the prompt ends with that."""
    while (yield from source.ahead(1)):
        source.hold()
        try:
            sink = yield from _begin(source)
            source.release()
        except Malformed:
            source.give_back()
            sink = source.content
        while (yield from source.until(MARKERS, sink)) in (CHANNEL, MESSAGE, CONSTRAIN):
            pass


def _begin(source: TextSource) -> Steps[Sink]:
    """The header, and the arguments of a call; who gets the rest of the message."""
    yield from source.accept(START)
    yield from source.accept("assistant")
    yield from source.space()
    in_channel = yield from source.accept(CHANNEL)
    if not in_channel and (yield from source.ahead(3)) != "to=":
        raise Malformed
    header, _ = yield from source.until_one((MESSAGE,), MAX_HEADER)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and source.reading.schemas is not None:
        yield from arguments(source, recipient[1])
        return source.content
    return source.reasoning if in_channel and header.split()[:1] == ["analysis"] else source.content
