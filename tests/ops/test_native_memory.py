"""Memory of the native ops: what tasks need is taken before they begin, so that a lack of it is the op's error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.ops.native import load_native

pytestmark = pytest.mark.skipif(
    load_native() is None or not sys.platform.startswith("linux"), reason="needs quire._native and Linux's limits"
)

# Two threads, the second awake; then no more memory from the system, and none left within the allocator.
SCRIPT = """
import ctypes, resource
import numpy as np
from quire.ops.arrays import address
from quire.ops.cpu.state import Cpu
from quire.ops.native import Native
from quire.ops.cpu.pack import pack
from quire.ops.weights import Weight

native = Native("{isa}", 2)
w = pack(Cpu(native), Weight("f32", np.ones((512, 4096), np.float32)))
x, out = np.ones((96, 4096), np.float32), np.empty((96, 512), np.float32)
few = native.ids["linear"], (address(out), address(x), w.handle.at, 0, 1)
many = native.ids["linear"], (address(out), address(x), w.handle.at, 0, 96)
native.module.call(*few)
spare = [bytearray(400) for _ in range(4000)]
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
pages = int(open("/proc/self/statm").read().split()[0])
del spare
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096, resource.RLIM_INFINITY))
for size in (1 << 20, 1 << 16, 1 << 12, 1 << 10):
    while malloc(size):
        pass
found = set()
for _ in range(200):
    try:
        native.module.call(*many)
        found.add("done")
    except MemoryError:
        found.add("MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
native.module.call(*many)
print(*found, bool((out == 4096).all()))
"""


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_a_lack_of_memory_is_an_error_of_the_op(isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(isa=isa)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["MemoryError", "True"]), done.stderr
