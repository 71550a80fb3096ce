"""The native module itself: calls, recordings, threads, forks, and life without it."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch

from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError
from quire.ops import choice
from quire.ops import native as native_module
from quire.ops.arena import HUGE, Arena, huge_bytes
from quire.ops.backend import select
from quire.ops.cpu import ACTIVATION_NUMBERS, Cpu
from quire.ops.layout import KVLayout
from quire.ops.native import Native, load_native
from quire.ops.pack import pack
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
    w = pack(Cpu(native), Weight("int8", torch.ones(16, 768, dtype=torch.int8), torch.ones(16, 6), None, 128))
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
    arena = Arena(Native("portable", 1))
    shapes = ((3, 5), (1, 1), (100, 64), (0, 7))
    first = [arena.empty(*shape) for shape in shapes]
    assert len({t.data_ptr() for t in first if t.numel()}) == 3
    assert all(t.data_ptr() % 64 == 0 and t.shape == shape for t, shape in zip(first, shapes, strict=True))
    arena.begin()
    assert [arena.empty(*shape).data_ptr() for shape in shapes] == [t.data_ptr() for t in first]
    grown = arena.empty(4 * HUGE, 1)
    first[0].fill_(1.0)
    grown.fill_(2.0)
    assert bool((first[0] == 1.0).all())


@built
@pytest.mark.parametrize("size", [100, HUGE, 3 * HUGE + 5])
def test_huge_memory_has_the_size_and_the_alignment(size: int) -> None:
    data = huge_bytes(Native("portable", 1), size)
    assert data.numel() == size and data.data_ptr() % (HUGE if size >= HUGE else 256) == 0
    data.fill_(7)


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_caches_have_the_layouts_shape_and_are_zero(dtype: torch.dtype) -> None:
    layout = KVLayout(16, 2, 32, dtype)
    for device in ("cpu", "reference"):
        found = select(DeviceConfig(device=device)).allocate_cache(layout, 5)
        expected = layout.allocate(5)
        for have, want in ((found.keys, expected.keys), (found.values, expected.values)):
            assert have.dtype == want.dtype and have.is_contiguous() and torch.equal(have, want)


def test_without_the_extension_auto_warns_and_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "load_native", lambda: None)
    monkeypatch.setattr(native_module, "load_native", lambda: None)
    with pytest.warns(RuntimeWarning, match="slow torch reference"):
        ops = select(DeviceConfig())
    assert ops.name == "reference" and set(ops.chosen.values()) == {"reference"}
    with pytest.raises(ConfigError, match="not built"):
        select(DeviceConfig(device="cpu"))


def test_layers_take_turns_in_the_arena() -> None:
    arena = Arena(Native("portable", 1))
    kept = arena.empty(8, 8).fill_(1)
    rows: list[torch.Tensor] = []
    for layer in range(6):
        arena.next_layer()
        rows.append(arena.empty(100, 1000).fill_(layer))
        arena.empty(600, 1000)  # outgrows the area: what was handed out stays valid
        assert float(rows[-1].amin()) == layer == float(rows[-1].amax())
        if layer:
            assert float(rows[-2].amin()) == layer - 1 == float(rows[-2].amax())
    assert float(kept.amin()) == 1 and sum(b.numel() for b in arena.buffers) < 40 * HUGE
    assert rows[-1].data_ptr() == rows[-3].data_ptr()
