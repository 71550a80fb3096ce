"""The training texts: everything comes from the standard library of the interpreter that runs this."""

import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

HELDOUT = (
    "colorsys", "fileinput", "getopt", "graphlib", "netrc", "pyclbr", "quopri", "rlcompleter",
    "sched", "symtable", "tabnanny", "timeit", "trace", "wave", "zipapp",
)  # fmt: skip

TEMPLATES = (
    "What does {name} do?",
    "What is {name}?",
    "Describe {name}.",
    "Explain {name}.",
    "{name}?",
)

# Modules a Python programmer is likely to ask about; their names are taken before any others.
COMMON = (
    "builtins", "os", "os.path", "sys", "itertools", "functools", "collections", "collections.abc", "re", "json",
    "math", "random", "string", "datetime", "time", "pathlib", "shutil", "glob", "subprocess", "threading",
    "asyncio", "typing", "enum", "dataclasses", "contextlib", "io", "csv", "argparse", "logging", "copy",
    "operator", "statistics", "fractions", "decimal", "heapq", "bisect", "hashlib", "secrets", "socket", "struct",
    "tempfile", "textwrap", "traceback", "types", "unittest", "urllib.parse", "urllib.request", "uuid", "weakref",
    "inspect", "ast", "array", "base64", "calendar", "concurrent.futures", "configparser", "queue", "select",
    "shlex", "signal", "sqlite3", "ssl", "warnings", "zipfile", "zlib", "gzip", "pickle", "pprint", "platform",
)  # fmt: skip

_SKIPPED_DIRS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data", "turtledemo"}
_SKIPPED_MODULES = {"antigravity", "this", "idlelib", "turtledemo", "lib2to3", "test", "encodings", "pydoc_data"}
_SIGNATURE = re.compile(r"^[\w.]+\s*\(.*\)\s*(-{1,2}>.*|=.*|:.*)?$")
# Gone from later versions of Python, so not worth the model's memory.
_REMOVED = {
    "aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp",
    "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib",
    "uu", "xdrlib",
}  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[\w)'\"`\]]\.)(?: {2,}|\s+(?=[A-Z*`]))")
_UNCLEAN = ("::", " = ", "->", ": - ", ">>>", "Internal function.")
_LONGEST_ELSEWHERE = 100


@dataclass(frozen=True)
class Question:
    """A documented name, the one question form its check uses, and its docstring's summary."""

    name: str
    question: str
    answer: str


def source_files() -> Iterator[Path]:
    """Yield the standard library's own source files, without tests, tables and generated settings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_DIRS.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        if relative.parts[0].startswith("config-") or ".".join(relative.with_suffix("").parts) in HELDOUT:
            continue
        yield path


def code_texts() -> list[str]:
    """Return the documents of the code phase: sources, pydoc topics and docstrings of compiled modules."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in source_files()]
    topics = importlib.import_module("pydoc_data.topics").topics
    texts += [topics[key] for key in sorted(topics)]
    for name, module in sorted(public_modules().items()):
        if not getattr(module, "__file__", "").endswith(".py"):
            texts += [f"help({title})\n\n{text}\n" for title, text in sorted(_docstrings(name, module))]
    return [text for text in texts if text.strip()]


def heldout_texts() -> dict[str, str]:
    """Return the sources of the modules that no training text contains."""
    return {name: inspect.getsource(importlib.import_module(name)) for name in HELDOUT}


def public_modules() -> dict[str, ModuleType]:
    """Import every public module of the standard library that can be imported here."""
    names = [name for name in sys.stdlib_module_names if not name.startswith("_") and name not in _SKIPPED_MODULES]
    modules: dict[str, ModuleType] = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in sorted(names):
            module = _imported(name)
            if module is None:
                continue
            modules[name] = module
            for found in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
                last = found.name.rpartition(".")[2]
                if not last.startswith("_") and last not in _SKIPPED_DIRS:
                    child = _imported(found.name)
                    if child is not None:
                        modules[found.name] = child
    modules["os.path"] = importlib.import_module("os.path")
    return modules


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError, OSError):
        return None


