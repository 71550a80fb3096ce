"""GGUF files as models: metadata becomes the fields of a config.json, and roles take the names that the format has.
See docs/design/weight-formats.md.

Everything behind that is shared with folders: the families table, the claim of every tensor, cutting and packing. What
the format's converter has done to the weights is undone here: Gemma's norms hold 1 + weight already, and some
architectures have the rows of queries and keys interleaved for rope.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from quire.core.errors import ModelError
from quire.gguf.file import CLIP, GgufFile
from quire.gguf.vocab import end_ids, special_ids, vocab_size
from quire.model.disk.gguf_architecture import Architecture, TensorShapes
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.disk.gguf_layers import Layers
from quire.model.disk.gguf_lists import ListedVectors
from quire.model.disk.gguf_names import (
    FIELDS,
    GATING,
    INNER,
    KEY_LENGTHS,
    KV_HEADS,
    LATENT_LENGTHS,
    LOG_MULTIPLIER,
    NAMES,
    NEXTN,
    NORMED,
    PARTED,
    RECURRENT,
    ROPE_FIELDS,
    ROPE_TENSORS,
    STILL,
    VALUE_LENGTHS,
    WIDTH,
    WINDOW,
    YARN_FACTOR,
)
from quire.model.disk.gguf_pooling import behind_pooled, pooled_fields, steps_in_files
from quire.model.disk.gguf_tensors import GgufTensors, open_files
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewritten
from quire.model.families.elsewhere import alike, why_no_gguf
from quire.model.families.find import read_spec
from quire.model.families.row import Family
from quire.model.load.roles import FUSED
from quire.model.spec import ModelSpec
from quire.text.gguf_words import why_no_tokenizer


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose header was read."""

    file: GgufFile
    tensors: GgufTensors
    architecture: Architecture
    prefix: str
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, known: Mapping[str, Architecture] = ARCHITECTURES) -> Self:
        """Read the header; `ModelError` for a file, an architecture (not `known`) or a key that cannot be read."""
        files = open_files(path)
        file = files[0]
        name = file.metadata.get("general.architecture")
        if name == CLIP:
            raise file.fail("general.architecture", "is that of a mmproj file, which --mmproj names beside its model")
        if not isinstance(name, str) or name not in known:
            why = why_no_gguf(str(name)) or alike(str(name), known)
            raise file.fail("general.architecture", f"{name!r:.40} is not supported; {why}")
        found = cls(file, GgufTensors(files), known[name], f"{name}.")
        fixed = found.architecture.fixed
        for key, value in file.metadata.items():
            below = key.removeprefix(found.prefix)
            if below != key and below in fixed and value != fixed[below]:
                raise file.fail(key, f"is {value!r:.40}, {fixed[below]} is what {name} models have")
            if below != key and below not in found.architecture.known:
                raise file.fail(key, "is not known: the model may have a feature that is not supported")
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the file beside its tensors."""
        why = why_no_tokenizer(self.file)
        return (f"{why}: texts need the original folder as --tokenizer",) if why else ()

    def source(self) -> Rewritten:
        """The tensors, with a name for each expert's matrix."""
        architecture, tensors = self.architecture, self.tensors
        if not architecture.vectors:
            return Rewritten(tensors, architecture.seen)
        names = {f"blk.{{}}.{NAMES[role]}.weight": key for role, key in architecture.vectors.items()}
        return Rewritten(ListedVectors(tensors, self.file, names, self.get("block_count")), architecture.seen)

    def read_spec(self) -> tuple[ModelSpec, Family, HfConfig]:
        """Spec, family with the names of this format, and config as the families table reads it."""
        where = str(self.file.path)
        try:
            spec, family, config = read_spec(self.config(), where)
        except ModelError as error:
            name = error.message.removeprefix(f"{where}: ").partition(":")[0]
            if name not in self._fields:
                raise
            key = f"{self.prefix}{self._fields[name]} ({name})"
            message = error.message.replace(f"{where}: {name}: ", f"{where}: {key}: ", 1)
            raise ModelError(message) from None
        return *self.as_stored(spec, family), config

    def as_stored(self, spec: ModelSpec, family: Family) -> tuple[ModelSpec, Family]:
        """Spec and family of a model as files of this format have it."""
        spec = replace(spec, norm=spec.norm.removesuffix("1p"), interleaved_rope=self.architecture.interleaved)
        names = names_of(family.names, self.tensors.headers, self.architecture.called(spec))
        required = tuple(part for name in (*family.required, *self.architecture.required) for part in _unfused(name))
        family = replace(family, names=names, required=required, grouped_qkv=False, prefix="")
        beyond = tuple(names["layer"].format(spec.layers + i) for i in range(self.get(NEXTN) or 0))
        skipped = (*self.architecture.skipped, *behind_pooled(self.architecture), *beyond)
        family = replace(as_in_files(family, self.architecture), skipped=skipped)
        return spec, family

    def get(self, below: str) -> Any:
        """The value of a key under the architecture's name; an array whose entries are all the same is one value."""
        value = self.file.metadata.get(self.prefix + below)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise self.file.fail(self.prefix + below, "differs by layer, which is not supported")
            return value[0].item()
        return value

    def _each(self, below: str) -> Any:
        """The value of a key, a list where it has one."""
        value = self.file.metadata.get(self.prefix + below)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def config(self) -> dict[str, Any]:
        """The metadata as fields of config.json, checked by whoever reads those."""
        architecture = self.architecture
        own = (KV_HEADS, WIDTH) if architecture.kinds else (*architecture.ragged, *architecture.each)
        raw = nested({ours: self.get(key) for ours, key in self._fields.items() if ours not in own})
        raw["num_hidden_layers"] = self._own_layers(raw["num_hidden_layers"])
        raw |= {ours: value for ours, value in architecture.defaults.items() if raw.get(ours) is None}
        raw |= {**architecture.facts, **(self._by_layers(raw["num_hidden_layers"]) if architecture.kinds else {})}
        raw |= {name: self._each(self._fields[name]) for name in architecture.ragged}
        for name, of_layers in architecture.each.items():
            value = self._each(self._fields[name])
            raw |= {name: value[0], of_layers: value} if isinstance(value, list) and value else {name: value}
        held = TensorShapes({name: tensor.shape for name, tensor in self.tensors.headers.items()})
        for flag, parts in architecture.told.items():
            raw[flag] = any(map(held, (parts,) if isinstance(parts, str) else parts))
        row = (raw["num_experts"] and architecture.mixture) or architecture.model_type
        row = architecture.scored.get(self.get(GATING), row)
        raw["model_type"] = architecture.normed if architecture.normed and self.get(NORMED) else row
        raw["num_key_value_heads"] = raw["num_key_value_heads"] or raw["num_attention_heads"]
        size = self.get("vocab_size")
        raw["vocab_size"] = vocab_size(self.file) if size is None else size
        raw["tie_word_embeddings"] = not any(name.startswith("output.") for name in self.tensors.infos)
        if "tokenizer.ggml.tokens" in self.file.metadata:
            raw["eos_token_id"] = list(end_ids(self.file))
            raw["bos_token_id"] = special_ids(self.file).get("bos_token")
        raw |= pooled_fields(self.file, self.prefix, held, architecture)
        self._recurrent(raw)
        if raw["num_attention_heads"] == 0:  # no layer attends
            del raw["num_attention_heads"], raw["num_key_value_heads"]
        elif architecture.latent:
            self._latents(raw)
        else:
            self._heads(raw)
        self._window(raw)
        self._rope(raw)
        raw |= {name: self._each(key) for name, key in architecture.lists.items()}
        raw |= further_of(architecture, raw, held, f"{self.file.path}: {self.prefix}")
        raw |= {name: raw[ours] for ours, name in architecture.spelling if raw.get(ours) is not None}
        kept = {"sliding_window"} | ({"q_lora_rank"} if architecture.latent else set())  # null says that there is none
        return {name: value for name, value in raw.items() if value is not None or name in kept}

    @property
    def _fields(self) -> dict[str, str]:
        """Field of config.json -> key under the architecture's name."""
        return {**FIELDS, **self.architecture.fields}

    def _own_layers(self, blocks: Any) -> Any:
        """The layers of `blocks` that are the model's own, without those behind them that predict further tokens."""
        further = self.get(NEXTN) or 0
        if type(blocks) is not int or type(further) is not int or not further:
            return blocks
        if not 0 < further < blocks:
            raise self.file.fail(self.prefix + NEXTN, f"is {further}, needs a number of {blocks} blocks")
        return blocks - further

    def _recurrent(self, raw: dict[str, Any]) -> None:
        """The numbers of a head, and which layers are recurrent where the file has a list of them."""
        if self.architecture.quotient is not None:
            heads, size = self.architecture.quotient
            count, inner = raw[heads], self.get(INNER)
            if type(count) is int and type(inner) is int and count > 0:
                if inner % count:
                    raise self.file.fail(self.prefix + INNER, f"is {inner}, not a multiple of {heads} {count}")
                raw[size] = inner // count
        layers = self.file.metadata.get(self.prefix + RECURRENT)
        if isinstance(layers, np.ndarray):
            kinds = ["linear_attention" if recurrent else "full_attention" for recurrent in layers]
            raw["layer_types"] = kinds[: raw["num_hidden_layers"]]

    def _by_layers(self, layers: Any) -> dict[str, Any]:
        """Heads of keys and values, the width of MLPs, and what each of the `layers` is."""
        found: dict[str, list[int]] = {}
        for ours in (KV_HEADS, WIDTH):
            value = self.file.metadata.get(self.prefix + self._fields[ours])
            each = value.tolist() if isinstance(value, np.ndarray) else [value]
            if len({*each} - {0}) > 1:
                raise self.file.fail(
                    self.prefix + self._fields[ours], "differs by layer, and not only in layers that have none"
                )
            found[ours] = each[:layers] if isinstance(value, np.ndarray) else each * (layers or 0)
        common = {ours: next(filter(None, each), None) for ours, each in found.items()}
        if self.architecture.kinds is None or None in found[KV_HEADS]:
            return common
        routed = [f"blk.{i}.ffn_gate_inp.weight" in self.tensors.headers for i in range(len(found[KV_HEADS]))]
        told = Layers(str(self.file.path), found[KV_HEADS], found[WIDTH], routed)
        return {**common, **self.architecture.kinds(told)}

    def _heads(self, raw: dict[str, Any]) -> None:
        """Size of a head, how much of it turns, and the attention scale."""
        config = HfConfig({k: v for k, v in raw.items() if v is not None}, str(self.file.path))
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        size = config.integer("head_dim", hidden // heads)
        for key, value in zip(KEY_LENGTHS, VALUE_LENGTHS, strict=True):
            found, wanted = self.get(value), self.get(key) or size
            if found not in (None, wanted) and "v_head_dim" not in self.architecture.fields:
                raise self.file.fail(self.prefix + value, f"is {found}, needs that of keys, {wanted}")
        raw["head_dim"] = size
        turned = self.get("rope.dimension_count") if self.architecture.turns else None
        if turned is not None:
            if type(turned) is not int or not 2 <= turned <= size or turned % 2:
                raise self.file.fail(
                    self.prefix + "rope.dimension_count", f"is {turned!r:.40}, needs an even number from 2 to {size}"
                )
            # The half keeps the product with the head size from being rounded down past the whole number.
            raw["partial_rotary_factor"] = 1.0 if turned == size else (turned + 0.5) / size
        if self.architecture.large:
            own = raw["num_hidden_layers"] == self.architecture.large
            raw["query_pre_attn_scalar"] = hidden // heads if own else size

    def _latents(self, raw: dict[str, Any]) -> None:
        """Sizes of the parts of a head, and how groups of experts are chosen from.

        Older files, with one matrix for keys and values, have the numbers of a head under the keys of latents.
        """
        older = ("attention.key_length", "attention.value_length")
        sizes = [self.get(key) or self.get(old) for key, old in zip(LATENT_LENGTHS, older, strict=True)]
        sizes[1] = sizes[1] or raw["hidden_size"] // raw["num_attention_heads"]
        turned = self.get("rope.dimension_count")
        if any(type(size) is not int for size in (*sizes, turned)) or not self.architecture.turns <= turned < sizes[0]:
            raise self.file.fail(
                self.prefix + LATENT_LENGTHS[0], f"is {sizes[0]!r:.40}, of which {turned!r:.40} turn: needs more"
            )
        raw |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": sizes[0] - turned, "v_head_dim": sizes[1]}
        raw |= {"head_dim": None, KV_HEADS: raw["num_attention_heads"], "norm_topk_prob": bool(raw["norm_topk_prob"])}
        if (raw.get("n_group") or 1) > 1:
            raw["topk_method"] = "group_limited_greedy"

    def _window(self, raw: dict[str, Any]) -> None:
        size, pattern = self.get(WINDOW[0]), self.file.metadata.get(self.prefix + WINDOW[1])
        if not size:
            raw["sliding_window"] = None
            return
        raw["sliding_window"] = size
        raw["model_type"] = self.architecture.windowed or raw["model_type"]
        raw["rope_local_base_freq"] = self.get(WINDOW[2])
        if isinstance(pattern, np.ndarray):
            kinds = ["sliding_attention" if on else "full_attention" for on in pattern]
            layers = raw["num_hidden_layers"]
            raw["layer_types"] = kinds[:layers] if type(layers) is int else kinds
        elif pattern is not None:
            raw["sliding_window_pattern"] = pattern

    def _rope(self, raw: dict[str, Any]) -> None:
        """`rope_scaling` from the metadata and from tensors of factors."""
        kind = self.get("rope.scaling.type")
        fields = {ours: v for ours, key in ROPE_FIELDS.items() if (v := self.get(key)) is not None}
        fields |= {} if (factor := self.get(YARN_FACTOR)) is None else {"attention_factor": factor}
        factors = {name: self.tensors.row(name) for name in ROPE_TENSORS if name in self.tensors.headers}
        if factors:
            if kind not in (None, "none", "longrope"):
                raise self.file.fail(self.prefix + "rope.scaling.type", f"{kind!r:.40} beside {next(iter(factors))}")
            one = factors.get(ROPE_TENSORS[0])
            short, long = (one, one) if one is not None else (factors.get(name) for name in ROPE_TENSORS[1:])
            if short is None or long is None or len(factors) != (1 if one is not None else 2):
                raise self.file.fail(next(iter(factors)), f"needs {ROPE_TENSORS[0]} or both others and nothing else")
            sets = {"short_factor": short, "long_factor": long}
            scaled = {"factor": 1.0, "attention_factor": 1.0} | fields | sets | {"rope_type": "longrope"}
            raw["rope_scaling"] = proportional(short) or scaled
        elif kind not in (None, "none"):
            raw["rope_scaling"] = fields | {"rope_type": kind}
            if (multiplier := self.get(LOG_MULTIPLIER)) is not None:
                raw["rope_scaling"] |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)
        local = raw.get("rope_local_base_freq")
        if local not in (None, raw["rope_theta"]):
            scaled = raw.pop("rope_scaling", {})
            whole = {"rope_theta": raw["rope_theta"], **scaled}
            raw["rope_parameters"] = {"full_attention": whole, "sliding_attention": {"rope_theta": local}}


