"""Writing of tensors as a Hugging Face folder, which is there as a whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.compress.checkpoint.tensors import LazyTensors
from quire.core.errors import ConfigError, ModelError
from quire.core.files import sync, sync_tree
from quire.text.gguf_tokenizer import read_tokenizer
from quire.text.sentence_config import sentence_files

SHARD_BYTES = 4 << 30
TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates that have names."""
TOKENIZER_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", TEMPLATES,
)  # fmt: skip
"""What lies beside the weights and says how text goes in and comes out, where a folder has it."""
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8
"""Bytes that a header is padded to, so that tensors lie aligned in a map of the file."""


def write_folder(
    out: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: Path, dtype: torch.dtype
) -> None:
    """Write a model folder to `out`: safetensors in shards of at most 4 GiB, config.json, and files beside them.

    `tensors` by their names on disk, floating-point ones written as `dtype`, one at a time: the memory is that of the
    largest. `config`: of config.json, which gets the dtype. `source`: folder or GGUF file that tokenizer, chat
    templates, generation_config.json and modules of vectors come from. Everything is written beside `out`, synced and
    renamed.
    `ConfigError` when `out` is there and not empty, or when it cannot be written: then nothing of it is left.
    """
    with atomic_folder(out) as folder:
        write_tensors(folder, tensors, dtype)
        write_json(folder / "config.json", with_dtype(config, dtype))
        copy_tokenizer_files(source, folder)


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Make a folder to write to, which becomes `out` at the end; nothing of it is left when the end is not reached.

    A folder that a killed process left is removed first. `ConfigError` as of `write_folder`.
    """
    out = Path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give another place or remove it")
    unfinished = out.parent / f".{out.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        sync_tree(unfinished)
        unfinished.rename(out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {_os_error_reason(error)}; nothing of it was kept") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _os_error_reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full, free some space" if full else error.strerror or str(error)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of config.json with the dtype of the weights, under the name that they have for it."""
    name = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, name: str(dtype).removeprefix("torch.")}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as JSON that people can read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer, chat templates, generation config and modules of vectors of `source`; of a GGUF file, write
    its vocabulary and chat templates."""
    if source.is_file():
        held = read_tokenizer(source)
        held.backend.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", held.named)
        for name, text in held.templates.items():
            if not re.fullmatch(r"[\w.-]+", name):
                raise ModelError(f"{source}: the chat template {name!r} cannot be a file of that name; rename it")
            path = folder / ("chat_template.jinja" if name == "default" else f"{TEMPLATES}/{name}.jinja")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    for name in (*TOKENIZER_FILES, *sentence_files(source), *(path.name for path in source.glob("*.tiktoken"))):
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Write `tensors` as safetensors: one file, or shards of at most 4 GiB and their index. `dtype` None: in their
    dtypes."""
    shards, size = [dict[str, tuple[torch.dtype, tuple[int, ...]]]()], 0
    for name in tensors:
        kind, shape = _dtype_and_shape(tensors, name, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = kind, shape
        size += nbytes
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(count)]
    for file, shard in zip(names, shards, strict=True):
        with (folder / file).open("wb") as opened:
            _write_shard(opened, tensors, shard)
    if count > 1:
        total = sum(math.prod(shape) * kind.itemsize for shard in shards for kind, shape in shard.values())
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def _dtype_and_shape(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype | None
) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype that a tensor is written in, and its shape; of `LazyTensors` ones it is not read for that."""
    if isinstance(tensors, LazyTensors):
        own, shape = tensors.dtype_and_shape(name)
    else:
        own, shape = tensors[name].dtype, tuple(tensors[name].shape)
    return (dtype if dtype is not None and own.is_floating_point else own), shape


def _write_shard(
    file: BinaryIO, tensors: Mapping[str, Tensor], shard: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, shape) in shard.items():
        end = at + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": SAFETENSORS[kind], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, (kind, _) in shard.items():
        data = tensors[name].detach().to(kind).contiguous()
        file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        del data
        if isinstance(tensors, LazyTensors):
            tensors.give_back()
