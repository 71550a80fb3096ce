"""Writes a packed cache behind the running engine: matrices lie in memory, nobody waits for their file."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread, get_native_id

from quire.model.load.packed_file import Entry, Writer
from quire.model.load.placement import Unplaced
from quire.ops.arrays import AnyArray
from quire.ops.weights import Packed, PackedForm, labelled

log = logging.getLogger(__name__)
CALM_SECONDS = 3.0
"""After a load, for the warm-up and the first answer."""
PAUSE = 0.02
"""Seconds after each piece: at most 200 MB/s, so the steps beside it keep the memory's bandwidth."""
FINISH_SECONDS = 2.0
"""That the end of a process waits at most for a file, which takes a second per GB when nothing else runs."""


@dataclass(frozen=True)
class WrittenMatrix:
    """A packed matrix and its bias f32: [n], or of experts below each other without what pads their rows."""

    packed: Packed
    bias: Unplaced | None
    form: PackedForm

    @property
    def label(self) -> str:
        """Kind, group and wide activations for reports, as `QWeight.label`."""
        if self.packed.kind == "bf12":
            return labelled("bf16", self.packed)
        kind = self.packed.kind.removeprefix("sparse_").removeprefix("sparse24_")
        wide = " a16" if self.form.describe(self.packed)[0].activation_bits != 8 and self.packed.group else ""
        return labelled(f"{kind} g{self.packed.group}{wide}" if self.packed.group else kind, self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def described(self) -> tuple[Entry, dict[str, AnyArray]]:
        """Entry of the matrix in an index, without places, and its parts."""
        facts, parts = self.form.describe(self.packed)
        entry = Entry(**facts._asdict(), parts={})
        return entry, {**parts} if self.bias is None else {**parts, "bias": self.bias}


class _GivenUp(Exception):
    """The rest is not to be written."""


class Writing:
    """A file that a thread of low priority writes, in pieces with pauses, from matrices that nobody changes.

    A process that ends meanwhile, or a model that is closed, has the rest written without pauses for `FINISH_SECONDS`;
    what is not whole by then is removed. One that is killed leaves a file that `remove_leftovers` finds.
    """

    def __init__(self, path: Path, source: str, matrices: Mapping[str, WrittenMatrix]) -> None:
        self._path, self._source, self._matrices = path, source, dict(matrices)
        self._hurry, self._given_up = Event(), False
        self._writer: Writer | None = None
        self._thread = Thread(target=self._run, name="packed cache", daemon=True)
        _LIVE.add(self)
        self._thread.start()

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Write the rest at once, for `seconds` at most; give up what then is lacking. May be called again."""
        self._hurry.set()
        with suppress(KeyboardInterrupt):  # whoever wants the end shall not wait
            self._thread.join(seconds)
        self._given_up = True
        if self._thread.is_alive() and self._writer is not None:
            self._writer.remove()

    def _between(self) -> None:
        """After each piece."""
        self._hurry.wait(PAUSE)
        if self._given_up:
            raise _GivenUp

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
        self._hurry.wait(CALM_SECONDS)
        size = sum(kept.nbytes for kept in self._matrices.values())
        try:
            self._writer = Writer(self._path, self._source, len(self._matrices), size, self._between)
            for name, kept in self._matrices.items():
                self._writer.add(name, *kept.described())
            self._writer.finish()
        except (_GivenUp, OSError) as error:
            if self._writer is not None:
                self._writer.abandon()
            if isinstance(error, OSError) and not self._given_up:
                log.warning(
                    "packed weights were not kept: %s: %s; serving goes on. Free %s bytes there or choose another "
                    "folder with --cache-packed",
                    self._path,
                    error.strerror or error,
                    f"{size:,}",
                )
        else:
            log.info("packed weights are kept in %s", self._path)
        self._matrices.clear()  # a model that was closed meanwhile is freed
        _LIVE.discard(self)


_LIVE: set[Writing] = set()


@atexit.register
def finish_all() -> None:
    """Finish what this process still writes: before its end."""
    for writing in list(_LIVE):
        writing.finish()
