"""Structured output: every answer follows its grammar and is complete within max_tokens, whatever else runs."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import Future
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from engine_answers import engine_of
from oracle import BACKENDS
from quire import LLM
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.local import LocalEngine
from quire.features.structured_output import edge_grammar_compiler
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import GrammarGuide
from quire.text.structured.vocabulary import vocabulary_of
from random_schemas import random_schema
from shaped import PERSON, PYDOC, SHAPES, VOCAB, needed, shaped, shaped_requests, tokenizer
from speculation_methods import METHODS, answers
from structured_requests import END, ready, wander

needs_native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def valid(text: str, shape: StructuredOutputsParams) -> bool:
    """Whether an answer is of its shape, by others' means."""
    if shape.kind in ("json", "json_object"):
        jsonschema.validate(json.loads(text), shape.json if shape.json is not None else {"type": "object"})
        return True
    if shape.kind == "choice":
        return text in (shape.choice or ())
    pattern = shape.regex or "(\\()*[0-9]+[+-][0-9]+(\\))*"
    return re.fullmatch(pattern, text) is not None and text.count("(") == text.count(")")


def wandering(seeds: range) -> None:
    for seed in seeds:
        draw, schema = random.Random(seed), random_schema(seed)
        shape = StructuredOutputsParams(json=schema)
        try:
            grammar, completion = ready(shape)
        except BadRequest:
            continue
        most = len(completion) + draw.choice((0, 1, 2, 3, 8, 30))
        guide = GrammarGuide(grammar, most, (END,), completion)
        said = wander(guide, most, np.random.default_rng(seed))
        assert len(said) <= most
        text = b"".join(map(tokenizer().id_to_bytes, said)).decode()
        jsonschema.validate(json.loads(text), schema)
        again = guide.anew()
        assert again.follow(said, 0) and again.completion == guide.completion, "it is a function of the tokens"


def test_any_model_closes_in_time() -> None:
    wandering(range(40))


@pytest.mark.slow
def test_any_model_closes_in_time_2000() -> None:
    wandering(range(40, 2040))


def test_drafts_leave_no_trace() -> None:
    grammar, completion = ready(StructuredOutputsParams(json=PERSON))
    plain = GrammarGuide(grammar, 60, (END,), completion)
    said = wander(plain, 60, np.random.default_rng(1))
    guide, draw = plain.anew(), random.Random(2)
    for at in range(len(said)):
        drafted = [draw.choice((said[at], 95, 6, 70)), draw.randrange(8, VOCAB)]
        guide.follow(said[:at], 0, drafted)
        assert guide.follow(said[:at], 0)
        twin = plain.anew()
        assert twin.follow(said[:at], 0) and twin.completion == guide.completion
    assert guide.follow(said, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": '{"type":'}, "line 1 column 9"),
    ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
    ({"json": {"not": {}}}, "no value is allowed here"),
    ({"json": {"$ref": "#"}}, "no text of it"),
    ({"json": {"allOf": [{"$id": "http://a/b/", "$ref": "#/$defs/c"}], "$defs": {"c": {}}}}, "$id beside $ref"),
    ({"regex": "(a"}, "unclosed group"),
    ({"grammar": "start: b"}, 'unknown name: "b"'),
    ({"grammar": "start: start"}, "no text of it"),
    ({"choice": []}, "1 to 4096 texts"),
    ({"choice": ["x" * 99] * 1000}, "bytes are more than the 65536"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structures: must be a list"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "triggers"),
    ({}, "give exactly one"),
    ({"regex": "a", "choice": ["a"]}, "not regex and choice"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ({"rejex": "a"}, "rejex"),
    ({"regex": 5}, "regex"),
]


@pytest.mark.parametrize(("shape", "says"), REFUSED, ids=str)
def test_what_is_no_shape_is_refused_with_its_place(shape: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(says)) as caught:
        params = SamplingParams(structured_outputs=shape, max_tokens=50)  # type: ignore[arg-type]
        params.validate(VOCAB)
        shaped(Request(id="", prompt=(5,), params=params, seed=0, arrival=0.0))
    assert (caught.value.param or "").startswith("structured_outputs")


@pytest.mark.parametrize(
    "beside",
    [{"min_tokens": 2}, {"ignore_eos": True}, {"stop": "}"}, {"bad_words": ["a"]}, {"allowed_token_ids": [5]}],
    ids=str,
)
def test_what_cannot_be_had_beside_a_grammar_is_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="whose grammar") as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), **beside).validate(VOCAB)
    assert caught.value.param in beside


