"""Options that exclude each other, whatever the model and the device are."""

from __future__ import annotations

from quire.core.exclusions.exclusion import Exclusion, each
from quire.core.exclusions.features import (
    CONTEXT,
    CPU_OFFLOAD,
    CUSPARSELT,
    DFLASH,
    DRAFT_MODEL,
    DUMMY,
    EAGLE,
    EAGLE3,
    EXPERT_LOAD_FILE,
    EXPERT_RANKS,
    EXPERTS_ON_DISK,
    FULLY_SHARD,
    HOSTS,
    HOSTS_WITHOUT_RAY,
    KV_OFFLOADING,
    KV_STORE,
    LAYERS_ON_DISK,
    LORA,
    LORA_MODULES,
    MEDUSA,
    MICRO_BATCHES,
    MTP,
    NO_KV_STORE,
    NO_LORA,
    NO_MASTER_ADDR,
    NO_PREFIX_CACHE,
    NO_RAY,
    NO_SECRET,
    NO_WEIGHT_OFFLOAD,
    NOT_SPARSE,
    ONE_REPLICA,
    ONE_STAGE,
    ONE_TENSOR_RANK,
    PACKED_FOLDER,
    PREFILL_REPLICAS,
    RANK_INVARIANT,
    RAY,
    RAY_ADDRESS,
    REDUNDANT_EXPERTS,
    SELF_LAYERS,
    SELF_QUANTIZED,
    SEQUENCE_PARALLEL,
    STAGES,
    TARGET_ITL,
    TENSOR,
    TREES,
    UNDIVIDED_EXPERTS,
    WEIGHT_FOLDER,
    WEIGHT_MEMORY,
    WHOLE_EXPERTS,
    WHOLE_PROMPTS,
)

ONE_OUT = "leave one of them out"
FROM_FILE = (LAYERS_ON_DISK, EXPERTS_ON_DISK)
OWN_MODEL = (SELF_QUANTIZED, SELF_LAYERS, MEDUSA, EAGLE, EAGLE3, DFLASH, MTP)
"""Ways to draft that read parts of the model itself."""

OF_DRAFTS = (
    *each(
        CONTEXT,
        (DRAFT_MODEL, *OWN_MODEL, TREES),
        "a model that drafts keeps all keys on one rank, and drafts that branch move them between ranks",
        "use ngram, suffix without branches",
    ),
    *each(
        STAGES,
        OWN_MODEL,
        "drafts of the method {value!r} read what other stages have",
        "use ngram, suffix, draft_model",
    ),
    *each(
        DFLASH,
        (TENSOR, EXPERT_RANKS),
        "the first rank alone computes blocks, and reads the whole output matrix",
        "use eagle3, mtp, draft_model, ngram, suffix",
    ),
    *each(
        SEQUENCE_PARALLEL,
        (EAGLE3, SELF_LAYERS),
        "drafts of the method {value!r} stop between layers, where no rank has all rows",
        ONE_OUT,
    ),
)

OF_RANKS = (
    Exclusion(
        STAGES,
        CONTEXT,
        "a stage has all keys and values of its layers, which {b} spreads over ranks",
        "use one of them",
    ),
    *each(
        STAGES,
        (EXPERT_RANKS, WHOLE_EXPERTS),
        "experts that are divided over ranks are counted over all layers, of which a stage has some",
        "leave out --expert-parallel-size and --enable-expert-parallel: --tensor-parallel-size splits each expert",
    ),
    *each(
        STAGES,
        (*FROM_FILE, CPU_OFFLOAD),
        "layers whose weights come while steps run ({b}) are numbered from the model's first",
        "more stages need less memory each",
    ),
    Exclusion(
        MICRO_BATCHES, ONE_STAGE, "they are steps of --pipeline-parallel-size 2 or more", "raise that, or leave it out"
    ),
    Exclusion(
        WHOLE_EXPERTS,
        EXPERT_RANKS,
        "it gives experts to the ranks of --tensor-parallel-size, {b} to ranks of their own",
        "use one of them",
    ),
    Exclusion(
        WHOLE_EXPERTS,
        ONE_TENSOR_RANK,
        "there is one rank to give experts to",
        "set --tensor-parallel-size, or use --expert-parallel-size",
    ),
    *(
        Exclusion(
            a,
            UNDIVIDED_EXPERTS,
            "every rank has all experts",
            "use --expert-parallel-size or --enable-expert-parallel",
        )
        for a in (REDUNDANT_EXPERTS, EXPERT_LOAD_FILE)
    ),
    Exclusion(SEQUENCE_PARALLEL, ONE_TENSOR_RANK, "one rank has all rows", ONE_OUT),
    *each(SEQUENCE_PARALLEL, (STAGES, CONTEXT), "stages and parts of sequences have rows of their own", ONE_OUT),
    Exclusion(SEQUENCE_PARALLEL, WHOLE_EXPERTS, "of experts that ranks hold whole every rank gets all rows", ONE_OUT),
    *each(
        RANK_INVARIANT,
        (EXPERT_RANKS, WHOLE_EXPERTS),
        "experts that ranks hold whole are not summed in runs",
        ONE_OUT,
    ),
    Exclusion(LORA, RANK_INVARIANT, "{b} sums in runs, and what adapters add is summed by rank", ONE_OUT),
    *(
        Exclusion(a, RANK_INVARIANT, "{b} sums in runs, and matrices in runs are not kept on disk", ONE_OUT)
        for a in (*FROM_FILE, PACKED_FOLDER)
    ),
)

