"""What sentence-transformers keeps beside a model's texts: how long they may be, and whether capitals are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from quire.core.files import read_json

FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file in the order in which sentence-transformers looks for one."""


def sentence_config(folder: Path) -> dict[str, Any]:
    """The first of `FILES` in `folder` that says anything; {} if there is none."""
    return next((found for name in FILES if (found := read_json(folder / name))), {})


def set_lower_case(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Have `backend` make capitals small before anything else, where the files of `folder` say `do_lower_case`."""
    if sentence_config(folder).get("do_lower_case") is not True:
        return
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
