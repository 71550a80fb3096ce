"""Compress the bundled model with a recipe, as `quire compress pydoc OUT --recipe FILE` does, and use it."""

import tempfile
from pathlib import Path

from quire import LLM
from quire.cli.app import app

RECIPE = """
[[stage]]
kind = "quantize"
method = "rtn"
bits = 4
group_size = 32
"""


def main() -> None:
    """Compress and ask. Without --no-passport it also measures perplexity, KL divergence and exact answers."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, out = Path(folder) / "recipe.toml", Path(folder) / "smaller"
        recipe.write_text(RECIPE)
        app(["compress", "pydoc", str(out), "--recipe", str(recipe), "--no-passport"], standalone_mode=False)
        with LLM(out) as llm:
            print(f"{llm.info.weight_bytes / 2**20:.1f} MiB of weights, {llm.info.quantization}")
            print(llm.chat([{"role": "user", "content": "What is math.gcd?"}])[0].outputs[0].text)


if __name__ == "__main__":
    main()
