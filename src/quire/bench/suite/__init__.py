"""`quire bench suite SUITE.toml`: what each technique, format and engine buys on this machine, measured in turns.

A suite is grids; each grid is the product of its lists, and of each combination there is a row for every variant:

    name = "nightly"             # of the rows
    rounds = 6                   # in turns: A B A B; 6 are the fewest that give an interval of 95 %
    max_model_len = 2048         # of every engine, less where the model is made for less
    limit_s = 900                # seconds that one load may take before its engine is ended

    [options]                    # flags of quire for all of it; a grid may have its own beside them
    threads = 2

    [[grid]]
    models = ["llama-1b", "path/to/folder", "file.gguf", "owner/name", "pydoc"]
    formats = ["int8", "int4"]   # or bfloat16, bf12, float32, nf4, mxfp4, fp8; auto: as it is stored
    techniques = ["none", "continuous-batching", "prefix-cache"]   # `techniques.py`: each is a row on and a row off
    engines = ["quire", "llama.cpp", "openvino", "vllm", "transformers", "sglang=http://127.0.0.1:30000",
               "before=../other/checkout"]   # NAME=URL is a server that runs, NAME=FOLDER another checkout of quire
    serve = false                # true: quire and llama.cpp are started as servers and asked over HTTP
    batch = [1, 8]               # requests computed at one time at most
    input = [128, "64:256"]      # tokens of prompts; a range is drawn from evenly
    output = [32]
    shared_prefix = [0]          # tokens that all prompts begin with, beside their own
    arrivals = ["at-once", "closed", "poisson:0.5", "constant:2", "gamma:2:0.5", "ramp:1:4"]   # rates per second
    requests = 32                # 0: as many as the batch
    prompts = "random"           # or text: of `texts`, or of what the model itself was not trained on

    [[exclude]]                  # combinations in which all of this holds
    model = "llama-1b"
    batch = [8]
    technique = "kv-cache"

    [speculation."llama-1b"]     # what the technique `draft` is for a model, as --speculative-config has it
    model = "path/to/a/smaller/one"

    [technique.two-ranks]        # a technique of the suite's own, which grids name: flags of quire with it on and off
    on = {tensor_parallel_size = 2, threads = 1}
    off = {threads = 2}
    improves = "output_tokens_per_s"         # the metric that it is for
    compress = ["--quantize", "llm_int8"]    # with this, on is the model as `quire compress` makes it

A model that is a name of `foreign/shapes.py` is that shape with random weights: it costs what a real one does, and says
nothing: no perplexity, and drafts are accepted as chance has it. A technique is compared with itself, off: both engines
are loaded, take turns in the same minutes and share the machine's ups and downs; so do all engines of a row without a
technique, and with one quire alone is measured. Each is a process of its own. The KV cache holds what the load takes,
and as much again for prefixes, unless `num_blocks` says otherwise; where a technique is about memory, it holds no more
than the load's mean.

The file of rows is appended to, a row at a time once all rounds of its group are done. Run again, the suite goes on
where it was; what failed is a row with a note, which `--retry` measures again.
"""
