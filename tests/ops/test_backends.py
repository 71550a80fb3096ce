"""A backend is one folder: nothing outside of `quire.ops` asks which it is, and one more folder serves a model."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire.ops
from paths import ROOT, SOURCE
from quire.core import config
from quire.core.errors import ConfigError
from quire.core.options import values
from quire.core.options.fields import fields_of
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.ops.choice import backend_of, choose, devices
from quire.ops.reference.backend import ReferenceOps
from source_tree import imports
from tiny_model import OPTIONS, write_tiny

FACTS = """
from quire.ops.choice import BackendFacts

DEVICE = BackendFacts("toy", lambda device: ("wood", 1))
"""
BACKEND = """
import torch

from quire.core.dtypes import F32
from quire.ops.arrays import to_torch
from quire.ops.backend import Ops
from quire.ops.lazy import torch_dtype
from quire.ops.op import REGISTRY, load_definitions
from quire.ops.weights import plain_packed

CALLS = []


class Repeat:
    def __init__(self, fn):
        self.run, self.output = fn, fn()


class ToyOps(Ops):
    name, isa = "toy", "wood"

    def __init__(self, overrides):
        load_definitions()
        super().__init__({name: self.counted(name, op.reference) for name, op in REGISTRY.items()}, overrides)

    def counted(self, name, definition):
        def call(*args, **named):
            CALLS.append(name)
            return definition(*args, **named)
        return call

    def put(self, array):
        return to_torch(array)

    share = put

    def zeros(self, shape, dtype=F32):
        return torch.zeros(shape, dtype=torch_dtype(dtype))

    def pack(self, weight, narrow=False):
        return plain_packed(self.place(weight))

    def record(self, fn):
        return Repeat(fn)


def open_ops(device):
    return ToyOps(device.ops)
"""
ABOUT_A_DEVICE = {
    "bench/calibrating.py", "bench/suite/limits.py", "bench/suite/unfused.py", "cli/doctor.py", "run/gpu_ranks.py",
}  # fmt: skip
"""Modules that measure this CPU, show this GPU, or hand GPUs to processes."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder `toy` among those of the backends, and its name among those of `--device`."""
    folder = tmp_path / "ops" / "toy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FACTS)
    (folder / "backend.py").write_text(BACKEND)
    monkeypatch.setattr(quire.ops, "__path__", [*quire.ops.__path__, str(folder.parent)])
    monkeypatch.setattr(config, "DEVICES", (*config.DEVICES, "toy"))
    known = values.fields_of(config.DeviceConfig)
    own = tuple(f._replace(choices=config.DEVICES) if f.name == "device" else f for f in known)
    monkeypatch.setattr(values, "fields_of", lambda struct: own if struct is config.DeviceConfig else fields_of(struct))
    yield
    for name in [name for name in sys.modules if name.startswith("quire.ops.toy")]:
        del sys.modules[name]


@pytest.mark.usefixtures("toy")
def test_a_folder_more_serves_a_model(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    params, found = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), {}
    for device in ("toy", "reference"):
        with LLM(str(tmp_path / "tiny"), **OPTIONS | {"device": device}) as llm:
            assert llm.info.backend == device
            found[device] = [answer.outputs[0].token_ids for answer in llm.generate(["abc", "a longer one"], params)]
    assert found["toy"] == found["reference"]
    assert {"attention", "linear", "sample"} <= set(sys.modules["quire.ops.toy.backend"].CALLS)


@pytest.mark.usefixtures("toy")
def test_a_folder_more_is_known_before_it_is_imported() -> None:
    device = config.DeviceConfig(device="toy", ops=("add=reference",))
    choice = choose(device)
    assert (choice.backend, choice.isa) == ("toy", "wood")
    assert choice.labels["linear"] == "toy/wood" and choice.labels["add"] == "reference"
    assert "quire.ops.toy.backend" not in sys.modules
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose(config.DeviceConfig(device="toy", ops=("linear=cublas",)))


def test_devices_have_names_of_their_own() -> None:
    options = [row.option for row in devices().values()]
    assert sorted(options) == sorted(set(options)) == sorted(name for name in config.DEVICES if name != "auto")
    with pytest.raises(ConfigError, match="not one of"):
        backend_of(config.DeviceConfig(device="toy"))


def outside() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "ops" not in path.relative_to(SOURCE).parts[:1])


def test_nobody_asks_which_device_it_is() -> None:
    """By an attribute of a backend that others have not."""
    own = {"cpu", "gpu"}
    assert not own & set(dir(ReferenceOps))
    texts = {path: path.read_text() for path in outside()}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, text in texts.items()
        if re.search(rf"\.\s*({'|'.join(own)})\b", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in own and ast.unparse(node.value).endswith("ops")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_those_about_a_device_import_its_backend() -> None:
    folders = {f"quire.ops.{name}" for name in ("cpu", "triton")}
    found = {
        str(path.relative_to(SOURCE))
        for path in outside()
        for module, _ in imports(path)
        if ".".join(module.split(".")[:3]) in folders
    }
    assert found == ABOUT_A_DEVICE
