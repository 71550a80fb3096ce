"""The work folder of a pipeline: killed anywhere, it goes on to the same bits; what does not fit is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from killed_work import KEY, LAYERS, STAGES, pipeline
from paths import SUPPORT
from quire.compress.tracking.journal import WorkFolder, code_digest, file_digest, work_folder
from quire.core.errors import ConfigError
from quire.core.files import becoming, write_whole


def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    script = SUPPORT / "killed_work.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5 * STAGES * LAYERS, "each unit is several writes"
    wanted = (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    ends = sorted(tmp_path.iterdir())
    assert len(ends) == int(done.stdout) + 6
    for out in ends:
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        assert (out / "model.safetensors").read_bytes() == wanted, out


def unit() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3).T, "codes": torch.arange(4, dtype=torch.uint8)}


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", KEY) as work:
        work.save(0, "a/../b", unit(), {"loss": 0.1})
        work.save(0, "empty", {})
        work.save(1, "a/../b", {"w": torch.tensor([float("nan"), 1.0])})
    with WorkFolder(tmp_path / "out", KEY) as work:
        assert all(torch.equal(t, unit()[name]) for name, t in work.tensors(0, "a/../b").items())
        assert work.facts(0, "a/../b") == {"loss": 0.1} and work.tensors(0, "empty") == {}
        assert work.tensors(1, "a/../b")["w"].isnan().tolist() == [True, False]
        assert work.done(0, "empty") and not work.done(1, "empty") and not work.finished
        size = sum(path.stat().st_size for path in work.folder.iterdir())
        work.drop(0)
        assert work.done(0, "a/../b") and work.tensors(0, "a/../b") == {}
        assert sum(path.stat().st_size for path in work.folder.iterdir()) < size


def test_another_run_is_refused_or_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with WorkFolder(out, KEY) as work:
        work.save(0, "a", unit())
        with pytest.raises(ConfigError, match=r"out.partial: another run is at work there"):
            WorkFolder(out, KEY)
    with pytest.raises(ConfigError, match="is of a run with another recipe; give what that had, begin anew"):
        WorkFolder(out, KEY | {"recipe": "other"})
    with pytest.raises(ConfigError, match="with another source and another calibration; "):
        WorkFolder(out, KEY | {"source": "other", "calibration": "more"})
    with WorkFolder(out, KEY) as work:
        assert work.done(0, "a"), "a refusal leaves what was done"
    with WorkFolder(out, KEY | {"recipe": "other"}, restart=True) as work:
        assert not work.done(0, "a") and [p.name for p in work.folder.iterdir()] == ["journal.jsonl"]


def test_a_result_is_never_written_over(tmp_path: Path) -> None:
    pipeline(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for restart in (False, True):
        with pytest.raises(ConfigError, match="out exists already; remove it, or take another OUT"):
            WorkFolder(tmp_path / "out", KEY, restart)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_damage_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with WorkFolder(out, KEY) as work:
        work.save(0, "a", unit())
        work.save(0, "b", unit())
        journal = work.folder / "journal.jsonl"
        file = work.folder / json.loads(journal.read_text().splitlines()[1])["file"]
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-5])
    with WorkFolder(out, KEY) as work:
        assert work.done(0, "a") and not work.done(0, "b"), "a line that was cut off is no line"
        work.save(0, "c", {})
    with WorkFolder(out, KEY) as work:
        assert work.done(0, "c")
        file.write_bytes(file.read_bytes()[:-1] + b"\x99")
        with pytest.raises(ConfigError, match=r"unit-0-\w+.safetensors is not as it was written; begin anew"):
            work.tensors(0, "a")
        file.unlink()
        with pytest.raises(ConfigError, match="No such file"):
            work.tensors(0, "a")
    for bad in (b"", b"[]\n", whole.replace(b'"stage":0', b'"stage":"x"')):
        journal.write_bytes(bad)
        with pytest.raises(ConfigError, match="is damaged"):
            WorkFolder(out, KEY)


@contextmanager
def little_space(limit: int) -> Iterator[None]:
    """Files may have `limit` bytes: writing more is refused by the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_leaves_nothing_half(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with WorkFolder(out, KEY) as work:
        work.save(0, "a", unit())
        before = sorted(path.name for path in work.folder.iterdir())
        with little_space(8192), pytest.raises(ConfigError, match="File too large") as found:
            work.save(0, "b", {"w": torch.zeros(10000)})
        assert "\n" not in str(found.value)
        assert not work.done(0, "b") and sorted(path.name for path in work.folder.iterdir()) == before

        def write(folder: Path) -> None:
            (folder / "big").write_bytes(bytes(10000))

        with little_space(8192), pytest.raises(ConfigError, match="File too large"):
            work.finish(write)
        assert not out.exists() and not work.finished
        with little_space((work.folder / "journal.jsonl").stat().st_size + 9), pytest.raises(ConfigError):
            work.save(0, "c", {})
        work.save(0, "d", {})
    with WorkFolder(out, KEY) as work:
        assert not work.done(0, "c") and work.done(0, "d"), "half a line was taken back"
        work.finish(write)
    assert (out / "big").stat().st_size == 10000 and not work.folder.exists()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        WorkFolder(tmp_path / "file" / "out", KEY)


def test_a_failure_before_anything_was_done_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), WorkFolder(tmp_path / "out", KEY):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_what_another_command_keeps_is_left_alone(tmp_path: Path) -> None:
    work = work_folder(tmp_path / "out")
    work.mkdir()
    (work / "state.safetensors").write_text("of a training")
    with pytest.raises(ConfigError, match=r"out\.partial is of another command's run"):
        WorkFolder(tmp_path / "out", KEY)
    assert (work / "state.safetensors").exists()
    with WorkFolder(tmp_path / "out", KEY, restart=True):
        assert not (work / "state.safetensors").exists()


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"one")
    with pytest.raises(KeyboardInterrupt), becoming(tmp_path / "a") as part:
        part.write_bytes(b"tw")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_bytes() == b"one" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_digests(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"one")
    first = file_digest(tmp_path / "a")
    write_whole(tmp_path / "a", b"two")
    assert file_digest(tmp_path / "a") != first and [p.name for p in tmp_path.iterdir()] == ["a"]
    assert code_digest() == code_digest() and len(code_digest()) == 32
