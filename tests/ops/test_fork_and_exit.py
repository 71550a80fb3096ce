"""Forks and the end of the interpreter while the model runs: programs of their own, as users write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native import load_native
from tiny_model import OPTIONS, write_tiny

BEGIN = """
import os, signal, sys, threading, time
import torch
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], **{options})
def text(tokens):
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return llm.generate("a b c " * 9, params, use_tqdm=False)[0].outputs[0].text
"""
FORK = """
numbers = torch.ones(500, 500)
torch.set_num_threads(2)
before = text(4), (numbers @ numbers).sum().item()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(20)
assert (text(4), (numbers @ numbers).sum().item()) == before
os._exit(0)
"""
DAEMON = """
def forever():
    while True:
        text(60)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("rest", "times"),
    [
        pytest.param(FORK, 1, id="fork"),
        pytest.param(FORK, 3, id="forks", marks=pytest.mark.slow),
        pytest.param(DAEMON, 3, id="daemon", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(load_native() is None, reason="the reference has no threads of its own")
def test_the_process_ends_as_it_should(rest: str, times: int, tmp_path: Path) -> None:
    program = BEGIN.format(options=OPTIONS) + rest
    command = [sys.executable, "-c", program, str(write_tiny(tmp_path))]
    for _ in range(times):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
