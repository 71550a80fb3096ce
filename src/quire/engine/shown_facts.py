"""What a chat and a server tell of a loaded model when they begin: memory, KV cache, sequences and drafts."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.speculation import Speculation
from quire.engine.client import EngineInfo


def gigabytes(count: int) -> str:
    """Bytes as people read them: 93 MB, 1.2 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def memory_line(info: EngineInfo) -> str:
    """Memory of the weights and of the KV cache, which on CPUs is taken as it fills, with its format and tokens."""
    kind = info.dtype if info.quantization == "none" else info.quantization
    upto, filled = ("", "") if info.backend == "triton" else ("up to ", ", taken as it fills")
    return (
        f"{gigabytes(info.weight_bytes)} of {kind} weights, {upto}{gigabytes(info.kv_cache_bytes)} of KV cache in "
        f"{info.kv_cache_dtype} ({info.num_blocks * info.block_size:,} tokens{filled})"
    )


def slots_line(config: EngineConfig, drafts: str = "") -> str:
    """How many sequences run at a time (slots), and who drafts tokens ahead where anybody does; `drafts`: the method
    that was chosen where `config` asks for none."""
    seqs = config.scheduler.max_num_seqs
    told = f"{seqs} sequence{'s' * (seqs != 1)} at a time (--max-num-seqs)"
    asked = config.speculation.asked
    if asked is None and drafts:
        asked = Speculation(method=drafts)
    if asked is None:
        return told
    most = f", {asked.tokens} tokens at most" if asked.tokens else ""
    return f"{told}, speculation by {asked.method}{most}"
