"""The one small interface between the edge and an engine, and the messages that cross it.

`LocalEngine` implements it in the caller's process (the `LLM` class), `ProcessEngine` over two sockets (the server);
`AsyncEngine` turns either into per-request async streams.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quire.core.errors import EngineFailure
from quire.core.images import ImageLimits
from quire.core.pooling import Pooling
from quire.core.request import DecoderStart, Output, Request
from quire.engine.stats import Stats


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model that the edge needs: limits to refuse by, ids that end a text, where files are.

    `weights`: a digest of samples of the files, where several hosts have copies. `takes_images`: whether prompts may
    have images, and `image_limits` of one; recordings and rows on disk have both under older names. `weight_bytes` and
    `kv_cache_bytes` are of the first rank. `family`: the architecture, as `quire show` names it; "" = not known.
    `drafts`: the method by which tokens are guessed ahead; "" = none. `mmproj`: the file that says how images are cut,
    where the model has one; "" = its folder does.
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
    decoder_start: DecoderStart | None = None
    scheduling_policy: str = "fcfs"
    weights: str = ""
    pooling: Pooling = Pooling()
    takes_images: bool = msgspec.field(default=False, name="pictures")
    image_limits: ImageLimits = msgspec.field(default=ImageLimits(), name="picture_limits")
    kv_cache_bytes: int = 0
    family: str = ""
    drafts: str = ""
    mmproj: str = ""


RANK_KILLED = "rank_killed"
"""Kind of a failure: somebody killed one of the engine's processes, which no request is to blame for."""


class EngineKilled(EngineFailure):
    """The engine's process was killed from outside (SIGKILL), by somebody or for want of memory."""


class Interrupted(EngineFailure):
    """The engine ended for no reason of its own or of a request: another was asked for, or its host is gone."""


class WorkerStart(msgspec.Struct, frozen=True):
    """The line that an engine's process reads first: its sockets, its `EngineConfig` as JSON, and the descriptor of
    memory that replicas share ("": none)."""

    inbox: str
    outbox: str
    config: msgspec.Raw
    shards: str = ""


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
