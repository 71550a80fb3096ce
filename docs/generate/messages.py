"""Every message that a user can meet, as the sources raise it: … stands for what differs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from quire.core.exclusions.exclusion import DIFFERS
from quire.core.exclusions.table import TABLE
from quire.core.options.ranges import range_words, ranges_of
from quire.core.params import SamplingParams
from quire.engine.beam import BeamSearchParams
from quire.server.apis.openai.protocol import ChatCompletionRequest
from quire.server.apis.openai.scoring import RerankRequest
from words import escaped

SOURCE = Path(__file__).parents[2] / "src" / "quire"
RAISES = {
    *("ConfigError", "ModelError", "BadRequest", "HttpError", "Overloaded", "Unavailable", "EngineFailure"),
    *("NumericError", "ContextTooLong", "NotFound", "ModelNotFound", "EngineKilled", "Interrupted"),
}
"""Classes whose first text is what is said."""
LEAST = 12
"""Characters of a message besides what differs: shorter ones only wrap another."""
AREAS = {
    "Commands and options": ("cli", "core"),
    "Models": ("model", "quant"),
    "GGUF files": ("gguf",),
    "Tokenizers, templates, grammars": ("text",),
    "Kernels and devices": ("ops",),
    "Memory and ranks": ("run", "parallel", "cache"),
    "The engine": ("engine", "features", "sched", "sample"),
    "Requests and the server": ("server",),
    "Speculation": ("speculate",),
    "Making models smaller": ("compress", "training"),
    "Measuring": ("bench", "figures"),
}
"""Where messages are listed -> of which packages; others are listed under their own names."""
CHECKED: dict[type, Iterable[str]] = {
    SamplingParams: ranges_of(SamplingParams),
    BeamSearchParams: ranges_of(BeamSearchParams),
    ChatCompletionRequest: ("top_logprobs", "priority"),
    RerankRequest: ("top_n", "max_tokens_per_doc"),
}
"""What is given to `check_ranges`; other fields of bodies become some of these."""


def every_message() -> str:
    """Lists by area."""
    found: dict[str, set[str]] = {}
    areas = {package: area for area, packages in AREAS.items() for package in packages}
    for package, text in messages():
        found.setdefault(areas.get(package, package.capitalize()), set()).add(text)
    parts = []
    for area in dict.fromkeys((*AREAS, *found)):
        if area in found:
            lines = "".join(
                f"- {escaped(text)}\n" for text in sorted(found[area], key=lambda t: t.lstrip("-… ").lower())
            )
            parts.append(f"## {area}\n\n{lines}")
    return "\n".join(parts)


def messages() -> Iterator[tuple[str, str]]:
    """(package, text) of each; those of the table of exclusions by its rows."""
    yield from (("core", row.message({})) for row in TABLE)
    yield from ranges()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and raises(node):
                for text in filter(None, map(flat, node.args[:2])):
                    place = "" if not of_option(node) else f"{DIFFERS} " if text.startswith(DIFFERS) else DIFFERS
                    if len(text.replace(DIFFERS, "").strip()) >= LEAST:
                        yield path.relative_to(SOURCE).parts[0], place + text


def ranges() -> Iterator[tuple[str, str]]:
    """Those of numbers that are out of range: of an option whatever it is, of a request by the field."""
    for node in ast.walk(ast.parse(inspect.getsource(range_words))):
        if isinstance(node, ast.Return) and node.value is not None:
            yield "core", f"{DIFFERS} {DIFFERS} {flat(node.value)}"
    for kind, names in CHECKED.items():
        yield from (("server", f"{name}: {ranges_of(kind)[name].words}") for name in names)


def raises(call: ast.Call) -> bool:
    """Whether a call makes an error."""
    return ast.unparse(call.func).rpartition(".")[2] in RAISES or of_option(call)


def of_option(call: ast.Call) -> bool:
    """Whether a call makes an error that begins with the place of an option."""
    return "place" in (name := ast.unparse(call.func)) and name.endswith(".error")


def flat(node: ast.AST) -> str:
    """A text of the source in one line; "" for anything else."""
    if isinstance(node, ast.Lambda):
        return flat(node.body)
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else differing(part) for part in node.values]
        return " ".join("".join(map(str, parts)).split())
    return " ".join(node.value.split()) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def differing(part: ast.AST) -> str:
    """What stands for a part of a message that differs: a flag shows that it is one."""
    flagged = isinstance(part, ast.FormattedValue) and ast.unparse(part.value).startswith("flag(")
    return f"--{DIFFERS}" if flagged else DIFFERS


def texts() -> Iterator[str]:
    """All texts of the sources, for whoever looks for a part of one."""
    yield from (row.message({}) for row in TABLE)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if text := flat(node):
                yield text
