"""Thoughts and calls of tools in a chat on the terminal: of a model here that is forced to write a text, and of a
server whose model says scripted tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, run
from quire.cli.chat import local
from quire.cli.chat.answer import Answer
from quire.cli.chat.conversation import Conversation
from quire.cli.chat.local import LocalChat
from quire.cli.flags import to_arguments
from quire.core.errors import BadRequest, ConfigError
from quire.core.params import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.llm import LLM
from quire.engine.requests import Prompt
from terminal import Terminal
from tiny_model import OPTIONS, SPECIAL, write_tiny
from tool_replies import CALLS, SAID, TEMPLATE, TOOLS, saying

__all__ = ["run"]
SHOWN = '<think>\nHm.\n</think>\nLet me see.\n`weather({"city": "A"})`\n\n`weather({"city": "B"})`\n'
ASKED = "[the next message is what weather returned; /retry asks again]"
NESTED = '{"city": {"a": [1, "b`c"]}}'


def model(folder: Path, template: str = TEMPLATE) -> Path:
    """A folder of a tiny model with another chat template and a longer context."""
    config = json.loads((write_tiny(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2000}))
    told = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the model here writes, one an answer: grammars leave it no choice."""
    texts: list[str] = []

    def forced(*_: Any, **__: Any) -> SamplingParams:
        only = StructuredOutputsParams(choice=[texts.pop(0)])
        return SamplingParams(max_tokens=500, temperature=0.0, structured_outputs=only)

    monkeypatch.setattr(local, "sampling", forced)
    return texts


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(model(tmp_path_factory.mktemp("tools")), **OPTIONS) as llm:
        yield llm


def answered(llm: LLM, conversation: Conversation) -> str:
    """What is shown of the answer to the last message, which the conversation keeps."""
    answer = Answer()
    shown = "".join(LocalChat(llm).answer(conversation, lambda: False, answer))
    conversation.messages.append(answer.message)
    return shown


