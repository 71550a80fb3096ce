"""`quire chat` and `quire run`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from quire.cli.chat.conversation import SETTINGS, Conversation, check_settings
from quire.cli.complete import complete_model
from quire.cli.flags import ENGINE, option_command, text_of, to_engine
from quire.cli.foreign_commands import environment, unread_variables, warn
from quire.cli.generate import open_llm, prompt_option, sampling_options, standard_input, typed
from quire.cli.model_names import ensure, with_default
from quire.cli.params import Argument, Option, argument, option
from quire.core.errors import BadRequest, ConfigError
from quire.core.options.command_aliases import CHAT, RUN
from quire.core.options.fields import flag
from quire.engine.engine_options import KNOWN

if TYPE_CHECKING:
    from quire.cli.chat.chat import Chat


def chat_options() -> tuple[Option, ...]:
    """Flags of a chat beside those of the model."""
    return (
        option("--system", "-sys", help="A system message."),
        option(
            "--server",
            metavar="URL",
            help="Chat with a running server that speaks OpenAI's API, not with a model here.",
        ),
        option("--api-key", help="Key of that server."),
        option("--verbose", is_flag=True, default=None, help="Show speed after each answer, as a terminal does."),
        *sampling_options(),
        option("--min-p", type=float, help="Choose among tokens at least this probable, the likeliest being 1."),
        option("--presence-penalty", type=float, help="Lower what the text has already, once."),
        option("--frequency-penalty", type=float, help="Lower what the text has already, each time."),
        option("--repetition-penalty", type=float, help="Divide the logits of what the text has already; 1 = off."),
    )


def _words(model: str, words: str) -> tuple[Argument, Argument]:
    """The model, and words to it; where --model gives the model, all are words."""
    return (
        argument(
            "model_argument",
            metavar="MODEL",
            required=False,
            help=model,
            shell_complete=complete_model,
        ),
        argument("words", metavar="PROMPT", nargs=-1, help=words),
    )


@option_command(
    "chat",
    ENGINE,
    *_words("As of --model.", "Begin the chat with this message."),
    *chat_options(),
    model_argument=False,
    foreign=CHAT,
    examples=(
        ("quire chat model.gguf", "chat with a model in a file"),
        ('quire chat FOLDER --system "Answer in French." --temperature 0.2', "with a system message"),
        ("quire chat --server http://127.0.0.1:8000", "with the model of a running server"),
    ),
)
def chat(options: dict[str, Any], words: tuple[str, ...], **given: Any) -> None:
    """Chat with a model: one here, or that of a running server (--server URL). /help lists what a line may be."""
    _talk(options, given, _joined(_all_words(options, words, given)), once=False)


@option_command(
    "run",
    ENGINE,
    *_words(
        "As of --model; it is pulled if it is not here.",
        "Answer this once, and end. Piped standard input is added to it.",
    ),
    prompt_option(),
    *chat_options(),
    model_argument=False,
    foreign=RUN,
    examples=(
        ("quire run smollm2", "chat with a model"),
        ('quire run smollm2 "Why is the sky blue?"', "answer once"),
        ('cat notes.txt | quire run smollm2 "Summarize this:"', "answer about a text"),
    ),
)
def run(options: dict[str, Any], words: tuple[str, ...], prompt: str | None, **given: Any) -> None:
    """Chat with a model, or answer PROMPT once; a model that is not here is pulled first."""
    warn(unread_variables(environment(), "run", (flag(name) for name in KNOWN)))
    if given["server"] is None and isinstance(options.get("model"), str):
        options["model"] = ensure(options["model"])
    words = _all_words(options, words, given)
    prompt = _joined(words if prompt is None else (*words, prompt))
    source = standard_input()
    if not source.isatty():
        piped = typed(source.read).strip()
        prompt = f"{prompt}\n\n{piped}" if prompt and piped else prompt or piped
        if not prompt:
            raise BadRequest("prompt: is empty; give a text", param="prompt")
    _talk(options, given, prompt, once=bool(prompt))


def _all_words(options: dict[str, Any], words: tuple[str, ...], given: dict[str, Any]) -> tuple[str, ...]:
    """The words of a prompt: for a server, whose model need not be named, with a first one that is no name."""
    first = options.get("model", "")
    if given["server"] is None or not isinstance(first, str) or len(first.split()) < 2:
        return words
    return (options.pop("model"), *words)


def _joined(words: tuple[str, ...]) -> str:
    return " ".join(text_of(word) for word in words)


def _talk(options: dict[str, Any], given: dict[str, Any], prompt: str, once: bool) -> None:
    """Answer `prompt` if there is one, and chat unless that was to be done `once`.

    `given` has the values of `chat_options` and the model's seed.
    """
    system, server, key, verbose = (given.pop(name) for name in ("system", "server", "api_key", "verbose"))
    settings = {name: value for name, value in given.items() if name in SETTINGS and value not in (None, ())}
    if "stop" in settings:
        settings["stop"] = [text_of(word) for word in settings["stop"]]
    check_settings(settings)
    conversation = Conversation(settings=settings)
    conversation.system = text_of(system) if system else ""
    if server is not None:
        chat = _server_chat(server, key, options, conversation)
        chat.verbose = verbose
        _run(chat, prompt, once)
        return
    if key is not None:
        raise ConfigError("--api-key: is the key of a server; give --server URL too", param="api_key")
    config = to_engine(with_default(options))
    with open_llm(config) as llm:
        from quire.cli.chat.chat import Chat
        from quire.cli.chat.local import LocalChat
        from quire.cli.chat.screen import Screen

        _run(Chat(LocalChat(llm), conversation, Screen(), verbose), prompt, once)


def _server_chat(url: str, key: str | None, options: dict[str, Any], conversation: Conversation) -> Chat:
    """A chat with a server's model: `options` may name which, and the seed."""
    from quire.cli.chat.chat import Chat
    from quire.cli.chat.remote import RemoteChat
    from quire.cli.chat.screen import Screen

    if other := [name for name in options if name not in ("model", "seed")]:
        raise ConfigError(f"{flag(other[0])}: is decided by the server that was started; leave it out", param=other[0])
    if "seed" in options:
        conversation.settings["seed"] = options["seed"]
    return Chat(RemoteChat(url, key, options.get("model", "")), conversation, Screen())


def _run(chat: Chat, prompt: str, once: bool) -> None:
    if not once:
        chat.run(prompt)
        return
    chat.screen.drawn = sys.stdout.isatty()
    chat.conversation.ask(prompt)
    chat.answer()
