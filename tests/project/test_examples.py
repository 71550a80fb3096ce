"""The examples of the documentation run, and say what they are to say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from live_server import LiveServer
from oracle import BACKENDS
from paths import ROOT
from quire.core.config import flat_config
from quire.server.server_options import ServerOptions
from real_server import Shared
from stub_engine import StubEngine

EXAMPLES = ROOT / "examples"
SAID: dict[str, tuple[str, ...]] = {
    "generate.py": ("Greatest Common Divisor.", "'def main(' + ", "(length)"),
    "chat.py": ("Serialize ``obj`` to a JSON formatted ``str``.", "Greatest Common Divisor.", "tokens read"),
    "streaming.py": ("Join two or more pathname components", "tokens]", "[first token after "),
    "structured.py": ("-", "'name':", "'arguments':"),
    "tools.py": ("weather({", '"city":', " degrees, "),
    "vectors.py": ("64 numbers: ", "os.path.join and json.dumps: "),
    "speculation.py": ("plain  0 of 0", "1 text: "),
    "lora.py": ("without: ", "with the adapter: "),
    "compress.py": ("MiB of weights", "Greatest Common Divisor."),
    "batch.sh": ("3 of 3 requests were answered now, 0 with an error", "Greatest Common Divisor."),
    "bench.sh": ("output tokens per s", "paged"),
}
"""Every example, and parts of what it prints."""
OVER_HTTP = ("chat.py", "streaming.py", "structured.py", "tools.py")
SLOW = ("bench.sh",)

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server of the embedded model, without options: the examples ask for none."""
    pytest.importorskip("openai")
    config = flat_config(device="cpu", num_blocks=128)
    server = LiveServer(cast(StubEngine, Shared(config)), ServerOptions(port=0), config)
    server.start()
    yield f"http://127.0.0.1:{server.port}/v1"
    server.stop()


def main_of(name: str) -> Callable[..., None]:
    """The function that the file calls when it is run."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., None] = module.main
    return found


def test_all_are_tried() -> None:
    assert set(SAID) == {path.name for path in EXAMPLES.iterdir() if path.is_file()} and len(SAID) >= 10


@pytest.mark.parametrize("name", [name for name in SAID if name.endswith(".py")])
def test_a_program(name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[Any] = [request.getfixturevalue("address")] if name in OVER_HTTP else []
    main_of(name)(*([4] if name == "lora.py" else given))
    said = capsys.readouterr().out
    assert all(part in said for part in SAID[name]), said


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SAID if name.endswith(".sh")
])  # fmt: skip
def test_a_script(name: str) -> None:
    found = Path(sys.executable).parent
    run = subprocess.run(
        ["bash", EXAMPLES / name], env={**os.environ, "PATH": f"{found}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert all(part in run.stdout for part in SAID[name]), run.stdout
