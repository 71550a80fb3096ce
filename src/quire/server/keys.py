"""Who may ask, who is who, and how often: keys from options and from a file that is read again on SIGHUP."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError, Overloaded
from quire.server.server_options import ServerOptions

logger = logging.getLogger("quire.server")


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key in the file, under the tenant's name. `weight`: of its share where the policy is fair.

    `max_sequences` may be in flight at once. Limits of 0 are none. `admin`: may load and unload models.
    """

    key: str
    weight: float = 1.0
    requests_per_minute: float = 0.0
    max_sequences: int = 0
    admin: bool = False


@dataclass(frozen=True)
class Tenant:
    """Who asks; nameless where nobody can be told from others. `salt` begins the salt of the prefix cache."""

    name: str = ""
    salt: str = ""
    weight: float = 1.0
    requests_per_minute: float = 0.0
    max_sequences: int = 0
    admin: bool = False

    def called(self, user: object) -> str:
        """The name by which shares are counted: where keys tell nobody apart, what the body's `user` says."""
        return self.name or (user if isinstance(user, str) else "")


NOBODY = Tenant()


class Keys:
    """All keys, by their digests. Whoever sends one is its tenant."""

    def __init__(self, options: ServerOptions) -> None:
        """`ConfigError` naming what is wrong with the file."""
        self._given, self._file = options.api_key, options.api_keys_file
        self._tenants = self._read()
        self._left: dict[str, tuple[float, float]] = {}

    @property
    def needed(self) -> bool:
        """Whether there are any."""
        return bool(self._tenants) or self._file is not None

    @property
    def from_file(self) -> bool:
        """Whether there is a file to read again."""
        return self._file is not None

    def reload(self) -> None:
        """Read the file again; where that cannot be, what was there stays."""
        try:
            self._tenants = self._read()
            logger.info("%s was read again: %d keys in all", self._file, len(self._tenants))
        except ConfigError as error:
            logger.error("%s; the keys of before stay", error.message)

    def _read(self) -> dict[bytes, Tenant]:
        given = dict.fromkeys(self._given)
        found = {_digest(key.encode()): Tenant(f"key {i}", f"key {i}\0", admin=True) for i, key in enumerate(given)}
        if len(found) == 1 and self._file is None:
            found = dict.fromkeys(found, Tenant(admin=True))
        for name, entry in read_keys(self._file).items() if self._file is not None else ():
            digest = _digest(entry.key.encode())
            if digest in found:
                raise ConfigError(f"--api-keys-file {self._file}: the key of {name!r} is there twice")
            found[digest] = Tenant(name, f"tenant {name}\0", *msgspec.structs.astuple(entry)[1:])
        return found

    def tenant(self, headers: list[tuple[bytes, bytes]]) -> Tenant | None:
        """Whose key was sent, as a bearer token or as Anthropic's `x-api-key`, or None: none that is known."""
        bearers = [value for name, value in headers if name == b"authorization"]
        given = [value.strip() for name, value in headers if name == b"x-api-key"]
        if len(bearers) > 1 or len(given) > 1 or any(value[:7].lower() != b"bearer " for value in bearers):
            return None
        given += [value[7:].strip() for value in bearers]
        if len(set(given)) != 1:
            return None
        digest = _digest(given[0])
        matches = [tenant for key, tenant in self._tenants.items() if hmac.compare_digest(digest, key)]
        return matches[0] if matches else None

    def spend(self, tenant: Tenant) -> None:
        """Count a request. `Overloaded` where it is more than a bucket that fills at the tenant's rate still holds."""
        rate = tenant.requests_per_minute / 60
        if not rate:
            return
        now, most = time.monotonic(), max(1.0, tenant.requests_per_minute)
        left, since = self._left.get(tenant.name, (most, now))
        left = min(most, left + rate * (now - since))
        if left < 1.0:
            wait = max(1, math.ceil((1.0 - left) / rate))
            raise Overloaded(
                f"the key of {tenant.name} allows {tenant.requests_per_minute:g} requests a minute; "
                f"try again in {wait} s",
                retry_after=wait,
            )
        self._left[tenant.name] = (left - 1.0, now)


def read_keys(path: str) -> dict[str, KeyEntry]:
    """The file: a JSON object of names and entries. `ConfigError` naming what is wrong."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path}: {error.strerror}", param="api_keys_file") from None
    try:
        _check_names(data, path)
        found = msgspec.json.decode(data, type=dict[str, KeyEntry])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        message = f'--api-keys-file {path}: {error}; it looks like {{"NAME": {{"key": "...", "weight": 2}}}}'
        raise ConfigError(message, param="api_keys_file") from None
    for name, entry in found.items():
        limits = (entry.requests_per_minute, entry.max_sequences)
        if not name or not entry.key or not entry.weight > 0 or not all(limit >= 0 for limit in limits):
            raise ConfigError(
                f"--api-keys-file {path}: {name!r} needs a name, a key, a weight above 0 and limits of at least 0",
                param="api_keys_file",
            )
    return found


def _check_names(data: bytes, path: str) -> None:
    """`ConfigError` for a name that stands twice in one object: its first entry would be lost without a word."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            lines = [i + 1 for i, line in enumerate(data.decode().splitlines()) if json.dumps(twice) in line]
            where = f"lines {', '.join(map(str, lines))}" if len(lines) > 1 else f"line {lines[0] if lines else 1}"
            raise ConfigError(f"--api-keys-file {path}: {twice!r} is there twice ({where})", param="api_keys_file")
        return dict(pairs)

    with contextlib.suppress(ValueError):  # msgspec says what is wrong
        json.loads(data, object_pairs_hook=once)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
