"""GGUF files as models: metadata becomes the fields of a config.json, and roles take the names that the format has.
See docs/design/weight-formats.md.

Everything behind that is shared with folders: the families table, the claim of every tensor, cutting and packing. What
the format's converter has done to the weights is undone here: Gemma's norms hold 1 + weight already, and some
architectures have the rows of queries and keys interleaved for rope.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.dtypes import BF16, F16, F32, U8, Dtype
from quire.core.errors import ModelError
from quire.gguf.file import GgufFile, GgufTensor
from quire.gguf.vocab import end_ids, special_ids, vocab_size
from quire.model.disk.checkpoint import TensorInfo, give_back, read_ahead, view
from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite, Rewritten
from quire.model.families.names import GGUF_NEXTN
from quire.model.families.row import Family
from quire.model.families.table import read_spec
from quire.model.load.roles import FUSED
from quire.model.spec import ModelSpec
from quire.ops.arrays import Host
from quire.quant.base import QuantScheme
from quire.quant.gguf import TYPES, Gguf
from quire.quant.registry import DENSE

PLAIN = {"F32": F32, "F16": F16, "BF16": BF16}
NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "embed_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head": "output",
    "layer": "blk.{}.",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "sinks": "attn_sinks",
    "conv_in": "shortconv.in_proj",
    "conv": "shortconv.conv",
    "conv_out": "shortconv.out_proj",
    "router": "ffn_gate_inp",
    "router_bias": "exp_probs_b",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
    "shared_switch": "ffn_gate_inp_shexp",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
}
"""Role -> name, the same for almost every architecture. A fused gate and up is called up."""
BIASES = ("router_bias",)
"""Roles whose one tensor the format calls a bias."""
REWRITES = (
    Rewrite(r"(blk\.\d+\.ffn_(?:gate|up|down)_exps)\.(\w+)", r"\1.{}.\2", stacked=True),
    *(Rewrite(rf"(blk\.\d+\.{NAMES[role]})\.bias", r"\1.weight") for role in BIASES),
)
"""A layer's experts lie in one tensor for each matrix."""
FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}
"""Field of config.json -> key under the architecture's name. Families spell the number of experts in two ways."""
KV_HEADS = "num_key_value_heads"
ROPE_FIELDS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
READ_BELOW = frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "attention.causal",
    "rope.scaling.finetuned", "tensor_data_layout", *FIELDS.values(), *ROPE_FIELDS.values(),
})  # fmt: skip
"""Keys that are read for every architecture, or change nothing; any other may be a feature that is not here."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class Architecture:
    """How `general.architecture` is read.

    `model_type`: row of the families table. `interleaved`: the converter permuted the rows of queries and keys.
    `extra`: further keys it has. `windowed` and `mixture`: the row for files with a sliding window or with experts, if
    not the same. `large`: layers of the one size whose attention scale is that of hidden / heads, not of a head,
    which no key records. `names`: roles that are not called as elsewhere. `facts`: fields of config.json that have no
    key. `fixed`: keys of which one value is known. `convolves`: layers without heads of keys and values do. `spelling`:
    fields that the family calls otherwise.
    """

    model_type: str
    interleaved: bool = False
    extra: tuple[str, ...] = ()
    windowed: str = ""
    mixture: str = ""
    large: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    convolves: bool = False
    spelling: tuple[tuple[str, str], ...] = ()


LFM2 = Architecture(
    "lfm2",
    names={"final_norm": "token_embd_norm"},
    facts={"block_auto_adjust_ff_dim": False},
    convolves=True,
    spelling=(("rms_norm_eps", "norm_eps"),),
)
SIGMOID = 2
"""Of the format's functions by which experts are scored."""
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, extra=WINDOW[:1], windowed="mistral", mixture="mixtral"),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", facts={"norm_topk_prob": True}),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", extra=WINDOW, large=46),
    "gemma3": Architecture("gemma3_text", extra=WINDOW, large=62),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3", extra=WINDOW[:1]),
    "gpt-oss": Architecture("gpt_oss", extra=WINDOW, names={"mlp_norm": "post_attention_norm"}),
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2, model_type="lfm2_moe", facts={"use_expert_bias": False}, fixed={"expert_gating_func": SIGMOID}
    ),
}


