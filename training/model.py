"""A lean Llama: the same mathematics and weight names as the Hugging Face module, without its generality."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The model's sizes, under the names config.json uses."""

    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class Norm(nn.Module):
    """Root mean square normalization."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        normal: Tensor = functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        return normal


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups, self.size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from every position to itself and the ones before it."""
        rows, length, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, length, self.heads, self.size).transpose(1, 2), rotary)
        k = rotate(self.k_proj(x).view(rows, length, self.groups, self.size).transpose(1, 2), rotary)
        v = self.v_proj(x).view(rows, length, self.groups, self.size).transpose(1, 2)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return output


class Mlp(nn.Module):
    """The SwiGLU feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated projection."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Apply attention, then the feed-forward network."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Llama(nn.Module):
    """The whole model; its head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the normalized hidden state of every position."""
        x: Tensor = self.embed_tokens(tokens)
        rotary = rotary_tables(self.shape, tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = layer(x, rotary)
        normal: Tensor = self.norm(x)
        return normal

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's scores for some hidden states."""
        return functional.linear(hidden, self.embed_tokens.weight)


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the first `length` positions."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), shape.rope_theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of dimensions by its position's angle."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def export_model(model: Llama, folder: Path, eos: int, pad: int) -> None:
    """Write the model as a Hugging Face folder, its weights in bf16."""
    shared = {"eos_token_id": eos, "pad_token_id": pad}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **asdict(model.shape),
        **shared,
    }
    generation = {"eos_token_id": [eos, pad], "pad_token_id": pad, "do_sample": False, "max_new_tokens": 128}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.named_parameters()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
