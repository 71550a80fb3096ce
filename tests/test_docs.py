"""What the documents tell people to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from quire.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "training/README.md")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands() -> dict[str, set[str]]:
    """Each command of the command line ("bench latency") and its flags."""
    found: dict[str, set[str]] = {}

    def walk(name: str, command: object) -> None:
        for child, sub in getattr(command, "commands", {}).items():
            walk(f"{name} {child}".strip(), sub)
        found[name] = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]

    walk("", get_command(app))
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_targets_and_links_exist(name: str) -> None:
    text, known = (ROOT / name).read_text(), commands()
    typed = [line.strip(" `").split("#")[0] for line in text.splitlines() if re.match(r"^(    |`)quire ", line)]
    for line in typed:
        words = line.split()[1:]
        command = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        assert command in known, f"{name}: {line}"
        for flag in (w for w in words if re.match(r"-{1,2}[a-z]", w)):
            assert flag in known[command], f"{name}: {command} has no {flag}"
    for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
        assert target in TARGETS, f"{name}: make {target}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script.removeprefix("./")).exists(), f"{name}: {script}"
    if name == "README.md":
        assert len(typed) > 8
