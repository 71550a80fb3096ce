"""What the HTTP edge may be told; the engine's own options are in core/config.py."""

from __future__ import annotations

import msgspec

from quire.core.errors import ConfigError

GENERATION_CONFIGS = ("auto", "vllm")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Names are the command line's. The default host is the loopback address (vLLM's is 0.0.0.0): nothing is reachable
    from other machines until asked for. Times are in seconds, sizes in bytes.

    `scheduling_policy` repeats the engine's, so that a priority is refused where it would have no effect. `seed` fixes
    the sequence of seeds that requests without one get; 0 draws each at random.
    `allow_runtime_lora_updating` lets clients load adapters from folders on the server's disk.
    `allowed_hosts` empty = loopback names on a loopback address (against DNS rebinding), any name elsewhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    served_model_name: tuple[str, ...] = ()
    generation_config: str = "auto"
    scheduling_policy: str = "fcfs"
    seed: int = 0
    allowed_hosts: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    header_timeout: float = 15.0
    write_timeout: float = 30.0
    keep_alive_timeout: float = 65.0
    stall_timeout: float = 120.0
    access_log: bool = False
    allow_runtime_lora_updating: bool = False

    def validate(self) -> None:
        """Refuse what cannot work, naming the option."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must lie in [0, 65535]; 0 takes a free one", param="port")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together: give both", param="ssl_certfile")
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"--generation-config {self.generation_config!r} is not one of {', '.join(GENERATION_CONFIGS)}",
                param="generation_config",
            )
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key must not be empty", param="api_key")
        if not self.shutdown_timeout >= 0:
            raise ConfigError("--shutdown-timeout must not be negative", param="shutdown_timeout")
        for name in ("body_timeout", "header_timeout", "write_timeout", "keep_alive_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0 seconds", param=name)
        if self.max_body_bytes < 1024:
            raise ConfigError("--max-body-bytes must be at least 1024", param="max_body_bytes")
