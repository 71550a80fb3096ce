"""How a folder says that its model makes vectors: by sentence-transformers' files, and by its architecture."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ModelError
from quire.core.pooling import DenseModule, Pooling, PoolingKind, Splade
from quire.model.disk.hf_config import HfConfig
from quire.text.sentence_config import MODULES, TASKS, sentence_config

HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Endings of architectures that have a head over the vocabulary; others are only the stack, or classify."""
CLASSIFIES = "ForSequenceClassification"
SPLADE = "SpladePooling"
CLASSIFIER = "score.weight"
"""The matrix [labels, hidden] of such a model of a decoder's family, which reads the last token's row."""
BY_TOKENS = "classifier_from_token"
"""Field of config.json, as vLLM spells it: the tokens of "no" and "yes" by whose logits a reranker answers."""
MAX_BYTES = 1 << 20
FLAG = "pooling_mode_"
STRATEGIES = {"max": False, "sum": True}
TWICE = {"relu": False, "log1p_relu": True}
TWO_WAYS = {
    "Router": "queries and documents are read in different ways",
    "SparseStaticEmbedding": "weights of tokens come from a table, without a transformer",
}
"""Modules of models whose queries need no inference, and why these are refused."""
NO_HEAD = "its modules.json has a 'SpladePooling', and its files no masked-language-model head that is known"
KINDS: dict[str, PoolingKind] = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean",
                                 "lasttoken": "last", "last_token": "last"}  # fmt: skip


def headless(config: HfConfig, head: str, tensors: Collection[str]) -> bool:
    """Whether the model is the stack alone: its architecture has no head, and there is no matrix `head`."""
    named = config.texts("architectures")
    return bool(named) and not any(name.endswith(HEADS) for name in named) and f"{head}.weight" not in tensors


ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}
"""torch's activations, by the end of their names, and ours."""
IDENTITY = "Identity"
OF_SCORES = ("", "Sigmoid", IDENTITY)
"""What may make scores of the logit of one class, by the end of torch's name: a sigmoid, or nothing."""
CUT = "truncate_dim"
ORDER = ("Transformer", "MLMTransformer", "Pooling", SPLADE, "Dense", "Normalize")
"""Modules that are built, each behind those before it; several of the same kind may follow each other."""
IDLE = ("Dropout",)
"""Modules that do nothing but in training."""
VECTOR = (None, "sentence_embedding")
"""Names of what a module reads and writes: the vector, and not the rows of tokens."""


def classifies(config: HfConfig) -> bool:
    """Whether the architecture ends in a matrix of classes, or the head stands for one."""
    return bool(config.texts(BY_TOKENS)) or any(name.endswith(CLASSIFIES) for name in config.texts("architectures"))


def says_splade(folder: Path) -> bool:
    """Whether the modules.json of `folder` says that its vectors are sparse."""
    modules = _json(folder / MODULES, list) or []
    return any(isinstance(each, dict) and str(each.get("type")).rpartition(".")[2] == SPLADE for each in modules)


def read_pooling(
    folder: Path, config: HfConfig, width: int, generates: bool, encoder: bool = False, vocabulary: int = 0
) -> Pooling:
    """What `folder` says, or what is usual: the last token's row, or the mean of an `encoder`, divided by its length.

    `width`: numbers of a row. `vocabulary`: those of a sparse vector, where the folder says that vectors are sparse and
    has the head for them; else 0.
    """
    made = Pooling(kind="mean" if encoder else "last", width=width, generates=generates and not encoder)
    if vocabulary:
        made = msgspec.structs.replace(made, kind="splade", width=vocabulary, normalize=False)
    if folder.is_dir():
        made = _modules(folder, _tasks(folder, made))
        made = msgspec.structs.replace(made, cut=0 if made.kind == "splade" else min(made.cut, made.width))
    if classifies(config):
        found = _classes(config, made, "cls" if encoder else "last", _activation(folder, config))
        return msgspec.structs.replace(found, pairs=encoder)
    sizes = config.raw.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int and 1 <= size <= width for size in sizes):
        made = msgspec.structs.replace(made, dimensions=tuple(sizes))
    return made