class GgufTensors:
    """The tensors of one file as a `Source`: a quantized matrix `x.weight` is called x.Q4_K and is rows of bytes."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.infos: dict[str, TensorInfo] = {}
        self._tensors: dict[str, GgufTensor] = {}
        numbers: Counter[str] = Counter()
        for tensor in file.tensors.values():
            numbers[tensor.type.name] += int(np.prod(tensor.shape, dtype=object))
            name, info = self._info(tensor)
            if tensor.name not in ROPE_TENSORS:
                self.infos[name] = info
            self._tensors[name] = tensor
        blocks = {name: count for name, count in numbers.items() if name in TYPES}
        self.scheme: QuantScheme = Gguf(blocks) if blocks else DENSE
        most = max(numbers, key=numbers.__getitem__, default="F32")
        self.dtype: Dtype = PLAIN.get(most, BF16)
        """Of most of the numbers; bfloat16 for a quantized file, whose other tensors are few."""

    def _info(self, tensor: GgufTensor) -> tuple[str, TensorInfo]:
        if tensor.type.name in PLAIN:
            one_row = (
                tensor.name.endswith("inp_shexp.weight") and len(tensor.shape) == 1
            )  # as older converters wrote it
            shape = (1, *tensor.shape) if one_row else tensor.shape
            return tensor.name, TensorInfo(PLAIN[tensor.type.name], shape, self.file.path.name)
        *rows, k = tensor.shape
        width = k // tensor.type.numbers * tensor.type.nbytes
        name = f"{tensor.name.removesuffix('.weight')}.{tensor.type.name}"
        if not tensor.name.endswith(".weight") or not rows:
            raise self.file.fail(tensor.name, f"is quantized ({tensor.type.name}), only matrices can be")
        return name, TensorInfo(U8, (*rows, width), self.file.path.name)

    def tensor(self, name: str) -> Host:
        """A view of the mapped file; the caller must not write to it."""
        info, tensor = self.infos[name], self._tensors[name]
        return view(self.file.data, info.dtype, info.shape, tensor.start)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        found = [self._tensors[name] for name in names]
        read_ahead(self.file.path, [(tensor.start, tensor.start + tensor.nbytes) for tensor in found])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        give_back(self.file.data)

    def row(self, name: str) -> list[float]:
        """The numbers of a tensor that belongs to the header, a row of F32."""
        tensor = self.file.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise self.file.fail(name, "needs a row of F32 numbers")
        found: list[float] = np.frombuffer(self.file.data, "<f4", tensor.shape[0], tensor.start).tolist()
        return found


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose header was read."""

    file: GgufFile
    tensors: GgufTensors
    architecture: Architecture
    prefix: str
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read the header; `ModelError` for a file, an architecture or a key that cannot be read."""
        file = GgufFile(path)
        if file.metadata.get("split.count", 0) not in (0, 1):
            raise file.fail("split.count", "the model is split over files; join them: llama-gguf-split --merge")
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise file.fail("general.architecture", f"{name!r:.40} is not supported; supported: {known}")
        found = cls(file, GgufTensors(file), ARCHITECTURES[name], f"{name}.")
        fixed = found.architecture.fixed
        for key, value in file.metadata.items():
            below = key.removeprefix(found.prefix)
            if below != key and below in fixed and value != fixed[below]:
                raise file.fail(key, f"is {value!r:.40}, {fixed[below]} is what {name} models have")
            if below != key and below not in READ_BELOW and below not in (*found.architecture.extra, *fixed):
                raise file.fail(key, "is not known: the model may have a feature that is not supported")
        return found

    def source(self) -> Rewritten:
        """The tensors, with a name for each expert's matrix."""
        return Rewritten(self.tensors, REWRITES)

    def read_spec(self) -> tuple[ModelSpec, Family, HfConfig]:
        """Spec, family with the names of this format, and config as the families table reads it."""
        where = str(self.file.path)
        try:
            spec, family, config = read_spec(self.config(), where)
        except ModelError as error:
            name = error.message.removeprefix(f"{where}: ").partition(":")[0]
            if name not in FIELDS:
                raise
            message = error.message.replace(f"{where}: {name}: ", f"{where}: {self.prefix}{FIELDS[name]} ({name}): ", 1)
            raise ModelError(message) from None
        norm = "rms" if spec.norm == "rms1p" else spec.norm
        spec = replace(spec, norm=norm, interleaved_rope=self.architecture.interleaved)
        names = {**names_of(family.names, self.file.tensors), **self.architecture.names}
        required = tuple(part for name in family.required for part in _unfused(name))
        mtp = None if family.mtp is None else GGUF_NEXTN
        family = replace(
            family, names=names, required=required, grouped_qkv=False, prefix="", buffers=(), rewrites=(), mtp=mtp
        )
        return spec, family, config

    def get(self, below: str) -> Any:
        """The value of a key under the architecture's name; an array whose entries are all the same is one value."""
        value = self.file.metadata.get(self.prefix + below)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise self.file.fail(self.prefix + below, "differs by layer, which is not supported")
            return value[0].item()
        return value

    def config(self) -> dict[str, Any]:
        """The metadata as fields of config.json, checked by whoever reads those."""
        architecture = self.architecture
        own = (KV_HEADS,) if architecture.convolves else ()
        raw = {ours: self.get(key) for ours, key in FIELDS.items() if ours not in own}
        raw |= {**architecture.facts, **(self._mixers() if own else {})}
        raw |= {name: raw[ours] for ours, name in architecture.spelling if raw[ours] is not None}
        raw["model_type"] = (raw["num_experts"] and architecture.mixture) or architecture.model_type
        raw["num_key_value_heads"] = raw["num_key_value_heads"] or raw["num_attention_heads"]
        size = self.get("vocab_size")
        raw["vocab_size"] = vocab_size(self.file) if size is None else size
        raw["tie_word_embeddings"] = not any(name.startswith("output.") for name in self.tensors.infos)
        if "tokenizer.ggml.tokens" in self.file.metadata:
            raw["eos_token_id"] = list(end_ids(self.file))
            raw["bos_token_id"] = special_ids(self.file).get("bos_token")
        if self.get("attention.causal") is False:
            raise self.file.fail(self.prefix + "attention.causal", "false is not supported: the model cannot generate")
        self._heads(raw)
        self._window(raw)
        self._rope(raw)
        return {name: value for name, value in raw.items() if value is not None}

    def _mixers(self) -> dict[str, Any]:
        """Heads of keys and values, and the layers that have none, which convolve."""
        key = self.prefix + FIELDS[KV_HEADS]
        heads = self.file.metadata.get(key)
        if not isinstance(heads, np.ndarray):
            return {KV_HEADS: heads}
        kinds = {int(count) for count in heads} - {0}
        if len(kinds) > 1:
            raise self.file.fail(key, "differs by layer, and not only in layers that have none")
        return {
            KV_HEADS: next(iter(kinds), None),
            "layer_types": ["full_attention" if count else "conv" for count in heads],
        }

    def _heads(self, raw: dict[str, Any]) -> None:
        """Size of a head, how much of it turns, and the attention scale."""
        config = HfConfig({k: v for k, v in raw.items() if v is not None}, str(self.file.path))
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        size = config.integer("head_dim", hidden // heads)
        value_size = self.get("attention.value_length")
        if value_size not in (None, size):
            raise self.file.fail(self.prefix + "attention.value_length", f"is {value_size}, needs that of keys, {size}")
        raw["head_dim"] = size
        turned = self.get("rope.dimension_count")
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

    def _window(self, raw: dict[str, Any]) -> None:
        size, pattern = self.get(WINDOW[0]), self.file.metadata.get(self.prefix + WINDOW[1])
        if not size:
            raw["sliding_window"] = None
            return
        raw["sliding_window"] = size
        raw["model_type"] = self.architecture.windowed or raw["model_type"]
        raw["rope_local_base_freq"] = self.get(WINDOW[2])
        if isinstance(pattern, np.ndarray):
            raw["layer_types"] = ["sliding_attention" if on else "full_attention" for on in pattern]
        elif pattern is not None:
            raw["sliding_window_pattern"] = pattern

    def _rope(self, raw: dict[str, Any]) -> None:
        """`rope_scaling` from the metadata and from tensors of factors."""
        kind = self.get("rope.scaling.type")
        fields = {ours: v for ours, key in ROPE_FIELDS.items() if (v := self.get(key)) is not None}
        factors = {name: self.tensors.row(name) for name in ROPE_TENSORS if name in self.file.tensors}
        if factors:
            if kind not in (None, "none", "longrope"):
                raise self.file.fail(self.prefix + "rope.scaling.type", f"{kind!r:.40} beside {next(iter(factors))}")
            one = factors.get(ROPE_TENSORS[0])
            short, long = (one, one) if one is not None else (factors.get(name) for name in ROPE_TENSORS[1:])
            if short is None or long is None or len(factors) != (1 if one is not None else 2):
                raise self.file.fail(next(iter(factors)), f"needs {ROPE_TENSORS[0]} or both others and nothing else")
            sets = {"short_factor": short, "long_factor": long}
            raw["rope_scaling"] = {"factor": 1.0, "attention_factor": 1.0} | fields | sets | {"rope_type": "longrope"}
        elif kind not in (None, "none"):
            raw["rope_scaling"] = fields | {"rope_type": kind}


def names_of(names: Mapping[str, str], tensors: Collection[str]) -> dict[str, str]:
    """The format's names for the roles of a family; queries, keys and values may be one matrix or three."""
    roles = {part for name in names for part in _unfused(name)}
    if roles & {"q", "qkv"}:
        roles -= {"q", "k", "v", "qkv"}
        roles |= {"qkv"} if any(name.endswith(".attn_qkv.weight") for name in tensors) else {"q", "k", "v"}
    return {role: NAMES[role] for role in sorted(roles) if role in NAMES}


def _unfused(name: str) -> tuple[str, ...]:
    """The roles of a matrix that folders have fused and this format has not, with what follows their name's dot."""
    role, dot, part = name.partition(".")
    return tuple(one + dot + part for one in FUSED[role]) if role.startswith("expert_") and role in FUSED else (name,)
