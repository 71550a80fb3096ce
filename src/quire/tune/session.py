"""One `quire tune`: from what was asked to what was found, the planner's word on every candidate first."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from quire.bench.calibration import machine_of
from quire.core.cache_config import CacheConfig
from quire.core.config import EngineConfig, SpeculationConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.progress import stage
from quire.engine.components.memory_plan import check_limits
from quire.figures.schema import RowModel
from quire.plan.advice import advice
from quire.plan.planned_load import PlannedLoad
from quire.plan.predict import Machine, Planner
from quire.tune.candidate_runner import CandidateRunner
from quire.tune.engines import EnginePool
from quire.tune.journal import Journal
from quire.tune.learned import expected
from quire.tune.objective import Objective
from quire.tune.search import CandidateTrial, OutOfTime, Search, SearchBudget, TuneResult
from quire.tune.space import (
    Axes,
    Candidate,
    Space,
    allowed_axes,
    check_quality,
    make_space,
    read_space,
    usual_axes,
    varied,
)  # fmt: skip
from quire.tune.tune_options import TuneOptions

log = logging.getLogger("quire.tune")
UNKNOWN = 1.0
"""Expected of everything where step times are not calibrated: measurements alone tell configurations apart."""
LESS = 24
"""Halvings of a load until it is said that none meets the targets."""


class Guesses:
    """The planner's word on candidates of one base configuration, and whether an engine would take them."""

    def __init__(self, base: EngineConfig, load: PlannedLoad, objective: Objective, budget: float = 0.0) -> None:
        """`budget`: seconds from now in which calibration may begin another part; 0 = no bound."""
        self._base, self._load, self._objective = base, load, objective
        self._budget, self._began = budget, time.monotonic()
        self._machines: dict[object, Machine | None] = {}
        self._planners: dict[EngineConfig, Planner] = {}

    def planner(self, config: EngineConfig) -> Planner:
        """Planner of what counts for it; threads are the machine's. `ConfigError` where an engine would refuse the
        config."""
        plain = replace(
            config,
            cache=replace(config.cache, enable_prefix_caching=True),
            scheduler=replace(config.scheduler, target_itl_ms=0.0),
            speculation=SpeculationConfig(),
            device=replace(config.device, threads=self._base.device.threads),
        )
        if plain not in self._planners:
            self._planners[plain] = Planner(plain, self.machine(plain) or Machine())
        found = self._planners[plain]
        check_limits(replace(config.scheduler, max_num_batched_tokens=found.limits.tokens), found.kv.max_model_len)
        return found

    def machine(self, config: EngineConfig) -> Machine | None:
        """Calibrate this machine for the formats of `config`; None where that cannot be."""
        model, kept = config.model, config.cache.kv_cache_dtype
        key = (model.dtype, model.quantization, model.group_size, config.device.bf16_bits, kept)
        if key not in self._machines:
            cache, parallel = CacheConfig(kv_cache_dtype=kept), self._base.parallel
            plain = replace(self._base, model=model, cache=cache, parallel=parallel, device=config.device)
            try:
                self._machines[key] = machine_of(plain, None, before_part=self._check_budget)
            except ConfigError as error:
                log.warning("nothing is pruned by prediction: %s", error.message)
                self._machines[key] = None
            except OutOfTime:
                log.warning("nothing is pruned by prediction: calibration did not end within the budget")
                self._machines[key] = None
        return self._machines[key]

    def _check_budget(self) -> None:
        if self._budget and time.monotonic() - self._began > self._budget:
            raise OutOfTime

    def of(self, candidate: Candidate, load: PlannedLoad | None = None) -> dict[str, float]:
        """What is expected of it. `ConfigError` as `planner` says."""
        planner, load = self.planner(candidate.config), load or self._load
        if planner.machine.calibration is None:
            return dict.fromkeys((self._objective.metric, *self._objective.targets), UNKNOWN)
        return expected(planner.predict(load), load, self._objective)

    def all(self, space: Space) -> dict[Candidate, dict[str, float]]:
        """Guesses of every candidate that is not refused; those that are leave the space."""
        found = {}
        with stage("predicting configurations", len(space.candidates)) as at:
            for candidate in list(space.candidates):
                try:
                    found[candidate] = self.of(candidate)
                except QuireError as error:
                    space.refused[error.message] += 1
                at.advance()
        space.candidates = list(found)
        if not found:
            [(reason, _)] = space.refused.most_common(1) or [("the space is empty", 0)]
            raise ConfigError(f"no configuration can run; of most: {reason}", param="space")
        return found