def _classes(config: HfConfig, made: Pooling, usual: PoolingKind, activation: str) -> Pooling:
    if tokens := config.texts(BY_TOKENS):
        if len(tokens) != 2:
            raise config.fail(BY_TOKENS, f"names {len(tokens)} tokens, needs those of no and yes")
        return msgspec.structs.replace(made, kind="last", width=1, cut=0, normalize=False, labels=tokens[1:],
                                           several=True)  # fmt: skip
    named = config.raw.get("id2label")
    labels = named if isinstance(named, dict) else {}
    count = len(labels) or config.integer("num_labels", 2, high=1 << 16)
    refused = made.refused
    if count == 1 and activation not in OF_SCORES:
        refused = f"its scores are to go through {activation[:80]!r}; built are Identity and Sigmoid"
    return msgspec.structs.replace(
        made,
        kind=_classified(config, usual),
        width=count,
        normalize=False,
        cut=0,
        labels=tuple(str(labels.get(str(i), f"LABEL_{i}")) for i in range(count)),
        several=count == 1 or config.text("problem_type", "") == "multi_label_classification",
        raw=activation == IDENTITY,
        refused=refused,
        dense=(),
    )


def _classified(config: HfConfig, usual: PoolingKind) -> PoolingKind:
    """The row of which classes are made: as `classifier_pooling` says, or the usual one."""
    said = config.text("classifier_pooling", "")
    known: dict[str, PoolingKind] = {"": usual, "cls": "cls", "bos": "cls", "mean": "mean"}
    if said not in known:
        raise config.fail("classifier_pooling", f"{said!r} is not built; built are cls, bos and mean")
    return known[said]


def _activation(folder: Path, config: HfConfig) -> str:
    """What makes scores of the logits of pairs, as cross-encoders of sentence-transformers name it, by the end
    of its name; "" = not said.

    Folders with modules.json say it in config_sentence_transformers.json, others in config.json.
    """
    of_modules = _json(folder / TASKS, dict) if (folder / MODULES).is_file() else None
    own = config.raw.get("sentence_transformers")
    said = (
        (of_modules or {}).get("activation_fn"),
        own.get("activation_fn") if isinstance(own, dict) else None,
        config.raw.get("sbert_ce_default_activation_function"),
    )
    return next((each.rpartition(".")[2] for each in said if isinstance(each, str)), "")


