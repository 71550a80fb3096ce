"""The command line, run as a user does: arguments in, text and exit code out."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from command_line import Run
from command_line import run as run
from quire.bench.loads import LatencyLoad, ServeLoad, ThroughputLoad
from quire.bench.quality import read_questions
from quire.cli import main
from quire.cli.demo import QUESTIONS
from quire.cli.flags import ENGINE, SERVER, to_arguments
from quire.engine.engine_options import UNBUILT
from quire.ops.native import load_native
from tiny_model import OPTIONS, write_tiny

FLAGS = to_arguments(OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out) == (0, f"quire {quire.__version__}\n")


@pytest.mark.parametrize(
    ("command", "structs"),
    [
        (["serve"], [*ENGINE.values(), *SERVER.values()]),
        (["chat"], [*ENGINE.values()]),
        (["generate"], [*ENGINE.values()]),
        (["eval"], [*ENGINE.values()]),
        (["inspect"], [*ENGINE.values()]),
        (["demo"], [*ENGINE.values()]),
        (["doctor"], []),
        (["bench", "latency"], [*ENGINE.values(), LatencyLoad]),
        (["bench", "throughput"], [*ENGINE.values(), ThroughputLoad]),
        (["bench", "serve"], [ServeLoad]),
    ],
)
def test_help_names_every_option(run: Run, command: list[str], structs: list[type[msgspec.Struct]]) -> None:
    all_flags = "--help-all" if set(structs) & set(ENGINE.values()) else "--help"
    code, out, _ = run(*command, all_flags)
    assert code == 0
    for struct in structs:
        for field in msgspec.structs.fields(struct):
            assert f"--{field.name.replace('_', '-')}" in out
    assert "--decode-context-parallel-size" not in out, "what is not built is not offered"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["serve", "--foo"], 2, ["--foo"]),
        (["nonsense"], 2, ["nonsense"]),
        (["serve", "--port", "many"], 2, ["--port", "integer"]),
        (["serve", "--port", "70000"], 2, ["--port", "70000"]),
        (["serve", "--threads", "5000"], 2, ["--threads 5000"]),
        (["serve", "--num-blocks", "-5"], 2, ["--num-blocks"]),
        (["serve", "--chat-template", "/no/such/file"], 2, ["/no/such/file"]),
        (["serve", "--tokenizer", "/no/such/folder"], 2, ["/no/such/folder"]),
        (["serve", "--header-timeout", "0"], 2, ["--header-timeout", "more than 0"]),
        (["serve", "--ssl-certfile", __file__, "--ssl-keyfile", __file__], 2, ["--ssl-certfile", "PEM"]),
        (["serve", "--max-num-seq", "3"], 2, ["--max-num-seqs"]),
        (["serve", "--block-size", "3"], 2, ["--block-size 3", "power of two"]),
        (
            ["serve", "--decode-context-parallel-size", "2"],
            2,
            ["--decode-context-parallel-size 2", "context_parallel_size"],
        ),
        (["serve", "--lora-modules", "a=b"], 2, ["--lora-modules", "--enable-lora"]),
        (["serve", "a", "--model", "b"], 2, ["'a'", "'b'"]),
        (["serve", "a", "--model", "a", "--port", "70000"], 2, ["--port 70000"]),
        (["serve", "-m", "a", "--model", "b"], 2, ["several models: a and b", "--model NAME=PATH"]),
        (["serve", "--model", "a=/no/such/folder"], 2, ["model 'a'", "/no/such/folder"]),
        (["serve", "--models", "/no/such/file"], 2, ["--models /no/such/file", "No such file"]),
        (["serve", "--models-memory-gb", "-1"], 2, ["--models-memory-gb"]),
        (["serve", "--max-model-len", "long"], 2, ["--max-model-len", "auto"]),
        (["serve", "-ctk", "f32", "-ctv", "bf16"], 2, ["bfloat16", "float32"]),
        (["inspect", "/no/such/folder"], 2, ["/no/such/folder"]),
        (["generate", "-m", "/no/such/folder", "hello"], 2, ["/no/such/folder"]),
        (["generate", ""], 1, ["prompt"]),
        (["generate", "-m", "", "hello"], 2, ["--model", "empty"]),
        (["generate", "--num-blocks", "999999999", "hello"], 2, ["--num-blocks 999999999", "blocks of", "fit"]),
        (["generate", "--kv-cache-memory-bytes", str(10**15), "hello"], 2, ["--kv-cache-memory-bytes", "at most"]),
        (["inspect", "--num-blocks", "999999999"], 2, ["--num-blocks 999999999", "blocks of", "fit"]),
        (["generate", "-c", "0", "hello"], 2, ["--max-model-len", "'0'"]),
        (["generate", "--chat-template", "/no/such/file", "hello"], 2, ["--chat-template", "quire chat"]),
        (["inspect", "--device", "reference", "--ops", "linear=x"], 2, ["not on the reference backend", "linear is"]),
        (["inspect", "--device", "reference", "--ops", "lineal=cpu"], 2, ["no such op", "linear,"]),
        (["inspect", "--device", "reference", "--ops", "linear=cublas"], 2, ["linear=cublas: needs a GPU"]),
        (["generate", "\udcff"], 1, ["UTF-8"]),
        (["chat", "--stop", "\udcff"], 1, ["UTF-8"]),
        (["eval", "--text", "/no/such/file"], 2, ["/no/such/file"]),
        (["bench", "serve", "--base-url", "localhost"], 2, ["--base-url"]),
        (["bench", "serve", "--goodput", "speed:1"], 2, ["--goodput"]),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], 1, ["127.0.0.1:9"]),
        (["bench", "latency", "--batch-size", "0"], 2, ["--batch-size 0", "at least 1"]),
    ],
)
def test_mistakes_are_named_without_a_traceback(run: Run, args: list[str], code: int, words: list[str]) -> None:
    found, _, err = run(*args)
    assert found == code
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_what_is_not_built_may_be_asked_for_neutrally(run: Run, folder: str) -> None:
    neutral = {name: values[-1] for name, (values, _) in UNBUILT.items() if values[-1] is not None}
    assert run("inspect", folder, *FLAGS, *to_arguments(neutral))[0] == 0


def test_inspect_shows_the_model_and_what_would_run(run: Run, folder: str) -> None:
    code, out, _ = run("inspect", folder, *FLAGS, "--device", "reference")
    assert code == 0
    for words in ("llama", "2, hidden 32", "key/value heads", "64 blocks of 16 tokens", "reference", "linear"):
        assert words in out
    _, embedded, _ = run("inspect", "--quantization", "int4", "--device", "reference")
    assert "pydoc" in embedded


@pytest.mark.parametrize(
    "options",
    [
        *({"device": "reference", "quantization": name} for name in ("none", "int8", "int4")),
        *({"device": "cpu", "dtype": "bfloat16", "bf16_bits": bits} for bits in (12, 16)),
    ],
)
def test_inspect_predicts_the_weights_that_are_loaded(run: Run, options: dict[str, Any]) -> None:
    """The estimate from headers is within a twentieth of what the engine reports."""
    from quire import LLM

    with LLM(num_blocks=8, **options) as llm:
        loaded = sum(size for role, (_, size) in llm.engine.engine.model.report.items() if role != "rope")
    _, out, _ = run("inspect", *to_arguments(options))
    line = next(row for row in out.splitlines() if "weights in memory" in row)
    predicted = float(line.split()[-2]) * 2**20
    assert predicted == pytest.approx(loaded, rel=0.05)


def test_doctor_names_the_backend(run: Run) -> None:
    code, out, _ = run("doctor", "--device", "reference")
    assert code == 0
    assert "quire" in out and "native kernels" in out and "reference" in out
    assert "cuda" in out, "why there is no GPU backend, or what it runs on"


@pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
def test_doctor_does_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from quire.cli import main; sys.argv = ['quire', 'doctor']; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "PyTorch is not installed: pip install 'quire[gpu]'" in done.stdout
    assert done.returncode == 0 and not done.stderr


def test_generate_prints_every_text_in_order(run: Run, folder: str) -> None:
    code, out, err = run("generate", folder, "ab", "cd", *FLAGS, "--max-tokens", "4", "--temperature", "0")
    assert code == 0
    assert out.index("=== ab") < out.index("=== cd")
    assert "4 prompt tokens" in err and "tokens/s" in err
    code, alone, _ = run("generate", "-m", folder, *FLAGS, "-n", "4", "--temperature", "0", stdin=b"ab")
    assert code == 0
    assert alone.strip() == out.split("=== ab\n")[1].split("\n=== cd")[0].strip()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_no_text_is_refused(run: Run, folder: str, command: str) -> None:
    code, _, err = run(command, "-m", folder, *FLAGS, stdin=b"\xff\n")
    assert code == 1 and "standard input is not utf-8 text" in err and "Traceback" not in err


def started(words: str) -> tuple[int, str]:
    """Exit code and standard error of a line of shell in which $QUIRE is the command."""
    line = words.replace("$QUIRE", f"{sys.executable} -m quire")
    found = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    return found.returncode, found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_message() -> None:
    code, err = started("$QUIRE --version > /dev/full")
    assert code == 1 and "standard output cannot be written" in err and "Traceback" not in err and "ignored" not in err


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError(104, "reset")])
def test_a_connection_error_is_not_one_of_the_output(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(prog_name: str) -> None:
        raise error

    monkeypatch.setattr("quire.cli.app.app", fails)
    monkeypatch.setattr("sys.argv", ["quire", "list"])
    with pytest.raises(type(error)):
        main()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_input_is_one_message(folder: str, command: str) -> None:
    code, err = started(f"$QUIRE {command} -m {folder} {' '.join(FLAGS)} <&-")
    assert code == 2 and "standard input is closed" in err and "Traceback" not in err


def test_a_first_word_that_is_a_gguf_file_is_the_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    code, out, err = run("generate", str(tmp_path / "cut.gguf"), "hello")
    assert code == 2 and "cut.gguf" in err and out == "", "and no prompt: one that is cut off is refused by its name"


def test_a_first_word_that_is_named_as_a_gguf_file_is_the_model_of_a_prompt(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    code, out, err = run("generate", str(tmp_path / "empty.gguf"), "hello")
    assert (code, out) == (2, "") and "empty.gguf is a file, but not GGUF" in err


@pytest.mark.slow
def test_bytes_are_utf8_where_the_locale_is_c(folder: str) -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = [*FLAGS, "-n", "2", "--temperature", "0"]
    outputs = set()
    for arguments, stdin in ((["héllo", "é"], b""), (["h\u00e9llo", "\u00e9"], b"")):
        command = [sys.executable, "-m", "quire", "generate", "-m", folder, *arguments, *flags]
        found = subprocess.run(command, input=stdin, env=environment, capture_output=True, check=False)
        assert found.returncode == 0, found.stderr
        outputs.add(found.stdout)
    assert len(outputs) == 1 and "=== héllo\n".encode() in outputs.pop()
    command = [sys.executable, "-m", "quire", "generate", "-m", folder, *flags]
    found = subprocess.run(command, input="é".encode(), env=environment, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr


def test_chat_answers_lines_of_a_pipe(run: Run, folder: str) -> None:
    code, out, err = run("chat", folder, *FLAGS, "-n", "4", "--temperature", "0", stdin=b"ab\n\n/clear\nab\n/exit\nno")
    assert code == 0 and err == ""
    first, second = out.rstrip("\n").split("\n") if out.count("\n") == 2 else (out, "")
    assert first == second, "after /clear the same question has the same answer"


def test_chat_drops_old_turns_when_the_context_is_full(run: Run, folder: str) -> None:
    code, _, err = run("chat", folder, *FLAGS, "-n", "4", stdin=b"\n".join([b"a" * 40] * 4))
    assert code == 0
    assert "oldest turn was dropped" in err


def test_eval_scores_a_text(run: Run, folder: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello there, " * 20)
    output = tmp_path / "result.json"
    code, out, _ = run("eval", folder, *FLAGS, "--text", str(text), "-o", str(output))
    assert code == 0 and "perplexity" in out
    found = json.loads(output.read_text())["perplexity"]
    assert (found["tokens"], found["bytes"]) == (259, 260)
    assert 100 < found["perplexity"] < 1000, "random weights guess among 260 tokens"
    code, _, err = run("eval", folder, *FLAGS)
    assert code == 2 and "give --set text alone" in err, "its context is shorter than a question"


def test_bench_writes_what_is_needed_to_repeat_it(run: Run, folder: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    load = ["--input-len", "4:8", "--output-len", "4", "-o", str(output)]
    code, out, _ = run("bench", "throughput", folder, *FLAGS, "--num-prompts", "4", *load)
    assert code == 0 and "output tokens per s" in out
    found = json.loads(output.read_text())
    assert found["load"]["num_prompts"] == 4
    assert found["results"]["rates"]["output_tokens"] == 16
    assert found["engine"]["options"]["cache"]["num_blocks"] == 64
    waste = found["results"]["kv_waste"]
    assert waste["paged"]["mean"] < waste["contiguous_max_model_len"]["mean"]
    code, out, _ = run("bench", "latency", folder, *FLAGS, "--iters", "2", "--batch-size", "2", *load)
    assert code == 0 and "ttft" in out and "prompt tokens/s (pp)" in out and "generation tokens/s (tg)" in out
    assert json.loads(output.read_text())["results"]["rates"]["completed"] == 4
    code, _, err = run("bench", "latency", folder, *FLAGS, "--input-len", "200")
    assert code == 2 and "--input-len" in err


def test_ctrl_c_ends_quietly(folder: str) -> None:
    command = [sys.executable, "-m", "quire", "chat", folder, *FLAGS, "-n", "4"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Whoever runs the tests in the background has the signal ignored, and children inherit that.
    with subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"ab\n")
        process.stdin.flush()
        assert process.stdout.readline(), "the first answer"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == b""


def test_ctrl_c_ends_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    config = json.loads((write_tiny(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 30_000, "eos_token_id": None})
    )
    ours, theirs = pty.openpty()

    def read(done: Callable[[bytes], bool]) -> None:
        seen = b""
        while not done(seen):
            seen += os.read(ours, 4096)

    command = [sys.executable, "-m", "quire", "chat", tmp_path, *FLAGS, "--num-blocks", "2000", "--temperature", "1"]
    defaults = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=defaults) as process:
        os.close(theirs)
        read(lambda seen: seen.endswith(b"> "))
        os.write(ours, b"ab\n")
        read(lambda seen: len(seen) > 200)
        process.send_signal(signal.SIGINT)
        read(lambda seen: seen.endswith(b"\n> "))
        os.write(ours, b"/exit\n")
        assert process.wait(10) == 0
    os.close(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent ended")
def test_a_demo_that_is_killed_leaves_no_server(folder: str) -> None:
    command = [sys.executable, "-m", "quire", "demo", folder, *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        server = Path("/proc") / found[0]
        while b"serve" not in (server / "cmdline").read_bytes():
            time.sleep(0.01)
        process.kill()
    end = time.monotonic() + 30
    while server.exists():
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.05)


def test_the_demo_asks_what_the_embedded_model_knows() -> None:
    folder = Path(quire.__file__).parent / "assets" / "pydoc"
    known = {row.name for row in read_questions(folder)}
    for question in QUESTIONS:
        assert any(f" {name}." in question or f" {name} " in question or f" {name}?" in question for name in known)


def test_demo_serves_over_http_and_shuts_down(folder: str) -> None:
    command = [sys.executable, "-m", "quire", "demo", folder, *FLAGS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "exit code 0" in found.stdout and "TTFT" in found.stdout
