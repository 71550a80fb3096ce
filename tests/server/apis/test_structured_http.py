"""Structured output over HTTP: the shipped server, OpenAI's own client, and one that knows vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.core.structured import StructuredOutputsParams
from serving_process import serving
from shaped import PERSON

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
ASK: Any = [{"role": "user", "content": "Who reads files?"}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with serving("--max-num-seqs", "8") as url, OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made:
        yield made


def test_a_model_of_pydantic_is_parsed(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="pydoc", messages=ASK, response_format=Person, max_tokens=60, temperature=1.5, seed=1
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Person) and reply.choices[0].finish_reason == "stop"


def test_streams_of_many_are_complete(client: OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    def one(seed: int) -> str:
        stream = client.chat.completions.create(
            model="pydoc", messages=ASK, response_format=shape, max_tokens=20 + seed, temperature=1.5, seed=seed,
            stream=True,
        )  # fmt: skip
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(6) as threads:
        for text in threads.map(one, range(12)):
            jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("more", "answers"),
    [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_regex": "(ab){2}"}, ("abab",)),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"json_schema": {"enum": ["x", "y"]}}, ('"x"', '"y"')),
        ({"response_format": {"type": "json_object", "schema": {"enum": ["x", "y"]}}}, ('"x"', '"y"')),
        ({"guided_json": {"const": 5}}, ("5",)),
    ],
    ids=str,
)
def test_vllms_names(client: OpenAI, more: dict[str, Any], answers: tuple[str, ...]) -> None:
    reply = client.completions.create(model="pydoc", prompt="a", max_tokens=9, n=2, temperature=1.5, extra_body=more)
    assert {choice.text for choice in reply.choices} <= set(answers)


def test_the_server_says_what_llm_says(client: OpenAI) -> None:
    shape = StructuredOutputsParams(json=PERSON)
    with LLM() as llm:
        asked = SamplingParams(structured_outputs=shape, max_tokens=40, temperature=1.2, seed=5)
        want = llm.generate("The reader is ", asked, use_tqdm=False)[0].outputs[0].text
    more = {"structured_outputs": {"json": PERSON}}
    reply = client.completions.create(
        model="pydoc", prompt="The reader is ", max_tokens=40, temperature=1.2, seed=5, extra_body=more
    )
    assert reply.choices[0].text == want


def test_too_few_tokens_say_how_many(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"max_tokens: 3 tokens cannot hold .*; \d+ are needed"):
        client.completions.create(
            model="pydoc", prompt="a", max_tokens=3, extra_body={"structured_outputs": {"json": PERSON}}
        )


BOMB = "((a{1,100}){1,100}){1,100}"


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": BOMB}},
        {"guided_regex": BOMB},
        {"structured_outputs": {"grammar": f"start: WORD\nWORD: /{BOMB}/"}},
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(client: OpenAI, more: dict[str, Any]) -> None:
    said = set()
    for _ in range(4):
        reply = client.completions.create(model="pydoc", prompt="x", max_tokens=60, extra_body=more, temperature=0)
        said.add((reply.choices[0].text, reply.choices[0].finish_reason))
    [(text, reason)] = said
    assert set(text) == {"a"} and reason == "stop"
    metrics = httpx.get(f"{client.base_url}".replace("/v1/", "/metrics")).text
    restarts = [line for line in metrics.splitlines() if line.startswith("quire:engine_restarts_total")]
    assert all(float(line.rpartition(" ")[2]) == 0 for line in restarts) and restarts, "the engine stays"
    assert client.completions.create(model="pydoc", prompt="x", max_tokens=3).choices[0].text