def _tasks(folder: Path, made: Pooling) -> Pooling:
    """Read what stands before texts by their task, and how long a text may be."""
    own = _json(folder / TASKS, dict) or {}
    found = own.get("prompts")
    prompts = {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    usual = own.get("default_prompt_name")
    longest, cut = sentence_config(folder).get("max_seq_length"), own.get(CUT)
    if cut is not None and (type(cut) is not int or cut < 1):
        raise ModelError(f"{folder / TASKS}: {CUT} must be a number of at least 1")
    return msgspec.structs.replace(
        made,
        prompts=prompts,
        prompt=usual if isinstance(usual, str) and usual in prompts else "",
        longest=longest if type(longest) is int and longest > 0 else 0,
        cut=cut or 0,
    )


def _modules(folder: Path, made: Pooling) -> Pooling:
    """Read modules.json: a transformer, a pooling, dense layers, perhaps a division by the length."""
    modules = _json(folder / MODULES, list)
    if modules is None:
        return made
    kind: PoolingKind | None = None
    refused, dense, last, splade = made.refused, list[DenseModule](), ORDER[0], made.splade
    for module in modules:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelError(f"{folder / 'modules.json'}: each module needs a type")
        name, path = module["type"].rpartition(".")[2], str(module.get("path", ""))
        if name in IDLE:
            continue
        if name in TWO_WAYS:
            refused = refused or f"its modules.json has a {name!r}: {TWO_WAYS[name]}, which is not built"
            continue
        if name not in ORDER:
            refused = refused or f"its modules.json has a {name[:40]!r} behind the transformer, which is not built"
            continue
        if ORDER.index(name) < ORDER.index(last):
            refused = refused or f"its modules.json has a {name!r} behind a {last!r}; built are {', '.join(ORDER)}"
        last = name
        if name == "Pooling":
            kind, reason = _kind(folder, path, any(made.prompts.values()))
            refused = refused or reason
        elif name == SPLADE:
            splade = _splade(folder, path)
            refused = refused or ("" if made.kind == "splade" else NO_HEAD)
        elif name == "Dense":
            dense.append(_dense(folder, path))
    width, normalize = dense[-1].width if dense else made.width, last == "Normalize"
    if made.kind == "splade" and (kind or dense or normalize):
        refused = refused or f"its modules.json has other poolings or layers beside its {SPLADE!r}, which is not built"
    return msgspec.structs.replace(
        made,
        kind=kind or made.kind,
        normalize=normalize,
        refused=refused,
        dense=tuple(dense),
        width=width,
        splade=splade,
    )


def _splade(folder: Path, path: str) -> Splade:
    """How logits become a sparse vector, as sentence-transformers' SparseEncoder has it."""
    found = _settings(folder, path)
    strategy, activation = found.get("pooling_strategy", "max"), found.get("activation_function", "relu")
    if strategy not in STRATEGIES or activation not in TWICE:
        raise ModelError(
            f"{folder / path / 'config.json'}: needs a pooling_strategy of {', '.join(STRATEGIES)} and an "
            f"activation_function of {', '.join(TWICE)}"
        )
    return Splade(STRATEGIES[strategy], TWICE[activation])


def _dense(folder: Path, path: str) -> DenseModule:
    """The dense layer that lies at `path` below `folder`; without a name of its activation, that is tanh."""
    found, where = _settings(folder, path), folder / path / "config.json"
    said = str(found.get("activation_function", "torch.nn.Tanh"))
    width, named = found.get("out_features"), said.rpartition(".")[2] if said.startswith("torch.") else said
    if type(width) is not int or width < 1 or named not in ACTIVATIONS:
        raise ModelError(f"{where}: needs out_features above 0 and an activation_function of {', '.join(ACTIVATIONS)}")
    if found.get("use_residual"):
        raise ModelError(f"{where}: use_residual adds what the layer read to what it makes, which is not built")
    if not {found.get("module_input_name"), found.get("module_output_name")} <= {*VECTOR}:
        raise ModelError(
            f"{where}: the layer is for rows of tokens, which is not built; built are layers of the vector"
        )
    return DenseModule(path, width, ACTIVATIONS[named])


def _settings(folder: Path, path: str) -> dict[str, Any]:
    """config.json of the module that lies at `path` below `folder`."""
    if not path or Path(path).name != path:
        raise ModelError(f"{folder / 'modules.json'}: the path {path[:80]!r} is not the name of a folder in this one")
    found: dict[str, Any] | None = _json(folder / path / "config.json", dict)
    if found is None:
        raise ModelError(f"{folder / path / 'config.json'} is missing, modules.json names it; finish the download")
    return found


def _kind(folder: Path, path: str, prompts: bool) -> tuple[PoolingKind | None, str]:
    """How the pooling of `path` below `folder` makes a vector, and why that is refused, if it is. `prompts`: texts may
    have some before them."""
    found = _settings(folder, path)
    mode = found.get("pooling_mode")
    flags = [name.removeprefix(FLAG) for name, on in found.items() if name.startswith(FLAG) and on is True]
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else flags or ["mean"]
    known = [KINDS[name] for name in modes if isinstance(name, str) and name in KINDS]
    if len(modes) == 1 and known:
        without = found.get("include_prompt", True) is False and known[0] != "last" and prompts
        return known[0], "its pooling leaves out the prompt's tokens, which is not built" if without else ""
    return None, f"its pooling is {', '.join(map(str, modes))[:80]}; built are mean, the last and the first token"


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
