"""A tool as a measured process that compresses: `python tool_process.py TOOL JOB`, in the environment of the tool.

Only the function of the tool imports it, and nothing else imports quire. JOB is JSON: `source` (a folder), `rows` (a
JSON file of calibration token ids), `out` (a folder that is not there yet), `method`, and `recipe` for quire. What was
measured is the last line of stdout, JSON: `seconds` from the imports' end to the written folder, `cpu` those that
processors worked for it, `peak` bytes of the process at most, of which `imports` are there before the work.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BATCH = 8
"""Rows that go through the model together, as quire has it."""


class Job(NamedTuple):
    """What is asked for."""

    source: str
    rows: list[list[int]]
    out: str
    recipe: Any


Methods = dict[str, Callable[[Job], None]]


def quire() -> Methods:
    """`quire compress` without its passport; the text is that of the recipe, which made the rows of the other tools."""
    from quire.compress.pipelines.recipe_runner import compress
    from quire.compress.recipes.parser import recipe_of

    def make(job: Job) -> None:
        compress(job.source, Path(job.out), recipe_of(job.recipe, "the benchmark's recipe"), lambda _: None)

    return {"compress": make}


def autoawq() -> Methods:
    """AutoAWQ: 4 bits with zeros, in groups of 64 columns."""
    import torch
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer
    from transformers import AutoTokenizer

    class Restoring(AwqQuantizer):  # type: ignore[misc]
        """Version 0.2.9 keeps the weights before it tries scales on them, by `.cpu()`: on a CPU that is no copy, and
        the first scales stay in them without an inverse anywhere."""

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: torch.nn.Module, *others: Any, **named: Any
        ) -> Any:
            plain = module2inspect.state_dict
            module2inspect.state_dict = lambda: {name: t.clone() for name, t in plain().items()}  # type: ignore[method-assign]
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *others, **named)
            finally:
                del module2inspect.state_dict

    def make(job: Job) -> None:
        model = AutoAWQForCausalLM.from_pretrained(job.source, device_map="cpu")
        config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
        tokenizer, length = AutoTokenizer.from_pretrained(job.source), len(job.rows[0])
        text = {"calib_data": job.rows, "max_calib_samples": len(job.rows), "max_calib_seq_len": length}
        model.quantize(tokenizer, quant_config=config, quantizer_cls=Restoring, **text)
        model.save_quantized(job.out)
        tokenizer.save_pretrained(job.out)

    return {"awq4": make}


def gptqmodel() -> Methods:
    """GPTQModel: GPTQ to 4 bits; without act-order the tool still orders whole groups by activation, its default."""
    from gptqmodel import GPTQModel, QuantizeConfig

    def method(act_order: bool) -> Callable[[Job], None]:
        def make(job: Job) -> None:
            config = QuantizeConfig(bits=4, group_size=64, desc_act=act_order, device="cpu")
            model = GPTQModel.load(job.source, config)
            rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.rows]
            model.quantize(rows, batch_size=BATCH)
            model.save(job.out)

        return make

    return {"gptq4_g64": method(act_order=False), "gptq4_act_order": method(act_order=True)}


def llmcompressor() -> Methods:
    """llm-compressor: recipes of its modifiers."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    linear: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
    # Of pruning the targets are layers, whose matrices are pruned; of a matrix named itself none is.
    half: dict[str, Any] = {"targets": [r"re:model\.layers\.\d+$"], "sparsity": 0.5, "mask_structure": "2:4"}

    def integers(group: int, symmetric: bool = True, bits: int = 4) -> dict[str, Any]:
        args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group)
        return {"ignore": ["lm_head"], "config_groups": {"a": QuantizationScheme(targets=["Linear"], weights=args)}}

    recipes: dict[str, tuple[Callable[[], list[Any]], bool]] = {
        "rtn4": (lambda: [QuantizationModifier(**integers(64))], False),
        "rtn8": (lambda: [QuantizationModifier(**integers(64, bits=8))], False),
        "gptq4_g64": (lambda: [GPTQModifier(**integers(64))], True),
        "gptq4_g32": (lambda: [GPTQModifier(**integers(32))], True),
        "awq4": (lambda: [AWQModifier(), QuantizationModifier(**integers(64, symmetric=False))], True),
        "smoothquant": (
            lambda: [SmoothQuantModifier(smoothing_strength=0.5), QuantizationModifier(scheme="W8A8", **linear)], True
        ),
        "fp8_dynamic": (lambda: [QuantizationModifier(scheme="FP8_DYNAMIC", **linear)], False),
        "fp8_static": (lambda: [QuantizationModifier(scheme="FP8", **linear)], True),
        "sparsegpt": (lambda: [SparseGPTModifier(**half)], True),
        "wanda": (lambda: [WandaPruningModifier(**half)], True),
    }  # fmt: skip
    return {name: oneshot(modifiers, reads) for name, (modifiers, reads) in recipes.items()}


def oneshot(modifiers: Callable[[], list[Any]], reads: bool) -> Callable[[Job], None]:
    """A recipe of llm-compressor's `modifiers`; `reads`: whether they want text."""
    from datasets import Dataset
    from llmcompressor import oneshot as run_recipe
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Version 0.14.0.1 pins activations for an accelerator, and fails where there is none.
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None

    def make(job: Job) -> None:
        model = AutoModelForCausalLM.from_pretrained(job.source, dtype="auto")
        text: dict[str, Any] = {}
        if reads:
            rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.rows]
            text = {"dataset": Dataset.from_list(rows), "num_calibration_samples": len(rows), "batch_size": BATCH,
                    "max_seq_length": len(job.rows[0]), "shuffle_calibration_samples": False}  # fmt: skip
        run_recipe(model=model, recipe=modifiers(), **text)
        model.save_pretrained(job.out, save_compressed=True)
        AutoTokenizer.from_pretrained(job.source).save_pretrained(job.out)

    return make


def bitsandbytes() -> Methods:
    """bitsandbytes: NF4 in blocks of 64, their scales quantized too."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def make(job: Job) -> None:
        four: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(**four, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(
            job.source, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(job.out)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(job.source) / name, Path(job.out) / name)

    return {"nf4": make}


TOOLS: dict[str, Callable[[], Methods]] = {
    "quire": quire, "autoawq": autoawq, "gptqmodel": gptqmodel, "llmcompressor": llmcompressor,
    "bitsandbytes": bitsandbytes,
}  # fmt: skip


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. Linux only."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    """Do the job with the method that it names, and say what that took."""
    asked = json.loads(sys.argv[2])
    job = Job(asked["source"], json.loads(Path(asked["rows"]).read_text()), asked["out"], asked.get("recipe"))
    method = TOOLS[sys.argv[1]]()[asked["method"]]
    imports = memory("VmRSS")
    began, worked = time.perf_counter(), time.process_time()
    method(job)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    print(json.dumps({"seconds": seconds, "cpu": cpu, "imports": imports, "peak": memory("VmHWM")}), flush=True)


if __name__ == "__main__":
    main()