def as_in_files(family: Family, own: Architecture) -> Family:
    """The family without what only folders have, and with what is done to numbers of files."""
    mtp = None if family.mtp is None else replace(own.mtp, windowed=family.mtp.windowed)
    family = replace(family, buffers=(), rewrites=(), stacks={}, transposed=False, mtp=mtp)
    family = replace(family, classifier=steps_in_files(family.classifier, own.head) if own.head else family.classifier)
    return replace(family, orders=own.orders, rates=own.rates, rate_sign=own.rate_sign)


def further_of(architecture: Architecture, raw: Mapping[str, Any], held: TensorShapes, where: str) -> dict[str, Any]:
    """Fields by those that were read and by the tensors; `where` goes before the key that an error names."""
    if architecture.further is None:
        return {}
    try:
        return architecture.further(raw, held)
    except ModelError as error:
        raise ModelError(f"{where}{error.message}") from None


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json, those called a.b in the object a."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        outer, dot, inner = name.partition(".")
        if dot:
            found.setdefault(outer, {}).update({} if value is None else {inner: value})
        else:
            found[name] = value
    return found


def proportional(factors: Sequence[float]) -> dict[str, Any]:
    """The scaling of a rope whose first pairs turn by frequencies of the whole head, and whose others stay; empty where
    these are not the `factors`.

    Half a pair more keeps the product with the head size from being rounded down.
    """
    turned = next((i for i, factor in enumerate(factors) if factor != 1.0), len(factors))
    if turned == len(factors) or min(factors[turned:]) < STILL:
        return {}
    return {"rope_type": "proportional", "partial_rotary_factor": (turned + 0.5) / len(factors)}


