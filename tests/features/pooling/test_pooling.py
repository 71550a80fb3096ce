"""Vectors of prompts: transformers' hidden rows, the same bits in any company, and folders that only make vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForSequenceClassification, Qwen3Model

import quire
from oracle import edit_config, logits, random_model, write
from quire.core.errors import BadRequest, ModelError
from quire.core.plan import Chunk
from quire.core.pooling import PoolingKind
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.features.pooling.edge_embedding import PoolingParams, embedding, pooled_request, vector_of
from quire.features.pooling.plan_pooling import rows_wanted
from quire.features.pooling.run_pooling import gather
from quire.text.tokenizer import Tokenizer
from tiny_model import write_tiny

PROMPTS = [[5, 9, 2, 7, 1, 3], [8], [4, 4, 6, 1, 2, 3, 9, 9, 2, 5, 7, 3, 1, 8, 6, 2, 4, 5, 1, 1, 3, 2, 2]]


def said(folder: Path, pooling: dict[str, Any] | None, normalize: bool) -> None:
    """Write sentence-transformers' files."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def hidden(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' rows after the last norm [T, hidden]."""
    with torch.no_grad():
        rows: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return rows


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of the stack alone, without a head, and transformers' model of it."""
    whole = random_model("qwen3")
    folder = tmp_path_factory.mktemp("stack")
    model = Qwen3Model(whole.config)
    model.load_state_dict(whole.model.state_dict())
    model.eval().save_pretrained(folder)
    return folder, model


def llm_of(folder: Path | str, **options: Any) -> quire.LLM:
    """On the host, small."""
    return quire.LLM(folder, device="cpu", num_blocks=64, block_size=4, **{"dtype": "float32"} | options)


@pytest.mark.parametrize(
    ("said_to_be", "normalize", "want"),
    [
        (None, True, lambda h: h[-1]),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, False, lambda h: h[-1]),
        ({"pooling_mode_mean_tokens": True}, True, lambda h: h.mean(0)),
        ({"pooling_mode": "cls"}, False, lambda h: h[0]),
    ],
    ids=["default", "last", "mean", "cls"],
)
def test_vectors_are_transformers_hidden_rows(
    stack: tuple[Path, Any], tmp_path: Path, said_to_be: dict[str, Any] | None, normalize: bool, want: Any
) -> None:
    model = stack[1]
    model.save_pretrained(tmp_path)
    if said_to_be is not None:
        said(tmp_path, said_to_be, normalize)
    with llm_of(tmp_path) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        again = llm.encode(PROMPTS, use_tqdm=False)
    for prompt, one, other in zip(PROMPTS, found, again, strict=True):
        row = want(hidden(model, prompt))
        row = row / row.norm() if normalize else row
        assert np.abs(np.array(one.outputs.embedding) - row.numpy()).max() < 1e-5 * float(row.abs().max()) + 1e-6
        assert other.outputs.data.tolist() == one.outputs.embedding  # a prefix that is found changes no bit
        assert one.prompt_token_ids == prompt


