"""Which ways to be parallel go with which features: found by running every pair. `make pairs` writes
docs/techniques/parallel-pairs.md.

A pair is right when requests of all kinds, arriving at random steps, get the tokens of one process with the same
feature, in f32; and when a request that is asked again alone gets the same bits. Or the start refuses it, and says why:
what the table of exclusions says, or that sizes do not divide.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from assistants import write_assistant
from engine_answers import Answer
from foreign_weights import Parts, dequantize, gptq, quantize, replace_linears
from gemma_variants import GEMMAS
from head_folders import write_dflash, write_eagle, write_medusa
from lora_adapters import LINEARS
from model_variants import CHUNKED, ENCODERS, LATENTS, MIXTURES
from mtp_models import WITH_MTP, write_mtp
from oracle import random_model, write
from paths import DOCS
from peft_layouts import Layout
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.exclusions.features import ADAPTER_TABLES, WINDOWS
from quire.core.exclusions.table import TABLE, check_known
from quire.core.request import Request
from quire.core.speculation import HEADS
from quire.engine.local import LocalEngine
from quire.model.describe import ModelFacts, describe
from quire.model.known import known_of, known_of_device
from quire.ops.choice import choose
from shaped import shaped_requests
from speculation_methods import (
    METHODS,
    PYDOC,
    TINY,
    answers,
    requests_of,
    write_adapter_of_the_embedded,
    write_speaking,
    write_words,
)
from vision_prompts import Made, write_made

PAGE = DOCS / "techniques" / "parallel-pairs.md"
BEGIN, END = "<!-- ways x features: make pairs -->\n", "<!-- end of ways x features -->\n"

WAYS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 3": {"tensor_parallel_size": 3},
    "tensor 4": {"tensor_parallel_size": 4},
    "tensor 2, sequence": {"tensor_parallel_size": 2, "enable_sequence_parallel": True},
    "tensor 2, invariant": {"tensor_parallel_size": 2, "rank_invariant": True},
    "stages 2": {"pipeline_parallel_size": 2},
    "context 2": {"context_parallel_size": 2},
    "tensor 2, stages 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tensor 2, context 2": {"tensor_parallel_size": 2, "context_parallel_size": 2},
    "stages 2, context 2": {"pipeline_parallel_size": 2, "context_parallel_size": 2},
    "tensor 2, whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "experts 2": {"expert_parallel_size": 2},
}
"""Ways to be parallel, by what they are called in the table. A replica is an engine by itself: it has no column."""
OWN_LAYER = {"method": "mtp", "num_speculative_tokens": 3}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preemption": {"num_blocks": 8, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "eager": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 1": {"block_size": 1, "num_blocks": 2048},
    "KV store": {"kv_store": "kept", "num_blocks": 12, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "nf4": {"quantization": "nf4"},
    "GPTQ": {"model": "gptq"},
    "LoRA": {"enable_lora": True},
    "LoRA: DoRA, own tables": {"enable_lora": True, "model": "llama"},
    "windows": {"model": "windows"},
    "convolutions": {"model": "convolutions"},
    "convolutions, int8 KV": {"model": "convolutions", "kv_cache_dtype": "int8"},
    "convolutions, ngram": {"model": "convolutions", "speculative_config": METHODS["ngram"]},
    "states": {"model": "states"},
    "states, chunks of 7": {"model": "states", "max_num_batched_tokens": 7, "max_num_seqs": 5},
    "states, preemption": {
        "model": "states",
        "num_blocks": 40,
        "num_state_slots": 4,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 16,
    },
    "states, no prefix cache": {"model": "states", "enable_prefix_caching": False},
    "states, blocks of 1": {"model": "states", "block_size": 1, "num_blocks": 2048},
    "states, KV store": {
        "model": "states",
        "kv_store": "kept",
        "num_blocks": 40,
        "num_state_slots": 6,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 16,
    },
    "states, int8 KV": {"model": "states", "kv_cache_dtype": "int8"},
    "states, int8": {"model": "states", "quantization": "int8"},
    "states, layers on disk": {"model": "states", "weight_offload": "disk", "weight_memory_gib": 0.0025},
    "structured, states": {"model": "states_of_words"},
    "states, ngram": {"model": "states", "speculative_config": METHODS["ngram"]},
    "states, suffix": {"model": "states", "speculative_config": METHODS["suffix"]},
    "states, draft model": {"model": "states", "speculative_config": METHODS["draft_model"]},
    "states and experts": {"model": "hybrid_experts"},
    "states alone": {"model": "decays"},
    "chunks, experts whose scores scale rows": {"model": "chunks"},
    "experts beside an MLP": {"model": "beside_an_mlp"},
    "experts that pass a layer by": {"model": "passing"},
    "per-layer embeddings": {"model": "layer_inputs"},
    "experts": {"model": "experts"},
    "experts, int8": {"model": "experts", "quantization": "int8"},
    "experts, int8 KV": {"model": "experts", "kv_cache_dtype": "int8"},
    "experts, ngram": {"model": "experts", "speculative_config": METHODS["ngram"]},
    "latents": {"model": "latents"},
    "indexers": {"model": "indexers"},
    "indexers, ngram": {"model": "indexers", "speculative_config": METHODS["ngram"]},
    "shared indexers": {"model": "shared indexers"},
    "block indexers": {"model": "block indexers"},
    "T5": {"model": "encoder"},
    "T5, ngram": {"model": "encoder", "speculative_config": METHODS["ngram"]},
    "T5, draft model": {"model": "encoder", "speculative_config": METHODS["draft_model"]},
    "images": {"model": "qwen3_vl"},
    "images, rows that see each other": {"model": "gemma3"},
    "images and experts": {"model": "qwen3_vl_moe"},
    "images, suffix": {"model": "qwen3_vl", "speculative_config": METHODS["suffix"]},
    "images, draft model": {"model": "qwen3_vl", "speculative_config": METHODS["draft_model"]},
    "images and experts, eagle3": {"model": "qwen3_vl_moe", "speculative_config": METHODS["eagle3"]},
    "structured": {},
    "structured, ngram": {"speculative_config": METHODS["ngram"]},
    "ngram": {"speculative_config": METHODS["ngram"]},
    "suffix": {"speculative_config": METHODS["suffix"]},
    "suffix tree": {"speculative_config": METHODS["suffix_tree"]},
    "self int4": {"speculative_config": METHODS["self_int4"]},
    "self layers": {"speculative_config": METHODS["self_layers"]},
    "draft model": {"speculative_config": METHODS["draft_model"]},
    "draft tree": {"speculative_config": METHODS["draft_model_tree"]},
    "draft model, windows": {"model": "windows", "speculative_config": METHODS["draft_model"]},
    "medusa": {"speculative_config": METHODS["medusa"]},
    "eagle": {"speculative_config": METHODS["eagle"]},
    "eagle3": {"speculative_config": METHODS["eagle3"]},
    "dflash": {"speculative_config": METHODS["dflash"]},
    "mtp": {"model": "glm4_moe", "speculative_config": OWN_LAYER},
    "mtp, latents": {"model": "deepseek_v3", "speculative_config": OWN_LAYER},
    "mtp, states": {"model": "qwen3_next", "speculative_config": OWN_LAYER},
    "mtp, scans": {"model": "nemotron_h", "speculative_config": OWN_LAYER},
    "mtp, assistant": {"model": "gemma4", "speculative_config": OWN_LAYER | {"model": "assistant"}},
}
"""What runs beside it; `model` is a tiny one, or else the embedded one."""
IMAGE_MODELS = ("qwen3_vl", "qwen3_vl_moe", "gemma3")
"""Models that take images."""
SIZES = re.compile("cannot be split over|bytes of KV cache|do not lie on group borders")
"""Reasons that are numbers of this model and this way, which no table has."""
ROUNDED = ("int8", "int4", "nf4", "GPTQ", "int8 KV", "fp8 KV", "latents", "convolutions, int8 KV", "states, int8",
           "states, int8 KV", "experts, int8", "experts, int8 KV", "mtp, latents",
           "indexers", "indexers, ngram", "shared indexers")  # fmt: skip
"""Where a difference in the last bit of a sum moves an integer by one, tokens of one process are not to be expected."""


class Folders:
    """Tiny models and an adapter, written when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, ModelFacts] = {}

    def __call__(self, name: str) -> str:
        """The folder of a model, or of the adapter "lora"."""
        path = self.root / name
        if path.exists():
            return str(path)
        path.mkdir(parents=True)
        if name == "lora":
            return write_adapter_of_the_embedded(path)
        if name == "dora":
            layout = Layout(random_model("llama", max_position_embeddings=256), 1)
            return str(layout.low_rank(*LINEARS, dora=True).saved("embed_tokens", "lm_head").write(path))
        if name in IMAGE_MODELS:
            return str(write_made(name, path).folder)
        if name == "gptq":
            return write_gptq(path)
        if name == "assistant":
            write_assistant(path, "gemma4")
            return str(path)
        if " of " in name:
            return self._beside(path, *name.split(" of "))
        if name in WITH_MTP:
            write_mtp(path, name)
            return str(path)
        if name == "draft":
            write(path, "llama", 3, num_hidden_layers=1, vocab_size=104, dtype=torch.bfloat16)
            return str(write_words(path, 99))
        if name == "medusa":
            return str(write_medusa(path, 256, 6144))
        if name == "dflash":
            return str(write_dflash(path, 256, 6144, (0, 2)))
        if name.startswith("eagle"):
            return str(write_eagle(path, name, 256, 6144, 3072 if name == "eagle3" else 0))
        if name == "states_of_words":
            return str(write_speaking(path, "states"))
        families = TINY | {"gemma4": GEMMAS["gemma4"], "encoder": ("t5", ENCODERS["t5"][1]), "llama": ("llama", {})}
        families |= {"hybrid_experts": MIXTURES["qwen3_next"], "chunks": CHUNKED["llama4"]}
        families |= {"decays": MIXTURES["minimax_factors"], "beside_an_mlp": GEMMAS["gemma4_experts"]}
        families |= {"passing": LATENTS["longcat_flash"], "layer_inputs": GEMMAS["gemma4_layer_inputs"]}
        family, facts = families[name]
        more = {} if name == "encoder" else {"max_position_embeddings": 256}
        write(path, family, **facts | more, dtype=torch.float32)
        return str(write_words(path, 99))

    def _beside(self, path: Path, drafts: str, model: str) -> str:
        """What drafts for a model that takes images or has an encoder, whose tokenizer it has."""
        spec = describe(self(model)).spec
        if drafts == "draft" and spec.encoder_decoder:
            write(path, "t5", 3, **ENCODERS["t5"][1] | {"num_decoder_layers": 1}, dtype=torch.float32)
            return str(write_words(path, 99))
        if drafts == "draft":
            write(path, "llama", 3, num_hidden_layers=1, vocab_size=spec.vocab_size, dtype=torch.bfloat16)
            shutil.copy(Path(self(model)) / "tokenizer.json", path)
            return str(path)
        return str(write_eagle(path, drafts, spec.hidden, spec.vocab_size))


