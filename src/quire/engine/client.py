"""The one small interface between the edge and an engine, and the messages that cross it.

`LocalEngine` implements it in the caller's process (the `LLM` class), `ProcessEngine` over two sockets (the server);
`AsyncEngine` turns either into per-request async streams.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quire.core.errors import EngineFailure
from quire.core.pictures import PictureLimits
from quire.core.pooling import Pooling
from quire.core.request import Opening, Output, Request


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model that the edge needs: limits to refuse by, ids that end a text, where files are.

    `weights`: a digest of samples of the files, where several hosts have copies. `pictures`: whether it takes any,
    and `picture_limits` of one.
    """

    model: str
    served_name: str
    folder: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    weight_bytes: int
    max_num_queued_reqs: int
    load_seconds: float
    backend: str
    isa: str
    threads: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    generation_defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    implementations: dict[str, str] = msgspec.field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    max_loras: int = 0
    opening: Opening | None = None
    scheduling_policy: str = "fcfs"
    weights: str = ""
    pooling: Pooling = Pooling()
    pictures: bool = False
    picture_limits: PictureLimits = PictureLimits()


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store behind the KV cache holds, `blocks` and `bytes`, and of blocks since the start: `written` to it,
    come back (`hits`), looked for and not there any more (`misses`), `bad` ones, `dropped` for want of time or room."""

    blocks: int = 0
    bytes: int = 0
    written: int = 0
    hits: int = 0
    misses: int = 0
    bad: int = 0
    dropped: int = 0


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines of a model. `up`: false while it is started again, or is gone for good."""

    up: bool = True
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    generation_tokens: int = 0
    restarts: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and running totals after a step. `waste` is the share of reserved KV slots that hold no token.

    `drafts` were verified, `draft_tokens` in all, of which `accepted_tokens` were kept, by their place in the draft.
    `picture_queries`: pictures that prompts came to, `picture_hits` of them were encoded already.
    `expert_pairs`: pairs (token, choice) that each rank computed, where experts are divided over ranks;
    `expert_imbalance`: those of the rank that had most, over the mean of ranks, of all layers' steps.
    `running_adapters`, `waiting_adapters`: names of LoRA adapters that sequences in the batch and in the queue use.
    `bubbles`: share of the time of steps that each rank of a pipeline waited for others. `replicas`: each of several
    engines; none where there is one.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    waste: float = 0.0
    steps: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    restarts: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    picture_queries: int = 0
    picture_hits: int = 0
    numeric_errors: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    expert_pairs: tuple[int, ...] = ()
    expert_imbalance: float = 1.0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    bubbles: tuple[float, ...] = ()
    replicas: tuple[ReplicaStats, ...] = ()
    kv_store: StoreStats | None = None


RANK_KILLED = "rank_killed"
"""Kind of a failure: somebody killed one of the engine's processes, which no request is to blame for."""


class EngineKilled(EngineFailure):
    """The engine's process was killed from outside (SIGKILL), by somebody or for want of memory."""


class Interrupted(EngineFailure):
    """The engine ended for no reason of its own or of a request: another was asked for, or its host is gone."""


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Edge to engine: take this request."""

    request: Request


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Edge to engine: nobody waits any more; free everything of this request, or of its sequence `index`."""

    request_id: str
    index: int | None = None


class ChangeAdapter(msgspec.Struct, tag="change_adapter", frozen=True):
    """Edge to engine: load the LoRA adapter in `folder` under `name`, in the place of one that has it, or unload that
    one where `folder` is empty."""

    name: str
    folder: str


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Edge to engine: requests that follow find nothing of earlier ones in the prefix cache."""


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Engine to edge: progress of the load, in bytes."""

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Engine to edge: the model is loaded."""

    info: EngineInfo


class AdapterChanged(msgspec.Struct, frozen=True):
    """What became of a `ChangeAdapter`: the adapters there are now, and why nothing changed if it did not."""

    name: str
    adapters: tuple[str, ...]
    error: str = ""


class StepReport(msgspec.Struct, tag="step", frozen=True):
    """Engine to edge: what a step produced, and what became of changes asked for.

    `portable`: requests that another engine can go on with, without computing their prompts.
    """

    outputs: list[Output]
    stats: Stats
    changes: tuple[AdapterChanged, ...] = ()
    portable: tuple[str, ...] = ()


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Engine to edge: the engine cannot go on; `kind` and `exit_code` are those of the error."""

    message: str
    kind: str
    exit_code: int


UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding a message may raise: text that is no UTF-8 is a ValueError."""

ToEngine = Submit | Abort | ChangeAdapter | ResetPrefixCache
FromEngine = Loading | Ready | StepReport | Failed


class EngineClient(Protocol):
    """What the edge may do with an engine. Calls never wait for a step, except `poll`."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""

    @property
    def ready(self) -> bool:
        """False while it is being started again: what is handed over waits."""

    def submit(self, request: Request) -> None:
        """Hand over an already validated request; its outputs come from `poll`."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or its sequence `index`; unknown ids are ignored.

        No output follows, except one that was already under way.
        """

    def pause(self, request_id: str) -> bool:
        """Do nothing for a request until `resume`; what was under way may still come.

        False where nothing outside of the engine keeps what came of it; then it goes on.
        """

    def resume(self, request_id: str) -> None:
        """Go on with a request that was paused."""

    def change_adapter(self, name: str, folder: str) -> None:
        """Load the LoRA adapter in `folder` under `name`, or unload it (""); a report's `changes` say what became."""

    def reset_prefix_cache(self) -> None:
        """Let requests that are submitted later find nothing of earlier ones."""

    def restart(self) -> None:
        """Start it anew, soon, and go on with every request; one after the other where there are several.

        Never waits. `EngineFailure` where nothing starts it again.
        """

    def poll(self, timeout: float) -> StepReport | None:
        """The next step's report, waiting at most `timeout` seconds; raises `EngineFailure` when the engine is dead."""

    def close(self) -> None:
        """Stop the engine and free everything; may be called twice."""
