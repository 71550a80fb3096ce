"""Measurements that need more than `quire bench`; from the root, `python -m benchmarks.FOLDER.NAME --help`.

kernels     operations of the CPU's kernels beside the machine's own limits
gpu         everything on a GPU machine; compilation of GPU kernels for devices that are not here
engine      steps of the engine: overhead, schedulers, grammars, ranks, images, supervision
memory      loading, weights that do not fit, the store behind the KV cache
start       from a command or a fresh clone to a first answer
serving     servers under load: event loop, tenants, disaggregated prefill, chat templates
peers       quire beside other engines, servers, load generators and builds of itself
speculation drafts and trained heads beside plain decoding
compress    what formats, methods and training cost and win back, beside other tools
planning    simulator, planner and tuner beside what is measured
suites      TOML files of `quire bench suite`
results     what was measured, by the scripts that name the files
"""
