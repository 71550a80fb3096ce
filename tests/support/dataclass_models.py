"""Dataclasses whose JSON schemas are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field


class Colour(Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: float
    y: float


@dataclass
class Line:
    start: Point
    end: Point
    colour: Colour = Colour.RED


@dataclass
class Palette:
    colours: set[Colour]


@dataclass
class Tags:
    tags: set[str] = field(default_factory=set)


@dataclass
class Order:
    id: UUID
    placed: datetime
    due: date | None
    total: Decimal
    lines: list[Line] = field(default_factory=list)


@dataclass
class Tree:
    value: int
    children: list[Tree] = field(default_factory=list)


@dataclass
class Cat:
    kind: Literal["cat"] = "cat"
    lives: int = 9


@dataclass
class Dog:
    kind: Literal["dog"] = "dog"
    tricks: list[str] = field(default_factory=list)


@dataclass
class Owner:
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    name: str = ""


@dataclass
class Stock:
    counts: dict[Colour, int]


@dataclass
class Levels:
    least: Level
    most: Level | None = None


@dataclass
class Files:
    paths: list[Path]
    sizes: dict[str, int]


@dataclass
class Bounded:
    ratio: Annotated[float, Field(ge=0, le=1)]
    name: Annotated[str, Field(min_length=1, max_length=10, pattern="^[a-z]+$")]


@dataclass
class Pair:
    both: tuple[int, str]
    many: tuple[int, ...]


@dataclass
class Choice:
    answer: int | str | bool | None
    flags: frozenset[Literal["a", "b"]]


@dataclass
class Empty:
    pass


@dataclass(frozen=True, kw_only=True)
class Window:
    since: datetime
    until: datetime
    step: Literal[1, 5, 60]


@dataclass
class Linked:
    value: str
    next: Linked | None = None
