"""The techniques that a suite switches: what on and off mean, and what those who found them claim.

On and off are options of the engine, or a baseline that exists only here: a way of driving the engine (`Mode`), which
has no such switch because nobody would want it. `claim` is the figure of the seeds where there is one, as they give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["", "recompute", "reserve-longest", "reserve-request", "unfused", "serve"]
"""Ways to drive quire: plainly; each token by a request that computes all before it; with admission as if each sequence
took a row of max_model_len tokens, or of prompt and answer, at once; with single calls in the place of fused ones; as a
server over HTTP."""


@dataclass(frozen=True)
class Technique:
    """`improves`: the metric that it is for. `says`: what off is, where options do not show it.

    `bounded`: the KV cache holds what the load needs on average and no more. `twice`: the load is sent twice, and the
    second time is measured. `half_weights`: on keeps half of the weights in memory. `compress`: on is the model as
    `quire compress` makes it with these words.
    """

    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    improves: str = "output_tokens_per_s"
    says: str = ""
    claim: str = ""
    off_mode: Mode = ""
    bounded: bool = False
    twice: bool = False
    half_weights: bool = False
    compress: tuple[str, ...] = ()


def _format(claim: str = "", **on: Any) -> Technique:
    """Weights in another format than bf16."""
    off = {"dtype": "bfloat16"}
    return Technique(on, off, improves="weight_bytes", says="off: bf16 weights", claim=claim)


def _ranks(claim: str = "", **on: Any) -> Technique:
    return Technique(on, says="off: one process", claim=claim)


def _draft(config: str, claim: str = "2-3x at batch 1 with unchanged output") -> Technique:
    return Technique({"speculative_config": config}, improves="decode_tokens_per_s", claim=claim)


TECHNIQUES: dict[str, Technique] = {
    "continuous-batching": Technique(
        off={"static_batching": True},
        says="off: a batch runs until its longest is done, then comes the next",
        claim="TensorRT-LLM: about 2x by in-flight batching and fp8 over eager 16 bit",
    ),
    "kv-cache": Technique(
        off={"enable_prefix_caching": False},
        off_mode="recompute",
        says="off: each token is a request that computes all tokens before it",
        claim="keys and values are kept, never recomputed (LLM-Inference-Bench, KV cache on and off)",
    ),
    "paged-kv": Technique(
        off_mode="reserve-longest",
        bounded=True,
        says="off: a sequence is admitted when a row of max_model_len slots is free for it",
        claim="vLLM: up to 24x Hugging Face generate and 3.5x TGI; 60-80 % of KV memory wasted without, < 4 % with",
    ),
    "paged-kv-exact": Technique(
        off_mode="reserve-request",
        bounded=True,
        says="off: a sequence is admitted when slots for its prompt and whole answer are free",
        claim="vLLM: 60-80 % of KV memory wasted by contiguous reservation, < 4 % by pages",
    ),
    "prefix-cache": Technique(
        {"enable_prefix_caching": True},
        {"enable_prefix_caching": False},
        improves="ttft_ms_p50",
        says="pays where prompts share a beginning (shared_prefix)",
        claim="one copy of a common prefix",
    ),
    "chunked-prefill": Technique(
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 256},
        {"enable_chunked_prefill": False},
        improves="itl_ms_p99",
        says="on: at most 256 tokens a step; off: a prompt is one step (pays where prompts are long, and come late)",
        claim="SARATHI: long prompts ride along with decodes",
    ),
    "fusion": Technique(
        off_mode="unfused",
        says="off: gate, activation and down as three calls, sum and norm as two; q, k, v stay one matrix",
        claim="TensorRT: layer and tensor fusion",
    ),
    "capture": Technique(
        off={"enforce_eager": True},
        improves="decode_tokens_per_s",
        says="off: each op is called as the model calls it",
        claim="TensorRT: a captured execution plan",
    ),
    "int8-weights": _format("2x less memory", quantization="int8"),
    "int4-weights": _format("4x less memory", quantization="int4"),
    "nf4-weights": _format("4x less memory", quantization="nf4"),
    "mxfp4-weights": _format("4x less memory", quantization="mxfp4"),
    "bf12-weights": _format(bf16_bits=12, dtype="bfloat16"),
    "int8-kv": Technique({"kv_cache_dtype": "int8"}, improves="kv_bytes", claim="half of the KV memory"),
    "fp8-kv": Technique({"kv_cache_dtype": "fp8"}, improves="kv_bytes", claim="half of the KV memory"),
    "token-blocks": Technique(
        {"block_size": 1},
        {"block_size": 16},
        improves="kv_waste",
        says="off: blocks of 16 tokens",
        claim="LightLLM: memory by the token",
    ),
    "small-blocks": Technique(
        {"block_size": 16},
        {"block_size": 128},
        improves="kv_waste",
        says="off: blocks of 128 tokens",
        claim="vLLM: < 4 % waste by blocks of 16",
    ),
    "ngram": _draft('{"method": "ngram"}'),
    "suffix": _draft('{"method": "suffix"}'),
    "self-draft": _draft('{"method": "self", "quantization": "int4"}'),
    "draft": _draft(""),
    "tensor-parallel": _ranks(tensor_parallel_size=2),
    "pipeline-parallel": _ranks(pipeline_parallel_size=2),
    "context-parallel": _ranks(context_parallel_size=2),
    "expert-parallel": _ranks(expert_parallel_size=2),
    "kv-store": Technique(
        {"kv_store": "FOLDER"},
        improves="ttft_ms_p50",
        bounded=True,
        twice=True,
        says="the load comes twice, the second time counts; off: what the KV cache has no room for is computed again",
    ),
    "weight-offload": Technique(
        {"weight_offload": "disk"},
        improves="peak_bytes",
        half_weights=True,
        says="on: half of the weights are read from a file in every step",
        claim="models larger than memory run, slower",
    ),
    "sparse": Technique(
        {"sparse": "auto"},
        {"sparse": "off"},
        improves="decode_tokens_per_s",
        says="pays for models of which many weights are zero",
    ),
}
