"""Progress of long work: bars on a terminal, lines elsewhere, nothing where it is silenced."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from quire.core import progress
from quire.core.progress import Display, counting_bar, loading_bar, named_stages, silenced, stage


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> tuple[Display, io.StringIO, Callable[[float], None]]:
    """The display of a process whose standard error is a file, that file, and what moves its clock."""
    now, log = [0.0], io.StringIO()
    shown = Display(log, terminal=False, clock=lambda: now[0])
    shown._ended.set()  # lines come by the clock above alone
    monkeypatch.setattr(progress, "_display", shown)

    def wait(seconds: float) -> None:
        now[0] += seconds

    return shown, log, wait


def test_a_log_gets_a_line_now_and_then(piped: tuple[Display, io.StringIO, Callable[[float], None]]) -> None:
    _, log, wait = piped
    with stage("compress", 10, done=2) as at:
        for seconds, following in ((7, "layer 4"), (7, "layer 5"), (2, "layer 6"), (12, "layer 7")):
            wait(seconds)
            at.advance(note=following)
    assert log.getvalue().splitlines() == [
        "compress 4 of 10 (40%), layer 5; 0:00:14 so far, about 0:00:42 left",
        "compress 6 of 10 (60%), layer 7; 0:00:28 so far, about 0:00:28 left",
        "compress done in 0:00:28",
    ]


def test_work_that_reports_nothing_itself_speaks_too(
    piped: tuple[Display, io.StringIO, Callable[[float], None]],
) -> None:
    shown, log, wait = piped
    with stage("tune"), stage("run 3"):
        wait(11)
        shown.tell()
        with stage("batches", 4) as inner:
            wait(20)
            inner.advance(2)
    assert log.getvalue().splitlines()[:2] == [
        "tune; run 3; 0:00:11 so far",
        "tune; run 3; batches 2 of 4 (50%); 0:00:31 so far, about 0:00:20 left for batches",
    ]


def test_short_work_leaves_no_line(piped: tuple[Display, io.StringIO, Callable[[float], None]]) -> None:
    _, log, wait = piped
    with counting_bar(3, "windows") as count:
        for _ in range(3):
            wait(2)
            count()
    assert not log.getvalue()


def test_loading_says_bytes_and_rate(piped: tuple[Display, io.StringIO, Callable[[float], None]]) -> None:
    _, log, wait = piped
    with loading_bar() as loaded:
        wait(10)
        loaded(2_500_000_000, 10_000_000_000, "layer 3")
    assert log.getvalue().splitlines()[0] == (
        "loading model 2.5 GB of 10.0 GB, 250.0 MB/s (25%), layer 3; 0:00:10 so far, about 0:00:30 left"
    )


def test_named_stages_follow_each_other(piped: tuple[Display, io.StringIO, Callable[[float], None]]) -> None:
    shown, log, wait = piped
    with stage("train"), named_stages() as tell:
        tell("texts of the teacher", 1, 4)
        assert [each.what for each in shown.stages] == ["train", "texts of the teacher"]
        wait(12)
        tell("rows of the teacher", 3, 6)
        assert [each.what for each in shown.stages] == ["train", "rows of the teacher"]
    assert not shown.stages and "texts of the teacher done in 0:00:12" in log.getvalue()


def test_a_terminal_gets_bars_and_lines_that_stay() -> None:
    shown = io.StringIO()
    display = Display(shown, terminal=True)
    outer = display.open("compress", 4)
    inner = display.open("calibration text", 8)
    inner.advance(2, note="row 3")
    outer.say("a line that stays [not markup]")
    assert display._bars is not None
    display._bars.refresh()
    display.close(inner)
    display.close(outer)
    told = shown.getvalue()
    assert "calibration text" in told and "2 of 8 row 3" in told and "25%" in told and "left" in told
    assert "a line that stays [not markup]" in told


def test_no_time_is_left_where_nobody_knows_how_much_there_is() -> None:
    shown, now = io.StringIO(), 0.0
    display = Display(shown, terminal=True, clock=lambda: now)
    loading = display.open("loading model")
    now = 3.0
    loading.update(1)
    assert display._bars is not None
    display._bars.refresh()
    assert "loading model" in shown.getvalue() and "left" not in shown.getvalue()
    loading.update(1, 4)
    display._bars.refresh()
    assert "about 0:00:09 left" in shown.getvalue()
    display.close(loading)


def test_silenced_work_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with silenced(), stage("suite", 2) as at:
        at.say("a row")
        at.advance()
        with stage("inner") as inner:
            inner.update(1, 2, "note")
    with stage("hidden", show=False) as hidden:
        hidden.say("a row")
    assert capfd.readouterr() == ("", "")
    assert progress._display is None


def test_stages_of_threads_may_end_in_any_order(
    piped: tuple[Display, io.StringIO, Callable[[float], None]],
) -> None:
    shown, _, _ = piped
    one, two = shown.open("one"), shown.open("two")
    shown.close(one)
    assert shown.line().startswith("two;")
    shown.close(two)
