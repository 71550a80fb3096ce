"""What an option says of itself: a field of a struct with its help, its choices and its range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

Struct = type[msgspec.Struct]
NOTHING = Meta()
"""What is said of an option that has a type alone."""


class OptionField(NamedTuple):
    """An option as its struct declares it.

    `type` has the limits that msgspec knows, `plain` has not. `default` is None where the option is `required`.
    `refused` maps values that the option does not take, though like options do, to the reason. `open`: there are more
    values than `choices` names, which are checked where they are known. `common`: help shows it without being asked for
    all.
    """

    name: str
    type: Any
    plain: Any
    default: Any
    required: bool
    help: str
    choices: tuple[str, ...]
    refused: Mapping[str, str]
    open: bool
    common: bool = False

    @property
    def several(self) -> bool:
        """Whether the option is a list, whose flag may be given several times."""
        return get_origin(self.plain) is tuple or self.plain is tuple

    @property
    def flag(self) -> str:
        """The option as the command line spells it."""
        return flag(self.name)


def about(
    text: str,
    choices: Sequence[object] = (),
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    refused: Mapping[str, str] | None = None,
    open: bool = False,
    common: bool = False,
) -> Meta:
    """An option's help, the values it may have where they are few, and its range (`ge`: at least, `gt`: more than).

    `refused`, `open` and `common`: as of `OptionField`.
    """
    limits: dict[str, Any] = {"ge": ge, "gt": gt, "le": le}
    extra = {"choices": tuple(map(str, choices)), "refused": refused or {}, "open": open, "common": common}
    return Meta(description=text, extra=extra, **limits)


def common(text: str, choices: Sequence[object] = (), **more: Any) -> Meta:
    """What `about` says, of an option that help shows without being asked for all."""
    return about(text, choices, common=True, **more)


def flag(name: str) -> str:
    """An option's name as the command line spells it."""
    return f"--{name.replace('_', '-')}"


@cache
def fields_of(struct: Struct) -> tuple[OptionField, ...]:
    """The options of a struct in their order; found once, as evaluating its types takes milliseconds."""
    return tuple(map(_option, msgspec.structs.fields(struct)))


def _option(field: msgspec.structs.FieldInfo) -> OptionField:
    plain, said = unwrapped(field.type)
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    extra = said.extra or {}
    choices = extra.get("choices", ()) or (get_args(plain) if get_origin(plain) is Literal else ())
    return OptionField(
        name=field.name,
        type=field.type,
        plain=plain,
        default=None if field.required else default,
        required=field.required,
        help=said.description or "",
        choices=tuple(map(str, choices)),
        refused=extra.get("refused", {}),
        open=extra.get("open", False),
        common=extra.get("common", False),
    )


def unwrapped(kind: Any) -> tuple[Any, Meta]:
    """A type without, and with nothing but, what is said about it."""
    if get_origin(kind) is not Annotated:
        return kind, NOTHING
    plain, *said = get_args(kind)
    return plain, next((each for each in said if isinstance(each, Meta)), NOTHING)
