"""Answer questions and continue texts in this process, without a server."""

from quire import LLM, SamplingParams


def main() -> None:
    """Answer two chats greedily, then sample two continuations of each of two texts."""
    with LLM() as llm:  # the bundled model; or LLM("path/to/model", quantization="int4")
        questions = ["What does itertools.chain do?", "What is math.gcd?"]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        for question, output in zip(questions, llm.chat(conversations), strict=True):
            print(f"{question}\n    {output.outputs[0].text}")

        params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, n=2, seed=1)
        for output in llm.generate(["import os", "def main("], params):
            for continuation in output.outputs:
                print(f"{output.prompt!r} + {continuation.text!r} ({continuation.finish_reason})")


if __name__ == "__main__":
    main()
