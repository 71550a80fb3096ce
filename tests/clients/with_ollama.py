"""Ollama's client: chat, generate, streams, structured output, vectors, lists."""

from __future__ import annotations

from importlib.metadata import version

from asked import QUESTION, SCHEMA, URL, person
from ollama import Client

client = Client(host=URL)
options = {"num_predict": 24, "temperature": 0}
messages = [{"role": "user", "content": QUESTION}]
whole = client.chat(model="pydoc", messages=messages, options=options)
lines = client.chat(model="pydoc", messages=messages, options=options, stream=True)
assert "".join(line.message.content for line in lines) == whole.message.content
assert client.generate(model="pydoc", prompt=QUESTION, options=options).response == whole.message.content
person(client.chat(model="pydoc", messages=messages, format=SCHEMA, options={"num_predict": 80}).message.content)
assert "pydoc" in [each.model for each in client.list().models] and client.show("pydoc").capabilities
[row] = client.embed(model="pydoc", input=QUESTION).embeddings
assert abs(sum(number * number for number in row) - 1.0) < 1e-4
print(f"ollama {version('ollama')}: chat, generate, stream, structured output, embed, list, show")