def test_max_tokens_that_hold_no_answer_are_refused_with_what_is_needed() -> None:
    shape = StructuredOutputsParams(json=PERSON)
    need = needed(shape)
    params = SamplingParams(structured_outputs=shape, max_tokens=need - 1)
    with pytest.raises(BadRequest, match=f"; {need} are needed") as caught:
        shaped(Request(id="", prompt=(5,), params=params, seed=0, arrival=0.0))
    assert caught.value.param == "max_tokens"


def test_grammars_that_take_for_ever_are_ended_and_the_next_is_read() -> None:
    slow = StructuredOutputsParams(regex="a{1000}{1000}")
    for _ in range(2):  # the second time it is known
        with pytest.raises(BadRequest, match=r"no text of it|more than"):
            READER.read(slow, (END,), vocabulary_of(tokenizer(), VOCAB))
    assert needed(StructuredOutputsParams(regex="a{3}")) <= 3


def test_special_tokens_of_a_structural_tag_are_those_of_the_model() -> None:
    tag = {"structures": [{"begin": "<|user|>", "schema": PERSON, "end": "<|end|>"}], "triggers": ["<|user|>"]}
    grammar, completion = ready(StructuredOutputsParams(structural_tag=tag))
    assert completion == ()
    guide = GrammarGuide(grammar, 40, (0,), completion)
    assert guide.takes(tokenizer().special["<|user|>"])
    text = b"".join(map(tokenizer().id_to_bytes, guide.completion)).decode()
    assert text.endswith("<|end|>") and jsonschema.validate(json.loads(text.removesuffix("<|end|>")), PERSON) is None


# ------------------------------------------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=512)


def ask(llm: LLM, seeds: range, **more: Any) -> int:
    """Answers of random schemas with random room, all at once; how many were refused."""
    prompts, params, schemas = [], [], []
    refused = 0
    for seed in seeds:
        draw, schema = random.Random(seed), random_schema(seed)
        shape = StructuredOutputsParams(json=schema)
        try:
            most = needed(shape) + draw.choice((-1, 0, 1, 2, 5, 20, 60))
            asked = SamplingParams(
                structured_outputs=shape, max_tokens=min(max(most, 1), 400), temperature=1.5, seed=seed, **more
            )
            llm._builder([5], asked, 0, "")
        except BadRequest:
            refused += 1
            continue
        prompts.append(draw.choice(("def f(x):", "Return the list of", "A")))
        params.append(asked)
        schemas.append(schema)
    for found, schema, asked in zip(llm.generate(prompts, params, use_tqdm=False), schemas, params, strict=True):
        for output in found.outputs:
            assert asked.max_tokens is not None and len(output.token_ids) <= asked.max_tokens
            jsonschema.validate(json.loads(output.text), schema)
    return refused


@needs_native
def test_random_schemas_at_high_temperature(llm: LLM) -> None:
    assert ask(llm, range(3000, 3024), n=2) < 12


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_2000_random_schemas_at_high_temperature(llm: LLM) -> None:
    assert sum(ask(llm, range(at, at + 100)) for at in range(10_000, 12_000, 100)) < 800


@needs_native
@pytest.mark.parametrize("kind", range(len(SHAPES)))
def test_every_kind_gives_what_it_says(llm: LLM, kind: int) -> None:
    shape = StructuredOutputsParams(**SHAPES[kind])
    params = [SamplingParams(structured_outputs=shape, max_tokens=m, temperature=1.2, seed=m) for m in (16, 40)]
    for asked, found in zip(params, llm.generate(["The answer is "] * 2, params, use_tqdm=False), strict=True):
        output = found.outputs[0]
        assert valid(output.text, shape), output.text
        assert output.finish_reason == "stop" or len(output.token_ids) == asked.max_tokens


@needs_native
def test_a_stop_token_ends_an_answer_only_where_it_is_complete(llm: LLM) -> None:
    stops = [tokenizer().encode(text, add_special_tokens=False)[0] for text in ("}", '"', "a", "{")]
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[a-c]{3}"), stop_token_ids=tuple(stops[2:3]), max_tokens=9
    )
    for found in llm.generate(["x"] * 3, params, use_tqdm=False):
        assert re.fullmatch("[a-c]{3}", found.outputs[0].text)


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"block_size": 4, "num_blocks": 32, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    requests = shaped_requests(10)
    found = answers(engine_of(), requests)
    for request in requests:
        for answer in found[request.id]:
            assert len(answer.tokens) <= (request.params.max_tokens or 0)
    return found