def axes_of(base: EngineConfig, given: Collection[str], options: TuneOptions) -> Axes:
    """What varies: a file, flags, or the usual; `given` options stay as they are."""
    allowed = allowed_axes(options.allow)
    if options.space is not None or options.vary:
        own = read_space(Path(options.space)) if options.space is not None else {}
        axes = own | varied(options.vary)
        check_quality(axes, allowed)
        axes |= {name: values for name, values in allowed.items() if name not in axes}
        if both := sorted(set(axes) & set(given)):
            raise ConfigError(f"{both[0].replace('_', '-')}: given, and to be tried too; leave one out", param=both[0])
        return axes
    if both := sorted(set(allowed) & set(given)):
        raise ConfigError(f"--allow: {both[0].replace('_', '-')} was given; leave one out", param="allow")
    parts = [part.kind for rank in Planner(base, Machine()).ranks for part in rank.parts if part.product]
    usual = usual_axes(base, options.asked, options.targets, "bf16" in parts, options.prompts is not None)
    return {name: values for name, values in (usual | allowed).items() if name not in given}


class TuneSession:
    """Everything of one search. `run` may be called once."""

    def __init__(self, base: EngineConfig, given: dict[str, object], options: TuneOptions) -> None:
        """`given`: the engine's options of the command line, which stay as they are."""
        began = time.monotonic()
        options.validate()
        self.base, self.options, self.load = base, options, options.asked
        self.objective = Objective(options.aim, options.targets, options.slo_at)
        if options.aim == "itl" and self.load.output < 2:
            raise ConfigError("--objective itl: one output token has no time to the next; give output=2 or more")
        self.space = make_space(base, axes_of(base, given, options))
        self.guesses = Guesses(base, self.load, self.objective, options.budget)
        self.predicted = self.guesses.all(self.space)
        self.prepared = time.monotonic() - began  # calibration above all
        self.given = given
        self.journal = Journal(self.rows, self._model(), self.load, self._command(), self._machine_limits())
        if options.restart:
            self.journal.forget()

    @property
    def rows(self) -> Path:
        """The file of rows, beside the configuration."""
        return Path(self.options.output).with_suffix(".jsonl")

    def run(self, tell: Callable[[CandidateTrial], None]) -> TuneResult:
        """Search; `tell` hears of every run."""
        prompts = None if self.options.prompts is None else Path(self.options.prompts)
        with closing(EnginePool(lambda config: self.guesses.planner(config).account.fixed)) as engines:
            runs = CandidateRunner(engines, self.load, self.objective, self.base.model.seed, prompts)
            search = Search(
                self.space, self.predicted, self.objective, runs,
                SearchBudget(self.options.budget, self.base.model.seed, spent=self.prepared), partial(self._keep, tell),
                {candidate: self.journal.known(candidate) for candidate in self.predicted},
            )  # fmt: skip
            outcome = search.run()
        if self.rows.exists():  # else nothing was measured
            self.journal.settle()
        return outcome

    def needed(self, outcome: TuneResult) -> str:
        """What load the best one would carry within the targets, by the planner as the measurements corrected it, and
        what the planner would change first.
        """
        best = outcome.best
        if best is None or self.guesses.machine(best.candidate.config) is None:
            return "step times are not calibrated here, so nothing says what would be needed"
        changes = advice(self.guesses.planner(best.candidate.config), self.load, self.objective.slo)
        told = [f"  {change.text()}" for change in changes]
        return "\n".join((self._carried(best), *(["by prediction, of single changes:", *told] if told else [])))

    def _carried(self, best: CandidateTrial) -> str:
        load = self.load
        factors = {n: best.found[n] / max(best.expected[n], 1e-9) for n in self.objective.targets}
        for _ in range(LESS):
            load = replace(load, rate=load.rate / 2) if load.rate else replace(load, batch=load.batch // 2)
            if not load.rate and not load.batch:
                break
            guess = self.guesses.of(best.candidate, load)
            if not guess["stable"]:
                continue
            if self.objective.meets({name: guess[name] * factor for name, factor in factors.items()}):
                asked = f"{load.rate:.3g} requests a second" if load.rate else f"batches of {load.batch}"
                return f"by prediction, corrected by what was measured, it keeps them for {asked}"
        return "by prediction it keeps them for no load: try other formats (--allow), a smaller model, a faster machine"

    def _keep(self, tell: Callable[[CandidateTrial], None], trial: CandidateTrial) -> None:
        self.journal.add(trial)
        tell(trial)

    def _model(self) -> RowModel:
        planner = self.guesses.planner(next(iter(self.predicted)).config)
        facts, kinds = planner.facts, [part for part in planner.ranks[0].parts if part.product]
        most = max(kinds, key=lambda part: part.nbytes).kind if kinds else ""
        name = facts.name if self.base.model.model else "pydoc"
        return RowModel(name=name, parameters=facts.parameters, format=most, kv_format=self.base.cache.kv_cache_dtype)

    def _command(self) -> str:
        words = ["quire", "tune", *([self.base.model.model] if self.base.model.model else [])]
        words += ["--load", self.options.load, *(["--slo", self.options.slo] if self.options.slo else [])]
        return shlex.join(words)

    def _machine_limits(self) -> dict[str, float]:
        machine = self.guesses.machine(self.base)
        found = None if machine is None else machine.calibration
        return {} if found is None else {"read_bytes_per_s": found.read_bytes_per_s}
