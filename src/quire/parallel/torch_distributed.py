"""`Comm` over torch.distributed: gloo between the CPUs of several hosts, NCCL between GPUs.

A group is made by hand, from a store of ours and the address of one interface: nothing else is listened on, no variable
of the environment is read for gloo, and nothing is pickled. What torch sends carries no proof of the secret: gloo's and
NCCL's connections belong on a network that strangers do not reach.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from quire.core.errors import ConfigError
from quire.ops.arrays import Array, is_tensor, to_torch
from quire.ops.backend import Ops
from quire.parallel.rendezvous_store import PATIENCE_S

ROOM = 4 << 20
"""Bytes that may be on their way to other ranks before `send` waits."""
ROUNDED = (torch.bfloat16, torch.float16)
"""What a GPU's activations are kept in."""


def gloo_group(store: Store, name: str, rank: int, world: int, host: str, seconds: float = PATIENCE_S) -> Any:
    """Rank `rank` of the group `name`, which listens at the address `host`; all members call this at once.

    A call that takes `seconds` fails.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timedelta(seconds=seconds)
    options._threads = 2
    return gloo(PrefixStore(name, store), rank, world, options)


def nccl_group(store: Store, name: str, rank: int, world: int, interface: str, seconds: float = PATIENCE_S) -> Any:
    """Work as `gloo_group`, of GPUs; NCCL wants the interface's name ("lo", "eth1"), not its address."""
    if not dist.is_nccl_available():
        raise ConfigError("this torch was built without NCCL: ranks on GPUs need one with CUDA")
    os.putenv("NCCL_SOCKET_IFNAME", f"={interface}")  # the only way to tell it
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, world, options)


