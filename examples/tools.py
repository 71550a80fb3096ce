"""Let the model call a function, and send the result back. Start the server first: quire serve

The bundled model was not trained to call functions: a grammar enforces the call. A trained model decides by itself
with tool_choice="auto", on a server that can read its calls (--tool-call-parser).
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: str) -> str:
    """What the function would look up."""
    return {"Bern": "12 degrees, rain", "Oslo": "3 degrees, snow"}[city]


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """A call that must come, then an answer to what it gave."""
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=60
    )
    call = reply.choices[0].message.tool_calls[0]
    result = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {result}")
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=30
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
