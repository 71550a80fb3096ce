"""OpenAI's client: chat, streams, structured output, responses."""

from __future__ import annotations

from asked import QUESTION, SCHEMA, URL, person
from openai import OpenAI, __version__

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": QUESTION}]
whole = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=24, temperature=0)
assert whole.choices[0].message.content and whole.usage.completion_tokens
stream = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=24, temperature=0, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole.choices[0].message.content
shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
answer = client.chat.completions.create(model="pydoc", messages=messages, max_tokens=80, response_format=shape)
person(answer.choices[0].message.content)
first = client.responses.create(model="pydoc", input=QUESTION, max_output_tokens=24, temperature=0)
assert first.output_text == whole.choices[0].message.content
again = client.responses.create(model="pydoc", input="And?", previous_response_id=first.id, max_output_tokens=8)
assert again.usage.input_tokens > first.usage.input_tokens
print(f"openai {__version__}: chat, stream, structured output, responses")
