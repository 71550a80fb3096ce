"""OpenVINO GenAI's continuous batching as a measured process, in an environment of its own (see peers.py).

python peer_openvino.py make FOLDER FORMAT OUT      export a checkpoint; FORMAT int8, or int4 (group 128, asymmetric)
python peer_openvino.py run OUT THREADS             the protocol of peers.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 32000
KV_GIGABYTES = 2
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group_size": 128, "sym": False, "ratio": 1.0},
}


def make(folder: str, fmt: str, out: str) -> None:
    """Export by optimum-intel. As its own recipes do, int4 leaves embedding and head at 8 bits, per channel."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = OVWeightQuantizationConfig(**FORMATS[fmt])
    OVModelForCausalLM.from_pretrained(folder, export=True, quantization_config=config).save_pretrained(out)


class Peer:
    """A pipeline without prefix cache whose steps are called one by one."""

    def __init__(self, folder: str, threads: int) -> None:
        import openvino_genai as genai

        self.genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GIGABYTES
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        self.pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.sent = 0

    def facts(self) -> dict[str, str]:
        """What runs."""
        import openvino

        core = openvino.Core()
        return {
            "version": f"openvino-genai {self.genai.__version__}",
            "cpu": ", ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def submit(self, length: int, tokens: int) -> Any:
        """One request of `length` arbitrary tokens; its handle."""
        import numpy as np
        import openvino

        self.sent += 1
        prompt = (np.arange(length, dtype=np.int64) * 7919 + self.sent) % (VOCABULARY - 10) + 5
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        return self.pipe.add_request(self.sent, openvino.Tensor(prompt[None]), config)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.pipe.has_non_finished_requests():
            self.pipe.step()

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt."""
        handle = self.submit(tokens, 1)
        started = time.perf_counter()
        self.drain()
        rate = tokens / (time.perf_counter() - started)
        handle.read_all()
        return rate

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        handles = [self.submit(context, steps + 8) for _ in range(batch)]
        made = [0] * batch
        while not all(made):
            self._step(handles, made)
        before = sum(made)
        started = time.perf_counter()
        for _ in range(steps):
            self.pipe.step()
        seconds = time.perf_counter() - started
        self._collect(handles, made)
        self.drain()
        return (sum(made) - before) / seconds

    def _step(self, handles: list[Any], made: list[int]) -> None:
        self.pipe.step()
        self._collect(handles, made)

    def _collect(self, handles: list[Any], made: list[int]) -> None:
        """Add the tokens that came to `made`."""
        for i, handle in enumerate(handles):
            while handle.can_read():
                made[i] += sum(len(output.generated_ids) for output in handle.read().values())


def main() -> None:
    """Make a model, or load one and obey."""
    if sys.argv[1] == "make":
        make(*sys.argv[2:5])
        return
    peer = Peer(str(Path(sys.argv[2])), int(sys.argv[3]))
    print(json.dumps({"ready": True} | peer.facts()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        rate = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
