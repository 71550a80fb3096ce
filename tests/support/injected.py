"""Errors raised within one request's part of a step: where they can be, engines to raise them in, and who runs beside.

A `Site` is a function through which the work of a request goes. Its calls for the victim are told from those for others
by what the victim alone has: its id, its `max_tokens`, its seed, its penalty, its image.
"""

from __future__ import annotations

import itertools
import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lora_adapters import TARGETS, write_adapter
from made_up_tower import SIGHTS, Shown, image_request, sighted, write_text
from oracle import write
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.engine.requests import with_grammar
from quire.model.pooled_head import HeadLayer
from quire.speculate.suffix import SuffixDecoding
from quire.text.tokenizer import Tokenizer
from tiny_model import OPTIONS, write_tiny

MOST, SEED, PENALTY, SCORES = 23, 987_654_321, 1.375, 7
"""What the victim alone asks for: tokens, seed, repetition penalty, log-probabilities."""
VOCAB, FIRST = 260, 100
"""Of the tiny model; the number of the first image that a victim shows."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,8}( [a-z]{2,8}){2}\\."},
    {"choice": ["yes", "no", "it depends"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
)


class PanicException(BaseException):
    """What libraries in Rust raise when they give up; no `Exception`, and told by its name."""


ERRORS: tuple[type[BaseException], ...] = (
    ValueError, RuntimeError, MemoryError, KeyError, OverflowError, PanicException, AssertionError, OSError,
    RecursionError, UnicodeDecodeError,
)  # fmt: skip


def raised(kind: type[BaseException]) -> BaseException:
    """An error of that kind."""
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "made") if kind is UnicodeDecodeError else kind("made")


def request_of(name: str, prompt: list[int], **asked: Any) -> Request:
    """A request of token ids; fields that are not of `SamplingParams` are its own."""
    own = {field: asked.pop(field) for field in ("pooling", "adapter", "bad_words_ids", "images") if field in asked}
    seed = asked.pop("seed", sum(map(ord, name)))
    params = SamplingParams(**({"max_tokens": 8, "ignore_eos": "structured_outputs" not in asked} | asked))
    return Request(id=name, prompt=tuple(prompt), params=params, seed=seed, arrival=0.0, eos_token_ids=(3,), **own)


def others(kind: str) -> list[Request]:
    """Sixteen that run beside the victim, of all sorts that the engine `kind` takes."""
    made = []
    for i in range(16):
        asked: dict[str, Any] = {"temperature": i % 3 / 2, "max_tokens": 4 + i % 5, "logprobs": 2}
        if i % 4 == 1:
            asked |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        if kind == "plain" and i in (6, 10):
            asked = {"max_tokens": 1, "pooling": ("mean", "last")[i // 10]}
        if kind in ("plain", "ngram") and i % 8 in (3, 7):
            asked |= {"structured_outputs": SHAPES[i % 3], "max_tokens": 24 + i}
        if kind == "classes":
            asked = {"max_tokens": 1, "pooling": ("mean", "last")[i % 2]}
        if kind == "lora":
            asked["adapter"] = ("", "one")[i % 2]
        prompt = [4 + (i * 7 + j * j) % 90 for j in range(1 + i * 2)]
        if kind == "images" and i % 2:
            shown = image_request("", [prompt[:3], Shown(i, 2, 3), prompt[3:]])
            prompt, asked = list(shown.prompt), asked | {"images": shown.images}
        made.append(request_of(f"other{i}", prompt, **asked))
    return made


STEM = [4 + i % 7 for i in range(30)]
VICTIMS: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"regex": "[a-z]{4,60}"}, "max_tokens": MOST, "temperature": 1.5},
    "searched": {
        "structured_outputs": {"regex": "((ab|cde|fgh)(xy|z|w)){2,9}"},
        "max_tokens": MOST,
        "temperature": 1.5,
    },
    "siblings": {"structured_outputs": {"regex": "[a-z]{4,60}"}, "max_tokens": MOST, "n": 2},
    "edits": {"repetition_penalty": PENALTY, "bad_words_ids": ((9, 9), (11,)), "min_tokens": 4, "logprobs": SCORES},
    "scores": {"prompt_logprobs": SCORES, "logprobs": SCORES},
    "pooled": {"pooling": "mean", "max_tokens": 1},
    "adapter": {"adapter": "two"},
    "lookup": {"max_tokens": MOST, "temperature": 0.0},
    "image": {},
}


_FRESH = itertools.count(FIRST)


def victim(sort: str) -> Request:
    """The request that something happens to."""
    asked = {"seed": SEED} | VICTIMS[sort]
    if sort != "image":
        return request_of("victim", STEM, **asked)
    shown = image_request("", [STEM[:5], Shown(next(_FRESH), 2, 4), STEM[:9]])  # what was encoded before is kept
    return request_of("victim", list(shown.prompt), images=shown.images, **asked)


@dataclass
class Running:
    """An engine and what it needs to be given requests."""

    engine: LocalEngine
    folder: Path

    def forget(self) -> None:
        """Forget what earlier outputs were, of which the next drafts would be made."""
        speculator = self.engine.engine.speculator
        if speculator is not None and isinstance(speculator.proposer, SuffixDecoding):
            speculator.proposer.outputs = SuffixDecoding(speculator.proposer._asked).outputs

    def ready(self, request: Request) -> Request:
        """`request` with its grammar."""
        if request.params.structured_outputs is None:
            return request
        return with_grammar(VOCAB, Tokenizer.from_folder(self.folder), request)


@contextmanager
def running(kind: str, home: Path) -> Iterator[Running]:
    """An engine of one `kind`."""
    folder, sizes = home / kind, {"num_blocks": 512, "block_size": 4, "max_num_seqs": 32}
    if kind == "images":
        write_text(folder, "sections")
        with sighted(folder, SIGHTS["sections"][2], **sizes) as (engine, _):
            yield Running(engine, folder)
        return
    more: dict[str, Any] = {"model": str(folder)} | OPTIONS | sizes
    if kind == "lora":
        model = write(folder, "llama", vocab_size=99)
        paths = [write_adapter(home / name, model, TARGETS["llama"], i) for i, name in enumerate(("one", "two"))]
        modules = tuple(f"{path.name}={path}" for path in paths)
        more |= {"load_format": "auto", "enable_lora": True, "lora_modules": modules, "max_loras": 2}
    else:
        write_tiny(folder)
    if kind in ("ngram", "suffix"):
        more["speculative_config"] = json.dumps({"method": kind, "num_speculative_tokens": 4, "adaptive": False})
    engine = LocalEngine(flat_config(**more))
    if kind == "classes":
        head = (HeadLayer(np.ones((3, 32), np.float32)),)
        engine.engine.executor.model = replace(engine.engine.model, classifier=head)
    yield Running(engine, folder)
    engine.close()


class Site(NamedTuple):
    """`owner.name`, of an engine of a `kind` that has a victim of a `sort`; its error names the `part`.

    `mine`: whether a call with these arguments is for the victim. `owner`: dotted, or "ops" or "vision" of the engine.
    """

    kind: str
    sort: str
    owner: str
    name: str
    mine: Callable[..., bool]
    part: str


def _most(guide: Any, *_: Any, **__: Any) -> bool:
    return bool(guide._most == MOST)


def _own(holder: Any, *_: Any, **__: Any) -> bool:
    return bool(holder.seq.request.id == "victim")


def _first(seq: Any, *_: Any, **__: Any) -> bool:
    return bool(seq.request.id == "victim")


def _second(_: Any, seq: Any, *__: Any, **___: Any) -> bool:
    return bool(seq.request.id == "victim")


def _request(_: Any, request: Any, *__: Any, **___: Any) -> bool:
    return bool(request.id == "victim")


def _stem(own: Any, *_: Any) -> bool:
    return bool(own._row.tokens[: len(STEM)] == STEM)


GUIDE, GROWTH, SAMPLER = "quire.text.structured.guide.GrammarGuide", "quire.sched.growth", "quire.sample.sampler"
HISTORY, SUFFIX = "quire.sample.logit_edits.LogitEdits", "quire.speculate.suffix"
STRUCTURED = "quire.features.structured_output"
FEATURES = "quire.features.images.run_image_features.ImageFeatures"
BUILDER = "quire.run.builder.BatchBuilder"
SITES: tuple[Site, ...] = (
    *(Site("plain", "grammar", GUIDE, name, _most, "grammar")
      for name in ("__init__", "follow", "takes", "mask", "complete", "_take", "_set", "_over")
      if name not in ("__init__", "_set")),
    Site("plain", "grammar", GUIDE, "__init__", lambda guide, grammar, most, *_: most == MOST, "grammar"),
    Site("plain", "grammar", f"{STRUCTURED}.edge_grammar_compiler.GrammarCompiler", "_make", _second, "grammar"),
    Site("plain", "grammar", f"{STRUCTURED}.edge_grammar_compiler.GrammarCompiler", "_grammar",
         lambda self, text, *_: "4,60" in text, "grammar"),
    Site("plain", "grammar", f"{STRUCTURED}.run_grammar_masks", "_stand",
         lambda guide, row: row.seq.request.id == "victim", "grammar"),
    *(Site("plain", "searched", GUIDE, name, _most, "grammar")
      for name in ("_behind", "_tail", "_searched", "_catch_up", "_proven")),
    Site("plain", "siblings", GUIDE, "anew", _most, "grammar"),
    Site("plain", "siblings", GROWTH, "_complete", _first, "grammar"),
    *(Site("plain", "edits", HISTORY, name, _own, "sampling") for name in ("edits", "_seen", "_bans", "_count")),
    Site("plain", "edits", HISTORY, "__init__", _second, "sampling"),
    Site("plain", "edits", "quire.core.request.Request", "edits_logits",
         lambda request, *_: request.id == "victim", "sampling"),
    Site("plain", "edits", SAMPLER, "PACK_DRAW", lambda *args: args[4] == SEED, "sampling"),
    Site("plain", "edits", "ops", "penalize",
         lambda logits, edits: any(edit.repetition == PENALTY for edit in edits), "sampling"),
    Site("plain", "edits", SAMPLER, "LogprobQuery", lambda *args: args[3] == SCORES, "sampling"),
    *(Site("plain", sort, SAMPLER, "_scored", lambda query, *_: query.k == SCORES, "logprobs")
      for sort in ("edits", "scores")),
    Site("plain", "scores", SAMPLER, "LogprobQuery", lambda *args: args[3] == SCORES, "sampling"),
    *(Site("plain", "pooled", module, name, lambda chunk, *_: chunk.seq.request.id == "victim", "pooling")
      for module, name in (("quire.features.pooling.run_pooling", "gather"), (GROWTH, "finish"))),
    *(Site("plain", sort, "quire.engine.engine", "check_kind", _request, "admission") for sort in ("edits", "pooled")),
    Site("plain", "grammar", "quire.sched.admission.BatchAdmission", "check", _second, "admission"),
    Site("plain", "grammar", "quire.sched.scheduler.Scheduler", "add", _request, "admission"),
    Site("classes", "pooled", "quire.features.pooling.edge_pooled_requests", "_classes",
         lambda matrix, output: output.request_id == "victim", "pooling"),
    Site("lora", "adapter", "quire.model.load.adapters.Adapters", "slot", lambda _, name: name == "two", "adapter"),
    Site("images", "image", "vision", "__call__", lambda image: image.pixels[0] >= FIRST, "images"),
    Site("images", "image", FEATURES, "_made", lambda _, image: image.pixels[0] >= FIRST, "images"),
    Site("images", "image", FEATURES, "_pieces", lambda _, seen: seen.seq.request.id == "victim", "images"),
    Site("images", "image", BUILDER, "_fill_images",
         lambda _, seen: seen.seq.request.id == "victim", "images"),
    Site("images", "image", "quire.engine.engine", "check_images",
         lambda model, encoding, request: request.id == "victim", "admission"),
    *(Site("ngram", "grammar", GUIDE, name, _most, "grammar") for name in ("follow", "may", "forced", "takes", "mask")),
    Site("ngram", "lookup", "quire.speculate.ngram.OwnNGrams", "__init__", _second, "drafting"),
    *(Site(kind, "lookup", "quire.speculate.ngram.OwnNGrams", "matches", _stem, "drafting")
      for kind in ("ngram", "suffix")),
    *(Site("suffix", "lookup", f"{SUFFIX}.RecentOutputs", name, _second, "drafting") for name in ("matches", "follow")),
)  # fmt: skip


class Injection:
    """Wraps a site: counts the victim's calls, and raises from the call `at` on (0: never)."""

    def __init__(self, site: Site, error: BaseException | None = None, at: int = 0) -> None:
        self.site, self.error, self.at, self.calls = site, error, at, 0

    def install(self, patched: pytest.MonkeyPatch, run: Running) -> None:
        """Put it in place for as long as `patched` lasts."""
        site = self.site
        if site.owner == "ops":
            patched.setattr(run.engine.engine.ops, site.name, self._around(getattr(run.engine.engine.ops, site.name)))
        elif site.owner == "vision":
            features = run.engine.engine.runner.features
            assert features is not None
            seen = features._vision
            wrapped = self._around(seen.__call__)
            patched.setattr(features, "_vision", _Called(seen, wrapped))
        else:
            owner = pkgutil.resolve_name(site.owner)
            patched.setattr(owner, site.name, self._around(getattr(owner, site.name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            if self.site.mine(*args, **named):
                self.calls += 1
                if self.error is not None and self.calls >= self.at:
                    raise self.error
            return call(*args, **named)

        return wrapped


class _Called:
    """A tower whose calls go through `call`."""

    def __init__(self, tower: Any, call: Callable[..., Any]) -> None:
        self._tower, self._call, self.width = tower, call, tower.width

    def __call__(self, image: Any) -> Any:
        return self._call(image)
