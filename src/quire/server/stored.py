"""Responses that clients may come back to, in memory and bounded: of each tenant the oldest make room."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_COUNT = 1000
MAX_TENANT_BYTES = 16 << 20
MAX_BYTES = 128 << 20


class Stored(NamedTuple):
    """A response as clients read it, and the items of the conversation up to its end; both are JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """By tenant and by id: nobody finds another's. `count` and `tenant_bytes` bound what one has, `total` what all."""

    def __init__(self, count: int = MAX_COUNT, tenant_bytes: int = MAX_TENANT_BYTES, total: int = MAX_BYTES) -> None:
        self._count, self._tenant_bytes, self._total = count, tenant_bytes, total
        self._held: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, tenant: str, name: str, stored: Stored) -> bool:
        """Keep it; False where it alone is too large."""
        self.drop(tenant, name)
        if stored.size > min(self._tenant_bytes, self._total):
            return False
        self._held.setdefault(tenant, OrderedDict())[name] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        while len(self._held[tenant]) > self._count or self._sizes[tenant] > self._tenant_bytes:
            self.drop(tenant, next(iter(self._held[tenant])))
        while sum(self._sizes.values()) > self._total:
            most = max(self._sizes, key=lambda each: (self._sizes[each], each != tenant))
            self.drop(most, next(iter(self._held[most])))
        return name in self._held.get(tenant, ())

    def get(self, tenant: str, name: str) -> Stored | None:
        """What was kept, if it still is."""
        held = self._held.get(tenant)
        return None if held is None else held.get(name)

    def drop(self, tenant: str, name: str) -> bool:
        """Whether there was one to forget."""
        held = self._held.get(tenant)
        if held is None or (found := held.pop(name, None)) is None:
            return False
        self._sizes[tenant] -= found.size
        if not held:
            del self._held[tenant], self._sizes[tenant]
        return True
