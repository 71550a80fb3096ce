"""Changes of adapters that are under way, each with whoever waits for it."""

from __future__ import annotations

import asyncio

from quire.core.errors import BadRequest, QuireError
from quire.engine.client import EngineClient


class AdapterChanges:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def change(self, client: EngineClient, name: str, folder: str) -> None:
        """Ask for a change and wait until it is settled; `BadRequest` while another of this name is under way."""
        if name in self._waiting:
            raise BadRequest(f"lora_name: {name!r} is being changed by another request", param="lora_name")
        done = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            client.change_adapter(name, folder)
            await done
        finally:
            self._waiting.pop(name, None)

    def settle(self, name: str, error: QuireError | None) -> None:
        """Wake who asked for a change of adapter `name`, unless nobody waits any more."""
        done = self._waiting.get(name)
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def fail(self, error: QuireError) -> None:
        """None of them comes to an end any more."""
        for name in self._waiting:
            self.settle(name, error)
