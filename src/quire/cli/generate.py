"""`quire generate`: continue texts on the terminal; the sampling flags and timings that `quire chat` shares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from quire.cli.flags import ENGINE, option_command, set_model, text_of, to_engine
from quire.cli.model_names import is_stored, with_default
from quire.cli.params import Option, argument, option
from quire.core.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.core.params import SamplingParams
    from quire.engine.llm import LLM, GenerateDelta
    from quire.engine.outputs import RequestOutput


def sampling_options() -> tuple[Option, ...]:
    """Flags of how tokens are chosen, which `sampling` takes by their names."""
    return (
        option("--max-tokens", "-n", type=click.IntRange(min=1), help="Largest number of output tokens."),
        option("--temperature", type=click.FloatRange(min=0.0), help="0 = always the most probable token."),
        option("--top-p", type=float, help="Choose among the likeliest tokens of this total probability."),
        option("--top-k", type=int, help="Choose among this many likeliest tokens."),
        option("--stop", multiple=True, help="Stop at this text. You can give it several times."),
    )


def prompt_option() -> Option:
    """A prompt as a flag."""
    return option("--prompt", "-p", metavar="TEXT", help="A prompt, as an argument is.")


@option_command(
    "generate",
    ENGINE,
    argument(
        "words",
        metavar="[MODEL] PROMPT...",
        nargs=-1,
        help="Texts to continue, read from standard input if there are none. A first one that is the path of a folder, "
        "or of a GGUF file, or before others the name of a pulled model, is the model.",
    ),
    prompt_option(),
    *sampling_options(),
    model_argument=False,
)
def generate(options: dict[str, Any], words: tuple[str, ...], prompt: str | None, **asked: Any) -> None:
    """Continue texts, printing them as they grow; timings go to standard error."""
    prompts = [*words, *([] if prompt is None else [prompt])]
    if words and "model" not in options:
        if _is_model(*prompts[:2]):
            set_model(options, prompts.pop(0))
        else:
            _check_text(*prompts[:2])
    prompts = [text_of(prompt) for prompt in prompts]
    if "chat_template" in options:
        raise ConfigError(
            "--chat-template: texts are continued as they are; quire chat uses one", param="chat_template"
        )
    config = to_engine(with_default(options))
    if not prompts:
        source = standard_input()
        if source.isatty():
            print("reading the text to continue; Ctrl-D ends it", file=sys.stderr)
        prompts = [typed(source.read)]
    if not all(prompts):
        raise BadRequest("prompt: is empty; give a text", param="prompt")
    with open_llm(config) as llm:
        params = sampling(llm, **asked)
        with closing(llm.stream(prompts, params)) as deltas:
            outputs = print_in_order(deltas, prompts)
    print(timings(outputs), file=sys.stderr)


def open_llm(config: EngineConfig) -> LLM:
    """The model, loaded with a progress bar."""
    from quire.core.machine import uncollected
    from quire.model.load.packed_folder import ask_ahead

    ask_ahead(config.model)
    with uncollected(forever=True):
        from quire.engine.llm import LLM

        return LLM.from_config(config)


def sampling(llm: LLM, fallback: Mapping[str, float] | None = None, **asked: Any) -> SamplingParams:
    """The model's own sampling defaults, else `fallback`, with what was asked for in their place; as long as the
    context by default."""
    from quire.core.params import SamplingParams
    from quire.engine.requests import sampling_defaults

    asked["stop"] = [text_of(word) for word in asked["stop"]] or None
    defaults = sampling_defaults(llm.config, llm.info, fallback)
    return SamplingParams(**({"max_tokens": None} | defaults | {k: v for k, v in asked.items() if v is not None}))


def print_in_order(deltas: Iterator[GenerateDelta], prompts: list[str]) -> list[RequestOutput]:
    """Print texts in the order of the prompts: the first unfinished one as it grows, later ones when it is done."""
    held = [""] * len(prompts)
    done: dict[int, RequestOutput] = {}
    current, titled = 0, len(prompts) == 1
    for delta in deltas:
        held[delta.prompt] += delta.text
        if delta.output is not None:
            done[delta.prompt] = delta.output
        while current < len(prompts):
            if not titled:
                print(f"=== {prompts[current]}")
                titled = True
            print(held[current], end="", flush=True)
            held[current] = ""
            if current not in done:
                break
            print()
            current, titled = current + 1, False
    return [done[i] for i in range(len(prompts))]


def timings(outputs: list[RequestOutput]) -> str:
    """One line: tokens read and written, time to the first token, tokens per second while decoding."""
    read = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    written = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    start = min(o.metrics.arrival_time for o in outputs)
    first = min(o.metrics.first_token_time or start for o in outputs)
    last = max(o.metrics.last_token_time or start for o in outputs)
    speed = (written - len(outputs)) / (last - first) if last > first else 0.0
    return (
        f"[{read} prompt tokens ({cached} cached), {written} written, first after {1e3 * (first - start):.0f} ms, "
        f"then {speed:.0f} tokens/s, {last - start:.2f} s in all]"
    )


def standard_input() -> TextIO:
    """Standard input; `ConfigError` where the caller has closed it."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed; there is nothing to read from")
    return sys.stdin


def _is_model(word: str, prompt: str | None = None) -> bool:
    """Whether the first word is a model: what is one on disk, and before a prompt what is named as one."""
    from quire.gguf.file import is_gguf

    path = Path(word)
    named = prompt is not None and ((path.suffix == ".gguf" and path.is_file()) or is_stored(word))
    return bool(word) and (path.is_dir() or named or is_gguf(path))


def _check_text(word: str, prompt: str | None = None) -> None:
    """`ConfigError` for a first word that may have been meant as a model, of which none is here."""
    from quire.store.names import MODEL_SUFFIXES

    if any(letter.isspace() for letter in word):
        return
    if word.lower().endswith(MODEL_SUFFIXES) or (prompt is not None and "/" in word):
        raise ConfigError(
            f"{word}: no such file or folder. A model of the hub is pulled first (quire pull owner/model), or given by "
            "--model; before texts, --model tells them from a model",
            param="model",
        )


def typed(read: Callable[[], str]) -> str:
    """What `read` gives of standard input; `BadRequest` for what is no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise BadRequest(f"standard input is not {error.encoding} text: {error.reason}") from None
