"""A model folder on disk: config files and memory-mapped safetensors. Nothing in it is ever run.

Pages of files appear when they are touched, may be asked for before, and are given back after.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from quire.core.dtypes import BF16, BOOL, F8, F16, F32, F64, I8, I16, I32, I64, U8, Dtype, is_float
from quire.core.errors import ConfigError, ModelError
from quire.core.files import why_missing
from quire.gguf.file import gguf_files, is_gguf
from quire.model.disk.foreign_folders import without_config
from quire.model.disk.hf_config import read_json
from quire.ops.arrays import AnyArray, Host
from quire.store.hub import NEWEST, Hub, download, is_hub_name
from quire.store.names import is_path_name, missing_path, stored_path, unknown_name

EMBEDDED = Path(__file__).resolve().parents[2] / "assets" / "pydoc"
DTYPES = {"F32": F32, "F16": F16, "BF16": BF16, "F64": F64, "I64": I64, "I32": I32, "I16": I16, "I8": I8, "U8": U8,
          "F8_E4M3": F8, "BOOL": BOOL}  # fmt: skip
WHOLE = "model.safetensors"
"""A model in one file: where it lies no other is read, as in transformers."""
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `file` is where it lies."""

    dtype: Dtype
    shape: tuple[int, ...]
    file: str

    @property
    def numbers(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.numbers * self.dtype.itemsize


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint on disk, or made-up numbers."""

    infos: dict[str, TensorInfo]

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`, numpy's but for sources of the workbench; the caller must not write to it."""
        ...

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`; those that are not on disk are passed over."""
        ...

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        ...


def resolve(model: str, hub: Hub = NEWEST) -> Path:
    """Where `model` lies: a folder or GGUF file, the embedded model ("" or "pydoc"), one that `quire pull` named, or a
    hub name to download. A folder without config.json that holds one GGUF file is that file."""
    path = EMBEDDED if model in ("", EMBEDDED.name) else Path(model).expanduser()
    if hub.revision is not None and path.exists():
        raise ConfigError(
            f"--revision {hub.revision}: {path} lies on this machine; only models named as on the hub have revisions",
            param="revision",
        )
    if path.is_dir():
        return _model_of(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelError(f"{path} is a file, but not GGUF; give the folder that holds config.json and *.safetensors")
    if path.is_symlink():
        raise ModelError(why_missing(path, "is missing"))
    if is_path_name(model):
        raise missing_path(model)
    if is_hub_name(model):
        return download(model, hub)
    if (stored := stored_path(model)) is None:
        raise unknown_name(model)
    if hub.revision is not None:
        raise ConfigError(
            f"--revision {hub.revision}: {model} was pulled; only models named as on the hub have revisions",
            param="revision",
        )
    return stored


def _model_of(folder: Path) -> Path:
    """The folder itself, or the GGUF file in it where it has no config.json; `ModelError` where it is open which."""
    if (folder / "config.json").is_file():
        return folder
    files = gguf_files(folder)
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{folder} holds several models; name one of them: {', '.join(map(str, files))}")
    raise ModelError(why_missing(folder / "config.json", f"is missing; {without_config(folder)}"))


class Checkpoint:
    """The safetensors of one folder. Headers are read at once, tensors are views of the mapped files."""

    def __init__(self, folder: Path, only: str = "") -> None:
        """`only`: the one file to read, instead of the model's."""
        self.folder = folder
        self.infos: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        """What was found and is ignored."""
        self._starts: dict[str, int] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._mapped: dict[str, mmap.mmap] = {}
        places = {} if only else self._places(folder / "model.safetensors.index.json")
        for file in [only] if only else self._files(places):
            self._read_header(file, places)
        for name, file in places.items():
            if name not in self.infos or self.infos[name].file != file:
                raise ModelError(
                    f"{folder / 'model.safetensors.index.json'}: weight_map: {file} does not hold tensor {name}; "
                    "download the folder again"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(i.nbytes for i in self.infos.values())

    def tensor(self, name: str) -> Host:
        """A view of the mapped file: read-only by convention, pages are loaded when touched.

        `ModelError` when the file was replaced since its header was read.
        """
        info = self.infos[name]
        if info.file not in self._mapped:
            self._mapped[info.file] = self._map(info.file)
        return view(self._mapped[info.file], info.dtype, info.shape, self._starts[name])

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for name in names:
            info, start = self.infos[name], self._starts[name]
            spans.setdefault(info.file, []).append((start, start + info.nbytes))
        for file, found in spans.items():
            read_ahead(self.folder / file, found)

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        for data in self._mapped.values():
            give_back(data)

    def _map(self, file: str) -> mmap.mmap:
        """The file as private copy-on-write pages: arrays made of it count as writable, the file never changes."""
        with (self.folder / file).open("rb") as opened:
            if _identity(os.fstat(opened.fileno())) != self._seen[file]:
                raise ModelError(f"{self.folder / file} was changed while it was read; start again")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def _places(self, index: Path) -> dict[str, str]:
        """The file of each tensor, as the index has it; none without one, or where the model is whole in one file."""
        if not index.is_file():
            return {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ModelError(f"{index}: weight_map: needs an object of tensor name -> file name")
        files = sorted(set(weight_map.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelError(f"{index}: weight_map: {file!r} is not the name of a safetensors file in this folder")
        if WHOLE not in files and (self.folder / WHOLE).is_file():
            self.notes.append(f"{WHOLE} is read; {index.name} beside it, which names {_some(files)}, is ignored")
            return {}
        return weight_map

    def _files(self, places: dict[str, str]) -> list[str]:
        if places:
            return sorted(set(places.values()))
        if (self.folder / WHOLE).is_file():
            return [WHOLE]
        files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not files:
            pickled = next((p.name for pattern in PICKLED for p in self.folder.glob(pattern)), None)
            raise ModelError(_pickle_message(self.folder, pickled) if pickled else
                             f"{self.folder} has no *.safetensors file; download the model's")  # fmt: skip
        return files

    def _read_header(self, file: str, indexed: dict[str, str]) -> None:
        """Take the tensors of a file, but those that the index has in another."""
        path = self.folder / file
        if not path.is_file():
            raise ModelError(why_missing(path, "is missing, the index names it; finish the download"))
        with path.open("rb") as raw:
            opened = _opened(path, "numpy")  # as "pt" would import torch
            self._seen[file] = _identity(os.fstat(raw.fileno()))
            length = int.from_bytes(raw.read(8), "little")
            places = json.loads(raw.read(length))
        elsewhere = {name for name in places if indexed.get(name, file) != file}
        if elsewhere:
            self.notes.append(f"{file}: {_some(list(elsewhere))} are ignored: the index has them in other files")
        for name in opened.keys():  # noqa: SIM118
            if name in elsewhere:
                continue
            part = opened.get_slice(name)
            code = part.get_dtype()
            if name in self.infos:
                raise ModelError(f"{path}: tensor {name} is also in {self.infos[name].file}; remove one of the files")
            if code not in DTYPES:
                raise ModelError(
                    f"{path}: tensor {name} has dtype {code}, which cannot be read; known: {', '.join(DTYPES)}"
                )
            self.infos[name] = TensorInfo(DTYPES[code], tuple(part.get_shape()), file)
            self._starts[name] = 8 + length + places[name]["data_offsets"][0]


def _some(names: list[str]) -> str:
    """The first of `names`, and how many more there are."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from one that took its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _opened(path: Path, framework: str) -> Any:
    """The file, its header checked against its size."""
    try:
        return safe_open(path, framework=framework)
    except OSError as error:
        raise ModelError(f"{path} cannot be opened ({error})") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or not a safetensors file ({error}); download it again") from None


def _pickle_message(folder: Path, file: str) -> str:
    return (
        f"{folder} has only pickled weights ({file}), which can run code when read. Convert them where you trust them "
        "with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
    )


def float_dtype(infos: dict[str, TensorInfo]) -> Dtype:
    """The dtype in which most of the floating-point numbers of a checkpoint are kept."""
    sizes: Counter[Dtype] = Counter()
    for info in infos.values():
        if is_float(info.dtype):
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else BF16


STEP = 256 << 10
"""Bytes asked for at a time: of a larger piece Linux reads only the beginning."""


def view(data: mmap.mmap, dtype: Dtype, shape: tuple[int, ...], start: int) -> Host:
    """The numbers from byte `start` on, where they lie."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, start).reshape(shape)


def read_ahead(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Let the system read bytes `start` to `stop` of each span into its cache; takes no memory of ours."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with path.open("rb") as file:
        for start, stop in _joined(spans):
            for at in range(start, stop, STEP):
                os.posix_fadvise(file.fileno(), at, min(STEP, stop - at), os.POSIX_FADV_WILLNEED)


def give_back(data: mmap.mmap) -> None:
    """Drop the mapped pages, which stay in the system's cache. Nothing may have been written to them."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


def read_scattered(array: Host) -> None:
    """Tell the system that rows of `array`, a view of a mapped file, are read here and there: it then reads none that
    nobody asked for. Nothing where it cannot be told."""
    advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_RANDOM") else None
    if advise is not None and array.nbytes:
        page, start = mmap.PAGESIZE, array.ctypes.data
        first = start // page * page
        advise(ctypes.c_void_p(first), ctypes.c_size_t(start + array.nbytes - first), mmap.MADV_RANDOM)


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans in the file's order, neighbours as one."""
    begin = end = 0
    for start, stop in sorted(spans):
        if start > end:
            yield begin, end
            begin = start
        end = max(end, stop)
    yield begin, end
