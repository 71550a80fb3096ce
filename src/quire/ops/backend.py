"""The backend: what runs ops, and what it asks of whoever calls them. See docs/design/ops.md.

A backend has an attribute for each op, with the definition's arguments. It packs weights, allocates caches, begins,
records and replays steps, and brings results to the host. A new device is a folder with a subclass of `Ops`
(`open_backend`). On the host its arrays are numpy's; those of a device, and of the torch reference, are torch's.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.machine import available_memory
from quire.core.tree_map import rebuilt
from quire.ops.arrays import Array, Fetched, Host, is_tensor, to_numpy
from quire.ops.choice import OPS, READ_WEIGHTS, backend_of, devices
from quire.ops.experts import Grouped, group
from quire.ops.layout import KVCache, KVLayout, PlainLayout
from quire.ops.lazy import require_torch
from quire.ops.native import best_ops, require_native
from quire.ops.op import implementations
from quire.ops.tuning import Tuning
from quire.ops.weights import Packed, PackedForm, PackedTable, PieceTable, StoredMatrix, StoredTable, Weight

if TYPE_CHECKING:
    from quire.ops.runtime import Runtime


def _one_torch_thread() -> None:
    """torch's pool of threads does not come along into a fork, which would wait for them for ever."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_torch_thread)


class Recording(Protocol):
    """A recorded step. `output` is what the function returned, at a fixed address."""

    output: Any

    def run(self) -> Any:
        """Replay the step on what its inputs hold now; returns `output`, which holds the new values."""
        ...


