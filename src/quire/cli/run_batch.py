"""`quire run-batch`: a file of requests in OpenAI's batch format, answered by an engine of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.model_names import with_default
from quire.cli.params import PATH, option, quiet_option
from quire.core.errors import ConfigError


@option_command(
    "run-batch",
    ENGINE,
    option("--input-file", "-i", type=PATH, required=True, help="File of requests, one JSON object a line."),
    option(
        "--output-file",
        "-o",
        type=PATH,
        required=True,
        help="File of answers, in the order in which they end: find them by custom_id. Those that it has are kept.",
    ),
    quiet_option(),
)
def run_batch(options: dict[str, Any], input_file: Path, output_file: Path) -> None:
    """Answer a file of requests. Run it again to go on where it was cut off, and to try lines with an error again; exit
    code 1 while a line has one."""
    config = to_engine(with_default(options))
    if not input_file.is_file():
        raise ConfigError(f"--input-file {input_file}: no such file", param="input_file")
    if not output_file.parent.is_dir():
        raise ConfigError(f"--output-file {output_file}: there is no folder {output_file.parent}", param="output_file")
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from quire.cli.serve import start_engines
    from quire.core.progress import counting_bar
    from quire.server.app import create_app
    from quire.server.batch import check_unchanged, lines_of, run
    from quire.server.http.metrics import HttpMetrics
    from quire.server.models.start import open_service, server_of_one
    from quire.server.server_options import ServerOptions

    server = ServerOptions()
    most = server.sized(True).max_body_bytes
    check_unchanged(input_file, output_file, most)  # refused before minutes of loading
    total = sum(1 for _ in lines_of(input_file, most))
    with ExitStack() as until:
        client = start_engines(server, until, config)
        service = open_service(client, config, server, HttpMetrics())
        until.callback(service.engine.close)
        app = create_app(server_of_one(service))
        with counting_bar(total, "requests") as count:
            made, errors = asyncio.run(run(app, input_file, output_file, most, lambda well: count()))
    print(
        f"{made} of {total} requests were answered now, {errors} with an error, and {total - made} before; "
        f"answers are in {output_file}"
    )
    if errors:
        raise click.exceptions.Exit(1)
