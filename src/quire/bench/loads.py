"""What the benchmarks can be told. Light to import: the command line makes its flags from these fields."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

ARRIVALS = ("at-once", "constant", "poisson", "gamma", "ramp", "closed", "trace")
RAMPS = ("linear", "exponential")
LAYOUTS = ("mooncake", "azure", "burstgpt", "recording")
SWEEPS = ("rate", "concurrency")
CLOCKS = ("auto", "on", "off")


class LatencyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of equal requests, again and again."""

    batch_size: Annotated[int, Meta(ge=1, description="Requests at the same time.")] = 1
    input_len: Annotated[str, Meta(description="Tokens of a prompt, or a range like 64:256.")] = "128"
    output_len: Annotated[str, Meta(description="Tokens of an answer, or a range.")] = "128"
    warmup: Annotated[int, Meta(ge=0, description="Batches run before measuring.")] = 1
    iters: Annotated[int, Meta(ge=1, description="Batches measured.")] = 5


class ThroughputLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Many requests, all there from the start."""

    num_prompts: Annotated[int, Meta(ge=1, description="Requests in all.")] = 200
    input_len: Annotated[str, Meta(description="Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, Meta(description="Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, Meta(ge=0, description="Tokens that all prompts begin with.")] = 0


class ReplayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A recording that is run again."""

    run: Annotated[str, Meta(description="Name of a run in the folder; the last one if not given.")] = ""
    speed: Annotated[float, Meta(gt=0, description="Times as fast as requests arrived; inf = all at once.")] = 1.0


class ServeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to a server. `burstiness` 1 = Poisson arrivals, less = bursts, more = steadier (gamma distribution)."""

    base_url: Annotated[str, Meta(description="Where the server is.")] = "http://127.0.0.1:8000"
    model: Annotated[str, Meta(description="Name of the model; the server's first if not given.")] = ""
    api_key: Annotated[str, Meta(description="API key.")] = ""
    num_prompts: Annotated[
        int, Meta(ge=0, le=10_000_000, description="Requests, or conversations, in all; 0 = 100, or a whole trace.")
    ] = 0
    input_len: Annotated[str, Meta(description="Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, Meta(description="Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, Meta(ge=0, description="Tokens that all prompts begin with.")] = 0
    vocab_size: Annotated[int, Meta(ge=2, description="Random token ids lie below this.")] = 5000
    turns: Annotated[
        str, Meta(description="Turns of a conversation, or a range; each prompt has all that was said before.")
    ] = "1"
    think_time: Annotated[
        str, Meta(description="Seconds between an answer and the next turn, or a range like 0.5:2.")
    ] = "0"
    trace: Annotated[
        str, Meta(description="File (or folder of a recording) whose lengths and arrivals are replayed.")
    ] = ""
    trace_layout: Annotated[
        str, Meta(description="How the trace is written; found out if not given.", extra={"choices": LAYOUTS})
    ] = ""
    trace_speed: Annotated[float, Meta(gt=0, description="Times as fast as the trace's requests came.")] = 1.0
    length_scale: Annotated[
        float, Meta(gt=0, le=1, description="Multiplies the trace's lengths, for models of shorter contexts.")
    ] = 1.0
    arrivals: Annotated[
        str,
        Meta(
            description="When requests are due; if not given: poisson or gamma with a rate, trace with a trace, else "
            "closed with a concurrency, at-once without.",
            extra={"choices": ARRIVALS},
        ),
    ] = ""
    request_rate: Annotated[
        float, Meta(gt=0, description="Requests per second that become due; inf = all at once.")
    ] = math.inf
    burstiness: Annotated[float, Meta(gt=0, description="1 = Poisson arrivals, less = bursts, more = steady.")] = 1.0
    ramp_up_start_rps: Annotated[float, Meta(ge=0, description="Rate at which a ramp begins.")] = 0.0
    ramp_up_end_rps: Annotated[float, Meta(ge=0, description="Rate at which a ramp ends; makes arrivals one.")] = 0.0
    ramp_up_strategy: Annotated[str, Meta(description="Form of the ramp.", extra={"choices": RAMPS})] = "linear"
    max_concurrency: Annotated[
        int, Meta(ge=0, description="Requests (conversations) in flight at most; 0 = no limit.")
    ] = 0
    goodput: Annotated[
        tuple[str, ...], Meta(description="Target such as ttft:200 (ms) of ttft, tpot, itl or e2e; several times.")
    ] = ()
    sweep: Annotated[
        str, Meta(description="Raise the rate, or the concurrency, until the knee is found.", extra={"choices": SWEEPS})
    ] = ""
    sweep_seconds: Annotated[float, Meta(gt=0, le=3600, description="How long each load of a sweep lasts.")] = 10.0
    attainment: Annotated[
        float, Meta(gt=0, le=1, description="Share of requests that must meet the targets for a sweep to go on.")
    ] = 0.9
    clocks: Annotated[
        str,
        Meta(
            description="Ask the server when it did what, and join its clock with ours; auto = where it is quire.",
            extra={"choices": CLOCKS},
        ),
    ] = "auto"
    ignore_eos: Annotated[bool, Meta(description="Answer to the full length.")] = True
    warmup: Annotated[int, Meta(ge=0, description="Requests sent before measuring.")] = 1
    timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a server may be silent within an answer, or before it; a whole answer may take "
            "six times as long. What takes longer is an error.",
        ),
    ] = 600.0
    seed: Annotated[int, Meta(description="Seed of prompts and arrivals.")] = 0
