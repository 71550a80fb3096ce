"""Errors a user can meet. Each names the thing, the reason and what to do.

The server maps `status` to HTTP, the command line `exit_code` to its own.
"""

from __future__ import annotations

from collections.abc import Callable


class QuireError(Exception):
    """Base of all expected errors: printed as one message, never as a traceback."""

    status = 500
    kind = "internal_error"
    exit_code = 1

    def __init__(self, message: str | Callable[[str], str], *, param: str | None = None) -> None:
        """`param`: the field to blame, with which and a colon `message` begins then. A message that speaks of the field
        again is a template: a function of the field's name."""
        text = message if isinstance(message, str) else message(param or "")
        super().__init__(text)
        self.message = text
        self.param = param
        self._template = None if isinstance(message, str) else message

    @property
    def reason(self) -> str:
        """The message without the field that it begins with."""
        return self.message if self.param is None else self.message.removeprefix(f"{self.param}: ")

    def about(self, field: str) -> str:
        """The message as it is where the client calls the field `field`: each API has its own names."""
        return f"{field}: {self.reason}" if self._template is None else self._template(field)


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up, as the tokenizer's does on some texts: that is no `Exception`."""
    return type(error).__name__ == "PanicException"


class BadRequest(QuireError):
    """A request field is missing, of the wrong type or out of range; `param` names it."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(BadRequest):
    """The prompt, or prompt and `max_tokens` together, exceed what the model or its KV cache can hold."""

    code = "context_length_exceeded"


class GrammarTooComplex(BadRequest):
    """The matcher of a request's grammar reached its limits while it read what had been generated."""

    code = "grammar_too_complex"


class NotFound(QuireError):
    """A named model, adapter or route does not exist."""

    status = 404
    kind = "not_found_error"


class Overloaded(QuireError):
    """The queue is full; the client should come back after `retry_after` seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(QuireError):
    """The engine is starting, draining or gone; the client should come back after `retry_after` seconds."""

    status = 503
    kind = "service_unavailable"

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFailure(QuireError):
    """The engine failed on an accepted request (a defect of ours, or numerics of the model)."""

    status = 500
    kind = "engine_error"


class NumericError(EngineFailure):
    """The logits of one request were NaN or infinite; those of the others in its batch were not."""

    code = "numerics"


class PartFailure(EngineFailure):
    """A part of the work that is done for one request alone failed (`quire.core.blame` lists them)."""

    code = "request_part"


class RankFailure(EngineFailure):
    """Another process of the same engine has ended; no request is suspected."""


_TOLD: dict[str, type[QuireError]] = {
    each.__name__: each for each in (BadRequest, ContextTooLong, GrammarTooComplex, NumericError, PartFailure)
}


def told_error(kind: str, message: str, param: str = "") -> QuireError:
    """The error that an engine told of: `kind` is the name of its class, `EngineFailure` where none is known by it."""
    return _TOLD.get(kind, EngineFailure)(message, param=param or None)


class ModelError(QuireError):
    """A model folder or file cannot be used; the message names file and field."""

    exit_code = 2
    kind = "model_error"


class ConfigError(QuireError):
    """An option, or a pair of options, is refused at start with the reason."""

    exit_code = 2
    kind = "config_error"
