"""Statistics of the activations that a weight matrix reads, as methods of compression need them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.core.errors import ModelError

BLOCK = 1024


class InputStatistics:
    """Sums over rows x [T, k] of activations, of which only the parts in `wanted` are computed.

    Sums grow by batches and are divided when they are read, so how rows are cut into batches changes the last bits
    only, and a saved state goes on bit for bit. Vectors are summed in f64, which costs nothing beside the products.
    """

    PARTS: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        "hessian": (2, torch.float32),  # of which the blocks on and above the diagonal are summed
        "norms": (1, torch.float64),
        "peak": (1, torch.float32),
        "mean_abs": (1, torch.float64),
    }
    """Name of a part -> its axes of k numbers each, and the dtype of its sum."""

    def __init__(self, k: int, wanted: Collection[str]) -> None:
        if unknown := sorted(set(wanted) - set(self.PARTS)):
            raise ValueError(f"{unknown[0]!r} is nothing that is kept of inputs; there are {', '.join(self.PARTS)}")
        self.k, self.rows = k, 0
        self._sums = {
            name: torch.zeros((k,) * axes, dtype=dtype) for name, (axes, dtype) in self.PARTS.items() if name in wanted
        }

    def add(self, x: Tensor) -> None:
        """Add the rows x [T, k] (any float dtype); `ModelError` when they hold nan or inf."""
        if x.ndim != 2 or x.shape[1] != self.k:
            raise ValueError(f"rows are {list(x.shape)}, not [T, {self.k}]")
        if not len(x):
            return
        x = x.float()
        least, most = x.aminmax()  # nan where there is one; a copy of x is not made
        if not bool(least.isfinite() & most.isfinite()):
            raise ModelError("activations on the calibration rows hold nan or inf; the model overflows on them")
        if "hessian" in self._sums:
            sums = self._sums["hessian"]
            for rows in _blocks(self.k):
                sums[rows, rows.start :].addmm_(x[:, rows].t(), x[:, rows.start :])
        if "norms" in self._sums:
            self._sums["norms"] += x.double().square().sum(0)
        if "mean_abs" in self._sums:
            self._sums["mean_abs"] += x.double().abs().sum(0)
        if "peak" in self._sums:
            torch.maximum(self._sums["peak"], x.abs().amax(0), out=self._sums["peak"])
        self.rows += len(x)

    @property
    def hessian(self) -> Tensor:
        """The matrix 2 / N sum x x^T [k, k] f32: the Hessian of the squared error of an output, for each row of a
        matrix."""
        return self._whole(self._sums["hessian"].clone())

    def take_hessian(self) -> Tensor:
        """Return `hessian` in the memory of its sum, which is gone afterwards: `KeyError` at a second call."""
        return self._whole(self._sums.pop("hessian"))

    def _whole(self, sums: Tensor) -> Tensor:
        for rows in _blocks(self.k):
            sums[rows.stop :, rows] = sums[rows, rows.stop :].t()
        return sums.mul_(2 / max(1, self.rows))

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each column [k] f32 over all rows."""
        return self._sums["norms"].sqrt().float()

    @property
    def peak(self) -> Tensor:
        """The largest magnitude of each column [k] f32."""
        return self._sums["peak"].clone()

    @property
    def mean_abs(self) -> Tensor:
        """The mean magnitude of each column [k] f32."""
        return (self._sums["mean_abs"] / max(1, self.rows)).float()

    def outlier_columns(self, threshold: float = 6.0) -> Tensor:
        """List columns [m] int64, ascending, with a magnitude of at least `threshold` (LLM.int8(), Dettmers et al.
        2022)."""
        return (self._sums["peak"] >= threshold).nonzero().flatten()

    def save(self, path: Path) -> None:
        """Write the sums as safetensors."""
        save_file(self._sums, path, {"rows": str(self.rows), "k": str(self.k)})

    @classmethod
    def load(cls, path: Path) -> InputStatistics:
        """Read what `save` wrote; `ModelError` when the file is something else."""
        try:
            with safe_open(path, "pt") as file:
                facts, sums = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = cls(int(facts["k"]), sums)
            found.rows = int(facts["rows"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ModelError(f"{path} does not hold statistics of inputs ({error}); remove it") from None
        for name, zeros in found._sums.items():
            if (sums[name].shape, sums[name].dtype) != (zeros.shape, zeros.dtype):
                raise ModelError(f"{path}: {name} is not that of {found.k} columns; remove it")
        found._sums = sums
        return found


def _blocks(k: int) -> Iterator[slice]:
    """Runs of columns: each with those from its first on takes 0.56 of all products, of 8192 columns."""
    return (slice(at, min(k, at + BLOCK)) for at in range(0, k, BLOCK))


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Compute the mean squared error of outputs over rows of inputs, when a matrix [n, k] is off by `difference`.

    It is tr(d H d^T) / 2 with `hessian` [k, k] as `InputStatistics` gives it.
    """
    d = difference.to(hessian.dtype)
    return float(((d @ hessian) * d).sum(dtype=torch.float64)) / 2
