"""Command line flags made from the fields of the option structs: one source for names, types and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import typer

from quire.core.config import (
    ACTIVATIONS,
    DEVICES,
    DTYPES,
    KV_ALIASES,
    KV_DTYPES,
    LOAD_FORMATS,
    POLICIES,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from quire.core.errors import ConfigError
from quire.engine.options import KNOWN, UNBUILT, engine_config
from quire.server.options import GENERATION_CONFIGS, ServerOptions

T = TypeVar("T", bound=msgspec.Struct)
Struct = type[msgspec.Struct]
ENGINE: dict[str, Struct] = {
    "Model": ModelConfig,
    "KV cache": CacheConfig,
    "Scheduler": SchedulerConfig,
    "Device": DeviceConfig,
    "LoRA": LoraConfig,
}
SERVER: dict[str, Struct] = {"Server": ServerOptions}

SHORT = {"model": "-m", "max_model_len": "-c", "threads": "-t"}

CHOICES = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_DTYPES,
    "load_format": LOAD_FORMATS,
    "scheduling_policy": POLICIES,
    "device": DEVICES,
    "generation_config": GENERATION_CONFIGS,
    "isa": ("auto", "amx", "avx512", "avx2", "portable"),
    "quantization": ("none", "int8", "int4", "nf4", "mxfp4", "fp8"),
    "activations": ACTIVATIONS,
    "group_size": ("32", "64", "128"),
}

HELP = {
    "model": "Folder or hub name of the model; the embedded one if not given.",
    "tokenizer": "Folder of another tokenizer.",
    "served_model_name": "Name in replies and requests; may be given several times.",
    "dtype": "Number format of unquantized weights.",
    "quantization": "Quantize 16-bit weights while loading; fp8 needs a GPU.",
    "group_size": "Columns that share one scale when quantizing.",
    "max_model_len": "Longest sequence in tokens, or auto: what the model was made for.",
    "activations": "Integers that activations become before quantized weights; auto = as the file asks.",
    "load_format": "dummy makes up random weights for the shapes in config.json.",
    "cache_packed": "Keep packed weights for the next start: auto = beside the model, off, or a folder.",
    "seed": "Start of the random numbers for requests that bring no seed.",
    "chat_template": "File with another chat template (jinja).",
    "generation_config": "Sampling defaults: auto = the model's own, vllm = vLLM's.",
    "block_size": "Tokens in one block of the KV cache: a power of two up to 128.",
    "kv_cache_dtype": "Number format of keys and values; auto = that of the weights; int8, fp8: with scales.",
    "kv_cache_memory_bytes": "Size of the KV cache; 0 = a share of the free memory.",
    "gpu_memory_utilization": "Share of a GPU's memory to take; what the model leaves of it is KV cache.",
    "num_blocks": "Blocks in the KV cache; 0 = as many as the memory allows.",
    "enable_prefix_caching": "Keep computed prompts and reuse common beginnings.",
    "max_num_seqs": "Sequences in one step at most.",
    "max_num_batched_tokens": "Tokens in one step at most.",
    "enable_chunked_prefill": "Cut long prompts into chunks that ride along with decodes.",
    "scheduling_policy": "Who runs first.",
    "max_num_queued_reqs": "Sequences accepted and not finished at most; more are refused (HTTP 429).",
    "static_batching": "Admit no sequence while others run: the baseline to compare with.",
    "async_scheduling": "Plan and send a step while the one before runs; on where there is a GPU, which it needs.",
    "device": "cuda = GPU kernels, cpu = native kernels, reference = torch (slow), auto = the first that can run.",
    "threads": "CPU threads; 0 = one per physical core, as far as the quota goes.",
    "isa": "Force an instruction set of the native kernels.",
    "ops": "Choose one op's implementation, as in linear=reference; may be given several times.",
    "tune": "Sizes of native kernels: auto = measured at the first start and kept, off, or ahead=1024,row_streams=4.",
    "bf16_bits": "Memory of a bf16 weight: 12 bits lose nothing and decode faster, 16 read prompts faster.",
    "enforce_eager": "Run each op as the model calls it, instead of recording steps and replaying those of decodes.",
    "enable_lora": "Make room for LoRA adapters.",
    "lora_modules": "Adapter to load, as name=folder, chosen by requests as their model; may be given several times.",
    "max_loras": "Adapters that can be loaded at one time; at least as many as --lora-modules names.",
    "max_lora_rank": "Largest rank of an adapter.",
    "host": "Address to listen on; 0.0.0.0 = all.",
    "port": "Port to listen on; 0 = a free one.",
    "api_key": "Key that clients must send as a bearer token; may be given several times.",
    "ssl_keyfile": "Private key for HTTPS.",
    "ssl_certfile": "Certificate for HTTPS.",
    "allowed_hosts": "Names that a request's Host header may have; may be given several times.",
    "shutdown_timeout": "Seconds to let requests finish after SIGTERM.",
    "max_body_bytes": "Largest request body.",
    "body_timeout": "Seconds a client may take to send a body.",
    "header_timeout": "Seconds a client may take to send its headers.",
    "write_timeout": "Seconds a client may leave a response unread.",
    "keep_alive_timeout": "Seconds an idle connection is kept.",
    "stall_timeout": "Seconds without progress after which the engine counts as dead.",
    "access_log": "Log every request.",
    "allow_runtime_lora_updating": "Let clients load and unload LoRA adapters from folders on this machine.",
}

ARGUMENT = "model_argument"


def with_flags(
    groups: Mapping[str, Struct], model_argument: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for every field of `groups` (help panel -> struct), and the argument [MODEL].

    The command gets those that were given as one mapping, its first argument; its own parameters stay as they are.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        flags = _flags(groups)
        if model_argument:
            argument = typer.Argument(metavar="MODEL", help=HELP["model"])
            flags.insert(0, _parameter(ARGUMENT, str | None, argument))
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def command(**given: Any) -> Any:
            options = {f.name: v for f in flags if (v := given.pop(f.name)) is not None}
            if (model := options.pop(ARGUMENT, None)) is not None:
                set_model(options, model)
            return function(options, **given)

        vars(command)["__signature__"] = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *flags)])
        command.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
        return command

    return decorate


def _flags(groups: Mapping[str, Struct]) -> list[inspect.Parameter]:
    flags: dict[str, inspect.Parameter] = {}
    for panel, struct in groups.items():
        for field in msgspec.structs.fields(struct):
            if field.name not in flags or struct is ServerOptions:
                flags[field.name] = _flag(field, panel)
    if "block_size" in flags:
        for alias in ("ctk", "ctv"):
            flags[alias] = _parameter(alias, str | None, typer.Option(f"-{alias}", hidden=True))
        for name, (neutral, _) in UNBUILT.items():
            kind = next((type(v) for v in neutral if v is not None), str)
            spelling = f"{_long(name)}/{_long(f'no_{name}')}" if kind is bool else _long(name)
            flags[name] = _parameter(name, kind | None, typer.Option(spelling, hidden=True))
    return list(flags.values())


def _flag(field: msgspec.structs.FieldInfo, panel: str) -> inspect.Parameter:
    name, kind = field.name, field.type
    default = None if field.default is msgspec.NODEFAULT else field.default
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)
        text = meta.description
    else:
        text = HELP[name]
    if default == ():
        kind, default = list[str], None
    elif name == "max_model_len":
        kind, default = str, "auto"
    elif kind == bool | None:
        kind = bool
    spellings = [_long(name), *([SHORT[name]] if name in SHORT else [])]
    if kind is bool:
        spellings[0] += f"/{_long(f'no_{name}')}"
    option = typer.Option(
        *spellings,
        help=text + _shown(default),
        metavar="|".join(CHOICES[name]) if name in CHOICES else None,
        show_default=False,
        rich_help_panel=panel,
    )
    return _parameter(name, kind | None, option)


def _shown(default: object) -> str:
    """The default as a part of the help text (typer would put quotes or brackets around it)."""
    if default in (None, "", ()):
        return ""
    return f" [{'on' if default is True else 'off' if default is False else default}]"


def _long(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def set_model(options: dict[str, Any], model: str) -> None:
    """Take the model that was given as an argument; `ConfigError` when --model names another one."""
    if options.setdefault("model", model) != model:
        raise ConfigError(f"two models: {model!r} and --model {options['model']!r}; give one", param="model")


def to_engine(options: Mapping[str, Any]) -> EngineConfig:
    """The engine's part of `options`."""
    chosen = {k: v for k, v in options.items() if k in KNOWN or k in UNBUILT}
    names = chosen.get("served_model_name")
    if isinstance(names, list):
        chosen["served_model_name"] = names[0]
    if isinstance(chosen.get("max_model_len"), str):
        chosen["max_model_len"] = _length(chosen["max_model_len"])
    kinds = {KV_ALIASES.get(v, v) for k in ("kv_cache_dtype", "ctk", "ctv") if (v := options.get(k)) is not None}
    if len(kinds) > 1:
        raise ConfigError(f"keys and values are kept in one format, not in {' and '.join(sorted(kinds))}")
    if kinds:
        chosen["kv_cache_dtype"] = kinds.pop()
    return engine_config(chosen)


def to_server(options: Mapping[str, Any]) -> ServerOptions:
    """The server's part of `options`."""
    server = pick(options, ServerOptions)
    server.validate()
    return server


def pick(options: Mapping[str, Any], struct: type[T]) -> T:
    """The options of `struct`, checked."""
    try:
        return msgspec.convert({k: v for k, v in options.items() if k in struct.__struct_fields__}, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad option value: {error}") from None


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line that gives `options`."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(_long(name if value else f"no_{name}"))
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [_long(name), str(each)]
    return words


def _length(value: str) -> int | str:
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--max-model-len {value!r} is neither a number nor auto", param="max_model_len") from None
