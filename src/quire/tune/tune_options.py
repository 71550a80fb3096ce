"""What `quire tune` can be told. Light to import: the command line makes its flags from these fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.options.fields import about
from quire.core.options.values import check_values
from quire.figures.metric_definitions import PERCENTILES
from quire.plan.planned_load import PlannedLoad, Slo, parse_load, parse_slo

OBJECTIVES = ("auto", "throughput", "goodput", "itl", "ttft", "e2e")


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Under which load, for what, and among which configurations is searched."""

    load: Annotated[
        str,
        about(
            "What is asked of the engine: batch=8,input=512,output=128 come at once; rate=2,... so many a second "
            "(Poisson); shared=N tokens that prompts begin with alike."
        ),
    ] = "batch=8,input=256,output=64"
    slo: Annotated[str, about("Targets in milliseconds, as ttft=200,itl=50; none if not given.")] = ""
    slo_at: Annotated[
        str, about("Which figure of a run must be within the targets; goodput asks it of every request.", PERCENTILES)
    ] = "mean"
    objective: Annotated[
        str,
        about(
            "What is to be best within the targets; auto = throughput of a batch, e2e of a rate, whose throughput is "
            "given.",
            OBJECTIVES,
        ),
    ] = "auto"
    allow: Annotated[
        str,
        about(
            "Formats that change answers and may be tried, as int8,int4,kv=int8,activations=int8. "
            "Without it no answer changes."
        ),
    ] = ""
    space: Annotated[
        str | None, about("TOML file: option = [values to try]. It replaces what is tried by default.")
    ] = None
    vary: Annotated[
        tuple[str, ...],
        about("NAME=VALUE,VALUE: what to try of one option; with it or --space nothing else varies. Several times."),
    ] = ()
    prompts: Annotated[
        str | None,
        about("File of prompts, one a line: what look-ups guess depends on text, and is tried with it alone."),
    ] = None
    budget: Annotated[
        float, about("Seconds of measuring at most, calibration included; 0 = as long as it takes.", ge=0)
    ] = 0.0
    output: Annotated[str, about("The configuration to write, for `quire serve --config`; rows go beside it.")] = (
        "tuned.toml"
    )
    restart: Annotated[bool, about("Measure again what an earlier run that wrote OUTPUT has measured.")] = False

    def validate(self) -> None:
        """Refuse what cannot be, naming the option."""
        check_values(self)
        if self.objective == "goodput" and not self.slo:
            raise ConfigError("--objective goodput counts requests within targets: give --slo", param="slo")
        if not self.output.endswith(".toml"):
            raise ConfigError(f"--output {self.output}: a .toml file is written", param="output")

    @property
    def asked(self) -> PlannedLoad:
        """The load."""
        return parse_load(self.load)

    @property
    def targets(self) -> Slo:
        """The targets; 0: none."""
        return parse_slo(self.slo) if self.slo else Slo()

    @property
    def aim(self) -> str:
        """The objective, `auto` decided."""
        return self.objective if self.objective != "auto" else "e2e" if self.asked.rate else "throughput"
