"""llama.cpp's own converter over a checkpoint of random weights, in an environment that has torch and transformers.

    python gguf_converted.py SOURCES FOLDER OUT.gguf

SOURCES is the folder of llama.cpp. Names, order and numbers of tensors and all keys are the converter's. The vocabulary
is the made-up one of shapes.py. Matrices are bf16.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any


def main(sources: str, folder: str, out: str) -> None:
    """Convert one checkpoint."""
    sys.path[:0] = [sources, str(Path(sources) / "gguf-py")]
    import gguf
    import torch
    from conversion import get_model_class
    from gguf_files import add_vocabulary

    logging.disable(logging.WARNING)
    config = json.loads((Path(folder) / "config.json").read_text())

    def set_vocab(self: Any) -> None:
        add_vocabulary(self.gguf_writer, config["vocab_size"])

    kind = get_model_class(config["architectures"][0])
    own = {"set_vocab": set_vocab, "model_arch": kind.model_arch, "no_mtp": True}  # transformers makes no such head
    made = type(kind.__name__, (kind,), own)
    with torch.inference_mode():
        made(Path(folder), gguf.LlamaFileType.MOSTLY_BF16, Path(out), model_name="random").write()


if __name__ == "__main__":
    main(*sys.argv[1:])
