"""Servers and readers of a model that takes images, over an engine that pretends: the embedded model's tokenizer
with an image token, and files that say how LLaVA cuts images (4 x 4 pixels in patches of 2: 4 rows an image)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import live_server
from live_server import FOLDER, LiveServer, live
from quire.core.images import placeholders
from quire.core.request import Request
from quire.engine.client import EngineInfo
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from stub_engine import StubEngine, stub_info

IMAGE, IMAGE_ID, VOCAB, ROWS = "<image>", 6144, 6145, 4
TEMPLATE = """{%- for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' and m.role in ('user', 'tool') %}<image>{% elif part.type == 'text' %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 4},
    "crop_size": {"height": 4, "width": 4},
}  # fmt: skip
CONFIG = {"model_type": "llava", "vision_config": {"patch_size": 2, "model_type": "clip_vision_model"}}


@cache
def folder() -> Path:
    """A model's folder without weights."""
    made = Path(tempfile.mkdtemp(prefix="quire-images-"))
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"].append(IMAGE)
    settings["chat_template"] = TEMPLATE
    (made / "tokenizer.json").write_text((FOLDER / "tokenizer.json").read_text())
    for name, value in {"tokenizer_config": settings, "preprocessor_config": PROCESSOR, "config": CONFIG}.items():
        (made / f"{name}.json").write_text(json.dumps(value))
    return made


def image_model_info(**changes: Any) -> EngineInfo:
    """Facts of such a model."""
    return stub_info(**{"folder": str(folder()), "vocab_size": VOCAB, "takes_images": True, **changes})


@contextlib.contextmanager
def seeing(template: str = TEMPLATE, info: dict[str, Any] | None = None, **options: Any) -> Iterator[LiveServer]:
    """A server of such a model; `info` changes what its engine says of itself."""
    tokenizer = Tokenizer.from_folder(folder())
    made = ChatTemplate({"default": template}, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_server, "text_tools", lambda: (tokenizer, made))
        with live(StubEngine(image_model_info(**(info or {}))), **options) as server:
            yield server


def file_of(color: Any = (200, 30, 60), size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    """The file of an image of one color."""
    held = io.BytesIO()
    Image.new("RGB", size, color).save(held, kind)
    return held.getvalue()


def url_of(data: bytes | None = None, kind: str = "image/png") -> str:
    """The same as a data: URL."""
    return f"data:{kind};base64,{text_of(data)}"


def text_of(data: bytes | None = None) -> str:
    """The same in base64."""
    return base64.b64encode(file_of() if data is None else data).decode()


def image_part(url: str | None = None) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url_of() if url is None else url}}


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message; texts may be given as they are."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def said(server: LiveServer, request: Request | None = None) -> str:
    """The prompt that the engine has, an image token for each row of an image, each of which is where it says."""
    request = server.stub.submitted[-1] if request is None else request
    ids = list(request.prompt)
    for image in request.images:
        drawn = placeholders(image.key, image.rows, server.stub.info.vocab_size)
        for start, count in image.runs:
            assert ids[start : start + count] == drawn[:count]
            del drawn[:count]
            ids[start : start + count] = [IMAGE_ID] * count
    assert max(ids) < VOCAB
    return server.tokenizer.decode(ids, skip_special_tokens=False)
