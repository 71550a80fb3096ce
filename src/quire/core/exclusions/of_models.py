"""What options and models exclude, and devices and commands."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion, each
from quire.core.exclusions.features import (
    ACTIVATIONS,
    ADAPTER_TABLES,
    ADAPTER_TOKEN_NORMS,
    ASYNC,
    BIDIRECTIONAL,
    BORROWED,
    CHANNEL_SCANS,
    CONTEXT,
    CONVOLUTIONS,
    CPU_OFFLOAD,
    DRAFT_MODEL,
    DRAFTS,
    DRAFTS_BESIDE_STAGES,
    DRAFTS_ON_ONE_RANK,
    DUMMY,
    EAGLE,
    EAGLE3,
    ENCODER,
    EXPERT_RANKS,
    EXPERTS_ON_DISK,
    FULLY_SHARD,
    GPU,
    GPU_PROCESSES,
    GPU_SHARE,
    HEADS_WITHOUT_OUTPUT,
    HOSTS,
    IMAGES,
    IN_PROCESS,
    KV_FORMAT,
    KV_OFFLOADING,
    KV_STORE,
    LATENTS,
    LAYERS_ON_DISK,
    LORA,
    MEDUSA,
    MTP,
    NO_EXPERTS,
    NO_GPU,
    PACKED_FOLDER,
    PROJECTED,
    QUANTIZATION,
    QUANTIZED,
    RANK_INVARIANT,
    RAY,
    REFERENCE_OPS,
    REPLICAS,
    SELF_LAYERS,
    SELF_QUANTIZED,
    SEQUENCE_PARALLEL,
    SEVERAL_MODELS,
    SHARED_BLOCKS,
    SIMULATION,
    STAGES,
    STATES,
    TARGET_ITL,
    TENSOR,
    TREES,
    VECTORS,
    WHOLE_EXPERTS,
    WINDOWS,
    Feature,
)
from quire.core.exclusions.of_layers import HEADS, OF_LAYERS
from quire.core.exclusions.of_sparse_attention import OF_SPARSE_ATTENTION
from quire.core.exclusions.of_speech import OF_SPEECH

OUT = "leave it out"
FROM_FILE = (LAYERS_ON_DISK, EXPERTS_ON_DISK)
OTHER_RANKS = (STAGES, EXPERT_RANKS, CONTEXT)
"""Ranks that do not share matrices."""
KV_OF_LATENTS = Exclusion(KV_FORMAT, LATENTS, "latents are kept in bf16 or f32", "choose one of these, or auto")
STAGED_DRAFTS = Exclusion(
    DRAFTS_BESIDE_STAGES,
    WINDOWS,
    "a draft model beside layers with windows has block tables that the other ranks do not know",
    "use ngram or suffix",
)
LONE_DRAFTS = Exclusion(
    DRAFTS_ON_ONE_RANK,
    WINDOWS,
    "a draft model beside layers with windows has block tables that the other ranks do not know",
    "leave it out, and all ranks compute it",
)
EXPERTS_OF_NONE = tuple(
    Exclusion(a, NO_EXPERTS, "{family!r} models have no experts to divide", OUT) for a in (WHOLE_EXPERTS, EXPERT_RANKS)
)


def _of_images(a: Feature, reason: str) -> Exclusion:
    return Exclusion(
        a,
        IMAGES,
        f"{{model}} takes images, and {reason}",
        "leave it out, or serve the model's text alone with --language-model-only",
    )


OF_BORROWED = (
    *(
        Exclusion(
            a,
            BORROWED,
            "needs a family of the table, and {family!r} runs by the code of transformers",
            OUT,
        )
        for a in (
            *(LORA, DUMMY, PACKED_FOLDER, ACTIVATIONS, STAGES, EXPERT_RANKS, CONTEXT, TENSOR, RANK_INVARIANT),
            *(LAYERS_ON_DISK, EXPERTS_ON_DISK, CPU_OFFLOAD, FULLY_SHARD),
        )
    ),
    Exclusion(
        GPU, BORROWED, "{family!r} runs by the code of transformers, on the CPU only", "use --device cpu", "device"
    ),
    *(
        Exclusion(a, BORROWED, "{family!r} runs by the code of transformers, which leaves no hidden rows to heads",
                  "use ngram, suffix, draft_model")
        for a in HEADS
    ),
    Exclusion(
        SELF_LAYERS,
        BORROWED,
        "{family!r} runs by the code of transformers, whose layers are not cut",
        "draft with quantization instead of layers",
    ),
)  # fmt: skip

OF_ENCODERS = (
    Exclusion(LORA, ENCODER, "{family!r} has an encoder, whose adapters are not read", OUT),
    Exclusion(
        STAGES,
        ENCODER,
        "an encoder's output is read by all layers of the decoder, and is computed by one rank only",
        OUT,
    ),
    Exclusion(CONTEXT, ENCODER, "an encoder is computed by one rank only, and its keys lie before the decoder's", OUT),
    *(
        Exclusion(a, ENCODER, "an encoder makes all keys of a prompt depend on all its tokens", OUT)
        for a in (KV_STORE, KV_OFFLOADING)
    ),
    *(
        Exclusion(a, ENCODER, "{family!r} has an encoder, whose layers would all stay in memory", OUT)
        for a in FROM_FILE
    ),
    Exclusion(TARGET_ITL, ENCODER, "it cuts prompts into chunks, and an encoder reads them whole", OUT),
    *(
        Exclusion(
            a,
            ENCODER,
            "{family!r} has an encoder, and what reads hidden rows of such models is not known",
            "use ngram, suffix, draft_model",
        )
        for a in HEADS
    ),
    Exclusion(
        SELF_QUANTIZED,
        ENCODER,
        "{family!r} has an encoder, which the model at fewer bits would have once more",
        "use ngram, suffix, draft_model",
    ),
)

OF_BIDIRECTIONAL = (
    Exclusion(CONTEXT, BIDIRECTIONAL, "attention to later tokens folds no splits of keys that other ranks have", OUT),
    *(
        Exclusion(a, BIDIRECTIONAL, "{family!r} is an encoder, whose keys all depend on all tokens of a prompt", OUT)
        for a in (KV_STORE, KV_OFFLOADING)
    ),
    Exclusion(TARGET_ITL, BIDIRECTIONAL, "it cuts prompts into chunks, and an encoder reads them whole", OUT),
    Exclusion(DRAFTS, BIDIRECTIONAL, "{family!r} is an encoder and makes vectors, for which nothing is drafted", OUT),
)

OF_OTHER_MODELS = (
    Exclusion(CONTEXT, LATENTS, "attention to latents folds no splits of keys that other ranks have", OUT),
    *OF_LAYERS,
    Exclusion(
        CONTEXT,
        CONVOLUTIONS,
        "a convolution reads the rows before each of its own, and other ranks have them",
        OUT,
    ),
    Exclusion(CONTEXT, STATES, "a recurrent state is made of all rows before, and other ranks have some of them", OUT),
    Exclusion(
        TENSOR,
        CHANNEL_SCANS,
        "B, C and the time steps of a row are made of all of its channels, and no rank would have them",
        "leave it out, or use --pipeline-parallel-size",
    ),
    Exclusion(
        TENSOR,
        SHARED_BLOCKS,
        "a block that layers share is one rank's, with what each layer adds to its matrices",
        "leave it out, or use --pipeline-parallel-size",
    ),
    *(
        Exclusion(a, SHARED_BLOCKS, "layers that share a block would each keep it", OUT)
        for a in (*FROM_FILE, CPU_OFFLOAD, FULLY_SHARD)
    ),
    Exclusion(
        LORA,
        SHARED_BLOCKS,
        "a block that layers share has adapters of its own, and looks up tokens without what others change in them",
        OUT,
    ),
    Exclusion(
        TREES,
        LATENTS,
        "drafts of models with latent attention do not branch: its op knows no ancestors of rows",
        "leave out topk and speculative_token_tree",
    ),
    Exclusion(
        TREES,
        STATES,
        "a recurrent state goes along one branch of a draft",
        "leave out topk and speculative_token_tree",
    ),
    *each(
        STATES,
        (SELF_QUANTIZED, SELF_LAYERS),
        "the model that drafts would need recurrent states of its own, which are not taken back",
        "use ngram, suffix or a draft model without recurrent layers",
    ),
    KV_OF_LATENTS,
    *EXPERTS_OF_NONE,
    Exclusion(EXPERTS_ON_DISK, NO_EXPERTS, "this model has none", "use disk"),
    _of_images(STAGES, "only the first of several stages is given rows of images, and others need their positions"),
    _of_images(
        CONTEXT, "a step's rows are spread over ranks, which are not told which of theirs are of images"
    ),
    _of_images(
        SEQUENCE_PARALLEL, "rows are split between the layers, where those of images would be given"
    ),
    Exclusion(QUANTIZATION, QUANTIZED, "{folder} is quantized already ({scheme})", OUT),
    *(
        Exclusion(
            a,
            PROJECTED,
            "{model} projects its last hidden rows before the head, and heads that draft are not known of such models",
            "use ngram, suffix, draft_model, self",
        )
        for a in HEADS
    ),
    STAGED_DRAFTS,
    LONE_DRAFTS,
)  # fmt: skip

OF_DEVICES = (
    *(
        Exclusion(
            a,
            b,
            "it keeps weights in the layout of the native kernels, but an op that reads them runs elsewhere",
            "leave out {a}, or --device and --ops",
        )
        for a, b in ((PACKED_FOLDER, GPU), (PACKED_FOLDER, REFERENCE_OPS))
    ),
    Exclusion(
        FULLY_SHARD,
        REFERENCE_OPS,
        "the memory of backend {backend} is no other process's",
        "choose --device cpu, without --ops",
    ),
    *(Exclusion(a, GPU, "it is for the CPU's memory", "--cpu-offload-gb is for a GPU's") for a in FROM_FILE),
    *(
        Exclusion(
            a,
            REFERENCE_OPS,
            "the torch reference reads weights of its own",
            "choose --device cpu, without --ops",
        )
        for a in FROM_FILE
    ),
    Exclusion(
        CPU_OFFLOAD,
        NO_GPU,
        "backend {backend} has no memory of its own beside the host's",
        "--weight-offload disk is for models larger than the host's memory",
    ),
    Exclusion(
        CPU_OFFLOAD, REFERENCE_OPS, "an op that reads weights runs by torch's reference", "leave out --ops"
    ),
    Exclusion(
        KV_OFFLOADING,
        NO_GPU,
        "on the {backend} backend the KV cache is in host memory already",
        "raise --kv-cache-memory-bytes",
    ),
    Exclusion(
        ASYNC,
        NO_GPU,
        "on the {backend} backend the host itself computes each step, and nothing is left to overlap with it",
        OUT,
    ),
    Exclusion(
        GPU_SHARE,
        NO_GPU,
        "no GPU is in use (backend {backend})",
        "size the KV cache with --kv-cache-memory-bytes",
    ),
)  # fmt: skip

_OR_CPU = "leave it out, or use --device cpu"
OF_GPU_PROCESSES = (
    Exclusion(
        REPLICAS,
        GPU_PROCESSES,
        "each engine would take the first GPUs; start servers of their own, with CUDA_VISIBLE_DEVICES",
        _OR_CPU,
    ),
    *(
        Exclusion(a, GPU_PROCESSES, "on GPUs ranks share matrices; use --tensor-parallel-size", _OR_CPU)
        for a in OTHER_RANKS
    ),
    Exclusion(HOSTS, GPU_PROCESSES, "ranks on GPUs are on one host", _OR_CPU),
    Exclusion(RANK_INVARIANT, GPU_PROCESSES, "a GPU's sums are not made in runs", _OR_CPU),
    *(
        Exclusion(
            a, GPU_PROCESSES, "what drafts by a model is not computed by several GPUs; use ngram or suffix", _OR_CPU
        )
        for a in (DRAFT_MODEL, SELF_QUANTIZED, SELF_LAYERS, MEDUSA, EAGLE, EAGLE3, MTP)
    ),
    *(
        Exclusion(a, GPU_PROCESSES, "parts of blocks on several GPUs are not gathered", _OR_CPU)
        for a in (KV_STORE, KV_OFFLOADING)
    ),
    *(
        Exclusion(a, GPU_PROCESSES, "ranks on GPUs keep their weights there", _OR_CPU)
        for a in (*FROM_FILE, CPU_OFFLOAD)
    ),
    Exclusion(ASYNC, GPU_PROCESSES, "tokens that only the first GPU knows would be needed by all", _OR_CPU),
)

OF_COMMANDS = (
    Exclusion(FULLY_SHARD, IN_PROCESS, "engines of this process have none to share with", "use quire serve"),
    Exclusion(REPLICAS, IN_PROCESS, "this process runs one engine", "`quire serve` has replicas"),
    *(
        Exclusion(a, IN_PROCESS, "this process runs one engine", "`quire serve` has other hosts", "nnodes")
        for a in (HOSTS, RAY)
    ),
    *(
        Exclusion(a, SEVERAL_MODELS, "several models run on one host", "serve this one alone", "nnodes")
        for a in (HOSTS, RAY)
    ),
    Exclusion(DRAFTS, SIMULATION, "how many tokens a step accepts is not predicted", OUT),
    Exclusion(REPLICAS, SIMULATION, "--replicas says how many engines there are", OUT, "replicas"),
)

OF_ADAPTERS = (
    *each(
        ADAPTER_TABLES,
        OTHER_RANKS,
        "tables and heads, magnitudes and biases go with ranks of --tensor-parallel-size alone",
        "leave out other ways to be parallel",
    ),
    Exclusion(
        TENSOR,
        ADAPTER_TOKEN_NORMS,
        "magnitudes (DoRA) of the table of tokens are norms over the rows of all ranks, which each has a part of",
        "use one rank",
    ),
    Exclusion(
        HEADS_WITHOUT_OUTPUT,
        TENSOR,
        "has no lm_head.weight: its heads would read the target's, whose rows are split over {b}",
        "use one rank, or heads with matrices of their own",
    ),
)
"""Found when an adapter, or heads, are read: a message begins with their folder."""

_LOGITS_ONLY = "ranks send back logits only"
OF_VECTORS = (
    Exclusion(VECTORS, ENCODER, "the model is an encoder and a decoder", "use an embedding model"),
    *each(VECTORS, (*OTHER_RANKS, TENSOR), f"{{b}}: {_LOGITS_ONLY}", "use one rank"),
    Exclusion(VECTORS, LORA, "{b}: rows of adapters are not kept", OUT),
)
"""Their reasons are said to requests; a model that gives vectors alone is refused at the start."""

ROWS = (
    *OF_COMMANDS,
    *OF_GPU_PROCESSES,
    *OF_BORROWED,
    *OF_ENCODERS,
    *OF_BIDIRECTIONAL,
    *OF_OTHER_MODELS,
    *OF_SPARSE_ATTENTION,
    *OF_SPEECH,
    *OF_DEVICES,
    *OF_ADAPTERS,
    *OF_VECTORS,
)
