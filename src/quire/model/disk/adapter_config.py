"""adapter_config.json of PEFT: ranks, scales and what else an adapter holds, or why it cannot be served."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.model.disk.hf_config import HfConfig

PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` that leave the model's own weights as they are."""
CONVERTED_STARTS = ("pissa", "olora", "corda")
"""Those that took a part out of the model's weights, and that PEFT can turn into plain LoRA."""
WITHOUT_EFFECT = frozenset(
    {
        # Where the adapter came from.
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode",
        # Read here.
        "r", "lora_alpha", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias",
        "modules_to_save", "trainable_token_indices", "ensure_weight_tying",
        # Which matrices there are: the tensors say it.
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        # Training, and starts of it that `init_lora_weights` chooses.
        "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
        # How the layer that is adapted lies in memory, and options of features that are off.
        "fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "merge_weights",
    }
)  # fmt: skip
"""Fields that are read, or that change no arithmetic whatever they say; others must be off."""
HINTS = {
    "alora_invocation_tokens": "an activated adapter works only from its invocation tokens on",
    "target_parameters": "adapters on parameters that no linear holds, such as stacked experts",
}


MAX_PATTERN, MAX_REPEATS = 300, 3
"""Characters of a pattern, and stars and the like in it: matching takes a name's length to the power of these."""


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says. `ranks` and `alphas`: pattern of module names -> number, the first that matches.

    `saved`: names of modules that the adapter has whole. `tokens`: name of a module -> its rows that are trained; the
    name is empty for the table of tokens. `tied`: what is trained of that table is the output head's, too.
    """

    file: HfConfig
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool
    dora: bool
    bias: bool
    saved: tuple[str, ...]
    tokens: Mapping[str, tuple[int, ...]]
    tied: bool

    def rank_of(self, module: str) -> int:
        """The rank of the matrices of `module`."""
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023)."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (rank**0.5 if self.root else rank)


def read_adapter_config(config: HfConfig, vocabulary: int) -> AdapterConfig:
    """The file's fields; `ModelError` naming one with which the adapter cannot be served, known or not."""
    if (kind := config.text("peft_type", "LORA")) != "LORA":
        raise config.fail("peft_type", f"{kind!r} is not supported; LORA is")
    _check_start(config)
    for name, value in config.raw.items():
        off = value is None or value is False or value in ([], {}, "") or (name == "bias" and value == "none")
        if name not in WITHOUT_EFFECT and not off:
            hint = HINTS.get(name, "merge the adapter into its base model, or train it without")
            raise config.fail(name, f"{value!r:.80} is not supported: {hint}")
    ranks, alphas = config.child("rank_pattern"), config.child("alpha_pattern")
    return AdapterConfig(
        file=config,
        rank=config.integer("r", high=1 << 16),
        alpha=config.number("lora_alpha"),
        ranks={name: ranks.integer(name, high=1 << 16) for name in _patterns(ranks)},
        alphas={name: alphas.number(name) for name in _patterns(alphas)},
        root=config.flag("use_rslora", False),
        dora=config.flag("use_dora", False),
        bias=config.flag("lora_bias", False),
        saved=config.texts("modules_to_save"),
        tokens=_tokens(config, vocabulary),
        tied=config.flag("ensure_weight_tying", False),
    )


def _tokens(config: HfConfig, vocabulary: int) -> Mapping[str, tuple[int, ...]]:
    """`trainable_token_indices`, a list or one per module."""
    name = "trainable_token_indices"
    if isinstance(config.raw.get(name), dict):
        one = config.child(name)
        found = {module: one.token_ids(module, vocabulary) for module in one.raw}
    else:
        found = {"": config.token_ids(name, vocabulary)} if config.has(name) else {}
    for ids in found.values():
        if len(set(ids)) != len(ids):
            raise config.fail(name, "names a token twice")
    return found


def _patterns(config: HfConfig) -> Iterable[str]:
    """The names of `config`, once each can be matched in bounded time."""
    for pattern in config.raw:
        repeats = re.findall(r"[*+{]", pattern)
        if len(pattern) > MAX_PATTERN or len(repeats) > MAX_REPEATS or re.search(r"\)[*+{?]|\\\d", pattern):
            raise config.fail(
                pattern[:80], "is too long, repeats a group or repeats too often for a pattern of names; name modules"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise config.fail(pattern[:80], f"is not a pattern of names: {error}") from None
    return config.raw


def _matches(pattern: str, module: str) -> bool:
    """Match as PEFT does: the end of the name, from a dot on."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


def _check_start(config: HfConfig) -> None:
    start = config.raw.get("init_lora_weights")
    if start is None or start in PLAIN_STARTS:
        return
    advice = "merge it into its base model (merge_and_unload) and serve that"
    if isinstance(start, str) and start.lower().startswith(CONVERTED_STARTS):
        advice = (
            "save it as plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or "
            + advice
        )
    raise config.fail(
        "init_lora_weights", f"{start!r:.80} may have changed the base model's weights, which are not here; {advice}"
    )
