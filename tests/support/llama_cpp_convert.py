"""llama.cpp's own converter over checkpoints without a tokenizer: `tests/gguf/test_llama_cpp.py` runs it as a process.

    python llama_cpp_convert.py SOURCES < {"folder": ..., "out": ..., "mmproj": false} a line

SOURCES is the folder of llama.cpp. Every file gets the made-up vocabulary of gguf_models.py; all else, names and order
of tensors, what is done to their numbers, every other key, is the converter's. "mmproj": the file of what makes rows of
images, which has no vocabulary. Prints a line per file written, or per one that was not, with "error".
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

INNER = {"ministral3": "Ministral3Model", "mistral4": "Mistral4Model"}
"""Model type -> the class within that of its architecture which writes the file."""


AS_IT_LIES = ("nemotron_h",)
"""Model types whose releases transformers cannot read without their own code, so that the converter reads the file
itself; transformers' class adds fields of experts."""


def main() -> None:
    """Read commands until the input ends."""
    sources = Path(sys.argv[1])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    import torch
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, get_model_architecture
    from conversion.bert import BertModel

    from gguf_models import add_vocabulary

    logging.disable(logging.WARNING)

    def set_vocab(self: Any) -> None:
        add_vocabulary(self.gguf_writer, self.hparams.get("padded_vocab_size", self.hparams["vocab_size"]))
        if isinstance(self, BertModel):
            self.gguf_writer.add_token_type_count(self.hparams.get("type_vocab_size", 1))

    def convert(folder: Path, out: Path, mmproj: bool, options: dict[str, Any]) -> None:
        config = json.loads((folder / "config.json").read_text())
        name = config["architectures"][0]
        if mmproj:
            name = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.MMPROJ)
        kind = get_model_class(name, mmproj=mmproj)
        kind = getattr(kind, INNER.get(config["model_type"], ""), kind)
        own = {"set_vocab": set_vocab, "_get_suppress_tokens": lambda self: [], "model_arch": kind.model_arch}
        own |= {"no_mtp": True}  # of which these have none
        own |= {"_lora_files": {}, "_lora_names": []}  # which its class keeps for the next model
        made = type(kind.__name__, (kind,), own)
        with torch.inference_mode():
            hparams = None if mmproj else kind.load_hparams(folder, False) | config
            if config["model_type"] in AS_IT_LIES and not mmproj:
                hparams = {name: value for name, value in config.items() if value is not None}
            made(folder, gguf.LlamaFileType.ALL_F32, out, model_name="tiny", hparams=hparams, **options).write()

    for line in sys.stdin:
        command = json.loads(line)
        try:
            convert(
                Path(command["folder"]), Path(command["out"]), command.get("mmproj", False), command.get("options", {})
            )
            print(json.dumps({"out": command["out"]}), flush=True)
        except Exception:
            print(json.dumps({"error": traceback.format_exc()[-1500:]}), flush=True)


if __name__ == "__main__":
    main()
