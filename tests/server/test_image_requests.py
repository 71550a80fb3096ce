"""Images in requests of every API: what the engine is asked, what replies say, and what is refused by which name."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from live_server import LiveServer, live, wait_until
from quire.core.images import ImageLimits
from quire.features.images import edge_image_preparation
from seeing import IMAGE, IMAGE_ID, ROWS, asked, file_of, image_part, said, seeing, text_of, url_of

SEEN = IMAGE * ROWS
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with seeing() as server:
        yield server


def chat(server: LiveServer, *parts: Any, **fields: Any) -> dict[str, Any]:
    reply = server.post(CHAT, {"messages": asked(*parts), "max_tokens": 2, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def refusal(server: LiveServer, path: str, body: dict[str, Any], status: int = 400) -> Any:
    before = len(server.stub.submitted)
    reply = server.post(path, body)
    assert reply.status_code == status, reply.text
    assert len(server.stub.submitted) == before
    return reply.json()["error"]


def test_the_openai_client_sends_a_jpeg_and_streams(server: LiveServer) -> None:
    messages: Any = asked("What is this?", image_part(url_of(file_of(size=(64, 48), kind="JPEG"), "image/jpeg")))
    stream = server.openai().chat.completions.create(
        model="stub", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert sum(bool(c.choices and c.choices[0].delta.content is not None) for c in chunks) >= 1
    request = server.stub.submitted[-1]
    assert said(server) == f"<|user|>What is this?{SEEN}<|end|><|assistant|>"
    [image] = request.images
    assert (image.shape, image.size, image.rows) == ((1, 4, 4), (48, 64), ROWS)
    assert abs(image.tiles.astype(int) - (200, 30, 60)).max() < 8
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens == len(request.prompt)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.model_dump()["image_tokens"] == ROWS


def test_several_images_in_their_order_and_in_several_turns(server: LiveServer) -> None:
    red, green = (url_of(file_of(color)) for color in ("red", "lime"))
    messages = [
        *asked(image_part(red), "one", image_part(green)),
        {"role": "assistant", "content": "Two."},
        *asked(image_part(red), "again"),
    ]
    assert server.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    assert said(server) == (
        f"<|user|>{SEEN}one{SEEN}<|end|><|assistant|>Two.<|end|><|user|>{SEEN}again<|end|><|assistant|>"
    )
    images = server.stub.submitted[-1].images
    assert [tuple(p.tiles[0, 0, 0]) for p in images] == [(255, 0, 0), (0, 255, 0), (255, 0, 0)]
    assert images[0].key == images[2].key != images[1].key


def test_a_bare_url_and_n_choices(server: LiveServer) -> None:
    reply = chat(server, {"type": "image_url", "image_url": url_of()}, "hi", n=3)
    assert len(reply["choices"]) == 3 and reply["usage"]["prompt_tokens"] == len(server.stub.submitted[-1].prompt)


def test_base64_in_lines_is_read(server: LiveServer) -> None:
    lines = base64.encodebytes(file_of()).decode()
    assert "\n" in lines
    chat(server, image_part(f"DATA:image/png;base64,{lines}"), image_part())
    one, two = server.stub.submitted[-1].images
    assert one.key == two.key


def test_texts_alone_are_what_they_were(server: LiveServer) -> None:
    server.chat("hi", max_tokens=1)
    assert said(server) == "<|user|>hi<|end|><|assistant|>" and not server.stub.submitted[-1].images
    chat(server, "a", "b")
    assert said(server) == "<|user|>a\nb<|end|><|assistant|>"


def test_a_user_cannot_write_an_image(server: LiveServer) -> None:
    chat(server, f"{IMAGE} is a word", image_part())
    request = server.stub.submitted[-1]
    assert len(request.images) == 1
    assert said(server) == f"<|user|>{IMAGE} is a word{SEEN}<|end|><|assistant|>"
    assert request.prompt.count(IMAGE_ID) == 0
    server.chat(f"{IMAGE} alone", max_tokens=1)
    assert IMAGE_ID not in server.stub.submitted[-1].prompt


def test_replies_show_image_tokens(server: LiveServer) -> None:
    reply = chat(server, image_part(), "hi", return_token_ids=True)
    assert reply["prompt_token_ids"].count(IMAGE_ID) == ROWS and max(reply["prompt_token_ids"]) == IMAGE_ID
    counted = server.post("/tokenize", {"messages": asked(image_part(), "hi"), "return_token_strs": True}).json()
    assert counted["tokens"] == reply["prompt_token_ids"] and counted["count"] == len(counted["tokens"])
    assert counted["token_strs"].count(IMAGE) == ROWS
    back = server.post("/detokenize", {"tokens": counted["tokens"]}).json()["prompt"]
    assert back == f"<|user|>{SEEN}hi<|end|><|assistant|>"


def test_an_image_that_comes_again_is_not_decoded_again(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    read = edge_image_preparation.read_image
    monkeypatch.setattr(
        edge_image_preparation, "read_image", lambda data, *rest: decoded.append(len(data)) or read(data, *rest)
    )
    data = file_of("navy")
    for _ in range(3):
        chat(server, image_part(url_of(data)))
    server.post(
        "/api/chat", {"model": "stub", "messages": [{"role": "user", "content": "", "images": [text_of(data)]}]}
    )
    assert decoded == [len(data)]
    assert len({request.images[0].key for request in server.stub.submitted[-4:]}) == 1


def test_a_size_of_their_own_is_named(server: LiveServer) -> None:
    part = image_part()
    part["image_url"]["detail"] = "low"
    reply = server.post(CHAT, {"messages": asked(part), "max_tokens": 1})
    assert "messages[0].content[0].image_url.detail" in reply.headers["warning"]


def test_anthropic(server: LiveServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": text_of()}
    block = {"type": "image", "source": source}
    told = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, dict(block)]}
    body = {
        "model": "stub", "max_tokens": 2, "system": "Be short.",
        "messages": [{"role": "user", "content": [told, {"type": "text", "text": "What?"}, block]}],
    }  # fmt: skip
    counted = server.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    reply = server.post("/v1/messages", body)
    assert reply.status_code == 200, reply.text
    assert said(server) == (
        f"<|system|>Be short.<|end|><|tool|>seen{SEEN}<|end|><|user|>What?{SEEN}<|end|><|assistant|>"
    )
    usage = reply.json()["usage"]
    total = len(server.stub.submitted[-1].prompt)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted.json()["input_tokens"] == total


def test_responses_keep_images_for_the_next_turn(server: LiveServer) -> None:
    content: Any = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": url_of(), "detail": "auto"},
    ]
    client = server.openai().responses
    first = client.create(model="stub", input=[{"role": "user", "content": content}], max_output_tokens=2)
    assert said(server) == f"<|user|>What?{SEEN}<|end|><|assistant|>"
    client.create(model="stub", input="And now?", previous_response_id=first.id, max_output_tokens=2)
    assert said(server).startswith(f"<|user|>What?{SEEN}<|end|><|assistant|>")
    assert said(server).endswith("<|user|>And now?<|end|><|assistant|>")
    assert len(server.stub.submitted[-1].images) == 1


def test_ollama(server: LiveServer) -> None:
    ollama = pytest.importorskip("ollama", reason="the extra 'clients' is not installed")
    with ollama.Client(host=server.url, timeout=10.0) as client:
        messages = [{"role": "user", "content": "What?", "images": [file_of(), file_of("blue")]}]
        reply = client.chat(model="stub", messages=messages, options={"num_predict": 2})
        assert reply.prompt_eval_count == len(server.stub.submitted[-1].prompt)
        assert said(server) == f"<|user|>{SEEN}{SEEN}What?<|end|><|assistant|>"
        client.generate(model="stub", prompt="What?", images=[file_of()], options={"num_predict": 2})
        assert said(server) == f"<|user|>{SEEN}What?<|end|><|assistant|>"
        client.generate(model="stub", prompt="What?", images=[file_of()], raw=True, options={"num_predict": 2})
        assert said(server) == f"{SEEN}\nWhat?"
        assert "vision" in client.show("stub").capabilities


def test_llama_cpp_and_tgi(server: LiveServer) -> None:
    prompt = {"prompt_string": "a<__media__>b", "multimodal_data": [text_of()]}
    reply = server.post("/completion", {"prompt": prompt, "n_predict": 2})
    assert reply.status_code == 200, reply.text
    assert said(server) == reply.json()["prompt"] or said(server) == f"a{SEEN}b"
    assert reply.json()["tokens_evaluated"] == len(server.stub.submitted[-1].prompt)
    assert server.http.get("/props").json()["modalities"]["vision"] is True
    body = {"inputs": f"a![]({url_of()})b", "parameters": {"max_new_tokens": 2, "return_full_text": True}}
    reply = server.post("/generate", body)
    assert reply.status_code == 200 and said(server) == f"a{SEEN}b", reply.text
    assert reply.json()["generated_text"].startswith(f"a{IMAGE}b")


def test_a_batch_has_images(server: LiveServer, tmp_path: Path) -> None:
    import asyncio
    import json

    from quire.server.batch import run

    line = {"custom_id": "a", "url": CHAT, "body": {"messages": asked(image_part(), "hi"), "max_tokens": 2}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")

    async def go() -> None:
        await run(server.app, tmp_path / "in.jsonl", tmp_path / "out.jsonl", 1 << 20, lambda _: None)

    loop = server.engine._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(go(), loop).result(10.0)
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200
    assert said(server) == f"<|user|>{SEEN}hi<|end|><|assistant|>"


BAD = text_of(b"no image at all")
URL = "messages[0].content[0].image_url.url"
URLS = [
    ("", "must be a data:"),
    ("ftp://a/b", "must be a data:"),
    ("http://a.example/b", "--allow-media-url"),
    ("file:///etc/passwd", "--allowed-local-media-path"),
    ("data:text/plain;base64,aGk=", "media type"),
    ("data:image/png,aGk=", "base64"),
    ("data:image/png;base64,", "no bytes"),
    ("data:image/png;base64,a*b=", "valid base64"),
    (f"data:image/png;base64,{BAD}", "image"),
]


def messages_of(block: dict[str, Any]) -> dict[str, Any]:
    return {"model": "stub", "max_tokens": 1, "messages": asked(block)}


def items_of(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **part}]}]}


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    *((CHAT, {"messages": asked(image_part(url))}, URL, why) for url, why in URLS),
    (CHAT, {"messages": asked({"type": "image_url"})}, URL, "required"),
    (CHAT, {"messages": asked("a", {"type": "image_url", "image_url": 5})}, "messages[0].content[1].image_url.url", ""),
    (CHAT, {"messages": asked({"type": "input_audio"})}, "messages[0].content[0].type", "input_audio"),
    (CHAT, {"messages": asked({"type": "image", "source": {}})}, "messages[0].content[0].type", "image"),
    (CHAT, {"messages": asked(*(image_part() for _ in range(17)))}, "messages[0].content[16].image_url.url",
     "--limit-mm-per-prompt"),
    (CHAT, {"messages": [{"role": "system", "content": [image_part()]}, *asked("hi")]}, "messages", "1 images came"),
    (CHAT, {"messages": asked(image_part()), "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not cut"),
    (CHAT, {"messages": asked(image_part()), "prompt_logprobs": 1}, "prompt_logprobs", "images"),
    (CHAT, {"messages": asked(image_part(), "word " * 300)}, "messages", "context"),
    ("/v1/messages", messages_of({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type",
     "'base64' or 'url'"),
    ("/v1/messages", messages_of({"type": "image", "source": {"type": "base64", "media_type": "a/b", "data": BAD}}),
     "messages[0].content[0].source.media_type", "image"),
    ("/v1/messages", messages_of({"type": "image", "source": {"type": "base64", "media_type": "image/a", "data": BAD}}),
     "messages[0].content[0].source.data", "image"),
    ("/v1/responses", items_of({"file_id": "f"}), "input[0].content[0].file_id", "not kept"),
    ("/v1/responses", items_of({"image_url": "x"}), "input[0].content[0].image_url", "must be"),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": [BAD]}}, "prompt.multimodal_data", "media"),
    ("/v1/completions", {"prompt": "a", "multi_modal_data": {"image": [BAD]}}, "multi_modal_data", "chat/completions"),
    ("/v1/completions", {"prompt": [5, 6, 1 << 30]}, "prompt", "not in"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named", "why"), CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_what_is_refused(server: LiveServer, path: str, body: dict[str, Any], named: str, why: str) -> None:
    error = refusal(server, path, body)
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{named}:") and why in message, message
    assert len(message) < 600


def test_what_ollama_and_tgi_refuse(server: LiveServer) -> None:
    body = {"model": "stub", "messages": [{"role": "user", "content": "a", "images": [BAD]}]}
    assert refusal(server, "/api/chat", body).startswith("messages[0].images[0]:")
    assert refusal(server, "/api/generate", {"model": "stub", "prompt": "a", "images": [BAD]}).startswith("images[0]:")
    assert refusal(server, "/generate", {"inputs": f"![](data:image/png;base64,{BAD})"}).startswith("inputs:")


def test_a_model_that_takes_none_says_so() -> None:
    with live() as server:
        error = refusal(server, CHAT, {"messages": asked("hi", image_part())})
        assert error["param"] == "messages[0].content[1].image_url.url" and "takes no images" in error["message"]
        body = {"model": "stub", "prompt": "a", "images": [text_of()]}
        assert "takes no images" in refusal(server, "/api/generate", body)
        text = f"a![]({url_of(b'x')})b"
        assert server.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}}).status_code == 200
        assert server.tokenizer.decode(server.stub.submitted[-1].prompt) == text


def test_without_pillow_the_reason_is_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_image_preparation, "find_spec", lambda _: None)
    with seeing() as server:
        assert "pip install 'quire[vision]'" in refusal(server, CHAT, {"messages": asked(image_part())})["message"]


def test_a_template_that_reads_texts_alone_has_marks_before_the_text() -> None:
    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    with seeing(plain) as server:
        chat(server, f"not {IMAGE}", image_part(), "b", image_part())
        assert said(server) == f"<|user|>{SEEN}\n{SEEN}\nnot {IMAGE}\nb<|end|>"


def test_a_template_that_reads_lists_alone_is_given_lists() -> None:
    listed = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    with seeing(listed) as server:
        chat(server, image_part(), "b")
        assert said(server) == f"{SEEN}b"
        server.chat("hi", max_tokens=1)
        assert said(server) == "hi"
        messages = [*asked("a", image_part()), {"role": "assistant", "content": "and"}]
        more = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
        assert server.post(CHAT, {"messages": messages, **more}).status_code == 200
        assert said(server) == f"a{SEEN}and"


def test_limits_are_options() -> None:
    large = file_of(size=(50, 50))
    with seeing(limit_mm_per_prompt='{"image": 1}', max_image_pixels=2499, max_image_bytes=1024) as server:
        where = "messages[0].content[0].image_url.url"
        error = refusal(server, CHAT, {"messages": asked(image_part(), image_part())})
        assert "(--limit-mm-per-prompt)" in error["message"]
        error = refusal(server, CHAT, {"messages": asked(image_part(url_of(large)))})
        assert error["param"] == where and "2,500" in error["message"]
        error = refusal(server, CHAT, {"messages": asked(image_part(url_of(bytes(1025))))})
        assert error["param"] == where and "--max-image-bytes" in error["message"]
        assert chat(server, image_part())["usage"]["prompt_tokens"] > ROWS
    with seeing(limit_mm_per_prompt="image=0") as server:
        assert "0 of a prompt" in refusal(server, CHAT, {"messages": asked(image_part())})["message"]


@pytest.mark.parametrize(
    ("limits", "option"),
    [({"kept": ROWS - 1}, "--encoder-cache-tokens"), ({"step": ROWS - 1}, "--max-num-batched-tokens")],
)
def test_an_image_that_its_engine_cannot_take_is_named(limits: dict[str, int], option: str) -> None:
    """Before the engine is asked, so that streams are refused, too, before they begin."""
    with seeing(info={"image_limits": ImageLimits(**limits)}) as server:
        for stream in (False, True):
            error = refusal(server, CHAT, {"messages": asked("hi", image_part()), "stream": stream})
            assert error["param"] == "messages[0].content[1].image_url.url" and option in error["message"]
        error = refusal(server, "/v1/responses", items_of({"image_url": url_of()}))
        assert error["param"] == "input[0].content[0].image_url" and option in error["message"]


def test_images_of_requests_in_flight_are_bounded() -> None:
    with seeing(max_images_gb=100e-9) as server:
        server.stub.paused = True
        first = threading.Thread(target=chat, args=(server, image_part(), image_part()))
        first.start()
        wait_until(lambda: bool(server.stub.submitted))
        reply = server.post(CHAT, {"messages": asked(image_part()), "max_tokens": 2})
        assert reply.status_code == 429 and "--max-images-gb" in reply.text, reply.text
        server.stub.paused = False
        first.join(10.0)
        chat(server, image_part())
        assert server.service.media.preparing == 0 == server.engine.admission.image_bytes


def test_bodies_may_be_larger_where_images_are_taken() -> None:
    noise = Image.effect_noise((2500, 1800), 90)
    held = io.BytesIO()
    noise.convert("RGB").save(held, "PNG", compress_level=0)
    assert len(held.getvalue()) > 8 << 20
    with seeing() as server:
        assert server.service.options.max_body_bytes == 64 << 20
        chat(server, image_part(url_of(held.getvalue())))
    with live() as server:
        reply = server.post(CHAT, {"messages": asked(image_part(url_of(held.getvalue())))})
        assert reply.status_code == 413


def test_a_context_that_is_full_of_images() -> None:
    with seeing(info={"max_model_len": 9}) as server:
        error = refusal(server, CHAT, {"messages": asked(*[image_part()] * 3)})
        assert error["code"] == "context_length_exceeded" and "messages[0].content[2]" in error["message"]


def test_recordings_have_no_pixels(tmp_path: Path) -> None:
    from quire.engine.record.recording import without_content, without_pixels

    with seeing() as server:
        chat(server, image_part(), "hi")
        [request] = server.stub.submitted
    kept = without_pixels(request)
    assert kept.prompt == request.prompt and [p.pixels for p in kept.images] == [b""]
    assert kept.images[0].key == request.images[0].key
    assert without_content(request).images == ()
