"""Chat with a server through OpenAI's client. Start the server first: quire serve"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Send two turns of a conversation and print their token counts."""
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What does json.dumps do?"}]
    for question in ("What is math.gcd?", None):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=60)
        answer = reply.choices[0].message.content
        print(f"{messages[-1]['content']}\n    {answer}")
        print(f"    [{reply.usage.prompt_tokens} tokens read, {reply.usage.completion_tokens} written]")
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main(*sys.argv[1:])
