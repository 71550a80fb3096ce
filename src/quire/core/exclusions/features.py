"""What may be asked for, and what a model or a device may be, as far as it excludes something else.

Each section of the options says which features it asks for (`features`), `quire.model.known` which ones a model and a
device have.
"""

from __future__ import annotations

from dataclasses import dataclass

OPTIONS, MODEL, DEVICE, PLACE = "the options", "the model's files", "the device", "the command"
"""What says that a feature is there."""


@dataclass(frozen=True)
class Feature:
    """`name`: as documents call it. `option` asks for it, with `value` where it has several; "": no option does."""

    name: str
    option: str = ""
    value: str = ""
    known_from: str = OPTIONS

    @property
    def flag(self) -> str:
        """The flag as it is typed; its name where no option asks for it."""
        typed = f"--{self.option.replace('_', '-')}"
        return " ".join(filter(None, (typed, self.value))) if self.option else self.name


def found(*pairs: tuple[Feature, bool]) -> frozenset[Feature]:
    """Features that are there."""
    return frozenset(feature for feature, there in pairs if there)


# Ranks and engines
TENSOR = Feature("ranks that share matrices", "tensor_parallel_size")
ONE_TENSOR_RANK = Feature("--tensor-parallel-size 1")
STAGES = Feature("stages of a pipeline", "pipeline_parallel_size")
ONE_STAGE = Feature("--pipeline-parallel-size 1")
MICRO_BATCHES = Feature("steps under way in a pipeline", "pipeline_micro_batches")
CONTEXT = Feature("sequences spread over ranks", "context_parallel_size")
EXPERT_RANKS = Feature("experts on ranks of their own", "expert_parallel_size")
WHOLE_EXPERTS = Feature("whole experts on ranks that share matrices", "enable_expert_parallel")
UNDIVIDED_EXPERTS = Feature("neither --expert-parallel-size nor --enable-expert-parallel")
REDUNDANT_EXPERTS = Feature("copies of experts", "num_redundant_experts")
EXPERT_LOAD_FILE = Feature("a file of the load of experts", "expert_load_file")
SEQUENCE_PARALLEL = Feature("rows split between matrices", "enable_sequence_parallel")
RANK_INVARIANT = Feature("the same bits for any number of ranks", "rank_invariant")
REPLICAS = Feature("several engines", "data_parallel_size")
ONE_REPLICA = Feature("--data-parallel-size 1")
PREFILL_REPLICAS = Feature("engines that compute prompts", "prefill_replicas")

# Hosts
HOSTS = Feature("several hosts", "nnodes")
HOSTS_WITHOUT_RAY = Feature("several hosts that are started by hand", "nnodes")
RAY = Feature("engines started by Ray", "distributed_executor_backend", "ray")
NO_RAY = Feature("--distributed-executor-backend mp")
RAY_ADDRESS = Feature("a Ray cluster that runs already", "ray_address")
NO_MASTER_ADDR = Feature("no --master-addr", "")
NO_SECRET = Feature("no --cluster-secret-file", "")

# Weights
QUANTIZATION = Feature("weights quantized at load", "quantization")
ACTIVATIONS = Feature("integers of activations", "activations")
DUMMY = Feature("made-up weights", "load_format", "dummy")
PACKED_FOLDER = Feature("a folder of packed weights", "cache_packed", "FOLDER")
LAYERS_ON_DISK = Feature("layers read from a file", "weight_offload", "disk")
EXPERTS_ON_DISK = Feature("experts read from a file", "weight_offload", "experts")
NO_WEIGHT_OFFLOAD = Feature("--weight-offload none")
WEIGHT_MEMORY = Feature("a bound of weights in memory", "weight_memory_gib")
WEIGHT_FOLDER = Feature("a folder of the file of weights", "weight_offload_folder")
CPU_OFFLOAD = Feature("a GPU's weights in the host's memory", "cpu_offload_gb")
FULLY_SHARD = Feature("weights that replicas share", "fully_shard")
LORA = Feature("LoRA adapters", "enable_lora")
LORA_MODULES = Feature("adapters loaded at start", "lora_modules")
NO_LORA = Feature("no --enable-lora")

# Keys and values
KV_FORMAT = Feature("keys and values in int8, fp8 or another format of latents", "kv_cache_dtype")
NO_PREFIX_CACHE = Feature("--no-enable-prefix-caching")
GPU_SHARE = Feature("a share of a GPU's memory", "gpu_memory_utilization")
KV_STORE = Feature("a store of keys and values", "kv_store")
NO_KV_STORE = Feature("no --kv-store")
KV_OFFLOADING = Feature("keys and values in the host's memory", "kv_offloading_size")