def names_of(names: Mapping[str, str], tensors: Collection[str], called: Mapping[str, str]) -> dict[str, str]:
    """The format's names for the roles of a family, `called` or as elsewhere; queries, keys and values may be one
    matrix or three.

    Those of the gated delta rule and their gate are one in older files.
    """
    roles, named = {part for name in names for part in _unfused(name)}, {**NAMES, **called}
    if roles >= {"q", "k"} or "qkv" in roles:
        roles -= {"q", "k", "v", "qkv"}
        other = any(named.get(role) == named["qkv"] for role in roles)  # of layers that do not attend
        fused = not other and any(name.endswith(f".{named['qkv']}.weight") for name in tensors)
        roles |= {"qkv"} if fused else {"q", "k", "v"}
    if "gate_up" in roles and any(".ffn_gate." in name for name in tensors):
        roles = roles - {"gate_up"} | set(FUSED["gate_up"])
    for whole, parts in PARTED.items():
        if whole in roles and not any(f".{NAMES[whole]}." in name for name in tensors):
            roles = roles - {whole} | set(parts)
    return {role: named[role] for role in sorted(roles) if role in named}


def _unfused(name: str) -> tuple[str, ...]:
    """The roles of a matrix that folders have fused and this format has not, with what follows their name's dot."""
    role, dot, part = name.partition(".")
    split = role.startswith(("expert_", "shared_")) and role in FUSED
    return tuple(one + dot + part for one in FUSED[role]) if split else (name,)
