"""Adapters that hold more than low-rank matrices: DoRA, biases, tables and heads of their own, trained tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_adapters import KINDS, Extended, options
from oracle import BACKENDS, backend, logits, relative_error, write
from over_torch import over_torch
from paged_model import TOLERANCE, Paged, prompt
from peft_layouts import Layout
from quire import LLM, LoRARequest, SamplingParams
from quire.core.config import flat_config
from quire.core.errors import QuireError
from quire.engine.client import ChangeAdapter
from quire.model.build import load_model
from quire.ops.arrays import to_torch
from quire.ops.op import REGISTRY
from triton_ops import TRITON_OPS, needs_triton

FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, ("dora", "bias", "dora of tables", "patterns", "tables", "saved", "tokens", "tokens of both")),
    "qwen2": ({"tie_word_embeddings": True}, ("dora", "bias", "tied tokens", "saved", "plain")),
    "gpt2": ({}, ("dora", "bias", "tables")),
    "phi3": ({}, ("dora", "patterns")),
    "gemma2": ({"final_logit_softcapping": 5.0}, ("saved", "tables", "dora")),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_an_adapter_makes(family: str, name: str, tmp_path: Path) -> None:
    facts, kinds = FAMILIES[family]
    oracle = write(tmp_path / "m", family, **facts)
    layouts = {kind: KINDS[kind](oracle, i) for i, kind in enumerate(kinds)}
    folders = {kind: layout.write(tmp_path / kind) for kind, layout in layouts.items()}
    config = flat_config(**options(tmp_path / "m", folders))
    model = load_model(config, backend(name))
    names = [*kinds, ""]
    sequences = [[3, 9, 41, 50, *prompt(4 + i, i)] for i in range(len(names))]
    wanted = [logits(layouts[k].merged if k else oracle, s) for k, s in zip(names, sequences, strict=True)]
    lengths = [len(s) for s in sequences]
    mixed = Extended(model, sequences, names).run([[5] * len(names), [n - 5 for n in lengths]])
    for kind, got, want in zip(names, mixed, wanted, strict=True):
        assert relative_error(got, want) <= 5 * TOLERANCE, kind
    if name == "reference":
        return
    for i, kind in enumerate(names):
        (alone,) = Extended(model, sequences[i : i + 1], [kind]).run([[lengths[i] - 1], [1]])
        assert torch.equal(alone, mixed[i]), f"{kind}: a row must not depend on its batch"
    model.adapters.rows[...] = -1  # type: ignore[union-attr]
    (bare,) = Paged(model, sequences[-1:]).run([[lengths[-1]]])
    assert torch.equal(bare, mixed[-1]), "rows without an adapter keep their bits beside any"


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("more", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bf16", "int8"])
def test_rows_do_not_depend_on_their_batch_in_narrow_formats(more: dict[str, Any], tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "qwen2", tie_word_embeddings=True)
    kinds = ("dora", "saved", "tied tokens", "tables", "bias", "")
    layouts = {kind: KINDS[kind](oracle, i) for i, kind in enumerate(kinds[:-1])}
    folders = {kind: layout.write(tmp_path / kind) for kind, layout in layouts.items()}
    model = load_model(flat_config(**options(tmp_path / "m", folders, **more)), backend("cpu"))
    sequences = [[3, 9, 41, *prompt(4 + i, i)] for i in range(len(kinds))]
    mixed = Extended(model, sequences, list(kinds)).run([[4] * len(kinds), [len(s) - 4 for s in sequences]])
    for i, kind in enumerate(kinds):
        want = logits(layouts[kind].merged if kind else oracle, sequences[i])
        assert relative_error(mixed[i], want) <= 0.1, kind
        (alone,) = Extended(model, sequences[i : i + 1], [kind]).run([[len(sequences[i])]])
        assert torch.equal(alone, mixed[i]), kind


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_magnitudes_are_of_the_matrix_that_is_served(quantization: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "m", "llama")
    layout = Layout(oracle, 1).low_rank("q_proj", dora=True)
    more: dict[str, Any] = {"quantization": quantization, "dtype": "float32"}
    model = load_model(
        flat_config(**options(tmp_path / "m", {"a": layout.write(tmp_path / "a")}, **more)), backend("cpu")
    )
    assert model.adapters is not None
    at = "base_model.model.model.layers.1.self_attn.q_proj"
    a, b, magnitude = (layout.tensors[f"{at}.{p}"] for p in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
    ops, linear = over_torch(backend("cpu")), model.decoder.layers[1].qkv  # type: ignore[attr-defined]
    ops.begin_step()
    served = ops.linear(torch.eye(64), linear.weight, None)[:, :64].t().clone()
    factors = magnitude / (served + 1.5 * b @ a).norm(dim=1)
    held = model.adapters.extensions.decoder(model.decoder).layers[1].qkv.adapters[0].excess[0, 0]  # type: ignore
    held = to_torch(held)
    assert relative_error(1 + held[:64], factors) < 1e-5 and not held[64:].any()
    plain = oracle.get_submodule("model.layers.1.self_attn.q_proj").weight.detach() + 1.5 * b @ a
    assert relative_error(1 + held[:64], magnitude / plain.norm(dim=1)) > 1e-4, "not of the matrix before it is rounded"


def greedy(llm: LLM, prompts: list[list[int]], lora: Any = None, count: int = 9) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=lora)
    return [list(f.outputs[0].token_ids) for f in found]


SERVED = ("dora", "saved", "tokens", "bias", "tables")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], list[list[int]]]:
    """A model, adapters, and the tokens that the models they make of it say."""
    folder = tmp_path_factory.mktemp("served")
    oracle = write(folder / "m", "llama", vocab_size=99)
    layouts = {kind: KINDS[kind](oracle, i) for i, kind in enumerate(SERVED)}
    paths = {kind: layout.write(folder / kind) for kind, layout in layouts.items()}
    said = []
    for model in (oracle, *(layout.merged for layout in layouts.values())):
        tokens = list(PROMPT)
        for _ in range(9):
            tokens.append(int(logits(model, tokens)[-1].argmax()))
        said.append(tokens[len(PROMPT) :])
    return folder / "m", paths, said


PROMPT = [3, 9, 41, *prompt(17, 5)]
SMALL: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_loras": len(SERVED)}


def requests(paths: dict[str, Path]) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(paths.items()))]


WAYS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "eager chunks": {"enforce_eager": True, "max_num_batched_tokens": 8},
    "drafts": {"speculative_config": '{"method": "ngram"}'},
    "drafts by its own layers": {"speculative_config": '{"method": "self", "layers": 1, "num_speculative_tokens": 2}'},
}


@pytest.mark.parametrize("more", WAYS.values(), ids=WAYS)
def test_requests_say_what_the_models_of_their_adapters_say(
    served: tuple[Path, dict[str, Path], list[list[int]]], more: dict[str, Any]
) -> None:
    folder, paths, said = served
    assert len({tuple(tokens) for tokens in said}) == len(said), "the adapters are meant to change the text"
    with LLM(folder, enable_lora=True, **(SMALL | more)) as llm:
        assert greedy(llm, [PROMPT] * len(said), requests(paths)) == said
        for lora, want in zip(requests(paths), said, strict=True):
            assert greedy(llm, [PROMPT], lora) == [want], "with a warm prefix, alone"


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("kinds", "length"), [(("dora", "saved"), 3), pytest.param(SERVED, 20, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_requests_say_the_same_on_the_gpu_backend(
    kinds: tuple[str, ...], length: int, served: tuple[Path, dict[str, Path], list[list[int]]]
) -> None:
    folder, paths, _ = served
    missing = tuple(f"{op}=reference" for op in REGISTRY if op not in TRITON_OPS)
    gpu = {"max_num_batched_tokens": 128, "device": "cuda", "ops": missing, "enforce_eager": True}
    loras = requests({kind: paths[kind] for kind in kinds})
    found = []
    for more in ({"device": "reference"}, gpu):
        with LLM(folder, enable_lora=True, **(SMALL | more)) as llm:
            found.append(greedy(llm, [PROMPT[:length]] * len(loras), loras, 2))
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0]}) > 1


def test_what_an_adapter_held_is_given_back_and_the_next_one_finds_its_place_clean(
    served: tuple[Path, dict[str, Path], list[list[int]]],
) -> None:
    folder, paths, said = served
    with LLM(folder, enable_lora=True, **(SMALL | {"max_loras": 1})) as llm:
        engine = llm.engine.engine
        assert engine.model.adapters is not None
        extensions = engine.model.adapters.extensions
        taken = []
        for name, want in zip(paths, said[1:], strict=True):
            assert not engine.adapting.change(ChangeAdapter("a", str(paths[name]))).error
            taken.append(extensions.nbytes)
            assert greedy(llm, [PROMPT], LoRARequest("a", 1, str(paths[name]))) == [want], name
        assert len(set(taken)) == len(taken) and min(taken) > 0
        assert not engine.adapting.change(ChangeAdapter("a", "")).error
        assert extensions.nbytes == 0 and greedy(llm, [PROMPT]) == said[:1]


def test_adapters_that_take_more_than_there_is_are_refused(
    served: tuple[Path, dict[str, Path], list[list[int]]],
) -> None:
    folder, paths, said = served
    with pytest.raises(QuireError, match="--lora-extra-bytes -1 must not be negative"):
        flat_config(lora_extra_bytes=-1).validate()
    with LLM(folder, enable_lora=True, **(SMALL | {"lora_extra_bytes": 40_000})) as llm:
        engine = llm.engine.engine
        assert not engine.adapting.change(ChangeAdapter("dora", str(paths["dora"]))).error
        changed = engine.adapting.change(ChangeAdapter("saved", str(paths["saved"])))
        assert "--lora-extra-bytes 40000" in changed.error and changed.adapters == ("dora",)
        assert greedy(llm, [PROMPT], LoRARequest("dora", 1, str(paths["dora"]))) == [said[1]]


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], None], str]] = {}


def broken(kind: str, message: str) -> Callable[[Any], Any]:
    def add(change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Any:
        BROKEN[change.__name__] = kind, change, message
        return change

    return add


def end(tensors: dict[str, Tensor], ending: str) -> str:
    return next(name for name in tensors if name.endswith(ending))


@broken("dora", "lora_magnitude_vector is there or not, against use_dora")
def without_magnitude(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors[end(tensors, "magnitude_vector")]


@broken("dora", "lora_magnitude_vector of .* below zero")
def below_zero(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[end(tensors, "magnitude_vector")][0] = -1.0


@broken("dora", r"magnitude_vector: .* \[5\] does not fit")
def short_magnitude(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[end(tensors, "magnitude_vector")] = torch.ones(5)


@broken("dora", "against use_dora")
def magnitude_without_dora(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["use_dora"] = False


@broken("bias", "against lora_bias")
def bias_without_config(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["lora_bias"] = False


@broken("saved", r"lm_head.weight: .* \[98, 64\] does not fit")
def resized(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.lm_head.weight"][:98].clone()


@broken("saved", "modules_to_save: names lm_head, of which there is no tensor")
def not_saved(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["base_model.model.lm_head.weight"]


@broken("saved", "modules_to_save: model.norm is not the table of tokens or the output head")
def a_norm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.ones(64)


@broken("tokens", "trainable_token_indices: does not say which tokens")
def tokens_unsaid(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config["trainable_token_indices"]


@broken("tokens", "trainable_token_indices: .* needs token ids from 0 to 98")
def tokens_beyond(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["trainable_token_indices"] = [3, 9, 99]


@broken("tokens", "trainable_token_indices: names a token twice")
def tokens_twice(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["trainable_token_indices"] = [3, 9, 3]


@broken("tables", "base_layer.weight is not this model's")
def another_base(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.base_layer.weight"] += 1.0


@broken("tables", "adapted in 2 ways")
def two_ways(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.ones(99, 64)


def test_a_broken_adapter_is_refused_and_the_old_one_stays(
    served: tuple[Path, dict[str, Path], list[list[int]]], tmp_path: Path
) -> None:
    folder, paths, said = served
    with LLM(folder, enable_lora=True, **(SMALL | {"max_loras": 1})) as llm:
        engine = llm.engine.engine
        for i, kind in enumerate(SERVED):
            assert not engine.adapting.change(ChangeAdapter("a", str(paths[kind]))).error
            for what, (source, change, message) in BROKEN.items():
                if source != kind:
                    continue
                layout = Layout.__new__(Layout)
                layout.tensors = {k: t.clone() for k, t in load_file(paths[kind] / "adapter_model.safetensors").items()}
                layout.config = json.loads((paths[kind] / "adapter_config.json").read_text())
                change(layout.tensors, layout.config)
                with pytest.raises(QuireError, match=message):
                    raise QuireError(
                        engine.adapting.change(ChangeAdapter("a", str(layout.write(tmp_path / what)))).error
                    )
            assert greedy(llm, [PROMPT], LoRARequest("a", 1, str(paths[kind]))) == [said[1 + i]], kind
