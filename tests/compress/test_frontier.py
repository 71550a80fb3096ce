"""The frontier: which models are on it, and drawings that need nothing else."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from quire.compress.evaluation.frontier import page, panels_of, pareto, ticks, write_frontier
from quire.compress.evaluation.passport import Evaluation, Passport, Quality, Rates, Speed
from quire.core.errors import ConfigError

EVALUATION = Evaluation(
    texts=2, tokens=1000, kl_tokens=1000, bytes=4000, window=512, digest="t", format="bfloat16, quantization none"
)


def passport(kl: float, megabytes: float, ratio: float | None = None) -> Passport:
    rates = Rates(batch_1=10.0, batch_16=100.0, prefill=500.0)
    speed = Speed(
        format="a", source_format="b", rounds=3, tokens_per_second=rates, source_tokens_per_second=rates,
        ratio=Rates(batch_1=ratio or 1.0, batch_16=1.0, prefill=1.0), weight_bytes=1, source_weight_bytes=1,
    )  # fmt: skip
    return Passport(
        model="m", source="big & <bold>", perplexity=9.0, bits_per_byte=1.1, kl=kl, top1=0.9,
        size_bytes=int(megabytes * 1e6), of_source=Quality(perplexity=8.0, bits_per_byte=1.0, size_bytes=100_000_000),
        speed=(speed,) if ratio else (), evaluation=EVALUATION, digests={"source": "s"}, machine={},
        date="2026-01-01", version="1",
    )  # fmt: skip


MODELS = {
    "int8": passport(0.001, 50, 1.6),
    "gptq <4>": passport(0.02, 28, 2.2),
    "rtn 4": passport(0.05, 28, 2.2),
    "$slow$": passport(0.03, 60, 0.8),
}


def test_the_front_is_what_nothing_beats() -> None:
    draw = random.Random(0)
    for count in (0, 1, 2, 5, 40):
        for _ in range(30):
            points = [(float(draw.randint(0, 9)), float(draw.randint(0, 9))) for _ in range(count)]
            beaten = [any(x <= a and y <= b and (x, y) != (a, b) for x, y in points) for a, b in points]
            assert pareto(points) == [not b for b in beaten]


def test_what_is_drawn() -> None:
    size, speed = panels_of(MODELS)
    assert {p.name for p in size.points if p.front} == {"source", "int8", "gptq <4>"}
    assert {p.name for p in speed.points if p.front} == {"source", "int8", "gptq <4>"}
    assert [p.x for p in size.points] == [100.0, 50.0, 28.0, 28.0, 60.0] and speed.points[-1].x == 0.8
    untimed = MODELS | {"x": passport(0.1, 20)}
    assert len(panels_of(untimed)) == 1


def test_ticks_are_round_and_reach_the_top() -> None:
    for top in (1e-6, 0.0301, 0.5, 1.0, 7.9, 8.1, 28, 100, 99999.0):
        found = ticks(top)
        assert found[0] == 0 and found[-2] < top <= found[-1] * (1 + 1e-9) and 4 <= len(found) - 1 <= 8
    assert ticks(0.0) == [0.0, 1.0]


class Tags(HTMLParser):
    """Names of the tags of a page, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_frontier(tmp_path / "f.html", MODELS)
    text = (tmp_path / "f.html").read_text()
    assert text == page(panels_of(MODELS), MODELS)
    tags = Tags(text)
    assert not {"script", "img", "link", "iframe", "bold"} & set(tags.names), "names are text"
    assert not {"src", "href", "onclick"} & tags.attributes and "http://" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        kinds = [circle.get("class") for circle in root.iter("circle")]
        assert kinds == ["on", "on", "on", "off", "off"]
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx", -1)) <= 680 and 0 <= float(circle.get("cy", -1)) <= 420
        labels = [t for t in root.iter("text") if t.text in {"source", *MODELS}]
        assert [t.text for t in labels] == ["source", *MODELS]
        spots = [(float(t.get("x", 0)), float(t.get("y", 0))) for t in labels]
        assert len({(round(x), round(y)) for x, y in spots}) == 5, "names of equal points are apart"
        assert all(y > 0 for _, y in spots)
    assert "<td>gptq &lt;4&gt;</td><td>0.02000</td><td>90.00 %</td><td>1.1000</td><td>28.0</td><td>2.20</td>" in text
    assert text.count('<tr class="on">') == 3


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    write_frontier(tmp_path / "f.png", MODELS)
    pixels = imread(tmp_path / "f.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1500 and pixels.std() > 0.05


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no passport to draw"):
        write_frontier(tmp_path / "f.html", {})
    with pytest.raises(ConfigError, match=r"f.svg: a frontier is drawn as .html or .png"):
        write_frontier(tmp_path / "f.svg", MODELS)
    with pytest.raises(ConfigError, match="No such file"):
        write_frontier(tmp_path / "none" / "f.html", MODELS)
    other = msgspec.structs.replace(MODELS["int8"], digests={"source": "other"})
    with pytest.raises(ConfigError, match="b was measured with another source than a; measure both with one"):
        panels_of({"a": MODELS["int8"], "b": other})
    other = msgspec.structs.replace(MODELS["int8"], evaluation=msgspec.structs.replace(EVALUATION, digest="u"))
    with pytest.raises(ConfigError, match="b was measured with another text than a"):
        panels_of({"a": MODELS["int8"], "b": other})
    assert not list(tmp_path.iterdir())
