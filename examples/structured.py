"""Get structured output: a JSON schema over HTTP, a choice and a regular expression in this process."""

import json
import sys

from openai import OpenAI

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "arguments": {"type": "integer"}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def over_http(base_url: str) -> None:
    """Print answers that match the schema. Each is complete, whatever the model prefers."""
    client = OpenAI(base_url=base_url, api_key="none")
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is math.gcd?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "function", "schema": SCHEMA}},
        max_tokens=60,
    )
    print(json.loads(reply.choices[0].message.content))


def main(base_url: str = "") -> None:
    """In this process; and over HTTP where a server's address was given."""
    with LLM() as llm:
        for shape in (StructuredOutputsParams(choice=["yes", "no"]), StructuredOutputsParams(regex=r"\d{3}-\d{4}")):
            params = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=shape)
            print(llm.generate("import", params)[0].outputs[0].text)
    if base_url:
        over_http(base_url)


if __name__ == "__main__":
    main(*sys.argv[1:])
