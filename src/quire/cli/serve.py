"""`quire serve`: the OpenAI-compatible HTTP server, by flags or by a TOML file of them (`--config FILE`)."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, SERVER, option_command, to_engine, to_server
from quire.cli.foreign_commands import KEYS, environment, keys_of, unread_variables, warn
from quire.cli.model_names import with_default
from quire.cli.models import model_entries
from quire.cli.params import PATH, option
from quire.core.errors import ConfigError
from quire.core.options.fields import flag
from quire.core.options.values import check_names, flag_file, read_toml, with_underscores
from quire.engine.engine_options import KNOWN, UNBUILT
from quire.parallel.prestart import drop_waiting
from quire.server.server_options import ServerOptions

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.client import EngineClient
    from quire.server.server_options import ServerOptions

logger = logging.getLogger("quire.cli")


@option_command(
    "serve",
    ENGINE | SERVER,
    option(
        "--config",
        "config_file",
        metavar="FILE",
        help="TOML file of flags by their long names; those of the command line win.",
    ),
    option(
        "--plan",
        "plan_file",
        metavar="FILE",
        type=PATH,
        help="Keep to a plan that quire plan -o wrote, or do not start.",
    ),
    several=True,
    examples=(
        (
            "quire serve smollm2",
            "serve a model that was pulled, or owner/model of the Hugging Face Hub, on http://127.0.0.1:8000",
        ),
        ("quire serve model.gguf --port 9000 -c 8192 -t 4", "a file, on another port, with a shorter context"),
        ("quire serve FOLDER --host 0.0.0.0 --api-key KEY", "for other machines, to those who have the key"),
    ),
)
def serve(options: dict[str, Any], config_file: str | None, plan_file: Path | None) -> None:
    """Serve a model over HTTP with OpenAI's API. Ctrl-C, SIGTERM or SIGHUP drains it, SIGUSR1 restarts its engines."""
    options = _as_locked(with_config(config_file, options))
    server = to_server(options)
    level = server.log_level.upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its name for everything, as "Started" too
    from quire.server import run
    from quire.server.http.address import check_free

    # Until the server has its own handler: leave through `finally`, so that the engine process is stopped.
    for sig in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sig) is not signal.SIG_IGN:
            signal.signal(sig, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGUSR1, lambda *_: None)  # an engine that is being loaded is new enough
    if not options.get("node_rank"):  # other nodes do not listen
        check_free(server)
    if plan_file is not None:
        raise click.exceptions.Exit(_serve_planned(plan_file, options, server))
    if entries := model_entries(options):
        drop_waiting()  # who knows when a model is loaded
        raise click.exceptions.Exit(run.serve_models(entries, server, partial(start_engines, server)))
    config = to_engine(with_default(options))
    if config.cluster.node_rank or config.cluster.by_ray:
        drop_waiting()  # engines start elsewhere, or later
    if config.cluster.node_rank and config.cluster.by_ray:
        raise ConfigError("--node-rank: Ray starts what runs on other hosts; start one server", param="node_rank")
    if config.cluster.node_rank:
        from quire.engine.hosts.agent import run_agent

        run_agent(config)
    with ExitStack() as until:
        code = run.serve(config, server, partial(start_engines, server, until))
    raise click.exceptions.Exit(code)


def _as_locked(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the keys that other tools' servers take from the environment, where none were given: a server
    whose user believes it to be locked is not open. Lines on standard error say so, and what is not read."""
    flags = [flag(name) for name in NAMES]
    warn(unread_variables(environment(), "serve", [*flags, *(f"-{alias}" for alias in _ALIASES)]))
    keys = keys_of(environment())
    if not keys or options.get("api_key") or options.get("api_keys_file"):
        return options
    names = " and ".join(name for name in KEYS if environment().get(name))
    warn(f"clients need the key of {names}, as no --api-key was given")
    return options | {"api_key": list(keys)}


def _serve_planned(path: Path, options: dict[str, Any], server: ServerOptions) -> int:
    """Serve as planned: options that decide over memory are pinned, and a start that breaks the plan is refused."""
    from quire.plan.plan_file import DEFAULTS, check_plan, check_started, planned_config, read_plan
    from quire.server import run

    if isinstance(options.get("model"), list) or options.get("models"):
        raise ConfigError("--plan: it is of one model; leave out --models and further ones", param="plan")
    plan = read_plan(path)
    config = planned_config(plan, to_engine(options), set(options) & set(DEFAULTS))
    check_plan(plan, config)

    def start(until: ExitStack, config: EngineConfig) -> EngineClient:
        engine = start_engines(server, until, config)
        check_started(plan, engine.info.num_blocks, engine.info.max_model_len)
        return engine

    with ExitStack() as until:
        return run.serve(config, server, partial(start, until))


def start_engines(server: ServerOptions, until: ExitStack, config: EngineConfig) -> EngineClient:
    """Engines that are started again, with the same limits, when they die; `until`: the server's end."""
    from quire.engine.hosts.placing import Placing
    from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine

    placing = until.enter_context(closing(Placing(config)))
    patience = RestartPolicy(
        hang=server.watchdog_timeout, deaths=server.max_engine_deaths, window=server.engine_deaths_window
    )
    count = config.parallel.data_parallel_size
    if count == 1:
        engine: EngineClient = SupervisedEngine(partial(placing.start, 0), patience, config.scheduler)
    else:
        from quire.engine.processes.replicas import ReplicatedEngine  # and its router

        engine = ReplicatedEngine(
            count,
            lambda i, died: SupervisedEngine(partial(placing.start, i), patience, config.scheduler, died),
            config.parallel.prefill_replicas,
            placing.together,
        )
    info = engine.info
    logger.info(
        "loaded %s in %.1f s: %.1f MB of %s weights (quantization %s), %d KV blocks of %d tokens, %s/%s, %d threads",
        info.model,
        info.load_seconds,
        info.weight_bytes / 1e6,
        info.dtype,
        info.quantization,
        info.num_blocks,
        info.block_size,
        info.backend,
        info.isa,
        info.threads,
    )
    return engine


NAMES = frozenset({*KNOWN, *UNBUILT, *ServerOptions.__struct_fields__})
_ALIASES = ("ctk", "ctv")


def with_config(path: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, which the command line gave, over those of the file at `path`.

    Keys are the long names of the flags, with dashes or underscores; a list is a flag that is given several times.
    `ConfigError` names what is wrong with the file, or the key that is no flag.
    """
    found = {} if path is None else _read(path)
    if any(name in options for name in _ALIASES):
        found.pop("kv_cache_dtype", None)
    return found | dict(options)


def _read(path: str) -> dict[str, Any]:
    place = flag_file("config", path)
    given = read_toml(path, place)
    check_names(given, NAMES, place, "flag")
    return with_underscores(given, place)
