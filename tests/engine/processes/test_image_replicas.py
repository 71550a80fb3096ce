"""Images behind several engines: the answers of one, and the second request where the first one's prefix is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos_load import sum_of_metric as metric
from image_files import png_url as png
from oracle import BACKENDS
from quire.core.images import placeholders
from quire.engine.processes.router import Router
from replica_edge import BLOCK
from replica_edge import routed_request as request
from seeing import asked, image_part
from serving_process import Serving
from vision_models import make_vision_model
from vision_prompts import photograph

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "1024", "--num-blocks", "512")


def test_an_image_is_followed_to_the_cache_that_has_its_rows() -> None:
    """By ids alone: those of an image differ from those of any other."""
    router, ready, vocab = Router(4, BLOCK, 1000), [True] * 4, 300
    rows = [placeholders(bytes([i] * 16), 100, vocab) for i in range(4)]
    places = []
    for name, (image, question) in enumerate((i, q) for q in range(3) for i in range(4)):
        places.append(router.place(request(name, [5, *rows[image], *range(6, 26 + question)]), ready))
        router.left(places[-1])
    assert sorted(places[:4]) == [0, 1, 2, 3] and places[4:8] == places[8:] == places[:4]


def bodies(tokens: int) -> list[dict[str, Any]]:
    """Two images, one of them in three questions, the last of which is drawn."""
    first, second = (png(photograph(120, 160, i)) for i in range(2))
    more = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    cold, drawn = {"temperature": 0, **more}, {"temperature": 1.0, "seed": 7, **more}
    return [
        {"messages": asked(image_part(first), "one?"), **cold},
        {"messages": asked(image_part(first), "two?"), **cold},
        {"messages": asked(image_part(second), "one?"), **cold},
        {"messages": asked(image_part(first), "red?"), **drawn},
    ]


def answers(client: httpx.Client, asked: list[dict[str, Any]]) -> tuple[list[list[int]], list[int]]:
    """Ids, and how many tokens of prompts were found, of requests one after the other."""
    replies = [client.post("/v1/chat/completions", json=body) for body in asked]
    assert [reply.status_code for reply in replies] == [200] * len(asked), replies[0].text
    ids = [reply.json()["choices"][0]["token_ids"] for reply in replies]
    usage = [reply.json()["usage"] for reply in replies]
    return ids, [(each["prompt_tokens_details"] or {}).get("cached_tokens", 0) for each in usage]


@native
@pytest.mark.slow
@pytest.mark.parametrize("prefill", [False, True], ids=["replicas", "prefill replicas"])
def test_replicas_answer_as_one_engine(prefill: bool, tmp_path: Path) -> None:
    """Where some compute prompts, others go on with rows of images that they read and never saw."""
    folder, asked = tmp_path / "model", bodies(600 if prefill else 24)
    make_vision_model("qwen2_5_vl", folder)
    said = json.loads((folder / "preprocessor_config.json").read_text())
    said["size"] = {"shortest_edge": 256, "longest_edge": 120 * 160}  # some 70 rows: most of a prompt is an image
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    with Serving(str(folder), *OPTIONS) as server, server.up() as client:
        alone, found = answers(client, asked)
    assert found[1] >= 64 and found[3] >= 64, "rows of the image are found where it comes again"
    words = ["--data-parallel-size", "2"]
    words += ["--prefill-replicas", "1", "--kv-store", str(tmp_path / "kv")] if prefill else []
    with Serving(str(folder), *OPTIONS, *words) as server, server.up() as client:
        several, again = answers(client, asked)
        moved = metric(client, "quire:kv_store_hits")
    assert several == alone and again == found, "each went to the engine that has its prefix"
    assert bool(moved) == prefill
    assert "Traceback" not in "".join(server.log)
