"""What every test starts from."""

import atexit
import gc
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis.internal.charmap import charmap

import durations
from quire.core.machine import uncollected
from quire.model.load import packed_folder
from quire.text.structured.refused_grammars import REFUSED

# Triton reads it when a kernel is defined: kernels then run as Python, on CPU tensors. `make gpu-check` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# torch's threads spin; beside the native pool on a small machine they made one test 50 times slower.
torch.set_num_threads(1)

# What quire keeps for later starts must not land among the user's caches, nor be found from an earlier run.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="quire-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# A developer's own models change no test: commands without a model would take one of them.
os.environ["QUIRE_MODELS"] = str(Path(os.environ["XDG_CACHE_HOME"]) / "models")

# Tests keep kilobytes; how full the machine's disk is must not decide whether they are kept.
packed_folder.FREE_SHARE = 1 << 60

LONG = {"slow": 4 * 3600.0, "nightly": 24 * 3600.0, "real": 4 * 3600.0}
"""Seconds that tests with these marks may take; others have the `timeout` of pyproject.toml."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test-fast` and `make durations`."""
    parser.addoption("--fast", type=float, metavar="SECONDS", help="the functions that take least, within SECONDS")
    parser.addoption("--record-durations", action="store_true", help="write what each function takes to tests/data")


def pytest_configure(config: pytest.Config) -> None:
    """Register what these options ask for; workers of pytest-xdist choose, and leave recording to their controller."""
    if (seconds := config.getoption("--fast")) is not None:
        config.pluginmanager.register(durations.Fast(durations.read(), seconds))
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Have hypothesis write its table of characters once, before workers of xdist would write it at the same time."""
    found = yield
    if not hasattr(session.config, "workerinput"):
        charmap()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all files and make all tests without looking for garbage, and look through none of it afterwards."""
    with uncollected(forever=True):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sampled` leaves out as slow, and bound every test in time."""
    first: set[str] = set()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            function = item.nodeid.partition("[")[0]
            # By a hash, or a stride would choose the same value of one parameter each time.
            if function in first and zlib.crc32(item.nodeid.encode()) % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            first.add(function)
        for mark, seconds in LONG.items():
            if item.get_closest_marker(mark) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(autouse=True, scope="module")
def what_is_there_is_looked_through_once() -> None:
    """Keep what earlier files imported and cached out of later collections, which took up to 3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_grammar_is_refused_for_what_an_earlier_test_did() -> None:
    """Have each test start as a process does: the fourth that has an engine fail at one grammar would be refused it."""
    REFUSED.clear()


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Generator[None]:
    """Fail a test that leaves the process elsewhere or quieter: another in the same worker would fail, by chance."""
    before = Path.cwd(), _silenced()
    yield
    assert (Path.cwd(), _silenced()) == before


def _silenced() -> dict[str, int]:
    loggers = {name: item for name, item in logging.root.manager.loggerDict.items() if name.startswith("quire")}
    levels = {name: item.level for name, item in loggers.items() if isinstance(item, logging.Logger) and item.level}
    levels.pop("quire.access", None)  # it has a handler and a level of its own from its first log on
    return levels | {"disable": logging.root.manager.disable}
