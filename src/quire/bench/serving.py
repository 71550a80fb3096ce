"""Load on a running server over HTTP: when requests are due, when they are sent, when their tokens come."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from quire.bench.clocks import JoinedClocks, join
from quire.bench.http import Client, ClientTimeouts, HttpFailure
from quire.bench.loads import ServeLoad
from quire.bench.records import (
    TARGETS,
    Record,
    attainment,
    dialects,
    failures,
    from_intended,
    goodput,
    latencies,
    milliseconds,
    others,
    rates,
)
from quire.bench.sending import Sender
from quire.bench.sessions import Workload, workload_of
from quire.core.errors import ConfigError
from quire.core.options.values import check_values
from quire.core.progress import counting_bar
from quire.figures.machine import now, this_machine
from quire.figures.metric_definitions import PERCENTILES
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowMachine, RowModel

ALIASES = {"e2el": "e2e"}
"""vLLM's names of targets."""


def targets_of(texts: tuple[str, ...]) -> dict[str, float]:
    """{"ttft": 200.0, "tpot": 50.0} from ("ttft:200", "tpot:50") or ("ttft:200 tpot:50",)."""
    found = {}
    for text in (each for given in texts for each in given.replace(",", " ").split()):
        name, _, limit = text.partition(":")
        try:
            found[ALIASES.get(name, name)] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {text!r} is not like ttft:200 (milliseconds)") from None
        if ALIASES.get(name, name) not in TARGETS:
            raise ConfigError(f"--goodput {text!r}: known are {', '.join(TARGETS)}")
    return found


@dataclass(frozen=True)
class Server:
    """What a server says of itself. `tells_time`: its clock is asked for; `longest`: tokens of its context, or 0."""

    model: str
    name: str
    version: str
    tells_time: bool
    longest: int
    local: bool

    @property
    def machine(self) -> RowMachine:
        """Describe this machine, or one of which no more is known than that it is another."""
        return this_machine() if self.local else RowMachine(name="another machine")


