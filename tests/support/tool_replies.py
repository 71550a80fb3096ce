"""A server whose model says scripted tokens, for tools and reasoning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import live_server
from live_server import LiveServer, live, text_tools
from quire.text.template import ChatTemplate
from stub_engine import StubEngine, stub_info

TEMPLATE = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}
{%- if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}
{%- if tools %}{{ tools | tojson }} <tool_call>{% endif %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALLS = "".join(f'\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "{c}"}}}}\n</tool_call>' for c in "AB")
SAID = f"{THOUGHT}Let me see.{CALLS}"


@contextlib.contextmanager
def saying(text: str, template: str = TEMPLATE, **options: Any) -> Iterator[LiveServer]:
    """A server whose model says `text`."""
    tokenizer, own = text_tools()
    stub = StubEngine(stub_info(max_model_len=2048))
    stub.script = tokenizer.encode(text, add_special_tokens=False)
    made = ChatTemplate({"default": template}, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_server, "text_tools", lambda: (tokenizer, made if template else own))
        with live(stub, **options) as server:
            yield server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with saying(SAID) as server:
        yield server
