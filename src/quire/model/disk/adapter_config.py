"""adapter_config.json of PEFT: what must hold for an adapter to be y += B A x * scale on the model as it is."""

from __future__ import annotations

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
        "r", "lora_alpha", "use_rslora", "init_lora_weights",
        # Which matrices there are: the tensors say it.
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        # Training, and starts of it that `init_lora_weights` chooses.
        "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
        # How the layer that is adapted lies in memory, and options of features that are off.
        "fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying",
        "merge_weights",
    }
)  # fmt: skip
"""Fields with which the arithmetic is that of plain LoRA whatever they say; others must be off."""
HINTS = {
    "alora_invocation_tokens": "an activated adapter works only from its invocation tokens on",
    "use_dora": "merge it into its base model and serve that",
    "target_parameters": "adapters on parameters that no linear holds, such as stacked experts",
}


def adapter_scale(config: HfConfig) -> tuple[int, float]:
    """(rank, scale); `ModelError` naming a field with which the adapter is not plain LoRA, known or not."""
    if (kind := config.text("peft_type", "LORA")) != "LORA":
        raise config.fail("peft_type", f"{kind!r} is not supported; LORA is")
    _check_start(config)
    for name, value in config.raw.items():
        off = value is None or value is False or value in ([], {}, "") or (name == "bias" and value == "none")
        if name not in WITHOUT_EFFECT and not off:
            hint = HINTS.get(name, "merge the adapter into its base model, or train it without")
            raise config.fail(name, f"{value!r:.80} is not supported: {hint}")
    rank = config.integer("r", high=1 << 16)
    return rank, config.number("lora_alpha") / (rank**0.5 if config.flag("use_rslora", False) else rank)


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
