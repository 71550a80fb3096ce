"""Encoder-decoders: logits and generations equal transformers', whatever runs beside them, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.t5.modeling_t5 import T5Attention

from loaded_folders import load_packed as load_kept
from model_variants import ENCODERS as VARIANTS
from model_variants import SMALL_ENCODER as SMALL
from model_variants import Encoded
from op_cases import reference as cases
from oracle import BACKENDS, backend, edit_config, relative_error, write
from over_torch import over_torch
from paged_model import CUTS, assert_left_out, load, prompt
from quire import LLM, BeamSearchParams
from quire.core.config import flat_config
from quire.core.dtypes import F32
from quire.core.errors import BadRequest, ConfigError, ModelError
from quire.core.params import SamplingParams
from quire.core.request import DecoderStart, Request
from quire.core.sequence import Sequence
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.local import LocalEngine
from quire.model.describe import describe
from quire.model.families.find import read_spec
from quire.model.load.encoder import bucket_of
from quire.model.load.roles import ROLES
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout
from quire.server.app import create_app
from quire.server.models.start import server_of_one
from quire.server.server_options import ServerOptions
from quire.server.service import Service
from quire.text.tokenizer import Tokenizer as TextTokenizer
from real_server import Shared
from turns import reports

PROMPTS = [prompt(45, 4), prompt(16, 5), prompt(1, 6)]
Made = tuple[Path, PreTrainedModel]
CPU = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def logits(model: PreTrainedModel, tokens: list[int], decoded: list[int]) -> Tensor:
    """transformers' logits [len(decoded), vocab] f32."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), decoder_input_ids=torch.tensor([decoded])).logits[0]


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, p, s) for p, s in zip(PROMPTS, sequences, strict=True)]
    for block_size in (1, 16):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Encoded(model, PROMPTS, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= 1e-5, (block_size, name)


def test_a_table_may_be_called_as_one_stack_calls_it(ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "t5", **SMALL)
    path, tokens, decoded = tmp_path / "model.safetensors", prompt(20, 1), prompt(9, 2)
    tensors = load_file(path)
    table = tensors.pop("shared.weight")
    for kept in ({"encoder.embed_tokens.weight": table}, {"decoder.embed_tokens.weight": table},
                 {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table.clone()}):  # fmt: skip
        save_file({n: t for n, t in tensors.items() if "embed_tokens" not in n} | kept, path)
        (got,) = Encoded(load(tmp_path, ops), [tokens], [decoded]).run([[9]])
        assert relative_error(got, logits(oracle, tokens, decoded)) <= 1e-5
    save_file({n: t for n, t in tensors.items() if "embed_tokens" not in n}, path)
    with pytest.raises(ModelError, match=r"missing tensors: shared\.weight"):
        describe(str(tmp_path))


def test_mt5_files_with_a_head_of_their_own(ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "mt5", **SMALL)
    path, tokens, decoded = tmp_path / "model.safetensors", prompt(20, 1), prompt(9, 2)
    head = torch.randn(99, 64, generator=torch.Generator().manual_seed(1))
    save_file(load_file(path) | {"lm_head.weight": head}, path)
    edit_config(tmp_path, tie_word_embeddings=False)
    oracle.lm_head.weight = torch.nn.Parameter(head)
    (got,) = Encoded(load(tmp_path, ops), [tokens], [decoded]).run([[9]])
    assert relative_error(got, logits(oracle, tokens, decoded)) <= 1e-5


def test_long_prompts_and_outputs_share_their_last_bucket(ops: Ops, tmp_path: Path) -> None:
    oracle = write(tmp_path, "t5", **SMALL)
    tokens, decoded = prompt(600, 1), prompt(310, 2)
    (got,) = Encoded(load(tmp_path, ops, max_model_len=1024), [tokens], [decoded]).run([[310]])
    assert relative_error(got, logits(oracle, tokens, decoded)) <= 1e-5


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (32, 20), (64, 1000)])
def test_buckets_equal_transformers(buckets: int, furthest: int) -> None:
    back = torch.arange(2 * furthest)
    want = T5Attention._relative_position_bucket(-back, False, buckets, furthest)
    assert np.array_equal(bucket_of(back.numpy(), buckets, furthest), want.numpy())


