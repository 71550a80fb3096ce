"""`quire help` and `quire completion`: what commands there are, in words and for a shell."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete

from quire.cli.complete import complete_command
from quire.cli.params import HELP_ALL, argument, command, option

SETUP = {
    "bash": "quire completion bash > ~/.local/share/bash-completion/completions/quire",
    "zsh": "quire completion zsh > ~/.zfunc/_quire, with ~/.zfunc in $fpath before compinit",
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
"""How the script of a shell is installed for good."""
BASH = r"""
_quire_completion() {
    local IFS=$'\n' kind value word last="" prefix="" words=()
    COMPREPLY=()
    # To bash : and = are words: qwen3:4b is three, which are one here, and of --flag=VALUE the = goes
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ $word == "=" ]]; then
            words+=("")
        elif [[ $last == "=" ]]; then
            words[-1]=$word
        elif [[ ${#words[@]} -gt 0 && ( $word == :* || $last == *: ) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
        last=$word
    done
    if [[ $COMP_WORDBREAKS == *:* && ${words[-1]} == *:* ]]; then
        prefix=${words[-1]%"${words[-1]##*:}"}
    fi
    while IFS=',' read -r kind value; do
        if [[ $kind == plain ]]; then
            COMPREPLY+=("${value#"$prefix"}")
        elif [[ $kind == file || $kind == dir ]]; then
            compopt -o default 2> /dev/null
        fi
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _QUIRE_COMPLETE=bash_complete "$1")
}
complete -o nosort -F _quire_completion quire
"""
"""The script of bash, which also offers files where no name of a model begins so."""
ZSH = r"""
_quire() {
    local -a plain described response
    local kind name help
    response=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT - 1)) _QUIRE_COMPLETE=zsh_complete quire)}")
    for kind name help in $response; do
        if [[ $kind == dir ]]; then
            _path_files -/
        elif [[ $kind == file ]]; then
            _path_files -f
        elif [[ $help == _ ]]; then
            plain+=("$name")
        else
            described+=("$name:$help")
        fi
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -V unsorted -a plain
}
# A file of compinit's is run as the function at the first call, and elsewhere a script registers it
if [[ $funcstack[1] == _quire ]]; then
    _quire "$@"
else
    compdef _quire quire
fi
"""
"""The script of zsh, behind the line by which compinit knows it."""


@command("completion", argument("shell", metavar="bash|zsh|fish", type=click.Choice(list(SETUP)), help="Your shell."))
def completion(shell: str) -> None:
    """Print what completes commands, flags and models in a shell."""
    print(script(shell))


def script(shell: str) -> str:
    """The script of a shell, which says how it is installed."""
    from quire.cli.app import app

    setup = f"# {SETUP[shell]}\n"
    if shell == "bash":
        return setup + BASH
    if shell == "zsh":
        return f"#compdef quire\n{setup}{ZSH}"
    made = FishComplete(app, {}, "quire", "_QUIRE_COMPLETE")
    return setup + made.source_template % made.source_vars()


@command(
    "help",
    argument(
        "words",
        metavar="COMMAND",
        nargs=-1,
        shell_complete=complete_command,
        help="A command, as bench serve; all of them if there is none.",
    ),
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
