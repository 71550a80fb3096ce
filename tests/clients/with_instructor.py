"""Instructor: an object of pydantic's, by a JSON schema."""

from __future__ import annotations

from importlib.metadata import version

import instructor
from asked import QUESTION, URL
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(le=99)


client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model="pydoc", response_model=Person, max_retries=0, max_tokens=80, messages=[{"role": "user", "content": QUESTION}]
)
assert isinstance(found, Person)
print(f"instructor {version('instructor')}: {found!r}")