@CPU
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int4"}])
def test_native_logits_are_bit_equal_however_cut(options: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "t5", dtype=torch.bfloat16, **VARIANTS["t5_v1_1"][1])
    model = load(tmp_path, backend("cpu"), **options)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = Encoded(model, PROMPTS, sequences).run(CUTS["whole"])
    for seed, cut in enumerate(CUTS.values()):
        for got, expected in zip(Encoded(model, PROMPTS, sequences, seed).run(cut), want, strict=True):
            assert torch.equal(got, expected)
    (alone,) = Encoded(model, PROMPTS[:1], sequences[:1]).run([[19]])
    assert torch.equal(alone, want[0])
    assert_left_out(Encoded(model, PROMPTS[:1], [sequences[0][:9]]), want[0][:9], exact=True)


def test_dummy_weights_and_reports_fit(tmp_path: Path) -> None:
    write(tmp_path, "t5", **VARIANTS["t5_unequal"][1])
    found, made = describe(str(tmp_path)), describe(str(tmp_path), load_format="dummy")
    assert made.parameters == found.parameters and made.tensors == found.tensors
    sizes = (int(torch.Size(ROLES[r].shape(found.spec)).numel()) * ROLES[r].copies(found.spec) for r in found.roles)
    tied = found.spec.vocab_size * found.spec.hidden
    assert sum(sizes) == found.parameters + tied
    model = load(tmp_path, backend("reference"))
    assert model.weight_bytes - model.report["rope"][1] == found.bytes_on_disk, "the head is the table"


@CPU
def test_packed_weights_are_found_again(tmp_path: Path) -> None:
    write(tmp_path, "t5", **SMALL)
    first, again = (Encoded(load_kept(tmp_path, device="cpu"), [[5, 6]], [[0, 9]]) for _ in range(2))
    assert torch.equal(first.run([[2]])[0], again.run([[2]])[0])


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"feed_forward_proj": "odd-relu"}, "feed_forward_proj"),
        ({"feed_forward_proj": "gated-tanh"}, "hidden_act"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance"),
        ({"decoder_start_token_id": 99}, "decoder_start_token_id"),
        ({"num_layers": 0, "num_decoder_layers": 2}, "num_layers"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields: dict[str, Any], what: str) -> None:
    raw = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 99} | fields
    with pytest.raises(ModelError, match=what):
        read_spec(raw, "config.json")


def test_files_say_in_two_ways_that_logits_are_not_scaled() -> None:
    raw = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 99}
    scales = [read_spec(raw | said, "config.json")[0].logit_scale for said in (
        {}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    )]  # fmt: skip
    assert scales == [0.125, 1.0, 1.0]


def test_an_opening_fills_blocks() -> None:
    params = SamplingParams()
    for length, lead in ((1, 4), (4, 4), (5, 8)):
        request = Request(
            id="a", prompt=(7,) * length, params=params, seed=0, arrival=0.0, decoder_start=DecoderStart(4, 3)
        )
        seq = Sequence(request)
        assert (seq.encoder.tokens, seq.encoder.lead, seq.prompt_len) == (length, lead, lead + 1)
        assert seq.tokens[lead:] == [3] and seq.output == []
        assert seq.prompt_tokens(0, lead + 1) == length and seq.prompt_tokens(lead, lead + 1) == 0


@CPU
def test_a_bias_by_distance_needs_one_row_per_head() -> None:
    case = cases.attention_case(torch.Generator().manual_seed(0), KVLayout(16, 1, 32, F32), 2, ((2, 40),))
    for shape in ((3, 5), (2, 0), (10,)):
        with pytest.raises(ValueError, match="bias"):
            over_torch(backend("cpu")).attention(**case | {"spec": AttentionSpec(1.0, bias=torch.zeros(shape))})