def test_a_stack_without_a_head_writes_nothing(stack: tuple[Path, Any]) -> None:
    with llm_of(stack[0]) as llm:
        assert not llm.info.pooling.generates
        with pytest.raises(BadRequest, match="makes vectors"):
            llm.generate([[1, 2, 3]], quire.SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
        assert len(llm.embed([[1, 2, 3]], use_tqdm=False)) == 1


@pytest.mark.parametrize("kind", ["mean", "lasttoken"])
def test_company_chunks_and_preemption_change_no_bit(stack: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    stack[1].save_pretrained(tmp_path)
    said(tmp_path, {"pooling_mode": kind}, True)
    prompts = [[(7 * i + 3 * j) % 90 for j in range(2 + 9 * i % 31)] for i in range(12)]
    with llm_of(tmp_path) as llm:
        alone = [llm.embed([p], use_tqdm=False)[0].outputs.embedding for p in prompts]
    with llm_of(tmp_path, max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False) as llm:
        assert [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)] == alone


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_rows_that_come_again_count_once(kind: PoolingKind) -> None:
    """As after a preemption: chunks begin again at 0, with other ends."""
    rows = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    want = {"mean": rows.astype(np.float64).mean(0).astype(np.float32), "cls": rows[0], "last": rows[-1]}[kind]
    params = quire.SamplingParams(max_tokens=1)
    request = Request(id="a", prompt=tuple(range(12)), params=params, seed=0, arrival=0.0, pooling=kind)
    seq, found = Sequence(request), b""
    for start, end in ((0, 5), (5, 9), (0, 7), (7, 8), (8, 12)):
        seq.computed = start
        count = rows_wanted(seq, end - start) or 1
        assert not found
        found = gather(Chunk(seq, start, end - start, count), rows[end - count : end])
    assert np.allclose(np.frombuffer(found, np.float32), want, rtol=1e-6)


def test_texts_are_the_same_beside_vectors(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    asked = quire.SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=2, detokenize=False)
    with llm_of(tmp_path, max_num_batched_tokens=9, max_num_seqs=8) as llm:
        vectors = [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
        texts = [llm.generate([p], asked, use_tqdm=False)[0].outputs[0] for p in PROMPTS]
        builders = llm._builders(PROMPTS, asked)
        requests = [pooled_request(llm.info, p) for p in PROMPTS]
        pooled = {r.id: i for i, r in enumerate(requests)}
        live = {b.request.id: b for b in builders}
        for one, other in zip(builders, requests, strict=True):
            llm.engine.submit(one.request)
            llm.engine.submit(other)
        seen = dict[int, list[float]]()
        while llm.engine.engine.has_work:
            report = llm.engine.poll(0)
            for output in report.outputs if report else ():
                if output.request_id in live:
                    live[output.request_id].push(output)
                else:
                    seen[pooled[output.request_id]] = embedding(
                        llm.info.pooling, vector_of(output), PoolingParams()
                    ).tolist()
        mixed = [b.result().outputs[0] for b in builders]
    assert [seen[i] for i in range(len(PROMPTS))] == vectors
    assert [(m.token_ids, m.cumulative_logprob) for m in mixed] == [(t.token_ids, t.cumulative_logprob) for t in texts]


def test_classes_are_transformers_and_score_pairs(tmp_path: Path) -> None:
    whole = random_model("qwen2")
    config = whole.config
    config.num_labels, config.pad_token_id = 1, 0
    model = Qwen2ForSequenceClassification(config).eval()
    model.model.load_state_dict(whole.model.state_dict())
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = [float(torch.sigmoid(model(torch.tensor([p])).logits[0, 0])) for p in PROMPTS]
        pair = float(torch.sigmoid(model(torch.tensor([PROMPTS[0] + PROMPTS[2]])).logits[0, 0]))
    with llm_of(tmp_path) as llm:
        found = [float(each.outputs.data[0]) for each in llm.encode(PROMPTS, use_tqdm=False)]
        assert found == pytest.approx(want, rel=1e-5)
        assert llm.score([PROMPTS[0]], [PROMPTS[2]], use_tqdm=False)[0].outputs.score == pytest.approx(pair, rel=1e-5)
        with pytest.raises(BadRequest, match="classifies"):
            llm.embed(PROMPTS)


def test_a_reranker_by_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    names = Tokenizer.from_folder(tmp_path)
    model = write(tmp_path, "llama", vocab_size=names.vocab_size)
    edit_config(tmp_path, classifier_from_token=["n", "y"])
    no, yes = (names.encode(text, add_special_tokens=False)[0] for text in "ny")
    rows = [logits(model, prompt)[-1] for prompt in PROMPTS]
    want = [float(torch.sigmoid(row[yes] - row[no])) for row in rows]
    with llm_of(tmp_path) as llm:
        assert llm.info.pooling.generates
        assert [float(e.outputs.data[0]) for e in llm.encode(PROMPTS, use_tqdm=False)] == pytest.approx(want, rel=1e-5)


def test_vectors_are_cut_and_scored(stack: tuple[Path, Any]) -> None:
    with llm_of(stack[0]) as llm:
        whole, cut = (llm.embed([PROMPTS[0]], PoolingParams(dimensions=n), use_tqdm=False)[0].outputs.embedding
                      for n in (None, 8))  # fmt: skip
        head = np.array(whole[:8])
        assert len(cut) == 8
        assert np.allclose(head / np.linalg.norm(head), cut, atol=1e-6)
        one, other = (np.array(e.outputs.embedding) for e in llm.embed([PROMPTS[0], PROMPTS[2]], use_tqdm=False))
        score = llm.score([PROMPTS[0]], [PROMPTS[2], PROMPTS[0]], use_tqdm=False)
        assert [each.outputs.score for each in score] == pytest.approx([float(one @ other), 1.0], abs=1e-6)
        for wrong in (0, 10_000, True):
            with pytest.raises(BadRequest, match="dimensions"):
                llm.embed([PROMPTS[0]], PoolingParams(dimensions=wrong))
        longest = [1] * llm.info.max_model_len
        assert len(llm.embed([longest], use_tqdm=False)) == 1
        with pytest.raises(BadRequest, match="reads"):
            llm.embed([[*longest, 1]])


def test_what_cannot_be_is_refused_with_the_reason(stack: tuple[Path, Any], tmp_path: Path) -> None:
    stack[1].save_pretrained(tmp_path)
    said(tmp_path, {"pooling_mode_max_tokens": True}, False)
    with pytest.raises(ModelError, match="max_tokens"):
        llm_of(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match="finish the download"):
        llm_of(tmp_path)
    (tmp_path / "modules.json").unlink()
    with quire.LLM(device="cpu", num_blocks=16, enable_lora=True) as llm, pytest.raises(BadRequest, match="lora"):
        llm.embed([[1, 2, 3]])


def test_drafts_change_no_vector() -> None:
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}
    with quire.LLM(device="cpu", num_blocks=16) as plain, quire.LLM(device="cpu", num_blocks=16, **drafts) as llm:
        got, want = (each.embed([[1, 2, 3]])[0].outputs.embedding for each in (llm, plain))
    assert got == want
