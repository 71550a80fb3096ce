"""The GPU behind torch's CUDA calls as a `Runtime`, and the CPU as one, for kernels under Triton's interpreter.

Everything that can be wrong only on a GPU is in `Cuda`; what is built on it is tested with one that only pretends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.arrays import Fetched
from quire.ops.runtime import Copies, QueueEvent


class _Event:
    """A CUDA event as a `QueueEvent`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """Stop the host until the device has come that far."""
        self.event.synchronize()


class Cuda:
    """An NVIDIA (or, through the same calls of torch, AMD) GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ahead = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> _Event:
        """Mark this point of the current stream."""
        return _Event(torch.cuda.current_stream(self._device))

    def send(self, copies: Copies, after: QueueEvent | None) -> _Event:
        """Copies on the side stream; the current stream waits for them, the host does not.

        Without `after` they wait for all that was queued: what made the targets may still be about to zero them.
        """
        main = torch.cuda.current_stream(self._device)
        self._side.wait_event(after.event if isinstance(after, _Event) else _Event(main).event)
        with torch.cuda.stream(self._side):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        done = _Event(self._side)
        main.wait_event(done.event)
        return done

    def ahead(self, copies: Copies) -> _Event:
        """Copies on a stream of their own, from page-locked memory."""
        self._ahead.wait_event(_Event(torch.cuda.current_stream(self._device)).event)
        with torch.cuda.stream(self._ahead):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return _Event(self._ahead)

    def wait_for(self, mark: QueueEvent) -> None:
        """The current stream waits."""
        assert isinstance(mark, _Event)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def place(self, copies: Copies) -> None:
        """Kernels of the current stream."""
        for target, source in copies:
            target.copy_(source)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Copies to page-locked memory behind the work of the current stream, one event for all."""
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        done = self.mark()

        def wait() -> list[NDArray[Any]]:
            done.wait()
            return [host.numpy() for host in hosts]

        return wait

    def capture(self, fn: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """A CUDA graph; all graphs share one pool of memory, since one runs at a time.

        The run before compiles kernels and lets cuBLAS take its workspace, neither of which a capture allows.
        """
        fn()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = fn()
        self._pool = graph.pool()
        return graph.replay, output

    def memory(self) -> tuple[int, int]:
        """Memory of the whole device, other processes included."""
        return torch.cuda.mem_get_info(self._device)

    def peak(self, step: Callable[[], object]) -> int:
        """Measured by torch's allocator, which gives back what `step` made it take."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        step()
        torch.cuda.synchronize(self._device)
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        return most - before


class _Now:
    """A mark where nothing is ever queued."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Immediate:
    """The CPU as a device on which everything happens at once: for kernels under Triton's interpreter."""

    def pinned(self, nbytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def mark(self) -> _Now:
        """Now."""
        return _Now()

    def send(self, copies: Copies, after: QueueEvent | None) -> _Now:
        """Copies at once."""
        for target, source in copies:
            target.copy_(source)
        return _Now()

    def ahead(self, copies: Copies) -> _Now:
        """Copies at once."""
        return self.send(copies, None)

    def wait_for(self, mark: QueueEvent) -> None:
        """Everything has happened."""

    def place(self, copies: Copies) -> None:
        """Copies at once."""
        for target, source in copies:
            target.copy_(source)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Copies at once: the tensors may hold something else by the time that somebody waits."""
        hosts = [t.clone().numpy() for t in tensors]
        return lambda: hosts

    def capture(self, fn: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs `fn` again each time and puts its result where the first one lies."""
        output = fn()

        def replay() -> None:
            output.copy_(fn())

        return replay, output

    def memory(self) -> tuple[int, int]:
        """Memory, as much as a cache of tests needs."""
        return 1 << 30, 1 << 30

    def peak(self, step: Callable[[], object]) -> int:
        """Nothing is measured."""
        step()
        return 0
