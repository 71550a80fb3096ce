"""The shape of the code base: layers, sizes, and things that must not appear."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from paths import ROOT, SOURCE, SUPPORT, TESTS
from quire.core.machine import uncollected
from source_tree import give_back, home, imports, inside, module_of, statements, tree

LAYERS = (
    {"core"},
    {"cache", "sched", "ops", "text", "images", "audio", "gguf", "parallel", "figures"},
    {"quant", "sample", "training", "store"},
    {"model"},
    {"run"},
    {"plan"},
    {"speculate"},
    {"engine"},
    {"bench"},
    {"server", "compress", "search", "simulate", "tune", "dashboard"},
    {"cli"},
)
# Inside L1 a scheduler plans in terms of the block tables, a GGUF file carries its own tokenizer, images are written
# into texts, and what ranks exchange is recorded with the ops of a step.
ALLOWED_SIDEWAYS = {("sched", "cache"), ("text", "gguf"), ("images", "text"), ("parallel", "ops")}
FILES = sorted(
    p for folder in ("src", "tests", "training", "benchmarks", "scripts") for p in (ROOT / folder).rglob("*.py")
)
TORCH_FREE = {
    "core", "cache", "sched", "text", "images", "audio", "gguf", "quant", "figures", "server", "simulate", "dashboard",
    "store", "features",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def trees_are_given_back() -> Iterator[None]:
    with uncollected(forever=False):
        yield
    give_back()


def layer_of(package: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if package in names)


def packages() -> list[str]:
    return sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists())


def test_every_package_has_a_layer() -> None:
    assert set(packages()) - {"features"} == set().union(*LAYERS)


@pytest.mark.parametrize("package", packages())
def test_imports_point_down(package: str) -> None:
    wrong = []
    for path in (SOURCE / package).rglob("*.py"):
        own = home(module_of(path))
        for module, line in imports(path):
            if not module.startswith("quire.") or module == "quire._native" or home(module) == own:
                continue
            theirs = home(module)
            if layer_of(theirs) >= layer_of(own) and (own, theirs) not in ALLOWED_SIDEWAYS:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(TORCH_FREE))
def test_no_torch_above_or_below_the_tensors(package: str) -> None:
    found = [f"{p}:{n}" for p in (SOURCE / package).rglob("*.py") for m, n in imports(p) if m.split(".")[0] == "torch"]
    assert not found, found


@pytest.mark.parametrize("folder", ["disk", "families", "load"])
def test_the_loader_is_imported_without_torch(folder: str) -> None:
    """It may be given tensors, by the workbench, and names their type."""
    paths = sorted((SOURCE / "model" / folder).rglob("*.py"))
    found = [
        f"{path}: {name}" for path in paths for name in imported(path, whole=False) if name.split(".")[0] == "torch"
    ]
    assert paths and not found, found


ACROSS = {"clients", "interop", "project", "system"}
"""Folders of tests that are of no one folder of the source."""


def test_folders_of_tests_are_those_of_the_source() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert not [str(each) for each in folders if str(each) not in ACROSS and not (SOURCE / each).is_dir()]


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by the name it is imported as; tests and scripts are imported from their own folders."""
    homes = {home: home.rglob("*.py") for home in (SOURCE.parent, SUPPORT, ROOT / "training")}
    homes[ROOT] = (ROOT / "benchmarks").rglob("*.py")
    named = {
        ".".join(path.relative_to(home).with_suffix("").parts): path for home, paths in homes.items() for path in paths
    }
    named |= {path.stem: path for path in TESTS.rglob("test_*.py")}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def needs(path: Path, known: frozenset[str]) -> set[str]:
    """The modules of `known` that one imports anywhere: within functions and for types alone, too."""
    found = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module}
    return found & known


WORKBENCH = (
    {"recipes", "tracking"},
    {"checkpoint"},
    {"calibration"},
    {"quantize", "prune"},
    {"layouts"},
    {"train"},
    {"evaluation"},
    {"pipelines"},
)
"""Folders of compress/ in the order in which they may import each other: each those before it."""


