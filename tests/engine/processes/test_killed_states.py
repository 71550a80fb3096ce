"""Engine processes of models with recurrent states are killed under load, and every answer is as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_answers import engine_of, killed, make_requests, run
from often import one_of
from oracle import BACKENDS
from quire.core.config import EngineConfig, flat_config
from quire.engine.client import StepReport
from quire.engine.processes.channel import LocalChannel
from quire.engine.processes.process import ProcessEngine
from ways_to_serve import written

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
LIVES = (30, 60)
"""Tokens after which the first engine is killed, and the one after it."""
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "preempted, with drafts": ("states", {
        "num_blocks": 24, "num_state_slots": 14, "max_num_seqs": 6, "max_num_batched_tokens": 32,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'}),
    "scans": ("scans", {"num_blocks": 512}),
    "scans beside attention": ("beside", {"num_blocks": 512, "max_num_batched_tokens": 32, "max_num_seqs": 8}),
    "scans of channels": ("channel_scans", {"num_blocks": 512}),
}  # fmt: skip


class Mortal(ProcessEngine):
    """An engine whose process gets SIGKILL once it has said `life` tokens, whatever it does then; 0: never."""

    def __init__(self, config: EngineConfig, life: int) -> None:
        super().__init__(config)
        self.life, self.said = life, 0

    def poll(self, timeout: float) -> StepReport | None:
        """A step, or the end."""
        report = super().poll(timeout)
        self.said += sum(len(out.tokens) for out in report.outputs) if report else 0
        if self.life and self.said >= self.life:
            assert isinstance(self.channel, LocalChannel)
            self.channel.process.kill()
        return report


@pytest.mark.parametrize("form", one_of(len(FORMS), FORMS))
def test_answers_are_as_alone_after_kills_in_the_middle(form: str, tmp_path: Path) -> None:
    kind, options = FORMS[form]
    folder, requests = str(written(tmp_path, kind)), make_requests(16, 99, 3)
    alone = engine_of(model=folder, enable_prefix_caching=False, enforce_eager=True)
    want = {request.id: run(alone, [request])[request.id].bits() for request in requests}
    config = flat_config(model=folder, device="cpu", threads=1, tune="off", **options)
    engines: list[Mortal] = []

    def start() -> Mortal:
        engines.append(Mortal(config, LIVES[len(engines)] if len(engines) < len(LIVES) else 0))
        return engines[-1]

    found = killed(requests, start, lambda engine: None)
    assert [engine.said > 0 for engine in engines] == [True] * (len(LIVES) + 1), "each had a part of the answers"
    assert [name for name, answer in found.items() if answer.bits() != want[name]] == []
