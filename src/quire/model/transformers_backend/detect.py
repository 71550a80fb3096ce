"""Models without a row in the table of families, by the modelling code of the installed transformers: what they are.

The slow path: torch runs what is between the matrices, eagerly, and no step is recorded. Keys and values, scheduling
and sampling are quire's own. Only code of the installed package runs, never code from a model folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.dtypes import Dtype
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import Checkpoint, float_dtype
from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.families.find import has_row
from quire.model.families.multimodal import MULTIMODAL, REFUSED
from quire.model.families.rope import NO_ROPE
from quire.model.families.table import FAMILIES
from quire.model.families.text_parts import text_part
from quire.model.spec import ModelSpec
from quire.model.transformers_backend.source_facts import Fields, SourceFacts, causal_classes, package, source_facts

SLOW = (
    "model_type {!r} is not in the table of families: it runs by the code of the installed transformers, which is the "
    "slow path (several times slower than a family of the table)"
)
OWN_CODE = "auto_map in config.json is ignored: code from a model folder is never run"
LAYER_KINDS = ("full_attention", "sliding_attention")
CHANGING_ROPES = ("dynamic", "longrope")
"""Kinds whose frequencies change with the longest sequence of a batch: cached keys would no longer fit."""


@dataclass(frozen=True)
class TransformersModel:
    """A folder whose model transformers has code for. `code` is the class, `config` its configuration.

    `spec` holds what config.json says; the attention of each layer is known when the model was loaded.
    """

    folder: Path
    code: Any
    config: Any
    spec: ModelSpec
    checkpoint: Checkpoint
    notes: tuple[str, ...]

    @property
    def dtype(self) -> Dtype:
        """The dtype of most numbers on disk."""
        return float_dtype(self.checkpoint.infos)


def known_to_transformers(model_type: str) -> bool:
    """Whether the installed transformers has a causal language model of that type; False when it is not installed."""
    root = package()
    return root is not None and model_type in causal_classes(root)


def is_borrowed(folder: Path) -> bool:
    """Whether no row of the table reads the model in `folder`, and transformers has code for it."""
    return not folder.is_file() and _without_row(_raw(folder)) != ""


def find_borrowed(folder: Path) -> TransformersModel | None:
    """The model in `folder` when no row of the table reads it and transformers has code for it, else None.

    Headers and config only. `ModelError` with the reason when that code cannot run over a paged cache.
    """
    if not is_borrowed(folder):
        return None
    raw = _raw(folder)
    config = _read_config(folder, raw)
    code = _class_of(config, raw)
    _check(_reasons(code, config, raw), raw)
    return _found(folder, code, config, raw)


def borrowed_headers(folder: Path) -> TransformersModel | None:
    """Work as `find_borrowed` for a description alone, without importing transformers where its source says enough.

    `code` and `config` are then None.
    """
    if not is_borrowed(folder):
        return None
    raw, root = _raw(folder), package()
    facts = None if root is None else source_facts(root, str(raw.raw["model_type"]))
    if facts is None:
        return find_borrowed(folder)
    fields = Fields(raw.raw, facts)
    try:
        found = _found(folder, None, fields, raw)
    except ModelError:  # what is wrong is said as transformers says it
        return find_borrowed(folder)
    _check(_reasons_of_source(facts, fields, raw), raw)
    return found


def _raw(folder: Path) -> HfConfig:
    path = folder / "config.json"
    return HfConfig(read_json(path), str(path))


def _without_row(raw: HfConfig) -> str:
    """The model type if it has no row and transformers knows it, else ""."""
    model_type = raw.raw.get("model_type")
    own = (*FAMILIES, *MULTIMODAL, *REFUSED)
    if not isinstance(model_type, str) or model_type in own or not known_to_transformers(model_type):
        return ""
    part = text_part(raw.raw)
    return "" if part is not None and has_row(part.config["model_type"]) else model_type


def _ignored(raw: HfConfig) -> list[str]:
    return [OWN_CODE] if raw.has("auto_map") else []


def _check(reasons: Iterator[str], raw: HfConfig) -> None:
    """Refuse a model for the first of `reasons`."""
    for reason in reasons:
        said = f"{raw.raw['model_type']!r} cannot run by the code of transformers: {reason}"
        raise raw.fail("model_type", "; ".join([said, *_ignored(raw)]))


def _found(folder: Path, code: Any, config: Any, raw: HfConfig) -> TransformersModel:
    model_type = str(raw.raw["model_type"])
    notes = (SLOW.format(model_type), *_ignored(raw))
    return TransformersModel(folder, code, config, _spec(model_type, config, raw), Checkpoint(folder), notes)


def _read_config(folder: Path, raw: HfConfig) -> Any:
    """transformers' own reading, with its defaults; whatever it finds wrong is the file's fault."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{raw.where}: transformers cannot read it: {type(error).__name__}: {error}") from None


