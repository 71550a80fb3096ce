"""The work folder of a pipeline, OUT.partial: what is done stays done, whenever the process ends.

    journal.jsonl   digests of recipe, source and code, without all of which a run does not go on; then a line for each
                    finished unit, appended when its file is on the disk
    unit-*          the tensors of a unit (a stage's work on one layer, say)
    made            the folder of the result, until it is whole and gets its name

A file has its name only once all of it is on the disk, so a reader never sees half of one; what the journal does not
name is not there. At the end `made` becomes OUT in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from quire.core.errors import ConfigError
from quire.core.files import becoming, sync, sync_tree, write_whole

if TYPE_CHECKING:
    from torch import Tensor

Facts = dict[str, Any]
JOURNAL = "journal.jsonl"


class Unit(msgspec.Struct, frozen=True):
    """A line of the journal. `file` holds its tensors, "" = none; `digest`: of the file's bytes."""

    stage: int
    name: str
    file: str
    digest: str
    facts: Facts


def work_folder(out: Path) -> Path:
    """Return the work folder of a run that is to become `out`: beside it, so that one step makes it `out`."""
    out = out.absolute()
    return out.parent / f"{out.name}.partial"


class WorkFolder:
    """A run towards the folder `out`, as a context: one at a time.

    `key`: digests by what they are of, whatever else must be the same for a run to go on. `restart`: begin anew where
    there was another run. `ConfigError` where `out` is there already, or another run is at work.
    """

    def __init__(self, out: Path, key: Mapping[str, str], restart: bool = False) -> None:
        self.out, self.folder = out, work_folder(out)
        self._journal, self._units = self.folder / JOURNAL, dict[tuple[int, str], Unit]()
        self.made = self.folder / "made"
        with _as_config_error(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._open(key, restart)
        except BaseException:
            self.close()
            raise

    def _open(self, key: Mapping[str, str], restart: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.folder}: another run is at work there; wait, or take another OUT") from None
        there = self._journal.exists()
        if not there and not restart and any(path.name != f"{JOURNAL}.tmp" for path in self.folder.iterdir()):
            raise ConfigError(f"{self.folder} is of another command's run; remove it, or take another OUT")
        if there and not restart:
            self._check_key(key, self._read())
        # Else the last run ended between the result's name and the end of its work folder.
        if self.out.exists() and not (self.finished and not self.made.exists()):
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
            raise ConfigError(f"{self.out} exists already; remove it, or take another OUT")
        if restart or not there:
            self._clear()
            with _as_config_error(self.folder):
                write_whole(self._journal, msgspec.json.encode(dict(key), order="sorted") + b"\n")

    def _check_key(self, key: Mapping[str, str], before: Mapping[str, str]) -> None:
        other = [name for name in {**before, **key} if before.get(name) != key.get(name)]
        if other:
            raise ConfigError(
                f"{self.folder} is of a run with another {' and another '.join(other)}; give what that had, begin anew "
                "with --restart, or take another OUT"
            )

    def _read(self) -> dict[str, str]:
        """Read the key of the journal's run, and its units. A last line that was cut off is no line."""
        data = self._journal.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        decode = msgspec.json.Decoder(Unit).decode
        try:
            first, *lines = whole.splitlines()
            key = msgspec.json.decode(first, type=dict[str, str])
            units = [decode(line) for line in lines]
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"{self._journal}: is damaged: {error}; begin anew with --restart") from None
        self._units = {(unit.stage, unit.name): unit for unit in units}
        if len(whole) < len(data):
            os.truncate(self._journal, len(whole))
        return key

    @property
    def finished(self) -> bool:
        """Whether the result is whole."""
        return (-1, "made") in self._units

    def done(self, stage: int, name: str) -> bool:
        """Whether a unit is done."""
        return (stage, name) in self._units

    def save(self, stage: int, name: str, tensors: Mapping[str, Tensor], facts: Facts | None = None) -> None:
        """Save a unit, which is done then: `tensors` of any shapes and dtypes, on the CPU, and `facts` (JSON) are on
        the disk.

        `ConfigError` where they cannot be written, as on a full disk; nothing of the unit is there then.
        """
        file, digest = "", ""
        with _as_config_error(self.folder):
            if tensors:
                from safetensors.torch import save_file

                safe = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
                path = self.folder / f"unit-{stage}-{safe}.safetensors"
                with becoming(path) as part:
                    save_file({key: value.contiguous() for key, value in tensors.items()}, part)
                    digest = file_digest(part)
                file = path.name
            self._append(Unit(stage, name, file, digest, facts or {}))

    def tensors(self, stage: int, name: str) -> dict[str, Tensor]:
        """Load the tensors of a unit, bit for bit. `ConfigError` where its file was changed since."""
        from safetensors.torch import load_file

        unit = self._units[stage, name]
        if not unit.file:
            return {}
        path = self.folder / unit.file
        with _as_config_error(path):
            if file_digest(path) != unit.digest:
                raise ConfigError(f"{path} is not as it was written; begin anew with --restart")
            found: dict[str, Tensor] = load_file(path)
        return found

    def facts(self, stage: int, name: str) -> Facts:
        """Return the facts that were saved with a unit."""
        return self._units[stage, name].facts

    def drop(self, stage: int) -> None:
        """Remove the tensors of a stage, which are needed no more: its units stay done, their files go."""
        for unit in list(self._units.values()):
            if unit.stage == stage and unit.file:
                # The journal first: a unit without its file must never be one that has it.
                self._append(msgspec.structs.replace(unit, file="", digest=""))
                (self.folder / unit.file).unlink(missing_ok=True)

    def finish(self, write: Callable[[Path], None]) -> None:
        """Make the result by `write(folder)` in an empty folder, which then becomes OUT; the work folder goes."""
        with _as_config_error(self.out):
            if not self.finished:
                shutil.rmtree(self.made, ignore_errors=True)
                self.made.mkdir()
                write(self.made)
                sync_tree(self.made)
                self._append(Unit(-1, "made", "", "", {}))
            if self.made.exists():
                self.made.rename(self.out)
                sync(self.out.parent)
            self._clear()
            self.folder.rmdir()

    def close(self) -> None:
        """Release the folder for another run."""
        os.close(self._lock)

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not self._units:  # there is nothing that another run could go on with
            with suppress(OSError):
                self._clear()
                self.folder.rmdir()
        self.close()

    def _append(self, unit: Unit) -> None:
        size = self._journal.stat().st_size
        try:
            with self._journal.open("ab") as file:
                file.write(msgspec.json.encode(unit) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._journal, size)  # half a line would spoil the next
            raise
        self._units[unit.stage, unit.name] = unit

    def _clear(self) -> None:
        """Remove all of the folder. The journal goes last: what has none is of no run."""
        self._units.clear()
        for path in sorted(self.folder.iterdir(), key=self._journal.__eq__):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    """Raise errors of the system as `ConfigError`, in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{getattr(error, 'filename', None) or path}: {reason}") from None


def file_digest(path: Path) -> str:
    """Compute the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@cache
def code_digest() -> str:
    """Compute the digest of quire's own sources and kernels: other code may have other bits."""
    root = Path(__file__).parents[2]
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(p for suffix in ("py", "so") for p in root.rglob(f"*.{suffix}")):
        found.update(f"{path.relative_to(root)}\n{file_digest(path)}\n".encode())
    return found.hexdigest()
