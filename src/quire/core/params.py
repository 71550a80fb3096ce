"""What a caller may ask of sampling. Names and defaults are vLLM's, which users already know."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import msgspec

from quire.core.errors import BadRequest
from quire.core.structured import StructuredOutputsParams, structured

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_BIASES = 1024
MAX_REPETITION = 100.0
"""Of a repetition penalty, and 1 / this is the least: logits that are multiplied or divided by it stay finite."""
MAX_DIGITS = 20
"""Of a token id."""
_KINDS: dict[type, tuple[type, str]] = {
    float: (Real, "a number"),
    int: (Integral, "an integer"),
    bool: (bool, "true or false"),
    str: (str, "a string"),
}


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise BadRequest(f"{param}: {message}", param=param)


def _is(value: object, kind: type) -> bool:
    """Whether `value` is of `kind`; a number may be of any library, and no truth value is one."""
    return type(value) is kind or (isinstance(value, _KINDS[kind][0]) and not isinstance(value, bool))


def _tuple(value: Any) -> Any:
    """A tuple of what `value` holds; what holds nothing stays, to be refused by its name."""
    return tuple(value) if isinstance(value, Iterable) else value


def _whole(token: Any) -> Any:
    """The number that a JSON key spells."""
    return int(token) if isinstance(token, str) and token.isdecimal() and len(token) <= MAX_DIGITS else token


def _finite(value: float) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when they end. `validate` raises `BadRequest` naming the field."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Accept what callers write: one stop string, lists, None for nothing, string keys in `logit_bias`."""
        coerce: dict[str, Any] = {
            "stop": (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop or ()),
            "stop_token_ids": _tuple(self.stop_token_ids or ()),
            "bad_words": _tuple(self.bad_words or ()),
            "structured_outputs": structured(self.structured_outputs),
            "allowed_token_ids": None if self.allowed_token_ids is None else _tuple(self.allowed_token_ids),
        }
        if any(isinstance(token, str) for token in self.logit_bias or ()):
            coerce["logit_bias"] = {_whole(token): bias for token, bias in self.logit_bias.items()}
        for name, value in coerce.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_types(self) -> None:
        for name, (kind, optional) in _SCALARS.items():
            value = getattr(self, name)
            _require(
                _is(value, kind) or (optional and value is None), name, f"must be {_KINDS[kind][1]}, not {value!r}"
            )
        for name, kind in (("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int)):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, tuple) and all(_is(item, kind) for item in value))
            _require(ok, name, f"each must be {_KINDS[kind][1]}")
        fine = isinstance(self.logit_bias, dict) and all(
            _is(t, int) and _is(b, float) for t, b in self.logit_bias.items()
        )
        _require(fine, "logit_bias", "must map token ids to numbers")

    def validate(self, vocab_size: int) -> None:
        """Check every type and range once, at the edge, against a vocabulary of `vocab_size` ids."""
        self._check_types()
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "must lie in [-2, 2]")
        for name in ("temperature", "repetition_penalty", "top_p", "min_p"):
            _require(_finite(getattr(self, name)), name, "must be a finite number")
        _require(1 <= self.n <= 128, "n", "must lie in [1, 128]")
        bounded = 1 / MAX_REPETITION <= self.repetition_penalty <= MAX_REPETITION
        _require(bounded, "repetition_penalty", f"must lie in [{1 / MAX_REPETITION:g}, {MAX_REPETITION:g}]; 1 is off")
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must lie in [0, 100]; 0 is greedy")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must lie in (0, 1]")
        _require(-1 <= self.top_k < 2**31, "top_k", "must be -1 or 0 (off) or a count of tokens")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must lie in [0, 1]")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must lie in [0, {MAX_LOGPROBS}]")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _require(all(0 < len(s) <= 1024 for s in self.stop), "stop", "each string must have 1 to 1,024 characters")
        _require(len(self.logit_bias) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} entries")
        _require(
            all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "logit_bias", "biases must lie in [-100, 100]"
        )
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            _require(
                all(0 <= t < vocab_size for t in ids), name, f"token ids must lie in [0, {vocab_size}) for this model"
            )
        if self.structured_outputs is not None:
            self._check_structured()

    def _check_structured(self) -> None:
        """What cannot be had beside a grammar, which says alone where a text ends and what may stand in it."""
        asked = self.structured_outputs
        _require(isinstance(asked, StructuredOutputsParams), "structured_outputs", "must be an object")
        assert asked is not None and asked.kind
        beside = "cannot be had with structured outputs, whose grammar"
        _require(not self.min_tokens, "min_tokens", f"{beside} says where the text ends; leave it out")
        _require(not self.ignore_eos, "ignore_eos", f"{beside} says where the text ends; leave it out")
        _require(not self.stop, "stop", f"{beside} a stop string could cut in half; leave it out")
        _require(not self.bad_words, "bad_words", f"{beside} may need these words; leave it out")
        _require(self.allowed_token_ids is None, "allowed_token_ids", f"{beside} may need other tokens; leave it out")


_SCALARS: dict[str, tuple[type, bool]] = {
    field.name: (int if field.type == int | None else field.type, field.type == int | None)
    for field in msgspec.structs.fields(SamplingParams)
    if field.type in (float, int, bool, int | None)
}
"""Field -> its type, and whether it may be None."""
