"""`quire simulate`: a cluster that is not there, under a load."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from quire.cli.flags import ENGINE, option_command, to_arguments, to_engine
from quire.cli.params import PATH, argument, option
from quire.core.options.values import read_options
from quire.simulate.simulate_options import ClusterOptions, SimulatedLoad

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.simulate.design import TimedDesign
    from quire.simulate.outcome import SimulationResult
    from quire.simulate.requests import RequestStream

PANELS = ("Model", "KV cache", "Scheduler", "Device", "Ranks")
OWN: dict[str, type[Struct]] = {"Cluster": ClusterOptions, "Load": SimulatedLoad}
FLAGS = OWN | {name: ENGINE[name] for name in PANELS}


@option_command(
    "simulate",
    FLAGS,
    argument(
        "trace",
        metavar="[TRACE]",
        default="",
        help="File of requests (Mooncake, Azure, BurstGPT), or a recording's folder.",
    ),
    option(
        "--output", "-o", type=PATH, help="Write results and curves to this JSON file, or append rows to a .jsonl file."
    ),
    model_argument=False,
)
def simulate(options: dict[str, Any], trace: str, output: Path | None) -> None:
    """Predict how a cluster serves a load: the real scheduler, KV blocks, prefix cache and router, and no model.

    Steps take as long as quire plan predicts for --device, or as --step-times says. --slo with --search replicas finds
    the fewest replicas that hold it.
    """
    cluster, load = read_options(ClusterOptions, options), read_options(SimulatedLoad, options)
    own = {*ClusterOptions.__struct_fields__, *SimulatedLoad.__struct_fields__} - {"seed"}
    config = to_engine({name: value for name, value in options.items() if name not in own})
    words = ["quire", "simulate", *([trace] if trace else []), *to_arguments(options)]

    from quire.simulate.design import design_of
    from quire.simulate.requests import RequestStream

    asked = RequestStream(load, trace)
    made = design_of(config, cluster, load.seed)
    if cluster.search:
        _search(made, asked, config, cluster, output, shlex.join(words))
        return
    found = _run(made, asked, cluster)
    _report(made, asked, config, found, cluster.replicas, output, shlex.join(words))


def _run(made: TimedDesign, asked: RequestStream, cluster: ClusterOptions, replicas: int = 0) -> SimulationResult:
    from quire.bench.serving import targets_of
    from quire.core.progress import counting_bar
    from quire.simulate.outcome import simulate

    if made.cells > 1:  # processes are forked, which threads of a bar would not survive
        return simulate(made, asked, targets_of(cluster.goodput))
    with counting_bar(len(asked), "requests") as count:
        return simulate(made, asked, targets_of(cluster.goodput), replicas, count)


def _report(
    made: TimedDesign,
    asked: RequestStream,
    config: EngineConfig,
    found: SimulationResult,
    replicas: int,
    output: Path | None,
    command: str,
) -> None:
    from quire.bench.report import report
    from quire.figures.files import Appending
    from quire.simulate.outcome import rows_of, show_tenants

    rows = output is not None and output.suffix == ".jsonl"
    report("simulate", asked.load, {"options": config}, found.results, None if rows else output)
    show_tenants(found)
    if output is not None and rows:
        file = Appending(output)
        for row in rows_of(made, asked, config, found, command, replicas):
            file.add(row)


def _search(
    made: TimedDesign,
    asked: RequestStream,
    config: EngineConfig,
    cluster: ClusterOptions,
    output: Path | None,
    command: str,
) -> None:
    from quire.simulate.outcome import show_try
    from quire.simulate.scaling import fewest
    from quire.simulate.simulate_options import limits_of

    limits = limits_of(cluster.slo)
    tried: dict[int, SimulationResult] = {}

    def holds(replicas: int) -> bool:
        found = tried[replicas] = _run(made, asked, cluster, replicas)
        held = found.holds(limits, cluster.slo_percentile)
        show_try(replicas, found, limits, cluster.slo_percentile, held)
        return held

    count = fewest(holds, cluster.replicas)
    best = tried[count if count is not None else cluster.replicas]
    _report(made, asked, config, best, count or cluster.replicas, output, command)
    if count is None:
        print(f"{cluster.replicas} replicas do not hold {cluster.slo} ({cluster.slo_percentile}); raise --replicas")
        raise click.exceptions.Exit(1)
    below = f", {count - 1} do not" if count > 1 else ""
    print(f"{count} replicas hold {cluster.slo} ({cluster.slo_percentile}){below}; {len(tried)} simulations")
