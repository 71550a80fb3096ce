"""Files of caches that others may have written are not read: packed weights, tuning, calibration, stored blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cache.store_folder import StoreFolder
from quire.core.errors import ConfigError
from quire.core.machine import foreign
from quire.ops import tuning
from quire.ops.tuning import Tuning
from quire.plan import rates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir(mode=0o700)
    return tmp_path / "own"


def of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    stat = Path.stat

    def strange(self: Path, **more: Any) -> Any:
        found = stat(self, **more)
        return type(found)((*found[:4], 54321, *found[5:]))

    monkeypatch.setattr(Path, "stat", strange)


def test_who_may_write_what_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a"
    path.write_bytes(b"")
    for mode, own in ((0o600, True), (0o644, True), (0o664, False), (0o646, False), (0o666, False)):
        path.chmod(mode)
        assert (foreign(path) == "") == own, oct(mode)
    path.chmod(0o600)
    for mode, own in ((0o755, True), (0o775, True), (0o777, False), (0o1777, True)):
        folder.chmod(mode)
        assert (foreign(path) == "") == own, oct(mode)
    folder.chmod(0o700)
    of_another(monkeypatch)
    assert "belongs to another user" in foreign(path)


def spoil(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "writable":
        path.chmod(0o666)
    else:
        of_another(monkeypatch)


@pytest.mark.parametrize("kind", ["writable", "another's"])
def test_tuning_of_others_is_measured_anew(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Tuning(ahead=1, tile_rows=3)
    tuning.keep("key", kept, folder)
    assert tuning.recall("key", folder) == kept
    with monkeypatch.context() as patch:
        spoil(kind, folder / tuning.FILE, patch)
        assert tuning.recall("key", folder) is None
    tuning.keep("other", kept, folder)
    assert foreign(folder / tuning.FILE) == "" and tuning.recall("other", folder) == kept


def test_a_calibration_of_others_is_made_anew(folder: Path) -> None:
    (folder / rates.FILE).write_bytes(b"{}")
    (folder / rates.FILE).chmod(0o666)
    read: list[Path] = []
    before: Callable[[Path], bytes] = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: (read.append(self), before(self))[1])
        assert rates.recall("key", folder) is None
    assert not read


def test_a_store_of_others_is_refused(folder: Path) -> None:
    StoreFolder(folder / "store", "facts")
    (folder / "store" / "secret").chmod(0o666)
    with pytest.raises(ConfigError, match=r"--kv-store.*secret can be read by others"):
        StoreFolder(folder / "store", "facts")
    (folder / "store" / "secret").chmod(0o600)
    home = StoreFolder(folder / "store", "facts").home
    home.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write .*chmod go-w"):
        StoreFolder(folder / "store", "facts")
