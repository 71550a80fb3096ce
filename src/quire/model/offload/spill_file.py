"""The file that weights are read from while steps run: without a name, so that nothing of it outlives the process."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from quire.core.errors import ConfigError
from quire.model.offload.offloaded import PAGE, pages
from quire.model.offload.stream import Segment, turns
from quire.ops.arrays import Host
from quire.ops.backend import Ops

log = logging.getLogger(__name__)


class SpillFile:
    """Grows by whole pages. `cached`: it cannot be read past the system's cache (a file system in memory)."""

    def __init__(self, ops: Ops, folder: Path) -> None:
        self.folder, self.size, self._ops = folder, 0, ops
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".weights.", dir=folder)
        except OSError as error:
            raise self._refusal(error) from None
        self.file, self.cached = handle, True
        try:
            if hasattr(os, "O_DIRECT"):
                self.file, self.cached = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), False
                os.close(handle)
        except OSError:
            log.warning("%s takes no direct reads: weights go through the system's cache there", folder)
        finally:
            Path(name).unlink()
        self._stage = pages(PAGE)
        self.close = weakref.finalize(self, os.close, self.file)  # gives its disk back

    def put(self, size: int, fill: Callable[[Host], None]) -> int:
        """Write what `fill` puts into `size` bytes (uint8, whole pages); where it begins in the file."""
        assert size % PAGE == 0
        if len(self._stage) < size:
            self._stage = pages(size)
        fill(self._stage[:size])
        begin, view = self.size, self._stage[:size].data
        at = 0
        try:
            while at < size:
                at += os.pwrite(self.file, view[at:], begin + at)
            if self.cached and hasattr(os, "posix_fadvise"):
                os.fsync(self.file)
                os.posix_fadvise(self.file, begin, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._refusal(error) from None
        self.size += size
        return begin

    def get(self, begin: int, size: int) -> Host:
        """The `size` bytes that `put` wrote there, in memory of their own."""
        data = pages(size)
        stream = turns(self._ops, [data], [Segment(0, self.file, begin, size, 0)], 1, self.cached)
        stream.call("stream_wait", 0)
        stream.close()
        return data

    def written(self) -> None:
        """Nothing more is to be put there."""
        self._stage = pages(PAGE)

    def _refusal(self, error: OSError) -> ConfigError:
        try:
            left = f"; {shutil.disk_usage(self.folder).free:,} bytes are free there"
        except OSError:
            left = ""
        return ConfigError(
            f"--weight-offload: weights cannot be written to {self.folder}: {error.strerror or error}{left}; choose "
            "another folder with --weight-offload-folder",
            param="weight_offload_folder",
        )
