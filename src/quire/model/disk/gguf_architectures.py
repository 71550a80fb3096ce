"""The table of GGUF's architectures, by `general.architecture`. See docs/design/weight-formats.md."""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_bidirectional import BIDIRECTIONAL
from quire.model.disk.gguf_dense import DENSE, READ
from quire.model.disk.gguf_encoders import ENCODERS
from quire.model.disk.gguf_entries import ENTRIES
from quire.model.disk.gguf_gemmas import GEMMAS
from quire.model.disk.gguf_hybrids import (
    FALCON_H1,
    GRANITE_HYBRID,
    HRM,
    JAMBA,
    LFM2,
    MAMBA,
    MAMBA2,
    MINIMAX_01,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_NEXT,
)
from quire.model.disk.gguf_latent_pools import LATENT_POOLS
from quire.model.disk.gguf_latent_windows import LATENT_WINDOWS
from quire.model.disk.gguf_latents import LATENTS
from quire.model.disk.gguf_mixtures import MIXTURES
from quire.model.disk.gguf_names import GATING, SIGMOID, WINDOW
from quire.model.disk.gguf_ngrams import QWEN4
from quire.model.disk.gguf_windowed import WINDOWED

LIKE_LLAMA = ("internlm3", "ministral", "helium", "aquila", "internlm", "iquestcoder")
ARCHITECTURES = {
    "llama": Architecture(
        "llama", interleaved=True, extra=WINDOW[:1], windowed="mistral", mixture="mixtral", also=LIKE_LLAMA
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3", head=("cls.output",)),
    "qwen3moe": Architecture("qwen3_moe", facts={"norm_topk_prob": True}),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", extra=WINDOW, large=46),
    "gemma3": Architecture("gemma3_text", extra=WINDOW, large=62, only=lambda spec: not spec.bidirectional),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3", extra=WINDOW[:1]),
    "granitehybrid": GRANITE_HYBRID,
    "hrm_text": HRM,
    "falcon-h1": FALCON_H1,
    "nemotron_h": replace(NEMOTRON_H, sparse=False),
    "nemotron_h_moe": replace(NEMOTRON_H, sparse=True),
    "mamba2": MAMBA2,
    "mamba": MAMBA,
    "jamba": JAMBA,
    "minimax-01": MINIMAX_01,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35moe": replace(QWEN3_5, model_type="qwen3_5_moe_text"),
    "qwen4exp": QWEN4,
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2, model_type="lfm2_moe", facts={"use_expert_bias": False}, fixed={GATING: SIGMOID}),
    **DENSE,
    **READ,
    **MIXTURES,
    **LATENTS,
    **LATENT_POOLS,
    **ENTRIES,
    **LATENT_WINDOWS,
    **WINDOWED,
    **GEMMAS,
    **ENCODERS,
    **BIDIRECTIONAL,
}
