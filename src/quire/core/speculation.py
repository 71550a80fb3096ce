"""What is asked of speculative decoding, in the keys of vLLM's `speculative_config`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.errors import ConfigError

METHODS = ("ngram", "draft_model", "self", "medusa", "eagle", "eagle3")
WITH_MODEL = ("draft_model", "medusa", "eagle", "eagle3")
"""Methods that `model` names a folder for."""
HEADS = ("medusa", "eagle", "eagle3")
"""Those whose folder holds heads of the target, not a model."""
MOST_TOKENS = 32
"""Drafted tokens of a sequence and step; a tree has room for twice as many."""
DEFAULT_TOKENS = {"ngram": 8, "draft_model": 5, "self": 5, "medusa": 0, "eagle": 4, "eagle3": 4}


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed ahead. What comes out does not depend on any of it.

    `num_speculative_tokens`: most drafted tokens of a sequence and step. `prompt_lookup_min`, `prompt_lookup_max`: how
    many last tokens must be found earlier, and how many are compared (ngram). `model`: the folder of the draft
    model, or of heads (medusa, eagle, eagle3), and `quantization` what a model's 16-bit weights become; with `self` it
    is the same checkpoint, of which only the first `layers` run if that is not 0. `adaptive`: each step drafts as many
    as pay; otherwise always all.
    """

    method: str = ""
    model: str | None = None
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16
    quantization: str | None = None
    layers: int = 0
    adaptive: bool = True
    draft_tensor_parallel_size: int = 1

    @property
    def tokens(self) -> int:
        """Most drafted tokens of a sequence and step."""
        return self.num_speculative_tokens or DEFAULT_TOKENS[self.method]


def parse_speculation(config: str | None, model: str | None, tokens: int | None) -> Speculation | None:
    """From `speculative_config` as JSON, or the two options of older calls; None where nothing is asked for.

    `ConfigError` naming the key that is wrong.
    """
    if config is not None and (model or tokens):
        raise _error("gives the model and the number of tokens too: leave out the other two options")
    given: dict[str, Any] = {"model": model, "num_speculative_tokens": tokens or 0}
    if config is not None:
        try:
            given = msgspec.json.decode(config, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise _error(f"{config!r} is not a JSON object: {error}") from None
    elif model is None:
        if tokens:
            raise _error('num_speculative_tokens alone does not say who drafts; for example: {"method": "ngram"}')
        return None
    if given.get("model") in ("[ngram]", "ngram"):  # vLLM before 0.6.4 spelled it so
        given |= {"method": "ngram", "model": None}
    given = {key: value for key, value in given.items() if value is not None}
    given.setdefault("method", "draft_model" if "model" in given else "")
    try:
        asked = msgspec.convert(given, Speculation)
    except msgspec.ValidationError as error:
        known = ", ".join(Speculation.__struct_fields__)
        raise _error(f"{error}; known keys are {known}") from None
    _check(asked)
    return asked


def _check(asked: Speculation) -> None:
    if asked.method not in METHODS:
        raise _error(f"method {asked.method!r} is not one of {', '.join(METHODS)}")
    if not 0 <= asked.num_speculative_tokens <= MOST_TOKENS:
        raise _error(f"num_speculative_tokens {asked.num_speculative_tokens} must lie in [1, {MOST_TOKENS}]")
    if not 1 <= asked.prompt_lookup_min <= asked.prompt_lookup_max <= 256:
        raise _error("1 <= prompt_lookup_min <= prompt_lookup_max <= 256 must hold")
    if (asked.method in WITH_MODEL) != (asked.model is not None):
        raise _error(
            f"model names the folder of what drafts: each of {', '.join(WITH_MODEL)} needs it, and no other takes it"
        )
    if asked.method == "self" and (asked.quantization is None) == (asked.layers == 0):
        raise _error("method self needs quantization (the same checkpoint at fewer bits) or layers (its first ones)")
    if asked.layers and asked.method != "self":
        raise _error("layers needs method self")
    if asked.quantization is not None and asked.method in ("ngram", *HEADS):
        raise _error("quantization needs a model that drafts; heads stay in the bits of the target's 16-bit weights")
    if asked.layers < 0:
        raise _error("layers must not be negative")
    if asked.draft_tensor_parallel_size != 1:
        raise _error("draft_tensor_parallel_size: running on several devices is not built yet")


def _error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")
