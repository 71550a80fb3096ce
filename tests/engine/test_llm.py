"""The offline interface on a tiny model with random weights."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import write
from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.errors import BadRequest, ConfigError, QuireError
from quire.engine.outputs import RequestOutput
from tiny_model import OPTIONS, write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as made:
        yield made
        pool = made.engine.engine.pool
        pool.check()
        assert pool.num_used == 0, "a test left blocks in use"


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_every_kind_of_prompt_gives_the_same(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode("abc")
    want = ids_of(llm.generate("abc", GREEDY))[0]
    for prompt in (["abc"], tokens, [tokens], {"prompt": "abc"}, {"prompt_token_ids": tokens}, [{"prompt": "abc"}]):
        assert ids_of(llm.generate(prompt, GREEDY)) == [want]  # type: ignore[arg-type]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "bcd" * 20, "e"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 2, 1)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 2, 1]
    assert ids_of(outputs)[1] == ids_of(llm.generate(prompts[1], params[1]))[0]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert llm.generate([]) == []


def test_text_is_that_of_the_tokens_and_streams_in_pieces(llm: LLM) -> None:
    output = llm.generate("abc", GREEDY)[0]
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    pieces = list(llm.stream(["abc", "xyz"], GREEDY))
    text = "".join(d.text for d in pieces if d.prompt == 0)
    assert text == output.outputs[0].text
    assert [d.output is not None for d in pieces if d.prompt == 0] == [False] * 5 + [True]


def test_n_continuations_differ_and_share_the_prompt(llm: LLM) -> None:
    output = llm.generate("abc", SamplingParams(n=4, max_tokens=8, seed=1, ignore_eos=True, logprobs=0))[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    for c in output.outputs:
        assert c.logprobs is not None and c.cumulative_logprob is not None
        chosen = [entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True)]
        assert math.isclose(sum(chosen), c.cumulative_logprob, abs_tol=1e-4)


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    whole = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    stop = next(c for c in whole.text[3:] if c.isprintable() and c not in whole.text[:3])
    at = whole.text.index(stop)
    cut = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,))
    found = llm.generate("abc", cut)[0].outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (whole.text[:at], "stop", stop)
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    assert stop in llm.get_tokenizer().decode(found.token_ids)
    assert not llm.engine.engine.has_work


def test_stop_strings_end_each_of_n_continuations_by_itself(llm: LLM) -> None:
    for seed in range(6):
        params = SamplingParams(n=6, max_tokens=60, seed=seed, ignore_eos=True, stop=("a", "e", "7"))
        before = llm.engine.engine.generation_tokens
        output = llm.generate("abc", params)[0]
        made = sum(len(c.token_ids) for c in output.outputs)
        assert llm.engine.engine.generation_tokens - before == made, "no token is made for a text that has ended"
        assert all(not {"a", "e", "7"} & set(c.text) for c in output.outputs)
        assert {c.finish_reason for c in output.outputs} <= {"stop", "length"}
        assert output.num_cached_tokens == 0, "that the others fork from the first is no hit"
        assert not llm.engine.engine.has_work


def test_a_stop_token_ends_the_text_and_is_kept_in_the_ids(llm: LLM) -> None:
    whole = ids_of(llm.generate("abc", GREEDY))[0]
    token = whole[3]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=(token,))
    found = llm.generate("abc", params)[0].outputs[0]
    first = whole.index(token)
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    assert found.token_ids == whole[: first + 1]
    assert found.text == llm.get_tokenizer().decode(whole[:first])


def test_prompt_logprobs_score_every_token_but_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    output = llm.generate("abcdef", params)[0]
    scores = output.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == 6
    for token, entry in zip(output.prompt_token_ids[1:], scores[1:], strict=True):
        assert entry is not None and entry[token].logprob < 0 and 2 <= len(entry) <= 3
    # The score of a prompt token is that of the same token when it was generated.
    longer = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0))[0]
    again = llm.generate([*longer.prompt_token_ids, *longer.outputs[0].token_ids], params)[0]
    made = [next(iter(e.values())).logprob for e in longer.outputs[0].logprobs or []]
    last = (again.prompt_logprobs or [])[-2:]
    scored = [e[t].logprob for t, e in zip(longer.outputs[0].token_ids, last, strict=True) if e]
    assert made == pytest.approx(scored, abs=1e-4)


def test_metrics_are_in_order(llm: LLM) -> None:
    m = llm.generate("abc", GREEDY)[0].metrics
    assert m.first_scheduled_time is not None and m.first_token_time is not None and m.last_token_time is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time < m.last_token_time
    assert m.ttft is not None and m.e2e_latency is not None and 0 < m.ttft < m.e2e_latency


def test_the_same_seed_gives_the_same_run(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        with LLM(folder, **OPTIONS, seed=seed) as made:
            return ids_of(made.generate(["abc", "abc"], params))

    first = run(5)
    assert first == run(5)
    assert first[0] != first[1], "two prompts of one run must not share their random numbers"


def test_max_tokens_is_cut_to_the_context(llm: LLM) -> None:
    prompt = [5] * 120
    for limit in (None, 500):
        output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 8
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ("", GREEDY, "at least one token"),
        ([[5] * 128], GREEDY, "context holds 128"),
        ([[5, 9999]], GREEDY, "token id 9999"),
        (["a", "b"], [GREEDY], "one each"),
        ({"text": "a"}, GREEDY, "prompt_token_ids"),
        (7, GREEDY, "neither text"),
        ("\ud800", GREEDY, "surrogate"),
        ({"prompt": 7}, GREEDY, "not a string"),
        ([["a"]], GREEDY, "neither text"),
        ("a", SamplingParams(temperature=-1.0), "temperature"),
        ("a", SamplingParams(stop=("x",), detokenize=False), "detokenize"),
        ("a", SamplingParams(structured_outputs={"regex": "(a"}), "structured_outputs"),  # type: ignore[arg-type]
        ("a", SamplingParams(temperature="x"), "temperature: must be a number"),  # type: ignore[arg-type]
        ("a", SamplingParams(max_tokens=1.5), "max_tokens: must be an integer"),  # type: ignore[arg-type]
        ("a", SamplingParams(n=True), "n: must be an integer"),
        ("a", SamplingParams(top_p=None), "top_p: must be a number"),  # type: ignore[arg-type]
        ("a", SamplingParams(ignore_eos=1), "ignore_eos: must be true or false"),  # type: ignore[arg-type]
        ("a", SamplingParams(stop=(7,)), "stop: each must be a string"),  # type: ignore[arg-type]
        ("a", SamplingParams(stop_token_ids=5), "stop_token_ids: each must be an integer"),  # type: ignore[arg-type]
        ("a", SamplingParams(logit_bias={"a": 1.0}), "logit_bias: must map"),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(llm: LLM, prompt: Any, params: Any, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        llm.generate(prompt, params)
    assert not llm.engine.engine.has_work


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    stream = llm.stream(["abc", "def"], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(BadRequest, match="another call"):
        llm.generate("abc", GREEDY)
    stream.close()
    assert not llm.engine.engine.has_work
    assert llm.engine.engine.pool.num_used == 0
    assert len(ids_of(llm.generate("abc", GREEDY))[0]) == 6


def test_chat_is_generate_on_the_templates_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi <|end|>"}]
    output = llm.chat(messages, GREEDY)[0]
    tokenizer = llm.get_tokenizer()
    user, end, assistant = (tokenizer.special[s] for s in ("<|user|>", "<|end|>", "<|assistant|>"))
    ids = output.prompt_token_ids
    assert (ids[0], ids[-2], ids[-1]) == (user, end, assistant)
    assert ids.count(end) == 1, "a special token in a message must stay text"
    assert ids_of(llm.generate(ids, GREEDY)) == [output.outputs[0].token_ids]
    two = llm.chat([messages, messages], GREEDY)
    assert ids_of(two) == [output.outputs[0].token_ids] * 2
    other = llm.chat(messages, GREEDY, chat_template="{{ messages[0]['content'] }}")[0]
    assert tokenizer.decode(other.prompt_token_ids, skip_special_tokens=False) == "hi <|end|>"


def test_chat_needs_a_template(tmp_path: Path) -> None:
    with LLM(write_tiny(tmp_path, chat=False), **OPTIONS) as made, pytest.raises(BadRequest, match="chat template"):
        made.chat([{"role": "user", "content": "hi"}])


def test_bad_words_never_come(llm: LLM) -> None:
    letters = {"temperature": 0.0, "max_tokens": 6, "allowed_token_ids": llm.get_tokenizer().encode("xyz")}
    first = llm.generate("abc", SamplingParams(**letters))[0].outputs[0].text[0]
    text = llm.generate("abc", SamplingParams(**letters, bad_words=(first,)))[0].outputs[0].text
    assert len(text) == 6 and first not in text


def test_beam_search_finds_what_exhaustive_search_finds(llm: LLM) -> None:
    """Width 10 over two steps equals the best of all pairs that start with one of the ten likeliest tokens."""
    params = BeamSearchParams(beam_width=10, max_tokens=2, ignore_eos=True)
    found = llm.beam_search("abc", params)[0].sequences
    prompt = llm.get_tokenizer().encode("abc")
    top = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    starts = (llm.generate(prompt, top)[0].outputs[0].logprobs or [])[0]
    best = sorted(starts.items(), key=lambda item: -item[1].logprob)[:10]
    pairs = []
    for token, entry in best:
        ends = (llm.generate([[*prompt, token]], top)[0].outputs[0].logprobs or [])[0]
        pairs += [(entry.logprob + e.logprob, [*prompt, token, t]) for t, e in ends.items()]
    pairs.sort(key=lambda pair: -pair[0])
    assert [s.tokens for s in found] == [tokens for _, tokens in pairs[:10]]
    assert [s.cum_logprob for s in found] == pytest.approx([score for score, _ in pairs[:10]], abs=1e-4)
    assert all(s.finish_reason == "length" for s in found)


def test_beam_search_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = write(write_tiny(tmp_path), "llama", vocab_size=260, eos_token_id=3)
    prompt = torch.tensor([[5, 6, 7, 8]])
    with LLM(tmp_path, device=OPTIONS["device"], num_blocks=64, block_size=2) as made:
        for penalty in (0.0, 1.0, 2.0):
            want = theirs.generate(
                prompt, num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False, length_penalty=penalty
            )
            params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=penalty)
            found = made.beam_search(prompt[0].tolist(), params)[0].sequences
            assert [s.tokens for s in found] == want.tolist()
        assert made.engine.engine.stats().prefix_hits > 0, "beams share their prefix"


def test_priority_needs_the_policy(llm: LLM, folder: Path) -> None:
    with pytest.raises(BadRequest, match="scheduling_policy"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 0])
    with LLM(folder, **OPTIONS, scheduling_policy="priority", max_num_seqs=1) as made:
        late, soon = made.generate(["a", "b"], GREEDY, priority=[1, 0])
    assert soon.metrics.last_token_time is not None and late.metrics.first_token_time is not None
    assert soon.metrics.last_token_time < late.metrics.first_token_time


def test_beam_search_refuses_what_it_cannot_do(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="beam_width"):
        llm.beam_search("abc", BeamSearchParams(beam_width=11, max_tokens=2))


def test_numbers_of_other_libraries_and_keys_of_json_are_taken(llm: LLM) -> None:
    biased = SamplingParams(temperature=np.float32(0.0), max_tokens=np.int64(3), logit_bias={"9": 100})  # type: ignore[arg-type, dict-item]
    assert ids_of(llm.generate("abc", biased)) == [[9, 9, 9]]


def test_a_closed_model_says_so(folder: Path) -> None:
    made = LLM(folder, **OPTIONS)
    made.close()
    made.close()
    with pytest.raises(ConfigError, match="closed"):
        made.generate([[5, 6]], SamplingParams(max_tokens=1, detokenize=False))


ACCEPTED: dict[str, Any] = {
    "speculative_model": None,
    "num_speculative_tokens": None,
    "speculative_draft_tensor_parallel_size": None,
    "tokenizer": None,
    "quantization": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "trust_remote_code": False,
    "dtype": "float32",
    "max_model_len": 64,
    "enforce_eager": True,
    "kv_cache_dtype": "float32",
    "quantization_param_path": None,
    "device": "reference",
    "enable_chunked_prefill": True,
    "download_dir": None,
    "block_size": 4,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": False,
}


def test_every_name_of_the_offline_call_is_accepted(folder: Path) -> None:
    with LLM(folder, **(OPTIONS | ACCEPTED)) as made:
        assert (made.info.max_model_len, made.info.block_size, made.info.dtype) == (64, 4, "float32")
        assert made.engine.engine.prefix is None
        assert len(ids_of(made.generate("abc", GREEDY))[0]) == 6


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("speculative_draft_tensor_parallel_size", 2, "alone does not say who drafts"),
        ("data_parallel_size", 2, "runs one engine"),
        ("pipeline_layers", "3,4", "of the 1 stages"),
        ("quantization_param_path", "x.json", "not read"),
        ("revision", "x", "lies on this machine"),
        ("gpu_memory_utilization", 0.5, "no GPU"),
        ("dtype", "int3", "not one of"),
        ("device", "tpu", "not one of"),
        ("block_size", 5, "power of two"),
        ("block_size", "16", "int"),
        ("quantization", "awq", "not quantized"),
        ("quantization", "gguf", "not quantized"),
        ("quantization", "int5", "not known"),
        ("swap_spaces", 4, "block_size"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(folder: Path, option: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        LLM(folder, **(OPTIONS | {option: value}))
    assert option in caught.value.message.replace("-", "_")


@pytest.mark.parametrize("name", [torch.float32, "float", "f32"])
def test_a_dtype_may_be_torchs_or_spelled_as_others_do(folder: Path, name: object) -> None:
    with LLM(folder, **(OPTIONS | {"dtype": name, "kv_cache_dtype": name})) as made:
        assert (made.info.dtype, made.info.kv_cache_dtype) == ("float32", "float32")


def test_without_chunked_prefill_a_step_has_room_for_the_longest_prompt(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    long = OPTIONS | {"enable_chunked_prefill": False, "max_model_len": 600}
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 600}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder, **long) as whole, LLM(folder, **(OPTIONS | {"max_model_len": 600})) as cut:
        assert ids_of(whole.generate("a" * 590, GREEDY)) == ids_of(cut.generate("a" * 590, GREEDY))
        assert whole.engine.engine.scheduler.config.max_num_batched_tokens == 600
    with pytest.raises(ConfigError, match="must be at least"):
        LLM(folder, **(long | {"max_num_batched_tokens": 64}))


def test_trusting_remote_code_changes_nothing_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(folder, **(OPTIONS | {"trust_remote_code": True})) as made:
        assert len(ids_of(made.generate("abc", GREEDY))[0]) == 6
    assert "trust_remote_code has no effect" in caplog.text


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_importing_quire_is_cheap() -> None:
    """torch takes a second; neither `import quire` nor `quire --help` may pay it."""
    code = "import quire, quire.cli.app, sys; print({'torch', 'numpy', 'tokenizers', 'zmq'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
