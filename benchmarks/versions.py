"""quire beside another build of itself: the same shapes and options, interleaved, medians and ratios.

    python benchmarks/versions.py OTHER_CHECKOUT --shape llama-1b --options '{"quantization": "int4"}'

OTHER_CHECKOUT is a checkout that was built (`make build`); its own environment and its own peer_quire.py run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from peers import MEASURES, USUAL, Command, Process, measure, quire_process
from shapes import SHAPES, write_config


def main() -> None:
    """Print a line for every measure of every set of options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--options", type=json.loads, nargs="+", default=[{"quantization": "int4"}], help="as JSON")
    parser.add_argument("--measure", choices=MEASURES, nargs="+", default=USUAL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / args.shape
        write_config(args.shape, folder)
        for options in args.options:
            own = {"threads": args.threads, **options}
            script = args.other.absolute() / "benchmarks" / "peer_quire.py"
            words = [str(args.other.absolute() / ".venv" / "bin" / "python"), str(script), str(folder), json.dumps(own)]
            new, old = (
                quire_process(folder, own, Path(work) / "new"),
                Process("other", Command(words), Path(work) / "old"),
            )
            for what in args.measure:
                row = measure(new, old, what, args.rounds)
                rates = f"{row['quire_rate']:8.1f} / {row['peer_rate']:8.1f}"
                print(f"{args.shape} {json.dumps(options)} {what}: {rates}  ratio {row['ratio']:.3f}", flush=True)
            new.close()
            old.close()


if __name__ == "__main__":
    main()