OF_ENGINES = (
    *each(
        PREFILL_REPLICAS,
        (HOSTS, RAY),
        "the folder that blocks go through is one host's",
        "leave out {b} or this",
    ),
    *each(
        PREFILL_REPLICAS,
        (NO_KV_STORE, KV_OFFLOADING),
        "prompts go from one engine to another through the folder of --kv-store, and nowhere else",
        "give one, and leave out --kv-offloading-size",
    ),
    Exclusion(
        FULLY_SHARD,
        ONE_REPLICA,
        "there is one replica, which needs all weights",
        "give --data-parallel-size, or leave it out",
    ),
    *each(
        FULLY_SHARD,
        (STAGES, CONTEXT, EXPERT_RANKS, TENSOR),
        "ranks of one engine ({b}) have shares of the weights already",
        ONE_OUT,
    ),
    *each(
        FULLY_SHARD,
        (*FROM_FILE, CPU_OFFLOAD),
        "weights that are elsewhere ({b}) cannot be shared in memory",
        ONE_OUT,
    ),
    Exclusion(RAY_ADDRESS, NO_RAY, "needs --distributed-executor-backend ray", "add that, or leave it out"),
    Exclusion(
        HOSTS_WITHOUT_RAY,
        NO_MASTER_ADDR,
        "needs --master-addr, where host 0 listens for the others",
        "give it",
        "master_addr",
    ),
    *(
        Exclusion(
            a,
            NO_SECRET,
            "needs --cluster-secret-file: hosts must know each other",
            "make one with `(umask 077; openssl rand -hex 32 > FILE)` and copy it to all of them",
            "cluster_secret_file",
        )
        for a in (HOSTS, RAY)
    ),
)

OF_MEMORY = (
    *(
        Exclusion(a, NO_PREFIX_CACHE, "it keeps what --enable-prefix-caching finds, which is turned off", ONE_OUT)
        for a in (KV_STORE, KV_OFFLOADING)
    ),
    *(
        row
        for a in (KV_STORE, KV_OFFLOADING)
        for row in each(
            a,
            (STAGES, EXPERT_RANKS, CONTEXT),
            "of blocks that ranks of {b} have nothing is gathered",
            "leave one of them out, or use --tensor-parallel-size",
        )
    ),
    Exclusion(KV_STORE, DUMMY, "what made-up weights ({b}) compute is not kept", ONE_OUT),
    *(
        Exclusion(a, NO_WEIGHT_OFFLOAD, "needs --weight-offload", "add that, or leave it out")
        for a in (WEIGHT_MEMORY, WEIGHT_FOLDER)
    ),
    *each(
        PACKED_FOLDER,
        (*FROM_FILE, FULLY_SHARD),
        "what is kept is read into memory whole, which {b} is to spare",
        ONE_OUT,
    ),
    Exclusion(PACKED_FOLDER, DUMMY, "made-up weights ({b}) are not kept", ONE_OUT),
    Exclusion(LORA_MODULES, NO_LORA, "needs --enable-lora", "add that, or leave it out"),
    Exclusion(TARGET_ITL, WHOLE_PROMPTS, "it cuts prompts into chunks, which {b} turns off", ONE_OUT),
)

AT_THE_DEVICE = (Exclusion(CUSPARSELT, NOT_SPARSE, "it multiplies what --sparse on keeps", "add that"),)
"""Said once a GPU is there, as without one the reason is another."""

ROWS = (*OF_DRAFTS, *OF_RANKS, *OF_ENGINES, *OF_MEMORY)
