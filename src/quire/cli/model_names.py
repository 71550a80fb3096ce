"""Names of models as commands take them: which are known here, how one gets here, and which is meant by none."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

BUNDLED = (
    "no model was given: this is pydoc, the model that comes with quire (6 M parameters; it knows documented Python "
    "functions and little else). For one that chats: quire pull smollm2"
)


def ensure(name: str) -> str:
    """The model `name` as the engine takes it, pulled first where it is not here; progress goes to standard error."""
    from quire.store.progress import Shown
    from quire.store.pull import ensure as pulled

    with Shown() as progress:
        return pulled(name, progress)


def is_stored(name: str) -> bool:
    """Whether a model of this name was pulled."""
    from quire.store.names import find

    return find(name) is not None


def with_default(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with a model: where none was given that of the store's default, or the bundled one; one line on
    standard error says which."""
    found = dict(options)
    if "model" in found:
        return found
    from quire.store.names import default_model
    from quire.store.progress import amount

    default = default_model()
    if default is None:
        print(f"quire: {BUNDLED}", file=sys.stderr)
        return found
    facts = ", ".join(word for word in (amount(default.size), default.quantization, default.license) if word)
    print(f"quire: no model was given: this is {default.name} ({facts}), the default of quire list", file=sys.stderr)
    return found | {"model": default.name}
