"""What the server is made of: Starlette and msgspec. Neither FastAPI nor pydantic is imported, though they be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stub_server import StubServer

EVERYTHING = """
import importlib, pkgutil, sys
import quire.cli.serve, quire.server

for found in pkgutil.walk_packages(quire.server.__path__, "quire.server."):
    importlib.import_module(found.name)
assert len([name for name in sys.modules if name.startswith("quire.server.")]) > 50
print(*{"fastapi", "pydantic", "pydantic_core"} & set(sys.modules))
"""
REFUSED = 'raise ImportError("it was imported")\n'


def test_no_module_of_the_server_imports_them() -> None:
    found = subprocess.run([sys.executable, "-c", EVERYTHING], check=True, capture_output=True, text=True, timeout=60)
    assert not found.stdout.split()


def test_a_server_answers_without_fastapi(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text(REFUSED)
    refused = subprocess.run([sys.executable, "-c", "import fastapi"], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert refused.returncode
    with StubServer(first=tmp_path) as server:
        assert server.client.get("/openapi.json").json()["openapi"] == "3.1.0"
        body = {"prompt": "a", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
        for path in ("/v1/nothing", "/redoc"):
            assert server.client.get(path).json()["error"]["code"] == "not_found"
