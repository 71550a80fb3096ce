"""The models that `quire pull` knows, as a table."""

from __future__ import annotations

from quire.store.catalog import CatalogEntry, catalog
from quire.store.progress import amount
from words import table


def every_model() -> str:
    """A row for each model of the catalog."""
    rows = [
        (
            f"`{name}`",
            ", ".join(f"`{each}`" for each in entry.also),
            _source(entry),
            entry.quantization or "16 or 32 bits",
            amount(1e6 * entry.mb),
            f"{entry.context:,}",
            entry.kind,
            entry.license,
        )
        for name, entry in catalog().items()
    ]
    return table(("name", "also", "from", "quantization", "size", "context", "kind", "license"), rows)


def _source(entry: CatalogEntry) -> str:
    if entry.python is not None:
        return f"{entry.python.package} on the Python index"
    return f"[{entry.hub}](https://huggingface.co/{entry.hub})"
