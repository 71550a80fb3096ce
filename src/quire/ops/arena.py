"""Memory of a step's intermediate tensors: one buffer, bumped, reset when the next step begins."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.native import Native

ALIGN = 256
HUGE = 2 << 20
MAX_VIEWS = 4096


def huge_bytes(native: Native, size: int, zeroed: bool = False) -> Tensor:
    """`size` bytes (uint8) that begin on a huge page, in huge pages where the system grants them.

    Reads through huge pages reach the machine's bandwidth; through 4 KiB pages they stay well below it. Pages appear at
    their first touch, all zero, so that a large cache costs nothing until it is used; `zeroed` matters to small sizes
    only. `ConfigError` when the system does not grant the address space.
    """
    if size < HUGE:
        raw = (torch.zeros if zeroed else torch.empty)(size + ALIGN, dtype=torch.uint8)
        skip = -raw.data_ptr() % ALIGN
        return raw[skip : skip + size]
    # Not torch.zeros: it writes every page before advice can be given (4.3 GB took 12 s, in 4 KiB pages).
    try:
        area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the system does not grant {size:,} bytes of memory ({error.strerror}); use a smaller model, or lower "
            "--kv-cache-memory-bytes or --max-num-seqs"
        ) from None
    raw = torch.frombuffer(area, dtype=torch.uint8)
    skip = -raw.data_ptr() % HUGE
    native.module.advise_huge(raw.data_ptr() + skip, size)
    return raw[skip : skip + size]


class Arena:
    """The same sequence of `empty` calls after `begin` gives the same addresses, as recordings require.

    When a step outgrows the buffer a larger one takes over; tensors and recordings keep what they use of the old one.
    """

    def __init__(self, native: Native, size: int = HUGE) -> None:
        self._native = native
        self._buffer = huge_bytes(native, size)
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self.used = 0
        self.buffers: list[Tensor] = [self._buffer]

    def begin(self) -> None:
        """Forget everything handed out: the memory is reused from here on."""
        self.used = 0
        self.buffers = [self._buffer]

    def empty(self, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized [rows, cols] tensor, valid until `begin`."""
        size = rows * cols * dtype.itemsize
        if self.used + size > self._buffer.numel():
            self._grow(size)
        key = (self.used, rows, cols, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._buffer[self.used : self.used + size].view(dtype).view(rows, cols)
            self._views[key] = view
        self.used += -(-size // ALIGN) * ALIGN
        return view

    def _grow(self, size: int) -> None:
        needed = 2 * self._buffer.numel() + size
        self._buffer = huge_bytes(self._native, -(-needed // HUGE) * HUGE)
        self._views.clear()
        self.buffers.append(self._buffer)
        self.used = 0
