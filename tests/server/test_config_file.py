"""`quire serve --config FILE`: what a file may say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import run as run
from quire.cli.flags import to_engine, to_server
from quire.cli.serve import with_config
from quire.core.errors import ConfigError

GIVEN = """
model = "some/folder"
port = 9000
max-num-seqs = 12
enable_prefix_caching = false
api-key = ["a", "b"]
kv-cache-dtype = "int8"
max-model-len = "auto"

[speculative-config]
method = "ngram"
num_speculative_tokens = 3
"""


def config(folder: Path, text: str, name: str = "c.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_says_what_flags_say_and_the_command_line_wins(tmp_path: Path) -> None:
    options = with_config(config(tmp_path, GIVEN), {"port": 9001, "model": "other"})
    engine, server = to_engine(options), to_server(options)
    assert server.port == 9001 and server.api_key == ("a", "b")
    assert engine.model.model == "other" and engine.scheduler.max_num_seqs == 12
    assert not engine.cache.enable_prefix_caching and engine.cache.kv_cache_dtype == "int8"
    assert engine.speculation.asked is not None and engine.speculation.asked.method == "ngram"
    assert to_engine(with_config(config(tmp_path, GIVEN), {"ctk": "f32"})).cache.kv_cache_dtype == "float32"
    assert with_config(None, {"port": 1}) == {"port": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prt = 1", ["c.toml", "prt", "no such flag", "is it port?"]),
        ("[server]\nport = 1", ["server: there is no such flag"]),
        ("max-num-seqs = 1\nmax_num_seqs = 2", ["given twice"]),
        ("port: 1", ["c.toml", "not TOML", "line 1"]),
        ('port = "many"', ["port", "int"]),
        ("decode_context_parallel_size = 2", ["--decode-context-parallel-size 2", "all phases"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_said(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        options = with_config(config(tmp_path, text), {})
        to_engine(options)
        to_server(options)
    assert all(word in refused.value.message for word in words), refused.value.message


def test_what_is_no_file_of_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.toml: No such file"):
        with_config("/no/such.toml", {})
    with pytest.raises(ConfigError, match=r"a line `key: value` of YAML is"):
        with_config(config(tmp_path, "port: 1", "c.yaml"), {})


def test_serve_takes_it(tmp_path: Path, run: Any) -> None:
    code, _, err = run("serve", "--config", config(tmp_path, "num-blocks = -5"))
    assert code == 2 and "--num-blocks" in err
    code, out, _ = run("serve", "--help")
    assert code == 0 and "--config" in out
