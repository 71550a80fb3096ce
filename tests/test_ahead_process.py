"""Processes that are started before it is known what they are told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.parallel import prestart

ECHO = "import sys; print(sys.stdin.readline(), end='', file=sys.stderr)"


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module whose process tells what it was told."""
    (tmp_path / "told_back.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "told_back"
    prestart.drop_waiting()


def test_the_first_that_asks_gets_what_was_started_ahead(echo: str) -> None:
    prestart.start_ahead(echo)
    waiting = prestart._waiting[echo]
    first, second = prestart.started(echo), prestart.started(echo)
    assert first is waiting and second is not waiting
    for process in (first, second):  # told by whoever asked
        process.communicate(b"\n", timeout=30)
        assert process.returncode == 0


@pytest.mark.parametrize("files", [(), (0,)])
def test_who_asks_for_another_leaves_none_waiting(files: tuple[int, ...], echo: str) -> None:
    prestart.start_ahead(echo)
    waiting = prestart._waiting[echo]
    other = prestart.started(echo if files else "this", files)
    assert other is not waiting and waiting.returncode is not None and not prestart._waiting
    other.communicate(b"\n", timeout=30)


def test_one_that_has_ended_is_no_use(echo: str) -> None:
    prestart.start_ahead(echo)
    waiting = prestart._waiting[echo]
    waiting.kill()
    waiting.wait()
    found = prestart.started(echo)
    assert found is not waiting
    found.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--no-such-flag"], 2), (["--port", "99999"], 2)])
def test_a_server_that_does_not_start_leaves_no_process(words: list[str], code: int) -> None:
    """Its standard error would stay open in one that is left: `run` would wait for its end."""
    found = subprocess.run([sys.executable, "-m", "quire", "serve", *words], capture_output=True, timeout=30)
    assert found.returncode == code, found.stderr