def same(golden: dict[str, Any], engine: LocalEngine, requests: list[Request]) -> None:
    found = answers(engine, requests)
    for request in requests:
        for want, got in zip(golden[request.id], found[request.id], strict=True):
            assert got.bits() == want.bits() and got.reason == want.reason, request.id


@needs_native
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_answers_whatever_runs_beside(
    golden: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(self: edge_grammar_compiler.GrammarCompiler, seq: Any) -> Any:
        future = Future[Any]()
        future.set_result(self._make(seq))
        return future

    if name == "preempted":  # too few run beside each other where they wait for the thread that makes guides
        monkeypatch.setattr(edge_grammar_compiler.GrammarCompiler, "begin", at_once)
    engine = engine_of(**OPTIONS[name])
    same(golden, engine, shaped_requests(10))
    assert name != "preempted" or engine.engine.scheduler.preemptions > 0


@needs_native
@pytest.mark.parametrize("method", ["ngram", "suffix_tree", "self_int4", "draft_model", "draft_model_tree"])
def test_the_same_answers_with_drafts(golden: dict[str, Any], method: str) -> None:
    asked = METHODS[method] | {"adaptive": False}
    if asked["method"] == "draft_model":
        asked["model"] = str(PYDOC)
    engine = engine_of(speculative_config=json.dumps(asked))
    same(golden, engine, shaped_requests(10))
    assert engine.engine.speculator is not None and engine.engine.speculator.totals.accepted > 0


@needs_native
def test_another_engine_goes_on_behind_what_it_is_told(golden: dict[str, Any]) -> None:
    draw, asked = random.Random(4), []
    for request in shaped_requests(10):
        rows = [answer.tokens for answer in golden[request.id]]
        cuts = [draw.randrange(len(row)) for row in rows]
        asked.append(replace(request, emitted=tuple(tuple(row[:cut]) for row, cut in zip(rows, cuts, strict=True))))
    found = answers(engine_of(), asked)
    for request in asked:
        for told, want, got in zip(request.emitted, golden[request.id], found[request.id], strict=True):
            assert [*(told or ()), *got.tokens] == want.tokens and got.reason == want.reason


@needs_native
def test_a_grammar_that_is_not_ready_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may = engine_of(), threading.Event()
    make = edge_grammar_compiler.GrammarCompiler._make

    def late(self: edge_grammar_compiler.GrammarCompiler, seq: Any) -> Any:
        assert may.wait(20.0)
        return make(self, seq)

    monkeypatch.setattr(edge_grammar_compiler.GrammarCompiler, "_make", late)
    request = shaped_requests(1)[0]
    engine.submit(request)
    other = Request(id="o", prompt=(5, 6), params=SamplingParams(max_tokens=3), seed=1, arrival=0.0)
    engine.submit(other)
    seen = []
    for _ in range(50):
        report = engine.poll(0)
        seen += [out.request_id for out in (report.outputs if report else ()) if out.finish_reason]
        if seen:
            break
    assert seen == ["o"] and engine.engine.has_work
    may.set()
    while engine.engine.has_work:
        report = engine.poll(0)
        seen += [out.request_id for out in (report.outputs if report else ()) if out.finish_reason]
    assert set(seen) == {"o", request.id}


@needs_native
def test_an_abort_ends_what_waits_for_its_grammar() -> None:
    engine = engine_of()
    request = shaped_requests(1)[0]
    engine.submit(request)
    engine.abort(request.id)
    assert not engine.engine.has_work
    engine.engine.check()


@needs_native
def test_a_text_that_could_outgrow_the_cache_is_refused() -> None:
    engine = engine_of(block_size=4, num_blocks=16)
    for most, refused in ((60, False), (90, True)):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON), max_tokens=most)
        engine.submit(shaped(Request(id=str(most), prompt=(5, 6), params=params, seed=1, arrival=0.0)))
        report = engine.poll(0)
        errors = [out.error for out in (report.outputs if report else ()) if out.error]
        assert bool(errors) == refused and all("max_tokens" in str(error) for error in errors)
