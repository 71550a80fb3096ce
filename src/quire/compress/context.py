"""What every stage of a pipeline is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.compress.calibrate import CalibrationRows
from quire.compress.recipe import Recipe
from quire.compress.resume import WorkFolder


@dataclass(frozen=True)
class StageContext:
    """A stage reads the model in `model` and writes one to `target`, which is not there yet.

    `number`: of the stage in `recipe`; `teacher`: the model that the pipeline began with. `rows`: calibration text,
    read when it is asked for. `spill`: a folder for what does not have to be in memory, None = all is. `report(what is
    next)` after each of the stage's units.
    """

    number: int
    model: str
    target: Path
    teacher: str
    recipe: Recipe
    work: WorkFolder
    rows: Callable[[], CalibrationRows]
    report: Callable[[str], None]
    spill: Path | None = None

    @property
    def last(self) -> bool:
        """Whether what it writes is the result."""
        return self.number == len(self.recipe.stages) - 1
