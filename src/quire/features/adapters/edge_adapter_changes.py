"""Adapters that come and go between steps, while requests that use others run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from quire.core.errors import ConfigError, QuireError
from quire.core.files import read_json
from quire.engine.client import AdapterChanged, ChangeAdapter
from quire.features.adapters.plan_adapters import requests_with
from quire.run.executor import Executor
from quire.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


class AdapterChanger:
    """Changes the adapters that `executor` has room for, if it has any, and counts what a name has been.

    `know`: tells a store of blocks an adapter's name, its folder and when its files were first read (seconds of the
    epoch); blocks are kept by what is in adapters' files, not by their names.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, know: Callable[[str, Path, float], None] | None
    ) -> None:
        self._executor, self._scheduler, self._know = executor, scheduler, know
        self._room = executor.model.adapters
        self._unloads: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded ones."""
        return tuple(self._room.names) if self._room is not None else ()

    def load(self, name: str, folder: str) -> None:
        """Load the adapter in `folder`; `ConfigError` or `ModelError` when it cannot be."""
        if self._room is None:
            raise ConfigError("there is no room for LoRA adapters: set enable_lora", param="enable_lora")
        fresh, begin, path = name not in self.names, time.time(), Path(folder).expanduser()
        self._executor.change_adapter(name, folder)
        if fresh and self._know is not None:
            self._know(name, path, begin)

    def change(self, change: ChangeAdapter) -> AdapterChanged:
        """Load, replace or unload one; what a request still uses stays. It never raises."""
        error = ""
        try:
            if change.folder and change.name in self.names:
                self._replace(change.name, change.folder)
            elif change.folder:
                self.load(change.name, change.folder)
            else:
                self._unload(change.name)
        except QuireError as failure:
            error = _told(change.folder, failure.message) if change.folder else failure.message
        except Exception as failure:  # whatever lies in that folder, the requests of others go on
            told = f"{change.folder}: cannot be read as an adapter: {type(failure).__name__}: {failure}"
            error = _told(change.folder, told)
        return AdapterChanged(change.name, self.names, error)

    def times(self, name: str) -> int:
        """How often the name was another adapter, whose keys and values must not be found."""
        return self._unloads.get(name, 0)

    def _unload(self, name: str) -> None:
        if self._room is None:
            raise ConfigError("there are no LoRA adapters: set enable_lora", param="enable_lora")
        self._check_unused(name)
        self._executor.change_adapter(name, "")
        self._unloads[name] = self.times(name) + 1

    def _replace(self, name: str, folder: str) -> None:
        self._check_unused(name)
        begin, path = time.time(), Path(folder).expanduser()
        self._executor.change_adapter(name, folder, replaces=True)
        if self._know is not None:
            self._know(name, path, begin)
        self._unloads[name] = self.times(name) + 1

    def _check_unused(self, name: str) -> None:
        using = requests_with(name, self._scheduler.requests.values())
        if using:
            raise ConfigError(f"adapter {name!r} is used by {using} requests; try again when they have ended")


def _told(folder: str, reason: str) -> str:
    """What a client is told of a failure: of a folder that holds no adapter nothing, whether or not it is there.

    Else whoever may load adapters could ask for every path of this machine.
    """
    try:
        found = read_json(Path(folder).expanduser() / "adapter_config.json")
    except (QuireError, OSError, RuntimeError, ValueError):
        found = {}
    if found:
        return reason
    log.warning("no adapter was loaded: %s", reason)
    return f"{folder}: no adapter can be read there; the log of the server says why"