def write_gptq(folder: Path) -> str:
    """A tiny model in groups of 32 codes of 4 bits."""

    def convert(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        found = quantize(w, 4, 32, False, torch.float16)
        return gptq(4, 32)(*found), dequantize(*found)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    replace_linears(folder, config, convert)
    return str(write_words(folder, 99))


def options_of(feature: str, folders: Folders) -> dict[str, Any]:
    """Of the engine."""
    options = {"model": PYDOC, "dtype": "float32", "max_model_len": 128, "threads": 1} | FEATURES[feature]
    if options["model"] != PYDOC:
        options["model"] = folders(options["model"])
    if "kv_store" in options:
        options["kv_store"] = str(folders.root / options["kv_store"])
    if options.get("enable_lora"):
        options["lora_modules"] = (f"a={folders('lora' if options['model'] == PYDOC else 'dora')}",)
    if "speculative_config" in options:
        asked = options["speculative_config"] | {"adaptive": False}
        if asked["method"] in (*HEADS, "draft_model"):
            of = f" of {FEATURES[feature]['model']}" if feature.startswith(("images", "T5,")) else ""
            drafts = PYDOC if options["model"] == PYDOC else folders(f"draft{of}")
            asked["model"] = drafts if asked["method"] == "draft_model" else folders(f"{asked['method']}{of}")
        elif "model" in asked:
            asked["model"] = folders(asked["model"])
        options["speculative_config"] = json.dumps(asked)
    return options


def asked_of(feature: str, folders: Folders) -> list[Request]:
    """A few requests that this feature can serve."""
    if feature.startswith("structured"):
        return shaped_requests(9)
    if feature.startswith("images"):
        name = FEATURES[feature]["model"]
        return Made(name, Path(folders(name))).requests()
    tiny = FEATURES[feature].get("model", PYDOC) != PYDOC
    requests = requests_of(99 if tiny else 6144, "a" if "LoRA" in feature else "")
    return [r for r in requests if not feature.startswith("T5") or r.params.prompt_logprobs is None][:9]


def found(feature: str, way: dict[str, Any], folders: Folders) -> tuple[dict[str, list[Answer]], list[Answer]]:
    """Answers of all requests that trickle in, and of the first one asked again alone. `ConfigError` if refused."""
    requests = asked_of(feature, folders)
    with closing(LocalEngine(flat_config(**options_of(feature, folders) | way))) as engine:
        return answers(engine, requests), answers(engine, requests[:1])[requests[0].id]


def excluded(feature: str, way: dict[str, Any], folders: Folders) -> str:
    """Why the table of exclusions refuses the pair, from options and headers; "" where it does not."""
    options = options_of(feature, folders)
    try:
        config = flat_config(**options | way)
        if options["model"] not in folders.known:
            folders.known[options["model"]] = describe(options["model"])
        choice = choose(config.device)
        known = known_of(config, folders.known[options["model"]])
        check_known(config.features, known | known_of_device(config, choice.backend, choice.chosen))
    except ConfigError as error:
        return error.message
    return ""


def of_the_table(said: str) -> bool:
    """Whether a row says it of something that is found after the headers: in an adapter, or once steps are planned."""
    rows = [row for row in TABLE if row.a is ADAPTER_TABLES or row.b is WINDOWS]
    return any(said.endswith(row.message({}, "" if row.a.option else ":").lstrip(":")) for row in rows)


def right(feature: str, way: dict[str, Any], folders: Folders, golden: dict[str, Any]) -> str:
    """ "yes", or why the start refuses it. AssertionError where an answer is wrong."""
    if feature not in golden:
        golden[feature] = found(feature, {}, folders)[0]
    try:
        together, alone = found(feature, way, folders)
    except ConfigError as error:
        asked = excluded(feature, way, folders)
        assert error.message == (asked or error.message), "another reason than the table's"
        assert asked or SIZES.search(error.message) or of_the_table(error.message), "no row says so"
        return error.message.replace(f"{folders.root}/", "")
    assert not excluded(feature, way, folders), "the table refuses what can start"
    first = next(iter(together.values()))
    assert [each.bits() for each in first] == [each.bits() for each in alone], "alone a request has other bits"
    if feature not in ROUNDED:
        for name, rows in golden[feature].items():
            assert [row.tokens for row in rows] == [row.tokens for row in together[name]], name
    return "yes"


def table(cells: dict[tuple[str, str], str]) -> str:
    """Rows are features, columns ways; what is refused has a number, and the reasons stand below."""
    reasons: list[str] = []
    lines = ["| | " + " | ".join(WAYS) + " |", "|---" * (1 + len(WAYS)) + "|"]
    for feature in FEATURES:
        row = []
        for way in WAYS:
            cell = cells[feature, way]
            if cell != "yes":
                reasons += [] if cell in reasons else [cell]
                cell = f"({reasons.index(cell) + 1})"
            row.append(cell)
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    told = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", "Refused at the start:", "", *told, ""]) if told else "\n".join([*lines, ""])


def told(text: str) -> dict[tuple[str, str], str]:
    """The cells of the table in `text`, reasons in the place of their numbers."""
    lines = text.split(BEGIN)[1].split(END)[0].splitlines()
    reasons = [line.split(". ", 1)[1] for line in lines if line[:1].isdigit()]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    ways = rows[0][1:]
    cells = {(row[0], way): cell for row in rows[2:] for way, cell in zip(ways, row[1:], strict=True)}
    return {pair: reasons[int(cell.strip("()")) - 1] if cell != "yes" else cell for pair, cell in cells.items()}


def main(words: list[str]) -> int:
    """Try all pairs, or only those that the table lacks (`new`), and write the table."""
    text, golden = PAGE.read_text(), dict[str, Any]()
    cells = told(text) if words == ["new"] else {}
    with tempfile.TemporaryDirectory() as root:
        for feature in FEATURES:
            for way, options in WAYS.items():
                if (feature, way) not in cells:
                    cells[feature, way] = right(feature, options, Folders(Path(root)), golden)
                    print(f"{feature} x {way}: {cells[feature, way]}", flush=True)
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(cells) + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
