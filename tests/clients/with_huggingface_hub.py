"""Hugging Face's InferenceClient: chat, and TGI's text generation, whole and as streams."""

from __future__ import annotations

from asked import QUESTION, URL
from huggingface_hub import InferenceClient, __version__

chat = InferenceClient(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": QUESTION}]
assert chat.chat_completion(messages, model="pydoc", max_tokens=24).choices[0].message.content
stream = chat.chat_completion(messages, model="pydoc", max_tokens=24, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
text = InferenceClient(model=URL, token="none")
whole = text.text_generation("def join(", max_new_tokens=16)
assert "".join(text.text_generation("def join(", max_new_tokens=16, stream=True)).startswith(whole)
print(f"huggingface_hub {__version__}: chat, text generation, streams")
