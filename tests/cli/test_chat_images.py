"""Images in a chat on the terminal: with a model here, and with that of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Run, run
from live_server import live
from oracle import BACKENDS
from quire.cli.chat.conversation import Conversation
from quire.core.errors import ConfigError
from seeing import file_of, said, seeing

__all__ = ["run"]
KINDS = [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif"),
         ("BMP", "image/bmp")]  # fmt: skip


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_an_image_goes_with_the_next_message_alone(form: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(file_of(kind=form))
    conversation = Conversation()
    conversation.attach(str(path))
    conversation.attach(str(path))
    conversation.ask("what?")
    conversation.ask("and?")
    [first, second] = conversation.messages
    assert [part["type"] for part in first["content"]] == ["image_url", "image_url", "text"]
    assert first["content"][0]["image_url"]["url"].startswith(f"data:{kind};base64,")
    assert second["content"] == "and?"


def test_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no image")
    with pytest.raises(ConfigError, match="no image that quire reads"):
        Conversation().attach(str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="No such file"):
        Conversation().attach(str(tmp_path / "nothing"))


def test_a_server_sees_the_image(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(file_of())
    with seeing() as server:
        lines = f"/image {tmp_path}/a picture.png\nwhat?\nand?\n".encode()
        code, _, err = run("chat", "--server", server.url, "-n", "3", "--seed", "1", stdin=lines)
        assert code == 0 and "goes with the next message" in err
        first, second = server.stub.submitted
        assert len(first.images) == 1 and len(second.images) == 1, "it stays in the conversation"
        assert said(server, first).count("<image>") > 0 and "what?" in said(server, first)


def test_a_server_without_eyes_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of())
    with live() as server:
        lines = f"/image {tmp_path}/a.png\nwhat?\n".encode()
        code, _, err = run("chat", "--server", server.url, "-n", "3", stdin=lines)
        assert code == 1 and "image" in err.splitlines()[-1]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
def test_a_model_here_sees_the_image(run: Run, tmp_path: Path) -> None:
    from vision_models import make_vision_model

    make_vision_model("llava", tmp_path / "model")
    for name, color in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        (tmp_path / f"{name}.png").write_bytes(file_of(color, (48, 48)))
    words = ["chat", str(tmp_path / "model"), "--dtype", "float32", "--num-blocks", "256", "--device", "cpu", "-n", "8",
             "--temperature", "0", "--verbose"]  # fmt: skip

    def answer(*pictures: str) -> tuple[str, str]:
        lines = "".join(f"/image {tmp_path}/{name}.png\n" for name in pictures) + "why?\n"
        code, out, err = run(*words, stdin=lines.encode())
        assert code == 0, err
        return out, err.rpartition("[")[2].partition(" prompt tokens")[0]

    (red, length), (blue, _), (nothing, short) = answer("red"), answer("blue"), answer()
    assert int(length) > int(short), "the prompt has the tokens of the image"
    assert len({red, blue, nothing}) == 3, "another image, another answer"
