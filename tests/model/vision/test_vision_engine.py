"""Each family of models that take images, end to end: from images to tokens, beside transformers and any load."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from engine_answers import Answer, run
from oracle import BACKENDS
from peft_layouts import Layout
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.images import PromptImage
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.components.memory_plan import image_bytes
from quire.engine.local import LocalEngine
from quire.engine.processes.channel import LocalChannel
from quire.engine.processes.process import ProcessEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from quire.engine.requests import with_grammar
from quire.plan.predict import Machine, Planner
from turns import turns
from vision_models import FAMILIES, LIKE_GEMMA4, SPECIAL, VOCABULARY
from vision_oracle import QWEN, normalized, patches, placed, shaped
from vision_prompts import Made, write_made

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
OFTEN = ("qwen3_vl", "gemma3", "qwen3_5", "gemma4", "gemma4_moe")
"""What every run tries: those that change most in the decoder; the slow one tries all."""
RECURRENT = ("qwen3_5", "qwen3_5_moe")
"""Those whose decoder has states, beside which drafts do not branch and the model itself does not draft."""
MADE = [pytest.param(f, marks=[] if f in OFTEN else [pytest.mark.slow]) for f in FAMILIES]


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return write_made(request.param, tmp_path_factory.mktemp(request.param))


def engine_of(folder: Path, **options: Any) -> LocalEngine:
    config = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 512, "block_size": 4}
    return LocalEngine(flat_config(**(config | options)))


@torch.no_grad()
def oracle_logits(made: Made, request: Request, output: list[int]) -> Tensor:
    """transformers' logits [tokens, vocab] for prompt and output, with the pixels that its processor would give."""
    ids = [made.image_prompts.row_id if token >= VOCABULARY else token for token in request.prompt] + output
    rows = torch.tensor(ids)[None] == made.image_prompts.row_id
    more = inputs_of(made.family, request.images) if request.images else {}
    if made.family == "gemma3":
        more["token_type_ids"] = rows.long()
    elif made.family in (*QWEN, *LIKE_GEMMA4) and more:
        more["mm_token_type_ids"] = rows.int()
    assert made.oracle is not None
    if made.family == "gemma4_unified" and more:  # its generate() has masks that its forward() alone does not make
        places, embedded = torch.arange(len(ids))[None], torch.zeros(1, len(ids), 1)
        masks = made.oracle.create_masks_for_generate(made.oracle.config, embedded, None, None, places, rows.int())
        more["attention_mask"] = masks
    return made.oracle(input_ids=torch.tensor(ids)[None], use_cache=False, **more).logits[0]


def inputs_of(family: str, images: tuple[PromptImage, ...]) -> dict[str, Tensor]:
    """What transformers' model takes of images."""
    pixels = [normalized(family, image) for image in images]
    if family in QWEN:
        cut, grids = zip(*map(patches, pixels), strict=True)
        return {"pixel_values": torch.cat(cut), "image_grid_thw": torch.cat(grids)}
    if family in ("llava_next", "llava_onevision"):
        most = max(map(len, pixels))
        filled = [torch.cat((tiles, tiles.new_zeros(most - len(tiles), *tiles.shape[1:]))) for tiles in pixels]
        more = {"batch_num_images": torch.tensor([len(images)])} if family == "llava_onevision" else {}
        return {"pixel_values": torch.stack(filled), "image_sizes": torch.tensor([p.size for p in images])} | more
    if family in ("mistral3", "llava_pixtral"):
        sizes = [image.shape[1:] for image in images]
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        filled = [pad(p, (0, width - p.shape[3], 0, height - p.shape[2])) for p in pixels]
        return {"pixel_values": torch.cat(filled), "image_sizes": torch.tensor(sizes)}
    if family == "lfm2_vl":
        return joined([shaped(tiles) for tiles in pixels])
    if family in LIKE_GEMMA4:
        return joined([placed(family, tiles) for tiles in pixels])
    whole = torch.cat(pixels)
    return {"pixel_values": whole[None] if family in ("idefics3", "smolvlm") else whole}


