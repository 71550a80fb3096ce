"""vLLM's CPU build as a measured process, in an environment of its own (see peers.py).

    python peer_vllm.py FOLDER THREADS

FOLDER holds config.json only: weights are made up in bf16. The engine runs in this process, scheduling synchronously,
so that one call of `step` is one step and its time is the step's.
"""

from __future__ import annotations

import json
import os
import sys
import time

VOCABULARY = 32000


class Peer:
    """An engine without prefix cache. torch.compile stays on, as it does by default."""

    def __init__(self, folder: str, threads: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=2048,
                max_num_seqs=64,
                max_num_batched_tokens=2048,
                enable_prefix_caching=False,
                async_scheduling=False,
            )
        )
        self.sent = 0

    def facts(self) -> dict[str, str]:
        """What runs."""
        import torch
        import vllm

        return {"version": f"vllm-cpu {vllm.__version__}", "cpu": torch.backends.cpu.get_cpu_capability()}

    def submit(self, length: int, tokens: int) -> None:
        """One request of `length` arbitrary tokens."""
        from vllm import SamplingParams

        self.sent += 1
        prompt = [(i * 7919 + self.sent) % (VOCABULARY - 10) + 5 for i in range(length)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.sent), {"prompt_token_ids": prompt}, params)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt."""
        self.submit(tokens, 1)
        started = time.perf_counter()
        self.drain()
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        made = {}
        for _ in range(batch):
            self.submit(context, steps + 8)
        while len(made) < batch:
            made |= self._step()
        before = sum(made.values())
        started = time.perf_counter()
        for _ in range(steps):
            made |= self._step()
        rate = (sum(made.values()) - before) / (time.perf_counter() - started)
        self.drain()
        return rate

    def _step(self) -> dict[str, int]:
        """Tokens so far of the requests that a step advanced."""
        return {out.request_id: len(out.outputs[0].token_ids) for out in self.engine.step()}


def main() -> None:
    """Load, say so, obey."""
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to standard output
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True} | peer.facts()), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        rate = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"rate": rate}), file=answers, flush=True)


if __name__ == "__main__":
    main()
