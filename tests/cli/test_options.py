"""The kit of options: every option of every command is read and checked by it, from flags and from TOML files."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from quire.bench.suite.suite_file import Grid, Suite
from quire.cli.app import app
from quire.cli.params import Command
from quire.compress.recipes.parser import TABLES
from quire.compress.recipes.stages import METHODS
from quire.core.errors import ConfigError
from quire.core.options.fields import OptionField, about, fields_of, unwrapped
from quire.core.options.values import (
    Place,
    check_values,
    did_you_mean,
    from_text,
    near_names,
    read_options,
    read_table,
    read_value,
)

SOURCE = Path(__file__).parents[2] / "src" / "quire"
NUMBERS = (int, float, int | None, float | None)


def walk(name: str, command: click.Command) -> Iterator[tuple[str, Command]]:
    if not isinstance(command, click.Group):
        assert isinstance(command, Command)
        yield name, command
        return
    context = click.Context(command)
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        assert found is not None
        yield from walk(f"{name} {child}".strip(), found)


COMMANDS = {name: command for name, command in walk("", app) if command.groups}
STRUCTS = {struct: name for name, command in COMMANDS.items() for struct in command.groups.values()}
"""Struct -> a command whose flags are made from it."""
OF_FILES = [Suite, Grid, *TABLES.values(), *(stage for methods in METHODS.values() for stage in methods.values())]
"""Structs of recipes and suites, which have no flags."""


def asked(command: str, *words: str) -> str:
    """What a command says where it refuses its flags: nothing runs."""
    ended = CliRunner().invoke(app, [*command.split(), *words])
    assert ended.exit_code not in (0, None)
    return " ".join((ended.output + str(getattr(ended.exception, "message", ""))).split())


def outside(field: OptionField) -> Iterator[float]:
    """Values that are just outside the range of an option."""
    _, said = unwrapped(field.type)
    for limit, step in ((said.ge, -1), (said.gt, 0), (said.le, 1), (said.lt, 0)):
        if limit is not None:
            yield float(limit + step) if field.plain is float else int(limit + step)


def test_every_command_with_a_model_or_a_load_has_its_flags_from_structs() -> None:
    assert set(COMMANDS) >= {
        "serve", "chat", "generate", "embed", "run-batch", "replay", "eval", "inspect", "plan", "simulate", "compress",
        "train", "train-heads", "tune", "demo", "bench latency", "bench throughput", "bench serve",
    }  # fmt: skip
    for command in COMMANDS.values():
        made = {p.name for p in command.params if getattr(p, "field", None) is not None}
        assert made == {name for struct in command.groups.values() for name in struct.__struct_fields__}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelled_flag_is_answered_by_the_one_that_was_meant(command: str) -> None:
    flag = max((f.flag for struct in COMMANDS[command].groups.values() for f in fields_of(struct)), key=len)
    said = asked(command, flag[:-2] + flag[-1])
    assert "No such option" in said and flag in said


@pytest.mark.parametrize("struct", STRUCTS)
def test_numbers_of_flags_are_numbers(struct: type[msgspec.Struct]) -> None:
    fields = [f for f in fields_of(struct) if f.plain in NUMBERS and f.name != "max_model_len"]
    for field in fields[:2]:
        assert field.flag in asked(STRUCTS[struct], field.flag, "many")
    for field in fields:
        with pytest.raises(ConfigError, match=f"^{field.flag} 'many' must be (an integer|a number)$") as refused:
            read_options(struct, {field.name: "many"})
        assert refused.value.param == field.name


@pytest.mark.parametrize("struct", STRUCTS)
def test_ranges_hold_for_flags_and_for_structs(struct: type[msgspec.Struct]) -> None:
    for field in fields_of(struct):
        for value in outside(field):
            with pytest.raises(ConfigError, match=f"^{field.flag} .*must ") as refused:
                read_options(struct, {field.name: value})
            with pytest.raises(ConfigError, match=f"^{field.flag} .*must "):
                check_values(struct(**{field.name: value}))
            assert refused.value.param == field.name


@pytest.mark.parametrize("struct", STRUCTS)
def test_choices_hold_for_flags_and_for_structs(struct: type[msgspec.Struct]) -> None:
    for field in fields_of(struct):
        if not field.choices or field.open:
            continue
        value = field.plain(7) if field.plain is int else "nothing"
        with pytest.raises(ConfigError, match=f"^{field.flag} {value!r} is not one of {field.choices[0]}"):
            read_options(struct, {field.name: value})
        for choice in field.choices:
            read_options(struct, {field.name: from_text(field, choice)})


@pytest.mark.parametrize("struct", OF_FILES, ids=lambda struct: struct.__name__)
def test_keys_of_tables_are_checked(struct: type[msgspec.Struct]) -> None:
    place = Place("f.toml: part")
    for field in fields_of(struct):
        if len(field.name) > 3:
            miss = field.name[:-1] + "q"
            with pytest.raises(ConfigError, match=f"^f.toml: part: {miss}: there is no such key; is it {field.name}"):
                read_table(struct, {miss: 1}, place)
        if field.plain in (int, float, bool):
            with pytest.raises(ConfigError, match=f"^f.toml: part: {field.name} 'many' must be "):
                read_value(field.type, "many", place.key(field.name))
        for value in outside(field):
            with pytest.raises(ConfigError, match=f"^f.toml: part: {field.name} .* must "):
                read_value(field.type, value, place.key(field.name))


FILES = {
    "a flag": ("serve --config", "prt = 1", "f.toml: prt: there is no such flag; is it port?"),
    "a flag's type": ("serve --config", "port = 'many'", "--port 'many' must be an integer"),
    "a flag's range": ("serve --config", "port = 70000", "--port 70000 must lie in [0, 65535]"),
    "a flag's choice": ("serve --config", "log-level = 'loud'", "--log-level 'loud' is not one of debug,"),
    "a model": ("serve --models", "[models.a]\nmodel = 'pydoc'\npined = true", "model 'a': pined: a model has no such"),
    "a model's type": (
        "serve --models",
        "[models.a]\nmodel = 'pydoc'\nthreads = 'x'",
        "--threads 'x' must be an integer",
    ),
    "a model's range": (
        "serve --models",
        "[models.a]\nmodel = 'pydoc'\nthreads = -1",
        "--threads -1 must lie in [0, 1024]",
    ),
    "an axis": (
        "tune --space",
        "max-num-seq = [1]",
        "max-num-seq: there is no such option to vary; is it max-num-seqs?",
    ),
    "an axis' type": ("tune --space", "max_num_seqs = ['x']", "f.toml: max_num_seqs 'x' must be an integer"),
    "an axis' range": ("tune --space", "max_num_seqs = [0]", "f.toml: max_num_seqs 0 must be at least 1"),
    "a suite": ("bench suite -o rows.jsonl", "nam = 'a'", "f.toml: nam: there is no such key; is it name?"),
    "a suite's range": (
        "bench suite -o rows.jsonl",
        "name = 'a'\nrounds = 0\n[[grid]]",
        "f.toml: rounds 0 must lie in",
    ),
    "a suite's option": (
        "bench suite -o rows.jsonl",
        "name = 'a'\n[options]\nblock-siz = 1\n[[grid]]",
        "f.toml: options: block-siz: there is no such option; is it block-size?",
    ),
    "a recipe": (
        "compress a b --recipe",
        "[calibration]\nsampels = 1\n[[stage]]",
        "sampels: there is no such key; is it samples?",
    ),
    "a recipe's range": (
        "compress a b --recipe",
        "[calibration]\nsamples = 0\n[[stage]]",
        "[calibration]: samples 0 must be at least 1",
    ),
    "no file": ("serve --config", None, "--config f.toml: No such file"),
    "no models": ("serve --models", None, "--models f.toml: No such file"),
    "no space": ("tune --space", None, "--space f.toml: No such file"),
    "no suite": ("bench suite -o rows.jsonl", None, "f.toml: No such file"),
    "no recipe": ("compress a b --recipe", None, "--recipe f.toml: No such file"),
    "YAML": ("serve --models", "a: 1", "--models f.toml: is not TOML"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_are_refused_with_the_place_and_the_reason(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, text, words = FILES[case]
    if text is not None:
        Path("f.toml").write_text(text)
    assert words in asked(command, "f.toml")


def test_a_file_may_spell_keys_with_dashes() -> None:
    made = read_table(Suite, {"name": "a", "limit-s": 2, "grid": [{"shared-prefix": [3]}]}, Place("f.toml"))
    assert made.limit_s == 2.0 and made.grid[0].shared_prefix == (3,)
    with pytest.raises(ConfigError, match="limit_s: given twice"):
        read_table(Suite, {"limit-s": 2, "limit_s": 2}, Place("f.toml"))


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """An option of each kind."""

    one: int = 1
    several: tuple[int, ...] = ()
    maybe: bool | None = None
    text: str | None = None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("one", "3", 3), ("one", "x", "x"), ("several", "1,2", (1, 2)), ("maybe", "true", True), ("text", "3", "3")],
)
def test_text_is_read_by_the_type_of_its_option(name: str, text: str, value: object) -> None:
    [field] = [field for field in fields_of(Kinds) if field.name == name]
    assert from_text(field, text, ",") == value


def test_names_that_were_meant() -> None:
    assert near_names("max-num-sqs", ("max_num_seqs", "port")) == ["max_num_seqs"]
    assert did_you_mean("max-num-sqs", ("max_num_seqs", "port")) == "; is it max-num-seqs?"
    assert did_you_mean("zzz", ("a", "b")) == "; known are a, b"
    assert did_you_mean("zzz", map(str, range(99))) == "; quire serve --help lists them"


def test_a_number_that_is_none_is_refused() -> None:
    ranged = msgspec.defstruct("Ranged", [("share", float, 0.5)])
    with pytest.raises(ConfigError, match="share nan is not a number"):
        read_table(ranged, {"share": math.nan}, Place("f.toml"))
    assert about("Help.", (1, 2), ge=1).extra == {"choices": ("1", "2"), "refused": {}, "open": False, "common": False}


@pytest.mark.parametrize(
    ("module", "place"), [("tomllib", "core/options/values.py"), ("difflib", "core/options/values.py")]
)
def test_the_kit_alone_reads_toml_and_looks_for_near_names(module: str, place: str) -> None:
    found = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if module in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and node.names[0].name == module
    ]
    assert set(found) == {place}
