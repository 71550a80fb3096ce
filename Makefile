# Every target sets up what it needs; a second run starts at once. CI runs `make lint` and `make test`.
PYTHON ?= python3
export PYTHONDONTWRITEBYTECODE :=
# Where it is set, each of the thousand processes that tests start compiles 600 modules anew.
BIN := .venv/bin

# Of two processes, less what starting them and importing the files of tests takes.
FAST_SECONDS := 90

SANITIZE := address,undefined
SANITIZED_TESTS := $(addprefix tests/ops/test_,boundary.py ops.py amx.py native.py fused.py code_weights.py kv_formats.py bf12.py moe_ops.py \
	sampler_ops.py tree_attention.py super_blocks.py experts.py shared_prefixes.py matrix_kinds.py) \
	$(addprefix tests/quant/test_,four_bit_formats.py packing_stored_bytes.py)

.PHONY: demo serve test test-fast durations sanitize emulate test-slow chaos chaos-full reliability reliability-full soak lint format bench bench-kernels bench-peers bench-starts bench-serving bench-quality bench-compressors interop gpu-check gpu-kernels build real table fields clients pairs pictures record recorded docs docs-made train clean quire triton wheels wheel-check bench-first-start
.DEFAULT_GOAL := demo

demo: quire  ## serve smollm2 (93 MB, pulled once), or the embedded model without a network, and ask it a few things over HTTP
	$(BIN)/quire demo

serve: quire  ## the embedded model on http://127.0.0.1:8000
	$(BIN)/quire serve

test: triton
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: triton  ## the functions that take least of those of `make test`, as many as end within 90 s on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal --fast $(FAST_SECONDS)

durations: triton  ## run `make test` and record what each function takes, for test-fast, in tests/data/durations.json
	$(BIN)/python -m pytest -n 2 --dist worksteal --record-durations

sanitize: build  ## the tests of ops with every address and integer operation of the kernels checked; minutes to build once
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja "-DQUIRE_UNITS=native;portable" -DQUIRE_SANITIZE=$(SANITIZE) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize
	csrc/sanitize.sh build/sanitize $(BIN)/python $(SANITIZED_TESTS)

emulate: build  ## every op case on units that this machine cannot run (aarch64 by qemu-user, AVX-512 by AVX2, AMX by a signal handler); minutes to build once
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m slow -s tests/ops/test_emulated.py

test-slow: triton
	$(BIN)/python -m pytest -m slow

chaos: build  ## engines that are killed, stopped, torn and poisoned under load; every answer as alone
	$(BIN)/python -m pytest -q -s -m "" tests/system/test_chaos.py

chaos-full: build  ## the same at full scale: 50 kills under 32 streams
	QUIRE_CHAOS_FULL=1 $(BIN)/python -m pytest -q -s -m "" tests/system/test_chaos.py

reliability: build  ## thousands of streams, clients that leave or stall, broken bodies, kills, drains, too much load; minutes
	$(BIN)/python -m pytest -q -s -m "" tests/system/test_reliability_load.py tests/system/test_reliability_http.py tests/system/test_reliability_life.py

reliability-full: build  ## the same at full scale: an hour or two, on a machine that is otherwise idle
	QUIRE_RELIABILITY_FULL=1 $(BIN)/python -m pytest -q -s -m "" tests/system/test_reliability_load.py tests/system/test_reliability_http.py tests/system/test_reliability_life.py

record: build  ## bits of answers of every feature on this machine, before a redesign, into tests/data/recorded_bits.json
	ATEN_CPU_CAPABILITY=avx2 PYTHONPATH=tests/support $(BIN)/python tests/support/recorded_bits.py

recorded: build  ## the same compared with what was recorded; minutes
	ATEN_CPU_CAPABILITY=avx2 PYTHONPATH=tests/support $(BIN)/python tests/support/recorded_bits.py compare

soak: build  ## QUIRE_SOAK_HOURS (1) of mixed requests with kills, aborts and broken bodies; fails where something grows
	PYTHONPATH=tests/support $(BIN)/python tests/support/soak.py

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-kernels  ## speed of the ops and of the engine on this machine; nothing else should be running
	$(BIN)/quire bench latency
	$(BIN)/quire bench throughput

bench-kernels: build  ## every op beside the machine's own limits
	$(BIN)/python -m benchmarks.kernels.cpu_ops

bench-peers: build  ## beside llama.cpp, OpenVINO GenAI and vLLM, each in an environment of its own (built by the first run)
	$(BIN)/quire bench suite benchmarks/suites/peers.toml --make-peers -o build/peers.jsonl
	$(BIN)/quire bench suite benchmarks/suites/gguf.toml --make-peers -o build/gguf.jsonl

