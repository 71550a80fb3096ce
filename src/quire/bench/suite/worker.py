"""quire as a measured process: `python -m quire.bench.suite.worker OPTIONS MODE`, by foreign/protocol.py.

OPTIONS are the engine's as JSON. MODE is one of `techniques.Mode`: how requests reach the engine. Baselines that no
server would want live here, outside of the engine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quire
from quire.bench.quality import heldout_texts, perplexity
from quire.bench.suite.foreign.protocol import Item, run_load, serve
from quire.core.errors import ConfigError, EngineFailure, QuireError
from quire.core.machine import end_with_parent
from quire.core.params import SamplingParams
from quire.engine.client import StepReport
from quire.engine.engine_options import engine_config
from quire.engine.llm import LLM
from quire.engine.local import LocalEngine
from quire.engine.requests import make_request
from quire.run.caches import kept_by, state_bytes


class PlainMode:
    """Requests go to the engine as they come. `tokens`: what came of each, by its number; `waste`: of each step, the
    share of slots that held none."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.info = engine, engine.info
        self.tokens: dict[int, list[int]] = {}
        self.waste: list[float] = []
        self._sent = 0
        self._numbers: dict[str, int] = {}

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Queue a request."""
        self._sent += 1
        name = f"{number}-{self._sent}"
        self._numbers[name] = number
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        if len(prompt) + output > self.info.max_model_len:
            raise ConfigError(f"{len(prompt)} + {output} tokens; the context holds {self.info.max_model_len}")
        self.engine.submit(make_request(self.info, prompt, params, request_id=name, seed=number))

    def step(self) -> Sequence[tuple[int, int, bool]]:
        """One step, and what came of it. `EngineFailure` where a request ends with an error."""
        report = self.engine.poll(0.0)
        if report is None:
            raise EngineFailure("the engine has nothing to do, and requests wait")
        self._look(report)
        came = []
        for output in report.outputs:
            if output.finish_reason == "error":
                raise EngineFailure(f"{output.request_id}: {output.error}")
            done = output.finish_reason is not None
            if output.tokens or done:
                number = self._numbers[output.request_id]
                self.tokens.setdefault(number, []).extend(output.tokens)
                came.append((number, len(output.tokens), done))
        return came

    def _look(self, report: StepReport) -> None:
        if self.engine.engine.scheduler.running:
            self.waste.append(report.stats.waste)


class Reserving(PlainMode):
    """Admits a sequence when the slots it may ever need are free all at once, in one row: in order of arrival."""

    def __init__(self, engine: LocalEngine, longest: bool) -> None:
        super().__init__(engine)
        self._longest = longest
        self._free = self.info.num_blocks * self.info.block_size
        self._held: dict[int, tuple[int, int]] = {}
        self._waiting: deque[tuple[int, list[int], int]] = deque()

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Let it wait until there is room."""
        self._waiting.append((number, prompt, output))

    def step(self) -> Sequence[tuple[int, int, bool]]:
        """Admit those there is room for, then a step."""
        while self._waiting and self._reserved(self._waiting[0]) <= self._free:
            number, prompt, output = self._waiting.popleft()
            self._held[number] = (self._reserved((number, prompt, output)), len(prompt) + output)
            self._free -= self._held[number][0]
            super().submit(number, prompt, output)
        if not self._held:
            raise ConfigError(f"{self._free} slots of KV cache hold no row of {self._reserved(self._waiting[0])}")
        came = super().step()
        for number, _, done in came:
            if done:
                self._free += self._held.pop(number)[0]
        return came

    def _reserved(self, waiting: tuple[int, list[int], int]) -> int:
        _, prompt, output = waiting
        return self.info.max_model_len if self._longest else len(prompt) + output

    def _look(self, report: StepReport) -> None:
        held = sum(s.computed for s in self.engine.engine.scheduler.running)
        reserved = sum(slots for slots, _ in self._held.values())
        if held and reserved:
            self.waste.append(1 - held / reserved)


class Recomputing(PlainMode):
    """Each token is asked for by a request of its own, whose prompt is all before it, so nothing is kept."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine)
        self._asked: dict[int, tuple[list[int], int]] = {}

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Ask for the first token."""
        self._asked[number] = (list(prompt), output)
        super().submit(number, prompt, 1)

    def step(self) -> Sequence[tuple[int, int, bool]]:
        """A step; requests that have their token ask for the next."""
        came = []
        for number, tokens, done in super().step():
            prompt, output = self._asked[number]
            made = self.tokens[number]
            if done and len(made) < output:
                super().submit(number, prompt + made, 1)
            came.append((number, tokens, len(made) >= output))
        return came


