"""Facts of a spec that single families spell their own way, read from config.json for the rows of families."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.model.disk.hf_config import HfConfig
from quire.model.families.rope import NO_ROPE, Plain, Rope, read_rope
from quire.model.families.row import Reader, layer_kinds, spec_facts
from quire.model.spec import MLA, EncoderStack, MoE
from quire.ops.experts import Routing


def only(config: HfConfig, **usual: bool) -> None:
    """Refuse a file one of whose flags is not as it must be: field -> the value, which is its default, too."""
    for field, value in usual.items():
        if config.flag(field, value) != value:
            raise config.fail(field, f"{str(not value).lower()} is not supported for this family")


def four_times(config: HfConfig) -> int:
    """The usual width of an MLP without a gate."""
    return 4 * config.integer("hidden_size", high=1 << 20)


def no_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """No layer rotates."""
    return (NO_ROPE,) * layers


def alternating(period: int) -> Callable[[HfConfig], list[str]]:
    """`layer_types` where every `period`-th layer sees everything and the others a window."""

    def kinds(config: HfConfig) -> list[str]:
        every = config.integer("sliding_window_pattern", period)
        layers = config.integer("num_hidden_layers", high=1024)
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]

    return kinds


def full_first(period: int) -> Callable[[HfConfig], list[str]]:
    """`layer_types` where the first of every `period` layers sees everything and the others a window."""

    def kinds(config: HfConfig) -> list[str]:
        layers = config.integer("num_hidden_layers", high=1024)
        return ["sliding_attention" if i % period else "full_attention" for i in range(layers)]

    return kinds


def embed_scale(config: HfConfig, layers: int) -> float:
    """Gemma's: the square root of the width."""
    return math.sqrt(config.integer("hidden_size"))


def scaled_embedding(config: HfConfig, layers: int) -> float:
    """The square root of the width unless `scale_embedding` is false."""
    return embed_scale(config, layers) if config.flag("scale_embedding", True) else 1.0


def query_scale(config: HfConfig, layers: int) -> float:
    """Gemma 2 and 3: 1 / sqrt(query_pre_attn_scalar)."""
    return 1.0 / math.sqrt(config.number("query_pre_attn_scalar", 256.0))


def gemma3_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Windowed layers turn by `rope_local_base_freq` without scaling; newer files give `rope_parameters` per kind."""
    head_dim = config.integer("head_dim")
    local = {"rope_theta": config.number("rope_local_base_freq", 1e4)}
    raw = config.raw if config.has("rope_parameters") else {**config.raw, **local, "rope_scaling": None}
    by_kind = {
        "sliding_attention": read_rope(HfConfig(raw, config.where), head_dim, 1, "sliding_attention"),
        "full_attention": read_rope(config, head_dim, config.integer("max_position_embeddings"), "full_attention"),
    }
    return tuple(by_kind[kind] for kind in layer_kinds(config, layers))


def olmo3_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """A scaling written for all layers (`rope_scaling`) is meant for those that see everything."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    longest = config.integer("max_position_embeddings", 2048)
    local = HfConfig({**config.raw, "rope_scaling": None}, config.where)
    by_kind = {
        "sliding_attention": read_rope(local, head_dim, longest, "sliding_attention"),
        "full_attention": read_rope(config, head_dim, longest, "full_attention"),
    }
    return tuple(by_kind[kind] for kind in layer_kinds(config, layers))


