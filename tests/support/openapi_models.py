"""Components of an OpenAPI 3.1 document, as FastAPI and hand-written descriptions have them."""

from __future__ import annotations

from typing import Any


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def thing(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | ({"required": required.split()} if required else {})


TEXT, INT, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
SCHEMAS: dict[str, Any] = {
    "Pet": thing("id name", id={**INT, "format": "int64"}, name=TEXT, tag=TEXT),
    "Pets": {"type": "array", "maxItems": 10, "items": ref("Pet")},
    "Error": thing("code message", code={**INT, "format": "int32"}, message=TEXT),
    "NewPet": {"allOf": [ref("Pet"), thing("", photoUrls={"type": "array", "items": {**TEXT, "format": "uri"}})]},
    "Category": thing("", id={**INT, "format": "int64", "example": 1}, name={**TEXT, "example": "Dogs"}),
    "Status": {**TEXT, "enum": ["placed", "approved", "delivered"], "description": "Order status"},
    "Order": thing("id status", id={**INT, "format": "int64"}, status=ref("Status"),
                   shipDate={**TEXT, "format": "date-time"}, quantity={**INT, "format": "int32", "minimum": 1},
                   complete={"type": "boolean", "default": False}),
    "User": thing("username", username=TEXT, password={**TEXT, "format": "password", "writeOnly": True},
                  email={**TEXT, "format": "email"}, phone={**TEXT, "pattern": "^\\+?[0-9 ]{3,20}$"}),
    "Upload": thing("file", file={**TEXT, "format": "binary"}, note=TEXT),
    "Blob": thing("data", data={**TEXT, "format": "byte", "contentEncoding": "base64", "contentMediaType": "a/b"}),
    "Cat": thing("petType", petType={"const": "cat"}, huntingSkill={"enum": ["lazy", "adventurous"]}),
    "Dog": thing("petType", petType={"const": "dog"}, packSize={**INT, "format": "int32", "minimum": 0}),
    "Animal": {"oneOf": [ref("Cat"), ref("Dog")], "discriminator": {"propertyName": "petType", "mapping": {
        "cat": "#/components/schemas/Cat", "dog": "#/components/schemas/Dog"}}},
    "Lizard": thing("", petType={**TEXT, "enum": ["lizard"], "default": "lizard"}, lovesRocks={"type": "boolean"}),
    "Reptile": {"oneOf": [ref("Lizard"), ref("Cat")], "discriminator": {"propertyName": "petType"}},
    "AnyAnimal": {"anyOf": [ref("Cat"), ref("Dog")], "discriminator": {"propertyName": "petType"}},
    "Shape": {"oneOf": [thing("radius", radius=NUMBER), thing("width height", width=NUMBER, height=NUMBER)]},
    "ClosedShape": {"oneOf": [{**thing("radius", radius=NUMBER), "additionalProperties": False},
                              {**thing("side", side=NUMBER), "additionalProperties": False}]},
    "Nullable": thing("a", a={"type": ["string", "null"]}, b={"oneOf": [ref("Pet"), {"type": "null"}]}),
    "OldNullable": thing("", a={**TEXT, "nullable": True}),
    "Money": thing("amount currency", amount={**TEXT, "format": "decimal"}, currency={**TEXT, "pattern": "^[A-Z]{3}$"}),
    "Tree": thing("value", value=INT, children={"type": "array", "items": ref("Tree")}),
    "Labels": {"type": "object", "additionalProperties": TEXT},
    "Annotations": {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,5}$"}, "additionalProperties": INT},
    "Quotas": {"type": "object", "propertyNames": {"enum": ["cpu", "memory"]}, "additionalProperties": INT},
    "Extensions": {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
    "Roles": {"type": "array", "items": {"enum": ["admin", "editor", "viewer"]}, "uniqueItems": True, "minItems": 1},
    "Emails": {"type": "array", "items": {**TEXT, "format": "email"}, "uniqueItems": True},
    "One": {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    "Card": {**thing("name", name=TEXT, card=TEXT, address=TEXT), "dependentRequired": {"card": ["address"]}},
    "OldCard": {**thing("name", name=TEXT, card=TEXT, address=TEXT), "dependencies": {"card": ["address"]}},
    "Billing": {**thing("", card=TEXT), "dependentSchemas": {"card": thing("address", address=TEXT)}},
    "Delivery": {**thing("method", method={"enum": ["pickup", "mail"]}, address=TEXT),
                 "if": {"properties": {"method": {"const": "mail"}}}, "then": {"required": ["address"]}},
    "Contact": {**thing("", email=TEXT, phone=TEXT), "anyOf": [{"required": ["email"]}, {"required": ["phone"]}]},
    "Patch": {**thing("", a=INT, b=TEXT), "minProperties": 1, "additionalProperties": False},
    "Few": {**thing("", a=INT, b=INT, c=INT), "maxProperties": 2, "additionalProperties": False},
    "Base": thing("id", id={**TEXT, "format": "uuid", "readOnly": True}, created={**TEXT, "format": "date"}),
    "Derived": {"allOf": [ref("Base"), thing("title", title=TEXT)], "unevaluatedProperties": False},
    "Described": {"$ref": "#/components/schemas/Base", "description": "beside a reference"},
    "Winners": {"type": "array", "items": INT, "contains": {"minimum": 100}, "minContains": 1},
    "Lottery": {"type": "array", "items": INT, "contains": {"const": 7}, "minContains": 0},
    "Coordinates": {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2},
    "Version": {**TEXT, "pattern": "^(?!0\\.)[0-9]+\\.[0-9]+$"}, "Never": thing("", a=INT, b={"not": {}}),
    "NotText": {"not": {"type": "string"}, "type": ["string", "integer"]},
    "NotAdmin": {**TEXT, "not": {"enum": ["admin"]}},
    "Exclusive": {**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "Percent": {**NUMBER, "multipleOf": 0.01, "maximum": 100},
    "Int64": {**INT, "format": "int64", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "Float32": {**NUMBER, "format": "float", "maximum": 3.4e38}, "Hostname": {**TEXT, "format": "hostname"},
    "Relative": {**TEXT, "format": "uri-reference"}, "Pointer": {**TEXT, "format": "json-pointer"},
    "HTTPValidationError": thing("", detail={"type": "array", "items": ref("ValidationError"), "title": "Detail"}),
    "ValidationError": {**thing("loc msg type", loc={"type": "array", "items": {"anyOf": [TEXT, INT]}}, msg=TEXT,
                                type=TEXT), "title": "ValidationError"},
    "Problem": {**thing("type title", type={**TEXT, "format": "uri", "default": "about:blank"}, title=TEXT,
                        status=INT),
                "x-internal": True, "xml": {"name": "problem"}, "externalDocs": {"url": "https://example.com"}},
    "Free": {}, "Anything": thing("", any={}, object={"type": "object"}, list={"type": "array"}),
    "Empty": {"type": "object", "additionalProperties": False}, "Const": {"const": {"a": [1, None]}},
}  # fmt: skip
DOCUMENT: dict[str, Any] = {"openapi": "3.1.0", "components": {"schemas": SCHEMAS}}