# Steps
ASYNC = Feature("steps planned while others run", "async_scheduling")
TARGET_ITL = Feature("a target of a step's time", "target_itl_ms")
WHOLE_PROMPTS = Feature("--no-enable-chunked-prefill")
CUSPARSELT = Feature("products by cuSPARSELt", "ops", "linear=cusparselt")
NOT_SPARSE = Feature("no --sparse on")

# Drafts
DRAFTS = Feature("drafts", "speculative_config")
DRAFT_MODEL = Feature("a draft model", "speculative_config", "draft_model")
SELF_QUANTIZED = Feature("the model at fewer bits drafts", "speculative_config", "self")
SELF_LAYERS = Feature("the model's first layers draft", "speculative_config", "self")
MEDUSA = Feature("heads that draft", "speculative_config", "medusa")
EAGLE = Feature("a layer that drafts", "speculative_config", "eagle")
EAGLE3 = Feature("a layer that drafts from three others", "speculative_config", "eagle3")
DFLASH = Feature("layers that draft a block at once", "speculative_config", "dflash")
MTP = Feature("a layer of the model's own files that drafts", "speculative_config", "mtp")
TREES = Feature("drafts that branch", "speculative_config", "topk")
DRAFTS_BESIDE_STAGES = Feature("a draft model beside stages of a pipeline", "pipeline_parallel_size")
DRAFTS_ON_ONE_RANK = Feature("a draft model on one rank of several", "speculative_draft_tensor_parallel_size", "1")

# The model
ENCODER = Feature("an encoder", known_from=MODEL)
HEARING = Feature("an encoder of sound", known_from=MODEL)
BIDIRECTIONAL = Feature("bidirectional attention", known_from=MODEL)
LATENTS = Feature("latent attention", known_from=MODEL)
SHARED_INDEXERS = Feature("layers that share an indexer", known_from=MODEL)
BLOCK_INDEXERS = Feature("attention to blocks that an indexer chooses", known_from=MODEL)
ENTRIES = Feature("attention to entries that stand for several tokens", known_from=MODEL)
STATES = Feature("layers with a recurrent state", known_from=MODEL)
CHANNEL_SCANS = Feature("scans of channels with time steps of their own", known_from=MODEL)
SHARED_BLOCKS = Feature("blocks that layers share", known_from=MODEL)
UNLIKE_LAYERS = Feature("layers whose heads differ in size or number", known_from=MODEL)
STREAMS = Feature("several streams side by side", known_from=MODEL)
TURNS = Feature("stacks of layers that run in turns", known_from=MODEL)
PASSING = Feature("experts whose output passes a layer by", known_from=MODEL)
LAYER_INPUTS = Feature("per-layer embeddings", known_from=MODEL)
CONVOLUTIONS = Feature("layers that convolve tokens", known_from=MODEL)
WINDOWS = Feature("layers with windows shorter than sequences", known_from=MODEL)
NO_EXPERTS = Feature("a model without experts", known_from=MODEL)
IMAGES = Feature("a model that takes images", known_from=MODEL)
BORROWED = Feature("a model that runs by the code of transformers", known_from=MODEL)
QUANTIZED = Feature("files that are quantized already", known_from=MODEL)
PROJECTED = Feature("hidden rows that are projected before the head", known_from=MODEL)
VECTORS = Feature("requests for vectors", known_from=MODEL)
ADAPTER_TABLES = Feature("an adapter with tables, heads, magnitudes or biases", known_from=MODEL)
ADAPTER_TOKEN_NORMS = Feature("an adapter with magnitudes of the table of tokens", known_from=MODEL)
HEADS_WITHOUT_OUTPUT = Feature("Medusa heads without an output matrix", known_from=MODEL)

# Where it runs
GPU = Feature("a GPU", "device", "cuda", DEVICE)
NO_GPU = Feature("no GPU", known_from=DEVICE)
REFERENCE_OPS = Feature("weights read by torch's reference (--device reference, or --ops)", known_from=DEVICE)
GPU_PROCESSES = Feature("several processes on GPUs", known_from=DEVICE)
IN_PROCESS = Feature("an engine in the caller's process (LLM, chat, bench)", known_from=PLACE)
SEVERAL_MODELS = Feature("several models behind one server", known_from=PLACE)
SIMULATION = Feature("quire simulate", known_from=PLACE)
