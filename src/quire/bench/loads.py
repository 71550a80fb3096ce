"""What the benchmarks can be told. Light to import: the command line makes its flags from these fields."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta


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
    num_prompts: Annotated[int, Meta(ge=1, description="Requests in all.")] = 100
    input_len: Annotated[str, Meta(description="Tokens of a prompt, or a range like 64:256.")] = "32:128"
    output_len: Annotated[str, Meta(description="Tokens of an answer, or a range.")] = "16:128"
    shared_prefix: Annotated[int, Meta(ge=0, description="Tokens that all prompts begin with.")] = 0
    vocab_size: Annotated[int, Meta(ge=2, description="Random token ids lie below this.")] = 5000
    request_rate: Annotated[
        float, Meta(gt=0, description="Requests per second that become due; inf = all at once.")
    ] = math.inf
    burstiness: Annotated[float, Meta(gt=0, description="1 = Poisson arrivals, less = bursts, more = steady.")] = 1.0
    max_concurrency: Annotated[int, Meta(ge=0, description="Requests in flight at most; 0 = no limit.")] = 0
    goodput: Annotated[tuple[str, ...], Meta(description="Target such as ttft:200 (ms); several times.")] = ()
    ignore_eos: Annotated[bool, Meta(description="Answer to the full length.")] = True
    warmup: Annotated[int, Meta(ge=0, description="Requests sent before measuring.")] = 1
    seed: Annotated[int, Meta(description="Seed of prompts and arrivals.")] = 0
