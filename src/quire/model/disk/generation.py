"""What a model says about generating: end tokens and default sampling parameters (generation_config.json)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.model.disk.hf_config import HfConfig, read_json
from quire.model.spec import ModelSpec

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """`eos_token_ids` end a sequence; `sampling` holds the folder's defaults under the names of `SamplingParams`.

    `decoder_start`: the token that a decoder behind an encoder begins with.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)
    decoder_start: int = 0


def read_generation(folder: Path, spec: ModelSpec) -> GenerationDefaults:
    """Read generation_config.json if there is one, else from the spec.

    `folder`: a model folder, or a GGUF file, beside which the file lies and whose own special tokens count.
    """
    of_file = GenerationDefaults(spec.eos_token_ids, spec.bos_token_id, decoder_start=spec.encoder.start)
    path = (folder.parent if folder.is_file() else folder) / GENERATION_CONFIG
    if not (path.exists() or path.is_symlink()):
        return of_file
    config = HfConfig(read_json(path), str(path))
    sampling = _sampling(config)
    if folder.is_file():
        return replace(of_file, sampling=sampling)
    eos = config.token_ids("eos_token_id", spec.vocab_size) or spec.eos_token_ids
    bos = config.token_ids("bos_token_id", spec.vocab_size)
    start = config.integer("decoder_start_token_id", spec.encoder.start, low=0, high=spec.vocab_size - 1)
    return GenerationDefaults(eos, bos[0] if bos else spec.bos_token_id, sampling, start)


def _sampling(config: HfConfig) -> dict[str, float]:
    """Defaults under the names of `SamplingParams`. `do_sample` false asks for greedy decoding."""
    sampling: dict[str, float] = {}
    if not config.flag("do_sample", True):
        sampling["temperature"] = 0.0
    else:
        for name in ("temperature", "top_p", "min_p"):
            if config.has(name):
                sampling[name] = config.number(name, low=-1e-9)
        if config.has("top_k"):
            sampling["top_k"] = config.integer("top_k", low=0)
    if config.has("repetition_penalty"):
        sampling["repetition_penalty"] = config.number("repetition_penalty")
    if config.has("max_new_tokens"):
        sampling["max_tokens"] = config.integer("max_new_tokens")
    return sampling
