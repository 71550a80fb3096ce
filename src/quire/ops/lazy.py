"""torch, an extra, imported when it is first used: its import takes seconds, and whoever does without never pays them.
See docs/design/dependencies.md.

A module that is also imported by those takes `torch` from here, and `Tensor` for annotations only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.core.dtypes import BF16, BOOL, F8, F16, F32, F64, I8, I16, I32, I64, U8, Dtype
from quire.core.errors import ConfigError

DTYPES = {dtype.name: dtype for dtype in (F64, F32, F16, BF16, F8, I64, I32, I16, I8, U8, BOOL)}


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return importlib.util.find_spec("torch") is not None


def require_torch(what: str, extra: str) -> None:
    """`ConfigError` that `what` needs torch, with the extra of quire that installs it, where it is not there."""
    if not has_torch():
        raise ConfigError(f"{what} needs PyTorch, which is not installed: pip install 'quire[{extra}]'")


if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Every name of torch, kept once it was looked up: later uses cost what those of a module's do."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch = _Torch()


def array_dtype(dtype: torch.dtype) -> Dtype:
    """Dtype of an array for torch's `dtype`."""
    return DTYPES[str(dtype).removeprefix("torch.")]


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's own for `dtype`."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Leave torch one thread beside those of the ops, where it is imported, until the block ends.

    Its others spin when they are done, and fight with those of the ops (0.88 s instead of 0.70).
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
