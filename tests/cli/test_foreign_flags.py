"""Flags of llama.cpp and vLLM: each parses to the configuration of ours, or is refused by a flag that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

from command_line import Run, run
from paths import ROOT
from quire.cli.app import app
from quire.cli.bench import bench
from quire.cli.flags import to_engine
from quire.cli.foreign_flags import in_our_flags
from quire.cli.params import Command
from quire.core.errors import ConfigError
from quire.core.options.aliases import ALIASES, BY_SPELLING, Alias
from quire.core.options.fields import flag
from quire.engine.engine_options import UNBUILT, engine_config

__all__ = ["run"]
COMMANDS = ("serve", "chat", "generate")


def command(name: str) -> Command:
    found = app.get_command(click.Context(app), name)
    assert isinstance(found, Command)
    return found


def flags(found: click.Command) -> Iterator[str]:
    for param in found.params:
        if isinstance(param, click.Option):
            yield from (*param.opts, *param.secondary_opts)


OURS = {spelling for name in COMMANDS for spelling in flags(command(name))}


def home(alias: Alias) -> Command:
    """A command that has the option which a row is another name of."""
    for name in COMMANDS:
        if alias.ours in command(name)._known_flags().by_name:
            return command(name)
    raise AssertionError(f"{alias.spellings}: no command has {alias.ours}")


def params(found: Command, words: list[str]) -> dict[str, Any]:
    return found.make_context(found.name, list(words)).params


def value_of(alias: Alias, found: Command) -> str:
    """A value that the option takes and that is no special one."""
    [option] = [p for p in found.params if p.name == alias.ours]
    field = getattr(option, "field", None)
    if field is not None and field.choices:
        return next(choice for choice in field.choices if choice not in alias.values)
    return "text" if option.type.name == "text" else "3"


def test_every_spelling_has_one_row_and_is_none_of_ours() -> None:
    assert len(BY_SPELLING) == sum(len(alias.spellings) for alias in ALIASES) > 250
    for alias in ALIASES:
        if alias.ours:
            known = home(alias)._known_flags()
            assert not set(alias.spellings) & set(known.takes_value), alias


@pytest.mark.parametrize("alias", [a for a in ALIASES if a.ours and not a.reason], ids=lambda a: a.spellings[-1])
def test_another_name_is_ours(alias: Alias) -> None:
    found = home(alias)
    ours = found._known_flags().by_name[alias.ours]
    for spelling in alias.spellings:
        if alias.flag:
            assert params(found, [spelling]) == params(found, [ours]) != params(found, [])
            continue
        value = value_of(alias, found)
        same = params(found, [ours, value])
        assert params(found, [spelling, value]) == params(found, [f"{spelling}={value}"]) == same != params(found, [])
        for given, here in alias.values.items():
            assert params(found, [spelling, given]) == params(found, [ours, here] if here else [])


@pytest.mark.parametrize("alias", [a for a in ALIASES if not a.ours], ids=lambda a: a.spellings[-1])
def test_what_has_no_like_here_is_refused_with_flags_that_exist(alias: Alias) -> None:
    for named in re.findall(r"(?<![\w-])--?[a-z][a-z-]*[a-z]", alias.reason):
        assert named in OURS, named
    for spelling in alias.spellings:
        if spelling in OURS:
            continue
        for value in alias.neutral or ():
            assert params(command("serve"), [spelling, value]) == params(command("serve"), [])
        words = [spelling] if alias.flag else [spelling, "7"]
        if alias.neutral is None:
            assert params(command("serve"), words) == params(command("serve"), [])
        else:
            with pytest.raises(ConfigError, match=f"^{spelling}.*refused"):
                params(command("serve"), words)


def test_command_lines_of_others(run: Run) -> None:
    serve = command("serve")
    llama = (
        "-hf o/m:Q4_K_M --ctx-size 4096 -t 2 -ngl 99 -fa on -np 8 "
        "--host 0.0.0.0 --jinja -a name --mlock -ctk q8_0 -ctv q8_0"
    )
    found = params(serve, llama.split())
    assert found["model"] == ("o/m:Q4_K_M",) and found["max_model_len"] == "4096" and found["max_num_seqs"] == 8
    assert (
        run("serve", "--temp", "1")[2]
        == "quire: --temp: is --temperature here, a flag of other commands or a field of requests to a server\n"
    )
    assert found["device"] is None and found["served_model_name"] == ("name",)
    assert params(serve, ["-b", "2048", "-ub", "256"])["max_num_batched_tokens"] == 256
    assert params(serve, ["-b", "2048"])["max_num_batched_tokens"] == 2048
    assert params(serve, ["m", "--max_model_len", "10", "-tp", "2"])["tensor_parallel_size"] == 2
    assert params(serve, ["-fa", "--port", "9"])["port"] == 9, "it may have no value"
    assert params(command("chat"), ["-s", "-1", "--temp", "0.5", "-sys", "--mirostat"])["system"] == "--mirostat"
    code, _, err = run("serve", "--ctx-siz", "1")
    assert code == 2 and "No such option" in err
    code, _, err = run("serve", "--mirostat", "2")
    assert code == 2 and "--mirostat 2: llama.cpp's flag is refused" in err
    assert in_our_flags(["--", "-ngl"], serve._known_flags()) == ["--", "-ngl"]


def test_python_takes_the_names_of_vllm() -> None:
    assert engine_config({"num_gpu_blocks_override": 12}).cache.num_blocks == 12
    assert engine_config({"swap_space": 4, "disable_log_stats": True, "max_seq_len_to_capture": 8}) == engine_config({})
    assert engine_config(
        {"tokenizer_mode": "auto", "hf_overrides": None, "skip_tokenizer_init": False}
    ) == engine_config({})
    with pytest.raises(ConfigError, match=r"hf_overrides .* is refused: .*--max-model-len") as refused:
        engine_config({"hf_overrides": {"a": 1}})
    assert refused.value.param == "hf_overrides"


def test_python_takes_the_names_of_llama_cpp() -> None:
    """Those of llama-cpp-python, and flags of llama.cpp with underscores."""
    found = engine_config({"n_ctx": 512, "n_threads": 3, "n_batch": 64, "n_gpu_layers": -1})
    assert (found.model.max_model_len, found.device.threads, found.scheduler.max_num_batched_tokens) == (512, 3, 64)
    assert engine_config({"ctx_size": 512, "threads": 3, "ubatch_size": 64}) == found
    assert engine_config({"n_ctx": 0, "n_gpu_layers": 0}) == engine_config({"device": "cpu"})
    assert engine_config({"parallel": 4}).scheduler.max_num_seqs == 4
    with pytest.raises(ConfigError, match=r"n_gpu_layers 3: llama.cpp's flag is refused: .*--device"):
        engine_config({"n_gpu_layers": 3})


def test_the_page_says_what_the_table_says() -> None:
    """Flags in the tables of llama-server and vLLM, and what stands beside them."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if re.match(r"\| `--?\w", line)]
    seen = 0
    for theirs, here, _ in rows[: next(i for i, row in enumerate(rows) if "--max-model-len" in row[0])]:
        for spelling in re.findall(r"`(--?[\w-]+)", theirs):
            if spelling in OURS or flag(spelling[2:]).removeprefix("--").replace("-", "_") in UNBUILT:
                continue
            alias = BY_SPELLING.get(spelling)
            assert alias is not None, spelling
            told = set(re.findall(r"`(--?[\w-]+)", here))
            if alias.ours:
                assert flag(alias.ours) in told or not told or alias.reason, (spelling, told)
            seen += 1
    assert seen > 30


