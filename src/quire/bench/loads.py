"""What the benchmarks can be told. Light to import: the command line makes its flags from these fields."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from quire.core.options.fields import about

ARRIVALS = ("at-once", "constant", "poisson", "gamma", "ramp", "closed", "trace")
RAMPS = ("linear", "exponential")
LAYOUTS = ("mooncake", "azure", "burstgpt", "recording")
SWEEPS = ("rate", "concurrency")
CLOCKS = ("auto", "on", "off")


class LatencyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of equal requests, again and again."""

    batch_size: Annotated[int, about("Requests at the same time.", ge=1)] = 1
    input_len: Annotated[str, about("Tokens of a prompt, or a range like 64:256.")] = "128"
    output_len: Annotated[str, about("Tokens of an answer, or a range.")] = "128"
    warmup: Annotated[int, about("Batches run before measuring.", ge=0)] = 1
    iters: Annotated[int, about("Batches measured.", ge=1)] = 5


class ThroughputLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Many requests, all there from the start."""

    num_prompts: Annotated[int, about("Requests in all.", ge=1)] = 200
    input_len: Annotated[str, about("Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, about("Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, about("Tokens that all prompts begin with.", ge=0)] = 0


class ReplayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A recording that is run again."""

    run: Annotated[str, about("Name of a run in the folder; the last one if not given.")] = ""
    speed: Annotated[float, about("Times as fast as requests arrived; inf = all at once.", gt=0)] = 1.0


class ServeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to a server. `burstiness` 1 = Poisson arrivals, less = bursts, more = steadier (gamma distribution)."""

    base_url: Annotated[str, about("Where the server is.")] = "http://127.0.0.1:8000"
    model: Annotated[str, about("Name of the model; the server's first if not given.")] = ""
    api_key: Annotated[str, about("API key.")] = ""
    num_prompts: Annotated[
        int, about("Requests, or conversations, in all; 0 = 100, or a whole trace.", ge=0, le=10_000_000)
    ] = 0
    input_len: Annotated[str, about("Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, about("Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, about("Tokens that all prompts begin with.", ge=0)] = 0
    vocab_size: Annotated[int, about("Random token ids lie below this.", ge=2)] = 5000
    turns: Annotated[str, about("Turns of a conversation, or a range; each prompt has all that was said before.")] = "1"
    think_time: Annotated[str, about("Seconds between an answer and the next turn, or a range like 0.5:2.")] = "0"
    trace: Annotated[str, about("File (or folder of a recording) whose lengths and arrivals are replayed.")] = ""
    trace_layout: Annotated[str, about("How the trace is written; found out if not given.", LAYOUTS)] = ""
    trace_speed: Annotated[float, about("Times as fast as the trace's requests came.", gt=0)] = 1.0
    length_scale: Annotated[
        float, about("Multiplies the trace's lengths, for models of shorter contexts.", gt=0, le=1)
    ] = 1.0
    arrivals: Annotated[
        str,
        about(
            "When requests are due; if not given: poisson or gamma with a rate, trace with a trace, else "
            "closed with a concurrency, at-once without.",
            ARRIVALS,
        ),
    ] = ""
    request_rate: Annotated[float, about("Requests per second that become due; inf = all at once.", gt=0)] = math.inf
    burstiness: Annotated[float, about("1 = Poisson arrivals, less = bursts, more = steady.", gt=0)] = 1.0
    ramp_up_start_rps: Annotated[float, about("Rate at which a ramp begins.", ge=0)] = 0.0
    ramp_up_end_rps: Annotated[float, about("Rate at which a ramp ends; makes arrivals one.", ge=0)] = 0.0
    ramp_up_strategy: Annotated[str, about("Form of the ramp.", RAMPS)] = "linear"
    max_concurrency: Annotated[int, about("Requests (conversations) in flight at most; 0 = no limit.", ge=0)] = 0
    goodput: Annotated[
        tuple[str, ...], about("Target such as ttft:200 (ms) of ttft, tpot, itl or e2e; several times.")
    ] = ()
    sweep: Annotated[str, about("Raise the rate, or the concurrency, until the knee is found.", SWEEPS)] = ""
    sweep_seconds: Annotated[float, about("How long each load of a sweep lasts.", gt=0, le=3600)] = 10.0
    attainment: Annotated[
        float, about("Share of requests that must meet the targets for a sweep to go on.", gt=0, le=1)
    ] = 0.9
    clocks: Annotated[
        str,
        about("Ask the server when it did what, and join its clock with ours; auto = where it is quire.", CLOCKS),
    ] = "auto"
    ignore_eos: Annotated[bool, about("Answer to the full length.")] = True
    warmup: Annotated[int, about("Requests sent before measuring.", ge=0)] = 1
    timeout: Annotated[
        float,
        about(
            "Seconds that a server may be silent within an answer, or before it; a whole answer may take "
            "six times as long. What takes longer is an error.",
            gt=0,
        ),
    ] = 600.0
    seed: Annotated[int, about("Seed of prompts and arrivals.")] = 0
