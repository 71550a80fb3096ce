"""`quire chat` and `quire run` on a terminal and in a pipe, with the model here and with that of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Run, run
from live_server import live, wait_until
from quire.cli.flags import to_arguments
from stub_engine import StubEngine, stub_info
from terminal import Terminal
from tiny_model import OPTIONS, write_tiny

__all__ = ["run"]
FLAGS = [*to_arguments(OPTIONS), "--num-blocks", "2000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that never ends by itself."""
    path = tmp_path_factory.mktemp("chat")
    config = json.loads((write_tiny(path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 30_000, "eos_token_id": None}))
    return str(path)


def test_every_command_on_a_terminal(folder: str, tmp_path: Path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "chat.json"
    tools.write_text(json.dumps([{"name": "weather", "parameters": {"type": "object"}}]))
    with Terminal(["-m", "quire", "chat", folder, *FLAGS, "-n", "5", "--system", "Be short."]) as terminal:
        banner = terminal.wait("\n> ")
        assert "context of 30,000 tokens" in banner and "/exit leaves" in banner and "weights" in banner
        assert "up to " in banner and "of KV cache in float32" in banner and "taken as it fills" in banner
        assert "sequences at a time" in banner

        def ask(line: str) -> str:
            terminal.type(line)
            return terminal.wait("\n> ").removeprefix(line)

        assert "tokens/s" in ask("hello"), "speed after the answer"
        assert "did you mean /save or" in ask("/sav") or "/save" in ask("/sav")
        assert "/retry" in ask("/help") and "Ctrl-C" in ask("/?")
        assert "Be short." in ask("/system")
        assert "temperature = 0.5" in ask("/set temperature 0.5")
        assert "max_tokens = 3" in ask("/set parameter num_predict 3"), "as Ollama spells it"
        assert "is it temperature?" in ask("/set temperatur 1") and "not a number" in ask("/set top_p much")
        assert "top_p" in ask("/set top_p 2"), "out of range"
        assert "[tools: weather]" in ask(f"/tools {tools}") and "[no tools]" in ask("/tools off")
        assert "takes no images" in ask(f"/image {tools}")
        assert "tokens/s" in ask("/retry")
        assert "not shown" in ask("/set quiet") and "tokens/s" not in ask("/retry")
        assert "is shown" in ask("/set verbose") and "tokens/s" in ask("/retry")
        assert "3 messages" in ask(f"/save {saved}")
        assert "no conversation of quire's" in ask(f"/save {tools}") or "is no conversation" in terminal.seen
        assert "forgotten" in ask("/clear") and "nothing to ask again" in ask("/retry")
        assert "3 messages of" in ask(f"/load {saved}")
        assert "No such file" in ask("/load /no/such/file")
        assert "3 messages" in ask("/show")
        terminal.type("/bye")
        assert terminal.process.wait(10) == 0
    kept = json.loads(saved.read_text())
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant"]
    assert kept["settings"]["temperature"] == 0.5


def test_several_lines_are_one_message(folder: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with Terminal(["-m", "quire", "chat", folder, *FLAGS, "-n", "3"]) as terminal:
        terminal.wait("\n> ")
        terminal.type('"""one')
        terminal.wait(". ")
        terminal.type("two")
        terminal.type('three"""')
        terminal.wait("tokens/s")
        terminal.wait("> ")
        terminal.type(f"/save {saved}")
        terminal.wait("messages are in")
        terminal.type("/exit")
        assert terminal.process.wait(10) == 0
    assert json.loads(saved.read_text())["messages"][0]["content"] == "one\ntwo\nthree"


def test_ctrl_c_stops_an_answer_and_twice_leaves(folder: str) -> None:
    with Terminal(["-m", "quire", "chat", folder, *FLAGS, "--temperature", "1"]) as terminal:
        terminal.wait("\n> ")
        terminal.type("go")
        terminal.wait("go")
        terminal.wait_for(200)
        terminal.interrupt()
        terminal.wait("> ")
        terminal.interrupt()
        terminal.wait("Ctrl-C again")
        terminal.wait("> ")
        terminal.interrupt()
        assert terminal.process.wait(10) == 130


def test_ctrl_c_stops_the_answer_of_a_server(tmp_path: Path) -> None:
    stub = StubEngine(stub_info(max_model_len=100_000), step_seconds=0.01)
    with (
        live(stub) as server,
        Terminal(["-m", "quire", "chat", "--server", server.url, "-n", "50000"]) as terminal,
    ):
        assert f"served by {server.url}" in terminal.wait("\n> ")
        terminal.type("go")
        wait_until(lambda: stub.running == 1, 20.0)
        terminal.wait("go")
        terminal.wait_for(20)
        terminal.interrupt()
        terminal.wait("> ")
        wait_until(lambda: stub.running == 0, 20.0)
        assert len(stub.aborted) == 1, "the server gave the request up"
        terminal.type(f"/save {tmp_path}/chat.json")
        assert "[2 messages are in" in terminal.wait("are in"), "what came of the answer is kept"
        terminal.wait("> ")
        terminal.interrupt()
        terminal.wait("Ctrl-C again")
        terminal.interrupt()
        assert terminal.process.wait(10) == 130


def test_piped_lines_are_messages_and_commands(run: Run, folder: str) -> None:
    code, out, err = run(
        "chat", folder, *FLAGS, "-n", "3", stdin=b'/foo bar\n"""a\nb"""\n/etc/hosts is what\n/exit\nno'
    )
    assert code == 0
    assert "/foo: there is no such command" in err and out.count("\n") == 2, "a path is a message"


def test_a_system_message_may_have_several_lines(run: Run, folder: str) -> None:
    code, _, err = run(
        "chat", folder, *FLAGS, "-n", "2", stdin=b'/set system """one\ntwo"""\n/system\n/set num_ctx 99\n'
    )
    assert code == 0, err
    assert "one\ntwo\n" in err and "quire run -c TOKENS" in err


def test_run_answers_once(run: Run, folder: str) -> None:
    words = ["run", folder, *FLAGS, "-n", "4", "--temperature", "0"]
    code, both, _ = run(*words, "ab", stdin=b"cd\n")
    assert code == 0 and both
    assert run(*words, "ab\n\ncd")[1] == both == run(*words, stdin=b"ab\n\ncd")[1]
    assert run(*words)[0] == 1, "nothing was asked"


def test_a_model_without_defaults_is_sampled_as_llama_cpp_does(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.cli.chat.answer import Answer
    from quire.cli.chat.conversation import Conversation
    from quire.cli.chat.local import LocalChat
    from quire.engine.llm import LLM

    seen = []
    with LLM(folder, **OPTIONS) as llm:
        stream = llm.stream
        monkeypatch.setattr(llm, "stream", lambda prompt, params, **more: seen.append(params) or stream(prompt, params))
        for settings in ({}, {"temperature": 0.2}):
            conversation = Conversation(settings={"max_tokens": 1, **settings})
            conversation.ask("a")
            list(LocalChat(llm).answer(conversation, lambda: False, Answer()))
        assert llm.get_default_sampling_params().temperature == 1.0
    assert [(p.temperature, p.top_k, p.top_p, p.min_p) for p in seen] == [(0.8, 40, 0.95, 0.05), (0.2, 40, 0.95, 0.05)]


def test_a_conversation_with_a_server(run: Run) -> None:
    with live() as server:
        code, out, err = run("chat", "--server", server.url, "-n", "4", "--seed", "1", stdin=b"ab\ncd\n")
        assert (code, err) == (0, "") and out.count("\n") == 2
        code, out, _ = run("run", "--server", server.url, "-n", "4", "Say hi")
        assert code == 0 and out.strip(), "the server's model need not be named"
        code, _, err = run("chat", "--server", server.url, "--threads", "2")
        assert code == 2 and "--threads" in err
        code, _, err = run("chat", "--server", server.url, "-m", "other")
        assert code == 2 and "'other'" in err
    assert "is the server up?" in run("chat", "--server", "127.0.0.1:9")[2]
    assert "--server" in run("chat", "--api-key", "k")[2]
