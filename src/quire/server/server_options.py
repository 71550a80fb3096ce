"""What the HTTP edge may be told; the engine's own options are in core/config.py."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec.structs import replace

from quire.core.errors import ConfigError
from quire.core.options.fields import about
from quire.core.options.values import check_values

ACCESS_LOGS = ("off", "text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
USUAL_BODY, LARGE_BODY = 8 << 20, 64 << 20
PER_MODEL = ("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice")
"""Options that each of several models may have otherwise."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Names are the command line's. The default host is the loopback address (vLLM's is 0.0.0.0): nothing is reachable
    from other machines until asked for. Times are in seconds, sizes in bytes.

    `allow_runtime_lora_updating` lets clients load adapters from folders on the server's disk.
    `allowed_hosts` empty = loopback names on a loopback address (against DNS rebinding), any name elsewhere.
    """

    host: Annotated[str, about("Address to listen on; 0.0.0.0 = all.", common=True)] = "127.0.0.1"
    port: Annotated[int, about("Port to listen on; 0 = a free one.", ge=0, le=65535, common=True)] = 8000
    uds: Annotated[str | None, about("Listen on a Unix socket at this path, for this user only, not on a port.")] = None
    root_path: Annotated[str, about("Path under which a proxy shows the server.")] = ""
    playground: Annotated[bool, about("Show a page at / to try the model in a browser.")] = True
    allowed_origins: Annotated[
        tuple[str, ...],
        about("Web origin whose pages may call the server (CORS), * = any; may be given several times.", common=True),
    ] = ()
    log_level: Annotated[str, about("Lowest level of log messages.", LOG_LEVELS, common=True)] = "info"
    api_key: Annotated[
        tuple[str, ...], about("Key that clients must send as a bearer token; may be given several times.", common=True)
    ] = ()
    protect_metrics: Annotated[
        bool, about("Ask for a key at /health, /ping and /metrics too; /livez and /readyz are always open.")
    ] = False
    api_keys_file: Annotated[
        str | None,
        about(
            'JSON file of keys: {"NAME": {"key": "...", "weight": 2, "requests_per_minute": 60}}; read again on SIGHUP.'
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, about("Private key for HTTPS.")] = None
    ssl_certfile: Annotated[str | None, about("Certificate for HTTPS.")] = None
    allowed_hosts: Annotated[
        tuple[str, ...], about("Allowed values of a request's Host header. You can give it several times.")
    ] = ()
    shutdown_timeout: Annotated[float, about("Seconds to let requests finish after SIGTERM or SIGHUP.", ge=0)] = 30.0
    max_body_bytes: Annotated[
        int, about("Largest request body; 0 = 8 MiB, and 64 MiB where the model takes images or audio.")
    ] = 0
    max_prompt_logprobs: Annotated[
        int,
        about(
            "Most log-probabilities of prompts in a reply: tokens x (k + 1), for each choice that shows its prompt.",
            ge=0,
        ),
    ] = 1 << 18
    allow_media_url: Annotated[
        tuple[str, ...],
        about(
            "Host, or HOST:PORT, that images named by http and https are fetched from, several with commas; none is "
            "without it."
        ),
    ] = ()
    media_timeout: Annotated[float, about("Seconds that fetching an image may take, redirects included.", gt=0)] = 10.0
    max_images_gb: Annotated[
        float,
        about("GB (1e9 bytes) of images that requests in flight may have together; more are refused (429).", gt=0),
    ] = 2.0
    max_bodies_gb: Annotated[
        float, about("GB (1e9 bytes) of bodies that may be in the reading together; more are refused (429).", gt=0)
    ] = 1.0
    strict: Annotated[bool, about("Refuse requests with unknown fields. By default, a Warning header names them.")] = (
        False
    )
    body_timeout: Annotated[float, about("Seconds a client may take to send a body.", gt=0)] = 30.0
    header_timeout: Annotated[float, about("Seconds a client may take to send its headers.", gt=0)] = 15.0
    write_timeout: Annotated[float, about("Seconds a client may leave a response unread.", gt=0)] = 30.0
    stream_ping_interval: Annotated[
        float,
        about("Seconds without a token after which a stream gets its headers and a comment (: ping); 0 = never.", ge=0),
    ] = 15.0
    keep_alive_timeout: Annotated[float, about("Seconds an idle connection is kept.", gt=0)] = 65.0
    stall_timeout: Annotated[float, about("Seconds without progress after which the engine counts as dead.", gt=0)] = (
        120.0
    )
    watchdog_timeout: Annotated[
        float, about("Seconds without a step after which a busy engine is started again, at least; 0 = never.", ge=0)
    ] = 10.0
    max_engine_deaths: Annotated[
        int, about("Deaths of the engine within --engine-deaths-window that end the server; 1 = the first does.", ge=1)
    ] = 5
    engine_deaths_window: Annotated[float, about("Seconds within which deaths of the engine are counted.", gt=0)] = (
        600.0
    )
    access_log: Annotated[
        str, about("Log every request on standard output, as text or JSON.", ACCESS_LOGS, common=True)
    ] = "off"
    log_stats: Annotated[
        bool, about("Log a line every 10 seconds in which there is work: requests, tokens per second, KV cache.")
    ] = True
    explain_other_tenants: Annotated[
        bool,
        about("Let a prefix miss be explained by another tenant's prompt: whoever guesses at one learns that it was."),
    ] = False
    record: Annotated[
        str | None, about("Flight recorder: write requests and how they ended to this folder, for quire replay.")
    ] = None
    record_prompts: Annotated[
        bool, about("Record the tokens of prompts and answers too, so that a replay can compare them.")
    ] = False
    record_mib: Annotated[
        int, about("MiB of recordings in that folder at most; the oldest make room.", ge=8, le=1 << 20)
    ] = 256
    otlp_traces_endpoint: Annotated[
        str | None, about("Send OpenTelemetry traces to this collector: http://HOST:4318 (OTLP over HTTP).")
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool, about("Let clients load and unload LoRA adapters from folders on this machine.")
    ] = False

    tool_call_parser: Annotated[
        str | None,
        about(
            "Format of the model's tool calls (hermes, mistral, ...); found in its chat template if not given.",
            common=True,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        about("Format of the model's reasoning (deepseek_r1, qwen3, ...); found like that of tool calls.", common=True),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, about("Refuse to start if quire cannot read the model's tool calls. quire reads them whenever it can.")
    ] = False

    models: Annotated[
        str | None,
        about(
            "TOML file of several models to serve: [models.NAME] with model, pinned and options of the engine; or give "
            "--model NAME=PATH[,option=value...] several times.",
            common=True,
        ),
    ] = None
    models_memory_gb: Annotated[
        float,
        about("GB (1e9 bytes) that several models may take at a time: weights and KV caches; 0 = no bound.", ge=0),
    ] = 0.0
    models_wait: Annotated[
        float, about("Seconds that a request waits for its model, of several, to be loaded.", gt=0)
    ] = 300.0
    allow_reset_prefix_cache: Annotated[
        bool, about("Let clients empty the prefix cache by POST /reset_prefix_cache.")
    ] = False

    def sized(self, takes_files: bool) -> ServerOptions:
        """Set the limit of bodies that is meant where none was given; `takes_files`: images or audio may be in them."""
        usual = LARGE_BODY if takes_files else USUAL_BODY
        return self if self.max_body_bytes else replace(self, max_body_bytes=usual)

    def validate(self) -> None:
        """Refuse what cannot work, naming the option."""
        check_values(self)
        if self.root_path and not re.fullmatch(r"(/[!-.0-~]+)+", self.root_path):
            raise ConfigError(f"--root-path {self.root_path} must look like /some/where", param="root_path")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together: give both", param="ssl_certfile")
        if self.record_prompts and self.record is None:
            raise ConfigError("--record-prompts needs --record FOLDER", param="record_prompts")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key must not be empty", param="api_key")
        if self.max_body_bytes and self.max_body_bytes < 1024:
            raise ConfigError("--max-body-bytes must be 0, or at least 1024", param="max_body_bytes")
