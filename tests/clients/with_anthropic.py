"""Anthropic's client: messages, streams, counts, structured output."""

from __future__ import annotations

from anthropic import Anthropic, __version__
from asked import QUESTION, SCHEMA, URL, person

client = Anthropic(base_url=URL, api_key="none")
asked = {
    "model": "pydoc",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": QUESTION}],
}
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
count = client.messages.count_tokens(model="pydoc", messages=asked["messages"])
assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
person(client.messages.create(**(asked | {"max_tokens": 80}), output_config=shape).content[0].text)
print(f"anthropic {__version__}: messages, stream, count, structured output")
