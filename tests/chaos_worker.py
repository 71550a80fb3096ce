"""An engine's process that can be made to fail: `quire.engine.processes.worker` with the faults that QUIRE_CHAOS names.

poison=ID      a step whose batch has a prompt with this token aborts the process, as a fault of native code does
torn=N         the N-th report of an engine that has work is sent by half, and the process exits (once: see `mark`)
mark=FILE      made when a fault that happens once has happened
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from quire.engine.client import FromEngine, StepReport
from quire.engine.engine import Engine
from quire.engine.processes import worker

ASKED = dict(word.split("=", 1) for word in os.environ.get("QUIRE_CHAOS", "").split())


class Worker(worker.Worker):
    """Tears a report."""

    reports = 0

    def send(self, message: FromEngine) -> None:
        """Hand a message to the edge, or half of it."""
        if isinstance(message, StepReport) and message.outputs:
            self.reports += 1
        if "torn" in ASKED and self.reports == int(ASKED["torn"]) and not Path(ASKED["mark"]).exists():
            Path(ASKED["mark"]).touch()
            message.outputs[len(message.outputs) // 2 :] = []  # type: ignore[union-attr]
            super().send(message)
            self.outbox.close(1000)
            os._exit(3)
        super().send(message)


def main() -> int:
    """The worker's own, with faults."""
    plain = Engine.step

    def step(self: Engine) -> list[worker.Output]:
        poison = int(ASKED.get("poison", -1))
        if any(poison in seq.request.prompt for seq in self.scheduler.running):
            os.abort()
        return plain(self)

    Engine.step = step  # type: ignore[method-assign]
    worker.Worker = Worker  # type: ignore[misc]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
