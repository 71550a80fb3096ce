"""Makes peft_adapters.safetensors: adapters that PEFT itself wrote for tiny models, and PEFT's logits with them.

Run with peft installed: `python tests/data/make_peft_adapters.py`. Of each model its weights ("llama.base.NAME"), the
adapter's ("llama.adapter.NAME") and logits of the tokens 3..14 ("llama.want") are kept, as metadata both configs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
from oracle import random_model  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 32}
MODELS = {
    "llama": (SIZES | {"intermediate_size": 64}, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")),
    "gpt2": (SIZES, LoraConfig(r=8, lora_alpha=4, use_rslora=True, fan_in_fan_out=True,
                               target_modules=["c_attn", "c_proj", "c_fc"])),
}  # fmt: skip
TOKENS = list(range(3, 15))


def main() -> None:
    """Write the file."""
    kept: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, (facts, lora) in MODELS.items():
        model = random_model(name, **facts)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
        kept |= {f"{name}.base.{n}": t.bfloat16().clone() for n, t in model.state_dict().items()}
        tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
        kept.pop(f"{name}.base.{tied}", None)
        metadata[f"{name}.config"] = model.config.to_json_string()
        torch.manual_seed(1)
        adapted = get_peft_model(model, lora)
        with torch.no_grad():
            for n, p in adapted.named_parameters():
                if "lora_" in n:
                    p.copy_((torch.randn_like(p) * 0.2).bfloat16())
            kept[f"{name}.want"] = adapted(torch.tensor(TOKENS)[None], use_cache=False).logits[0].clone()
        with tempfile.TemporaryDirectory() as folder:
            adapted.save_pretrained(folder)
            written = load_file(Path(folder) / "adapter_model.safetensors")
            kept |= {f"{name}.adapter.{n}": t.bfloat16() for n, t in written.items()}
            metadata[f"{name}.adapter_config"] = json.dumps(
                json.loads((Path(folder) / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
            )
    save_file(kept, HERE / "peft_adapters.safetensors", metadata)


if __name__ == "__main__":
    main()
