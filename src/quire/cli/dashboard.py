"""`quire dashboard`: rows of files as one page, written to a file or served while they grow."""

from __future__ import annotations

from pathlib import Path

from quire.cli.params import PATH, argument, command, option
from quire.cli.show import size
from quire.core.errors import ConfigError

DEFAULT = Path("dashboard.html")


@command(
    "dashboard",
    argument(
        "results",
        metavar="RESULTS...",
        type=PATH,
        nargs=-1,
        required=True,
        help="Files of rows (.jsonl, .parquet), or folders of them.",
    ),
    option("--output", "-o", type=PATH, help=f"Write the page here [{DEFAULT}]."),
    option("--serve", is_flag=True, help="Serve the page on this machine, anew whenever the files change."),
    option("--port", type=int, default=8001, help="Port of --serve; 0 = a free one."),
)
def dashboard(results: tuple[Path, ...], output: Path | None, serve: bool, port: int) -> None:
    """Show rows: one page that needs no network, for any browser."""
    if serve and output is not None:
        raise ConfigError("--serve and -o: a page is served or written; give one", param="serve")
    if serve:
        _serve(list(results), port)
    else:
        _write(list(results), output)


def _write(results: list[Path], output: Path | None) -> None:
    from quire.core.files import write_whole
    from quire.dashboard.gather import found, gather
    from quire.dashboard.page import MARK, page

    target = output or DEFAULT
    if any(target.resolve() == path.resolve() for path in found(results)):
        raise ConfigError(f"-o {target} is one of the files to read; name another", param="output")
    files = gather(results)
    count = sum(len(file.rows) for file in files)
    if not count:
        raise ConfigError(f"no rows in {', '.join(file.name for file in files)}")
    try:
        if output is None and target.exists() and not target.read_bytes().startswith(MARK.encode()):
            raise ConfigError(f"{target} is there and no page of quire's; name another file with -o", param="output")
        made = page(files)
        write_whole(target, made)
    except OSError as error:
        raise ConfigError(f"-o {target}: {error.strerror or error}", param="output") from None
    print(f"{target}: {count:,} rows of {_files(len(files))}, {size(len(made))}; open it in a browser")


def _serve(results: list[Path], port: int) -> None:
    from quire.dashboard.serve import server

    with server(results, port) as running:
        host, bound = running.server_address[:2]
        print(f"http://{host!s}:{bound}/ shows {', '.join(map(str, results))}; Ctrl-C ends it", flush=True)
        running.serve_forever()


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
