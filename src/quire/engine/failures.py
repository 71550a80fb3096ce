"""What the system refuses while a model is loaded, told as errors that name the file or the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import ConfigError, ModelError

NO_MEMORY = "can't allocate memory"
"""In the message of the RuntimeError that torch raises instead of MemoryError."""


@contextmanager
def told_plainly(model: str) -> Iterator[None]:
    """`ModelError` for a file that cannot be opened, read or mapped, `ConfigError` where memory runs out."""
    try:
        yield
    except OSError as error:
        what = error.filename or f"a file of {model or 'the embedded model'}"
        raise ModelError(f"{what} cannot be read: {error.strerror or error}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and NO_MEMORY not in str(error):
            raise
        raise ConfigError(
            f"memory ran out while {model or 'the embedded model'} was loaded; use a smaller model, quantize it "
            "(--quantization int4), or lower --kv-cache-memory-bytes"
        ) from error
