"""LlamaIndex's OpenAILike: completions, chat, streams."""

from __future__ import annotations

from importlib.metadata import version

from asked import QUESTION, URL
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="pydoc", api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=24, temperature=0
)
whole = model.chat([ChatMessage(role="user", content=QUESTION)]).message.content
assert whole
assert "".join(c.delta or "" for c in model.stream_chat([ChatMessage(role="user", content=QUESTION)])) == whole
plain = OpenAILike(model="pydoc", api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8)
assert plain.complete("def join(").text
print(f"llama-index {version('llama-index-core')}: chat, stream, completion")