def prompted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of later answers, as they come."""
    prompts, stream = [], llm.stream

    def noted(prompt: Prompt, *rest: Any, **more: Any) -> Any:
        assert isinstance(prompt, dict)
        prompts.append(llm.get_tokenizer().decode(prompt["prompt_token_ids"]))
        return stream(prompt, *rest, **more)

    monkeypatch.setattr(llm, "stream", noted)
    return prompts


def test_a_model_here_thinks_and_calls_and_is_given_results(
    llm: LLM, script: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script += [SAID, "It rains."]
    prompts = prompted(llm, monkeypatch)
    conversation = Conversation(tools=TOOLS)
    conversation.ask("hi")
    assert answered(llm, conversation) == SHOWN
    kept = conversation.messages[-1]
    assert (kept["content"], kept["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [call["function"]["arguments"] for call in kept["tool_calls"]] == ['{"city": "A"}', '{"city": "B"}']
    assert conversation.open_call == kept["tool_calls"][0]
    conversation.ask("rain")
    assert conversation.open_call == kept["tool_calls"][1]
    conversation.ask("snow")
    assert conversation.open_call is None
    assert [message.get("tool_call_id") for message in conversation.messages[-2:]] == [
        call["id"] for call in kept["tool_calls"]
    ]
    assert answered(llm, conversation) == "It rains."
    assert "[weather A][weather B]" in prompts[1], "the template has arguments as objects"
    assert "<tool>rain" in prompts[1] and "<tool>snow" in prompts[1] and "Hm." not in prompts[1]


def test_calls_are_text_where_no_tools_are_offered(llm: LLM, script: list[str]) -> None:
    script.append(SAID)
    conversation = Conversation()
    conversation.ask("hi")
    assert answered(llm, conversation) == f"<think>\nHm.\n</think>\nLet me see.{CALLS}"
    assert "tool_calls" not in conversation.messages[-1] and conversation.open_call is None


def test_marks_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path, TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"))
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace(SPECIAL[1], "[TOOL_CALLS]"))
    call = json.dumps('[{"name": "weather", "arguments": {"city": "A"}}]')
    only = StructuredOutputsParams(grammar=f'start: "Yes." <[1]> {call}')
    params = SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=only)
    monkeypatch.setattr(local, "sampling", lambda *_, **__: params)
    with LLM(folder, **OPTIONS) as llm:
        conversation = Conversation(tools=TOOLS)
        conversation.ask("hi")
        assert LocalChat(llm).tools_note() == ""
        assert answered(llm, conversation) == 'Yes.\n`weather({"city": "A"})`\n'


def test_thoughts_that_the_prompt_begins_are_shown_as_thoughts(tmp_path: Path, script: list[str]) -> None:
    template = TEMPLATE.replace(
        "{%- if add_generation", "{%- if add_generation_prompt %}<think>\n{% endif %}{%- if add_generation"
    )
    script.append("Hm.\n</think>\n\nYes.")
    with LLM(model(tmp_path, template), **OPTIONS) as llm:
        conversation = Conversation()
        conversation.ask("hi")
        assert answered(llm, conversation) == "<think>\nHm.\n</think>\nYes."


def test_the_chat_command_here(run: Run, script: list[str], tmp_path: Path) -> None:
    script += [SAID, "It rains.", SAID]
    tools, saved = tmp_path / "tools.json", tmp_path / "chat.json"
    tools.write_text(json.dumps(TOOLS))
    lines = f"/tools {tools}\nhi\nrain\nsnow\n/save {saved}\n/clear\n/load {saved}\n/retry\n/show\n"
    script[2] = "Snow."
    flags = [*to_arguments(OPTIONS), "--num-blocks", "2000"]
    code, out, err = run("chat", str(model(tmp_path / "model")), *flags, stdin=lines.encode())
    assert code == 0, err
    assert out == f"{SHOWN}\nIt rains.\nSnow.\n"
    assert err.count(ASKED) == 2, "once for each call"
    assert "[5 messages of" in err, "calls and results are saved and loaded"
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]


def test_a_model_that_is_not_told_of_tools(run: Run, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    folder, flags = write_tiny(tmp_path / "model"), to_arguments(OPTIONS)
    code, _, err = run("chat", str(folder), *flags, stdin=f"/tools {tools}\n".encode())
    assert code == 0 and "[tools: weather]" in err and "does not tell the model of tools" in err


def test_the_chat_command_with_a_server(run: Run, tmp_path: Path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "chat.json"
    tools.write_text(json.dumps(TOOLS))
    with saying(SAID) as server:
        lines = f"/tools {tools}\nhi\nrain\nsnow\n/save {saved}\n"
        code, out, err = run("chat", "--server", server.url, "-n", "200", stdin=lines.encode())
        assert code == 0, err
        assert out == f"{SHOWN}\n{SHOWN}\n"
        assert err.count(ASKED) == 3, "for two calls, and for the first of the second answer"
        prompt = server.tokenizer.decode(list(server.stub.submitted[1].prompt))
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    first = messages[1]
    assert (first["content"], first["reasoning_content"]) == ("Let me see.", "Hm.")
    ids = [call["id"] for call in first["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:4]] == ids
    assert f"rain#{ids[0]}" in prompt and "[weather A]" in prompt, "the server had calls and results"


def test_thoughts_are_dim_and_calls_are_code_on_a_terminal(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    with (
        saying(SAID) as server,
        Terminal(["-m", "quire", "chat", "--server", server.url, "-n", "200"]) as terminal,
    ):
        terminal.wait("\n> ")
        terminal.type(f"/tools {tools}")
        terminal.wait("\n> ")
        terminal.type("hi")
        seen = terminal.wait(ASKED)
        assert 'weather({"city": "A"})' in seen and "Let me see." in seen and "`" not in seen
        terminal.wait("\n> ")
        terminal.type("rain")
        assert "tokens/s" not in terminal.wait(ASKED), "there is another call to be answered first"
        terminal.type("/exit")
        assert terminal.process.wait(10) == 0
    assert "\x1b[2mHm." in terminal.seen, "dim"
    assert '\x1b[1;36mweather({"city": "A"})' in terminal.seen, "bold and cyan, as code"


def test_thoughts_are_dim_on_a_terminal_with_a_model_here(tmp_path: Path) -> None:
    """The command itself, whose model is forced by a sampling that a file of the folder asks for."""
    forcing = (
        "import sys\n"
        "from quire.cli.chat import local\n"
        "from quire.core.params import SamplingParams\n"
        "from quire.core.structured import StructuredOutputsParams\n"
        f"only = StructuredOutputsParams(choice=[{SAID!r}])\n"
        "local.sampling = lambda *_, **__: SamplingParams(max_tokens=500, temperature=0.0, structured_outputs=only)\n"
        "from quire.cli import main\n"
        "sys.argv[0] = 'quire'\n"
        "main()\n"
    )
    words = ["-c", forcing, "run", str(model(tmp_path)), *to_arguments(OPTIONS)]
    with Terminal([*words, "hi"]) as terminal:
        seen = terminal.wait("</tool_call>")
        assert "<think>" in seen and "Let me see." in seen
        assert terminal.process.wait(20) == 0
    assert "\x1b[2mHm." in terminal.seen


def test_answers_that_broke_off() -> None:
    answer = Answer()
    assert answer.add_thought("Hm.") + answer.end() == "<think>\nHm.\n</think>\n"
    answer.add_call(0, "", "weather", '{"city": ')
    assert "tool_calls" not in answer.message, "a call without all of its arguments is none"
    answer.add_call(0, "", "", '"A"}')
    answer.add_call(1, "b", "now", "")
    [first, second] = answer.message["tool_calls"]
    assert first["id"] == "call_0" and first["function"]["arguments"] == '{"city": "A"}'
    assert second == {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def called(*results: str) -> Conversation:
    """A conversation whose last answer called two tools, with results of some."""
    answer = Answer()
    for index, name in enumerate(("a", "b")):
        answer.add_call(index, name, name, NESTED)
    conversation = Conversation()
    for text in ("first", "second"):
        conversation.ask(text)
        conversation.messages.append({"role": "assistant", "content": "yes"} if text == "first" else answer.message)
    for result in results:
        conversation.ask(result)
    return conversation


@pytest.mark.parametrize(("results", "left"), [((), "second"), (("1",), "second"), (("1", "2"), "2")])
def test_a_retry_answers_what_was_asked_last(results: tuple[str, ...], left: str) -> None:
    conversation = called(*results)
    conversation.retry()
    assert conversation.messages[-1]["content"] == left
    assert conversation.messages[-1]["role"] == ("tool" if left == "2" else "user")


def test_calls_and_results_go_with_their_question() -> None:
    conversation = called("1", "2")
    conversation.messages.append({"role": "assistant", "content": "done"})
    conversation.ask("third")
    assert conversation.drop_oldest() and conversation.messages[0]["content"] == "second"
    assert conversation.drop_oldest() and [each["content"] for each in conversation.messages] == ["third"]
    assert not conversation.drop_oldest()


def test_a_result_that_was_not_answered_is_taken_back() -> None:
    conversation = called("1", "2")
    conversation.unask()
    assert conversation.open_call is not None and conversation.open_call["id"] == "b"


def test_calls_of_a_file_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for call in ({}, {"function": {"name": "a"}}, {"function": {"name": "a", "arguments": "{"}}, "a", None):
        path.write_text(json.dumps([{"role": "assistant", "content": "", "tool_calls": [call]}]))
        with pytest.raises(ConfigError, match="needs a function with a name"):
            Conversation().load(str(path))
    conversation, again, saved = called("1"), Conversation(), str(tmp_path / "saved.json")
    conversation.save(saved, "m")
    again.load(saved)
    assert again.messages == conversation.messages and again.open_call == conversation.open_call
    with pytest.raises(BadRequest):
        Conversation().retry()
