"""`quire help` and `quire completion`: what commands there are, in words and for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from quire.cli.params import HELP_ALL, argument, command, option

SHELLS = ("bash", "zsh", "fish")
SETUP = {
    "bash": "quire completion bash > ~/.local/share/bash-completion/completions/quire",
    "zsh": "quire completion zsh > ~/.zfunc/_quire, with ~/.zfunc in $fpath before compinit",
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
"""How the script is installed for good."""


@command("completion", argument("shell", metavar="bash|zsh|fish", type=click.Choice(SHELLS), help="Your shell."))
def completion(shell: str) -> None:
    """Print what completes commands, flags and models in a shell."""
    from quire.cli.app import app

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(app, {}, "quire", "_QUIRE_COMPLETE")
    print(f"# {SETUP[shell]}")
    print(made.source_template % made.source_vars())


@command(
    "help",
    argument("words", metavar="COMMAND", nargs=-1, help="A command, as bench serve; all of them if there is none."),
    option("--all", "everything", is_flag=True, help="Show all flags."),
)
def help_of(words: tuple[str, ...], everything: bool) -> None:
    """Show the help of a command."""
    from quire.cli.app import app

    group: click.Group = app
    context = click.Context(app, info_name="quire")
    for number, word in enumerate(words):
        name, found, _ = group.resolve_command(context, [word])
        assert found is not None
        context = click.Context(found, info_name=name, parent=context)
        if not isinstance(found, click.Group):
            if words[number + 1 :]:
                context.fail(f"{context.command_path} has no commands of its own")
            flag = HELP_ALL if everything and any(HELP_ALL in each.opts for each in found.params) else "--help"
            found.main([flag], prog_name=context.command_path)
        group = found
    print(context.get_help())
