"""Choosing the implementation of every op, once, at load; recording a step's native calls for replay."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.config import DeviceConfig
from quire.ops import cpu as _cpu
from quire.ops import embedding_cpu as _embedding_cpu  # noqa: F401  (registers the implementation)
from quire.ops import lora as _lora  # noqa: F401  (registers the definition)
from quire.ops import lora_cpu as _lora_cpu  # noqa: F401  (registers the implementations)
from quire.ops import mla as _mla  # noqa: F401  (registers the definitions)
from quire.ops import mla_cpu as _mla_cpu  # noqa: F401  (registers the implementations)
from quire.ops import moe as _moe  # noqa: F401  (registers the definitions)
from quire.ops import reference as _reference  # noqa: F401  (registers the definitions)
from quire.ops import rowwise as _rowwise  # noqa: F401  (registers the definitions)
from quire.ops import rowwise_cpu as _rowwise_cpu  # noqa: F401  (registers the implementations)
from quire.ops import sampling as _sampling  # noqa: F401  (registers the definitions)
from quire.ops import sampling_cpu as _sampling_cpu  # noqa: F401  (registers the implementations)
from quire.ops import states as _states  # noqa: F401  (registers the definitions)
from quire.ops import states_cpu as _states_cpu  # noqa: F401  (registers the implementations)
from quire.ops import whole as _whole  # noqa: F401  (registers the definition)
from quire.ops import whole_cpu as _whole_cpu  # noqa: F401  (registers the implementation)
from quire.ops.arena import huge_bytes
from quire.ops.choice import READ_WEIGHTS, backend_of
from quire.ops.cpu import Cpu
from quire.ops.gpu import Gpu, check_sparse_units, open_gpu
from quire.ops.layout import KVCache, KVLayout, PlainLayout
from quire.ops.moe import Grouped
from quire.ops.moe_cpu import fuses_experts, group
from quire.ops.native import Native
from quire.ops.op import REGISTRY, implementations
from quire.ops.pack import pack
from quire.ops.pack_stack import pack_stack
from quire.ops.runtime import Fetched
from quire.ops.sampling import Found
from quire.ops.triton.pack import pack as gpu_pack
from quire.ops.weights import Packed, Stored, Weight, plain_packed

T = TypeVar("T")
if hasattr(os, "register_at_fork"):
    # Its pool of threads does not come along into a fork, which would wait for them for ever.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class Replay(Generic[T]):
    """A recorded step. `output` is what the function returned; `run` repeats its native calls on the same addresses.

    They are made together, once the function has returned: between large ops, whose weights sweep Python's memory from
    the caches, an op's own Python takes 70 us instead of 18. Inputs are read anew from the tensors the function used,
    so the caller changes those in place. On the reference backend, or when an op was overridden with its reference,
    there is nothing to record and `run` calls the function.
    """

    def __init__(self, ops: Ops, fn: Callable[[], T]) -> None:
        self._ops, self._fn = ops, fn
        self._cpu = ops.cpu if ops.all_native else None
        if self._cpu is None:
            self.output = fn()
            return
        native = self._cpu.native
        self._program = native.recording = native.module.Program()
        try:
            self.output = fn()
        finally:
            native.recording = None
            self._keep = (self._cpu.held, self._cpu.arena.buffers)
            self._cpu.held = []
        self._program.run()
        self._used = self._cpu.arena.mark()

    def run(self) -> T:
        """Repeat the step; returns `output`, which holds the new values."""
        if self._cpu is None:
            self.output = self._fn()
            return self.output
        self._program.run()
        self._cpu.arena.resume(self._used)
        return self.output


class Captured:
    """A recorded step of the GPU backend: a CUDA graph. `output` lies at a fixed address."""

    def __init__(self, gpu: Gpu, fn: Callable[[], Tensor]) -> None:
        self._replay, self.output = gpu.runtime.capture(fn)

    def run(self) -> Tensor:
        """Queue the step again on the same addresses; returns `output`, which will hold the new values."""
        self._replay()
        return self.output


class Ops:
    """One callable attribute per op, with the reference's arguments; `chosen` maps op -> implementation.

    Outputs of the cpu backend live in an arena: they are valid until the next `begin_step`, those of a layer until the
    second `next_layer` after them.
    """

    def __init__(self, name: str, state: Cpu | Gpu | None, overrides: tuple[str, ...]) -> None:
        self.name = name
        self.cpu = state if isinstance(state, Cpu) else None
        self.gpu = state if isinstance(state, Gpu) else None
        self.device = torch.device("cpu") if self.gpu is None else self.gpu.device
        table = implementations(name, _own(name, state), overrides)
        self.chosen = {op: which for op, (which, _) in table.items()}
        self.isa = self.cpu.native.isa if self.cpu else self.gpu.name if self.gpu else "torch"
        self.threads = self.cpu.native.threads if self.cpu else 1
        for op, (_, fn) in table.items():
            setattr(self, op, fn)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"there is no op {name!r}; known ops are {', '.join(sorted(REGISTRY))}")

    @property
    def all_native(self) -> bool:
        """Whether every op runs in the native extension."""
        return self.cpu is not None and set(self.chosen.values()) == {"cpu"}

    @property
    def refers(self) -> bool:
        """Whether an op that was overridden with its reference reads weights, as they are before packing."""
        return any(self.chosen[op] == "reference" for op in READ_WEIGHTS)

    def pack(self, weight: Weight | Stored, narrow: bool = False) -> Packed:
        """`weight` in the layout `linear` reads; `narrow`: in 12 bits, if it is bf16 and `--bf16-bits` has it so.

        One that is stored is taken where `packs_stored`.
        """
        if self.cpu is not None:
            return pack(self.cpu, weight, keep_plain=self.refers, narrow=narrow and self.cpu.bf16_bits == 12)
        assert isinstance(weight, Weight)
        return plain_packed(weight) if self.gpu is None else gpu_pack(self.gpu, weight, keep_plain=self.refers)

    @property
    def packs_stored(self) -> bool:
        """Whether `pack` and `pack_stack` take matrices that are still what their file holds."""
        return self.cpu is not None and not self.refers

    def stacks(self, kind: str) -> bool:
        """Whether `pack_stack` takes matrices of `kind` one by one. Those in 12 bits share one choice of exponents."""
        return self.cpu is not None and not self.refers and not (kind == "bf16" and self.cpu.bf16_bits == 12)

    def pack_stack(self, weights: Iterable[Weight | Stored], count: int) -> Packed:
        """`count` matrices below each other in the layout `linear` reads, packed one at a time."""
        assert self.cpu is not None
        return pack_stack(self.cpu, weights, count)

    def pack_exact(self, numbers: Tensor) -> Packed:
        """`numbers` [n, k] f32 for products with f32 activations; in bf16 where that changes none of them.

        A router's choice is all or nothing: its logits have the bits of f32 weights either way.
        """
        short = numbers.bfloat16()
        exact = self.gpu is None and torch.equal(short.float(), numbers)
        return self.pack(Weight("bf16_f32", short) if exact else Weight("f32", numbers))

    def group(self, packed: Packed, experts: int, n: int, bias: Tensor | None) -> Grouped:
        """The matrices of a layer's experts, packed below each other, as `grouped_linear` reads them."""
        return group(packed, experts, n, bias)

    def fuses_mlp(self, gate_up: Packed, down: Packed) -> bool:
        """Whether `gated_mlp`, or `plain_mlp`, takes these matrices."""
        return self.gpu is None and (self.cpu is None or _cpu.fuses_mlp(gate_up, down))

    def fuses_experts(self, down: Grouped) -> bool:
        """Whether `expert_mlp` takes experts whose last matrices are these."""
        return self.gpu is None and (self.cpu is None or fuses_experts(down))

    @property
    def reads_packed_tables(self) -> bool:
        """Whether `embedding` takes rows out of a packed matrix; the GPU's reads tables of numbers only."""
        return self.gpu is None and (self.cpu is None or self.chosen["embedding"] == "cpu")

    def float8_activations(self, dtype: torch.dtype) -> int:
        """Bits of the activations that weights kept in float8 are multiplied with; 0: such weights are widened at load.

        8: float8, on GPUs that multiply it. 16: bf16, by the CPU's and the reference's `linear`, if `dtype` has as few.
        """
        if self.gpu is not None:
            return 8 if self.gpu.chip.float8 else 0
        return 0 if dtype is torch.float32 else 16

    @property
    def layout(self) -> type[KVLayout]:
        """How the backend's attention wants keys and values to lie."""
        return KVLayout if self.gpu is None else PlainLayout

    def allocate_cache(self, layout: KVLayout, blocks: int) -> KVCache:
        """Zeroed key and value caches; in huge pages on the cpu backend (measured: 38 instead of 33 GB/s)."""
        if self.cpu is None:
            with self.device:
                return layout.allocate(blocks)
        native = self.cpu.native
        keys, values = (
            huge_bytes(native, math.prod(shape) * layout.element.itemsize, zeroed=True).view(layout.element).view(shape)
            for shape in layout.shapes(blocks)
        )
        return KVCache(layout, keys, values)

    def reserve(self, outer: int, layer: int) -> None:
        """Room for the outputs of the largest step, where they have memory of their own (`Arena.reserve`)."""
        if self.cpu is not None:
            self.cpu.arena.reserve(outer, layer)

    def begin_step(self) -> None:
        """Take back the memory of all outputs."""
        if self.cpu is not None:
            self.cpu.arena.begin()

    def next_layer(self) -> None:
        """Outputs of the layer before the one that ends here are taken back; those made before the first layer stay."""
        if self.cpu is not None:
            self.cpu.arena.next_layer()

    def compute(self, fn: Callable[[], Tensor], together: bool) -> Tensor:
        """fn(), into memory taken back from all outputs; `together`: on the cpu backend its native calls in one."""
        if together and self.cpu is not None:
            return self.capture(fn).output
        self.begin_step()
        return fn()

    def capture(self, fn: Callable[[], Tensor]) -> Replay[Tensor] | Captured:
        """Run `fn` once and record its calls; valid while its tensors keep their shapes and addresses."""
        self.begin_step()
        return Replay(self, fn) if self.gpu is None else Captured(self.gpu, fn)

    def fetch(self, found: Sequence[Found]) -> Fetched:
        """Bring results of sampling to the host: queued now, waited for when the result is called."""
        if self.gpu is None:
            return lambda: [np.asarray(each) for each in found]
        return self.gpu.runtime.fetch([torch.as_tensor(each) for each in found])


