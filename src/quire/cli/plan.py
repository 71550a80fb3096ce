"""`quire plan`: what a model will take and give on a machine, from headers, before anything is loaded or bought."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.params import PATH, option, quiet_option
from quire.cli.plan_options import PlanOptions, usual_load
from quire.cli.show import Rows, show
from quire.cli.show import size as as_bytes
from quire.core.errors import ConfigError
from quire.core.options.values import read_options

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.figures.schema import FigureRow
    from quire.plan.advice import OptionChange
    from quire.plan.devices import DeviceSheet
    from quire.plan.plan_file import Plan
    from quire.plan.predict import Planner
    from quire.plan.sizing import Cost, Sizing

BACKENDS = ("auto", "cuda", "cpu", "reference")
ADVISED = ("bf16", "int8", "int4")
"""Formats that advice compares, beside the one asked for."""


@option_command(
    "plan",
    {"Plan": PlanOptions, **ENGINE},
    option("--json", "as_json", is_flag=True, help="Print the plan as JSON."),
    option("--output", "-o", type=PATH, help="Write the plan, for quire serve --plan."),
    option("--rows", type=PATH, help="Append what is predicted to a .jsonl file of figures."),
    option("--chart", type=PATH, help="With --devices: draw the comparison into this SVG file."),
    quiet_option(),
)
def plan(options: dict[str, Any], as_json: bool, output: Path | None, rows: Path | None, chart: Path | None) -> None:
    """Memory, latency, throughput, devices and cost of a model under a load, and what to change first."""
    wanted = read_options(PlanOptions, options)
    from quire.figures.files import Appending
    from quire.plan.advice import advice
    from quire.plan.plan_file import plan_of, write_plan
    from quire.plan.planned_load import Slo, parse_load, parse_slo
    from quire.plan.sizing import cost_of, fitted, size

    if wanted.devices:
        from quire.cli.plan_devices import compare

        if output is not None or rows is not None:
            raise ConfigError("--output and --rows are of one device; leave --devices out", param="devices")
        compare(wanted, to_engine(_engine_options(options)), as_json, chart)
        return
    if chart is not None or wanted.prices:
        raise ConfigError("--chart and --prices are of a comparison: give --devices all", param="devices")
    place, config = _place(wanted, options)
    engine = to_engine(config)
    load = parse_load(wanted.load) if wanted.load else usual_load(engine)
    slo = parse_slo(wanted.slo) if wanted.slo else Slo()
    from quire.bench.calibration import machine_of

    planner = fitted(engine, machine_of(engine, place, wanted.calibrate, ADVISED), load)
    made, sizing = plan_of(planner, load, slo), size(planner, load, slo)
    served = load.rate or made.prediction.requests_per_s
    cost = cost_of(sizing.devices or sizing.ranks, wanted.price, served, load.output) if wanted.price else None
    changes = advice(planner, load, slo)
    if output is not None:
        write_plan(made, output)
    if rows is not None:
        Appending(rows).add(predicted_row(planner, made, sizing, cost))
    if as_json:
        told = {"plan": made, "sizing": sizing, "cost": cost, "advice": changes, "notes": planner.facts.notes}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    _show(planner, made, sizing, cost, changes)
    _next(wanted, engine, output, place is not None)


def _next(wanted: PlanOptions, engine: EngineConfig, output: Path | None, sheet: bool) -> None:
    """What to type next; `sheet`: it was planned by a data sheet."""
    from quire.cli.show import show_next

    model = [engine.model.model] if engine.model.model else []
    load = ["--load", wanted.load] if wanted.load else []
    if sheet:
        everywhere = shlex.join(["quire", "plan", *model, "--devices", "all", *load])
        show_next((everywhere, "beside all other devices"))
        return
    kept = str(output) if output is not None else "plan.json"
    serve = (shlex.join(["quire", "serve", *model, "--plan", kept]), "serve as it was planned")
    write = (shlex.join(["quire", "plan", *sys.argv[2:], "-o", kept]), "keep this plan")
    tune = (shlex.join(["quire", "tune", *model, *load]), "measure configurations and take the best")
    show_next(*([] if output is not None else [write]), serve, tune)


def _place(wanted: PlanOptions, options: dict[str, Any]) -> tuple[DeviceSheet | None, dict[str, Any]]:
    """The named or own device (None: this machine), and the engine's options; a backend of the engine is one here."""
    from quire.plan.devices import device_of, own_device

    given, figures = _engine_options(options), (wanted.memory_gb, wanted.bandwidth_gbs, wanted.tflops)
    if wanted.device in BACKENDS:
        if any(figures):
            raise ConfigError(f"--device {wanted.device} is measured here; leave its figures out", param="device")
        return None, given | {"device": wanted.device}
    found = device_of(wanted.device)
    return (own_device(found, *figures) if any(figures) else found), given


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in PlanOptions.__struct_fields__}


