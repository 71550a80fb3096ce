"""Numbers of the native kernels that suit one machine and not another. They change the speed, never a result."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from quire.core.errors import ConfigError
from quire.core.machine import cache_folder, foreign

log = logging.getLogger(__name__)

FILE = "tuning.json"
NEVER = 1 << 20
"""Rows that no step has."""


class Tuning(msgspec.Struct, frozen=True):
    """`ahead`: bytes from the weights in use to those asked for; `tile_rows`: fewest rows that tile registers take;
    `row_streams`: 1 = a single row reads one column block after the other, 4 = several at a time.
    """

    ahead: int = 8192
    tile_rows: int = 12
    row_streams: int = 1

    def __str__(self) -> str:
        return f"ahead={self.ahead},tile_rows={self.tile_rows},row_streams={self.row_streams}"


def parse(text: str) -> Tuning | None:
    """What `--tune` pins, as "ahead=1024,row_streams=4"; "off" = the defaults, "auto" = None: measure.

    Raises `ConfigError` for anything else.
    """
    if text in ("auto", "off"):
        return None if text == "auto" else Tuning()
    try:
        found = {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}
        tuning = Tuning(**found)
    except (ValueError, TypeError):
        raise ConfigError(f"--tune {text!r} is neither auto, off nor like {Tuning()}", param="tune") from None
    if not (0 <= tuning.ahead <= 1 << 20 and tuning.tile_rows >= 1 and tuning.row_streams in (1, 4)):
        raise ConfigError(
            f"--tune {text!r}: ahead must lie in 0..2^20, tile_rows be at least 1, row_streams 1 or 4", param="tune"
        )
    return tuning


def recall(key: str, folder: Path | None = None) -> Tuning | None:
    """The choice kept under `key`; None when there is none or the file cannot be read as one."""
    return _kept((folder or cache_folder()) / FILE).get(key)


def _kept(path: Path) -> dict[str, Tuning]:
    """What is kept; nothing where others may have written it."""
    try:
        if reason := foreign(path):
            log.warning("%s is not used: %s", path, reason)
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Tuning])
    except (OSError, msgspec.DecodeError):
        return {}


def keep(key: str, tuning: Tuning, folder: Path | None = None) -> None:
    """Keep the choice for the next start; a place that cannot be written costs a measurement then, and nothing else."""
    folder = folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        kept = _kept(path)
        fresh = folder / f"{FILE}.{os.getpid()}"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode({**kept, key: tuning})))
        fresh.chmod(0o600)
        fresh.replace(path)
    except OSError:
        return
