"""JSON schemas as people's tools write them: pydantic, dataclasses, zod 3 and 4, OpenAPI 3.1; (name, schema) each."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter

import dataclass_models
import openapi_models
import pydantic_models
from paths import DATA

FOLDER = DATA / "schemas"
Named = tuple[str, dict[str, Any]]


def of_zod(version: int) -> list[Named]:
    """What `data/schemas/zod.mjs` wrote."""
    lines = (FOLDER / f"zod{version}.jsonl").read_text().splitlines()
    return [(f"zod{version}-{name}", schema) for name, schema in map(json.loads, lines)]


def of_pydantic() -> list[Named]:
    """Each field type by itself in a model, and models that are more."""
    found = [(f"pydantic-{name}", adapter.json_schema()) for name, adapter in pydantic_models.adapters()]
    return found + [(f"pydantic-{model.__name__}", model.model_json_schema()) for model in pydantic_models.MODELS]


def of_dataclasses() -> list[Named]:
    """As pydantic reads them."""
    kinds = [
        kind for kind in vars(dataclass_models).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    return [(f"dataclass-{kind.__name__}", TypeAdapter(kind).json_schema()) for kind in kinds]


def of_openapi() -> list[Named]:
    """Components, each by a reference to it in its document."""
    components = openapi_models.DOCUMENT["components"]
    return [
        (f"openapi-{name}", {"$ref": f"#/components/schemas/{name}", "components": components})
        for name in components["schemas"]
    ]


@cache
def all_models() -> list[Named]:
    """All of them, those of the tools in turn."""
    return [*of_pydantic(), *of_dataclasses(), *of_zod(3), *of_zod(4), *of_openapi()]
