"""Measured processes themselves: baselines that drive the engine in other ways, and the scripts of peers."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.bench.suite import session, suite_runner
from quire.bench.suite.engines import FOREIGN
from quire.bench.suite.foreign.protocol import Item, run_load
from quire.bench.suite.suite_file import read_suite
from quire.bench.suite.unfused import unfuse
from quire.bench.suite.worker import PlainMode, Recomputing, Reserving
from quire.core.errors import ConfigError
from quire.ops.native import load_native
from quire.ops.op import IMPLEMENTATIONS
from stub_server import StubServer
from tiny_model import OPTIONS, write_tiny

ITEMS = [Item(list(range(20 + i, 30 + 2 * i)), 5 + i, 0.0) for i in range(4)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny(tmp_path_factory.mktemp("tiny")), **OPTIONS | {"num_blocks": 12}) as found:
        yield found


def tokens_of(driver: PlainMode) -> list[list[int]]:
    found = run_load(driver, ITEMS, 0)
    assert [sum(record.tokens) for record in found["records"]] == [item.output for item in ITEMS]
    assert all(len(record.times) == len(record.tokens) for record in found["records"])
    return [driver.tokens[number] for number in range(len(ITEMS))]


def test_baselines_answer_as_the_engine_does_itself(llm: LLM) -> None:
    plain = PlainMode(llm.engine)
    expected = tokens_of(plain)
    for driver in (Recomputing(llm.engine), Reserving(llm.engine, True), Reserving(llm.engine, False)):
        llm.engine.reset_prefix_cache()
        assert tokens_of(driver) == expected, driver
    assert 0 <= max(plain.waste) < 0.7


def test_reserving_wastes_what_is_not_there_yet(llm: LLM) -> None:
    """192 slots hold one row of 128; or several of prompt and answer."""
    longest, exact = Reserving(llm.engine, True), Reserving(llm.engine, False)
    running: list[int] = []
    for driver in (longest, exact):
        for number, item in enumerate(ITEMS):
            driver.submit(number, item.prompt, item.output)
        driver.step()
        running.append(len(llm.engine.engine.scheduler.running))
        while llm.engine.engine.has_work or driver._waiting:
            driver.step()
    assert running == [1, 4]
    assert min(longest.waste) > 0.8 and max(exact.waste) < 0.6


def test_a_row_that_never_fits_is_refused(llm: LLM) -> None:
    driver = Reserving(llm.engine, True)
    driver._free = 100
    driver.submit(0, [1, 2, 3], 4)
    with pytest.raises(ConfigError, match="hold no row of 128"):
        driver.step()


@pytest.mark.skipif(load_native() is None, reason="the native extension is not built")
def test_unfused_calls_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generated() -> list[int]:
        with LLM("", num_blocks=64, device="cpu", quantization="int8", cache_packed="off") as found:
            return list(
                found.generate("import os", SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].token_ids
            )

    fused = generated()
    for name in ("gated_mlp", "plain_mlp", "add_rmsnorm", "add_layernorm"):
        monkeypatch.setitem(IMPLEMENTATIONS, name, dict(IMPLEMENTATIONS[name]))
    before = IMPLEMENTATIONS["gated_mlp"]["cpu"]
    unfuse()
    assert IMPLEMENTATIONS["gated_mlp"]["cpu"] is not before
    assert generated() == fused


def test_a_load_holds_back_and_waits() -> None:
    class Engine:
        def __init__(self) -> None:
            self.left: dict[int, int] = {}
            self.most = 0

        def submit(self, number: int, prompt: list[int], output: int) -> None:
            self.left[number] = output
            self.most = max(self.most, len(self.left))

        def step(self) -> list[tuple[int, int, bool]]:
            came = [(number, 2, left <= 2) for number, left in self.left.items()]
            self.left = {number: left - 2 for number, left in self.left.items() if left > 2}
            return came

    engine = Engine()
    found = run_load(engine, [Item([1], 4, 0.0)] * 3 + [Item([1], 2, 0.05)], 2)
    assert engine.most == 2 and found["seconds"] >= 0.05
    assert [record.tokens for record in found["records"]] == [[2, 2], [2, 2], [2, 2], [2]]
    # Of the two that ran first the second steps alone were without a first token in them; so the third's.
    assert found["decode"][0] == 6


def imported(name: str, monkeypatch: pytest.MonkeyPatch, **fakes: Any) -> Any:
    """A script of a peer, beside modules that pretend."""
    monkeypatch.syspath_prepend(str(FOREIGN))
    for module, names in fakes.items():
        fake = types.ModuleType(module)
        vars(fake).update(names)
        monkeypatch.setitem(sys.modules, module, fake)
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOREIGN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Batch:
    """What a llama_batch is."""

    def __init__(self) -> None:
        self.n_tokens, size = 0, 512
        self.token, self.pos, self.n_seq_id, self.logits = ([0] * size for _ in range(4))
        self.seq_id = [[0] for _ in range(size)]


def test_llama_cpp_batches_decodes_before_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library pretends: of a row's logits the place after the row's token is largest. Positions must follow."""
    steps: list[list[tuple[int, int, int]]] = []
    places: dict[int, int] = {}
    logits = np.zeros(64, np.float32)

    def decode(context: Any, batch: Batch) -> int:
        rows = []
        for i in range(batch.n_tokens):
            token, place, sequence = batch.token[i], batch.pos[i], batch.seq_id[i][0]
            assert place == places.get(sequence, 0)
            places[sequence] = place + 1
            rows.append((token, place, sequence))
        steps.append(rows)
        return 0

    def row_logits(context: Any, row: int) -> Any:
        logits[:] = 0
        logits[(steps[-1][row][0] + 1) % 64] = 1
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    class Options:
        pass

    fake: dict[str, Any] = {
        "llama_log_callback": lambda fn: fn,
        "llama_decode": decode,
        "llama_get_logits_ith": row_logits,
        "llama_batch_init": lambda *sizes: Batch(),
        "llama_vocab_n_tokens": lambda vocabulary: 64,
        "llama_init_from_model": lambda model, options: "context",
        "llama_memory_seq_rm": lambda memory, sequence, first, last: places.pop(sequence),
        "llama_memory_clear": lambda memory, data: places.clear(),
        "llama_context_default_params": Options,
    }
    nothing = ("llama_backend_init", "llama_log_set", "llama_model_load_from_file", "llama_model_default_params",
               "llama_model_get_vocab", "llama_get_memory", "llama_synchronize")  # fmt: skip
    peer = imported(
        "peer_llama_cpp", monkeypatch, llama_cpp=fake | dict.fromkeys(nothing, lambda *given: None)
    ).LlamaCppPeer("file", 2, 2, 64)
    found = peer.load([[list(range(5, 11)), 3, 0.0], [[7, 8], 4, 0.0], [[9], 2, 0.0]], 0)
    assert [sum(record.tokens) for record in found["records"]] == [3, 4, 2]
    # Two at a time: both prompts at once, then a token of each; the third takes the place of the first.
    assert [len(step) for step in steps] == [8, 2, 2, 2, 1]
    assert [row[0] for row in steps[1]] == [11, 9] and not places


