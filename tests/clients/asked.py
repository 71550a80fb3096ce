"""What the scripts here ask; run in environments that have a client and nothing of ours."""

from __future__ import annotations

import json
import sys

URL, MODEL = (sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else ("", "")
QUESTION = "What does os.path.join do?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def person(text: str) -> dict[str, object]:
    """The object in `text`, which must have the schema."""
    found: dict[str, object] = json.loads(text)
    assert set(found) == {"name", "age"} and isinstance(found["name"], str) and isinstance(found["age"], int), found
    return found
