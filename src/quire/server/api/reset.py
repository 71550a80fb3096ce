"""POST /reset_prefix_cache, in vLLM's shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.server.http.errors import HttpError
from quire.server.service import Service


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Empty the prefix cache: requests that come later find nothing of earlier ones.

    vLLM leaves the cache as it is while blocks are in use. Here it is emptied: those that run keep their blocks, which
    nobody else finds any more. So vLLM's `reset_running_requests`, which computes them again, is refused.
    """
    if not service.options.allow_reset_prefix_cache:
        message = "the prefix cache cannot be reset; start the server with --allow-reset-prefix-cache"
        raise HttpError(403, message, code="forbidden")
    if request.query_params.get("reset_running_requests", "false").lower() not in ("false", "0"):
        raise BadRequest(
            "reset_running_requests: not offered: the weights never change, so what runs may keep what it computed",
            param="reset_running_requests",
        )
    service.engine.reset_prefix_cache()
    return Response(status_code=200)
