"""What a caller may ask of sampling. Names and defaults are vLLM's, which users already know."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Annotated, Any, get_type_hints

import msgspec

from quire.core.errors import BadRequest
from quire.core.options.ranges import check_ranges, within
from quire.core.structured import StructuredOutputsParams, structured

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_REPETITION = 100.0
"""Of a repetition penalty, and 1 / this is the least: logits that are multiplied or divided by it stay finite."""
MAX_DIGITS = 20
"""Of a token id."""

# Ranges of fields, which bodies of requests have too. Those that depend on another field or the model are checked by
# `SamplingParams.validate`.
OutputCount = Annotated[int, within(ge=1, le=MAX_N)]
Penalty = Annotated[float, within(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, within(ge=1 / MAX_REPETITION, le=MAX_REPETITION, note="1 is off")]
Temperature = Annotated[float, within(ge=0, le=100, note="0 is greedy")]
TopP = Annotated[float, within(gt=0, le=1)]
TOP_K = "must be -1 or 0 (off) or a count of tokens"
TopK = Annotated[int, within(ge=-1, words=TOP_K)]
"""Of a body, where any count above the vocabulary's means all tokens."""
MinP = Annotated[float, within(ge=0, le=1)]
Seed = Annotated[int, within(ge=-(2**63), le=2**64 - 1, words="must fit in 64 bits")]
MaxTokens = Annotated[int, within(ge=1)]
MinTokens = Annotated[int, within(ge=0)]
Logprobs = Annotated[int, within(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, within(ge=-MAX_BIAS, le=MAX_BIAS)]

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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when they end. `validate` raises `BadRequest` naming the field."""

    n: OutputCount = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, within(ge=-1, le=2**31 - 1, words=TOP_K)] = 0
    min_p: MinP = 0.0
    seed: Seed | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: MaxTokens | None = 16
    min_tokens: MinTokens = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, Bias] = msgspec.field(default_factory=dict)
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
        check_ranges(self)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens"
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _require(all(0 < len(s) <= 1024 for s in self.stop), "stop", "each string must have 1 to 1,024 characters")
        _require(len(self.logit_bias) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} entries")
        _require(
            all(-MAX_BIAS <= b <= MAX_BIAS for b in self.logit_bias.values()),
            "logit_bias",
            f"biases must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
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
    name: (int if kind == int | None else kind, kind == int | None)
    for name, kind in get_type_hints(SamplingParams).items()
    if kind in (float, int, bool, int | None)
}
"""Field -> its type, and whether it may be None."""
