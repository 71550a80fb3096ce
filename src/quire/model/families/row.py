"""What a row of the family table holds, and how config.json is read through one. The rows are in families.
See docs/design/models.md.

A row is a Family, or a function of config.json that gives one (where tensors or joins depend on it):
- names     role -> on-disk name. `layer` is the prefix of a layer's tensors, `encoder_layer` of an encoder's layer.
            On-disk names are the truth. What is not named is absent: no `gate` is an MLP without one, no `mlp_norm` a
            parallel block with one norm. "qkv" and "gate_up" are fused matrices, which loading cuts into roles by rows
            (`roles.disk_rows`). {part} stands for the part of a layer that is several here.
- defaults  config.json fields that the family's files may omit, with the family's default; a function is called with
            the config read so far.
- older     function of config.json that gives the fields as newer files have them, where older ones differ in more than
            names.
- spelling  our field -> the family's own name of it (hidden_size -> n_embd).
- read      spec field -> function of the config, for facts that are not read the common way (`spec_facts`).
- facts     spec fields that are the same for the whole family.
- required  roles ("q_norm") and biases ("q.bias") that must be there although other families lack them, and config
            flags that ask for such ("attention_bias").
- last      biases that the last layer alone has.
- prefix    a first part of all names but the head's that some files leave out.
- modules   what transformers' modules have in the place of the prefix, where its files keep that.
- nested    what files of models that are more than the decoder have in its place.
- aliases   role -> other names that a file may have it under.
- stacks    roles whose tensor lies in numbered pieces -> name of a piece, with {} for the number; of a table, what is
            behind the table's name.
- buffers   endings of tensors that hold no weights (masks of old files) and are ignored.
- skipped   beginnings of tensors of parts that are not run, and ignored.
- rewrites  tensors kept in another form than `base.part` of one matrix (`rewrite`).
- orders    role -> function of the spec that gives where our rows lie on disk, columns of a matrix that ranks split by
            columns (`order`).
- rates     roles of vectors of which the files hold -exp, or exp (`rate_sign`).
- longer    roles of which files hold more rows than are used, behind these.
- classifier  what follows the pooled row in a model of classes (`HeadStep`).
- mlm       the head over the vocabulary of an encoder that was trained to fill in masked tokens (`MlmHead`).
- mtp       what files call a layer that drafts, if they may have one (`families.mtp`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import MtpNames
from quire.model.families.rope import read_rope
from quire.model.load.roles import FUSED, ROLES
from quire.model.spec import ModelSpec

Reader = Callable[[HfConfig, int], Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
LIMITED = {"swigluoai": "silu"}
"""Where a gate and what it multiplies are limited, which families read themselves that have it."""


class HeadStep(NamedTuple):
    """A matrix that follows a pooled row in a model of classes: its name on disk, the activation behind it, the field
    of config.json that may say another, and the name of a norm behind that."""

    name: str
    activation: str = ""
    spelled: str = ""
    norm: str = ""


class MlmHead(NamedTuple):
    """A masked-language-model head: names on disk of a matrix and a norm before the decoder, of the decoder, and whole
    names that the decoder's bias may have, the last of which is that of one that is not tied.

    `activation`: between the matrix and the norm, "" = that of MLPs; `spelled`: the field of config.json that says it.
    Without `dense` there is a decoder alone.
    """

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...] = ()
    activation: str = ""
    spelled: str = ""


@dataclass(frozen=True)
class Family:
    """One row of the table; the module's docstring names the columns.

    `grouped_qkv`: the fused matrix holds, per key/value head, its query heads, key and value, instead of all queries,
    all keys, all values. `transposed`: the matrices of layers are [k, n] on disk unless they are quantized.
    """

    names: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Reader] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    spelling: tuple[tuple[str, str], ...] = ()
    grouped_qkv: bool = False
    transposed: bool = False
    prefix: str = ""
    modules: str = ""
    nested: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    stacks: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    mtp: MtpNames | None = None
    orders: Mapping[str, Callable[[ModelSpec], NDArray[np.int64]]] = field(default_factory=dict)
    rates: tuple[str, ...] = ()
    rate_sign: int = -1
    last: tuple[str, ...] = ()
    longer: tuple[str, ...] = ()
    older: Callable[[HfConfig], Mapping[str, Any]] | None = None
    classifier: tuple[HeadStep, ...] = (HeadStep("score"),)
    mlm: MlmHead | None = None

    def order(self, role: str, spec: ModelSpec) -> NDArray[np.int64] | None:
        """Where each of our rows, or columns, of `role` lies on disk [n] int64; None: all as they lie."""
        return self.orders[role](spec) if role in self.orders else None

    def required_parts(self, config: HfConfig) -> frozenset[str]:
        """The optional roles and biases that this checkpoint must have."""
        asked = (parts for flag, parts in self.flags.items() if config.flag(flag, False))
        return frozenset(self.required).union(*asked)

    def roles(self, config: HfConfig) -> tuple[str, ...]:
        """The roles every checkpoint of this config has, those on disk in a fused matrix included."""
        held = {part for name in self.names for part in FUSED.get(name, (name,))}
        required = self.required_parts(config)
        return tuple(name for name, role in ROLES.items() if name in held and (not role.optional or name in required))

    def fill_in(self, config: HfConfig) -> HfConfig:
        """The config in our spelling, with the family's defaults for what it leaves out."""
        fixed = {name: value for name, value in self.defaults.items() if not callable(value)}
        raw = {**fixed, **(config.raw if self.older is None else self.older(config))}
        raw |= {ours: raw[own] for ours, own in self.spelling if raw.get(own) is not None}
        for name, value in self.defaults.items():
            if callable(value) and raw.get(name) is None:
                raw[name] = value(HfConfig(raw, config.where))
        return HfConfig(raw, config.where)

    def named_as(self, tensors: Collection[str]) -> Family:
        """Return this family with names as these tensors have them: with or without the prefix, or under another
        name."""
        names, bases = dict(self.names), {name.rpartition(".")[0] for name in tensors}
        prefix = self.prefix or "model."  # which files of the stack alone leave out
        inside = next((nest for nest in self.nested if any(name.startswith(nest) for name in tensors)), prefix)
        if inside != prefix:
            names = {role: inside + name.removeprefix(prefix) if name.startswith(prefix) else name
                     for role, name in names.items()}  # fmt: skip
        elif not any(name.startswith(prefix) for name in tensors):
            names = {role: name.removeprefix(prefix) for role, name in names.items()}
        for role, others in self.aliases.items():
            names[role] = next((name for name in (names[role], *others) if name in bases), names[role])
        return replace(self, names=names)

    def may_lack(self, bias: str, layer: int | None, layers: int) -> bool:
        """Whether `layer` of `layers` need not have the bias although others have it."""
        return bias in self.last and layer != layers - 1

    def of_layer(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return self.names["layer"].format(layer)

    def module(self, role: str, spec: ModelSpec, layer: int) -> str:
        """What the matrix or vector `role` of `layer` is called."""
        name = self.names[role]
        own = name.format(part=spec.part(layer)) if "{part}" in name else name
        return self.of_layer(spec.file_layer(layer)) + own

    def here(self, module: str) -> str:
        """A module's name as this file has it: writers differ, and models that are more than their decoder."""
        if self.facts.get("bidirectional") and not module.startswith(self.prefix):
            return self.prefix + module
        if self.modules and module.startswith(self.modules):
            return self.prefix + module.removeprefix(self.modules)
        if not self.nested:
            return module
        if module in ("lm_head", *self.aliases["head"]):
            return self.names["head"]
        ways = (*self.nested, self.prefix or "model.")
        own = next(way for way in ways if self.names["layer"].startswith(way))
        other = next((way for way in ways if module.startswith(way)), "")
        return own + module.removeprefix(other) if other else module


MIXED_KINDS = {
    "chunked_attention": ("attention_chunk_size",),
    "conv": ("conv_L_cache",),
    "linear_attention": ("linear_key_head_dim", "mamba_d_state"),
}
"""Words of `layer_types` for layers of some families alone, and fields with the size of what these layers have."""
EARLIER = {"mamba": "linear_attention", "attention": "full_attention", "indexed_attention": "full_attention",
           "minimax_m3_sparse": "full_attention"}  # fmt: skip
"""Words of older files, and of layers that read chosen tokens, and those that took their place."""


def layer_kinds(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Each layer's kind: `layer_types`, or "sliding_attention" from layer `max_window_layers` on.

    Kinds of `MIXED_KINDS` are known where a field with their size is there, which only families have that have them.
    """
    kinds = tuple(EARLIER.get(kind, kind) for kind in config.texts("layer_types"))
    if kinds and len(kinds) != layers:
        raise config.fail("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {layers}")
    known = (
        "full_attention",
        "sliding_attention",
        *(kind for kind, sizes in MIXED_KINDS.items() if any(map(config.has, sizes))),
    )
    for kind in kinds:
        if kind not in known:
            raise config.fail("layer_types", f"{kind!r} is not known; known: {', '.join(known)}")
    first = config.integer("max_window_layers", 0, low=0)
    return kinds or tuple(known[i >= first] for i in range(layers))


def sliding_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Tokens each layer sees: `sliding_window` on sliding layers unless `use_sliding_window` is false; 0 = all.

    Where rows see later ones, half of them lie before a row and half behind it.
    """
    size = config.integer("sliding_window", 0) if config.flag("use_sliding_window", True) else 0
    size = size // 2 + 1 if size and sees_later(config) else size
    if not size and "sliding_attention" in config.texts("layer_types"):
        raise config.fail("layer_types", "has sliding_attention layers but no sliding_window is in use")
    return tuple(size if kind == "sliding_attention" else 0 for kind in layer_kinds(config, layers))


def shared_layers(config: HfConfig, layers: int) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: the last `num_kv_shared_layers` take the nearest own ones.

    Nearest is the last layer of the same kind that has its own (cross-layer sharing, Brandon et al. 2024).
    """
    own = layers - config.integer("num_kv_shared_layers", 0, low=0)
    if own == layers:
        return ()
    kinds = layer_kinds(config, layers)
    last = {kind: i for i, kind in enumerate(kinds[: max(own, 0)])}
    missing = next((kind for kind in kinds if kind not in last), None)
    if missing is not None:
        raise config.fail("num_kv_shared_layers", f"leaves no layer of kind {missing!r} with keys of its own")
    return tuple(i if i < own else last[kind] for i, kind in enumerate(kinds))


def sees_later(config: HfConfig) -> bool:
    """Whether all tokens see those behind them; "vision" (Gemma 4) says it of images alone."""
    for name in ("use_bidirectional_attention", "is_bidirectional"):
        said = config.raw.get(name)
        if said == "all" if isinstance(said, str) else config.flag(name, False):
            return True
    return not config.flag("is_causal", True)


def mlp_width(config: HfConfig) -> int:
    """`intermediate_size`; of layers that differ, a list of theirs, the widest."""
    if isinstance(config.raw.get("intermediate_size"), list):
        return max(config.integers("intermediate_size"), default=0)
    return config.integer("intermediate_size", high=1 << 24)


def spec_facts(config: HfConfig) -> dict[str, Any]:
    """The spec fields as most families spell them, checked against each other."""
    layers = config.integer("num_hidden_layers", high=1024)
    hidden = config.integer("hidden_size", high=1 << 20)
    heads = config.integer("num_attention_heads", high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", heads, high=1 << 12)
    vocab_size = config.integer("vocab_size", high=1 << 24)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"is {kv_heads}, must divide num_attention_heads {heads}")
    if not config.has("head_dim") and hidden % heads:
        raise config.fail(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    head_dim = config.integer("head_dim", hidden // heads, low=2, high=1 << 12)
    max_position = config.integer("max_position_embeddings", 2048, high=1 << 27)
    act = config.text("hidden_act", "silu")
    known = ACTIVATIONS | (LIMITED if config.has("swiglu_limit") else {})
    if act not in known:
        raise config.fail("hidden_act", f"{act!r} is not known; known: {', '.join(known)}")
    bos = config.token_ids("bos_token_id", vocab_size)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": mlp_width(config),
        "vocab_size": vocab_size,
        "norm_eps": config.number("rms_norm_eps", 1e-6, high=1.0),
        "activation": known[act],
        "rope": tuple(read_rope(config, head_dim, max_position, kind) for kind in layer_kinds(config, layers)),
        "windows": (0,) * layers,
        "attention_scale": head_dim**-0.5,
        "tied_head": config.flag("tie_word_embeddings", False),
        "max_position": max_position,
        "eos_token_ids": config.token_ids("eos_token_id", vocab_size),
        "bos_token_id": bos[0] if bos else None,
        "kv_source": shared_layers(config, layers),
        "bidirectional": sees_later(config),
    }


def facts_of(family: Family, config: HfConfig) -> dict[str, Any]:
    """All spec fields of a model of `family`, whose defaults `config` has."""
    facts = {**spec_facts(config), **family.facts}
    return facts | {field: read(config, facts["layers"]) for field, read in family.read.items()}
