"""An engine in the caller's own process: `poll` runs a step."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import IN_PROCESS
from quire.core.exclusions.table import check_known
from quire.core.progress import LoadProgress
from quire.core.request import Output, Request
from quire.engine.client import AdapterChanged, ChangeAdapter, EngineInfo, StepReport
from quire.engine.ending import finished_before_the_end
from quire.engine.engine import Engine


class LocalEngine:
    """`EngineClient` without a second process; used by the `LLM` class, the benchmarks and the tests."""

    @finished_before_the_end
    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        check_known(config.features, Known(frozenset({IN_PROCESS})))
        self.engine = Engine(config, progress)
        self._info = self.engine.info()
        self._refused: list[Output] = []
        self._changes: list[AdapterChanged] = []
        self._aborted = False

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def ready(self) -> bool:
        """Always: nothing starts it again."""
        return True

    @finished_before_the_end
    def with_adapter(self, name: str, folder: str) -> str:
        """`name`, once the LoRA adapter in `folder` is loaded under it."""
        self.engine.adapting.load(name, folder)
        return name

    @finished_before_the_end
    def change_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, or unload it where `folder` is empty; the next `poll` reports it."""
        self._changes.append(self.engine.adapting.change(ChangeAdapter(name, folder)))

    def reset_prefix_cache(self) -> None:
        """Later requests find nothing of earlier ones."""
        self.engine.reset_prefix_cache()

    @finished_before_the_end
    def rearrange(self, config: EngineConfig) -> None:
        """The same weights under other options of cache, steps and look-ups, while nothing runs: as `Engine` says."""
        self.engine.rearrange(config)
        self._info = self.engine.info()

    def restart(self) -> None:
        """Nothing starts it again."""
        raise EngineFailure("nothing starts this engine again")

    def submit(self, request: Request) -> None:
        """Queue a request; a refusal is reported by the next `poll`."""
        refused = self.engine.submit(request)
        if refused is not None:
            self._refused.append(refused)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or its sequence `index`; unknown ids are ignored. The next `poll` reports, so gauges fall."""
        self.engine.abort(request_id, index)
        self._aborted = True

    def pause(self, request_id: str) -> bool:
        """Never: nothing here keeps what came of a request."""
        return False

    def resume(self, request_id: str) -> None:
        """Nothing was paused."""

    @finished_before_the_end
    def poll(self, timeout: float) -> StepReport | None:
        """Run one step and report it; None when there is nothing to do."""
        outputs, self._refused = self._refused, []
        changes, self._changes = tuple(self._changes), []
        aborted, self._aborted = self._aborted, False
        if self.engine.has_work:
            outputs += self.engine.step()
        elif not (outputs or changes or aborted):
            return None
        return StepReport(outputs, self.engine.stats(), changes)

    def close(self) -> None:
        """Nothing outlives the object: a packed cache that is being written is finished first."""
        self.engine.close()
        if self.engine.model.writing is not None:
            self.engine.model.writing.finish()
