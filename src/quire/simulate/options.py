"""What `quire simulate` can be told of a cluster and a load. Light to import: the command's flags are made of it."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.bench.loads import ARRIVALS, LAYOUTS, ServeLoad
from quire.core.errors import ConfigError

ROUTERS = ("prefix", "random", "round-robin", "least-requests", "two-choices")
METRICS = ("utilization", "queue")


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a cluster; the names are those of `quire bench serve`.

    Each made-up prompt begins with one of `prefixes` shared texts of `shared_prefix` tokens.
    """

    num_prompts: Annotated[
        int, Meta(ge=0, le=10_000_000, description="Requests in all; 0 = 1000, or a whole trace.")
    ] = 0
    input_len: Annotated[str, Meta(description="Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, Meta(description="Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, Meta(ge=0, le=1 << 20, description="Tokens that prompts begin with.")] = 0
    prefixes: Annotated[int, Meta(ge=1, description="How many different beginnings there are.")] = 1
    tenant: Annotated[
        tuple[str, ...],
        Meta(description="Who asks, as name=share:weight:priority; may be given several times."),
    ] = ()
    trace_layout: Annotated[
        str, Meta(description="How the trace is written; found out if not given.", extra={"choices": LAYOUTS})
    ] = ""
    trace_speed: Annotated[float, Meta(gt=0, description="Times as fast as the trace's requests came.")] = 1.0
    length_scale: Annotated[float, Meta(gt=0, le=1, description="Multiplies the trace's lengths.")] = 1.0
    arrivals: Annotated[
        str,
        Meta(
            description="When requests are due; if not given: poisson or gamma with a rate, trace with a trace, ramp "
            "with its rates, else at-once.",
            extra={"choices": tuple(kind for kind in ARRIVALS if kind != "closed")},
        ),
    ] = ""
    request_rate: Annotated[float, Meta(gt=0, description="Requests per second; inf = all at once.")] = math.inf
    burstiness: Annotated[float, Meta(gt=0, description="1 = Poisson arrivals, less = bursts, more = steady.")] = 1.0
    ramp_up_start_rps: Annotated[float, Meta(ge=0, description="Rate at which a ramp begins.")] = 0.0
    ramp_up_end_rps: Annotated[float, Meta(ge=0, description="Rate at which a ramp ends; makes arrivals one.")] = 0.0
    seed: Annotated[int, Meta(description="Seed of lengths, arrivals, failures and routers.")] = 0

    def served(self, trace: str) -> ServeLoad:
        """Arrivals as `quire bench serve` has them; `ConfigError` for what it does not know."""
        if self.arrivals == "closed":
            raise ConfigError("--arrivals closed: whom a simulation would wait for is not said; name another")
        names = set(ServeLoad.__struct_fields__) & set(self.__struct_fields__)
        return ServeLoad(trace=trace, **{name: getattr(self, name) for name in names})


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, what becomes of them, and what is between them and their clients."""

    device: Annotated[
        str, Meta(description="What each rank runs on: this, or a GPU by name, as quire plan has them.")
    ] = "this"
    replicas: Annotated[int, Meta(ge=1, le=100_000, description="Engines behind the router.")] = 1
    router: Annotated[
        str,
        Meta(
            description="Who gets a request: prefix = quire's own; the others are baselines that quire serve lacks.",
            extra={"choices": ROUTERS},
        ),
    ] = "prefix"
    cells: Annotated[
        int,
        Meta(ge=1, le=1024, description="Routers that share the replicas and get requests in turns; a process each."),
    ] = 1
    prefill_replicas: Annotated[
        int, Meta(ge=0, description="So many of them compute prompts, and the others go on with these.")
    ] = 0
    link_gb_s: Annotated[
        float, Meta(gt=0, description="GB/s at which blocks of prompts go to the replica that decodes.")
    ] = 10.0
    link_ms: Annotated[float, Meta(ge=0, description="Milliseconds before the first of them comes.")] = 1.0
    mtbf: Annotated[float, Meta(ge=0, description="Mean seconds between failures of a replica; 0 = none.")] = 0.0
    fail: Annotated[
        tuple[str, ...], Meta(description="A failure as SECONDS:REPLICA, from 0; may be given several times.")
    ] = ()
    start_time: Annotated[float, Meta(ge=0, description="Seconds until a replica that was started serves.")] = 30.0
    autoscale: Annotated[str, Meta(description="Least and most replicas, as in 2:16.")] = ""
    scale_metric: Annotated[
        str,
        Meta(
            description="What replicas are counted by: sequences in flight beside --max-num-seqs, or those that wait.",
            extra={"choices": METRICS},
        ),
    ] = "utilization"
    scale_target: Annotated[float, Meta(gt=0, description="Of that, what each replica is to have.")] = 0.7
    scale_every: Annotated[float, Meta(gt=0, description="Seconds between two looks at it.")] = 15.0
    scale_down_after: Annotated[
        float, Meta(ge=0, description="Seconds for which fewer must have been enough before any is given up.")
    ] = 300.0
    patience: Annotated[float, Meta(ge=0, description="Seconds after which a client leaves; 0 = never.")] = 0.0
    edge_ms: Annotated[
        float, Meta(ge=0, description="Milliseconds that network, HTTP and tokenizer add to each first token.")
    ] = 0.0
    step_times: Annotated[
        str, Meta(description="JSON file of measured step times (docs/plan/simulator.md), in place of a prediction.")
    ] = ""
    step_scale: Annotated[float, Meta(gt=0, description="Multiplies the seconds of every step.")] = 1.0
    sample_every: Annotated[float, Meta(gt=0, description="Seconds between points of the curves.")] = 1.0
    goodput: Annotated[
        tuple[str, ...], Meta(description="Target such as ttft:200 (ms) of ttft, tpot or e2e; several times.")
    ] = ()
    slo: Annotated[
        str, Meta(description="Most milliseconds, as in ttft=500,itl=50 (also tpot, e2e), at --slo-percentile.")
    ] = ""
    slo_percentile: Annotated[
        str,
        Meta(
            description="Of requests, or gaps, that must be within --slo.",
            extra={"choices": ("p50", "p90", "p95", "p99")},
        ),
    ] = "p99"
    search: Annotated[
        str,
        Meta(
            description="Find the fewest replicas that hold --slo, up to --replicas.", extra={"choices": ("replicas",)}
        ),
    ] = ""

    def validate(self) -> None:
        """`ConfigError` for what cannot be together."""
        if self.router not in ROUTERS:
            raise ConfigError(f"--router {self.router}: known are {', '.join(ROUTERS)}", param="router")
        if self.scale_metric not in METRICS:
            raise ConfigError(f"--scale-metric {self.scale_metric}: known are {', '.join(METRICS)}")
        if self.slo_percentile not in ("p50", "p90", "p95", "p99"):
            raise ConfigError(f"--slo-percentile {self.slo_percentile}: known are p50, p90, p95, p99")
        if any("itl" in text for text in self.goodput):
            raise ConfigError("--goodput itl: the largest gap of each request is not kept; name tpot", param="goodput")
        if self.search not in ("", "replicas"):
            raise ConfigError(f"--search {self.search}: known is replicas", param="search")
        if self.search and not self.slo:
            raise ConfigError("--search replicas needs --slo, as in --slo ttft=500,itl=50", param="slo")
        if self.search and (self.autoscale or self.fail):
            raise ConfigError("--search replicas: not beside --autoscale or --fail, which name replicas themselves")
        if self.prefill_replicas >= self.replicas and self.prefill_replicas:
            raise ConfigError(
                f"--prefill-replicas {self.prefill_replicas}: of {self.replicas} replicas one at least must decode"
            )
        if self.prefill_replicas and (self.autoscale or self.search):
            raise ConfigError(
                "--prefill-replicas: not beside --autoscale or --search, which count replicas of one kind"
            )
        if self.cells > 1 and (self.prefill_replicas or self.autoscale or self.fail or self.search):
            raise ConfigError(f"--cells {self.cells}: not beside --prefill-replicas, --autoscale, --fail or --search")
        if self.cells > self.replicas:
            raise ConfigError(f"--cells {self.cells}: there are {self.replicas} replicas to share", param="cells")
        for name in ("mtbf", "start_time", "patience", "edge_ms", "link_gb_s", "scale_target", "sample_every"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} must be finite", param=name)

    @property
    def failures(self) -> tuple[tuple[float, int], ...]:
        """(seconds, replica) of `fail`."""
        return tuple(map(self._failure, self.fail))

    def _failure(self, text: str) -> tuple[float, int]:
        at, _, replica = text.partition(":")
        try:
            found = float(at), int(replica)
        except ValueError:
            raise ConfigError(f"--fail {text!r} is not like 60:0, seconds and the number of a replica") from None
        if not (0 <= found[0] < math.inf and 0 <= found[1] < self.replicas):
            raise ConfigError(f"--fail {text!r}: replicas are 0 to {self.replicas - 1}", param="fail")
        return found

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Least and most of `autoscale`."""
        if not self.autoscale:
            return None
        low, _, high = self.autoscale.partition(":")
        try:
            return int(low), int(high)
        except ValueError:
            raise ConfigError(f"--autoscale {self.autoscale!r} is not like 2:16", param="autoscale") from None


def limits_of(slo: str) -> dict[str, float]:
    """Milliseconds by name of "ttft=500,itl=50"; `ConfigError` for what is none."""
    found: dict[str, float] = {}
    for word in slo.split(",") if slo else ():
        name, _, limit = (part.strip() for part in word.partition("="))
        try:
            found[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--slo {slo!r}: {word!r} is not like ttft=500 (milliseconds)", param="slo") from None
        if name not in ("ttft", "itl", "tpot", "e2e") or not 0 < found[name] < math.inf:
            raise ConfigError(f"--slo {slo!r}: known are ttft, itl, tpot and e2e, above 0", param="slo")
    return found
