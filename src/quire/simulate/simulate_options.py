"""What `quire simulate` can be told of a cluster and a load. Light to import: the command's flags are made of it."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from quire.bench.loads import ARRIVALS, LAYOUTS, ServeLoad
from quire.core.errors import ConfigError
from quire.core.options.fields import about
from quire.core.options.values import check_values, number_pairs

ROUTERS = ("prefix", "random", "round-robin", "least-requests", "two-choices")
METRICS = ("utilization", "queue")
PERCENTILES = ("p50", "p90", "p95", "p99")
LIMITED = ("ttft", "itl", "tpot", "e2e")
"""Figures that --slo may limit."""
CLOSED = {"closed": "whom a simulation would wait for is not said; name another"}
"""Arrivals of `quire bench serve` that a simulation does not have, and why."""


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a cluster; the names are those of `quire bench serve`.

    Each made-up prompt begins with one of `prefixes` shared texts of `shared_prefix` tokens.
    """

    num_prompts: Annotated[int, about("Requests in all; 0 = 1000, or a whole trace.", ge=0, le=10_000_000)] = 0
    input_len: Annotated[str, about("Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, about("Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, about("Tokens that prompts begin with.", ge=0, le=1 << 20)] = 0
    prefixes: Annotated[int, about("How many different beginnings there are.", ge=1)] = 1
    tenant: Annotated[
        tuple[str, ...],
        about("Who asks, as name=share:weight:priority; may be given several times."),
    ] = ()
    trace_layout: Annotated[str, about("How the trace is written; found out if not given.", LAYOUTS)] = ""
    trace_speed: Annotated[float, about("Times as fast as the trace's requests came.", gt=0)] = 1.0
    length_scale: Annotated[float, about("Multiplies the trace's lengths.", gt=0, le=1)] = 1.0
    arrivals: Annotated[
        str,
        about(
            "When requests are due; if not given: poisson or gamma with a rate, trace with a trace, ramp "
            "with its rates, else at-once.",
            tuple(kind for kind in ARRIVALS if kind != "closed"),
            refused=CLOSED,
        ),
    ] = ""
    request_rate: Annotated[float, about("Requests per second; inf = all at once.", gt=0)] = math.inf
    burstiness: Annotated[float, about("1 = Poisson arrivals, less = bursts, more = steady.", gt=0)] = 1.0
    ramp_up_start_rps: Annotated[float, about("Rate at which a ramp begins.", ge=0)] = 0.0
    ramp_up_end_rps: Annotated[float, about("Rate at which a ramp ends; makes arrivals one.", ge=0)] = 0.0
    seed: Annotated[int, about("Seed of lengths, arrivals, failures and routers.")] = 0

    def served(self, trace: str) -> ServeLoad:
        """Arrivals as `quire bench serve` has them; `ConfigError` for what a simulation does not know."""
        check_values(self)
        names = set(ServeLoad.__struct_fields__) & set(self.__struct_fields__)
        return ServeLoad(trace=trace, **{name: getattr(self, name) for name in names})


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, what becomes of them, and what is between them and their clients."""

    device: Annotated[str, about("What each rank runs on: this, or a GPU by name, as quire plan has them.")] = "this"
    replicas: Annotated[int, about("Engines behind the router.", ge=1, le=100_000)] = 1
    router: Annotated[
        str,
        about("Who gets a request: prefix = quire's own; the others are baselines that quire serve lacks.", ROUTERS),
    ] = "prefix"
    cells: Annotated[
        int,
        about("Routers that share the replicas and get requests in turns; a process each.", ge=1, le=1024),
    ] = 1
    prefill_replicas: Annotated[
        int, about("So many of them compute prompts, and the others go on with these.", ge=0)
    ] = 0
    link_gb_s: Annotated[float, about("GB/s at which blocks of prompts go to the replica that decodes.", gt=0)] = 10.0
    link_ms: Annotated[float, about("Milliseconds before the first of them comes.", ge=0)] = 1.0
    mtbf: Annotated[float, about("Mean seconds between failures of a replica; 0 = none.", ge=0)] = 0.0
    fail: Annotated[tuple[str, ...], about("A failure as SECONDS:REPLICA, from 0; may be given several times.")] = ()
    start_time: Annotated[float, about("Seconds until a replica that was started serves.", ge=0)] = 30.0
    autoscale: Annotated[str, about("Least and most replicas, as in 2:16.")] = ""
    scale_metric: Annotated[
        str,
        about("What replicas are counted by: sequences in flight beside --max-num-seqs, or those that wait.", METRICS),
    ] = "utilization"
    scale_target: Annotated[float, about("Of that, what each replica is to have.", gt=0)] = 0.7
    scale_every: Annotated[float, about("Seconds between two looks at it.", gt=0)] = 15.0
    scale_down_after: Annotated[
        float, about("Seconds for which fewer must have been enough before any is given up.", ge=0)
    ] = 300.0
    patience: Annotated[float, about("Seconds after which a client leaves; 0 = never.", ge=0)] = 0.0
    edge_ms: Annotated[float, about("Milliseconds that network, HTTP and tokenizer add to each first token.", ge=0)] = (
        0.0
    )
    step_times: Annotated[
        str, about("JSON file of measured step times (docs/plan/simulator.md), in place of a prediction.")
    ] = ""
    step_scale: Annotated[float, about("Multiplies the seconds of every step.", gt=0)] = 1.0
    sample_every: Annotated[float, about("Seconds between points of the curves.", gt=0)] = 1.0
    goodput: Annotated[tuple[str, ...], about("Target such as ttft:200 (ms) of ttft, tpot or e2e; several times.")] = ()
    slo: Annotated[str, about("Most milliseconds, as in ttft=500,itl=50 (also tpot, e2e), at --slo-percentile.")] = ""
    slo_percentile: Annotated[
        str,
        about("Of requests, or gaps, that must be within --slo.", PERCENTILES),
    ] = "p99"
    search: Annotated[
        str,
        about("Find the fewest replicas that hold --slo, up to --replicas.", ("replicas",)),
    ] = ""

    def validate(self) -> None:
        """`ConfigError` for what cannot be together."""
        check_values(self)
        if any("itl" in text for text in self.goodput):
            raise ConfigError("--goodput itl: the largest gap of each request is not kept; name tpot", param="goodput")
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
    found = {name: float(limit) for name, limit in number_pairs("slo", slo, LIMITED).items()} if slo else {}
    if any(not 0 < limit < math.inf for limit in found.values()):
        raise ConfigError(f"--slo {slo!r}: milliseconds must be above 0", param="slo")
    return found