def layer_thetas(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """The rope of each layer has the base that `layer_rope_theta` says, 0 = it does not turn."""
    kinds = layer_kinds(config, layers)
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    thetas = config.raw.get("layer_rope_theta")
    thetas = [None] * layers if thetas is None else thetas
    known = isinstance(thetas, list) and len(thetas) == layers
    if not known or not all(t is None or (isinstance(t, int | float) and t >= 0) for t in thetas):
        raise config.fail("layer_rope_theta", f"needs a list of {layers} numbers from 0 on")
    field = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    longest, ropes = config.integer("max_position_embeddings", 2048), list[Rope]()
    for theta, kind in zip(thetas, kinds, strict=True):
        given = {} if theta is None else {"rope_theta": float(theta)}
        own = HfConfig({**config.raw, field: {**config.child(field).raw, **given}, **given}, config.where)
        ropes.append(NO_ROPE if theta == 0 else read_rope(own, head_dim, longest, kind))
    return tuple(ropes)


def window_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Where there is a window, layers that see everything do not rotate."""
    kinds, mixed = layer_kinds(config, layers), config.has("sliding_window")
    ropes = spec_facts(config)["rope"]
    return tuple(
        NO_ROPE if mixed and kind == "full_attention" else rope for kind, rope in zip(kinds, ropes, strict=True)
    )


def exaone4_kinds(config: HfConfig) -> list[str]:
    """`layer_types` by `sliding_window_pattern`: a period, or letters L and G whose last layer is always G."""
    layers = config.integer("num_hidden_layers", high=1024)
    pattern = config.raw.get("sliding_window_pattern")
    if not config.has("sliding_window"):
        return ["full_attention"] * layers
    if not isinstance(pattern, str):
        return alternating(4)(config)
    letters = [pattern[i % len(pattern)] for i in range(layers - 1)] if pattern else []
    return ["sliding_attention" if letter == "L" else "full_attention" for letter in (*letters, "G")]


def gpt_neo_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """`attention_types` is a list of (kinds, repeats); local layers see `window_size` tokens."""
    groups = config.raw.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        kinds = [kind for pattern, repeats in groups for _ in range(repeats) for kind in pattern]
    except (TypeError, ValueError):
        raise config.fail("attention_types", "needs a list of [kinds, repeats]") from None
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise config.fail("attention_types", f"names {len(kinds)} layers, needs {layers} of 'global' or 'local'")
    size = config.integer("window_size")
    return tuple(size if kind == "local" else 0 for kind in kinds)


def smollm3_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """`no_rope_layers` has a 0 for each layer that does not rotate; without it every `no_rope_layer_interval`-th."""
    every = config.integer("no_rope_layer_interval", 4)
    turns = config.raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(turns, list) or len(turns) != layers or any(t not in (0, 1) for t in turns):
        raise config.fail("no_rope_layers", f"needs a list of {layers} zeros and ones")
    ropes = spec_facts(config)["rope"]
    return tuple(rope if turn else NO_ROPE for turn, rope in zip(turns, ropes, strict=True))


def gpt2_scale(config: HfConfig, layers: int) -> float:
    """1 / sqrt(head size), or 1; a factor that differs by layer is refused."""
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise config.fail("scale_attn_by_inverse_layer_idx", "is not supported; only false is")
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0


def multi_query(config: HfConfig) -> int:
    """Key/value heads by the flag `multi_query`."""
    return 1 if config.flag("multi_query", True) else config.integer("num_attention_heads", high=1 << 12)


def every_head(config: HfConfig, layers: int) -> int:
    """Return as many key/value heads as heads, whatever else the file says."""
    return config.integer("num_attention_heads", high=1 << 12)


def gptj_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """`rotary_dim` numbers of a head turn."""
    dim = config.integer("rotary_dim", high=1 << 12)
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    if dim % 2 or dim > head_dim:
        raise config.fail("rotary_dim", f"is {dim}, needs an even number up to the head size {head_dim}")
    return (Rope(1e4, dim, Plain()),) * layers


def turned_share(field: str) -> Callable[[HfConfig], float]:
    """`partial_rotary_factor` by `rotary_dim`, the numbers of a head that turn, of `field` that it has."""

    def share(config: HfConfig) -> float:
        size = config.integer(field, high=1 << 12)
        turned = config.integer("rotary_dim", size, high=size)
        if turned % 2 and config.has("rotary_dim"):
            raise config.fail("rotary_dim", f"is {turned}, needs an even number up to the head size {size}")
        # 44 * (30 / 44) is below 30, and products are rounded down: the next share above gives 30.
        return turned / size if int(size * (turned / size)) == turned else math.nextafter(turned / size, 1.0)

    return share


def neox_join(config: HfConfig, layers: int) -> str:
    """Return both norms: they are there either way."""
    return "parallel_two_norms" if config.flag("use_parallel_residual", True) else "sequential"


def alibi_slopes(config: HfConfig, layers: int) -> tuple[float, ...]:
    """2^(-8 i / n) for a power of two of heads; others take every second slope of the next one (Press et al. 2022)."""
    heads = config.integer("num_attention_heads", high=1 << 12)
    n = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return (*slopes, *(2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)))


def mpt_slopes(config: HfConfig, layers: int) -> tuple[float, ...]:
    """Work like `alibi_slopes` in another order, and with `alibi_bias_max` instead of 8."""
    attention = config.child("attn_config")
    if config.has("logit_scale"):
        raise config.fail("logit_scale", "is not supported")
    if not attention.flag("alibi", True):
        raise attention.fail("alibi", "false is not supported")
    heads, top = config.integer("num_attention_heads", high=1 << 12), attention.number("alibi_bias_max", 8.0)
    n = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-top * (i + 1) / n) for i in range(n)]
    return tuple(slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads])


def mpt_scale(config: HfConfig, layers: int) -> float:
    """`softmax_scale`, or 1 / sqrt(head size)."""
    usual = (config.integer("hidden_size") / config.integer("num_attention_heads")) ** -0.5
    return config.child("attn_config").number("softmax_scale", usual)


def encoder_stack(config: HfConfig, layers: int) -> EncoderStack:
    """T5's: `num_layers` of the encoder, the buckets of both stacks, what the decoder begins with."""
    buckets = config.integer("relative_attention_num_buckets", 32, low=4, high=1 << 12)
    furthest = config.integer("relative_attention_max_distance", 128, low=2, high=1 << 20)
    if furthest <= buckets // 2:
        raise config.fail(
            "relative_attention_max_distance", f"is {furthest}, needs more than half of {buckets} buckets"
        )
    return EncoderStack(config.integer("num_layers", high=1024), buckets, furthest, decoder_start(config))


def decoder_start(config: HfConfig) -> int:
    """Return the token that a decoder behind an encoder begins with."""
    last = config.integer("vocab_size") - 1
    first = config.integer("bos_token_id", config.integer("pad_token_id", 0, low=0, high=last), low=0, high=last)
    return config.integer("decoder_start_token_id", first, low=0, high=last)


def endless(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """No layer rotates, and relative positions do not end where the training did."""
    return (Rope(1.0, 0, Plain(stretch=64.0)),) * layers


def twice(config: HfConfig, layers: int) -> int:
    """Return twice the length: as long for the decoder as for the encoder."""
    return 2 * config.integer("max_position_embeddings", high=1 << 20)


def scaled_output(config: HfConfig, layers: int) -> float:
    """1 / sqrt(hidden size) where the head is tied; files of newer writers say so instead, as they tie every head."""
    scaled = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings"))
    return config.integer("hidden_size") ** -0.5 if scaled else 1.0


def read_moe(
    score: str = "softmax", renormalize: bool | None = None, **fixed: object
) -> Callable[[HfConfig, int], MoE]:
    """A reader of the fields most families have; `renormalize` None: `norm_topk_prob` says.

    `fixed` are further fields of Routing. Layers without experts: `mlp_only_layers`, those that `decoder_sparse_step`
    leaves out, and the first `first_k_dense_replace`.
    """

    def read(config: HfConfig, layers: int) -> MoE:
        experts = config.integer("num_experts", high=1024)
        normal = config.flag("norm_topk_prob", False) if renormalize is None else renormalize
        routing = Routing(
            experts,
            config.integer("num_experts_per_tok", high=experts),
            score,
            normal,
            config.number("routed_scaling_factor", 1.0),
            **fixed,  # type: ignore[arg-type]
        )
        width = config.integer("moe_intermediate_size", config.integer("intermediate_size", high=1 << 24), high=1 << 24)
        shared = config.integer("shared_expert_intermediate_size", 0, low=0, high=1 << 24)
        return MoE(routing, width, sparse_layers(config, layers), shared)

    return read


def sparse_layers(config: HfConfig, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: those that `mlp_layer_types` calls sparse, or by fields that leave layers out."""
    kinds = config.texts("mlp_layer_types")
    if kinds:
        if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
            raise config.fail("mlp_layer_types", f"needs {layers} words, dense or sparse")
        return tuple(kind == "sparse" for kind in kinds)
    step, dense = config.integer("decoder_sparse_step", 1), config.integer("first_k_dense_replace", 0, low=0)
    plain = config.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) and 0 <= i < layers for i in plain):
        raise config.fail("mlp_only_layers", f"needs a list of layers from 0 to {layers - 1}")
    return tuple(i >= dense and i not in plain and (i + 1) % step == 0 for i in range(layers))


def read_mla(config: HfConfig, layers: int) -> MLA:
    """The sizes; a rank that the kernels cannot read is refused."""
    rank, rope = config.integer("kv_lora_rank", high=1 << 16), config.integer("qk_rope_head_dim", high=1 << 12)
    if rank % 16:
        raise config.fail("kv_lora_rank", f"is {rank}, must be a multiple of 16")
    return MLA(
        config.integer("q_lora_rank", 0, high=1 << 16),
        rank,
        config.integer("qk_nope_head_dim", high=1 << 12),
        rope,
        config.integer("v_head_dim", high=1 << 12),
        config.flag("rope_interleave", True),
    )


def latent_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Only the shared part of a key turns."""
    dim = config.integer("qk_rope_head_dim", high=1 << 12)
    return (read_rope(config, dim, config.integer("max_position_embeddings"), "full_attention"),) * layers


def latent_scale(config: HfConfig, layers: int) -> float:
    """1 / sqrt(head size), times the square of what YaRN with `mscale_all_dim` multiplies queries and keys with."""
    p = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    scale = float((config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")) ** -0.5)
    weight, plain = p.number("mscale_all_dim", 0.0, low=-1), (p.text("rope_type", None) or p.text("type", "default"))
    if plain == "default" or not weight:
        return scale
    factor = p.number("factor")
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else scale


def latent_head(config: HfConfig, layers: int) -> int:
    """Numbers of a query's head."""
    return config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")


LATENT_READS: dict[str, Reader] = {
    "head_dim": latent_head,
    "rope": latent_rope,
    "attention_scale": latent_scale,
    "mla": read_mla,
}
"""Of latent attention."""
TWO_OF_EACH: dict[str, Reader] = {
    "layers": lambda config, layers: 2 * layers,
    "file_layers": lambda config, layers: tuple(i // 2 for i in range(2 * layers)),
}
"""Of families of which each layer of the files is two here."""