def test_folders_of_compress_point_down() -> None:
    level = {folder: i for i, folders in enumerate(WORKBENCH) for folder in folders}
    assert set(level) == {p.name for p in (SOURCE / "compress").iterdir() if (p / "__init__.py").exists()}
    known, wrong = frozenset(modules()), []
    for path in sorted((SOURCE / "compress").glob("*/*.py")):
        own = path.parent.name
        for name in needs(path, known):
            parts = name.split(".")
            if parts[:2] == ["quire", "compress"] and parts[2] != own and level[parts[2]] >= level[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, or none; graph: module -> those it imports."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for needed in sorted(graph[module]):
            if found := walk(needed, [*way, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = modules()
    graph = {name: needs(path, frozenset(paths)) - {name} for name, path in paths.items()}
    assert "quire.model.net.parts" in graph["quire.model.load.reader"] and "oracle" in graph["test_loader"]
    assert not (found := circle(graph)), " -> ".join(found)


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("if TYPE_CHECKING:\n    from b import B\n")
    (tmp_path / "b.py").write_text("def f():\n    import a\n")
    assert circle({name: needs(tmp_path / f"{name}.py", frozenset("ab")) for name in "ab"}) == ["a", "b", "a"]


APART = {
    "net": {"disk", "families", "load", "transformers_backend"},
    "families": {"net", "load", "transformers_backend"},
    "disk": {"net", "load", "transformers_backend"},
    "load": {"transformers_backend"},
    "transformers_backend": {"net", "load"},
}
"""Folders of model/ -> those they know nothing of; what a role is all may know."""


@pytest.mark.parametrize("folder", APART)
def test_folders_of_model_are_apart(folder: str) -> None:
    known = frozenset(modules())
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (SOURCE / "model" / folder).rglob("*.py")
        for name in needs(path, known)
        if name.startswith("quire.model.") and name.split(".")[2] in APART[folder]
    ]
    assert not [w for w in wrong if not w.endswith(" quire.model.load.roles")], wrong


SERVER_LAYERS = (
    {"server_options"},
    {"keys", "text_generation"},
    {"http"},
    {"service"},
    {"models"},
    {"apis"},
    {"apis.openai"},
    {"apis.tei"},
    {"apis.anthropic", "apis.llama_cpp", "apis.ollama", "apis.tgi"},
    {"dashboard", "monitoring", "pages", "announce", "load_log"},
    {"routes"},
    {"openapi", "batch"},
    {"app"},
    {"draining"},
    {"run"},
)
"""Modules and folders of server/: each imports from those above it alone, and from itself."""


def server_part(module: str) -> str:
    """The module or folder of server/ that a module is of; of apis/ a folder, or what all of them share."""
    parts = module.split(".")[2:]
    return ".".join(parts[:2]) if parts[0] == "apis" and len(parts) > 2 else parts[0]


def test_imports_of_the_server_point_down() -> None:
    order = {name: i for i, names in enumerate(SERVER_LAYERS) for name in names}
    paths = {name: path for name, path in modules().items() if name.startswith("quire.server.")}
    folders = {f"quire.server.apis.{path.name}" for path in (SOURCE / "server" / "apis").iterdir() if path.is_dir()}
    wrong = []
    for module, path in paths.items():
        for needed in needs(path, frozenset(paths)) - folders:
            ours, theirs = server_part(module), server_part(needed)
            if ours != theirs and order[theirs] >= order[ours]:
                wrong.append(f"{module} imports {needed}")
    assert not wrong, "\n".join(wrong)


SLOW = {"torch", "transformers", "triton", "starlette"}


def imported(path: Path, whole: bool) -> Iterator[str]:
    """What a module imports when it is imported itself, and `whole`: what its functions import as well."""
    nodes: list[ast.AST] = [tree(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif whole or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += inside(node)


def test_reading_headers_imports_nothing_slow() -> None:
    """`quire inspect` answers in less than a second because of it; torch alone takes three."""
    paths = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in SOURCE.rglob("*.py")}
    ways = {"quire.cli.app": "", "quire.cli.inspect": ""}
    left, wrong = list(ways), []
    while left:
        module = left.pop()
        for name in imported(paths[module], whole=module == "quire.cli.inspect"):
            if name.split(".")[0] in SLOW:
                wrong.append(f"{ways[module]}{module} -> {name}")
            if name in paths and name not in ways:
                ways[name] = f"{ways[module]}{module} -> "
                left.append(name)
    assert not wrong, "\n".join(wrong)
    assert "quire.quant.gguf" in ways and "quire.model.families.table" in ways


def test_sizes() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text()
        name = path.relative_to(ROOT)
        if text.count("\n") > 400:
            wrong.append(f"{name}: {text.count(chr(10))} lines")
        for node in statements(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = 250 if isinstance(node, ast.ClassDef) else 60
                if lines > limit:
                    wrong.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([n for n in names if n not in ("self", "cls")]) > 8 and not is_command(node):
                    wrong.append(f"{name}:{node.lineno} {node.name}: {len(names)} parameters")
    assert not wrong, "\n".join(wrong)


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command-line function has one parameter per flag, as click declares them; a kernel one per pointer and size."""
    return any("command" in ast.unparse(d) or "triton.jit" in ast.unparse(d) for d in node.decorator_list)


def test_every_module_says_what_it_is() -> None:
    missing = [str(p.relative_to(ROOT)) for p in FILES if p.read_text().strip() and not ast.get_docstring(tree(p))]
    assert not missing, missing


def test_public_names_have_docstrings() -> None:
    missing = []
    for path in SOURCE.rglob("*.py"):
        module = tree(path)
        scopes: list[ast.Module | ast.ClassDef] = [module, *(n for n in module.body if isinstance(n, ast.ClassDef))]
        for scope in scopes:
            for node in scope.body:
                private = scope.name[0] == "_" if isinstance(scope, ast.ClassDef) else False
                named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_"
                if named and not private and not ast.get_docstring(node) and not documented_elsewhere(scope, node):
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not missing, "\n".join(missing)


def documented_elsewhere(scope: ast.AST, node: ast.AST) -> bool:
    """An op's implementations and cases are described by its definition, a protocol's methods by who provides them."""
    decorators = {ast.unparse(d).partition("(")[0] for d in getattr(node, "decorator_list", ())}
    protocol = isinstance(scope, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in scope.bases)
    return protocol or bool(decorators & {"impl", "cases"})


BANNED = re.compile(
    r"\b(pickle|marshal)\b\.|import pickle|recv_pyobj|torch\.(load|save)\b|yaml\.load|shell=True"
    r"|[^.\w]eval\(|[^.\w]exec\(|\bT" + r"ODO\b|FIX" + r"ME"
)


def test_nothing_untrusted_and_nothing_left_open() -> None:
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if BANNED.search(line) and path != Path(__file__):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


READS_ENVIRONMENT = {
    "core/machine.py": ('os.environ.get("XDG_CACHE_HOME", "")',),
    "store/places.py": ('os.environ.get("QUIRE_MODELS", "")',),
    "cli/foreign_commands.py": ("return os.environ\n",),
    "store/index.py": ("get = os.environ.get\n", "get, home = os.environ.get, Path.home()\n"),
}
"""Who may read variables: those that say where a user's caches and models lie, which the home folder says otherwise,
which Python index pip asks, and the keys by which other tools' servers are locked."""


def test_no_environment_variable_changes_behaviour() -> None:
    texts = {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}
    for path, allowed in READS_ENVIRONMENT.items():
        for words in allowed:
            assert texts[path].count(words) == 1
            texts[path] = texts[path].replace(words, "")
    assert not [path for path, text in texts.items() if re.search(r"os\.(environ|getenv)", text)]
