"""What words of a command line may be completed to in a shell: models, servers, commands."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models that are here, and files."""
    return [*complete_pulled(ctx, param, incomplete), CompletionItem(incomplete, type="file")]


def complete_pulled(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models that are here."""
    from quire.store.manifest import all_pulled

    return _beginning(sorted(each.name for each in all_pulled()), incomplete)


def complete_known(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models that can be pulled."""
    from quire.store.catalog import known_names

    return _beginning(known_names(), incomplete)


def complete_server(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Models that running servers have."""
    from quire.core.running import servers

    return _beginning(dict.fromkeys(name for server in servers() for name in server.models), incomplete)


def complete_command(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Commands of the group that the words before name."""
    from quire.cli.app import app

    group: click.Command = app
    for word in ctx.params.get(param.name or "") or ():
        found = group.get_command(ctx, word) if isinstance(group, click.Group) else None
        if found is None:
            return []
        group = found
    return _beginning(group.list_commands(ctx), incomplete) if isinstance(group, click.Group) else []


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