def test_vllm_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out:
        def __init__(self, name: str, made: int, finished: bool) -> None:
            self.request_id, self.finished = name, finished
            self.outputs = [types.SimpleNamespace(token_ids=[0] * made)]

    class LLMEngine:
        def __init__(self) -> None:
            self.asked: dict[str, list[int]] = {}

        @classmethod
        def from_engine_args(cls, args: dict[str, Any]) -> Any:
            return cls()

        def add_request(self, name: str, prompt: Any, params: dict[str, Any]) -> None:
            self.asked[name] = [0, params["max_tokens"]]

        def step(self) -> list[Out]:
            came = []
            for name, (made, most) in list(self.asked.items()):
                self.asked[name][0] = made + 1
                came.append(Out(name, made + 1, made + 1 == most))
                if made + 1 == most:
                    del self.asked[name]
            return came

    fake = {"EngineArgs": dict, "LLMEngine": LLMEngine, "SamplingParams": dict, "__version__": "1"}
    peer = imported("peer_vllm", monkeypatch, vllm=fake).VllmPeer("folder", 4, 64, "dummy")
    found = peer.load([[[1, 2], 3, 0.0], [[3], 1, 0.0]], 0)
    assert [record.tokens for record in found["records"]] == [[1, 1, 1], [1]] and found["decode"][0] == 2


