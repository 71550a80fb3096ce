"""Decode with speculative decoding: the same output, in fewer steps."""

from quire import LLM, SamplingParams

PROMPT = "def area(width, height):\n    return width * height\n\n" * 3 + "def area(width"


def main() -> None:
    """Continue a text greedily without drafts, with prompt lookup, and with the model's int4 weights as the draft."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    ways = {
        "plain": None,
        "ngram": {"method": "ngram", "adaptive": False},
        "self": {"method": "self", "quantization": "int4", "adaptive": False},
    }
    texts = set()
    for name, speculative_config in ways.items():
        with LLM(speculative_config=speculative_config, max_model_len=256) as llm:
            output = llm.generate(PROMPT, params)[0]
        texts.add(output.outputs[0].text)
        print(f"{name:6} {output.num_accepted_tokens} of {output.num_draft_tokens} draft tokens were accepted")
    print(f"{len(texts)} text: {texts.pop()!r}")


if __name__ == "__main__":
    main()
