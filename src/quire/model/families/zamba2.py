"""The row of Zamba2 (Glorioso et al. 2024): selective scans, before some of which a block runs that layers share.

A layer of the files with such a block is two here, a use of the block and a scan (`ModelSpec.file_layers`), since what
they keep of tokens has unlike windows. What a use makes is added to what the scan reads, not to the stream.
"""

from __future__ import annotations

from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import naked
from quire.model.families.readers import no_rope, only
from quire.model.families.row import EARLIER, Family, Reader
from quire.model.families.state_space import HYBRID, rope_of_attention, scan_sizes
from quire.model.spec import SCAN, SHARED, SharedBlocks
from quire.ops.convolution import MOST_TAPS

BLOCK = {
    "block_norm": "shared_transformer.input_layernorm",
    "block_q": "shared_transformer.self_attn.q_proj",
    "block_k": "shared_transformer.self_attn.k_proj",
    "block_v": "shared_transformer.self_attn.v_proj",
    "block_o": "shared_transformer.self_attn.o_proj",
    "block_mlp_norm": "shared_transformer.pre_ff_layernorm",
    "block_gate_up": "shared_transformer.feed_forward.gate_up_proj",
    "block_down": "shared_transformer.feed_forward.down_proj",
    "use_mlp_down": "adapter.gate_up.0",
    "use_mlp_up": "adapter.gate_up.1",
    "use_out": "linear",
}
ATTENTION_USE = {f"use_{part}_{way}": f"adapter.{part}.{at}" for part in "qkv" for at, way in enumerate(("down", "up"))}
SCANS = ("embed", "head", "layer", "attn_norm", "scan_in", "scan_conv", "scan_decay", "scan_skip", "scan_bias",
         "scan_scale", "scan_out")  # fmt: skip
NAMES = {role: HYBRID[role] for role in SCANS} | {"final_norm": "model.final_layernorm"}
VECTORS = ("A_log", "dt_bias", "D")
DECODER = (
    *(
        Rewrite(rf"(.*\.layers\.\d+)\.mamba_decoder\.mamba\.{vector}", rf"\1.mamba.{vector}.weight",
                release=rf"\1.mamba_decoder.mamba.{vector}")
        for vector in VECTORS
    ),
    Rewrite(r"(.*\.layers\.\d+)\.mamba_decoder\.(.+)", r"\1.\2"),
    *naked(["mamba"], VECTORS),
)  # fmt: skip
"""The scan of a layer with a block has a module of its own around it."""
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_hidden_act": "silu",
    "time_step_limit": lambda c: [c.number("time_step_min", 0.001), float("inf")],
    "intermediate_size": lambda c: 4 * c.integer("hidden_size", high=1 << 20),
    "head_dim": lambda c: 2 * c.integer("hidden_size", high=1 << 20) // c.integer("num_attention_heads"),
}


def kinds(config: HfConfig) -> tuple[str, ...]:
    """Kind of each layer of the files: "linear_attention", or "hybrid" where a block runs before the scan."""
    found = tuple(EARLIER.get(kind, kind) for kind in config.texts("layers_block_type"))
    wrong = next((kind for kind in found if kind not in ("linear_attention", "hybrid")), None)
    if wrong is not None:
        raise config.fail("layers_block_type", f"{wrong!r} is not known; known: mamba, hybrid")
    if len(found) != config.integer("num_hidden_layers", len(found), high=1024):
        raise config.fail("layers_block_type", f"names {len(found)} layers, not each of num_hidden_layers")
    return found


def with_uses(found: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """The file's layer, and the mixer, of each layer here."""
    parts = {"hybrid": (SHARED, SCAN), "linear_attention": (SCAN,)}
    return tuple((i, part) for i, kind in enumerate(found) for part in parts[kind])


def adapters(uses: tuple[int, ...], blocks: int) -> tuple[Rewrite, ...]:
    """What each use adds lies in the block, by the number of the use; it is seen in the use's own layer."""
    return tuple(
        Rewrite(rf"(.*layers\.){uses[i % blocks]}\.shared_transformer\.{module}_adapter_list\.{i}\.(.+)",
                rf"\g<1>{layer}.adapter.{part}.\2")
        for i, layer in enumerate(uses)
        for module, part in (*((rf"self_attn\.linear_{x}", x) for x in "qkv"),
                             (r"feed_forward\.gate_up_proj", "gate_up"))
    )  # fmt: skip


def reads(config: HfConfig) -> dict[str, Reader]:
    """What layers are, a use of a block and a scan apart; only a use attends, and turns where `use_mem_rope`."""
    layers = with_uses(kinds(config))
    taps, scanned = config.integer("mamba_d_conv", 4, low=2, high=MOST_TAPS), scan_sizes(eps=1e-5)
    turn = rope_of_attention if config.flag("use_mem_rope", False) else no_rope
    return {
        "layers": lambda config, count: len(layers),
        "mixers": lambda config, count: tuple(kind for _, kind in layers),
        "file_layers": lambda config, count: tuple(i for i, _ in layers),
        "windows": lambda config, count: tuple(taps if kind == SCAN else 0 for _, kind in layers),
        "scan": lambda config, count: scanned(HfConfig({**config.raw, "hidden_act": "silu"}, config.where), count),
        "attention_scale": lambda config, count: (config.integer("head_dim") / 2) ** -0.5,
        "rope": lambda config, count: turn(config, len(layers)),
    }


def blocks(config: HfConfig, layers: int = 0) -> SharedBlocks:
    """The blocks; attention's part of a use is there by `use_shared_attention_adapter`."""
    attends = config.flag("use_shared_attention_adapter", False)
    rank = config.integer("adapter_rank", DEFAULTS["adapter_rank"], high=1 << 16)
    return SharedBlocks(config.integer("num_mem_blocks", 1, high=1024), rank, attends)


def zamba2(config: HfConfig) -> Family:
    """Blocks take turns."""
    only(config, add_bias_linear=False)
    uses = tuple(i for i, kind in enumerate(kinds(config)) if kind == "hybrid")
    return Family(
        NAMES | BLOCK | (ATTENTION_USE if blocks(config).attention else {}),
        DEFAULTS,
        reads(config) | {"shared": blocks},
        ("scan_scale", "scan_conv.bias"),
        facts={"join": "single"},
        spelling=(("head_dim", "attention_head_dim"), ("mamba_n_heads", "n_mamba_heads"),
                  ("mamba_n_groups", "mamba_ngroups"), ("mamba_d_head", "mamba_headdim")),
        rewrites=(*adapters(uses, blocks(config).count), *DECODER),
    )  # fmt: skip
