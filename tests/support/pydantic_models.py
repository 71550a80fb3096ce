"""Field types of pydantic's documentation, and models as people write them for structured output and tools."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic as p
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter
from typing_extensions import TypedDict


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Size(enum.IntEnum):
    S = 1
    M = 2
    L = 3


class Mixed(enum.Enum):
    A = "a"
    B = 2
    C = None


class Month(enum.Enum):
    JAN, FEB, MAR, APR, MAY, JUN, JUL, AUG = "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug"


class Place(NamedTuple):
    lat: float
    lng: float


class Film(TypedDict, total=False):
    name: typing.Required[str]
    year: int


class Inner(BaseModel):
    a: int
    b: str | None = None


FIELDS: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "none": None,
    "any": Any,
    "list": list,
    "list_int": list[int],
    "tuple": tuple,
    "tuple_fixed": tuple[int, str],
    "tuple_many": tuple[int, ...],
    "tuple_empty": tuple[()],
    "set": set,
    "set_int": set[int],
    "set_enum": set[Colour],
    "set_literal": set[Literal["a", 1]],
    "set_bool": set[bool],
    "set_many": set[Month],
    "frozenset": frozenset[str],
    "dict": dict,
    "dict_str": dict[str, int],
    "dict_int": dict[int, str],
    "dict_enum": dict[Colour, int],
    "dict_literal": dict[Literal["x", "y"], float],
    "dict_uuid": dict[uuid.UUID, int],
    "dict_date": dict[dt.date, int],
    "dict_nested": dict[str, dict[str, list[int]]],
    "mapping": Mapping[str, int],
    "sequence": Sequence[int],
    "iterable": Iterable[int],
    "typed_dict": Film,
    "named_tuple": Place,
    "optional": int | None,
    "union": int | str,
    "union_none": str | int | None,
    "literal": Literal["a", "b"],
    "literal_one": Literal["a"],
    "literal_mixed": Literal["a", 1, True, None],
    "enum": Colour,
    "int_enum": Size,
    "mixed_enum": Mixed,
    "datetime": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "uuid": uuid.UUID,
    "uuid4": p.UUID4,
    "path": pathlib.Path,
    "file_path": p.FilePath,
    "directory_path": p.DirectoryPath,
    "pattern": re.Pattern,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ip_any": p.IPvAnyAddress,
    "ipv4_network": ipaddress.IPv4Network,
    "ipv6_interface": ipaddress.IPv6Interface,
    "any_url": p.AnyUrl,
    "http_url": p.HttpUrl,
    "file_url": p.FileUrl,
    "postgres": p.PostgresDsn,
    "redis": p.RedisDsn,
    "ws": p.WebsocketUrl,
    "secret": p.SecretStr,
    "secret_bytes": p.SecretBytes,
    "json": p.Json,
    "json_list": p.Json[list[int]],
    "base64": p.Base64Str,
    "base64_bytes": p.Base64Bytes,
    "base64_url": p.Base64UrlStr,
    "byte_size": p.ByteSize,
    "past": p.PastDate,
    "future": p.FutureDatetime,
    "aware": p.AwareDatetime,
    "naive": p.NaiveDatetime,
    "strict_int": p.StrictInt,
    "strict_str": p.StrictStr,
    "strict_bool": p.StrictBool,
    "finite": p.FiniteFloat,
    "positive": p.PositiveInt,
    "negative": p.NegativeFloat,
    "non_negative": p.NonNegativeInt,
    "conint": p.conint(ge=1, le=9),
    "multiple": p.conint(multiple_of=5),
    "confloat": p.confloat(gt=0, lt=1),
    "condecimal": p.condecimal(max_digits=5, decimal_places=2),
    "constr": p.constr(min_length=2, max_length=5),
    "constr_pattern": p.constr(pattern=r"^[a-z]{2}\d+$"),
    "conlist": p.conlist(int, min_length=1, max_length=3),
    "conset": p.conset(int, min_length=1, max_length=3),
    "conset_enum": p.conset(Colour, min_length=1),
    "confrozenset": p.confrozenset(Size, max_length=2),
    "condate": p.condate(),
    "annotated": Annotated[int, Field(gt=3, description="more than three")],
    "examples": Annotated[str, Field(examples=["x"])],
    "deprecated": Annotated[str, Field(deprecated=True)],
    "title": Annotated[int, Field(title="T", json_schema_extra={"x-y": 1})],
    "unique": Annotated[list[str], Field(json_schema_extra={"uniqueItems": True})],
    "format_extra": Annotated[str, Field(json_schema_extra={"format": "password"})],
    "lookahead": Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*[a-z])(?=.*[0-9]).{6,12}$"})],
    "not_empty": Annotated[str, Field(json_schema_extra={"not": {"const": ""}})],
    "not_never": Annotated[str, Field(json_schema_extra={"not": {"not": {}}})],
    "contains": Annotated[list[int], Field(json_schema_extra={"contains": {"const": 7}, "minContains": 1})],
    "min_contains": Annotated[list[int], Field(json_schema_extra={"contains": {"const": 7}, "minContains": 0})],
    "country": Annotated[str, Field(pattern=r"^[A-Z]{2}$")],
    "model": Inner,
    "models": list[Inner],
    "model_map": dict[str, Inner],
    "model_or_none": Inner | None,
    "lists_of_unions": list[int | str | None],
    "deep_list": list[list[list[int]]],
}


def adapters() -> list[tuple[str, TypeAdapter[Any]]]:
    """Each field type as the one field of a model."""
    return [(name, TypeAdapter(p.create_model("Model", field=(kind, ...)))) for name, kind in FIELDS.items()]


class Person(BaseModel):
    """With annotations, defaults and an alias."""

    model_config = ConfigDict(title="A person", json_schema_extra={"examples": [{"name": "A"}]})
    name: str = Field(description="How they are called", min_length=1)
    age: int = Field(0, ge=0, le=150)
    email: str = Field("", alias="eMail", json_schema_extra={"format": "email"})
    friends: list[Person] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: Colour = Colour.RED


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int
    __pydantic_extra__: dict[str, int]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Fish(BaseModel):
    kind: Literal["fish", "shark"]
    depth: float


class Zoo(BaseModel):
    star: Annotated[Cat | Dog | Fish, Field(discriminator="kind")]
    others: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Nest(BaseModel):
    pet: Annotated[Annotated[Cat | Dog, Field(discriminator="kind")] | Fish, Field(discriminator="kind")]


class Untagged(BaseModel):
    pet: Cat | Dog


class Node(BaseModel):
    value: int
    left: Node | None = None
    right: Node | None = None


class Leaf(BaseModel):
    op: Literal["leaf"] = "leaf"
    value: float


class Sum(BaseModel):
    op: Literal["sum"] = "sum"
    parts: list[Expression]


Expression = Annotated[Leaf | Sum, Field(discriminator="op")]


class Formula(BaseModel):
    root: Expression


class Ints(RootModel[list[int]]):
    pass


class Named(RootModel[dict[str, Inner]]):
    pass


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None = None


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Event(BaseModel):
    name: str
    date: dt.date
    starts: dt.time | None = None
    participants: set[str] = set()
    link: p.HttpUrl | None = None
    place: Place | None = None


class Search(BaseModel):
    query: str
    filters: dict[Literal["lang", "site"], str] = {}
    limit: Annotated[int, Field(gt=0, le=100)] = 10
    order: Literal["asc", "desc"] = "asc"
    since: dt.datetime | None = None


class Invoice(BaseModel):
    number: Annotated[str, Field(pattern=r"^INV-[0-9]{6}$")]
    total: decimal.Decimal
    currency: Literal["EUR", "USD"]
    issued: dt.date
    lines: list[Inner] = Field(min_length=1)


class Login(BaseModel):
    user: str
    password: p.SecretStr
    token: uuid.UUID | None = None


MODELS: list[type[BaseModel]] = [Person, Strict, Loose, Zoo, Nest, Untagged, Node, Formula, Ints, Named, Page[int],
                                 Page[Inner], Reasoning, Event, Search, Invoice, Login]  # fmt: skip