def _class_of(config: Any, raw: HfConfig) -> Any:
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is None or isinstance(found, (list, tuple)):
        raise raw.fail("model_type", "transformers names no single causal model for it")
    return found


def _reasons(code: Any, config: Any, raw: HfConfig) -> Iterator[str]:
    """Why the model cannot run over a paged cache of keys and values."""
    stateful = getattr(code, "_is_stateful", False)
    interface = getattr(code, "_supports_attention_backend", False)
    return _reasons_from(config, raw, config.get_text_config() is not config, stateful, interface)


def _reasons_of_source(facts: SourceFacts, config: Fields, raw: HfConfig) -> Iterator[str]:
    """`_reasons` as far as they are seen without running code."""
    return _reasons_from(config, raw, raw.has("text_config"), facts.stateful, facts.interface)


def _reasons_from(config: Any, raw: HfConfig, more: bool, stateful: bool, interface: bool) -> Iterator[str]:
    if raw.has("quantization_config"):
        yield "the checkpoint is quantized; use the unquantized one and --quantization"
    if more:
        yield "it reads more than text"
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder and a decoder"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS))
    if kinds or stateful:
        what = f"layers of kind {', '.join(kinds)}" if kinds else "layers"
        yield f"it has {what} whose state is not keys and values per token"
    if not interface:
        yield "its attention does not go through transformers' attention interface"
    changing = sorted({kind for kind in _rope_types(config) if kind in CHANGING_ROPES})
    if changing:
        yield f"its rope ({', '.join(changing)}) changes with the longest sequence of a batch"


def _rope_types(config: Any) -> Iterator[str]:
    """The kinds of rope of all layers: one, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):  # files of earlier versions have the second
        rope = getattr(config, name, None)
        for part in (rope, *rope.values()) if isinstance(rope, Mapping) else ():
            kind = part.get("rope_type", part.get("type")) if isinstance(part, Mapping) else None
            if isinstance(kind, str):
                yield kind


def _spec(model_type: str, config: Any, raw: HfConfig) -> ModelSpec:
    """What the engine must know before loading; `config` knows its fields by their usual names too."""
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    found = HfConfig({name: _field(config, name) for name in names}, raw.where)
    layers, heads = found.integer("num_hidden_layers", high=1024), found.integer("num_attention_heads", high=1 << 12)
    hidden, vocabulary = found.integer("hidden_size", high=1 << 20), found.integer("vocab_size", high=1 << 24)
    kv_heads = found.raw["num_key_value_heads"]
    width = found.raw["intermediate_size"]
    bos = found.token_ids("bos_token_id", vocabulary)
    return ModelSpec(
        family=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads,
        head_dim=padded(found.integer("head_dim", max(hidden // heads, 1), high=1 << 12)),
        intermediate=width if isinstance(width, int) else 0,
        vocab_size=vocabulary,
        norm_eps=0.0,
        activation=str(getattr(config, "hidden_act", None) or ""),
        rope=(NO_ROPE,) * layers,
        windows=(0,) * layers,
        attention_scale=1.0,
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        max_position=found.integer("max_position_embeddings", 2048, high=1 << 27),
        eos_token_ids=found.token_ids("eos_token_id", vocabulary),
        bos_token_id=bos[0] if bos else None,
    )


def _field(config: Any, name: str) -> Any:
    """A field of the configuration; None where it is missing, or differs by layer and is refused for that."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def padded(head_dim: int) -> int:
    """Numbers of a head in the cache: attention kernels read multiples of 8."""
    return -(-head_dim // 8) * 8
