"""What a user types in a chat behind a slash: commands, which are never sent to the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

from quire.cli.chat.backend import ChatBackend
from quire.cli.chat.conversation import SETTINGS, Conversation
from quire.cli.chat.screen import Screen
from quire.core.errors import BadRequest

COMMAND = re.compile(r"/([A-Za-z?][\w-]*)(?:\s+(.*))?$", re.DOTALL)
"""A line that is one: a word behind a slash, and no path such as /etc/hosts."""


class Leave(Exception):
    """The user ends the chat."""


class Chat(Protocol):
    """What a command may look at and change (`chat.Chat`)."""

    backend: ChatBackend
    conversation: Conversation
    screen: Screen
    verbose: bool | None

    def answer(self) -> None: ...


class ChatCommand(NamedTuple):
    """A command: what `run` does with the chat and the rest of the line, and how /help shows it."""

    run: Callable[[Chat, str], None]
    shown: str
    help: str
    aliases: tuple[str, ...] = ()


def run_command(chat: Chat, line: str) -> bool:
    """Do what `line` asks for where it is a command; False where it is a message for the model.

    Raises `BadRequest` for a command that there is not, with those that are spelled nearly so, and `Leave`.
    """
    found = COMMAND.match(line)
    if found is None:
        return False
    name, rest = found[1].lower(), (found[2] or "").strip()
    command = BY_NAME.get(name)
    if command is None:
        from quire.core.options.values import near_names

        near = near_names(name, BY_NAME)
        hint = f"did you mean {' or '.join(f'/{each}' for each in near)}?" if near else "/help lists commands"
        raise BadRequest(f"/{name}: there is no such command; {hint}")
    command.run(chat, rest)
    return True


def _help(chat: Chat, rest: str) -> None:
    width = max(len(command.shown) for command in COMMANDS.values())
    for command in COMMANDS.values():
        chat.screen.say(f"  {command.shown:{width}}  {command.help}")
    chat.screen.say('  """                ' + " " * (width - 19) + "  begins and ends a message of several lines")
    chat.screen.say(f"  {'Ctrl-C':{width}}  stops an answer; twice leaves")


def _system(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.say(chat.conversation.system or "[no system message]")
        return
    chat.conversation.system = "" if rest == "off" else rest.strip('"')
    chat.screen.say("[no system message]" if rest == "off" else "[the system message is set]")


def _set(chat: Chat, rest: str) -> None:
    words = rest.split(None, 1)
    if words and words[0] == "parameter":  # as Ollama spells it
        words = words[1].split(None, 1) if len(words) > 1 else []
    if words and words[0] == "system":
        _system(chat, words[1] if len(words) > 1 else "")
        return
    if words in (["verbose"], ["quiet"]):  # as Ollama has them
        chat.verbose = words == ["verbose"]
        chat.screen.say(f"[speed is {'shown' if chat.verbose else 'not shown'} after each answer]")
        return
    if len(words) == 1 and "=" in words[0]:
        words = words[0].split("=", 1)
    if len(words) == 2:
        chat.conversation.set(words[0], words[1].strip())
    elif words:
        raise BadRequest(f"/set {words[0]}: give a value, or default")
    chat.screen.say(_settings(chat))


def _settings(chat: Chat) -> str:
    settings = chat.conversation.settings
    given = ", ".join(f"{name} = {settings[name]}" for name in SETTINGS if name in settings)
    others = ", ".join(name for name in SETTINGS if name not in settings)
    return f"[{given or 'nothing is set'}; by the model's defaults: {others}]"


def _show(chat: Chat, rest: str) -> None:
    for line in (chat.backend.name, *chat.backend.facts):
        chat.screen.say(f"  {line}")
    conversation = chat.conversation
    chat.screen.say(f"  {len(conversation.messages)} messages, {len(conversation.tools)} tools")
    chat.screen.say(f"  {_settings(chat)[1:-1]}")


def _save(chat: Chat, rest: str) -> None:
    chat.conversation.save(_path("save", rest), chat.backend.name)
    chat.screen.say(f"[{len(chat.conversation.messages)} messages are in {rest}]")


def _load(chat: Chat, rest: str) -> None:
    chat.conversation.load(_path("load", rest))
    chat.screen.say(f"[{len(chat.conversation.messages)} messages of {rest}]")


def _image(chat: Chat, rest: str) -> None:
    path = _path("image", rest)
    chat.backend.check_image()
    chat.conversation.attach(path)
    chat.screen.say(f"[{rest} goes with the next message]")


def _tools(chat: Chat, rest: str) -> None:
    conversation = chat.conversation
    if rest == "off":
        conversation.tools = []
    elif rest:
        conversation.use_tools(_path("tools", rest))
    names = ", ".join(str(tool["function"]["name"]) for tool in conversation.tools)
    chat.screen.say(f"[tools: {names}]" if names else "[no tools]")
    if names and (note := chat.backend.tools_note()):
        chat.screen.say(f"[{note}]")


def _clear(chat: Chat, rest: str) -> None:
    chat.conversation.clear()
    if chat.screen.live:
        chat.screen.say("[the conversation is forgotten]")


def _retry(chat: Chat, rest: str) -> None:
    chat.conversation.retry()
    chat.answer()


def _exit(chat: Chat, rest: str) -> None:
    raise Leave


def _path(command: str, rest: str) -> str:
    if not rest:
        raise BadRequest(f"/{command}: name a file")
    return rest.strip("\"'")


COMMANDS = {
    "help": ChatCommand(_help, "/help", "lists commands", ("?", "h")),
    "system": ChatCommand(_system, "/system [TEXT]", "shows the system message, or sets it; off = none"),
    "set": ChatCommand(
        _set,
        "/set [NAME VALUE]",
        "shows settings (temperature, top_p, seed, ...), or sets one; verbose, quiet: speed",
    ),
    "show": ChatCommand(_show, "/show", "shows the model, its memory and the settings", ("info",)),
    "save": ChatCommand(_save, "/save FILE", "keeps the conversation in a file"),
    "load": ChatCommand(_load, "/load FILE", "goes on with the conversation of a file"),
    "image": ChatCommand(_image, "/image FILE", "sends an image with the next message"),
    "tools": ChatCommand(_tools, "/tools [FILE]", "shows the tools, or offers those of a JSON file; off = none"),
    "clear": ChatCommand(_clear, "/clear", "forgets the conversation", ("new", "reset")),
    "retry": ChatCommand(_retry, "/retry", "answers the last message again", ("regen", "redo")),
    "exit": ChatCommand(_exit, "/exit", "leaves, as /bye, /quit and Ctrl-D do", ("bye", "quit", "q")),
}
"""In the order of /help."""
BY_NAME = {name: command for first, command in COMMANDS.items() for name in (first, *command.aliases)}
