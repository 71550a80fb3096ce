"""A process of quire that is measured: one JSON command a line on stdin, one JSON answer a line on stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import quire
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.ops.arrays import Host
from quire.ops.cpu.thread_probe import read_rate
from quire.ops.native import huge_bytes

VOCABULARY = 32000
READ_BYTES = 768 << 20
"""More than caches hold."""


class Peer:
    """An engine without prefix cache, so that every prompt is computed."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        self.engine = LocalEngine(
            flat_config(
                model=folder,
                load_format="auto" if folder.endswith(".gguf") else "dummy",
                max_model_len=2048,
                max_num_seqs=64,
                cache_packed="off",
                enable_prefix_caching=False,
                **options,
            )
        )
        self.sent = 0
        self.memory: Host | None = None

    def facts(self) -> dict[str, str]:
        """What runs."""
        info = self.engine.info
        return {"version": f"quire {quire.__version__}", "cpu": f"{info.backend}, {info.isa}, {info.threads} threads"}

    def limit(self) -> float:
        """Steps/s at which this machine can read the weights of one row's step, now: their bytes / the best read rate.

        Of a layer's experts those that a row chooses are counted.
        """
        model, ops = self.engine.engine.model, self.engine.engine.ops
        if self.memory is None:
            self.memory = huge_bytes(READ_BYTES)
            self.memory.fill(0)
        best = read_rate(ops.native, self.memory)
        routing = model.spec.moe.routing
        share = routing.top_k / routing.experts if routing.experts else 1.0
        parts = {role: size for role, (_, size) in model.report.items() if role != "embed"}
        return best / sum(size * (share if role.startswith("expert_") else 1.0) for role, size in parts.items())

    def submit(self, length: int, tokens: int) -> None:
        """One request of `length` arbitrary tokens."""
        self.sent += 1
        prompt = tuple((i * 7919 + self.sent) % (VOCABULARY - 10) + 5 for i in range(length))
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Request(id=str(self.sent), prompt=prompt, params=params, seed=0, arrival=0.0))

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt."""
        self.submit(tokens, 1)
        started = time.perf_counter()
        while self.engine.poll(0) is not None:
            pass
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        for _ in range(batch):
            self.submit(context, steps + 8)
        while self._begun() < batch:
            self.engine.poll(0)
        begun, made = time.perf_counter(), self.engine.engine.generation_tokens
        for _ in range(steps):
            self.engine.poll(0)
        rate = (self.engine.engine.generation_tokens - made) / (time.perf_counter() - begun)
        while self.engine.poll(0) is not None:
            pass
        return rate

    def _begun(self) -> int:
        return sum(len(s.tokens) > s.prompt_len for s in self.engine.engine.scheduler.running)


def main() -> None:
    """Load, say so, obey."""
    peer = Peer(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"ready": True} | peer.facts()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        rate = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
