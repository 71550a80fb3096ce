"""Ranges of a request's fields: the same words from Python and from a body, and limits in JSON schemas that hold."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from quire.core.errors import BadRequest
from quire.core.options.ranges import Range, check_ranges, ranges_of, within
from quire.core.params import SamplingParams
from quire.engine.beam import BeamSearchParams
from quire.server.apis.openai.protocol import CompletionRequest
from quire.server.http.body import shaped
from quire.server.routes import TABLE

REFUSED: dict[str, tuple[list[Any], str]] = {
    "n": ([0, 129, 10**400], "must lie in [1, 128]"),
    "presence_penalty": ([-2.1, 3], "must lie in [-2, 2]"),
    "frequency_penalty": ([-3, 2.1], "must lie in [-2, 2]"),
    "repetition_penalty": ([0, 0.009, 100.1], "must lie in [0.01, 100]; 1 is off"),
    "temperature": ([-0.1, 101], "must lie in [0, 100]; 0 is greedy"),
    "top_p": ([0, -1, 1.01], "must lie in (0, 1]"),
    "top_k": ([-2, 2**31], "must be -1 or 0 (off) or a count of tokens"),
    "min_p": ([-0.1, 1.1], "must lie in [0, 1]"),
    "seed": ([-(2**63) - 1, 2**64], "must fit in 64 bits"),
    "max_tokens": ([0, -1], "must be at least 1"),
    "min_tokens": ([-1], "must not be negative"),
    "logprobs": ([-1, 21], "must lie in [0, 20]"),
    "prompt_logprobs": ([-1, 21], "must lie in [0, 20]"),
}
TAKEN: dict[str, list[Any]] = {
    "n": [1, 128], "presence_penalty": [-2, 2.0], "frequency_penalty": [-2.0, 2], "repetition_penalty": [0.01, 100],
    "temperature": [0, 100.0], "top_p": [1e-9, 1], "top_k": [-1, 0, 2**31 - 1], "min_p": [0, 1.0],
    "seed": [-(2**63), 2**64 - 1, None], "max_tokens": [1, 10**9, None], "min_tokens": [0, 16],
    "logprobs": [0, 20, None], "prompt_logprobs": [0, 20, None],
}  # fmt: skip
BODIES = sorted({kind for route in TABLE.routes for kind in route.body}, key=lambda kind: kind.__name__)


def refusal(name: str, value: Any) -> str:
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{name: value}).validate(100)
    assert refused.value.param == name
    return refused.value.message


def test_every_field_with_a_range_is_tried() -> None:
    assert set(ranges_of(SamplingParams)) == set(REFUSED) == set(TAKEN)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_is_refused_outside_its_range_and_taken_at_its_ends(name: str) -> None:
    values, words = REFUSED[name]
    for value in values:
        assert refusal(name, value) == f"{name}: {words}"
    for value in TAKEN[name]:
        SamplingParams(**{name: value}).validate(100)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p", "min_p", "presence_penalty"])
def test_what_is_no_finite_number_is_refused_as_that(name: str, value: float) -> None:
    assert refusal(name, value) == f"{name}: must be a finite number"


def test_a_value_of_another_type_is_refused_before_its_range() -> None:
    for value in ("hot", None, True, Decimal(1)):
        assert "must be a number" in refusal("temperature", value)
    assert "must be an integer" in refusal("n", 1.0)


def test_a_range_with_another_field_is_checked_too() -> None:
    with pytest.raises(BadRequest, match=r"^min_tokens: must not exceed max_tokens$"):
        SamplingParams(min_tokens=5, max_tokens=4).validate(100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, "beam_width: must lie in [1, 10]"),
        ({"beam_width": 11}, "beam_width: must lie in [1, 10]"),
        ({"length_penalty": -10.5}, "length_penalty: must lie in [-10, 10]"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ],
)
def test_fields_of_beam_search_have_ranges(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | given)).validate()
    assert refused.value.message == message


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_the_schema_of_a_body_says_the_range_of_each_field(kind: type[msgspec.Struct]) -> None:
    _, schemas = msgspec.json.schema_components([kind], schema_hook=lambda _: {})
    properties = schemas[kind.__name__]["properties"]
    for name, limits in ranges_of(kind).items():
        parts = properties[name].get("anyOf", [properties[name]])
        [part] = [part for part in parts if part["type"] != "null"]
        low = part.get("exclusiveMinimum" if limits.open_low else "minimum", -math.inf)
        assert (low, part.get("maximum", math.inf)) == (limits.low, limits.high), name


def test_a_body_that_is_out_of_range_can_be_read() -> None:
    """Its route refuses it, in the words that Python gets."""
    body = shaped({"prompt": "a", "temperature": 1000, "logit_bias": {"5": 1e6}, "max_tokens": 0}, CompletionRequest)
    assert body == CompletionRequest(prompt="a", temperature=1000.0, logit_bias={5: 1e6}, max_tokens=0)


class Parts(msgspec.Struct):
    """A field of each kind of range."""

    share: Annotated[float, within(gt=0, le=1, note="1 is all")] = 1.0
    count: Annotated[Annotated[int, within(ge=1)] | str | None, Meta(description="Of what.")] = None
    plain: int = 0


def test_ranges_are_found_in_unions_and_below_help() -> None:
    assert set(ranges_of(Parts)) == {"share", "count"} and ranges_of(Parts) is ranges_of(Parts)
    check_ranges(Parts())
    check_ranges(Parts(share=2.0, count=3), ("count",))
    with pytest.raises(BadRequest, match=r"^share: must lie in \(0, 1\]; 1 is all$"):
        check_ranges(Parts(share=0.0))


def test_what_has_no_limits_has_no_range() -> None:
    assert Range.of(Meta(description="Anything.")) is None


@pytest.mark.parametrize(
    ("said", "words", "inside", "outside"),
    [
        (Meta(ge=1, le=2), "must lie in [1, 2]", (1, 2), (0, 3, math.nan)),
        (Meta(gt=1, lt=2), "must lie in (1, 2)", (1.5,), (1, 2)),
        (Meta(ge=0), "must not be negative", (0, math.inf), (-1e-9,)),
        (Meta(ge=3), "must be at least 3", (3, 10**400), (2,)),
        (Meta(gt=3), "must be more than 3", (3.1,), (3,)),
        (Meta(le=3), "must be at most 3", (3, -(10**400)), (4,)),
        (Meta(lt=3), "must be less than 3", (2,), (3,)),
    ],
)
def test_a_range_is_said_in_words(
    said: Meta, words: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    found = Range.of(said)
    assert found is not None and found.words == words
    assert all(map(found.holds, inside)) and not any(map(found.holds, outside))