BENCH = {name: bench.get_command(click.Context(bench), name) for name in ("latency", "throughput", "serve")}


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("latency", "-p 512 -n 64 -r 3", "--input-len 512 --output-len 64 --iters 3"),
        ("latency", "--num-iters 3 --num-iters-warmup 2 --output-json f", "--iters 3 --warmup 2 --output f"),
        ("throughput", "--random-input-len 9 --dataset-name random", "--input-len 9"),
        ("serve", "--random-input-len 9 --random-output-len=7", "--input-len 9 --output-len 7"),
        ("serve", "--dataset-name random --save-result --result-filename f --backend vllm", "--output f"),
        ("serve", "--disable-tqdm --num-warmups 3", "--warmup 3"),
    ],
)
def test_flags_of_other_benchmarks(name: str, theirs: str, ours: str) -> None:
    found = BENCH[name]
    assert isinstance(found, Command)
    assert params(found, theirs.split()) == params(found, ours.split()) != params(found, [])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench serve --dataset-name sharegpt", ["--dataset-name sharegpt: vLLM's flag is refused", "--trace"]),
        ("bench serve --save-result", ["--save-result: vLLM's", "--output FILE"]),
        ("bench serve -p text", ["-p text: llama.cpp's", "--input-len"]),
        ("bench throughput --prompt text", ["--prompt text", "--input-len"]),
        ("bench latency -f file", ["-f file", "--input-len"]),
        ("bench serve --result-dir d", ["--result-dir d", "--output FOLDER/FILE"]),
        ("chat -p text", ["-p text", "-sys", "first message"]),
        ("generate --verbose", ["--verbose: llama.cpp's", "has none like it; of quire serve: use --log-level"]),
        ("serve --verbose", ["refused: use --log-level debug"]),
    ],
)
def test_what_means_something_else_is_refused_by_our_flag(run: Run, line: str, words: list[str]) -> None:
    code, _, err = run(*line.split())
    assert code == 2 and all(word in err for word in words), err


