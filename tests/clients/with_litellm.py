"""LiteLLM, by three of the APIs it knows: those of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network otherwise

import litellm
from asked import QUESTION, URL

asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0, "api_key": "none"}
said = {
    "openai": litellm.completion(model="openai/pydoc", api_base=f"{URL}/v1", **asked),
    "anthropic": litellm.completion(model="anthropic/pydoc", api_base=URL, **asked),
    "ollama_chat": litellm.completion(model="ollama_chat/pydoc", api_base=URL, **asked),
}
texts = {name: reply.choices[0].message.content for name, reply in said.items()}
assert len(set(texts.values())) == 1 and texts["openai"], texts
stream = litellm.completion(model="openai/pydoc", api_base=f"{URL}/v1", stream=True, **asked)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == texts["openai"]
print(f"litellm {version('litellm')}: {', '.join(said)}, a stream")
