"""The native module itself: calls, recordings, threads, forks, and life without it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F32, Dtype
from quire.core.errors import ConfigError
from quire.ops import choice
from quire.ops import native as native_module
from quire.ops.arrays import Host, address, is_tensor, to_torch
from quire.ops.backend import open_backend
from quire.ops.cpu.pack import pack
from quire.ops.cpu.state import ACTIVATION_NUMBERS, Arena, Cpu
from quire.ops.descriptors import ReaderDescriptor
from quire.ops.layout import KVLayout
from quire.ops.native import HUGE, Native, huge_bytes, load_native
from quire.ops.reference.caches import allocate
from quire.ops.tuning import Tuning
from quire.ops.weights import Weight

module = load_native()
built = pytest.mark.skipif(module is None, reason="quire._native was not built (no C++ compiler)")


def relu(native: Native, x: torch.Tensor, out: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return native.ids["activation"], (out.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1], ACTIVATION_NUMBERS["relu"])


@built
def test_a_program_repeats_its_calls_in_order() -> None:
    native = Native("portable", 1)
    x, middle, out = torch.randn(3, 40), torch.empty(3, 40), torch.empty(3, 40)
    program = native.module.Program()
    program.add(*relu(native, x, middle))
    program.add(*relu(native, middle, out))
    assert len(program) == 2
    for _ in range(3):
        x.normal_()
        program.run()
        assert torch.equal(out, x.relu())


@built
def test_a_program_checks_calls_when_they_are_added() -> None:
    native = Native("portable", 1)
    program = native.module.Program()
    op, args = relu(native, torch.ones(1, 1), torch.ones(1, 1))
    for bad in (args[:-1], (0, *args[1:]), ("a", *args[1:])):
        with pytest.raises(ValueError, match="activation"):
            program.add(op, bad)
    with pytest.raises(ValueError, match="unknown kind"):
        program.add(op, (*args[:-1], 99))
        program.run()


@built
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kind", 99, "unknown kind"),
        ("kind", -1, "unknown kind"),
        ("k", 0, "sizes"),
        ("codes", 0, "sizes"),
        ("group", 48, "group"),
        ("group", 256, "group"),
        ("scales", 0, "group"),
        ("digits", 3, "digits"),
        ("planes", 2, "digits"),
    ],
)
def test_descriptors_that_no_kernel_serves_are_refused(field: str, value: int, reason: str) -> None:
    native = Native("auto", 1)
    w = pack(Cpu(native), Weight("int8", np.ones((16, 768), np.int8), np.ones((16, 6), np.float32), None, 128))
    x, out = torch.ones(1, 768), torch.empty(1, 16)
    op, args = native.ids["linear"], (out.data_ptr(), x.data_ptr(), w.handle.at, 0, 1)
    native.module.call(op, args)
    assert out.eq(768).all()
    setattr(w.handle, field, value)
    with pytest.raises(ValueError, match=reason):
        native.module.call(op, args)


@built
def test_many_small_regions_all_finish() -> None:
    native = Native("auto", 4)
    x = torch.randn(64, 4096)
    out = torch.empty_like(x)
    op, args = relu(native, x, out)
    for _ in range(500):
        native.module.call(op, args)
    assert torch.equal(out, x.relu())
    native.module.set_threads(2)


@built
def test_several_python_threads_may_call_at_once() -> None:
    native = Native("auto", 3)
    inputs = [torch.randn(64, 2048) for _ in range(4)]
    outputs = [torch.empty_like(x) for x in inputs]

    def work(i: int) -> None:
        op, args = relu(native, inputs[i], outputs[i])
        for _ in range(50):
            native.module.call(op, args)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, x.relu()) for x, out in zip(inputs, outputs, strict=True))
    native.module.set_threads(2)


@built
def test_a_forked_child_makes_its_own_threads() -> None:
    native = Native("auto", 2)
    x = torch.randn(64, 2048)
    out = torch.empty_like(x)
    expected = x.relu().numpy().tobytes()
    op, args = relu(native, x, out)
    native.module.call(op, args)  # the parent's pool exists
    out.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks while threads run: that is the test
        pid = os.fork()
    if pid == 0:
        native.module.call(op, args)
        os._exit(0 if out.numpy().tobytes() == expected else 1)  # torch's own threads would hang here
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@built
def test_the_arena_hands_out_the_same_addresses_again() -> None:
    arena = Arena()
    shapes = ((3, 5), (1, 1), (100, 64), (0, 7))
    first = [arena.empty(*shape) for shape in shapes]
    assert len({address(t) for t in first if t.size}) == 3
    assert all(address(t) % 64 == 0 and t.shape == shape for t, shape in zip(first, shapes, strict=True))
    arena.begin()
    assert [address(arena.empty(*shape)) for shape in shapes] == [address(t) for t in first]
    grown = arena.empty(4 * HUGE, 1)
    first[0].fill(1.0)
    grown.fill(2.0)
    assert bool((first[0] == 1.0).all())


@built
@pytest.mark.parametrize("size", [100, HUGE, 3 * HUGE + 5])
def test_huge_memory_has_the_size_and_the_alignment(size: int) -> None:
    data = huge_bytes(size)
    assert data.size == size and address(data) % (HUGE if size >= HUGE else 256) == 0
    data.fill(7)


@built
def test_arguments_go_by_name_and_wrong_ones_are_said() -> None:
    assert module is not None
    ids, program = module.ops(unit="portable"), module.Program()
    tuning = {"id": ids["set_tuning"], "args": (0, 1, 1)}
    module.call(**tuning)
    module.call(ids["set_tuning"], args=(0, 1, 1))
    program.add(**tuning)
    program.run()
    assert len(program) == 1 and str(inspect.signature(module.call)) == "(id, args)"
    Native("portable", 1).set_tuning(Tuning())
    refused: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}), ((0,), {}), ((0, [1]), {}), ((0, (), 1), {}), ((0.0, ()), {}), (("0", ()), {}),
        ((0,), {"id": 0}), ((0,), {"other": ()}), ((0, ()), {"args": ()}),
    ]  # fmt: skip
    for function in (module.call, program.add):
        for args, named in refused:
            with pytest.raises(TypeError):
                function(*args, **named)
        for unknown in (-1, len(ids) * 100):
            with pytest.raises(ValueError, match=f"unknown op id {unknown}"):
                function(unknown, ())
    with pytest.raises(TypeError):
        module.Program(1)
    with pytest.raises(TypeError):
        module.set_threads(1, pin=1)
    with pytest.raises(ValueError, match=re.escape("threads must lie in [0, 1024]")):
        module.set_threads(threads=1025, pin=False)


@built
def test_pointers_are_arrays_addresses_or_none() -> None:
    native = Native("portable", 1)
    x, out = np.arange(-4, 4, dtype=np.float32), np.zeros(8, np.float32)

    class Part(np.ndarray[Any, Any]):
        pass

    relu = ACTIVATION_NUMBERS["relu"]
    for given in (x, x.view(Part), address(x), np.int64(address(x))):
        out[:] = -1
        native.module.call(native.ids["activation"], (out, given, np.int64(1), True * 8, relu))
        assert np.array_equal(out, np.maximum(x, 0))
    for bad, why in ((None, "argument 1 is a null pointer"), (0, "argument 1 is a null pointer"), ("x", "wrong type"),
                     (1 << 64, "wrong type or range"), (1.0, "wrong type"), ([x], "wrong type")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"op portable/activation\(ppiii\): .*{why}"):
            native.module.call(native.ids["activation"], (out, bad, 1, 8, relu))


@built
def test_a_program_can_be_a_base_and_ends() -> None:
    assert module is not None

    class Named(module.Program):  # type: ignore[misc,name-defined]
        pass

    native = Native("portable", 1)
    before = sys.getrefcount(module.Program), sys.getrefcount(Named)
    for kind in (module.Program, Named):
        for _ in range(50):
            program = kind()
            program.add(native.ids["set_tuning"], (0, 1, 1))
            assert len(program) == 1
    del program, kind
    assert (sys.getrefcount(module.Program), sys.getrefcount(Named)) == before


@built
def test_one_build_serves_every_python_from_3_11() -> None:
    """A name that begins with `_Py` is of CPython's inside, but for these four, which the limited API promises too."""
    assert module is not None and module.__file__ is not None
    path = Path(module.__file__)
    asked = set(re.findall(rb"\0(_Py\w+)(?=\0)", path.read_bytes()))
    assert ".abi3." in path.name
    assert asked <= {b"_Py_Dealloc", b"_Py_NoneStruct", b"_Py_TrueStruct", b"_Py_FalseStruct"}


