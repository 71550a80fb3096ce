"""The packed cache: a second start reads what the first one packed; anything wrong with the file makes a new one."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from loaded_folders import KEPT, made_anew
from loaded_folders import folder as folder
from loaded_folders import load_packed as load
from oracle import write
from over_torch import arrays
from paged_model import Paged, prompt
from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError, ModelError
from quire.model.build import Model
from quire.model.load import packed_cache, packed_file
from quire.model.load.reader import WeightReader
from quire.ops.backend import open_backend
from quire.ops.cpu.matrix import assemble, part_sizes, take_apart
from quire.ops.cpu.pack import PLAIN, pack
from quire.ops.cpu.pack_sparse import SPARSE, TWO_OF_FOUR
from quire.ops.cpu.packing_samples import samples
from quire.ops.kinds import KINDS
from quire.ops.lazy import torch_dtype
from quire.ops.native import load_native
from quire.ops.weights import Packed, Weight

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")


def logits(model: Model) -> torch.Tensor:
    return Paged(model, [prompt(19, 1)]).run([[19]])[0].clone()


def file_of(folder: Path) -> Path:
    (path,) = (folder / ".quire").glob("packed-*.safetensors")
    return path


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": None, "dtype": "bfloat16"}])
def test_second_start_packs_nothing_and_gives_the_same_bits(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, **options)
    made = made_anew(monkeypatch)
    second = load(folder, **options)
    assert not made
    assert torch.equal(logits(first), logits(second))
    assert first.report == second.report
    assert torch.equal(logits(first), logits(load(folder, **options | {"cache_packed": "off"})))
    with safe_open(file_of(folder), framework="pt") as opened:  # other tools can read it
        assert "0.q+k+v.codes" in opened.keys()  # noqa: SIM118


@pytest.mark.parametrize("case", KEPT)
def test_every_kind_of_matrix_is_kept(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, facts, options = KEPT[case]
    write(tmp_path, family, **facts)
    first = load(tmp_path, **options)
    made = made_anew(monkeypatch)
    second = load(tmp_path, **options)
    assert not made and first.report == second.report
    assert torch.equal(logits(first), logits(second))


def matrices() -> Iterator[Weight]:
    """One of every form that can be packed."""
    made = torch.Generator().manual_seed(1)
    order, table = torch.randperm(64, generator=made).int(), torch.arange(-8, 8, dtype=torch.int16)
    for kind, row in PLAIN.items():
        codes = torch.randint(0, 8, (40, 64), generator=made).to(torch_dtype(row.dtype))
        if kind in ("f32", "bf16", "bf16_f32", "f16"):
            yield Weight(kind, codes)
            continue
        for scales in (torch.rand((40, 2), generator=made), torch.rand((40, 2), generator=made).half()):
            if kind == "fp8":
                yield Weight(kind, codes, scales.float(), group=32, activation_bits=16)
                continue
            if kind == "table4":
                for numbers in (table, table * 1000):
                    yield Weight(kind, codes, scales, group=32, table=numbers, order=order, activation_bits=16)
                continue
            yield Weight(kind, codes, scales, None, 32)
            yield Weight(kind, codes, scales, torch.ones((40, 2), dtype=torch.int8), 32, order=order)
            yield Weight(kind, codes, scales, None, 32, mins=scales.clone(), activation_bits=16)


def test_assembling_is_the_inverse_of_taking_apart() -> None:
    cpu = open_backend(DeviceConfig(device="cpu")).cpu
    assert cpu is not None
    for weight in matrices():
        made = pack(cpu, arrays(weight))
        numbers, parts = take_apart(made)
        again = assemble(weight.kind, (40, 64), weight.group, numbers, parts)
        assert (again.handle, again.nbytes, len(again.shared)) == (made.handle, made.nbytes, len(made.shared))
        allowed = part_sizes(weight.kind, (40, 64), weight.group, numbers.wide)
        assert all(t.nbytes in allowed[name] for name, t in parts.items())
        assert numbers.activation_bits == (weight.activation_bits if weight.group else 8)


def damage_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def damage_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_shape(path: Path) -> None:
    """A well-formed file whose index describes other matrices."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    index = json.loads(header["__metadata__"]["quire"])
    for entry in index["entries"].values():
        entry["n"] += 64
    header["__metadata__"]["quire"] = json.dumps(index)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("damage", [damage_bit, damage_cut, damage_header, damage_empty, damage_shape])
