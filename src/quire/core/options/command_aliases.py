"""Flags of other tools that mean one thing in one command of quire: rows that go before those of `aliases`."""

from __future__ import annotations

from quire.core.options.aliases import LLAMA_CPP, OLLAMA, VLLM, nothing, refused, same

_TOKENS = "prompts are random tokens: --input-len says how many"
_LENGTHS = (
    same(VLLM, "--random-input-len", "input_len"),
    same(VLLM, "--random-output-len", "output_len"),
    refused(VLLM, "--random-range-ratio", "lengths may be ranges: --input-len 64:256"),
    refused(LLAMA_CPP, "-f --file", _TOKENS),
)
_RESULTS = (
    same(VLLM, "--output-json --result-filename", "output"),
    refused(VLLM, "--result-dir", "name the file with its folder: --output FOLDER/FILE"),
    refused(VLLM, "--save-result --save-detailed", "name the file: --output FILE", flag=True)._replace(
        beside=("--result-filename", "--output", "-o", "--output-json")
    ),
    nothing(VLLM, "--disable-tqdm", "--quiet"),
)
_LLAMA_BENCH = (
    same(LLAMA_CPP, "-p --n-prompt", "input_len"),
    same(LLAMA_CPP, "-n --n-gen", "output_len"),
)

LATENCY = (
    *_LLAMA_BENCH,
    same(LLAMA_CPP, "-r --repetitions", "iters"),
    same(VLLM, "--num-iters", "iters"),
    same(VLLM, "--num-iters-warmup", "warmup"),
    refused(LLAMA_CPP, "--prompt", _TOKENS),
    *_LENGTHS,
    *_RESULTS,
)
THROUGHPUT = (
    *_LLAMA_BENCH,
    refused(LLAMA_CPP, "-r --repetitions", "all requests run once: --num-prompts says how many"),
    refused(VLLM, "--dataset-name", _TOKENS, neutral="random"),
    refused(VLLM, "--dataset --dataset-path", f"quire bench serve --trace FILE has those of a file; here {_TOKENS}"),
    same(VLLM, "--random-prefix-len", "shared_prefix"),
    refused(LLAMA_CPP, "--prompt", _TOKENS),
    *_LENGTHS,
    *_RESULTS,
)
SERVE = (
    refused(LLAMA_CPP, "-p --prompt", _TOKENS),
    refused(VLLM, "--dataset-name", f"--trace FILE takes lengths of a file; else {_TOKENS}", neutral="random"),
    refused(VLLM, "--dataset-path", "--trace FILE takes the lengths and arrivals of a file"),
    refused(VLLM, "--host --port", "give --base-url http://HOST:PORT"),
    refused(VLLM, "--backend --endpoint-type --endpoint", "requests go to /v1/completions below --base-url",
            neutral="vllm openai /v1/completions"),
    refused(VLLM, "--percentile-metrics --metric-percentiles", "all latencies are shown with p50, p90, p95 and p99"),
    refused(VLLM, "--tokenizer", "prompts are random ids below --vocab-size"),
    same(VLLM, "--num-warmups", "warmup"),
    same(VLLM, "--random-prefix-len", "shared_prefix"),
    *_LENGTHS,
    *_RESULTS,
)  # fmt: skip
EVAL = (same(LLAMA_CPP, "-f --file", "text"),)
RUN = (
    same(OLLAMA, "--num-ctx", "max_model_len"),
    refused(
        OLLAMA,
        "--format",
        'an answer here is text; a server\'s is JSON by "format" of /api/chat or response_format of '
        "/v1/chat/completions: quire serve",
    ),
    refused(OLLAMA, "--keepalive", "a model is in memory as long as its command runs; quire serve keeps one"),
)
CHAT = (
    *RUN,
    refused(
        LLAMA_CPP,
        "-p --prompt",
        "in a chat of llama-cli it is the system message: --system, or -sys. A first message is an argument",
    ),
)