async def look(client: Client, load: ServeLoad) -> Server:
    """Ask a server who it is. `Unavailable` when nobody answers, `HttpFailure` where it serves no model."""
    check_values(load)
    try:
        cards = (await client.get("/v1/models"))["data"]
        card: dict[str, Any] = next((each for each in cards if load.model in ("", each["id"])), {})
    except (HttpFailure, LookupError, TypeError):
        card = {}
    if not card and not load.model:
        raise HttpFailure(f"{load.base_url}/v1/models names no model; name one: --model NAME")
    owner = str(card.get("owned_by", "")) or "unknown"
    try:
        version = str((await client.get("/version"))["version"]) if owner in ("quire", "vllm") else ""
    except (HttpFailure, LookupError, TypeError):
        version = ""
    longest = card.get("max_model_len")
    return Server(
        model=load.model or str(card["id"]),
        name=owner,
        version=version,
        tells_time=load.clocks == "on" or (load.clocks == "auto" and owner == "quire"),
        longest=longest if isinstance(longest, int) else 0,
        local=client.host == "localhost" or _loopback(client.host),
    )


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class ServingResult:
    """What came of a load: its records, and the figures that are made of them. `seconds`: first due to last answer."""

    load: ServeLoad
    server: Server
    workload: Workload
    records: list[Record]
    seconds: float
    targets: dict[str, float]
    notes: list[str] = field(default_factory=list)

    def joined(self) -> JoinedClocks | None:
        """The requests whose clocks were joined with the server's."""
        return join(self.records)

    def results(self) -> dict[str, Any]:
        """Results for `bench.report`."""
        good: dict[str, float] = {}
        if self.targets:
            good["goodput_requests_per_s"] = goodput(self.records, self.targets, self.seconds)
            good["attainment"] = attainment(self.records, self.targets) / max(1, len(self.records))
        joined = self.joined()
        return {
            "rates": rates(self.records, self.seconds) | good,
            "latency_ms": latencies(self.records),
            "from_intended_ms": from_intended(self.records),
            "dialects_ms": dialects(self.records),
            "client_ms": milliseconds(r.client for r in self.records if r.sent),
            "clocks": joined.results() if joined else None,
            "failed": failures(self.records),
            "errors": sorted({r.error for r in self.records if r.error})[:5],
            "notes": self.notes,
        }

    def metrics(self) -> dict[str, float]:
        """Metrics by the names of `figures.metric_definitions.METRICS`; what nobody could know is absent."""
        spreads = latencies(self.records) | others(self.records)
        spreads |= {f"{name}_due": found for name, found in from_intended(self.records).items()}
        spreads["client"] = milliseconds(r.client for r in self.records if r.sent)
        if (joined := self.joined()) is not None:
            spreads |= {name: milliseconds(values) for name, values in joined.values().items()}
        found = {f"{n}_ms_{part}": spread[part] for n, spread in spreads.items() if spread for part in PERCENTILES}
        total, good = rates(self.records, self.seconds), [r for r in self.records if r.ok]
        found |= {name: total[name] for name in ("output_tokens_per_s", "total_tokens_per_s", "duration_s", "failed")}
        found["requests_per_s"] = len(good) / self.seconds
        if read := sum(r.input_tokens for r in good):
            found["prefix_hit_share"] = sum(r.cached_tokens for r in good) / read
        if self.targets:
            found["goodput_per_s"] = goodput(self.records, self.targets, self.seconds)
            found["attainment"] = attainment(self.records, self.targets) / max(1, len(self.records))
        return found

    def row(self, command: str = "", suite: str = "") -> FigureRow:
        """Make a measured row of the benchmark "serve"; `command` makes it again."""
        load, good = self.load, [r for r in self.records if r.ok]
        rate = 0.0 if math.isinf(load.request_rate) else load.request_rate
        if self.workload.arrivals == "ramp":
            rate = (load.ramp_up_start_rps + load.ramp_up_end_rps) / 2
        targets = " ".join(f"{name}:{limit:g}" for name, limit in self.targets.items())
        return FigureRow(
            kind="measured",
            benchmark="serve",
            suite=suite,
            time=now(),
            command=command,
            machine=self.server.machine,
            engine=RowEngine(name=self.server.name, version=self.server.version),
            model=RowModel(name=self.server.model),
            load=RowLoad(
                requests=self.workload.requests,
                batch=load.max_concurrency,
                input_len=sum(r.input_tokens for r in good) / max(1, len(good)),
                output_len=sum(r.output_tokens for r in good) / max(1, len(good)),
                arrivals=self.workload.arrivals,
                rate=rate,
                shared_prefix=load.shared_prefix,
                name=self.workload.name,
            ),
            metrics=self.metrics(),
            dialect={"goodput_per_s": targets, "attainment": targets} if targets else {},
            notes=self.notes + sorted({r.error for r in self.records if r.error})[:5],
        )


async def measure(load: ServeLoad, on_done: Callable[[], None] = lambda: None, warm: bool = True) -> ServingResult:
    """Send everything and measure; `on_done` is called after each request. `warm`: with what is sent before.

    `Unavailable` when nobody answers, `ConfigError` for a load that cannot be.
    """
    targets, planned = targets_of(load.goodput), None
    async with Client(load.base_url, load.api_key or None, ClientTimeouts.of(load.timeout)) as client:
        planned = workload_of(load)  # refused before the server is asked
        server = await look(client, load)
        if server.longest:
            planned = workload_of(load, server.longest)
        sender = Sender(client, load, server.model, server.tells_time)
        if warm:
            await sender.warm(planned)
        with counting_bar(planned.requests, "requests") as count:

            def done() -> None:
                count()
                on_done()

            seconds = await sender.go(planned, done)
    notes = list(planned.notes)
    if sender.made_up_answers:
        notes.append(
            f"{sender.made_up_answers} answers came without token ids: random ones stand for them in the next turns, "
            "whose prefixes end there"
        )
    if server.tells_time and not any(record.moments for record in sender.records):
        notes.append("the server told no times of its own: where time went is not known")
    return ServingResult(load, server, planned, sender.records, seconds, targets, notes)


async def run(load: ServeLoad, on_done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """`measure`, as what is reported of it."""
    return (await measure(load, on_done)).results()
