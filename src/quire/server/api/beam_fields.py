"""The fields of beam search, and those that mean nothing beside it."""

from __future__ import annotations

from quire.core.errors import BadRequest
from quire.core.params import MAX_LOGPROBS
from quire.engine.beam import BeamSearchParams
from quire.server.api.protocol import SamplingFields

_OWN = ("length_penalty", "early_stopping")
_BESIDE = (
    "stream", "logprobs", "prompt_logprobs", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words",
    "min_tokens", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "tools", "echo",
)  # fmt: skip
_OFF: tuple[object, ...] = (0, 0.0, [], {})
_WHOLE = ("top_p", "repetition_penalty")


def check_beams(body: SamplingFields) -> None:
    """`BadRequest` for what beam search cannot be asked for with, and for its fields without it."""
    if not body.use_beam_search:
        for name in _OWN:
            value = getattr(body, name)
            if value is not None and value is not False and (value is True or value != 1.0):
                raise BadRequest(f"{name}: has no effect without use_beam_search", param=name)
        return
    if not 1 <= (body.n or 1) <= MAX_LOGPROBS // 2:
        raise BadRequest(f"n: is the number of beams, which must lie in [1, {MAX_LOGPROBS // 2}]", param="n")
    if isinstance(body.early_stopping, str) and body.early_stopping != "never":
        raise BadRequest("early_stopping: must be true, false or never", param="early_stopping")
    for name in _BESIDE:
        value = getattr(body, name, None)
        plain = value is None or value is False or (name != "logprobs" and value is not True and value in _OFF)
        plain = plain or (name in _WHOLE and value == 1.0)
        if not plain:
            raise BadRequest(
                f"{name}: has no effect with use_beam_search, or cannot be had of it; leave it out", param=name
            )


def beam_params(body: SamplingFields, max_tokens: int) -> BeamSearchParams:
    """What `body` asks of a search of at most `max_tokens` tokens; `BadRequest` naming a field that is out of range."""
    asked = BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        ignore_eos=bool(body.ignore_eos),
        early_stopping=body.early_stopping is True,
    )
    asked.validate()
    return asked