def write_tokenizer(folder: Path) -> Path:
    """A unigram tokenizer that ends what it encodes with </s>, as T5's do."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 33 + 95))]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = write_tokenizer(tmp_path_factory.mktemp("t5"))
    return folder, write(folder, "t5", **VARIANTS["t5_v1_1"][1])


def generate(engine: LocalEngine, prompts: list[list[int]], **params: Any) -> dict[tuple[str, int], list[int]]:
    """Output tokens by (number of the prompt, index)."""
    wanted = SamplingParams(**params)
    for i, tokens in enumerate(prompts):
        engine.submit(Request(id=str(i), prompt=tuple(tokens), params=wanted, seed=i, arrival=time.monotonic(),
                              eos_token_ids=engine.info.eos_token_ids))  # fmt: skip
    got: dict[tuple[str, int], list[int]] = {}
    for report in reports(engine):
        for output in report.outputs:
            assert output.error is None
            got.setdefault((output.request_id, output.index), []).extend(output.tokens)
    pool = engine.engine.pool
    pool.check()
    assert pool.num_used == 0
    return got


MANY = [prompt(n, n) for n in (3, 40, 1, 17, 16, 90, 33, 5)]
GREEDY = {"max_tokens": 20, "min_tokens": 20, "temperature": 0.0}


def test_greedy_generations_equal_transformers(made: Made) -> None:
    folder, oracle = made
    engine = LocalEngine(flat_config(model=str(folder), num_blocks=64, max_num_seqs=8, device=BACKENDS[-1]))
    got = generate(engine, MANY, **GREEDY)
    for i, tokens in enumerate(MANY):
        with torch.inference_mode():
            out = oracle.generate(torch.tensor([tokens]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        assert got[str(i), 0] == out[0, 1:].tolist(), i
    stats = engine.engine.stats()
    assert stats.prompt_tokens == sum(map(len, MANY)) and stats.preemptions == 0


@CPU
def test_outputs_do_not_depend_on_what_runs_beside(made: Made) -> None:
    options: dict[str, Any] = {"model": str(made[0]), "dtype": "bfloat16", "device": "cpu", "max_model_len": 128}
    sampled = GREEDY | {"temperature": 0.8}
    roomy = LocalEngine(flat_config(**options, num_blocks=256))
    want = generate(roomy, MANY, **sampled)
    for i, tokens in enumerate(MANY[:4]):
        alone = LocalEngine(flat_config(**options, num_blocks=256, enforce_eager=True))
        assert generate(alone, [[9]] * i + [tokens], **sampled)[str(i), 0] == want[str(i), 0]
    tight = LocalEngine(flat_config(**options, num_blocks=12, max_num_seqs=4))
    assert generate(tight, MANY, **sampled) == want
    assert tight.engine.scheduler.preemptions > 0


def test_siblings_share_what_the_encoder_made(made: Made) -> None:
    engine = LocalEngine(flat_config(model=str(made[0]), num_blocks=64, device=BACKENDS[-1]))
    assert engine.engine.model.encoder is not None
    prompts = [prompt(40, 1), prompt(40, 1)]
    got = generate(engine, prompts, n=3, max_tokens=6, temperature=1.0, min_tokens=6)
    stats = engine.engine.stats()
    assert len({tuple(tokens) for tokens in got.values()}) > 1 and len(got) == 6
    assert stats.prompt_tokens == 80 and stats.prefix_queries == 0


def test_a_prompt_longer_than_the_budget_is_read_at_once(made: Made) -> None:
    folder, oracle = made
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 160, "block_size": 8}
    engine = LocalEngine(flat_config(model=str(folder), num_blocks=64, device=BACKENDS[-1], **limits))
    got = generate(engine, [prompt(100, 1), prompt(30, 2)], **GREEDY)
    with torch.inference_mode():
        out = oracle.generate(torch.tensor([prompt(100, 1)]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert got["0", 0] == out[0, 1:].tolist() and len(got["1", 0]) == 20


def test_what_cannot_work_is_refused(made: Made) -> None:
    options: dict[str, Any] = {"num_blocks": 64, "device": BACKENDS[-1], "max_model_len": 96}
    with pytest.raises(ConfigError, match="enable-lora"):
        LLM(made[0], **options, enable_lora=True)
    with LLM(made[0], **options) as llm:
        (answer,) = llm.generate({"prompt_token_ids": [5] * 20}, SamplingParams(max_tokens=500, ignore_eos=True))
        assert len(answer.prompt_token_ids or ()) == 20
        assert len(answer.outputs[0].token_ids) == 96 - 32 - 1 and answer.outputs[0].finish_reason == "length"
        with pytest.raises(BadRequest, match="prompt_logprobs"):
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(prompt_logprobs=1))
        with pytest.raises(BadRequest, match="the context holds 96"):
            llm.generate({"prompt_token_ids": [5] * 90}, SamplingParams())
        with pytest.raises(BadRequest, match="beam_search"):
            llm.beam_search({"prompt_token_ids": [5]}, BeamSearchParams(beam_width=2, max_tokens=2))


def test_penalties_do_not_count_what_the_encoder_reads(made: Made) -> None:
    folder, oracle = made
    engine = LocalEngine(flat_config(model=str(folder), num_blocks=64, device=BACKENDS[-1]))
    got = generate(engine, [prompt(30, 1)], **GREEDY, repetition_penalty=1.7)
    with torch.inference_mode():
        out = oracle.generate(torch.tensor([prompt(30, 1)]), max_new_tokens=20, min_new_tokens=20, do_sample=False,
                              repetition_penalty=1.7)  # fmt: skip
    assert got["0", 0] == out[0, 1:].tolist()


def test_old_files_hold_copies_of_the_embedding(tmp_path: Path) -> None:
    write(tmp_path, "t5", **SMALL)
    wanted = Encoded(load(tmp_path, backend("reference")), [[5, 6]], [[0, 9]]).run([[2]])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone() for stack in ("encoder", "decoder")}
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | copies | {unused: torch.ones(32, 4)}, path, {"format": "pt"})
    assert torch.equal(Encoded(load(tmp_path, backend("reference")), [[5, 6]], [[0, 9]]).run([[2]])[0], wanted[0])
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing tensors: encoder\.block\.1\.layer\.0\.SelfAttention\.k\.weight"):
        load(tmp_path, backend("reference"))


def test_text_in_text_out_over_http(tmp_path: Path) -> None:
    oracle = write(write_tokenizer(tmp_path), "t5", **SMALL)
    text = "translate: a house"
    inner = Shared(flat_config(model=str(tmp_path), num_blocks=64, device=BACKENDS[-1]))
    tokenizer = TextTokenizer.from_folder(tmp_path)
    tokens = tokenizer.encode(text)
    assert tokens[-1] == 1 and len(tokens) == 19 + 1
    with torch.inference_mode():
        out = oracle.generate(torch.tensor([tokens]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    app = create_app(server_of_one(Service(AsyncEngine(inner), tokenizer, None, ServerOptions(), flat_config())))
    asked = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "min_tokens": 8}
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = client.post("/v1/completions", json=asked).json()
        assert reply["choices"][0]["text"] == tokenizer.decode(out[0, 1:].tolist())
        assert reply["usage"] == reply["usage"] | {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
        two = client.post("/v1/completions", json=asked | {"n": 2, "prompt": [text, "b"]}).json()
        assert [c["text"] for c in two["choices"][:2]] == [reply["choices"][0]["text"]] * 2
        assert two["usage"]["prompt_tokens"] == 20 + 3
        for scored in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            refused = client.post("/v1/completions", json=asked | scored)
            assert refused.status_code == 400 and "encoder" in refused.json()["error"]["message"]
        long = client.post("/v1/completions", json=asked | {"max_tokens": 256 - 32})
        assert long.status_code == 400 and "at most 223 can follow" in long.json()["error"]["message"]
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert chat.status_code == 400 and "chat template" in chat.json()["error"]["message"]
