"""quire as a measured process that compresses (see job.py): `quire compress`, without its passport."""

from __future__ import annotations

from pathlib import Path

from job import Job, run

from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import recipe_of


def make(job: Job) -> None:
    """The stages of the recipe; the text is that of the recipe, which is how the driver made the rows of the others."""
    compress(job.source, Path(job.out), recipe_of(job.recipe, "the benchmark's recipe"), lambda _: None)


if __name__ == "__main__":
    run({"compress": make})
