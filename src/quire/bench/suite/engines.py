"""How each engine is started for a job: quire and peers, which have the files and the environment that they need.

Whoever cannot take part raises `ConfigError` with the reason, which becomes a row's note.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.bench.suite.environments import Environment, environment, existing
from quire.bench.suite.foreign.shapes import CONVERTED, write_checkpoint
from quire.bench.suite.process import Command
from quire.bench.suite.suite_file import PEER_FORMATS
from quire.bench.suite.suite_models import SuiteModel
from quire.core.errors import ConfigError
from quire.core.options.fields import flag

FOREIGN = Path(__file__).parent / "foreign"
MADE = ("bf16", "q8_0", "q4_0")
"""Formats that gguf_files.py writes. llama.cpp itself quantizes to others, and what its converter writes, by its own
mixtures of block types."""
GGUF = {"auto": "bf16", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Of a suite's formats, those that llama.cpp has blocks of the same size for."""


@dataclass(frozen=True)
class EngineJob:
    """What an engine is asked to load, and how much of it at one time.

    `length`: tokens of the longest sequence. `options`, `mode`: quire's; mode "serve" is any engine's that can be a
    server. `make`: missing environments are made. `compress`: words of `quire compress` that make the model.
    """

    work: Path
    source: SuiteModel
    format: str
    threads: int
    batch: int = 32
    length: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = ""
    make: bool = False
    compress: tuple[str, ...] = ()

    def file(self, name: str, make: Callable[[Path], Any]) -> Path:
        """A model file or folder below `work`, made when it is missing; a broken attempt leaves nothing behind."""
        path = self.work / name
        if not path.exists():
            part = path.with_name(f"{path.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.unlink(missing_ok=True)
            make(part)
            part.rename(path)
        return path

    def environment(self, name: str) -> Environment:
        """The peer's. `ConfigError` where it was not made and is not to be."""
        if self.make:
            return environment(self.work, name)
        found = existing(self.work, name)
        if found is None:
            raise ConfigError(f"there is no environment {self.work / name}; --make-peers makes it (minutes)")
        return found

    @property
    def load_format(self) -> str:
        """Load format of folders."""
        return "dummy" if self.source.random else "auto"

    @property
    def folder(self) -> str:
        """Folder of the model. `ConfigError` where it is a file."""
        if self.source.facts is None or self.source.facts.folder.is_file():
            raise ConfigError(f"{self.source.name} is no folder")
        return str(self.source.facts.folder)

    @property
    def checkpoint(self) -> str:
        """Folder of the model's weights, which are written first where they are made up."""
        name = self.source.name
        made = self.file(f"{name}-bf16", lambda f: write_checkpoint(name, f)) if self.source.random else self.folder
        return str(made)


def quire(job: EngineJob, python: str = sys.executable) -> Command:
    """Start quire as an engine or a server in the environment of `python`; formats of GGUF files by the file that
    llama.cpp gets."""
    told = job.source.options
    if job.compress:
        told = {"model": str(compressed(job))}
    elif job.source.random and "kv_store" in job.options:
        told = {"model": job.checkpoint}  # a store keeps nothing of weights that each start makes up
    elif job.format in PEER_FORMATS:
        told = {"model": str(gguf_file(job))}
    options = told | dict(job.options) | {"cache_packed": "off"}
    if job.mode == "serve":
        flags = [word for name, value in options.items() if value != "" for word in _flag_words(name, value)]
        return served([python, "-m", "quire", "serve", *flags])
    return Command([python, "-m", "quire.bench.suite.worker", json.dumps(options), job.mode])


def _flag_words(name: str, value: Any) -> list[str]:
    """An option as words of a command line."""
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    return [flag(name), str(value)]


def served(words: list[str], variables: Mapping[str, str] | None = None) -> Command:
    """Start a server by `words`, and drive it over HTTP."""
    client = [sys.executable, "-m", "quire.bench.suite.over_http", "--start", json.dumps(words)]
    return Command(client, dict(variables or {}))


def compressed(job: EngineJob) -> Path:
    """The model as `quire compress` makes it with the words of the job. `ConfigError` with what it says if it fails."""
    digest = hashlib.blake2b("\0".join(job.compress).encode(), digest_size=4).hexdigest()

    def make(part: Path) -> None:
        words = ["-m", "quire", "compress", job.checkpoint, str(part), *job.compress, "--no-passport"]
        done = subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise ConfigError(f"quire compress {' '.join(job.compress)}: {' '.join(done.stderr.split()[-60:])}")

    return job.file(f"{job.source.name}-{digest}", make)


def gguf_file(job: EngineJob) -> Path:
    """The file itself, or one of random weights of a shape."""
    if job.source.path.endswith(".gguf"):
        return Path(job.source.path)
    if not job.source.random:
        raise ConfigError(f"llama.cpp reads GGUF files; name one in the place of {job.source.name}")
    fmt = GGUF.get(job.format, job.format)
    if fmt not in (*MADE, *PEER_FORMATS):
        raise ConfigError(f"llama.cpp has no format like {job.format}")
    env = job.environment("llama")
    config = Path(job.source.path) / "config.json"
    converted = json.loads(config.read_text())["model_type"] in CONVERTED

    def make(part: Path) -> None:
        if converted and fmt == "bf16":
            sources = env.folder.glob("sources/*/vendor/llama.cpp")
            here = Environment(Path(sys.prefix), {})
            here.run(FOREIGN / "gguf_converted.py", next(sources), job.checkpoint, part)
        elif fmt in MADE and not converted:
            env.run(FOREIGN / "gguf_files.py", "random", config, fmt, part)
        else:
            source = gguf_file(replace(job, format="bfloat16"))
            env.run(FOREIGN / "peer_llama_cpp.py", "quantize", source, part, fmt)

    return job.file(f"{job.source.name}-{fmt}.gguf", make)


def llama_cpp(job: EngineJob) -> Command:
    """llama.cpp on a GGUF file. As a server it has a slot for each request of the batch, and one KV buffer for all."""
    env, model = job.environment("llama"), gguf_file(job)
    if job.mode == "serve":
        size = ["--parallel", str(job.batch), "--kv-unified", "--ctx-size", str(job.batch * job.length)]
        binary = str(env.folder / "build" / "bin" / "llama-server")
        words = [binary, "--model", str(model), *size, "--threads", str(job.threads), "--no-webui"]
        return served(words, env.variables)
    numbers = [str(number) for number in (job.threads, job.batch, job.length)]
    return Command([env.python, str(FOREIGN / "peer_llama_cpp.py"), str(model), *numbers], env.variables)


def openvino(job: EngineJob) -> Command:
    """OpenVINO GenAI on a checkpoint that optimum-intel exported."""
    if job.format not in ("int8", "int4"):
        raise ConfigError(f"openvino: models are exported as int8 or int4 here, not {job.format}")
    env, script = job.environment("openvino"), FOREIGN / "peer_openvino.py"

    def export(part: Path) -> None:
        env.run(script, "make", job.checkpoint, job.format, part)

    model = job.file(f"{job.source.name}-openvino-{job.format}", export)
    return Command([env.python, str(script), "run", str(model), str(job.threads), str(job.batch)], env.variables)


def vllm(job: EngineJob) -> Command:
    """vLLM's CPU build, in bf16; it makes up random weights itself."""
    _bf16(job, "vllm")
    env = job.environment("vllm")
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job.threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = [env.python, str(FOREIGN / "peer_vllm.py"), job.folder, str(job.batch), str(job.length), job.load_format]
    return Command(words, env.variables | variables)


def transformers(job: EngineJob) -> Command:
    """Hugging Face's `generate` in bf16; in this environment where it has none of its own."""
    _bf16(job, "transformers")
    found = existing(job.work, "transformers")
    if found is None and importlib.util.find_spec("transformers") is None:
        found = job.environment("transformers")
    python = sys.executable if found is None else found.python
    numbers = [str(job.threads), str(job.batch)]
    return Command([python, str(FOREIGN / "peer_transformers.py"), job.folder, *numbers, job.load_format])


def _bf16(job: EngineJob, name: str) -> None:
    if job.format not in ("auto", "bfloat16"):
        raise ConfigError(f"{name}: runs in bfloat16 here, not {job.format}")


ADAPTERS: dict[str, Callable[[EngineJob], Command]] = {
    "quire": quire,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "transformers": transformers,
}


SERVERS = ("quire", "llama.cpp")
"""Engines that a suite can start as servers."""


def name_of(engine: str) -> str:
    """What a row calls it: the name before = of a URL or a checkout, and else `openai`."""
    if "://" not in engine:
        return engine.partition("=")[0]
    before, given, _ = engine.partition("=")
    return before if given and "://" not in before else "openai"


def checkout_of(engine: str) -> Path | None:
    """Folder of another checkout of quire, which a suite names as NAME=FOLDER; None for every other engine."""
    name, given, folder = engine.partition("=")
    return Path(folder) if given and "://" not in engine and name else None


def command_of(engine: str, job: EngineJob) -> Command:
    """Command of an engine as a suite names it. `ConfigError`: why it cannot take part."""
    if job.source.why and "://" not in engine:
        raise ConfigError(job.source.why)
    if "://" in engine:
        url = engine.partition("=")[2] if name_of(engine) != "openai" else engine
        return Command([sys.executable, "-m", "quire.bench.suite.over_http", url])
    if (checkout := checkout_of(engine)) is not None:
        python = checkout.absolute() / ".venv" / "bin" / "python"
        if not python.exists():
            raise ConfigError(f"there is no {python}; build that checkout (`make build`)")
        return quire(job, str(python))
    if job.mode == "serve" and engine not in SERVERS:
        raise ConfigError(f"{engine} is not started as a server; start it yourself, and name it {engine}=URL")
    return ADAPTERS[engine](job)
