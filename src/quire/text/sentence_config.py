"""What sentence-transformers keeps beside a model: how long texts may be, whether capitals are read, modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import normalizers

from quire.core.errors import ModelError
from quire.core.files import read_json, read_text

FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file in the order in which sentence-transformers looks for one."""
MODULES = "modules.json"
TASKS = "config_sentence_transformers.json"


def sentence_config(folder: Path) -> dict[str, Any]:
    """The first of `FILES` in `folder` that says anything; {} if there is none."""
    return next((found for name in FILES if (found := read_json(folder / name))), {})


def sentence_files(folder: Path) -> tuple[str, ...]:
    """Names of sentence-transformers' files that may be in `folder`, and of the folders of its modules: all that says
    how vectors are made, without the transformer. `ModelError` for a modules.json that is not JSON."""
    path = folder / MODULES
    if not path.is_file():
        return MODULES, TASKS, *FILES
    try:
        modules = msgspec.json.decode(read_text(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    found = [each.get("path") for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    named = [each for each in found if isinstance(each, str) and each not in ("", ".", "..")]
    return MODULES, TASKS, *FILES, *(each for each in named if Path(each).name == each)


def set_lower_case(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Have `backend` make capitals small before anything else, where the files of `folder` say `do_lower_case`."""
    if sentence_config(folder).get("do_lower_case") is not True:
        return
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
