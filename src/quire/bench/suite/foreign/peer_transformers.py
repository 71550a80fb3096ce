"""`generate` of Hugging Face transformers as a measured process: static batches, padded on the left (see protocol.py).

    python peer_transformers.py FOLDER THREADS BATCH [LOAD_FORMAT]

LOAD_FORMAT dummy makes up random weights for FOLDER's config.json. A batch takes what is due, BATCH requests at most,
and runs until its longest answer is done, as `generate` does; tokens that a request did not ask for do not count.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from protocol import Item, Record, serve


class TransformersPeer:
    """A model in bf16; torch's threads."""

    def __init__(self, folder: str, threads: int, batch: int, load_format: str = "auto") -> None:
        torch.set_num_threads(threads)
        self.batch = batch
        kind = transformers.AutoModelForCausalLM
        if load_format == "dummy":
            torch.manual_seed(0)
            config = transformers.AutoConfig.from_pretrained(folder)
            self.model = kind.from_config(config, dtype=torch.bfloat16).eval()
        else:
            self.model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def facts(self) -> dict[str, Any]:
        """What runs."""
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        versions = {"torch": torch.__version__}
        return {"version": transformers.__version__, "versions": versions, "weight_bytes": size}

    def load(self, items: list[list[Any]], most: int) -> dict[str, Any]:
        """Batches of what is due, one after the other: see `protocol.run_load`, whose answer this is."""
        asked = [Item(*item) for item in items]
        records = [Record(item.due, 0.0, [], []) for item in asked]
        left = sorted(range(len(asked)), key=lambda i: asked[i].due)
        decoded, decoding, started = 0, 0.0, time.perf_counter()
        while left:
            now = time.perf_counter() - started
            due = [i for i in left if asked[i].due <= now][: min(self.batch, most or self.batch)]
            if not due:
                time.sleep(asked[left[0]].due - now)
                continue
            left = [i for i in left if i not in due]
            times = self._generate([asked[i] for i in due])
            for i in due:
                own = [at - started for at in times[: asked[i].output]]
                # All of a server's requests are sent when they are due; these wait for the batch before.
                records[i] = Record(asked[i].due, asked[i].due, own, [1] * len(own))
            decoded += sum(asked[i].output - 1 for i in due)
            decoding += times[-1] - times[0]
        return {"records": records, "decode": [decoded, decoding], "seconds": time.perf_counter() - started}

    @torch.inference_mode()
    def _generate(self, batch: list[Item]) -> list[float]:
        """When each token of the longest answer was there."""
        width, longest = max(len(item.prompt) for item in batch), max(item.output for item in batch)
        ids = torch.tensor([[0] * (width - len(item.prompt)) + item.prompt for item in batch])
        mask = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in batch])
        times: list[float] = []

        def note(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False,
            pad_token_id=0, eos_token_id=None, stopping_criteria=[note],
        )  # fmt: skip
        return times


if __name__ == "__main__":
    serve(TransformersPeer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5]))
