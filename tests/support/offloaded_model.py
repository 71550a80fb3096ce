"""Models whose layers come from a file, and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracle import write
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine

OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 96, "max_num_batched_tokens": 64, "threads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    write(made, "llama", num_hidden_layers=7)
    return made


def answers(engine: Engine, adapter: str = "") -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of four requests, greedy and sampled; the first two with `adapter`."""
    for i, size in enumerate((90, 3, 17, 40)):
        params = SamplingParams(max_tokens=9, temperature=0.8 * (i % 2), logprobs=0, ignore_eos=True)
        prompt = tuple(3 + (7 * i + 5 * j) % 90 for j in range(size))
        own = adapter if i < 2 else ""
        engine.submit(Request(id=str(i), prompt=prompt, params=params, seed=i, arrival=0.0, adapter=own))
    found: dict[str, tuple[list[int], list[float]]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens, scores = found.setdefault(output.request_id, ([], []))
            tokens.extend(output.tokens)
            scores.extend(lp.logprob for lp in output.logprobs)
    engine.close()
    return found


def least_gib(folder: Path, **options: Any) -> float:
    """The least that --weight-memory-gib may be, as it says itself."""
    with pytest.raises(ConfigError, match="give at least") as refused:
        start_engine(flat_config(model=str(folder), weight_memory_gib=1e-6, **OPTIONS | options))
    assert refused.value.param == "weight_memory_gib"
    needed = int(refused.value.message.split(" take ")[1].split(" bytes")[0].replace(",", ""))
    return (needed + 1) / 2**30


def offloaded(folder: Path, room: Path, gib: float, kind: str = "disk", **options: Any) -> Engine:
    more = {"weight_offload": kind, "weight_memory_gib": gib, "weight_offload_folder": str(room)}
    return start_engine(flat_config(model=str(folder), **OPTIONS | more | options))
