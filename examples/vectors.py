"""Vectors of texts, and how near texts are to each other."""

from quire import LLM, PoolingParams


def main() -> None:
    """Any decoder gives vectors: here the embedded model, whose vectors nobody trained to mean something."""
    with LLM() as llm:
        texts = ["os.path.join", "os.path.split", "json.dumps"]
        for text, output in zip(texts, llm.embed(texts, PoolingParams(dimensions=64)), strict=True):
            vector = output.outputs.embedding
            print(f"{text:14} {len(vector)} numbers: {', '.join(f'{x:.3f}' for x in vector[:4])} ...")
        for text, output in zip(texts[1:], llm.score(texts[0], texts[1:]), strict=True):
            print(f"{texts[0]} and {text}: {output.outputs.score:.3f}")


if __name__ == "__main__":
    main()
