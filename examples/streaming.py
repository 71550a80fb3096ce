"""Stream an answer and print where its time went. Start a server first: quire serve"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Stream a chat: pieces of text first, then usage and timings in the last events."""
    client = OpenAI(base_url=base_url, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe os.path.join."}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"quire": {"timings": True}},
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
        if event.usage:
            print(f"\n[{event.usage.completion_tokens} tokens]")
        timings = (getattr(event, "quire", None) or {}).get("timings")
        if timings:
            print(f"[first token after {1e3 * timings['ttft_seconds']:.1f} ms]")


if __name__ == "__main__":
    main(*sys.argv[1:])