def _own(name: str, state: Cpu | Gpu | None) -> dict[str, Callable[..., Any]]:
    """The backend's implementations, bound to its state."""
    impls: dict[str, Callable[..., Any]] = {}
    for op, definition in REGISTRY.items() if state is not None else ():
        for backend, fn in definition.impls.items():
            base, _, other = backend.partition(":")
            if base == name:
                impls[f"{op}:{other}" if other else op] = fn
    if isinstance(state, Cpu):
        return {op: _bind(state, fn) for op, fn in impls.items()}
    return {op: functools.partial(fn, state) for op, fn in impls.items()}


def _bind(cpu: Cpu, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with the backend's state; a recording keeps the arguments alive, because it holds only their addresses."""

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        if cpu.native.recording is not None:
            cpu.held.append((args, named))
        return fn(cpu, *args, **named)

    return call


def select(device: DeviceConfig) -> Ops:
    """The backend for `device`, as `backend_of` says: "triton" kernels, "cpu" native, "reference" torch."""
    name = backend_of(device)
    if name == "reference":
        return Ops(name, None, device.ops)
    if name == "triton":
        gpu = open_gpu()
        gpu.sparse, gpu.sparse_units = device.sparse == "on", "linear=cusparselt" in device.ops
        if gpu.sparse_units:
            check_sparse_units(gpu)
        return Ops(name, gpu, device.ops)
    native = Native(device.isa, device.threads)
    return Ops(name, _cpu.Cpu(native, device.bf16_bits, device.sparse), device.ops)
