"""An engine on a CPU imports no torch: neither `LLM`, nor a server with its processes, nor the commands around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.config import DeviceConfig, flat_config
from quire.core.errors import ConfigError
from quire.ops.backend import open_backend
from quire.run.rank_startup import reach
from test_server_death import Serving
from tiny_model import OPTIONS, write_tiny

REFUSED = 'raise ImportError("torch was imported")\n'
PROMPT = {"prompt": "a b", "max_tokens": 4, "temperature": 0}
LLM = """
import sys
from quire import LLM, SamplingParams
llm = LLM(**{options})
found = llm.generate(["a b c", "d"], SamplingParams(max_tokens=5, temperature=0.7, seed=1, logprobs=2))
assert all(len(each.outputs[0].token_ids) for each in found)
sys.exit("torch" in sys.modules)
"""
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "int4, int8 keys": {"quantization": "int4", "kv_cache_dtype": "int8", "group_size": 32},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two ranks": {"tensor_parallel_size": 2, "threads": 1},
    "adapters": {"enable_lora": True},
}


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of processes in which an import of torch is an error."""
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "torch.py").write_text(REFUSED)
    return os.environ | {"PYTHONPATH": str(tmp_path / "refused")}


def run(environment: dict[str, str], *command: str) -> None:
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_llm(kind: str, tmp_path: Path, without_torch: dict[str, str]) -> None:
    options = {"model": str(write_tiny(tmp_path / "tiny")), "device": "cpu"} | OPTIONS | KINDS[kind]
    run(without_torch, "-c", LLM.format(options=options))


@pytest.mark.parametrize(
    "words", ["inspect", "plan --device h100", "bench latency --input-len 4 --output-len 4 --iters 1"]
)
def test_commands(words: str, tmp_path: Path, without_torch: dict[str, str]) -> None:
    made = str(write_tiny(tmp_path / "tiny"))
    run(without_torch, "-m", "quire", *words.split(), made, "--load-format", "dummy")


def test_a_server_and_its_processes(
    tmp_path: Path, without_torch: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", without_torch["PYTHONPATH"])
    with (
        Serving(str(write_tiny(tmp_path / "tiny")), "--load-format", "dummy", "--device", "cpu") as server,
        server.up() as client,
    ):
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        asked = chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        for body in (chat, asked):
            assert client.post("/v1/chat/completions", json=body).status_code in (200, 400), json.dumps(body)


@pytest.mark.parametrize(
    ("device", "extra"),
    [
        (DeviceConfig(device="reference"), "train"),
        (DeviceConfig(device="cuda"), "gpu"),
        (DeviceConfig(device="cpu", ops=("linear=reference",)), "train"),
    ],
)
def test_backends_of_torch_name_the_extra(device: DeviceConfig, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.lazy.has_torch", lambda: False)
    with pytest.raises(ConfigError, match=rf"needs PyTorch, which is not installed: pip install 'quire\[{extra}\]'"):
        open_backend(device)


def test_ranks_of_several_hosts_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.lazy.has_torch", lambda: False)
    config = flat_config(tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", cluster_secret_file="a file")
    with pytest.raises(ConfigError, match=r"several hosts needs PyTorch.*quire\[train\]"):
        reach(config)
