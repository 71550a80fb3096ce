"""What shape an answer is to have. Names are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.errors import BadRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer, as exactly one of `KINDS` says.

    `json`: a JSON schema, as an object or as its text. `regex`: of the whole answer. `choice`: one of these texts.
    `grammar`: Lark, in llguidance's dialect. `json_object`: any JSON object. `structural_tag`: free text in which what
    follows certain beginnings has a shape: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
    The others are about JSON alone: spaces between tokens (none, or as a regular expression says), and whether names
    that a schema's objects do not list are refused. `strict`: a schema is refused of which the grammar cannot hold all;
    else the answer is checked by it when it is whole.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    strict: bool = False

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is; `BadRequest` naming the field when it is none, several, or no such thing."""
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise refusal(f"give exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        kind = given[0]
        if kind == "choice" and not 0 < len(self.choice or ()) <= MAX_CHOICES:
            raise refusal(f"must have 1 to {MAX_CHOICES} texts", "choice")
        if kind == "choice" and "" in (self.choice or ()):
            raise refusal("an empty text is no choice: leave it out", "choice")
        if kind in ("json", "structural_tag") and not isinstance(getattr(self, kind), (dict, str)):
            raise refusal("must be an object, or the text of one", kind)
        if kind not in ("json", "json_object") and self.whitespace_pattern is not None:
            raise refusal("is about json and json_object alone", "whitespace_pattern")
        if kind != "json" and self.strict:
            raise refusal("is about json alone", "strict")
        return kind


def refusal(reason: str, field: str = "") -> BadRequest:
    """Explain that structured outputs cannot be had so, or that their `field` cannot."""
    param = f"structured_outputs.{field}" if field else "structured_outputs"
    return BadRequest(f"{param}: {reason}", param=param)


def structured(value: Any) -> Any:
    """`value`, given as an object of JSON, as `StructuredOutputsParams`; what is neither stays, to be refused."""
    if not isinstance(value, dict):
        return value
    try:
        return msgspec.convert(value, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise refusal(reason, place.rstrip("`")) from None


def renamed_reference(schema: Any) -> bool:
    """Whether somewhere in a JSON schema `$id` stands beside `$ref`.

    Drafts disagree on what the reference then means: up to draft 7 `$id` is ignored there, since 2019-09 it changes the
    address that `$ref` is relative to.
    """
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            if isinstance(found.get("$ref"), str) and isinstance(found.get("$id"), str):
                return True
            left += [value for name, value in found.items() if name not in ("const", "default", "enum", "examples")]
    return False
