"""Flags of llama.cpp and vLLM as quire takes them: another name for ours, nothing to do, or a refusal that names ours.

Flags that both spell as quire does are not here. `docs/coming-from.md` is checked against this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quire.core.errors import ConfigError

LLAMA_CPP, OLLAMA, VLLM = "llama.cpp", "Ollama", "vLLM"


class Alias(NamedTuple):
    """A flag of another tool: `spellings`, whether it has a value, and what it is here.

    `ours` is the option that it is another name for; `values` maps values to ours, "" = as if it were not given.
    Without `ours` nothing is done for the values in `neutral` (None = for any), and others are refused with `reason`.
    `beside`: not taken where one of these is given too.
    """

    tool: str
    spellings: tuple[str, ...]
    ours: str = ""
    flag: bool = False
    values: Mapping[str, str] = {}
    neutral: tuple[str, ...] | None = ()
    reason: str = ""
    beside: tuple[str, ...] = ()


def same(tool: str, spellings: str, ours: str, flag: bool = False, beside: str = "", **values: str) -> Alias:
    """Another name of an option of ours."""
    given = {name.lstrip("_"): value for name, value in values.items()}
    return Alias(tool, tuple(spellings.split()), ours, flag, given, beside=tuple(beside.split()))


def nothing(tool: str, spellings: str, reason: str, flag: bool = True) -> Alias:
    """A flag that asks for what quire does anyway; `reason` says so."""
    return Alias(tool, tuple(spellings.split()), flag=flag, neutral=None, reason=reason)


def refused(tool: str, spellings: str, reason: str, flag: bool = False, neutral: str = "") -> Alias:
    """A flag that quire does not have, but for values in `neutral`."""
    return Alias(tool, tuple(spellings.split()), flag=flag, neutral=tuple(neutral.split()), reason=reason)


_SAMPLING = "is a field of a request to a server, and a flag of quire chat and run"
_FIELD = "is a field of a request"
_SAMPLER = "quire has no such sampler; use temperature, top_p, top_k and min_p"
_ROPE = "positions are scaled as the model's files say; change rope_scaling in its config.json"
_DEVICES = "quire divides a model by --tensor-parallel-size or --pipeline-parallel-size"
_CODE = "code of others is not loaded into the server"

ALIASES = (
    same(LLAMA_CPP, "-hf -hfr --hf-repo", "model"),
    refused(LLAMA_CPP, "-hff --hf-file -mu --model-url -dr --docker-repo",
             "name the model by --model: a path, or owner/model:QUANT"),
    refused(LLAMA_CPP, "-hft --hf-token",
             "log in with the Hub's own tool (hf auth login); --model then finds the model"),
    same(LLAMA_CPP, "--ctx-size --n-ctx", "max_model_len", _0="auto"),
    same(LLAMA_CPP, "-ub --ubatch-size --n-ubatch", "max_num_batched_tokens"),
    same(LLAMA_CPP, "-b --batch-size --n-batch", "max_num_batched_tokens", beside="-ub --ubatch-size"),
    same(LLAMA_CPP, "--n-threads", "threads"),
    same(LLAMA_CPP, "-np --parallel", "max_num_seqs"),
    refused(LLAMA_CPP, "-tb --threads-batch --threads-http",
             "--threads are those of prompts and answers alike; HTTP has its own"),
    same(LLAMA_CPP, "--predict --n-predict", "max_tokens")._replace(values={"-1": "", "-2": ""}),
    same(LLAMA_CPP, "--temp", "temperature"),
    same(LLAMA_CPP, "--repeat-penalty", "repetition_penalty"),
    same(LLAMA_CPP, "-s", "seed")._replace(values={"-1": ""}),
    same(LLAMA_CPP, "--cache-type-k", "ctk"),
    same(LLAMA_CPP, "--cache-type-v", "ctv"),
    nothing(LLAMA_CPP, "--mlock --no-mmap --mmap -cb --cont-batching --metrics --slots --props --jinja --no-warmup "
             "--warmup "
             "--embedding --embeddings --reranking --rerank --no-context-shift --kv-unified -kvu --cache-prompt "
             "--no-perf "
             "--swa-full --escape -e", "quire always does so, or has no need to"),
    Alias(LLAMA_CPP, ("-fa", "--flash-attn"), neutral=None, reason="attention is always computed in tiles"),
    Alias(LLAMA_CPP, ("-ngl", "--gpu-layers", "--n-gpu-layers"), "device",
          values={"0": "cpu", "all": "", "auto": "", "-1": "", "99": "", "999": ""},
          reason="a part of the layers cannot be named: all are on the GPU where there is one (--device), and "
                 "--cpu-offload-gb keeps some of the weights outside"),
    refused(LLAMA_CPP, "-dev --device-draft -sm --split-mode -ts --tensor-split -mg --main-gpu --rpc", _DEVICES),
    refused(LLAMA_CPP, "-ot --override-tensor -ncmoe --n-cpu-moe", "use --weight-offload experts"),
    refused(LLAMA_CPP, "-cmoe --cpu-moe", "use --weight-offload experts", flag=True),
    refused(LLAMA_CPP, "-nkvo --no-kv-offload", "use --device cpu", flag=True),
    refused(LLAMA_CPP, "--numa --prio --prio-batch --poll --cpu-mask -C --cpu-range -Cr",
             "start quire by numactl, taskset or nice; --threads says how many threads it has"),
    same(LLAMA_CPP, "-nocb --no-cont-batching", "static_batching", flag=True),
    same(LLAMA_CPP, "--no-cache-prompt", "no_enable_prefix_caching", flag=True),
    refused(LLAMA_CPP, "--cache-ram -cram --slot-save-path --cache-reuse",
             "prefixes are cached in --kv-store FOLDER, up to --kv-store-gb"),
    same(LLAMA_CPP, "-md --model-draft", "speculative_model"),
    same(LLAMA_CPP, "--draft --draft-n --draft-max", "num_speculative_tokens"),
    refused(LLAMA_CPP, "--draft-min --draft-n-min --draft-p-min --draft-p-split -ngld --ctx-size-draft -cd -hfd",
             "drafts adapt themselves: --speculative-config"),
    refused(LLAMA_CPP, "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
             """use --speculative-config '{"method": "ngram"}'"""),
    refused(LLAMA_CPP, "--lora --lora-scaled",
             "adapters are folders of PEFT's, not GGUF files: --enable-lora --lora-modules NAME=FOLDER"),
    refused(LLAMA_CPP, "--control-vector --control-vector-scaled", "quire has no control vectors; see --lora-modules"),
    same(LLAMA_CPP, "-mm", "mmproj"),
    refused(LLAMA_CPP, "-mmu --mmproj-url", "download the file, and name it by --mmproj"),
    same(LLAMA_CPP, "--no-mmproj", "language_model_only", flag=True),
    same(LLAMA_CPP, "--chat-template-file", "chat_template"),
    refused(LLAMA_CPP, "--chat-template-kwargs", f"{_FIELD}: chat_template_kwargs"),
    refused(LLAMA_CPP, "--no-jinja", "templates are always Jinja; --chat-template names another one", flag=True),
    refused(LLAMA_CPP, "--reasoning-format", "thoughts are always kept apart from the answer: --reasoning-parser",
             neutral="auto deepseek deepseek-legacy"),
    refused(LLAMA_CPP, "--reasoning-budget", f"{_FIELD}: reasoning_effort", neutral="-1"),
    same(LLAMA_CPP, "-a --alias", "served_model_name"),
    refused(LLAMA_CPP, "--api-key-file", "--api-keys-file takes a JSON file with a name and limits for each key"),
    same(LLAMA_CPP, "--ssl-key-file", "ssl_keyfile"),
    same(LLAMA_CPP, "--ssl-cert-file", "ssl_certfile"),
    same(LLAMA_CPP, "--api-prefix", "root_path"),
    same(LLAMA_CPP, "--cors-origins", "allowed_origins"),
    same(LLAMA_CPP, "--media-path", "allowed_local_media_path"),
    same(LLAMA_CPP, "--no-webui --no-ui", "no_playground", flag=True),
    same(LLAMA_CPP, "--webui --ui", "playground", flag=True),
    refused(LLAMA_CPP, "--models-dir --models-preset", "--models takes a TOML file of models"),
    refused(LLAMA_CPP, "--models-max", "--models-memory-gb bounds what they take"),
    same(LLAMA_CPP, "--sse-ping-interval", "stream_ping_interval"),
    refused(LLAMA_CPP, "-to --timeout",
             "there is one for each part: --body-timeout, --write-timeout, --keep-alive-timeout"),
    refused(LLAMA_CPP, "-v --verbose --log-verbose", "use --log-level debug", flag=True),
    refused(LLAMA_CPP, "-lv --verbosity --log-verbosity", "use --log-level debug, info, warning or error"),
    refused(LLAMA_CPP, "--log-disable", "use --log-level error", flag=True),
    refused(LLAMA_CPP, "--log-file", "the log is on standard error: add 2> FILE; --access-log logs requests"),
    same(LLAMA_CPP, "--system-prompt", "system"),
    refused(LLAMA_CPP, "-p --prompt -f --file",
             "prompts are arguments of quire generate and quire run, or standard input"),
    nothing(LLAMA_CPP, "-cnv --conversation -i --interactive --color -mli --multiline-input",
             "quire chat always does so"),
    refused(LLAMA_CPP, "-no-cnv --no-conversation", "use quire generate", flag=True),
    refused(LLAMA_CPP, "-st --single-turn", "use quire run MODEL PROMPT", flag=True),
    refused(LLAMA_CPP, "--grammar --grammar-file", f"{_FIELD}: grammar, or structured_outputs"),
    refused(LLAMA_CPP, "-j --json-schema -jf --json-schema-file", f"{_FIELD}: response_format, or json_schema"),
    refused(LLAMA_CPP, "--temperature --top-k --top-p --min-p --presence-penalty --frequency-penalty --max-tokens",
             _SAMPLING),
    refused(LLAMA_CPP, "--mirostat --mirostat-lr --mirostat-ent --typical --xtc-probability --xtc-threshold "
             "--dry-multiplier "
             "--dry-base --dry-allowed-length --dynatemp-range --samplers --sampler-seq --top-nsigma --repeat-last-n",
             _SAMPLER),
    refused(LLAMA_CPP, "-l --logit-bias", f"{_FIELD}: logit_bias"),
    refused(LLAMA_CPP, "--ignore-eos", f"{_FIELD}: ignore_eos", flag=True),
    refused(LLAMA_CPP, "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
             "--yarn-ext-factor "
             "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast", _ROPE),
    refused(LLAMA_CPP, "--override-kv", "facts of a model are those of its files; --max-model-len bounds the context"),
    refused(LLAMA_CPP, "--context-shift", "a text ends at the end of the context; --max-model-len says where",
             flag=True),
    refused(LLAMA_CPP, "--pooling", "vectors are pooled as the model's files say", neutral=""),
    refused(LLAMA_CPP, "--list-devices", "use quire doctor", flag=True),
    refused(LLAMA_CPP, "--check-tensors --offline", "quire has no such mode; --model with a path needs no network",
             flag=True),
    same(VLLM, "-tp", "tensor_parallel_size"),
    same(VLLM, "-pp", "pipeline_parallel_size"),
    same(VLLM, "-dp", "data_parallel_size"),
    same(VLLM, "-dcp", "context_parallel_size"),
    same(VLLM, "-q", "quantization"),
    same(VLLM, "-r", "node_rank"),
    same(VLLM, "--num-gpu-blocks-override", "num_blocks"),
    same(VLLM, "--uvicorn-log-level", "log_level", critical="error", trace="debug"),
    same(VLLM, "--disable-log-stats", "no_log_stats", flag=True),
    same(VLLM, "--allowed-media-domains", "allow_media_url"),
    refused(VLLM, "--enable-log-requests", "use --access-log text", flag=True),
    refused(VLLM, "--enable-log-outputs", "use --record FOLDER --record-prompts", flag=True),
    nothing(VLLM, "--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log "
             "--enable-request-id-headers "
             "--enable-prompt-tokens-details --enable-server-load-tracking --enable-reasoning --use-v2-block-manager "
             "--disable-custom-all-reduce --enable-force-include-usage --enable-tokenizer-info-endpoint "
             "--disable-sliding-window "
             "--disable-hybrid-kv-cache-manager --no-disable-hybrid-kv-cache-manager --use-tqdm-on-load",
             "quire always does so, or has no need to"),
    refused(VLLM, "--tokenizer-mode --config-format --model-impl --chat-template-content-format "
             "--structured-outputs-config.backend "
             "--guided-decoding-backend --runner --convert --task",
             "quire finds it out; see --tokenizer and --chat-template",
             neutral="auto hf openai string generate draft none xgrammar guidance outlines"),
    refused(VLLM, "--max-log-len --max-log-length", "--access-log never has texts"),
    refused(VLLM, "--tokenizer-revision --code-revision", "--revision is that of all files"),
    refused(VLLM, "--hf-config-path --hf-overrides --model-loader-extra-config --override-pooler-config "
             "--pooler-config",
             "facts of a model are those of its files; --max-model-len bounds the context"),
    refused(VLLM, "--override-generation-config --default-chat-template-kwargs",
             "defaults are those of the model's generation_config.json, or with --generation-config vllm vLLM's"),
    refused(VLLM, "--rope-theta", _ROPE),
    nothing(VLLM, "--swap-space --max-seq-len-to-capture", "sequences put off are computed again", flag=False),
    refused(VLLM, "--compilation-config -cc -O --optimization-level --cudagraph-capture-sizes",
             "nothing is compiled: decode steps are recorded, unless --enforce-eager"),
    refused(VLLM, "--kv-transfer-config --kv-events-config --ec-transfer-config",
             "caches are shared by --kv-store FOLDER, and --prefill-replicas on one machine"),
    refused(VLLM, "--kv-cache-memory", "use --kv-cache-memory-bytes"),
    refused(VLLM, "--max-logprobs", "requests may ask for 20, and --max-prompt-logprobs bounds those of prompts"),
    refused(VLLM, "--logprobs-mode", "log-probabilities are those of the model", neutral="raw_logprobs"),
    refused(VLLM, "--lora-dtype", "adapters are computed in --dtype", neutral="auto"),
    refused(VLLM, "--fully-sharded-loras --enable-lora-bias", "adapters are whole on each rank; see --max-lora-rank",
             flag=True),
    refused(VLLM, "--max-cpu-loras", "use --max-loras"),
    refused(VLLM, "--calculate-kv-scales --enable-sleep-mode --enable-dbo --enable-eplb",
             "quire has no such mode; see --kv-cache-dtype and --num-redundant-experts", flag=True),
    refused(VLLM, "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
             "long prompts are divided by --enable-chunked-prefill and --target-itl-ms", neutral="1 0"),
    refused(VLLM, "--scheduler-cls --worker-cls --worker-extension-cls --tool-parser-plugin --reasoning-parser-plugin "
             "--middleware --logits-processors --io-processor-plugin --mm-processor-kwargs", _CODE),
    refused(VLLM, "--allow-credentials --disable-fastapi-docs --disable-frontend-multiprocessing "
             "--return-tokens-as-token-ids "
             "--skip-tokenizer-init --skip-mm-profiling --enable-multimodal-encoder-data-parallel",
             "quire's server has no such switch; --allowed-origins and --no-playground are near", flag=True),
    refused(VLLM, "--allowed-methods --allowed-headers", "origins alone are asked: --allowed-origins"),
    refused(VLLM, "--ssl-ca-certs --ssl-cert-reqs", "clients show keys (--api-key), no certificates", neutral="0"),
    refused(VLLM, "--response-role", "the role of an answer is always assistant", neutral="assistant"),
    refused(VLLM, "--stream-interval", "every step is sent as it comes", neutral="1"),
    refused(VLLM, "--api-server-count -asc", "one process serves HTTP; --data-parallel-size starts more engines",
             neutral="1"),
    refused(VLLM, "--data-parallel-size-local --data-parallel-address --data-parallel-rpc-port "
             "--data-parallel-backend "
             "--data-parallel-start-rank --data-parallel-rank",
             "replicas on several hosts: --nnodes, --node-rank, --master-addr"),
    refused(VLLM, "--structured-outputs-config", f"{_FIELD}: structured_outputs"),
)  # fmt: skip
"""Every spelling has one row; a command takes a row whose option it has."""

BY_SPELLING = {spelling: alias for alias in ALIASES for spelling in alias.spellings}


def alias_of(spelling: str) -> Alias | None:
    """The row of a spelling; dashes and underscores within a long one are the same."""
    if spelling.startswith("--"):
        spelling = "--" + spelling[2:].replace("_", "-")
    return BY_SPELLING.get(spelling)


def value_here(alias: Alias, spelling: str, value: str | None) -> str | None:
    """The value that our option gets; None where the flag asks for nothing. `ConfigError` says why it is refused."""
    shown = spelling if value is None else f"{spelling} {value}"
    if not alias.ours:
        if alias.neutral is None or (value or "") in alias.neutral:
            return None
        raise ConfigError(f"{shown}: {alias.tool}'s flag is refused: {alias.reason}")
    if value is None:
        return ""
    if value in alias.values:
        return alias.values[value] or None
    if alias.reason:
        raise ConfigError(f"{shown}: {alias.tool}'s flag is refused: {alias.reason}")
    return value
