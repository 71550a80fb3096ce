"""Draft heads for the embedded model, trained by `quire train-heads` on the standard library, and what they buy.

    python -m benchmarks.speculation.heads ...

    train OUT --method eagle3  the command itself, on all modules but the held-out ones
    measure OUT                tokens a step on held-out text: chain of 4, tree of 16
    batches OUT                16 and 64 sequences, the cost model beside no drafts

The text is the beginnings of modules that neither the model nor the heads were trained on, continued greedily.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS
from benchmarks.speculation.drafts import PYDOC, compare, decode, engine_of, requests_of, texts

SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data", "turtledemo",
           "lib2to3", "idlelib"}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "chain of 4": {"num_speculative_tokens": 4},
    "tree of 16": {"num_speculative_tokens": 4, "topk": 4, "num_draft_tokens": 16},
}


def learned_from() -> list[Path]:
    """Files of the standard library without the held-out modules, and without tests and tables."""
    held = set(json.loads((PYDOC / "heldout.json").read_text())["modules"])
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if not SKIPPED & set(path.relative_to(root).parts))
    return [path for path in files if path.stem not in held and path.stat().st_size > 4000]


def train(args: argparse.Namespace) -> None:
    """Run the command; it goes on where it stopped."""
    quire = str(Path(sys.executable).with_name("quire"))
    data = [word for path in learned_from() for word in ("--data", str(path))]
    more = ["--method", args.method, "--steps", str(args.steps), "--threads", str(args.threads)]
    raise SystemExit(subprocess.run([quire, "train-heads", "pydoc", str(args.folder), *more, *data]).returncode)


def measure(args: argparse.Namespace) -> None:
    """Chain and tree in turns with plain decoding, one sequence at a time; kept in results/speculation.json."""
    method = method_of(args.folder)
    plain = engine_of(PYDOC, None)
    requests = [requests_of([row], args.tokens)[0] for row in texts(args.texts, 64)]
    found: dict[str, Any] = {}
    for name, form in FORMS.items():
        heads = {"method": method, "model": str(args.folder), "adaptive": False}
        drafting = engine_of(PYDOC, heads | form)
        assert drafting.speculator is not None
        steps, tokens, ratios = 0, 0, []
        for request in requests:
            want, alone, _ = decode(plain, [request])
            got, seconds, count = decode(drafting, [request])
            assert got == want, "speculation changed what came out"
            ratios.append(alone / seconds)
            steps, tokens = steps + count, tokens + args.tokens - 1
        totals = drafting.speculator.totals
        found[name] = {
            "tokens_per_step": tokens / steps,
            "kept_by_place": [kept / totals.drafts for kept in totals.accepted_per_pos],
            "speed_beside_plain": statistics.median(ratios),
        }
    keep(args, f"heads {method}", found)


def batches(args: argparse.Namespace) -> None:
    """Places for so many sequences are always taken; the cost model decides whether heads draft at all."""
    method, found = method_of(args.folder), {}
    for count in (16, 64):
        requests = requests_of(texts(4 * count, 32), args.tokens)
        asked = {"method": method, "model": str(args.folder)}
        plain, drafting = (engine_of(PYDOC, way, max_num_seqs=count) for way in (None, asked))
        found[str(count)] = compare(plain, drafting, requests, rounds=7)
    keep(args, f"heads {method} batches", found)


def method_of(folder: Path) -> str:
    """Which heads they are."""
    return "eagle3" if "eagle_config" in json.loads((folder / "config.json").read_text()) else "medusa"


def keep(args: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    """Print what was found and keep it."""
    rows = json.loads(args.output.read_text())
    rows[name] = {"command": f"python -m benchmarks.speculation.heads {args.what} {args.folder.name}"} | found
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows[name], indent=1))


WORK = {"train": train, "measure": measure, "batches": batches}


def main() -> None:
    """Train or measure."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WORK)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", choices=("eagle3", "medusa"), default="eagle3")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=RESULTS / "speculation.json")
    args = parser.parse_args()
    WORK[args.what](args)


if __name__ == "__main__":
    main()