def _show(planner: Planner, made: Plan, sizing: Sizing, cost: Cost | None, changes: list[OptionChange]) -> None:
    found = made.prediction
    show("model", _model_rows(planner))
    show(f"memory of {'the rank' if planner.config.parallel.ranks == 1 else 'each rank'}", _memory_rows(planner, made))
    show(f"load: {_load(made)}", _load_rows(planner, made))
    show("devices", _device_rows(planner, sizing, cost))
    if changes:
        show("change first", [(str(i), change.text()) for i, change in enumerate(changes, 1)])
    print(f"{found.kind}: {found.note}")
    for note in planner.facts.notes:
        print(f"note: {note}")


def _model_rows(planner: Planner) -> Rows:
    found, config = planner.facts, planner.config
    form = config.model.quantization or found.scheme
    source = "from config.json alone: there are no weights" if planner.bare else "from headers"
    return [
        ("name", found.name),
        ("parameters", f"{found.parameters:,}, {source}"),
        ("weights", f"{form}, {as_bytes(sum(rank.weights for rank in planner.ranks))} of a replica's ranks each"),
    ]


def _memory_rows(planner: Planner, made: Plan) -> Rows:
    kv, memory = planner.kv, made.memory
    labels = {"weights": "weights", "drafts": "weights that draft", "kv": "KV cache", "tables": "block tables, arrays",
              "activations": "largest step", "pictures": "images", "graphs": "recorded steps",
              "process": "process itself"}  # fmt: skip
    rows = [(labels[name], as_bytes(memory[name])) for name in labels if memory[name]]
    return [
        *rows,
        ("in all", f"{as_bytes(memory['total'])} of {as_bytes(planner.account.there)}"),
        ("blocks", f"{kv.blocks:,} of {kv.sizes.block_size} tokens, {as_bytes(kv.block_bytes)} each"),
        *(
            [("recurrent states", f"{states.slots:,} of {as_bytes(states.slot_bytes)} each, in the KV cache")]
            if (states := kv.states).slots
            else []
        ),
        ("sequences", f"{made.prediction.sequences:,} of this load's length fit, {planner.limits.seqs} run at most"),
        ("longest context", f"{made.prediction.longest:,} tokens fit, {kv.max_model_len:,} are allowed"),
    ]


def _load(made: Plan) -> str:
    load = made.load
    how = f"{load.rate:g} requests/s" if load.rate else f"{load.batch} at once"
    return f"{how}, {load.input} tokens in, {load.output} out"


