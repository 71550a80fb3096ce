"""Measurements that need more than `quire bench`; from the root, `python -m benchmarks.FOLDER.NAME --help`.

suites      TOML files of `quire bench suite`: quire beside other engines, servers and versions of itself; techniques,
            ranks, compressed models, draft methods. Whatever compares engines or options under a load is one of these
kernels     the CPU's kernels beside the machine's own limits, and beside other ways to the same result
gpu         everything on a GPU machine; compilation of GPU kernels for devices that are not here
engine      steps of the engine: their time, schedulers, grammars, images; memory; several processes
start       from a command or a fresh clone to a first answer
serving     the event loop, tenants, a shared machine, load generators beside each other
speculation drafts beside plain decoding, where a suite cannot say what is guessed
compress    what formats, methods and training cost and win back, beside other tools
planning    simulator, planner and tuner beside what is measured
results     what was measured, by the scripts and suites that name the files
"""