def _members(prefix: str, owner: object) -> Iterator[tuple[str, object]]:
    """Yield the public functions and classes of a module or class, and the methods its classes define."""
    public = getattr(owner, "__all__", None) if isinstance(owner, ModuleType) else None
    names = public if public is not None else vars(owner)
    for attribute in sorted(names, key=lambda name: (_is_alias(owner, name), name)):
        if attribute.startswith("_"):
            continue
        value = _static(owner, attribute)
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        home = getattr(value, "__module__", None) or ""
        if isinstance(owner, ModuleType) and public is None and not _at_home(home, owner):
            continue
        name = f"{prefix}.{attribute}" if prefix else attribute
        yield name, value
        if inspect.isclass(value) and isinstance(owner, ModuleType):
            yield from _members(name, value)


def _is_alias(owner: object, name: str) -> bool:
    return getattr(_static(owner, name), "__name__", name) != name


def _static(owner: object, name: str) -> object:
    """Look a name up without running descriptors; modules may load a name only when it is asked for."""
    return getattr(owner, name, None) if isinstance(owner, ModuleType) else inspect.getattr_static(owner, name, None)


def _at_home(home: str, owner: ModuleType) -> bool:
    """Tell a module's own names from names it merely imported; compiled helpers carry a leading underscore."""
    own = owner.__name__
    return home == own or home.lstrip("_") == own or home.startswith("_") or home in ("", "builtins", "nt", "posix")


def _docstrings(name: str, module: ModuleType) -> Iterator[tuple[str, str]]:
    prefix = "" if name == "builtins" else name
    for title, value in _members(prefix, module):
        text = getattr(value, "__doc__", None)
        if isinstance(text, str) and text.strip():
            yield title, inspect.cleandoc(text)


def summary(docstring: str) -> str | None:
    """Return the first sentence of a docstring's first paragraph of prose, or None if there is no clean one."""
    paragraphs = docstring.split("\n\n")
    if _SIGNATURE.match(" ".join(paragraphs[0].split())):
        paragraphs = paragraphs[1:]
    line = " ".join(_SENTENCE_END.split(paragraphs[0], maxsplit=1)[0].split()) if paragraphs else ""
    clean = line.isascii() and line.isprintable() and not any(mark in line for mark in _UNCLEAN)
    clean = clean and not line.endswith(("e.g.", "i.e.", ":"))
    return line if clean and 12 <= len(line) <= 200 and " " in line and "(" not in line.split()[0] else None


def questions(count: int) -> list[Question]:
    """Choose `count` documented names: common modules first, then short names with short summaries."""
    modules = public_modules()
    order = [name for name in COMMON if name in modules]
    order += sorted(set(modules) - set(order), key=lambda name: (name.count("."), name))
    seen: set[int] = set()
    ranked: list[tuple[tuple[bool, int], str, str]] = []
    for module_name in order:
        if module_name in HELDOUT or module_name.partition(".")[0] in _REMOVED:
            continue
        for name, text in _docstrings(module_name, modules[module_name]):
            value = _resolve(module_name, modules[module_name], name)
            answer = summary(text)
            if answer is None or id(value) in seen:
                continue
            if module_name not in COMMON and len(answer) > _LONGEST_ELSEWHERE:
                continue
            seen.add(id(value))
            cost = len(answer) + len(name) + (40 if name.removeprefix(module_name).count(".") > 1 else 0)
            ranked.append(((module_name not in COMMON, cost), name, answer))
    ranked.sort()
    chosen = {name: answer for _, name, answer in ranked[:count]}
    return [Question(name, question_forms(name)[_fixed_form(name)], chosen[name]) for name in sorted(chosen)]


def _resolve(module_name: str, module: ModuleType, name: str) -> object:
    value: object = module
    for part in (name if module_name == "builtins" else name.removeprefix(f"{module_name}.")).split("."):
        value = _static(value, part)
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def question_forms(name: str) -> list[str]:
    """Return every way the training asks about a name."""
    return [template.format(name=name) for template in TEMPLATES]


def _fixed_form(name: str) -> int:
    return zlib.crc32(name.encode()) % len(TEMPLATES)


def write_questions(folder: Path, rows: list[Question]) -> None:
    """Write the question set and the list of held-out modules next to the model."""
    lines = [json.dumps(asdict(row), ensure_ascii=True) for row in rows]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "heldout.json").write_text(json.dumps({"modules": list(HELDOUT)}, indent=2) + "\n", encoding="utf-8")


def read_questions(folder: Path) -> list[Question]:
    """Read the question set that lies next to the model."""
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    write_questions(Path(sys.argv[1]), questions(int(sys.argv[2])))