bench-starts: build  ## from a process's start to its first token, beside llama.cpp
	$(BIN)/python -m benchmarks.start.process_start engine

bench-serving: build  ## quire serve beside llama.cpp's server
	$(BIN)/quire bench suite benchmarks/suites/servers.toml --make-peers -o build/servers.jsonl

gpu-check:  ## on a machine with a GPU: build, tests, bits, speed, in 8 minutes; WHEELS=folder where there is no network
	$(PYTHON) -m benchmarks.gpu.check

gpu-kernels: triton  ## compile the GPU's kernels without one; registers, shared memory and spills as JSON
	$(BIN)/python -m benchmarks.gpu.compile_kernels

bench-quality: build  ## KL divergence of each weight format, beside llama.cpp's
	$(BIN)/python -m benchmarks.compress.format_quality

bench-compressors: build  ## quire compress beside llm-compressor, GPTQModel and AutoAWQ, each in an environment of its own: KL, time, memory
	$(BIN)/python -m benchmarks.compress.tools

interop: build  ## files as gptqmodel, llm-compressor, bitsandbytes, AutoAWQ and llama.cpp write them, and as they read ours, beside these tools' own answers (an environment for each: minutes)
	$(BIN)/python tests/interop/compare.py
	QUIRE_LLAMA_CPP=$$($(BIN)/python -m quire.bench.suite.environments .venv/interop llama | tail -n 1) $(BIN)/python -m pytest -m slow tests/gguf/test_llama_cpp.py tests/gguf/test_llama_cpp_architectures.py tests/gguf/test_llama_cpp_mmproj.py tests/gguf/test_write_llama_cpp.py

real: build  ## real weights (MiniLM, SmolLM2, Whisper: 280 MB, fetched once), beside sentence-transformers, faster-whisper and transformers; figures into benchmarks/results (minutes)
	PYTHONPATH=tests/support $(BIN)/python tests/support/real_weights.py
	QUIRE_REAL_FIGURES=1 $(BIN)/python -m pytest -m real

clients: build  ## the clients people have against a running server, in environments of their own (minutes); a table of those that got what they asked
	$(BIN)/python tests/clients/run.py

table: build  ## try every family in every format, write the table of docs/models/pairs.md, print the lines each family takes
	$(BIN)/python tests/support/family_formats.py

fields: build  ## send every field that clients of OpenAI and vLLM know, and write the table of docs/request-fields.md
	PYTHONPATH=tests/support $(BIN)/python tests/support/request_fields.py

pairs: build  ## run every feature beside every way to be parallel, and write the table of docs/techniques/parallel-pairs.md (minutes)
	PYTHONPATH=tests/support $(BIN)/python tests/support/parallel_pairs.py

docs: build  ## the documentation as a site in build/site, made from docs/ and from the code; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-made: build  ## write what the pages of docs/ have of the code and of results anew
	PYTHONPATH=docs/generate $(BIN)/python docs/generate/made.py

pictures: build  ## the playground's and the dashboards', of the embedded model in a headless Chromium, and the terminal's (five minutes)
	$(BIN)/python tests/support/playground_pictures.py docs/images/playground
	$(BIN)/python tests/support/dashboard_rows.py build/dashboard-rows
	$(BIN)/python tests/support/dashboard_pictures.py docs/images/dashboard build/dashboard-rows
	$(BIN)/quire pull smollm2
	$(BIN)/python tests/support/terminal_pictures.py docs/images/terminal

train: build  ## the embedded model from scratch (an hour or two on a CPU)
	$(BIN)/python training/train.py

# What is missing in .venv is installed, one line a step; where nothing is, that takes a tenth of a second.
quire:
	@$(PYTHON) scripts/set_up.py demo

build:  ## quire and the libraries of development in .venv
	@$(PYTHON) scripts/set_up.py dev

# The GPU's kernels are tested on the CPU, by Triton's interpreter; nothing else wants it without a GPU.
triton:
	@$(PYTHON) scripts/set_up.py test

wheels:  ## wheels for manylinux, x86-64 and (by a cross compiler) aarch64, in dist/; a quarter of an hour the first time
	$(PYTHON) scripts/wheels.py

wheel-check:  ## the wheels of dist/ in a Debian 11 without a compiler, and under qemu-user; minutes to set up once
	$(PYTHON) scripts/check_wheels.py

bench-first-start: quire  ## make demo of a fresh clone into an empty environment, by its phases
	$(BIN)/python -m benchmarks.start.fresh_clone

clean:
	rm -rf .venv build