@built
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_caches_have_the_layouts_shape_and_are_zero(dtype: Dtype) -> None:
    layout = KVLayout(16, 2, 32, dtype)
    for device in ("cpu", "reference"):
        found = open_backend(DeviceConfig(device=device)).allocate_cache(layout, 5)
        expected = allocate(layout, 5)
        for made, want in ((found.keys, expected.keys), (found.values, expected.values)):
            have = made if is_tensor(made) else to_torch(made)
            assert have.dtype == want.dtype and have.is_contiguous() and torch.equal(have, want)


def test_without_the_extension_auto_warns_and_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "load_native", lambda: None)
    monkeypatch.setattr(native_module, "load_native", lambda: None)
    choice._say_that_native_is_missing.cache_clear()
    for _ in range(2):
        ops = open_backend(DeviceConfig())
        assert ops.name == "reference" and set(ops.chosen.values()) == {"reference"}
    (said,) = caplog.records
    assert said.levelname == "WARNING" and "PyTorch's reference runs, about 50 times slower" in said.getMessage()
    with pytest.raises(ConfigError, match="not built"):
        open_backend(DeviceConfig(device="cpu"))
    monkeypatch.setattr(choice, "has_torch", lambda: False)
    with pytest.raises(ConfigError, match=r"C\+\+20 compiler"):
        open_backend(DeviceConfig())


