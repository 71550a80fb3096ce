"""Rows of decoders that lie in models of more than text, as they read text: nothing in them is of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import CORRECTED, EXPERTS, SHARED
from quire.model.families.names import ALL_MLP_BIAS, GATE_UP, LLAMA, MLP_BIAS, POST_NORMS, QKV_BIAS, without
from quire.model.families.readers import read_moe
from quire.model.families.row import Family, spec_facts
from quire.model.spec import MoE

PLAIN = without(LLAMA, "q_norm", "k_norm")
GLM4V = Family(
    without(PLAIN, "gate", "up")
    | {
        "gate_up": "mlp.gate_up_proj",
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    {"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    required=(*POST_NORMS, *QKV_BIAS),
    facts={"join": "post_norm", "interleaved_rope": True},
)
PADDLEOCR = Family(
    PLAIN,
    {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072},
    flags={"use_bias": (*QKV_BIAS, "o.bias", *MLP_BIAS)},
)


def mllama(config: HfConfig) -> Family:
    """Llama 3.2 Vision without the layers that attend to images, which prompts of text pass by."""
    layers = config.integer("num_hidden_layers", high=1024)
    crossed = config.integers("cross_attention_layers") if config.has("cross_attention_layers") else range(3, layers, 5)
    own = tuple(i for i in range(layers) if i not in crossed)
    return Family(
        PLAIN,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072},
        {"layers": lambda c, layers: len(own), "rope": lambda c, layers: spec_facts(c)["rope"][: len(own)],
         "windows": lambda c, layers: (0,) * len(own), "file_layers": lambda c, layers: own},
        skipped=tuple(f"model.layers.{i}." for i in crossed), longer=("embed",),
    )  # fmt: skip


def aria_experts(config: HfConfig, layers: int) -> MoE:
    """A softmax over the logits of the chosen, in every layer; the shared experts are one of their widths together."""
    found = read_moe(renormalize=True)(config, layers)
    return replace(found, shared=config.integer("moe_num_shared_experts", 2) * found.intermediate)


ARIA = Family(
    without(PLAIN, "gate", "up", "down") | EXPERTS | SHARED | {"router": "mlp.router"},
    {"moe_num_experts": 8, "moe_topk": 2, "intermediate_size": 4096},
    {"moe": aria_experts},
    spelling=(("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_topk")),
    rewrites=tuple(
        Rewrite(
            rf"(.*\.mlp\.experts)\.(?:{names})(?:\.weight)?", rf"\1.{{}}.{own}.weight", True, True, parts, False,
            rf"\1.{names.partition('|')[0]}.weight",
        )
        for names, own, parts in (("fc1|gate_up_proj", "{}", GATE_UP), ("fc2|down_proj", "down_proj", ()))
    ),
)  # fmt: skip


def ernie_vl_experts(config: HfConfig, layers: int) -> MoE:
    """Experts of text: softmax scores, chosen with a correction bias."""
    width = config.integers("moe_intermediate_size")[0]
    kinds = config.texts("mlp_layer_types") or ("dense", *("sparse",) * (layers - 1))
    if len(kinds) != layers:
        raise config.fail("mlp_layer_types", f"names {len(kinds)} layers, num_hidden_layers is {layers}")
    found = read_moe(renormalize=True)(HfConfig({**config.raw, "moe_intermediate_size": width}, config.where), layers)
    shared = config.integer("moe_num_shared_experts", 2, low=0) * width
    return replace(found, sparse=tuple(kind == "sparse" for kind in kinds), shared=shared)


def experts_of_images(config: HfConfig) -> tuple[str, ...]:
    """Beginnings of names of as many experts behind the others, which only rows of images take."""
    layers, experts = config.integer("num_hidden_layers", high=1024), config.integer("moe_num_experts", 64, high=1024)
    return tuple(f"model.layers.{i}.mlp.experts.{experts + e}." for i in range(layers) for e in range(experts))


ERNIE_VL_WRITTEN = (
    Rewrite(r"(.*\.mlp)\.gate\.weight", r"\1.router.weight", transposed=True, release=r"\1.gate.weight"),
    Rewrite(
        r"(.*\.mlp)\.moe_statics\.e_score_correction_bias",
        r"\1.gate_correction_{}.weight",
        stacked=True,
        release=r"\1.moe_statics.e_score_correction_bias",
    ),
)


def ernie4_5_vl(config: HfConfig) -> Family:
    """ERNIE 4.5 VL as it reads text."""
    return Family(
        PLAIN | EXPERTS | SHARED | CORRECTED | {"router": "mlp.router", "router_bias": "mlp.gate_correction_0"},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072,
         "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": [1536, 512]},
        {"moe": ernie_vl_experts},
        ("router_bias",),
        {"use_bias": (*QKV_BIAS, "o.bias", *ALL_MLP_BIAS)},
        {"interleaved_rope": True},
        (("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k")),
        skipped=experts_of_images(config), buffers=(".gate_correction_1.weight", ".gate.weight_1"),
        rewrites=ERNIE_VL_WRITTEN,
    )  # fmt: skip


TEXT_DECODERS: dict[str, Family | Callable[[HfConfig], Family]] = {
    "glm4v_text": GLM4V,
    "glm_ocr_text": replace(GLM4V, required=POST_NORMS),
    "paddleocr_vl_text": PADDLEOCR,
    "mllama_text_model": mllama,
    "aria_text": ARIA,
    "ernie4_5_vl_moe_text": ernie4_5_vl,
}
