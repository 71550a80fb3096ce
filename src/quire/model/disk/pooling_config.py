"""How a folder says that its model makes vectors: by sentence-transformers' files, and by its architecture."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ModelError
from quire.core.pooling import Pooling, PoolingKind
from quire.model.disk.hf_config import HfConfig

HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Endings of architectures that have a head over the vocabulary; others are only the stack, or classify."""
CLASSIFIES = "ForSequenceClassification"
CLASSIFIER = "score.weight"
"""The matrix [labels, hidden] of such a model of a decoder's family, which reads the last token's row."""
BY_TOKENS = "classifier_from_token"
"""Field of config.json, as vLLM spells it: the tokens of "no" and "yes" by whose logits a reranker answers."""
BOTH_WAYS = ("use_bidirectional_attention", "is_bidirectional")
MAX_BYTES = 1 << 20
FLAG = "pooling_mode_"
KINDS: dict[str, PoolingKind] = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean",
                                 "lasttoken": "last", "last_token": "last"}  # fmt: skip


def headless(config: HfConfig, head: str, tensors: Collection[str]) -> bool:
    """Whether the model is the stack alone: its architecture has no head, and there is no matrix `head`."""
    named = config.texts("architectures")
    return bool(named) and not any(name.endswith(HEADS) for name in named) and f"{head}.weight" not in tensors


def classifies(config: HfConfig) -> bool:
    """Whether the architecture ends in a matrix of classes, or the head stands for one."""
    return bool(config.texts(BY_TOKENS)) or any(name.endswith(CLASSIFIES) for name in config.texts("architectures"))


def _both_ways(config: HfConfig, name: str) -> bool:
    """Whether all tokens see those behind them; "vision" (Gemma 4) says it of images alone."""
    return config.raw.get(name) == "all" if isinstance(config.raw.get(name), str) else config.flag(name, False)


def read_pooling(folder: Path, config: HfConfig, width: int, generates: bool) -> Pooling:
    """What `folder` says, or what is usual: the last token's row, divided by its length. `width`: numbers of a row."""
    made = Pooling(width=width, generates=generates)
    if folder.is_dir():
        made = _modules(folder, made)
    if any(_both_ways(config, name) for name in BOTH_WAYS) or not config.flag("is_causal", True):
        why = "its attention reads tokens behind a token too, which no family of the table does"
        made = msgspec.structs.replace(made, refused=why)
    if classifies(config):
        return _classes(config, made)
    sizes = config.raw.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int and 1 <= size <= width for size in sizes):
        made = msgspec.structs.replace(made, dimensions=tuple(sizes))
    return made


def _classes(config: HfConfig, made: Pooling) -> Pooling:
    if tokens := config.texts(BY_TOKENS):
        if len(tokens) != 2:
            raise config.fail(BY_TOKENS, f"names {len(tokens)} tokens, needs those of no and yes")
        return msgspec.structs.replace(made, kind="last", width=1, normalize=False, labels=tokens[1:], several=True)
    named = config.raw.get("id2label")
    labels = named if isinstance(named, dict) else {}
    count = len(labels) or config.integer("num_labels", 2, high=1 << 16)
    return msgspec.structs.replace(
        made,
        kind="last",
        width=count,
        normalize=False,
        labels=tuple(str(labels.get(str(i), f"LABEL_{i}")) for i in range(count)),
        several=count == 1 or config.text("problem_type", "") == "multi_label_classification",
    )


def _modules(folder: Path, made: Pooling) -> Pooling:
    """Read modules.json: a transformer, a pooling, perhaps a division by the length."""
    modules = _json(folder / "modules.json", list)
    if modules is None:
        return made
    kind: PoolingKind | None = None
    refused, normalize = made.refused, False
    for module in modules:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelError(f"{folder / 'modules.json'}: each module needs a type")
        name = module["type"].rpartition(".")[2]
        if name == "Pooling":
            kind, reason = _kind(folder, str(module.get("path", "")))
            refused = refused or reason
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            refused = refused or f"its modules.json has a {name[:40]!r} behind the transformer, which is not built"
    return msgspec.structs.replace(made, kind=kind or made.kind, normalize=normalize, refused=refused)


def _kind(folder: Path, path: str) -> tuple[PoolingKind | None, str]:
    """How the pooling of `path` below `folder` makes a vector, and why that is refused, if it is."""
    if not path or Path(path).name != path:
        raise ModelError(f"{folder / 'modules.json'}: the path {path[:80]!r} is not the name of a folder in this one")
    found = _json(folder / path / "config.json", dict)
    if found is None:
        raise ModelError(f"{folder / path / 'config.json'} is missing, modules.json names it; finish the download")
    mode = found.get("pooling_mode")
    flags = [name.removeprefix(FLAG) for name, on in found.items() if name.startswith(FLAG) and on is True]
    modes = [mode] if isinstance(mode, str) else flags
    known = [KINDS[name] for name in modes if name in KINDS]
    if len(modes) == 1 and known:
        without = found.get("include_prompt", True) is False and known[0] == "mean"
        return known[0], "its pooling leaves out the prompt's tokens, which is not built" if without else ""
    return None, f"its pooling is {', '.join(modes)[:80] or 'unknown'}; built are mean, the last and the first token"


def _json(path: Path, kind: type) -> Any:
    """The JSON of a small file of a `kind`; None where there is none."""
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} is larger than {MAX_BYTES} bytes")
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path}: needs a JSON {'object' if kind is dict else 'list'}")
    return value
