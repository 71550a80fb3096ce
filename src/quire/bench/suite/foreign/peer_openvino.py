"""OpenVINO GenAI's continuous batching as a measured process, in an environment of its own (see protocol.py).

python peer_openvino.py make FOLDER FORMAT OUT      export a checkpoint; FORMAT int8, or int4 (group 128, asymmetric)
python peer_openvino.py run OUT THREADS [SEQUENCES]  the protocol
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from protocol import Item, run_load, serve

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


class OpenVinoPeer:
    """A pipeline without prefix cache whose steps are called one by one."""

    def __init__(self, folder: str, threads: int, sequences: int = 64) -> None:
        import openvino_genai as genai

        self.genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GIGABYTES
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = sequences
        scheduler.enable_prefix_caching = False
        self.pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.sent = 0
        self.running: dict[int, tuple[Any, int]] = {}

    def facts(self) -> dict[str, str]:
        """What runs."""
        import openvino

        core = openvino.Core()
        return {
            "version": f"openvino-genai {self.genai.__version__}",
            "cpu": ", ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def ask(self, length: int, tokens: int) -> Any:
        """One request of `length` arbitrary tokens; its handle."""
        prompt = [(i * 7919 + self.sent + 1) % (VOCABULARY - 10) + 5 for i in range(length)]
        return self._request(prompt, tokens)

    def _request(self, prompt: list[int], tokens: int) -> Any:
        import numpy as np
        import openvino

        self.sent += 1
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        return self.pipe.add_request(self.sent, openvino.Tensor(np.array([prompt], np.int64)), config)

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.pipe.has_non_finished_requests():
            self.pipe.step()

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt."""
        handle = self.ask(tokens, 1)
        started = time.perf_counter()
        self.drain()
        rate = tokens / (time.perf_counter() - started)
        handle.read_all()
        return rate

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        handles = [self.ask(context, steps + 8) for _ in range(batch)]
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

    def load(self, items: list[list[Any]], most: int) -> dict[str, Any]:
        """See `protocol.run_load`."""
        found: dict[str, Any] = run_load(self, [Item(*item) for item in items], most)
        return found

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Queue a request."""
        self.running[number] = self._request(prompt, output), output

    def step(self) -> list[tuple[int, int, bool]]:
        """One step of the pipeline, and what came of it."""
        self.pipe.step()
        came = []
        for number, (handle, left) in list(self.running.items()):
            made = [0]
            self._collect([handle], made)
            if made[0]:
                self.running[number] = handle, left - made[0]
                came.append((number, made[0], left <= made[0]))
            if left <= made[0]:
                del self.running[number]
        return came

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
    serve(OpenVinoPeer(str(Path(sys.argv[2])), *map(int, sys.argv[3:5])))


if __name__ == "__main__":
    main()