def check(x: Tensor, what: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """`x` itself when it is contiguous and of that dtype and shape (-1: any size); a ValueError names what is not."""
    fits = x.dim() == len(shape) and all(want in (-1, have) for have, want in zip(x.shape, shape, strict=False))
    if x.dtype is not dtype or not x.is_contiguous() or not fits:
        raise ValueError(f"{what}: need a contiguous {dtype} tensor of {list(shape)}, got {x.dtype} {list(x.shape)}")
    return x


class DistributedComm:
    """One rank's side (`Comm`) of a group of torch.distributed; sums have the order of ranks, as `SharedComm`'s.

    Everything but `broadcast`, `send` and `recv` is one all-to-all: a part goes from each rank to each, once.
    """

    recordable = False

    def __init__(self, group: Any) -> None:
        """`group`: what `gloo_group` or `nccl_group` made."""
        self.rank, self.world = int(group.rank()), int(group.size())
        self._group = group
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._left = False
        self.waited_s = 0.0

    def all_reduce(self, ops: Ops, x: Tensor) -> Tensor:
        """Implement `Comm`; of what a GPU rounded the sum is made in f32, and rounded."""
        if x.dtype in ROUNDED:
            return x.copy_(self.all_reduce(ops, x.float()))
        flat = check(x, "all_reduce x", torch.float32, -1, -1).view(-1)
        if self.world == 2:
            parts = self._swap(flat.repeat(2), [len(flat)] * 2, [len(flat)] * 2).view(2, -1)
            torch.add(parts[0], parts[1], out=flat)
            return x
        each, more = divmod(len(flat), self.world)
        sizes = tuple(each + (rank < more) for rank in range(self.world))
        flat.copy_(self._gather(self._sum(flat, sizes), sizes))
        return x

    def reduce_scatter(self, ops: Ops, x: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Implement `Comm`; as `all_reduce`."""
        if x.dtype in ROUNDED:
            return self.reduce_scatter(ops, x.float(), rows).to(x.dtype)
        width = check(x, "reduce_scatter x", torch.float32, self._total(rows), -1).shape[1]
        return self._sum(x.view(-1), tuple(width * r for r in rows)).view(rows[self.rank], width)

    def all_gather(self, ops: Ops, x: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Implement `Comm`."""
        total, width = self._total(rows), check(x, "all_gather x", x.dtype, rows[self.rank], -1).shape[1]
        return self._gather(x.view(-1), tuple(width * r for r in rows)).view(total, width)

    def gather_columns(self, ops: Ops, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Implement `Comm`."""
        self._total(widths)
        rows = len(check(x, "gather_columns x", x.dtype, -1, widths[self.rank]))
        sizes = tuple(rows * width for width in widths)
        parts = torch.split(self._gather(x.view(-1), sizes), list(sizes))
        return torch.cat([part.view(rows, width) for part, width in zip(parts, widths, strict=True)], 1)

    def all_to_all(self, ops: Ops, x: Tensor, sends: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Implement `Comm`; the counts come to the host first."""
        rows, width = check(x, "all_to_all x", x.dtype, -1, -1).shape
        check(sends, "all_to_all sends", torch.int32, self.world)
        own = sends if int(sends.sum()) <= rows and int(sends.min()) >= 0 else torch.full_like(sends, -1)
        counts = self._gather(own, (self.world,) * self.world).view(self.world, self.world).tolist()
        if min(map(min, counts)) < 0:
            raise ValueError("all_to_all: a rank sends rows that it does not have")
        if max(sum(of[to] for of in counts) for to in range(self.world)) > most:
            raise ValueError("all_to_all: a rank is sent more rows than there is room for")
        goes, comes = counts[self.rank], [of[self.rank] for of in counts]
        moved = self._swap(x[: sum(goes)].view(-1), [width * n for n in goes], [width * n for n in comes])
        out = x.new_empty(most, width)
        out[: sum(comes)] = moved.view(sum(comes), width)
        return out, torch.tensor(comes, dtype=torch.int32, device=x.device)

    def broadcast(self, ops: Ops, x: Tensor, root: int) -> Tensor:
        """Implement `Comm`."""
        _known(root, self.world, "broadcast")
        if not x.is_contiguous():
            raise ValueError("broadcast x: need a contiguous tensor")
        if x.numel():
            self._wait(lambda: self._group.broadcast(x, root))
        return x

    def send(self, ops: Ops, x: Tensor, to: int) -> None:
        """Implement `Comm`."""
        if to == self.rank:
            raise ValueError(f"send: rank {to} is this one")
        _known(to, self.world, "send")
        own = x.detach().clone(memory_format=torch.contiguous_format)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        while self._sent and sum(each.nbytes for _, each in self._sent) + own.nbytes > ROOM:
            before = self._sent.popleft()[0]
            self._wait(lambda before=before: before)  # type: ignore[misc]
        self._sent.append((self._try(lambda: self._group.send([own], to, 0)), own))

    def recv(self, ops: Ops, out: Tensor, source: int) -> Tensor:
        """Implement `Comm`; a tensor of another size is not noticed."""
        if source == self.rank:
            raise ValueError(f"recv: rank {source} is this one")
        _known(source, self.world, "recv")
        if not out.is_contiguous():
            raise ValueError("recv out: need a contiguous tensor")
        since = time.perf_counter()
        self._wait(lambda: self._group.recv([out], source, 0))
        self.waited_s += time.perf_counter() - since
        return out

    def leave(self) -> None:
        """End the group: this rank's calls fail from here on; the others' do when its process ends, or after their 30
        s."""
        self._left = True

    def _sum(self, flat: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Add this rank's part of the sum of all ranks' `flat`, which has parts of these sizes."""
        parts = self._swap(flat, list(sizes), [sizes[self.rank]] * self.world).view(self.world, -1)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def _gather(self, flat: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """All ranks' `flat`, of these sizes, one behind the other."""
        return self._swap(flat.repeat(self.world), [len(flat)] * self.world, list(sizes))

    def _swap(self, flat: Tensor, goes: list[int], comes: list[int]) -> Tensor:
        """`goes[i]` numbers to rank i, `comes[i]` from it."""
        out = flat.new_empty(sum(comes))
        self._wait(lambda: self._group.alltoall_base(out, flat, comes, goes))
        return out

    def _total(self, parts: tuple[int, ...]) -> int:
        if len(parts) != self.world or min(parts) < 0:
            raise ValueError(f"{parts} are not the parts of {self.world} ranks")
        return sum(parts)

    def _wait(self, begin: Callable[[], Any]) -> None:
        self._try(lambda: begin().wait())

    def _try(self, call: Callable[[], Any]) -> Any:
        if self._left:
            raise ValueError("a rank of the group has ended")
        try:
            return call()
        except RuntimeError as error:
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            why = "has not come in time" if late else "has ended"
            raise ValueError(f"a rank of the group {why}") from error


def _known(rank: int, world: int, what: str) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"{what}: there is no rank {rank} of {world}")


class ArrayComm:
    """`Comm` of backends whose arrays are the host's: tensors of the same memory go into `inner` and come out."""

    recordable = False

    def __init__(self, inner: DistributedComm) -> None:
        self._inner, self.rank, self.world = inner, inner.rank, inner.world

    @property
    def waited_s(self) -> float:
        """Seconds that `inner` waited."""
        return self._inner.waited_s

    def all_reduce(self, ops: Ops, x: Array) -> Array:
        """Implement `Comm`."""
        self._inner.all_reduce(ops, _tensor(x))
        return x

    def reduce_scatter(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        return _array(ops, self._inner.reduce_scatter(ops, _tensor(x), rows))

    def all_gather(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        return _array(ops, self._inner.all_gather(ops, _tensor(x), rows))

    def gather_columns(self, ops: Ops, x: Array, widths: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        return _array(ops, self._inner.gather_columns(ops, _tensor(x), widths))

    def all_to_all(self, ops: Ops, x: Array, sends: Array, most: int) -> tuple[Array, Array]:
        """Implement `Comm`."""
        out, received = self._inner.all_to_all(ops, _tensor(x), _tensor(sends), most)
        return _array(ops, out), _array(ops, received)

    def broadcast(self, ops: Ops, x: Array, root: int) -> Array:
        """Implement `Comm`."""
        self._inner.broadcast(ops, _tensor(x), root)
        return x

    def send(self, ops: Ops, x: Array, to: int) -> None:
        """Implement `Comm`."""
        self._inner.send(ops, _tensor(x), to)

    def recv(self, ops: Ops, out: Array, source: int) -> Array:
        """Implement `Comm`."""
        self._inner.recv(ops, _tensor(out), source)
        return out

    def leave(self) -> None:
        """Implement `Comm`."""
        self._inner.leave()


def _tensor(x: Array) -> Tensor:
    found: Tensor = x if is_tensor(x) else to_torch(x)
    return found


def _array(ops: Ops, x: Tensor) -> Array:
    found: Array = ops.put(x)
    return found