def _load_rows(planner: Planner, made: Plan) -> Rows:
    found, slo = made.prediction, made.slo
    rows = [
        ("time to first token", f"{found.ttft_ms:,.1f} ms" + _target(found.ttft_ms, slo.ttft)),
        ("time per output token", f"{found.tpot_ms:,.2f} ms" + _target(found.tpot_ms, slo.itl)),
        ("whole answer", f"{found.e2e_ms:,.0f} ms"),
        ("throughput", f"{found.output_tokens_per_s:,.1f} tokens/s out, {found.total_tokens_per_s:,.1f} in and out"),
        ("critical batch", f"{found.critical_batch:,.0f} rows: above, arithmetic decides, below, reading weights"),
    ]
    if made.load.rate:
        limit = f"{found.capacity:,.3g} requests/s at most"
        rows.insert(0, ("load", limit if found.stable else f"more than it can serve: {limit}; figures are at that"))
        rows.append(("at one time", f"{found.concurrency:,.1f} requests (Little's law)"))
    return rows


def _target(value: float, target: float) -> str:
    return "" if not target else f", within {target:g}" if value <= target else f", misses the target of {target:g}"


def _device_rows(planner: Planner, sizing: Sizing, cost: Cost | None) -> Rows:
    device = planner.machine.device
    what = "machines as this" if device is None else device.name
    need = (
        f"{sizing.devices} {what}: {sizing.replicas} of {sizing.ranks} rank{'s' * (sizing.ranks > 1)}"
        if sizing.replicas
        else f"no number of {what} holds the targets: a lone request misses them"
    )
    rows = [("weights alone", f"{sizing.weights_alone} {what}"), ("with this load", need)]
    if sizing.rate:
        rows.append(("one replica", f"{sizing.rate:,.3g} requests/s within the targets"))
    if cost is not None:
        rows += [
            ("cost of an hour", f"{cost.hour:,.4g}"),
            ("cost of a request", f"{cost.request:,.4g} at this load"),
            ("cost of 1 M tokens out", f"{cost.million_tokens:,.4g} at this load"),
        ]
    return rows


def predicted_row(planner: Planner, made: Plan, sizing: Sizing, cost: Cost | None) -> FigureRow:
    """The prediction as figures are kept: medians are means here, which `dialect` says."""
    from quire.figures.machine import now, this_engine, this_machine
    from quire.figures.schema import FigureRow, RowLoad, RowMachine, RowModel

    found, load, device = made.prediction, made.load, planner.machine.device
    machine = this_machine()
    if device is not None:
        limits = {
            "read_bytes_per_s": device.bandwidth,
            "bf16_flops_per_s": device.peak(16),
            "link_bytes_per_s": device.link,
        }
        machine = RowMachine(name=device.name, memory_bytes=device.memory, limits=limits)
    metrics = {
        "ttft_ms_mean": found.ttft_ms, "tpot_ms_mean": found.tpot_ms, "e2e_ms_mean": found.e2e_ms,
        "output_tokens_per_s": found.output_tokens_per_s, "total_tokens_per_s": found.total_tokens_per_s,
        "requests_per_s": found.requests_per_s, "weight_bytes": made.memory["weights"], "kv_bytes": made.memory["kv"],
        "activation_bytes": made.memory["activations"], "peak_bytes": made.memory["total"],
        "critical_batch": found.critical_batch, "sequences": found.sequences,
    }  # fmt: skip
    if cost is not None:
        metrics |= {"cost_per_request": cost.request, "cost_per_million_tokens": cost.million_tokens}
    devices = (sizing.devices or sizing.ranks) if load.rate else planner.config.parallel.processes
    return FigureRow(
        kind="predicted", benchmark="plan", time=now(), command=shlex.join(["quire", *sys.argv[1:]]),
        machine=msgspec.structs.replace(machine, devices=devices), engine=this_engine(),
        model=RowModel(name=planner.facts.name, parameters=planner.facts.parameters,
                    format=planner.config.model.quantization or planner.facts.scheme, kv_format=planner.kept),
        load=RowLoad(requests=load.batch, batch=0 if load.rate else load.batch, input_len=load.input,
                  output_len=load.output, arrivals="poisson" if load.rate else "at-once", rate=load.rate,
                  shared_prefix=load.shared),
        options={k: v for k, v in made.options.items() if isinstance(v, str | int | float | bool)},
        metrics=metrics, notes=[found.note],
    )  # fmt: skip