def test_openvino_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        def __init__(self, left: int) -> None:
            self.left, self.ready = left, 0

        def can_read(self) -> bool:
            return self.ready > 0

        def read(self) -> dict[int, Any]:
            self.ready -= 1
            return {0: types.SimpleNamespace(generated_ids=[5])}

    class Pipeline:
        def __init__(self, *given: Any) -> None:
            self.handles: list[Handle] = []

        def add_request(self, number: int, tensor: Any, config: Any) -> Handle:
            self.handles.append(Handle(config.max_new_tokens))
            return self.handles[-1]

        def step(self) -> None:
            for handle in self.handles:
                if handle.left:
                    handle.left, handle.ready = handle.left - 1, handle.ready + 1

    fake = {"SchedulerConfig": type("C", (), {}), "GenerationConfig": type("G", (), {}),
            "ContinuousBatchingPipeline": Pipeline}  # fmt: skip
    script = imported("peer_openvino", monkeypatch, openvino_genai=fake, openvino={"Tensor": lambda array: array})
    found = script.OpenVinoPeer("folder", 2, 4).load([[[1, 2], 3, 0.0], [[3], 1, 0.0]], 0)
    assert [record.tokens for record in found["records"]] == [[1, 1, 1], [1]]


def test_any_server_over_http() -> None:
    from quire.bench.suite.over_http import Server

    with StubServer(step_seconds=0.001) as stub:
        server = Server(f"http://127.0.0.1:{stub.port}/v1")
        found = server.load([[[1, 2, 3], 4, 0.0], [[1, 2], 2, 0.0]], 1)
    assert [sum(record.tokens) for record in found["records"]] == [4, 2] and not found["failures"]


def rows_of(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(suite_runner.Bench, "_limits", lambda self: [])
    file = tmp_path / "suite.toml"
    file.write_text(text)
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    return session.run_suite(file, read_suite(file), out, work, only="", retry=False, make=False)


def test_a_suite_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
name = "a"
rounds = 1
perplexity_bytes = 2000
[[grid]]
batch = [2]
input = [16]
output = [4]
prompts = "text"
"""
    [row] = rows_of(tmp_path, text, monkeypatch)
    assert row.metrics["perplexity"] > 1 and row.metrics["output_tokens_per_s"] > 0
    assert row.metrics["flops_per_byte"] > 0 and row.metrics["load_s"] > 0 and row.load.name == "text"
    assert (row.model.name, row.model.format, row.model.kv_format) == ("pydoc", "bfloat16", "bfloat16")
    assert row.metrics["peak_bytes"] > row.metrics["weight_bytes"] > 1 << 20


@pytest.mark.slow
def test_every_technique_on_the_embedded_model_and_transformers_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert parallelism has no experts to divide here: a row with the reason."""
    pytest.importorskip("transformers")
    text = """
name = "a"
rounds = 1
max_model_len = 256
[[grid]]
techniques = ["continuous-batching", "kv-cache", "paged-kv", "paged-kv-exact", "prefix-cache", "chunked-prefill",
  "fusion", "capture", "int8-weights", "int4-weights", "nf4-weights", "mxfp4-weights", "bf12-weights", "int8-kv",
  "fp8-kv", "token-blocks", "small-blocks", "ngram", "suffix", "self-draft", "tensor-parallel", "pipeline-parallel",
  "context-parallel", "expert-parallel", "kv-store", "weight-offload", "sparse"]
batch = [2]
requests = 4
input = [32]
output = [8]
[[grid]]
engines = ["quire", "transformers"]
formats = ["bfloat16"]
batch = [2]
requests = 4
input = [32]
output = ["4:8"]
"""
    rows = rows_of(tmp_path, text, monkeypatch)
    failed = {row.technique: row.notes for row in rows if not row.metrics}
    assert failed.keys() == {"expert-parallel"}, failed
    assert {row.engine.name for row in rows} == {"quire", "transformers"}
