"""What every test starts from."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
import torch

from quire.core.machine import uncollected
from quire.model.load import packed_folder

# Triton reads it when a kernel is defined: kernels then run as Python, on CPU tensors. `make gpu-check` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# torch's threads spin; beside the native pool on a small machine they made one test 50 times slower.
torch.set_num_threads(1)

# What quire keeps for later starts must not land among the user's caches, nor be found from an earlier run.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="quire-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Tests keep kilobytes; how full the machine's disk is must not decide whether they are kept.
packed_folder.FREE_SHARE = 1 << 60

LONG = {"slow": 4 * 3600.0, "nightly": 24 * 3600.0}
"""Seconds that tests with these marks may take; others have the `timeout` of pyproject.toml."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all files and make all tests without looking for garbage, and look through none of it afterwards."""
    with uncollected(forever=True):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every test in time."""
    for item in items:
        for mark, seconds in LONG.items():
            if item.get_closest_marker(mark) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds))