class SuiteWorker:
    """What the commands call."""

    def __init__(self, options: dict[str, Any], mode: str) -> None:
        if mode == "unfused":
            from quire.bench.suite.unfused import unfuse

            unfuse()
        self.llm = LLM.from_config(engine_config(options))
        self.engine, self.mode = self.llm.engine, mode

    def facts(self) -> dict[str, Any]:
        """What runs, and the memory it takes. `layers`: (bytes of a token, tokens back that are read, 0 = all) of each
        that keeps tokens; `state_bytes`: of a sequence's recurrent states."""
        info, kv, models = self.engine.info, self.engine.engine.kv, (self.engine.engine.model,)
        names = ("isa", "backend", "threads", "dtype", "quantization", "kv_cache_dtype", "weight_bytes", "vocab_size")
        facts = {name: getattr(info, name) for name in (*names, "max_model_len", "kv_bytes_per_token")}
        facts["version"], facts["state_bytes"] = quire.__version__, state_bytes(models)
        facts["layers"] = [(layer.bytes_per_token, layer.window) for layer in kept_by(models).values()]
        return facts | {"kv_bytes": kv.blocks * kv.block_bytes, "blocks": kv.blocks}

    def load(self, items: list[list[Any]], most: int, twice: bool = False) -> dict[str, Any]:
        """See `protocol.run_load`; `extra` has what the engine counted. `twice`: once before, which is not measured."""
        asked = [Item(*item) for item in items]
        if not twice:
            self.engine.reset_prefix_cache()
        else:
            run_load(self._driver(), asked, most)
        before, driver = self.engine.engine.stats(), self._driver()
        found = run_load(driver, asked, most)
        after, extra = self.engine.engine.stats(), {}
        if driver.waste:
            extra["kv_waste"] = sum(driver.waste) / len(driver.waste)
        if queries := after.prefix_queries - before.prefix_queries:
            extra["prefix_hit_share"] = (after.prefix_hits - before.prefix_hits) / queries
        if drafted := after.draft_tokens - before.draft_tokens:
            extra["acceptance"] = (after.accepted_tokens - before.accepted_tokens) / drafted
            extra["tokens_per_step"] = 1 + (after.accepted_tokens - before.accepted_tokens) / (
                after.drafts - before.drafts
            )
        return found | {"extra": extra, "preemptions": after.preemptions - before.preemptions}

    def _driver(self) -> PlainMode:
        if self.mode == "recompute":
            return Recomputing(self.engine)
        if self.mode.startswith("reserve-"):
            return Reserving(self.engine, self.mode == "reserve-longest")
        return PlainMode(self.engine)

    def perplexity(self, size: int, texts: dict[str, str]) -> dict[str, float]:
        """Perplexity of the first `size` bytes of `texts`, else of what is beside the model; {} where there is
        nothing."""
        folder = Path(self.engine.info.folder)
        if not texts and (folder / "heldout.json").is_file():
            texts = heldout_texts(folder)
        if not texts:
            return {}
        cut, left = {}, size
        for name, text in texts.items():
            if left > 0:
                cut[name] = text.encode()[:left].decode(errors="ignore")
                left -= len(text.encode())
        return perplexity(self.llm, cut)

    def weights_read(self) -> dict[str, float]:
        """Bytes of the weights that a step of one row reads: all but the table of tokens."""
        model = self.engine.engine.model
        routing = model.spec.moe.routing
        share = routing.top_k / routing.experts if routing.experts else 1.0
        parts = {role: size for role, (_, size) in model.report.items() if role != "embed"}
        return {"bytes": sum(size * (share if role.startswith("expert_") else 1.0) for role, size in parts.items())}


def main() -> None:
    """Load, say so, obey. What the engine refuses is the first answer."""
    end_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to standard output, answers it does not disturb
    try:
        worker = SuiteWorker(json.loads(sys.argv[1]), sys.argv[2])
    except (QuireError, MemoryError) as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=answers, flush=True)
        return
    serve(worker, answers)
    worker.llm.close()


if __name__ == "__main__":
    main()
