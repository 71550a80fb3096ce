"""Fields that clients know and this server does not act on: refused by name with the reason, never ignored.

Each row: field, the values besides null that ask for nothing, and the reason.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.errors import BadRequest

_TOOLS = "not built; name functions in tools, and choose by tool_choice"
_MEDIA = "this server reads and writes text only"

UNBUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": (([],), "requests cannot bring code"),
    "kv_transfer_params": (({},), "moving KV blocks between servers is not built yet"),
    "vllm_xargs": (({},), "there are no such extra arguments here"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "documents": (([],), "retrieval is not built"),
    "chat_template": ((), "the template is the model's; requests cannot bring one"),
    "verbosity": ((), "verbosity is not built"),
    "modalities": ((["text"],), _MEDIA),
    "audio": ((), _MEDIA),
    "mm_processor_kwargs": (({},), _MEDIA),
    "prediction": ((), "predicted outputs are not built yet"),
    "web_search_options": ((), "this server never fetches anything"),
    "echo": ((False,), "chat completions cannot echo; use continue_final_message"),
    "refusal": ((), "refusals are not read back"),
    "include_obfuscation": ((False,), "obfuscation is not built"),
}


def refuse_unbuilt(body: msgspec.Struct, *, where: str = "", built: frozenset[str] = frozenset()) -> None:
    """Raise `BadRequest` naming the first field of `body` that asks for something not `built`."""
    for name in body.__struct_fields__:
        if name not in UNBUILT or name in built:
            continue
        value = getattr(body, name)
        neutral, reason = UNBUILT[name]
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise BadRequest(f"{where}{name}: {reason}", param=f"{where}{name}")
