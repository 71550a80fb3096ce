"""Rows of what a search measured: each run is on the disk before the next begins; a later search goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.core.errors import ConfigError
from quire.figures.files import Appending, read_rows, write_rows
from quire.figures.machine import now, this_engine, this_machine
from quire.figures.metric_definitions import METRICS
from quire.figures.schema import FigureRow, RowLoad, RowModel
from quire.figures.statistics import interval, median
from quire.plan.planned_load import PlannedLoad
from quire.tune.search import CandidateTrial
from quire.tune.space import Candidate, Value

BENCHMARK = "tune"


def shown(value: Value) -> str | int | float | bool:
    """A value as rows and tables have it."""
    if value is None:
        return "none"
    if isinstance(value, str) and value.startswith("{"):
        asked = msgspec.json.decode(value)
        return str(asked["method"]) if set(asked) == {"method"} else value
    return value


class Journal:
    """The rows of one model under one load. A row holds all runs of a candidate: of rows with one key the last counts.

    `known`: runs there are, by key. Rows of another version of quire, machine, load or model are left alone.
    """

    def __init__(self, path: Path, model: RowModel, load: PlannedLoad, command: str, limits: dict[str, float]) -> None:
        """`command`: of the search; `limits`: of the machine."""
        self.path, self._model, self._load, self._command = path, model, load, command
        self._machine, self._engine = this_machine(limits), this_engine()
        self._file = Appending(path)
        rows = read_rows(path) if path.exists() else []
        self._runs = {row.key: _runs(row) for row in rows if row.engine.version == self._engine.version}

    def known(self, candidate: Candidate) -> list[dict[str, float]]:
        """Runs of a candidate in of an earlier search."""
        return self._runs.get(self._row(candidate, []).key, [])

    def add(self, trial: CandidateTrial) -> None:
        """All runs of it so far."""
        row = self._row(trial.candidate, trial.samples)
        self._file.add(row)
        self._runs[row.key] = list(trial.samples)

    def forget(self) -> None:
        """Begin anew: the file is emptied."""
        self._runs = {}
        write_rows(self.path, [])

    def settle(self) -> None:
        """One row for each key, the last one."""
        rows = {row.key: row for row in read_rows(self.path)}
        write_rows(self.path, rows.values())

    def _row(self, candidate: Candidate, samples: list[dict[str, float]]) -> FigureRow:
        names = [name for name in METRICS if samples and all(name in run for run in samples)]
        lists = {name: [run[name] for run in samples] for name in names}
        load, config = self._load, candidate.config
        quantized = {} if config.model.quantization is None else {"format": config.model.quantization}
        kept = {} if config.cache.kv_cache_dtype == "auto" else {"kv_format": config.cache.kv_cache_dtype}
        return FigureRow(
            kind="measured",
            benchmark=BENCHMARK,
            time=now(),
            command=f"{self._command} {vary(candidate)}".strip(),
            machine=self._machine,
            engine=self._engine,
            model=msgspec.structs.replace(self._model, **quantized, **kept),
            load=RowLoad(
                requests=0 if load.rate else load.batch,
                batch=0 if load.rate else load.batch,
                input_len=load.input,
                output_len=load.output,
                arrivals="poisson" if load.rate else "at-once",
                rate=load.rate,
                shared_prefix=load.shared,
            ),
            options={name: shown(value) for name, value in candidate.values},
            metrics={name: median(found) for name, found in lists.items()},
            intervals={name: interval(found) for name, found in lists.items() if len(found) > 1},
            samples=lists,
            notes=["runs in this process, without HTTP; the first sample was taken by itself, later ones in turns"],
        )


def _runs(row: FigureRow) -> list[dict[str, float]]:
    """Samples of a row, run by run."""
    count = min(map(len, row.samples.values()), default=0)
    return [{name: found[i] for name, found in row.samples.items()} for i in range(count)]


def vary(candidate: Candidate) -> str:
    """Flags of a search among this candidate alone."""
    return " ".join(
        f"--vary {name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in ((name, shown(value)) for name, value in candidate.values)
    )


def check_output(path: Path, mark: str) -> None:
    """`ConfigError` where a file is there that no search wrote."""
    try:
        if path.exists() and not path.read_bytes()[: len(mark)].decode(errors="replace").startswith(mark):
            raise ConfigError(
                f"--output {path}: a file is there that quire tune did not write; name another", param="output"
            )
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}", param="output") from None
