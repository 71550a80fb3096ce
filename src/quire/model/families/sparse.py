"""Rows of families whose layers attend to tokens that an indexer chooses (sparse attention, `quire.ops.indexer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.mixtures import deepseek_v3
from quire.model.families.readers import read_mla
from quire.model.families.row import Family
from quire.model.spec import MLA
from quire.ops.indexer import Indexer

INDEXER = {
    "index_q": "self_attn.indexer.wq_b",
    "index_k": "self_attn.indexer.wk",
    "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}


def indexers(config: HfConfig, layers: int) -> tuple[bool, ...]:
    """Which layers choose tokens: `indexer_types`, or `index_topk_pattern`, or by `index_topk_freq` every so many.

    Layers without an indexer read what the last one before them chose (cross-layer sharing, GLM-5.2).
    """
    pattern = config.raw.get("index_topk_pattern")
    if isinstance(pattern, str):
        kinds: tuple[str, ...] = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    else:
        kinds = config.texts("indexer_types") or config.texts("index_topk_pattern")
    if not kinds:
        every, first = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2, low=0)
        kinds = tuple("shared" if max(i - first + 1, 0) % every else "full" for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise config.fail("indexer_types", f"needs a list of {layers} times 'full' or 'shared', 'full' first")
    return tuple(kind == "full" for kind in kinds)


def read_indexed(interleaved: bool, shared: bool) -> Callable[[HfConfig, int], MLA]:
    """A reader of latent attention with an indexer. `interleaved`: how it turns, unless the file says so; `shared`:
    layers may have none of their own."""

    def read(config: HfConfig, layers: int) -> MLA:
        mla = read_mla(config, layers)
        dim = config.integer("index_head_dim", high=1 << 12)
        if not mla.q_rank:
            raise config.fail("q_lora_rank", "is not there, and the indexer reads the space that it is the size of")
        if dim < mla.rope or dim % 8:
            raise config.fail("index_head_dim", f"is {dim}, needs a multiple of 8 from qk_rope_head_dim {mla.rope} on")
        indexer = Indexer(
            config.integer("index_n_heads", high=1 << 10),
            dim,
            config.integer("index_topk", high=1 << 16),
            indexers(config, layers) if shared else (True,) * layers,
            config.flag("indexer_rope_interleave", interleaved),
        )
        return replace(mla, indexer=indexer)

    return read


def indexed(
    defaults: Mapping[str, Any], interleaved: bool = False, shared: bool = False
) -> Callable[[HfConfig], Family]:
    """DeepSeek-V3 with indexers. Arguments but the first are those of `read_indexed`."""

    def family(config: HfConfig) -> Family:
        base = deepseek_v3(config)
        return replace(
            base,
            names={**base.names, **INDEXER},
            defaults={**base.defaults, "index_topk": 2048, "index_head_dim": 128, **defaults},
            read={**base.read, "mla": read_indexed(interleaved, shared)},
            required=(*base.required, *INDEXER, "index_k_norm.bias"),
        )

    return family


GLM_5 = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}
SPARSE: dict[str, Callable[[HfConfig], Family]] = {
    "deepseek_v32": indexed({"max_position_embeddings": 163840, "index_n_heads": 64}),
    "glm_moe_dsa": indexed(GLM_5, interleaved=True, shared=True),
}
