"""The CPU backend: numpy arrays, outputs in an arena, steps recorded as one list of native calls.
See docs/design/cpu-kernels.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.core.config import DeviceConfig
from quire.core.dtypes import F32, Dtype
from quire.core.tree_map import rebuilt
from quire.ops.arrays import Array, Fetched, Host, address, is_tensor, to_numpy, to_torch
from quire.ops.backend import Ops
from quire.ops.cpu import layers
from quire.ops.cpu.experts import fuses_experts
from quire.ops.cpu.form import CpuForm
from quire.ops.cpu.matrix import SHARED, assemble, take_apart
from quire.ops.cpu.pack import pack
from quire.ops.cpu.pack_stack import pack_stack
from quire.ops.cpu.state import Cpu
from quire.ops.experts import Grouped
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import HUGE, Native, check, huge_bytes
from quire.ops.op import IMPLEMENTATIONS, load_modules
from quire.ops.tuning import Tuning
from quire.ops.weights import Packed, PackedTable, PieceTable, StoredMatrix, StoredTable, Weight

IN_NUMPY = "quire.ops.sampling"
"""Where the definitions are that take numpy arrays."""


class CpuRecording:
    """A recorded step: `run` replays its native calls on the same addresses.

    They are made together, once the function has returned: between large ops, whose weights sweep Python's memory from
    the caches, an op's own Python takes 70 us instead of 18. Inputs are read anew from the arrays the function used, so
    the caller changes those in place. When an op was overridden with its reference there is nothing to record and `run`
    calls the function.
    """

    def __init__(self, ops: CpuOps, fn: Callable[[], Any]) -> None:
        self._ops, self._fn = ops, fn
        self._recorded = ops.all_native
        if not self._recorded:
            self.output = fn()
            return
        native, arena = ops.cpu.native, ops.cpu.arena
        self._program = native.recording = native.module.Program()
        try:
            self.output = fn()
        finally:
            native.recording = None
            self._alive = (native.held, arena.buffers)
            native.held = []
        self._program.run()
        self._used = arena.mark()

    def run(self) -> Any:
        """Replay the step; returns `output`, which holds the new values."""
        if not self._recorded:
            self.output = self._fn()
            return self.output
        self._program.run()
        self._ops.cpu.arena.resume(self._used)
        return self.output


class CpuOps(Ops):
    """The native ops of one instruction set. `cpu` is what they share."""

    name = "cpu"
    timed = True

    def __init__(self, cpu: Cpu, overrides: tuple[str, ...]) -> None:
        load_modules("quire.ops.cpu")
        self.cpu, self.isa, self.threads = cpu, cpu.native.isa, cpu.native.threads
        own = {op: _bound(cpu, fns["cpu"]) for op, fns in IMPLEMENTATIONS.items() if "cpu" in fns}
        super().__init__(own, overrides)
        self.form = None if self.refers else CpuForm(cpu)

    def by_reference(self, definition: Callable[..., Any]) -> Callable[..., Any]:
        """The definition over torch tensors that share the arrays' memory. Imports torch."""
        return definition if definition.__module__ == IN_NUMPY else _by_torch(definition)

    def tune(self, tuning: Tuning) -> None:
        """Set kernel tuning in all of this process."""
        self.cpu.native.set_tuning(tuning)
        super().tune(tuning)

    @property
    def all_native(self) -> bool:
        """Whether every op runs in the native extension."""
        return set(self.chosen.values()) == {"cpu"}

    def put(self, array: Any) -> Host:
        """`array` as numpy's, in C order."""
        return np.ascontiguousarray(to_numpy(array))

    def zeros(self, shape: tuple[int, ...], dtype: Dtype = F32) -> Host:
        """Zeroed memory."""
        return np.zeros(shape, dtype)

    def empty(self, rows: int, cols: int, dtype: Dtype = F32) -> Host:
        """Take memory of the arena."""
        return self.cpu.arena.empty(rows, cols, dtype)

    def copy_out(self, array: Host) -> Host:
        """A copy: the arena is taken back."""
        return array.copy()

    def fetch(self, found: Sequence[Array]) -> Fetched:
        """Nothing to copy: results are in host memory."""
        return functools.partial(list, found)

    def native(self, name: str, *args: Any) -> None:
        """Call the native op `name`, or list it where a step is being recorded."""
        self.cpu.call(name, *args)

    def forget_rows(self, table: Host | PackedTable | StoredTable | PieceTable) -> None:
        """Unmap the table's pages, which the system's cache keeps."""
        assert not isinstance(table, PackedTable), "it lies in no file"
        whole = table.data if isinstance(table, StoredTable) else table
        for data in whole.pieces if isinstance(whole, PieceTable) else (whole,):
            self.cpu.call("forget_pages", data, data.nbytes)

    def beside(self) -> Ops:
        """Give ops without the arena, and not recorded."""
        return UnrecordedOps(self)

    def pack(self, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
        """`weight` in the layout of this instruction set; `narrow`: in 12 bits if it is bf16, by `--bf16-bits 12`."""
        return pack(self.cpu, weight, keep_plain=self.refers, narrow=narrow and self.cpu.bf16_bits == 12)

    @property
    def packs_stored(self) -> bool:
        """Whether stored matrices are packed: as long as no op reads plain weights."""
        return not self.refers

    def stacks(self, kind: str) -> bool:
        """All but those in 12 bits, which share one choice of exponents."""
        return not self.refers and not (kind == "bf16" and self.cpu.bf16_bits == 12)

    def pack_stack(self, weights: Iterable[Weight | StoredMatrix], count: int) -> Packed:
        """`count` matrices below each other, packed one at a time."""
        return pack_stack(self.cpu, weights, count)

    def take_apart(self, packed: Packed) -> tuple[Packed, dict[str, Any]]:
        """`packed` without the numbers that grow with its rows, and these by name; others stay in the handle."""
        numbers, parts = take_apart(packed)
        shared = {name: parts.pop(name) for name in SHARED if name in parts}
        return replace(packed, buffers=(), handle=(numbers, shared)), parts

    def put_together(self, bare: Packed, parts: Mapping[str, Any]) -> Packed:
        """The matrix of `bare` and `parts`, the inverse of `take_apart`."""
        numbers, shared = bare.handle
        return assemble(bare.kind, (bare.n, bare.k), bare.group, numbers, {**parts, **shared})

    def put_in_places(self, bare: Packed, parts: Mapping[str, Any], places: Host) -> Packed:
        """Put together as many matrices as `places` has offsets, in bytes from `parts` of the first of them."""
        one = self.put_together(replace(bare, n=bare.n // len(places)), parts)
        one.handle.n, one.handle.places = bare.n, address(places)
        return replace(one, n=bare.n, nbytes=bare.nbytes)

    def group(self, packed: Packed, experts: int, n: int, bias: Any) -> Grouped:
        """The matrices of a layer's experts for `grouped_linear`; biases must lie without gaps."""
        if bias is not None:
            check(bias, "expert biases", F32, experts, n)
        return super().group(packed, experts, n, bias)

    def fuses_mlp(self, gate_up: Packed, down: Packed) -> bool:
        """No tables, columns in order, int8 activations."""
        return layers.fuses_mlp(gate_up, down)

    def fuses_experts(self, down: Grouped) -> bool:
        """Whole blocks, columns in order."""
        return fuses_experts(down)

    @property
    def reads_packed_tables(self) -> bool:
        """The native op does."""
        return self.chosen["embedding"] == "cpu"

    def attends_whole(self, head_dim: int) -> bool:
        """The native op takes multiples of 8."""
        return self.chosen["attention"] == "cpu" and head_dim % 8 == 0

    @property
    def layout(self) -> type[KVLayout]:
        """Layout of vector registers."""
        return KVLayout

    def allocate_cache(self, layout: KVLayout, blocks: int) -> KVCache:
        """Zeroed key and value caches in huge pages (measured: 38 instead of 33 GB/s), but for the first blocks.

        A huge page for each array took 124 MB for the first token of a model of 30 layers and 135M weights.
        """
        keys, values = (
            huge_bytes(math.prod(shape) * layout.element.itemsize, zeroed=True, small=HUGE)
            .view(layout.element)
            .reshape(shape)
            for shape in layout.shapes(blocks)
        )
        return KVCache(layout, keys, values)

    def reserve(self, outer: int, layer: int) -> None:
        """Reserve memory in the arena."""
        self.cpu.arena.reserve(outer, layer)

    def begin_step(self) -> None:
        """The arena begins anew."""
        self.cpu.begin_step()

    def next_layer(self) -> None:
        """The arena's other area of layers is next."""
        self.cpu.arena.next_layer()

    def compute(self, fn: Callable[[], Any], together: bool) -> Any:
        """fn(), with its native calls made together once it has returned (`together`), or each at once."""
        if together:
            return self.record(fn).output
        self.begin_step()
        return fn()

    def record(self, fn: Callable[[], Any]) -> CpuRecording:
        """The recording of `fn`, whose native calls are listed, made once, and may be made again."""
        self.begin_step()
        return CpuRecording(self, fn)


def open_ops(device: DeviceConfig) -> CpuOps:
    """Open the CPU backend as `device` asks."""
    return CpuOps(Cpu(Native(device.isa, device.threads), device.bf16_bits, device.sparse), device.ops)


class UnrecordedOps(CpuOps):
    """`native` calls and memory that no step knows of; there are no ops."""

    def __init__(self, ops: CpuOps) -> None:
        self.cpu, self.isa, self.threads, self.chosen = ops.cpu, ops.isa, ops.threads, {}

    def native(self, name: str, *args: Any) -> None:
        """Make a native call at once."""
        Ops.native(self, name, *args)

    def empty(self, rows: int, cols: int, dtype: Dtype = F32) -> Host:
        """Take memory of the heap."""
        return np.empty((rows, cols), dtype)

    def beside(self) -> Ops:
        """Give this object itself."""
        return self


def _bound(cpu: Cpu, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the backend's state; a recording keeps the arguments alive, because it holds only their addresses."""

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        if cpu.native.recording is not None:
            cpu.native.held.append((args, named))
        return fn(cpu, *args, **named)

    return call


def _by_torch(definition: Callable[..., Any]) -> Callable[..., Any]:
    def there(part: Any) -> Any:
        return to_torch(part) if isinstance(part, np.ndarray) else part

    def back(part: Any) -> Any:
        return np.ascontiguousarray(to_numpy(part)) if is_tensor(part) else part

    @functools.wraps(definition)
    def call(*args: Any, **named: Any) -> Any:
        found = definition(*(rebuilt(arg, there) for arg in args), **{n: rebuilt(a, there) for n, a in named.items()})
        return rebuilt(found, back)

    return call
