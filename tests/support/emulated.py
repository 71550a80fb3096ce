"""A pytest plugin: `quire._native` is another program, csrc/emulate, that may be built for another processor.

    QUIRE_EMULATE="qemu-aarch64 -cpu max build/emulate/aarch64/quire-emulate" PYTHONPATH=tests/support \\
        pytest -p emulated tests/ops/test_ops.py

Each call of an op is sent with the memory that it can reach, found as a collector of garbage would: the arrays whose
addresses are arguments, those whose addresses lie in these arrays, and so on. What the program changed is put in place.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import operator
import os
import shlex
import struct
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Memory:
    """Where the arrays lie whose addresses somebody asked for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._address = torch.Tensor.data_ptr

    def watch(self) -> None:
        """From here on addresses of tensors, numpy arrays and descriptors go through this."""
        from quire.ops import arrays

        plain, arrays.address = arrays.address, self.address  # before the modules that take its name from there
        from quire.ops.cpu import sampling
        from quire.ops.cpu.state import Arena
        from quire.ops.descriptors import Descriptor

        for module in [m for name, m in sys.modules.items() if name.startswith("quire.")]:
            if getattr(module, "address", None) is plain:
                module.address = self.address  # type: ignore[attr-defined]
        memory, address_of, describe = self, sampling._address, Descriptor.__init__

        def address(array: NDArray[Any], dtype: Any) -> int:
            address_of(array, dtype)
            return memory.address(array)

        def described(descriptor: Descriptor, **fields: Any) -> None:
            describe(descriptor, **fields)
            memory._know(descriptor.at, ctypes.sizeof(descriptor), descriptor)

        Descriptor.__init__ = described  # type: ignore[method-assign]
        torch.Tensor.data_ptr = lambda tensor: memory.of_tensor(tensor)  # type: ignore[method-assign]
        sampling._address = address
        Arena.__init__.__defaults__ = (
            64 << 10,
        )  # all of it travels with every call; it grows where that is too little

    def of_tensor(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies."""
        storage = tensor.untyped_storage()
        if storage.nbytes():  # an empty one lies at 0, and not every 0 in memory is its address
            self._know(storage.data_ptr(), storage.nbytes(), storage)
        return self._address(tensor)

    def address(self, array: NDArray[Any] | torch.Tensor) -> int:
        """Where an array or a tensor lies; what it is a part of travels whole."""
        if isinstance(array, torch.Tensor):
            return self.of_tensor(array)
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if isinstance(whole.base, torch.Tensor) and whole.nbytes:
            self.of_tensor(whole.base)
        else:
            self._know(_place(whole), whole.nbytes, whole)
        return _place(array)

    def _know(self, at: int, size: int, owner: Any) -> None:
        """`owner` has `size` bytes; a tensor over the first of an array is a part of that."""
        known = self._known.get(at)
        if known is None or known[0] <= size or known[1]() is None:
            self._known[at] = size, weakref.ref(owner)

    def words(self, args: Sequence[Any]) -> tuple[int | float, ...]:
        """Arguments of a call with addresses in the place of arrays, and 0 for None."""
        return tuple(0 if a is None else self.address(a) if isinstance(a, np.ndarray) else a for a in args)

    def areas(self) -> tuple[list[int], list[int]]:
        """Beginnings, ascending, and sizes of what is still there, but for parts of others: tensors over arrays."""
        self._known = {at: found for at, found in self._known.items() if found[1]() is not None}
        beginnings, end = [], 0
        for at in sorted(self._known):
            if at + self._known[at][0] > end:
                beginnings.append(at)
                end = at + self._known[at][0]
        return beginnings, [self._known[at][0] for at in beginnings]


def _place(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class Op:
    """As in csrc/registry.h: one letter for each argument."""

    unit: str
    name: str
    signature: str

    def slots(self, args: Sequence[int | float]) -> list[bytes]:
        """The arguments as words; ValueError as the extension has it."""
        what = f"op {self.unit}/{self.name}({self.signature})"
        if len(args) != len(self.signature):
            raise ValueError(f"{what}: got {len(args)} arguments")
        words = []
        for i, (letter, arg) in enumerate(zip(self.signature, args, strict=True)):
            try:
                words.append(struct.pack("<d", arg) if letter == "f" else struct.pack("<q", operator.index(arg)))  # type: ignore[arg-type]
            except (TypeError, struct.error):
                raise ValueError(f"{what}: argument {i} has the wrong type or range") from None
            if letter == "p" and arg == 0:
                raise ValueError(f"{what}: argument {i} is a null pointer")
        return words


class Reach:
    """The areas that a call can reach from its arguments, and the words in them that hold addresses."""

    def __init__(self, memory: Memory) -> None:
        self._beginnings, self._sizes = memory.areas()
        self._bounds = np.array(self._beginnings, np.int64), np.array(self._sizes, np.int64)
        self.order: dict[int, int] = {}
        self.data: list[bytes] = []
        self.links: list[tuple[int, int, int, int]] = []

    def target(self, address: int) -> tuple[int, int] | None:
        """Area and place of an address in the areas that travel; it joins them."""
        i = int(np.searchsorted(self._bounds[0], address, "right")) - 1
        if i < 0 or address >= self._beginnings[i] + max(self._sizes[i], 1):
            return None
        if i not in self.order:
            self.order[i] = len(self.order)
            self.data.append(ctypes.string_at(self._beginnings[i], self._sizes[i]))
        return self.order[i], address - self._beginnings[i]

    def follow(self) -> None:
        """Find what the areas that travel point to, until nothing is new."""
        starts, sizes = self._bounds
        done = 0
        while done < len(self.data):
            data = self.data[done]
            words = np.frombuffer(data, np.int64, len(data) // 8)
            (near,) = np.nonzero((words >= starts[0]) & (words < starts[-1] + sizes[-1]))
            for at in near:
                found = self.target(int(words[at]))
                if found is not None:
                    self.links.append((done, int(at) * 8, *found))
            done += 1

    def put_back(self, index: int, data: bytes) -> None:
        """Area `index` has new contents."""
        at = next(i for i, found in self.order.items() if found == index)
        ctypes.memmove(self._beginnings[at], data, len(data))

    @property
    def areas(self) -> list[tuple[int, bytes]]:
        """(beginning, contents) in the order in which they travel."""
        return [(self._beginnings[i], self.data[index]) for i, index in self.order.items()]


class Emulated(types.ModuleType):
    """The functions of `quire._native`, answered by the program."""

    def __init__(self, command: str) -> None:
        super().__init__("quire._native")
        self.memory = Memory()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._units = [self._text() for _ in range(self._word())]
        self._ops = [Op(self._text(), self._text(), self._text()) for _ in range(self._word())]
        self._threads = 1
        atexit.register(self.close)
        self.Program = type("Program", (Recording,), {"module": self})

    def close(self) -> None:
        """End the program: it leaves when there is nothing more to read."""
        self._process.communicate()

    def units(self) -> list[str]:
        return list(self._units)

    def ops(self, unit: str) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self._ops) if op.unit in ("", unit)}

    def kinds(self) -> list[tuple[Any, ...]]:
        """A table of the source, the same for every processor."""
        return _built_here().kinds()  # type: ignore[no-any-return]

    def facts(self) -> dict[str, int]:
        return _built_here().facts()  # type: ignore[no-any-return]

    def threads(self) -> int:
        return self._threads

    def set_threads(self, threads: int, pin: bool = False) -> None:
        if not 0 <= threads <= 1024:
            raise ValueError("threads must lie in [0, 1024]")
        self._threads = threads or os.cpu_count() or 1
        with self._lock:
            self._write(struct.pack("<qq", 0, self._threads))

    def advise_huge(self, address: int, size: int) -> None:
        pass

    def checked(self, op: int, args: Sequence[int | float]) -> list[bytes]:
        if not 0 <= op < len(self._ops):
            raise ValueError(f"unknown op id {op}")
        return self._ops[op].slots(args)

    def call(self, op: int, args: Sequence[Any]) -> None:
        args = self.memory.words(args)
        words = self.checked(op, args)
        with self._lock:
            reach = Reach(self.memory)
            pointers = [
                (i, int(a))
                for i, (a, s) in enumerate(zip(args, self._ops[op].signature, strict=True))
                if s in "po" and a
            ]
            slots = [(i, reach.target(at)) for i, at in pointers]
            missing = [i for i, found in slots if found is None]
            assert not missing, f"{self._ops[op]}: arguments {missing} are addresses that no array is known for"
            reach.follow()
            message = [struct.pack("<qqq", 1, op, len(words)), *words, struct.pack("<q", len(reach.data))]
            for beginning, data in reach.areas:
                message += [struct.pack("<qq", beginning, len(data)), data]
            message.append(struct.pack("<q", len(slots)))
            message += [struct.pack("<qqq", i, *found) for i, found in slots if found]
            message.append(struct.pack("<q", len(reach.links)))
            message += [struct.pack("<qqqq", *link) for link in reach.links]
            self._write(b"".join(message))
            error = self._text()
            for index, data in enumerate(reach.data):
                if self._word():
                    reach.put_back(index, self._read(len(data)))
        if error:
            raise ValueError(error)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return data

    def _word(self) -> int:
        return int(struct.unpack("<q", self._read(8))[0])

    def _text(self) -> str:
        return self._read(self._word()).decode()


class Recording:
    """`quire._native.Program`."""

    module: Emulated

    def __init__(self) -> None:
        self._calls: list[tuple[int, tuple[Any, ...]]] = []

    def add(self, op: int, args: tuple[Any, ...]) -> None:
        self.module.checked(op, self.module.memory.words(args))
        self._calls.append((op, args))

    def run(self) -> None:
        for op, args in self._calls:
            self.module.call(op, args)

    def __len__(self) -> int:
        return len(self._calls)


@functools.cache
def _built_here() -> types.ModuleType:
    emulated = sys.modules.pop("quire._native")
    try:
        return importlib.import_module("quire._native")
    finally:
        sys.modules["quire._native"] = emulated


@contextlib.contextmanager
def this_machine() -> Iterator[None]:
    """Backends chosen in here run in the extension of this machine."""
    emulated = sys.modules["quire._native"]
    sys.modules["quire._native"] = _built_here()
    try:
        yield
    finally:
        sys.modules["quire._native"] = emulated


if "QUIRE_EMULATE" in os.environ:
    MODULE = Emulated(os.environ["QUIRE_EMULATE"])
    sys.modules["quire._native"] = MODULE
    MODULE.memory.watch()