def test_an_install_without_the_extension_says_so_in_one_line() -> None:
    """What is missing, what that costs and how to get it, where nobody has set up logging too."""
    code = "import sys; sys.modules['quire._native'] = None; from quire.cli import main; main()"
    told = subprocess.run([sys.executable, "-c", code, "inspect", "pydoc"], capture_output=True, text=True, check=True)
    (line,) = told.stderr.splitlines()
    for part in ("quire._native) was not built", "50 times slower", "install g++ 12 or newer", "QUIRE_NATIVE=OFF"):
        assert part in line
    chosen = [sys.executable, "-c", code, "inspect", "pydoc", "--device", "reference"]
    assert not subprocess.run(chosen, capture_output=True, text=True, check=True).stderr


def test_layers_take_turns_in_the_arena() -> None:
    arena = Arena()
    kept, rows = arena.empty(8, 8), list[Host]()
    kept.fill(1)
    for layer in range(6):
        arena.next_layer()
        rows.append(arena.empty(100, 1000))
        rows[-1].fill(layer)
        arena.empty(600, 1000)  # outgrows the area: what was handed out stays valid
        assert float(rows[-1].min()) == layer == float(rows[-1].max())
        if layer:
            assert float(rows[-2].min()) == layer - 1 == float(rows[-2].max())
    assert float(kept.min()) == 1 and sum(b.size for b in arena.buffers) < 40 * HUGE
    assert address(rows[-1]) == address(rows[-3])


CHANGED_THREADS = """
import threading
import numpy as np
from quire.core.config import DeviceConfig
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import open_backend
from quire.ops.layout import KVLayout

ops, g, length = open_backend(DeviceConfig(device="cpu")), np.random.default_rng(0), 8192
cache = ops.allocate_cache(KVLayout(16, 2, 64, np.dtype(np.float32)), length // 16)
for part in (cache.keys, cache.values):
    part[:] = g.standard_normal(part.shape)
qkv, tables = g.standard_normal((48, 8 * 64), np.float32), np.arange(length // 16, dtype=np.int32)[None]
rows = np.array([0, 48], np.int32), np.array([length], np.int32), tables
module, ended = ops.cpu.native.module, threading.Event()

def run():
    ops.begin_step()
    return ops.attention(qkv, cache, *rows, AttentionSpec(0.125))

def change():
    while not ended.is_set():
        for threads in (2, 12):
            module.set_threads(threads)

want = run().copy()
other = threading.Thread(target=change)
other.start()
try:
    for i in range(120):
        assert np.array_equal(run(), want), i
finally:
    ended.set()
    other.join()
"""


def test_another_engine_may_change_the_threads_while_an_op_runs() -> None:
    """An op sizes memory for its threads before they begin: more than that must not come."""
    done = subprocess.run([sys.executable, "-c", CHANGED_THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_experts_that_were_not_read_are_not_taken_for_read(tmp_path: Path) -> None:
    """A layer that needs more experts than there is room for leaves none in a place whose bytes never came."""
    native, size, slots = Native(), 4096, 2
    path = tmp_path / "experts"
    path.write_bytes(bytes(size) + b"\x01" * size)  # of four experts the file has two: reads of the others fail
    memory, places = torch.full((slots * size,), 9, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    stream = torch.zeros(1, dtype=torch.int64)

    def need(*experts: int) -> None:
        chosen = torch.tensor([0, *(int(e in experts) for e in range(4))]).cumsum(0).int()
        native.call("stream_need", int(stream), 0, chosen.data_ptr())

    with path.open("rb") as file:
        layer = torch.tensor([[file.fileno(), 0, size, 4, places.data_ptr()]], dtype=torch.int64)
        where = memory.data_ptr(), size, slots, layer.data_ptr(), 1
        reader = ReaderDescriptor(threads=1, piece=size, cached=0)
        native.call("stream_experts", stream.data_ptr(), reader, *where)
        try:
            need(1)
            for _ in range(2):
                with pytest.raises(ValueError, match="more experts at once"):
                    need(1, 2, 3)
                for _ in range(2):
                    with pytest.raises(ValueError, match="cannot be read"):
                        need(2)
            need(0, 1)
            got = [memory[place : place + size] for place in places[:2].tolist()]
            assert [part.unique().tolist() for part in got] == [[0], [1]] and places[2:].tolist() == [-1, -1]
        finally:
            native.call("stream_close", int(stream))


@pytest.mark.skipif(sys.platform != "linux", reason="symbols have versions on Linux")
def test_older_systems_have_what_the_extension_asks_for() -> None:
    """glibc 2.28 and libstdc++ of GCC 8, as manylinux_2_28 has them; what a symbol needs is named in the file."""
    module = load_native()
    assert module is not None and module.__file__ is not None
    asked = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)*)(?=\0)", Path(module.__file__).read_bytes())
    most: dict[str, tuple[int, ...]] = {}
    for library, version in asked:
        numbers = tuple(map(int, version.split(b".")))
        most[library.decode()] = max(most.get(library.decode(), ()), numbers)
    print(most)
    there = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
    assert most and all(numbers <= there[library] for library, numbers in most.items()), most