def joined(inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tiles of several shapes as one batch, the patches of which are as many as those of the largest."""
    most = max(each["pixel_values"].shape[1] for each in inputs)
    for each in inputs:
        missing = most - each["pixel_values"].shape[1]
        each["pixel_values"] = pad(each["pixel_values"], (0, 0, 0, missing))
        if "image_position_ids" in each:
            each["image_position_ids"] = pad(each["image_position_ids"], (0, 0, 0, missing), value=-1)
        else:
            each["pixel_attention_mask"] = pad(each["pixel_attention_mask"], (0, missing))
    return {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}


@pytest.fixture(scope="module")
def alone(made: Made) -> dict[str, Answer]:
    """Each request alone, its prompt in one chunk."""
    answers: dict[str, Answer] = {}
    with closing(engine_of(made.folder, enable_prefix_caching=False, max_num_batched_tokens=1024)) as engine:
        assert engine.info.takes_images
        for each in made.requests():
            answers |= run(engine, [each])
    return answers


def test_logits_equal_transformers(made: Made, alone: dict[str, Answer]) -> None:
    assert_equals(made, made.requests(), alone)


def assert_equals(made: Made, requests: list[Request], answers: dict[str, Answer]) -> None:
    """Log-probabilities are those of `made.oracle` within 1e-4."""
    for each in requests:
        answer, marks = answers[each.id], {made.image_prompts.row_id, SPECIAL.index("<|video_pad|>")}
        ends = [i for i, token in enumerate(answer.tokens) if token in marks]
        tokens = answer.tokens[: ends[0] if ends else None]  # behind, transformers looks for another image
        want = oracle_logits(made, each, tokens)[len(each.prompt) - 1 :].double().log_softmax(-1)
        for row, found in zip(want, answer.logprobs, strict=False):
            got = torch.tensor([p for _, p in found.top], dtype=torch.float64)
            assert (got - row[[token for token, _ in found.top]]).abs().max() <= 1e-4, each.id


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "trees": {"speculative_config": json.dumps({"method": "suffix", "topk": 2, "adaptive": False})},
    "chunks": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "preempted": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "weights on disk": {"weight_offload": "disk"},
    "self": {"speculative_config": json.dumps({"method": "self", "layers": 1, "adaptive": False})},
    "ngram": {"speculative_config": json.dumps({"method": "ngram", "prompt_lookup_min": 1, "adaptive": False})},
}


SPARE = {"gemma3": 28, "lfm2_vl": 20, "llama4": 40, **dict.fromkeys(LIKE_GEMMA4, 120), **dict.fromkeys(RECURRENT, 24)}
"""Blocks beside those of a sequence's keys, where layers with windows take some."""
SEEING = ("gemma4_moe", "gemma4_unified")
"""Those of whose images a step computes all rows, which are up to 70."""


def tokens_of(made: Made, tokens: int) -> int:
    """Of a step: more where an image would not fit."""
    return 3 * tokens if made.family in SEEING else tokens


OFTEN_WAYS = ("chunks", "preempted", "self")


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in OFTEN_WAYS else pytest.mark.slow) for w in WAYS])
def test_same_bits_under_any_load(way: str, made: Made, alone: dict[str, Answer]) -> None:
    if made.family in RECURRENT and way in ("trees", "self"):
        pytest.skip("these drafts are refused beside states")
    requests, options = made.requests(), dict(WAYS[way])
    if way == "preempted":
        longest = max(len(each.prompt) for each in requests) + 16
        options["num_blocks"] = longest // 4 + SPARE.get(made.family, 8)
    if "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] = tokens_of(made, options["max_num_batched_tokens"])
    with closing(engine_of(made.folder, **options)) as engine:
        got = run(engine, requests, random.Random(way))
        assert [r.id for r in requests if got[r.id].bits() != alone[r.id].bits()] == []
        stats = engine.engine.stats()
        assert stats.used_blocks == 0 and stats.image_queries
        # Others have one prompt that is much longer than the rest, or blocks to spare in layers with windows.
        assert way != "preempted" or stats.preemptions or made.family != "qwen3_vl"


