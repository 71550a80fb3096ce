"""`quire plan --devices`: a load on several devices, the cheapest first, as a table and a chart."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.cli.plan_options import PlanOptions, usual_load
from quire.cli.show import show_columns, show_next
from quire.core.errors import ConfigError
from quire.core.files import write_whole
from quire.core.progress import stage
from quire.plan.compare import DeviceOffer, compare_devices
from quire.plan.devices import ARITHMETIC, BANDWIDTH, devices_named, with_prices
from quire.plan.planned_load import PlannedLoad, Slo, parse_load, parse_slo

if TYPE_CHECKING:
    from quire.core.config import EngineConfig

SHOWN_WHY = 72
"""Characters of the reason why a device does not serve the load."""
DRAWN = 24
"""Devices of the chart."""


def compare(wanted: PlanOptions, engine: EngineConfig, as_json: bool, chart: Path | None) -> None:
    """Compare the devices that are `wanted` and print what was found."""
    for name in ("memory_gb", "bandwidth_gbs", "tflops"):
        if getattr(wanted, name):
            raise ConfigError("--devices compares devices of the table; an own one is planned alone", param="devices")
    devices = with_prices(devices_named(wanted.devices), wanted.prices)
    load = parse_load(wanted.load) if wanted.load else usual_load(engine)
    slo = parse_slo(wanted.slo) if wanted.slo else Slo()
    with stage("planning", len(devices)) as at:
        offers = compare_devices(engine, devices, load, slo, lambda name: at.advance(note=name))
    title = f"{engine.model.model or 'pydoc'}: {_words(load, slo)}"
    if chart is not None:
        try:
            write_whole(chart, drawn(title, offers).encode())
        except OSError as error:
            raise ConfigError(f"--chart {chart}: {error.strerror}", param="chart") from None
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"load": load, "slo": slo, "offers": offers})).decode())
        return
    _print(title, offers)
    _next(wanted, engine, offers, chart)


def _words(load: PlannedLoad, slo: Slo) -> str:
    how = f"{load.rate:g} requests/s" if load.rate else f"{load.batch} at once"
    targets = [f"{name} {most:g} ms" for name, most in (("first token", slo.ttft), ("between tokens", slo.itl)) if most]
    within = f", within {' and '.join(targets)}" if targets else ""
    return f"{how}, {load.input} tokens in, {load.output} out{within}"


def _print(title: str, offers: list[DeviceOffer]) -> None:
    print(title)
    rows = []
    for offer in (each for each in offers if each.count):
        found, cost = offer.prediction, offer.cost
        assert found is not None, "what serves was predicted"
        rows.append((
            f"{offer.count} x {offer.device.name}", f"{found.ttft_ms:,.0f} ms", f"{found.tpot_ms:,.1f} ms",
            f"{found.output_tokens_per_s:,.0f}", f"{cost.hour:,.3f}" if cost else "no price",
            f"{cost.million_tokens:,.2f}" if cost else "-",
        ))  # fmt: skip
    if rows:
        show_columns(("devices", "first token", "a token", "tokens/s", "USD an hour", "USD for 1 M tokens"), rows)
    refused = [offer for offer in offers if not offer.count]
    if refused:
        print(f"{len(refused)} of {len(offers)} do not serve it:")
    for offer in refused:
        why = offer.why if len(offer.why) <= SHOWN_WHY else f"{offer.why[:SHOWN_WHY]}..."
        print(f"  {offer.device.name}: {why}")
    print(
        f"datasheet: {BANDWIDTH:.0%} of each bandwidth and {ARITHMETIC:.0%} of each rate are assumed. A price is that "
        "of an instance on demand, or the launch price of a card over three years without power and the machine around "
        "it; --prices h100=2.5,... sets yours."
    )
    for note in dict.fromkeys(offer.device.note for offer in offers if offer.device.note):
        names = ", ".join(offer.device.name for offer in offers if offer.device.note == note)
        print(f"note: {names}: {note}")


def _next(wanted: PlanOptions, engine: EngineConfig, offers: list[DeviceOffer], chart: Path | None) -> None:
    model = [engine.model.model] if engine.model.model else []
    asked = [*(["--load", wanted.load] if wanted.load else []), *(["--slo", wanted.slo] if wanted.slo else [])]
    best = offers[0]
    words = ["quire", "plan", *model, "--device", best.device.name, *asked]
    told = [(shlex.join(words), "memory, latencies and what to change first there")] if best.count else []
    if chart is None:
        again = ["quire", "plan", *model, "--devices", wanted.devices, *asked, "--chart", "devices.svg"]
        told.append((shlex.join(again), "the same as a chart"))
    if told:
        show_next(*told)


def drawn(title: str, offers: list[DeviceOffer]) -> str:
    """An SVG document: the price of an hour of each that serves the load; where none has one, tokens a second."""
    from quire.figures.chart import Bar, chart

    served = [offer for offer in offers if offer.count]
    priced = [offer for offer in served if offer.cost is not None]
    bars = [
        Bar(
            f"{offer.count} x {offer.device.name}", offer.cost.hour,
            f"{offer.cost.hour:,.3g} USD an hour", at == 0,
        )
        for at, offer in enumerate(priced[:DRAWN])
        if offer.cost is not None
    ] or [
        Bar(
            f"{offer.count} x {offer.device.name}", offer.prediction.output_tokens_per_s,
            f"{offer.prediction.output_tokens_per_s:,.0f} tokens/s", at == 0,
        )
        for at, offer in enumerate(served[:DRAWN])
        if offer.prediction is not None
    ]  # fmt: skip
    if not bars:
        raise ConfigError("--chart: no device serves the load within its targets", param="chart")
    return chart(title, "the cheapest first; predicted by data sheets (quire plan --devices)", bars)
