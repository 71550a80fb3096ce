"""Requests and what comes back for them: the messages that cross the engine's boundary (msgpack, fixed schema)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from quire.core.alignment import Alignment
from quire.core.audio import PromptAudio
from quire.core.errors import QuireError
from quire.core.images import PromptImage
from quire.core.params import SamplingParams
from quire.core.pooling import PoolingKind
from quire.core.speech import SpeechRules

FinishReason = Literal["stop", "length", "abort", "error"]
Explain = Literal["no", "own", "all"]
"""Whether a prefix miss is to be explained, and by whose prompts."""
MissKind = Literal["never_seen", "evicted", "other_adapter", "other_tenant", "partial_block", "no_state", "not_cached"]


_NAMES = random.Random()


def random_id() -> str:
    """A name of 128 bits in hex; no secret.

    Not from the system: that call lets other threads run, which then keep the interpreter for up to 5 ms. With a
    thread that works, 32 requests that came at once waited 100 ms, most of it here.
    """
    return f"{_NAMES.getrandbits(128):032x}"


def longest_prompt(context: int, pooled: bool = False) -> int:
    """Tokens that a prompt may have where a sequence holds `context`: one must be left to generate, unless the prompt's
    vector is all that is wanted (`pooled`)."""
    return context if pooled else context - 1


class DecoderStart(msgspec.Struct, frozen=True):
    """How rows of an encoder-decoder begin: the encoder's part fills blocks, the decoder's begins with `token`, or with
    a request's `decoder_prompt`.

    `positions`: tokens that the decoder's part may have, 0 = as many as a sequence. `rows`: where the encoder reads
    sound, what it makes of a window, of twice as many frames of `bins` numbers; 0 = it reads tokens.
    """

    block_size: int
    token: int
    positions: int = 0
    rows: int = 0
    bins: int = 0

    @property
    def takes_audio(self) -> bool:
        """Whether the encoder reads sound, and no tokens."""
        return self.rows > 0

    def lead(self, encoded: int) -> int:
        """Where the decoder's part begins, behind `encoded` tokens of the encoder's: at the beginning of a block."""
        return -(-encoded // self.block_size) * self.block_size


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued `params.n` times. The engine owns it until its last token is out.

    `seed` is always set (drawn at the edge when the caller gave none), so that a replayed request draws the same again.
    `eos_token_ids` and `bad_words_ids` are token ids because the engine knows no tokenizer.
    `adapter`: name of a loaded LoRA adapter, "" = the model itself. `cache_salt` separates tenants in the prefix cache;
    `tenant` and `weight` are for the policy that shares the machine fairly among tenants. `arrival` is in seconds of
    `time.monotonic`. `decoder_start`: set by an engine whose model has an encoder. `emitted`: the tokens that an engine
    that died had put out of each sequence, None of one that had ended; this one goes on behind them.
    `grammar`: of llguidance, that the output follows, "" for none; `completion`: tokens that are a short text of it.
    `pooling`: the answer is one vector, made so of the prompt's hidden rows, and no token.
    `second`: where the second text of a pair begins, whose tokens are of another type; 0 = there is one type.
    `images`: of the prompt, in its order; recordings on disk have them under the older name `pictures`.
    `audio`: what an encoder reads in the place of the prompt's tokens, which are ids of its digest; `decoder_prompt`:
    what the decoder's part begins with behind an encoder, where it is not one token; `speech`: how it may go on;
    `alignment`: of a pooled request of that kind, how its tokens are found in the sound.
    `explain`: whether the first output is to say where its prefix was not found, and why.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: float
    eos_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    adapter: str = ""
    decoder_start: DecoderStart | None = None
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    explain: Explain = "no"
    grammar: str = ""
    completion: tuple[int, ...] = ()
    pooling: PoolingKind | None = None
    second: int = 0
    images: tuple[PromptImage, ...] = msgspec.field(default=(), name="pictures")
    audio: PromptAudio | None = None
    decoder_prompt: tuple[int, ...] = ()
    speech: SpeechRules | None = None
    alignment: Alignment | None = None

    def reach(self, longest: int) -> int:
        """Tokens that a sequence of it may have in all, where none has more than `longest`."""
        most = 0 if self.pooling is not None else self.params.max_tokens
        return longest if most is None else min(longest, len(self.prompt) + most)

    def edits_logits(self, made: int) -> bool:
        """Whether the token after `made` generated ones is drawn from changed logits."""
        params = self.params
        return bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.allowed_token_ids is not None
            or self.bad_words_ids
            or self.speech is not None
            or made < params.min_tokens
        )


class Miss(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first token of a prompt, counted from 0, that the prefix cache did not have, and why (`PrefixCache`).

    "not_cached": nothing is looked up for such a request, or by this server. `cached_until`: where a recurrent state is
    what was missing, tokens whose keys and values are there.
    """

    position: int
    kind: MissKind
    cached_until: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (nats) of one token with its 1-based rank, and the `top` alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SequenceReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the engine says of a sequence beside its tokens: with each `Output`, or in all so far.

    `drafted`: tokens that were guessed ahead for the sequence so far, of which `accepted` were kept; `preemptions` of
    it so far, and `restarts` of engines since it was submitted. `timing` comes with the first token and with the end,
    `miss` with the first token where that was asked for.
    """

    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    restarts: int = 0
    miss: Miss | None = None
    timing: Timing | None = None

    def note(self, later: SequenceReport) -> None:
        """Take up what was said later of the same sequence."""
        self.finish_reason = later.finish_reason
        if later.cached_tokens > self.cached_tokens:
            self.cached_tokens = later.cached_tokens
        if later.drafted > self.drafted:  # an output of a step without a draft says nothing of drafts
            self.drafted = later.drafted
        if later.accepted > self.accepted:
            self.accepted = later.accepted
        self.preemptions, self.restarts = later.preemptions, later.restarts
        if self.miss is None:
            self.miss = later.miss
        if later.timing is not None:
            self.timing = later.timing


class Output(SequenceReport, kw_only=True, omit_defaults=True):
    """New tokens of one of a request's `n` sequences since the last `Output`; the last one has a `finish_reason`.

    `complete`: what ended it is that its grammar has no more; the last token is part of the text then, and no end.
    `pooled`: the vector of a pooled request, f32 bytes. `error_kind` names the class of an error
    (`core.errors.told_error`): a request that cannot be served is no failure of the engine; `error_param` the field
    that is to blame.
    """

    request_id: str
    index: int = 0
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    stop_token: int | None = None
    complete: bool = False
    error: str | None = None
    error_kind: str = ""
    error_param: str = ""
    pooled: bytes = b""

    def merge(self, later: Output) -> None:
        """Append a later output of the same sequence."""
        self.note(later)
        self.tokens.extend(later.tokens)
        self.logprobs.extend(later.logprobs)
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *later.prompt_logprobs]
        self.stop_token, self.complete = later.stop_token, later.complete
        self.error = later.error
        self.pooled = self.pooled or later.pooled

    def fail(self, error: QuireError) -> Output:
        """End the sequence with `error`; returns itself."""
        self.finish_reason, self.pooled = "error", b""
        self.error, self.error_kind, self.error_param = error.message, type(error).__name__, error.param or ""
        return self


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of `time.monotonic` at which a sequence was first scheduled and gave its first and last token, or 0."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float


class Span(NamedTuple):
    """Span of several sequences: the earliest `scheduled` and `first_token` and the latest `last_token`; 0: never."""

    scheduled: float
    first_token: float
    last_token: float


def span(sequences: Iterable[SequenceReport]) -> Span:
    """When sequences that were received together began and ended."""
    told = [each.timing for each in sequences if each.timing is not None]
    return Span(
        min((each.scheduled for each in told if each.scheduled), default=0.0),
        min((each.first_token for each in told if each.first_token), default=0.0),
        max((each.last_token for each in told), default=0.0),
    )
