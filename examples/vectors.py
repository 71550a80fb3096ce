"""Compute embeddings of texts, and compare texts."""

from quire import LLM, PoolingParams


def main() -> None:
    """Print embeddings and scores of the bundled model, which was not trained for embeddings."""
    with LLM() as llm:
        texts = ["os.path.join", "os.path.split", "json.dumps"]
        for text, output in zip(texts, llm.embed(texts, PoolingParams(dimensions=64)), strict=True):
            vector = output.outputs.embedding
            print(f"{text:14} {len(vector)} numbers: {', '.join(f'{x:.3f}' for x in vector[:4])} ...")
        for text, output in zip(texts[1:], llm.score(texts[0], texts[1:]), strict=True):
            print(f"{texts[0]} and {text}: {output.outputs.score:.3f}")


if __name__ == "__main__":
    main()
