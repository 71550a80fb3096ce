"""Commands and variables of the environment that Ollama, llama.cpp and vLLM have, and what is quire's instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

COMMANDS = {
    "create": "run MODEL --system TEXT, or serve FILE --served-model-name NAME: a file needs no "
    "Modelfile, and no system message is kept under a name",
    "cp": "serve MODEL --served-model-name NAME",
    "ls": "list",
    "llama-server": "serve FILE",
    "server": "serve FILE",
    "llama-cli": "run FILE [PROMPT]",
    "cli": "run FILE [PROMPT]",
    "llama-bench": "bench latency FILE --input-len 512 --output-len 128",
    "llama-quantize": "compress FOLDER OUT --quantize Q4_K_M",
    "quantize": "compress FOLDER OUT --quantize Q4_K_M",
    "llama-perplexity": "eval FILE --text TEXT",
    "perplexity": "eval FILE --text TEXT",
    "gguf-dump": "inspect FILE",
    "complete": "generate MODEL PROMPT",
    "collect-env": "doctor",
}
"""Names of others' commands -> the words behind `quire` that do the same."""
NONE = {"push": "nothing is uploaded: a folder or file is given to the hub by its own tool (hf upload)"}
"""Names of others' commands that have none like them here, and why."""

FLAGS = {
    "LLAMA_ARG_N_PARALLEL": "--max-num-seqs",
    "LLAMA_ARG_BATCH": "--max-num-batched-tokens",
    "LLAMA_ARG_UBATCH": "--max-num-batched-tokens",
    "LLAMA_ARG_N_GPU_LAYERS": "--device",
    "LLAMA_ARG_HF_REPO": "--model",
    "LLAMA_ARG_CACHE_TYPE_K": "-ctk",
    "LLAMA_ARG_CACHE_TYPE_V": "-ctv",
    "LLAMA_ARG_STATIC_PATH": "--no-playground",
}
"""Variables whose flags are not spelled as they are."""
KEYS = ("LLAMA_API_KEY", "VLLM_API_KEY")


def command_here(name: str) -> str:
    """The end of the error of an unknown command that another tool has; "" for a name that none has."""
    name = name.lower().replace("_", "-")
    if name in NONE:
        return f"quire has none like it: {NONE[name]}."
    return f"quire's is: quire {COMMANDS[name]}" if name in COMMANDS else ""


def environment() -> Mapping[str, str]:
    """Variables of the environment, which decide over nothing but the keys of a server (`keys_of`)."""
    return os.environ


def unread_variables(variables: Mapping[str, str], command: str, flags: Iterable[str]) -> str:
    """One line on variables of others that `command` does not read, with the flags to give instead; "" without any."""
    found = []
    if host := variables.get("OLLAMA_HOST"):
        found.append(("OLLAMA_HOST", _place(host, command)))
    if "OLLAMA_MODELS" in variables:
        found.append(("OLLAMA_MODELS", "QUIRE_MODELS, a folder of quire's own models"))
    known = frozenset(flags)
    for name in sorted(variables):
        if name.startswith("LLAMA_ARG_"):
            found.append((name, _flag(name, known)))
    if not found:
        return ""
    return f"{', '.join(name for name, _ in found)}: of another tool, and not read; give " + ", ".join(
        dict.fromkeys(told for _, told in found)
    )


def _place(host: str, command: str) -> str:
    if command == "run":
        return f"--server {host if '://' in host else f'http://{host}'}"
    name, _, port = host.partition("://")[2].rstrip("/").rpartition(":") if "://" in host else host.rpartition(":")
    return f"--host {name} --port {port}" if port.isdecimal() and name else f"--host {host}"


def _flag(name: str, known: frozenset[str]) -> str:
    """The flag of quire that a variable of llama.cpp stands for."""
    from quire.core.options.aliases import alias_of
    from quire.core.options.fields import flag

    spelled = flag(name.removeprefix("LLAMA_ARG_").lower())
    alias = alias_of(spelled)
    here = FLAGS.get(name) or (flag(alias.ours) if alias is not None and alias.ours else spelled)
    return here if here in known else f"a flag (quire serve --help-all; {name} has none like it)"


def keys_of(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Keys that other tools' servers take from the environment; llama.cpp's may be several, divided by commas."""
    found = [*variables.get("LLAMA_API_KEY", "").split(","), variables.get("VLLM_API_KEY", "")]
    return tuple(dict.fromkeys(key.strip() for key in found if key.strip()))


def warn(text: str) -> None:
    """Tell the user on standard error, where there is something to tell."""
    if text:
        print(f"quire: {text}", file=sys.stderr)