def test_a_prompt_may_be_a_flag(run: Run) -> None:
    assert params(command("generate"), ["-p", "text"])["prompt"] == "text"
    assert params(command("run"), ["m", "--prompt", "text"])["prompt"] == "text"
    assert params(command("eval"), ["m", "-f", "a", "--file", "b"])["text"] == ("a", "b")
    short = ["-n", "4", "--temperature", "0", "--num-blocks", "64"]
    assert run("generate", "-p", "def", *short)[1] == run("generate", "def", *short)[1] != ""
    code, out, err = run("run", "-m", "pydoc", "-p", "def", *short, "--verbose")
    assert code == 0 and "tokens/s" in err and out == run("run", "pydoc", "def", *short)[1]


def test_a_flag_is_guessed_where_the_words_are_near(run: Run) -> None:
    assert "Did you mean" not in run("bench", "serve", "--data-name", "x")[2]
    assert "--max-num-seqs" in run("serve", "--max-num-seq", "3")[2]
    assert "--temperature" in run("chat", "--temprature", "1")[2]
    assert "--gpu-memory-utilization" in run("serve", "--gpu-memory-util", "1")[2]


def test_integers_have_suffixes() -> None:
    serve = command("serve")
    for given, number in (("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1m", 10**6), ("2G", 2 << 30), ("12", 12)):
        found = params(serve, ["--kv-cache-memory-bytes", given, "--max-num-batched-tokens", given, "-c", given])
        assert found["kv_cache_memory_bytes"] == found["max_num_batched_tokens"] == number
        assert to_engine({"max_model_len": found["max_model_len"]}).model.max_model_len == number
    for wrong in ("1.5", "k", "4kk", "1.0001k", "4x"):
        with pytest.raises(click.UsageError, match="integer"):
            params(serve, ["--max-num-seqs", wrong])


def test_flags_of_several_words() -> None:
    serve = command("serve")
    found = params(serve, ["m", "--lora-modules", "a=X", "b=Y", '{"name": "c"}', "--port", "9"])
    assert found["lora_modules"] == ("a=X", "b=Y", '{"name": "c"}') and found["port"] == 9
    assert params(serve, ["--lora-modules", "a=X", "m"])["model_argument"] == "m"
    assert params(serve, ["m", "--served-model-name", "a", "b", "--port", "9"])["served_model_name"] == ("a", "b")
    assert params(serve, ["--served-model-name", "a", "b", "-m", "m"])["served_model_name"] == ("a", "b")
    found = params(serve, ["--served-model-name", "a", "m"])
    assert found["served_model_name"] == ("a",) and found["model_argument"] == "m", "what may be the model is that"
