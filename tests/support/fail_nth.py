"""Loads a model and answers while a call of the system fails: `python fail_nth.py KIND:LEAST:MOST:STRIDE ...`.

Runs with the library of fail_nth.c preloaded. Each trial is a fork of this process, which has imported everything
already, and has called torch, so that what fails is ours: an allocation or a map of at least LEAST bytes, an open, a
read or a write. At most MOST points are tried, every STRIDE-th, each with an empty folder QUIRE_KEPT for packed
weights; a second load without a fault then finds what the trial left there. Prints a line of JSON per trial.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import sys
import traceback

import torch

from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine

KINDS = ("none", "alloc", "map", "open", "read", "write")
SECONDS = 60
KEPT = os.environ["QUIRE_KEPT"]
"""Where packed weights are kept."""


def answers() -> list[list[int]]:
    """The tokens of two requests to the embedded model in int4, which is packed, and kept for the next load."""
    engine = LocalEngine(flat_config(device="cpu", quantization="int4", num_blocks=64, threads=2, cache_packed=KEPT))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    for i in range(2):
        engine.submit(Request(id=str(i), prompt=tuple(range(9 + i, 60)), params=params, seed=0, arrival=0.0))
    found: list[list[int]] = [[], []]
    for _ in range(100):
        report = engine.poll(0)
        if report is None:
            break
        for out in report.outputs:
            found[int(out.request_id)] += out.tokens
            if out.error:
                raise RuntimeError(out.error)
    engine.close()
    return found


def attempt(library: ctypes.CDLL, kind: int, n: int, least: int) -> dict[str, object]:
    """What became of a trial in a fork: tokens, or an error's class and text, or how the process died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        faulthandler.enable()
        said: dict[str, object] = {}
        library.fail_nth(kind, n, ctypes.c_size_t(least))
        try:
            said["tokens"] = answers()
        except BaseException as error:
            library.fail_nth(0, 0, ctypes.c_size_t(0))
            said["error"], said["text"] = type(error).__name__, str(error)[:300]
            said["kinds"] = [c.__name__ for c in type(error).__mro__]
            said["where"] = traceback.format_exc()[-600:]
        said["calls"] = library.calls_seen()
        library.fail_nth(0, 0, ctypes.c_size_t(0))
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"died": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(text)  # type: ignore[no-any-return]


def sweep(library: ctypes.CDLL, name: str, least: int, most: int, stride: int) -> None:
    """One trial without a fault, which counts the calls, then one for each point."""
    kind = KINDS.index(name)
    shutil.rmtree(KEPT, ignore_errors=True)
    whole = attempt(library, kind, 0, least)
    print(json.dumps({"kind": name, "n": 0} | whole), flush=True)
    calls = whole["calls"]
    assert isinstance(calls, int)
    for n in range(1, min(calls, most * stride) + 1, stride):
        shutil.rmtree(KEPT, ignore_errors=True)
        found = {"kind": name, "n": n} | attempt(library, kind, n, least)
        found["after"] = attempt(library, 0, 0, least).get("tokens")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.arange(9).float().mul(2)  # it reads /proc/cpuinfo at its first call, and does not survive what is odd there
    loaded = ctypes.CDLL(None)
    loaded.calls_seen.restype = ctypes.c_long
    loaded.fail_nth.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_size_t)
    for word in sys.argv[1:]:
        asked, *numbers = word.split(":")
        sweep(loaded, asked, *map(int, numbers))