class Ops(ABC):
    """One callable attribute per op, with the definition's arguments; `chosen` maps op -> implementation.

    `isa`: the instruction set or the device. What an op returns is valid until the next `begin_step`, that of a layer
    until the second `next_layer` after it.
    """

    name: str
    isa: str
    threads = 1
    queues = False
    """Whether calls are queued and the host goes on before they are done; what they work on has memory of its own."""
    pads = False
    """Whether steps are recorded in a few sizes only, to which rows are added that touch a block nobody reads."""
    compiles = False
    """Whether kernels are compiled when they are first called."""
    timed = False
    """Whether a start times it: for numbers of its kernels (`tuning`), and for stages that take the same time."""
    runtime: Runtime
    """The queues and the memory of a device; of those that `queues` alone."""
    form: PackedForm | None = None
    """How files hold packed matrices; None: they hold none of this backend's."""
    tuning = Tuning()
    """Numbers that its kernels use, where they use any."""

    def __init__(self, own: Mapping[str, Callable[..., Any]], overrides: tuple[str, ...]) -> None:
        """`own`: the backend's implementations by op, others by "op:implementation"; `overrides`: "op=reference"."""
        table = implementations(self.name, dict(own), overrides)
        self.chosen = {op: which for op, (which, _) in table.items()}
        for op, (which, fn) in table.items():
            setattr(self, op, self.by_reference(fn) if which == "reference" else fn)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"there is no op {name!r}; known ops are {', '.join(OPS)}")

    def by_reference(self, definition: Callable[..., Any]) -> Callable[..., Any]:
        """An op's definition as this backend calls it."""
        return definition

    @property
    def identity(self) -> tuple[Any, ...]:
        """What the bits of results depend on, apart from this package's code."""
        return self.name, self.isa, sorted(self.chosen.items()), ""

    def tune(self, tuning: Tuning) -> None:
        """Use these numbers from the next op on; of those that are `timed`."""
        self.tuning = tuning

    @property
    def refers(self) -> bool:
        """Whether an op that was overridden with its reference reads weights, as they are before packing."""
        return any(self.chosen[op] == "reference" for op in READ_WEIGHTS)

    # Arrays

    @abstractmethod
    def put(self, array: Any) -> Any:
        """`array`, of the host or of this backend already, where ops read it."""

    def place(self, value: Any) -> Any:
        """`value` with every array in it where ops read it; what was one array stays one (rope tables, adapters)."""
        return rebuilt(value, lambda part: self.put(part) if isinstance(part, np.ndarray) or is_tensor(part) else part)

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: Dtype = F32) -> Any:
        """Memory that stays at one address, zeroed."""

    def empty(self, rows: int, cols: int, dtype: Dtype = F32) -> Any:
        """Uninitialized memory [rows, cols] of a step, as long valid as what an op returns."""
        return self.zeros((rows, cols), dtype)

    def share(self, array: Host) -> Any:
        """The memory of `array`, which the host goes on to write, as ops read it. Devices have none of it."""
        return array

    def copy_out(self, array: Any) -> Any:
        """`array`, which an op returned, beyond the next `begin_step`."""
        return array

    def host(self, array: Any) -> Host:
        """The numbers of `array` on the host."""
        return to_numpy(array)

    def fetch(self, found: Sequence[Array]) -> Fetched:
        """Bring results of sampling to the host: queued now, waited for when the result is called."""
        return lambda: [np.asarray(each) for each in found]

    def native(self, name: str, *args: Any) -> None:
        """Run an op of the native extension over arrays of the host; a part of what is recorded."""
        require_native().call(best_ops()[name], args)

    def beside(self) -> Ops:
        """Give this backend for `native` calls of another thread, or beside a step, which belong to no recording."""
        return self

    # Weights

    @abstractmethod
    def pack(self, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
        """`weight` in the layout `linear` reads; `narrow`: in 12 bits, if it is bf16 and `--bf16-bits` has it so.

        One that is stored is taken where `packs_stored`.
        """

    @property
    def packs_stored(self) -> bool:
        """Whether `pack` and `pack_stack` take matrices that are still what their file holds."""
        return False

    def stacks(self, kind: str) -> bool:
        """Whether `pack_stack` takes matrices of `kind` one by one."""
        return False

    def pack_stack(self, weights: Iterable[Weight | StoredMatrix], count: int) -> Packed:
        """`count` matrices below each other in the layout `linear` reads, packed one at a time."""
        raise NotImplementedError(f"backend {self.name} packs matrices whole")

    def take_apart(self, packed: Packed) -> tuple[Packed, dict[str, Any]]:
        """`packed` without the numbers that grow with its rows, and these by name, for `put_together`.

        Here those that are both `buffers` and fields of the handle, which is a dataclass.
        """
        found = {id(part) for part in packed.buffers}
        parts = {name: part for name, part in vars(packed.handle).items() if id(part) in found}
        return replace(packed, buffers=(), handle=replace(packed.handle, **dict.fromkeys(parts))), parts

    def put_together(self, bare: Packed, parts: Mapping[str, Any]) -> Packed:
        """The inverse of `take_apart`; `parts` may lie elsewhere by now."""
        return replace(bare, buffers=tuple(parts.values()), handle=replace(bare.handle, **parts))

    def put_in_places(self, bare: Packed, parts: Mapping[str, Any], places: Host) -> Packed:
        """Put together as many matrices below each other as `places` [count] int64, from `parts` of one.

        Number i lies places[i] bytes behind `parts`, wherever that is when an op runs.
        """
        raise NotImplementedError(f"backend {self.name} has matrices where they were packed")

    def row_dtype(self, table: Dtype) -> Dtype:
        """Dtype of rows between ops. `table`: of the numbers of the table of tokens."""
        return F32

    def head_dtype(self, dtype: Dtype) -> Dtype:
        """Dtype of matrices that `head_linear` reads, where others are in `dtype`; it has no products of f16 on the
        host."""
        return F32 if dtype == F16 else dtype

    def pack_exact(self, numbers: Host) -> Packed:
        """`numbers` [n, k] f32 for products with f32 activations; in bf16 where that changes none of them.

        A router's choice is all or nothing: its logits have the bits of f32 weights either way.
        """
        short = numbers.astype(BF16)
        exact = np.array_equal(short.astype(F32), numbers)
        return self.pack(Weight("bf16_f32", short) if exact else Weight("f32", numbers))

    def group(self, packed: Packed, experts: int, n: int, bias: Any) -> Grouped:
        """The matrices of a layer's experts, packed below each other, as `grouped_linear` reads them."""
        return group(packed, experts, n, bias)

    def fuses_mlp(self, gate_up: Packed, down: Packed) -> bool:
        """Whether `gated_mlp`, or `plain_mlp`, takes these matrices."""
        return True

    def fuses_experts(self, down: Grouped) -> bool:
        """Whether `expert_mlp` takes experts whose last matrices are these."""
        return True

    @property
    def reads_packed_tables(self) -> bool:
        """Whether `embedding` takes rows out of a packed matrix."""
        return True

    @property
    def reads_files(self) -> bool:
        """Whether `embedding` takes rows of a table that lies in a mapped file, of any dtype of numbers."""
        return not self.queues

    def forget_rows(self, table: Array | PackedTable | StoredTable | PieceTable) -> None:
        """Let go of memory of a table in a mapped file, of which rows were read; where no op does that, it stays."""
        return

    def attends_whole(self, head_dim: int) -> bool:
        """Whether `whole_attention` takes heads of `head_dim` numbers."""
        return False

    def float8_activations(self, dtype: Dtype) -> int:
        """Bits of the activations that weights kept in float8 are multiplied with; 0: such weights are widened at load.

        8: float8, on GPUs that multiply it. 16: bf16, by the CPU's and the reference's `linear`, if `dtype` has as few.
        """
        return 0 if dtype == F32 else 16

    # Caches and steps

    @property
    def layout(self) -> type[KVLayout]:
        """How the backend's attention wants keys and values to lie."""
        return PlainLayout

    def allocate_cache(self, layout: KVLayout, blocks: int) -> KVCache:
        """Zeroed keys and values of `blocks` blocks."""
        return KVCache(layout, *(self.zeros(shape, layout.element) for shape in layout.shapes(blocks)))

    def free_memory(self, processes: int) -> int:
        """Bytes free for the caches of `processes`: on the host, which they share, or on a device of each."""
        return self.runtime.memory()[0] * processes if self.queues else available_memory()

    def gather(self, parts: Sequence[Array], tail: Host) -> Callable[[], Host]:
        """Copy `parts` (u8, contiguous), and `tail` of the host behind them, as they are once what is queued is done.

        The result waits for the copy, and returns it: u8 [bytes of all].
        """
        found: Host = np.concatenate([to_numpy(part) for part in (*parts, tail)])
        return lambda: found

    def scatter(self, parts: Sequence[Array], data: Host) -> None:
        """Make `parts` (u8, contiguous) hold `data` (u8 [bytes of all]), for whatever is queued later."""
        at = 0
        for part in parts:
            to_numpy(part)[...] = data[at : at + len(part)]
            at += len(part)

    def reserve(self, outer: int, layer: int) -> None:
        """Room for the outputs of the largest step, where they have memory of their own (`Arena.reserve`)."""
        return

    def begin_step(self) -> None:
        """Take back the memory of all outputs."""
        return

    def next_layer(self) -> None:
        """Outputs of the layer before the one that ends here are taken back; those made before the first layer stay."""
        return

    def compute(self, fn: Callable[[], Any], together: bool) -> Any:
        """Run `fn` as one step; outputs of the step before are overwritten.

        `together`: as by `record`, where a list of native calls is faster than each call by itself.
        """
        self.begin_step()
        return fn()

    @abstractmethod
    def record(self, fn: Callable[[], Any]) -> Recording:
        """The recording of `fn`, computed once; valid while the arrays that `fn` uses keep their shapes and addresses.

        On a CPU the ops of `fn` only allocate outputs and are listed; the list runs when `fn` has returned, so `fn`
        must read no numbers. A CUDA graph is captured the same way. The reference has no list and calls `fn` anew.
        """


def open_backend(device: DeviceConfig) -> Ops:
    """The backend for `device`, as `backend_of` says: what `open_ops` of `backend.py` in its folder gives.

    It is imported when it is chosen, torch with those of torch.
    """
    name = backend_of(device)
    row = devices()[name]
    if row.extra:
        require_torch(f"--device {row.option}", row.extra)
    found: Ops = importlib.import_module(f"quire.ops.{name}.backend").open_ops(device)
    return found