def test_a_damaged_file_is_noticed_and_replaced(
    folder: Path, damage: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = logits(load(folder))
    damage(file_of(folder))
    made = made_anew(monkeypatch)
    assert torch.equal(logits(load(folder)), want)
    assert len(made) == 13 and "making them anew" in caplog.text
    made.clear()
    load(folder)
    assert not made


def test_other_weights_or_options_are_not_taken_for_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    made = made_anew(monkeypatch)
    weights = folder / "model.safetensors"
    stamp = weights.stat()
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    load(folder)
    assert len(made) == 13
    made.clear()
    load(folder, dtype="bfloat16")
    assert len(made) == 13
    made.clear()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    load(folder)
    assert len(made) == 13


def test_a_changed_layout_is_another_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    made = made_anew(monkeypatch)
    monkeypatch.setattr("quire.model.load.packed_cache._layout", lambda *_: "another")
    load(folder)
    assert len(made) == 13


def test_a_full_disk_is_said_and_serving_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: packed_file.Writer, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_file.Writer, "_append", full)
    load(folder)
    assert "No space left on device" in caplog.text and "serving goes on" in caplog.text
    assert list((folder / ".quire").iterdir()) == []


def test_a_load_that_fails_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = WeightReader.matrix

    def fails(self: WeightReader, roles: tuple[str, ...], layer: int | None, *more: Any) -> Any:
        if layer == 2:
            raise ModelError("damaged")
        return make(self, roles, layer, *more)

    monkeypatch.setattr(WeightReader, "matrix", fails)
    with pytest.raises(ModelError, match="damaged"):
        load(folder)
    assert not (folder / ".quire").exists()


def test_writers_at_once_leave_one_whole_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(lambda: packed_file.Writer(folder / "x", "s", 0, 0, int).finish()) for _ in range(16)]
        for each in found:
            each.result()
    assert packed_file.read_index(folder / "x")[0].source == "s"
    assert not list(folder.glob(".x.*"))


def test_a_chosen_folder_is_used_and_nonsense_is_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = tmp_path_factory.mktemp("cache")
    load(folder, cache_packed=str(other))
    assert len(list(other.glob("packed-int4-*.safetensors"))) == 1 and str(other) in caplog.text
    assert not (folder / ".quire").exists()
    for options in ({"load_format": "dummy"}, {"device": "reference"}):
        with pytest.raises(ConfigError, match="--cache-packed"):
            load(folder, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_layout_of_any_kind_is_another_source(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = open_backend(DeviceConfig()).form
    for group in KINDS[kind].groups or (0,):
        before = packed_cache._layout(form, None)

        def otherwise(*facts: Any, group: int = group) -> Packed:
            made = assemble(*facts)
            if made.kind == kind and made.group == group:
                made.buffers[0][0] ^= 1
            return made

        with monkeypatch.context() as patched:
            sparse = kind in (*SPARSE.values(), *TWO_OF_FOUR.values())
            patched.setattr(f"quire.ops.cpu.pack{'_sparse' if sparse else ''}.assemble", otherwise)
            assert packed_cache._layout(form, None) != before
        assert packed_cache._layout(form, None) == before


@pytest.mark.parametrize("part", ["zeros", "mins", "order", "wide scales"])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if {"mins", "order"} <= set(kind.parts)])
def test_samples_have_every_part(kind: str, part: str) -> None:
    found = [w for w in samples() if w.kind == kind]
    assert all(w.scales is not None for w in found)
    wide = {w.group for w in found if w.scales is not None and w.scales.dtype == np.float32}
    groups = wide if part == "wide scales" else {w.group for w in found if getattr(w, part) is not None}
    assert groups == set(KINDS[kind].groups)


def test_a_file_that_others_may_have_written_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = logits(load(folder))
    path = file_of(folder)
    path.chmod(0o666)
    assert torch.equal(logits(load(folder)), want)
    assert f"others may write {path}" in caplog.text and path.stat().st_mode & 0o777 == 0o600