FORMS: tuple[dict[str, Any], ...] = (
    {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16"},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_formats_under_any_load(form: dict[str, Any], made: Made) -> None:
    requests, want = made.requests(max_tokens=3), dict[str, Answer]()
    with closing(engine_of(made.folder, enable_prefix_caching=False, **form)) as engine:
        for each in requests:
            want |= run(engine, [each])
    with closing(engine_of(made.folder, max_num_batched_tokens=tokens_of(made, 40), max_num_seqs=8, **form)) as engine:
        got = run(engine, requests, random.Random(2))
    assert [r.id for r in requests if got[r.id].bits() != want[r.id].bits()] == []


@pytest.mark.parametrize(
    "nested", ["model.language_model.", pytest.param("language_model.model.", marks=pytest.mark.slow)]
)
def test_adapters_of_the_text_part(nested: str, made: Made, alone: dict[str, Answer], tmp_path: Path) -> None:
    if made.family not in ("llava", "qwen2_vl", *OFTEN) or made.family in LIKE_GEMMA4:
        pytest.skip("the towers of others have matrices of these names")
    assert made.oracle is not None
    layout = Layout(made.oracle, 1).low_rank("gate_proj", "up_proj", "down_proj")
    layout.tensors = {name.replace("model.language_model.", nested): t for name, t in layout.tensors.items()}
    layout.write(tmp_path)
    adapted = Made(made.family, made.folder, layout.merged)
    plain = made.requests()
    asked = [replace(each, id=f"{each.id}-adapted", adapter="a") for each in plain]
    with closing(engine_of(made.folder, enable_lora=True, lora_modules=(f"a={tmp_path}",))) as engine:
        got = run(engine, plain + asked, random.Random(1))
    assert [each.id for each in plain if got[each.id].tokens != alone[each.id].tokens] == []
    assert_equals(adapted, asked, got)


@pytest.mark.slow
def test_ranks_are_told_the_rows(made: Made, alone: dict[str, Answer]) -> None:
    if made.family not in ("llava", "gemma3", "qwen3_vl", "qwen3_5"):
        pytest.skip("the others differ in nothing that ranks see")
    requests = made.requests()
    with closing(engine_of(made.folder, tensor_parallel_size=2, threads=1)) as engine:
        together = run(engine, requests, random.Random(5))
        again = run(engine, [replace(each, id=f"again-{each.id}") for each in requests])
        for each in requests:
            assert together[each.id].tokens == alone[each.id].tokens
            assert again[f"again-{each.id}"].bits() == together[each.id].bits()


@pytest.mark.slow
def test_an_engine_that_is_killed_is_gone_on_from(made: Made) -> None:
    if made.family not in OFTEN:
        pytest.skip("the others differ in nothing that a process sees")
    requests, started = made.requests(max_tokens=400, logprobs=None), list[ProcessEngine]()
    config = flat_config(model=str(made.folder), dtype="float32", device="cpu", num_blocks=512, block_size=4, threads=1)

    def start(*_: object) -> ProcessEngine:
        started.append(ProcessEngine(config))
        return started[-1]

    with closing(engine_of(made.folder, threads=1)) as engine:
        want = run(engine, requests)
    tokens: dict[str, list[int]] = {each.id: [] for each in requests}
    ends: set[str] = set()
    with closing(SupervisedEngine(start, RestartPolicy(), config.scheduler)) as client:
        for each in requests:
            client.submit(each)
        for _ in turns(lambda: len(ends) < len(requests)):
            report = client.poll(0.2)
            for output in report.outputs if report is not None else ():
                assert output.error is None
                tokens[output.request_id] += output.tokens
                ends.update([output.request_id] if output.finish_reason else ())
            if len(started) == 1 and any(tokens.values()):
                channel = started[0].channel
                assert isinstance(channel, LocalChannel)
                channel.process.kill()
    assert len(started) == 2
    assert [each.id for each in requests if tokens[each.id] != want[each.id].tokens] == []


def test_text_alone_of_a_model_that_takes_images(made: Made, alone: dict[str, Answer]) -> None:
    with closing(engine_of(made.folder, language_model_only=True)) as engine:
        assert not engine.info.takes_images
        got = run(engine, [made.request("none")])
        assert got["none"].bits() == alone["none"].bits()
    with pytest.raises(ConfigError, match="--language-model-only"):
        engine_of(made.folder, pipeline_parallel_size=2, threads=1)


def test_memory_of_images_is_planned_and_spared(made: Made) -> None:
    given: dict[str, Any] = {"model": str(made.folder), "dtype": "float32", "device": "cpu", "max_model_len": 512}
    plan = Planner(flat_config(**given), Machine())
    with closing(LocalEngine(flat_config(**given))) as engine:
        model, limits = engine.engine.model, engine.engine.config.scheduler
        assert plan.account.images == image_bytes(limits, model, 512) > 4 * 16384 * 64
    text = Planner(flat_config(**given, language_model_only=True), Machine())
    assert text.account.images == 0 and text.account.weights < plan.account.weights


def test_a_store_of_blocks_needs_no_tower(made: Made, tmp_path: Path) -> None:
    given = {"kv_store": str(tmp_path), "num_blocks": 256}
    requests = [made.request(name) for name in ("one", "three")]
    with closing(engine_of(made.folder, **given)) as engine:
        want = run(engine, requests)
    with closing(engine_of(made.folder, **given)) as engine:
        got = run(engine, requests)
        stats = engine.engine.stats()
        assert stats.kv_store is not None and stats.kv_store.hits and stats.image_queries == 0
    assert [each.id for each in requests if got[each.id].bits() != want[each.id].bits()] == []


def test_answers_of_a_shape(made: Made) -> None:
    asked = made.request(
        "one", max_tokens=12, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}")
    )
    request = with_grammar(VOCABULARY, made.tokenizer, asked)
    with closing(engine_of(made.folder, max_num_batched_tokens=tokens_of(made, 40), max_num_seqs=8)) as engine:
        answer = run(engine, [request, made.request("three")])["one"]
    said = made.tokenizer.decode(answer.tokens).strip()
    assert len(said) >= 4 and set(said[:4]) <= set("abc")
