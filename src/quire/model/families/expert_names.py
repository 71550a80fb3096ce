"""Experts under the names and in the forms in which tools write them, beside those of the releases.

transformers' modules stack the experts of a layer, gate and up in one. Saved by transformers they go back to the
release's form; other tools write the modules' own, or take experts apart and keep the modules' names (llm-compressor).
"""

from __future__ import annotations

from quire.model.disk.renamed_tensors import Rewrite

GATE_UP = ("gate_proj", "up_proj")
STACKED = (
    Rewrite(r"(.*\.mlp\.experts)\.gate_up_proj", r"\1.{}.{}.weight", True, parts=GATE_UP),
    Rewrite(r"(.*\.mlp\.experts)\.down_proj", r"\1.{}.down_proj.weight", True),
)
"""Gate above up."""
MIXTRAL_WRITTEN = (
    Rewrite(r"(.*)\.mlp\.experts\.gate_up_proj", r"\1.block_sparse_moe.experts.{}.{}.weight", True, parts=("w1", "w3")),
    Rewrite(r"(.*)\.mlp\.experts\.down_proj", r"\1.block_sparse_moe.experts.{}.w2.weight", True),
    Rewrite(r"(.*)\.mlp\.(?:gate|router)\.weight", r"\1.block_sparse_moe.gate.weight"),
    *(
        Rewrite(rf"(.*)\.(?:block_sparse_moe|mlp)\.(experts\.\d+)\.{module}_proj(\..+)",
                rf"\1.block_sparse_moe.\2.{name}\3")
        for module, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)  # fmt: skip
"""For families whose release calls the block, its router and its matrices otherwise than the modules do."""
GPT_OSS_WRITTEN = (
    Rewrite(r"(.*\.self_attn\.sinks)", r"\1.weight", release=r"\1"),
    *(
        Rewrite(
            rf"(.*\.mlp\.experts)\.{matrix}{ending}",
            rf"\1.{{}}.{own}.{part}",
            True,
            turned,
            names,
            bool(names),
            rf"\1.{matrix}{ending}" if "(" not in ending else "",
        )
        for matrix, own, names in (("gate_up_proj", "{}", GATE_UP), ("down_proj", "down_proj", ()))
        for ending, part, turned in (("", "weight", True), ("_bias", "bias", False), ("_(blocks|scales)", r"\2", False))
    ),
)
"""Stacked and turned in the release, where gate and up take rows in turn."""
CORRECTION = Rewrite(
    r"(.*\.mlp)\.gate\.e_score_correction_bias",
    r"\1.gate_correction.weight",
    release=r"\1.gate.e_score_correction_bias",
)
ERNIE_CORRECTION = Rewrite(
    r"(.*\.mlp)\.(?:gate\.)?moe_statics\.e_score_correction_bias",
    r"\1.gate_correction.weight",
    stacked=True,
    release=r"\1.moe_statics.e_score_correction_bias",
)
