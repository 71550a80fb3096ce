"""Clients as people have them against a running server, each in an environment of its own: `make clients`.

Every script `with_*.py` here talks to the server as its client's own documentation says, and fails where an answer is
not what was asked for. The exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

from quire.bench.suite.environments import environment  # noqa: E402
from serving_process import serving  # noqa: E402

MODEL = ROOT / "src" / "quire" / "assets" / "pydoc"
OWN = {"guidellm": "guidellm", "lm_eval": "lm_eval", "vllm": "vllm"}
"""Clients with an environment of their own; the others share one."""
SECONDS = 600


def main() -> int:
    """Run them, print the table."""
    parser = argparse.ArgumentParser(description="quire under clients that others wrote")
    parser.add_argument("clients", nargs="*", help="names; all by default")
    parser.add_argument("--work", type=Path, default=ROOT / ".venv" / "clients", help="where environments are made")
    given = parser.parse_args()
    scripts = {path.stem.removeprefix("with_"): path for path in sorted(HERE.glob("with_*.py"))}
    failed, rows = 0, []
    with serving("--max-num-seqs", "8") as url:
        for name in given.clients or scripts:
            began = time.monotonic()
            good, told = tried(given.work, name, scripts[name], url)
            failed += not good
            rows.append(f"{name:<16} {'ok' if good else 'FAILED':<7} {time.monotonic() - began:6.1f} s  {told}")
            print(rows[-1], flush=True)
    print(f"\n{len(rows) - failed} of {len(rows)} clients\n" + "\n".join(rows))
    return failed > 0


def tried(work: Path, name: str, script: Path, url: str) -> tuple[bool, str]:
    """Whether the client got what it asked for, and its last line."""
    try:
        env = environment(work, OWN.get(name, "clients"))
    except (SystemExit, subprocess.CalledProcessError) as error:
        return False, f"cannot be installed: {error}"
    command = [env.python, str(script), url, str(MODEL)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=env.folder)
    except subprocess.TimeoutExpired:
        return False, f"not done after {SECONDS} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
