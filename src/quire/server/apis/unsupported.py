"""Fields of bodies that mean nothing here, so that none is ignored in silence.

Those that are known and not acted on are refused by name with the reason, or named in a warning, as are those that
nobody knows. Each row of `UNBUILT`: field, the values besides null that ask for nothing, and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.errors import BadRequest

_TOOLS = "not built; name functions in tools, and choose by tool_choice"
_MEDIA = "this server reads text and images, and writes text only"

UNBUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": (([],), "requests cannot bring code"),
    "kv_transfer_params": (({},), "moving KV blocks between servers is not built yet"),
    "vllm_xargs": (({},), "there are no such extra arguments here"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "multi_modal_data": (({},), "completions are of texts and token ids; send images to /v1/chat/completions"),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "documents": (([],), "retrieval is not built"),
    "chat_template": ((), "the template is the model's; requests cannot bring one"),
    "verbosity": ((), "verbosity is not built"),
    "modalities": ((["text"],), _MEDIA),
    "audio": ((), _MEDIA),
    "mm_processor_kwargs": (({},), "images are cut as the model's own files say"),
    "prediction": ((), "predicted outputs are not built yet"),
    "web_search_options": ((), "this server never fetches anything"),
    "echo": ((False,), "chat completions cannot echo; use continue_final_message"),
    "refusal": ((), "refusals are not read back"),
    "conversation": ((), "conversations are not kept; use previous_response_id"),
    "max_tool_calls": ((), "the server itself calls no tools"),
    "template": (("",), "the template is the model's; requests cannot bring one"),
    "context": (([],), "conversations are sent as messages, to /api/chat"),
    "mcp_servers": (([],), "this server calls no other"),
    "container": ((), "this server runs no code"),
    "context_management": (({},), "contexts are not edited here"),
    "include_obfuscation": ((False,), "obfuscation is not built"),
}

WITHOUT_EFFECT = ("metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields that cannot change an answer: the response's `Warning` header names them."""


def without_effect(body: msgspec.Struct, names: Sequence[str] = WITHOUT_EFFECT) -> list[str]:
    """Fields among `names` that `body` gives."""
    return [name for name in names if getattr(body, name) is not None]


def refuse_unbuilt(body: msgspec.Struct, *, where: str = "", built: frozenset[str] = frozenset()) -> None:
    """Raise `BadRequest` naming the first field of `body` that asks for something not `built`."""
    for name in body.__struct_fields__:
        if name not in UNBUILT or name in built:
            continue
        value = getattr(body, name)
        neutral, reason = UNBUILT[name]
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise BadRequest(f"{where}{name}: {reason}", param=f"{where}{name}")
