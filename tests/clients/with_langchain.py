"""LangChain's ChatOpenAI: chat, streams, structured output."""

from __future__ import annotations

from importlib.metadata import version

from asked import QUESTION, SCHEMA, URL
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="pydoc", temperature=0, max_tokens=24)
whole = model.invoke(QUESTION)
assert whole.content and whole.usage_metadata["output_tokens"]
assert "".join(chunk.content for chunk in model.stream(QUESTION)) == whole.content
shaped = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="pydoc", max_tokens=80)
found = shaped.with_structured_output({"title": "person", **SCHEMA}, method="json_schema").invoke(QUESTION)
assert isinstance(found["age"], int)
print(f"langchain-openai {version('langchain-openai')}: chat, stream, structured output")
